"""Distributed training: two processes, one posterior, every example counted once.

DistributedSampler pads 1003 examples to 1004 by repeating one, which is fine for training and wrong for a posterior. So
`fit_posterior` shards the data itself, and adds the ranks' sums up once. Here both ranks are processes on this machine.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import afield
from afield.experiment.launch import disconnect


def data(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    centers = torch.stack([(2.0 * y).cos(), (2.0 * y).sin()], dim=1)
    return TensorDataset(centers + 0.3 * torch.randn(count, 2, generator=generator), y)


def worker(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = afield.sngp(nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)))
    replica = nn.parallel.DistributedDataParallel(model)
    train, held_out = data(1003, seed=0), data(600, seed=1)
    sampler = DistributedSampler(train)
    optimizer = torch.optim.Adam(replica.parameters(), lr=0.01)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(train, batch_size=64, sampler=sampler):
            optimizer.zero_grad()
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
    counted = afield.fit_posterior(model, DataLoader(train, batch_size=64))  # each rank passes the whole loader
    afield.calibrate(model, DataLoader(held_out, batch_size=256))  # all of it on every rank: the same answer
    print(f"rank {rank}: trained on {len(sampler)} of {len(train)} examples, {counted} in the posterior", flush=True)
    shared = model.predict(held_out.tensors[0])
    dist.barrier()
    disconnect()  # dist.destroy_process_group(), and time for gloo's threads to let go
    if rank == 0:  # the same weights, fitted by one process
        afield.fit_posterior(model, DataLoader(train, batch_size=64))
        afield.calibrate(model, DataLoader(held_out, batch_size=256))
        alone = model.predict(held_out.tensors[0])
        error = (shared.variance / alone.variance - 1).abs().max()
        print(f"variances over those of a single process: 1 +- {error:.0e}")
        far = model.predict(torch.tensor([[6.0, 6.0], [-9.0, 2.0]]))
        print(f"p-values far from the data: {far.p_value.tolist()}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (f"{folder}/store",), nprocs=2)

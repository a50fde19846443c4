"""Two processes train, fit, predict and evaluate as one does; one that dies is reported, and the run goes on."""

import dataclasses
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

pytest.importorskip("lightning.fabric", reason='needs pip install "afield[lightning]"')

import afield
from afield.bounds.spectral import bound_of
from afield.cli.main import main
from afield.errors import NoBetterThanGuessing
from afield.experiment import distributed, launch, run_folder
from afield.experiment.config import Config
from afield.experiment.launch import Processes, connect, free_port
from afield.experiment.one_run import run
from afield.experiment.run_folder import Run
from afield.experiment.training import ShareSampler, batches, fit
from afield.methods import METHODS, Method
from afield.settings import Settings
from afield.tasks import TASKS, Task
from afield.tasks.task import Recipe, presets

N = 1003
SETTINGS = Settings(
    epochs=2, batch_size=167, num_random_features=32, learning_rate=0.01
)  # the last batch has 1 example
BOTH = (0, 1)
LIGHTNINGS_OWN = ".*LeafSpec"


class Small(nn.Sequential):
    """A convolution and a matrix, so that bounds have both kinds of vectors."""

    out_features = 8

    def __init__(self, *more: nn.Module) -> None:
        super().__init__(
            nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 8), *more
        )


class Noisy(Small):
    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(8), nn.Dropout(0.3))


def data(count: int, seed: int, shift: float = 0.0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=generator, dtype=torch.float64) + shift
    return TensorDataset(x, (x[:, 0] > x[:, 1]).long() + (x[:, 2] > 1).long())


def doubled(method: Method) -> Method:
    """In float64."""
    return dataclasses.replace(method, build=lambda *args: method.build(*args).double(), trained_as=None)


SNGP64 = doubled(METHODS["sngp"])
DIES_AT: list[int] = []


def mortal(batch: Any, settings: Settings) -> Any:
    """Training batches as they are; a process that is to die does so at one of them."""
    if DIES_AT:
        DIES_AT[0] -= 1
        if DIES_AT[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return batch


def tiny(seed: int, preset: str) -> Task:
    ood = {"far": data(300, 3, 5.0)}
    return Task("tiny", data(N, 0), data(200, 1), data(1500, 2), ood, 3, Small, augment=mortal)


def shuffled(count: int = N, backbone: Callable[[], nn.Module] = Small) -> Task:
    cut = TensorDataset(*(t[:count] for t in data(N, 0).tensors))
    return dataclasses.replace(tiny(0, ""), train=cut, backbone=backbone, settings=SETTINGS)


def in_order() -> Task:
    return dataclasses.replace(shuffled(), order=lambda size, generator: torch.arange(N).split(size))


class Listed(torch.utils.data.Dataset[Any]):
    """A data set that gives one example at a time."""

    def __init__(self, data: TensorDataset) -> None:
        self.data, self.targets = data, data.tensors[-1]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def listed() -> Task:
    task = shuffled(100)
    return dataclasses.replace(task, train=Listed(task.train))  # type: ignore[arg-type]


TRAININGS: dict[str, Callable[[Any], nn.Module]] = {
    "shuffled": lambda fabric: fit(shuffled(), SNGP64, fabric=fabric),
    "in order": lambda fabric: fit(in_order(), SNGP64, optimizer="sgd", weight_decay=0.1, fabric=fabric),
    "one example": lambda fabric: fit(shuffled(1), SNGP64, length_scale=1.0, fabric=fabric),
    "penalty": lambda fabric: fit(shuffled(50), doubled(METHODS["duq-gp"]), fabric=fabric, epochs=1),
    "dense": lambda fabric: fit(
        listed(), doubled(METHODS["dnn-sn"]), fabric=fabric, batch_size=32, head_learning_rate=0.1
    ),
}
CASES = {"ddp": list(TRAININGS), "fsdp": ["in order", "dense"]}
EACH = [(training, name) for name, trainings in CASES.items() for training in trainings]
CONFIG = {"task": "tiny", "method": "sngp64", "preset": "small"}


class Stop(Exception):
    pass


def stopped_and_resumed(fabric: Any, file: Path) -> tuple[nn.Module, nn.Module]:
    """A model trained without a break and one with, by masks of each rank's own."""

    def stop(epoch: int, loss: float) -> None:
        fabric.barrier()  # until the first process has written the checkpoint
        raise Stop

    make = partial(fit, shuffled(100, Noisy), SNGP64, batch_size=30, fabric=fabric)
    whole = make()
    with pytest.raises(Stop):
        make(checkpoint=file, on_epoch=stop)
    torch.manual_seed(123)
    return whole, make(checkpoint=file)


def worker(rank: int, folder: Path, port: str) -> None:
    """Everything that two processes do, on one of them; what came out is in files."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", LIGHTNINGS_OWN)
    warnings.simplefilter("ignore", NoBetterThanGuessing)  # trainings of an epoch or two
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ddp = connect(Processes(2, accelerator="cpu"))
    assert (ddp.global_rank, ddp.world_size) == (rank, 2)
    fsdp = connect(Processes(2, accelerator="cpu", strategy="fsdp"))
    fsdp.strategy._parallelize_fn = partial(launch.shard, block_size=1)  # blocks of their own, though they are small
    results: dict[str, Any] = {}
    for name, strategy in (("ddp", ddp), ("fsdp", fsdp)):
        for training in CASES[name]:
            results[f"{training}, {name}"] = TRAININGS[training](strategy).state_dict()
        pair = stopped_and_resumed(strategy, folder / f"{name}.pt")
        results[f"whole, {name}"], results[f"resumed, {name}"] = (m.state_dict() for m in pair)
    losses: list[float] = []
    fit(shuffled(), doubled(METHODS["dnn"]), fabric=ddp, on_epoch=lambda _, loss: losses.append(loss))
    results["losses"] = losses
    with pytest.raises(ValueError, match="fitted in one pass, not by gradient steps"):
        fit(shuffled(), METHODS["frozen-gp"], fabric=ddp)
    with pytest.raises(ValueError, match=r"FSDP gives weights back after every pass, .* use --strategy ddp"):
        TRAININGS["penalty"](fsdp)
    with pytest.raises(ValueError, match="written without --strategy fsdp"):
        fit(shuffled(100, Noisy), SNGP64, fabric=fsdp, checkpoint=folder / "ddp.pt", batch_size=30)
    epochs: list[int] = []
    run(Config.of(**CONFIG), folder / "two", fabric=ddp, on_epoch=lambda epoch, *_: epochs.append(epoch))
    results["epochs"] = epochs
    results["metrics"] = dict(run(Config.of(**CONFIG), folder / "two", fabric=ddp).metrics)  # is there
    try:
        run(Config.of(**CONFIG, ridge=2.0), folder / "two", fabric=ddp)
    except ValueError as error:
        results["refused"] = (type(error).__name__, str(error))
    torch.save(results, folder / f"{rank}.pt")
    if rank == 1:
        DIES_AT.append(10)  # in the second epoch of seven steps
    with pytest.raises(ConnectionError) as lost:
        run(Config.of(**CONFIG), folder / "killed", fabric=ddp)
    (folder / "lost").write_text(str(lost.value))


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    TASKS["tiny"], METHODS["sngp64"] = Recipe(tiny, presets(SETTINGS)), SNGP64
    yield
    del TASKS["tiny"], METHODS["sngp64"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    with warnings.catch_warnings():  # forked: what this process has imported they have, too
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        two = mp.start_processes(worker, (folder, str(free_port())), nprocs=2, start_method="fork", join=False)
    with pytest.raises(mp.ProcessExitedException) as died:
        two.join(grace_period=60)
    assert two.processes[0].exitcode == 0
    assert (died.value.error_index, died.value.signal_name) == (1, "SIGKILL")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{rank}.pt") for rank in BOTH]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(Config.of(**CONFIG), tmp_path_factory.mktemp("one"))


def bitwise(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("training", "strategy"), EACH)
def test_two_processes_make_the_model_of_one(training: str, strategy: str, results: list[dict[str, Any]]):
    """Weights, length scale, vectors, posterior, calibration; uneven batches, and ranks without examples."""
    alone = TRAININGS[training](None).state_dict()
    for rank in BOTH:
        ours = results[rank][f"{training}, {strategy}"]
        assert ours.keys() == alone.keys()
        for name, tensor in alone.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("training", "strategy"), [*EACH, ("whole", "ddp"), ("whole", "fsdp")])
def test_ranks_agree_to_the_bit(training: str, strategy: str, results: list[dict[str, Any]]):
    name = f"{training}, {strategy}"
    assert bitwise(results[0][name], results[1][name])


def test_bounds_were_at_work(results: list[dict[str, Any]]):
    """Else vectors would agree because nothing moved them."""
    model = SNGP64.build(Small, 3, SETTINGS)
    model.load_state_dict(results[1]["shuffled, ddp"])
    bounds = [b for m in model.modules() if (b := bound_of(m)) is not None]
    assert len(bounds) == 2
    for b in bounds:
        assert int(b.num_steps) == 7 * SETTINGS.epochs
        assert b.u.numel() > 1


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_stopped_training_ends_where_it_would_have_ended(strategy: str, results: list[dict[str, Any]]):
    for rank in BOTH:
        assert bitwise(results[rank][f"resumed, {strategy}"], results[rank][f"whole, {strategy}"])


def test_ranks_draw_masks_of_their_own(folder: Path):
    states = torch.load(folder / "ddp.pt")["random"]
    assert len(states) == 2
    assert not torch.equal(states[0]["cpu"], states[1]["cpu"])


def test_loss_is_the_mean_over_all_ranks(results: list[dict[str, Any]]):
    losses: list[float] = []
    fit(shuffled(), doubled(METHODS["dnn"]), on_epoch=lambda _, loss: losses.append(loss))
    assert results[0]["losses"] == results[1]["losses"] == pytest.approx(losses, rel=1e-12)


def test_metrics_and_predictions_are_those_of_one_process(folder: Path, one: Run, results: list[dict[str, Any]]):
    two = run_folder.read(folder / "two" / "tiny" / "sngp64" / "0")
    assert results[0]["metrics"] == results[1]["metrics"] == dict(two.metrics)
    assert two.metrics == pytest.approx(one.metrics, abs=1e-9)
    assert two.parts == one.parts
    for part in one.parts:
        ours, theirs = two.prediction(part), one.prediction(part)
        # Validation scores are themselves what p-values compare with: the last digit decides.
        for name in ("logits", "variance", "probs", *["p_value"] * (part != "val")):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-6, atol=1e-9)
    assert {f.name for f in two.folder.iterdir()} == {f.name for f in one.folder.iterdir()}
    assert (two.environment["processes"], one.environment["processes"]) == (2, 1)


def test_the_first_process_alone_reports_and_refuses(results: list[dict[str, Any]]):
    assert results[0]["epochs"] == [1, 2]
    assert results[1]["epochs"] == []
    assert results[0]["refused"][0] == "ValueError"
    assert results[1]["refused"] == ("Elsewhere", results[0]["refused"][1])
    assert "ridge = 1.0 there, 2.0 now" in results[0]["refused"][1]


def test_a_killed_rank_is_an_error_and_the_run_goes_on(folder: Path, one: Run):
    assert "Lost another process of this training: it was killed" in (folder / "lost").read_text()
    assert "the same command goes on" in (folder / "lost").read_text()
    left = folder / "killed" / "tiny" / "sngp64" / "0"
    assert torch.load(left / run_folder.CHECKPOINT)["epoch"] == 1
    epochs: list[int] = []  # with one process: two only draw other masks, and here there are none
    resumed = run(Config.of(**CONFIG), folder / "killed", on_epoch=lambda epoch, *_: epochs.append(epoch))
    assert epochs == [2]
    assert resumed.metrics == pytest.approx(one.metrics, abs=1e-9)


# Shares


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), max_size=4), st.integers(1, 5))
def test_shares_part_every_batch_and_weights_undo_uneven_ones(whole: list[list[int]], world: int):
    shares = [list(ShareSampler(whole, rank, world)) for rank in range(world)]
    for i, batch in enumerate(whole):
        parts = [own if weight else [] for own, weight in (share[i] for share in shares)]
        assert sorted(itertools.chain(*parts)) == sorted(batch)
        assert all(own for own, _ in (share[i] for share in shares))
        values = [sum(own) / len(own) * weight for own, weight in (share[i] for share in shares)]
        assert sum(values) / world == pytest.approx(sum(batch) / len(batch))


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_turns_at_prediction_are_the_batches_of_one_process(count: int, size: int, world: int, tensors: bool):
    data: Any = TensorDataset(torch.arange(count))
    data = data if tensors else Listed(data)
    whole = [batch[0].tolist() for batch in batches(data, size)]
    turns = [[b[0].tolist() for b in batches(data, size, rank=rank, world=world)] for rank in range(world)]
    assert turns == [whole[rank::world] for rank in range(world)]


def test_batches_go_to_a_device():
    data = TensorDataset(torch.randn(5, 2), torch.arange(5))
    for whole in (data, Listed(data)):
        for x, y in batches(whole, 2, device=torch.device("meta")):
            assert x.is_meta
            assert y.is_meta


# Without processes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "0"], "devices and num_nodes must be at least 1, got 0 and 1"),
        (["--devices", "2", "--jobs", "2"], "--jobs and --cluster spread runs over processes, --devices one run"),
        (["--num-nodes", "2"], "2 nodes have to find each other: .* or set MASTER_ADDR, MASTER_PORT and NODE_RANK"),
    ],
)
def test_what_cannot_be_started_says_so(arguments: list[str], message: str, tmp_path: Path):
    with pytest.raises(SystemExit, match=f"^afield: .*{message}"):
        main(["train", "two-moons", "--out", str(tmp_path), *arguments])
    assert not list(tmp_path.iterdir())


def test_other_strategies_are_refused():
    class Other:
        strategy = object()

    with pytest.raises(ValueError, match=r"expects a Fabric with DDPStrategy, .* got object\."):
        distributed.is_sharded(Other())  # type: ignore[arg-type]


def test_without_lightning_one_process_works_and_two_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("lightning", "lightning.fabric"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("distributed", "training", "one_run", "launch"):
        monkeypatch.setattr(afield.experiment, name, getattr(afield.experiment, name))  # comes back
        monkeypatch.delitem(sys.modules, f"afield.experiment.{name}")
        importlib.import_module(f"afield.experiment.{name}")
    sys.modules["afield.experiment.one_run"].run(Config.of(**CONFIG, epochs=1), tmp_path)
    with pytest.raises(SystemExit, match=r'^afield: Several processes .* pip install "afield\[lightning\]"'):
        main(["train", "two-moons", "--devices", "2", "--out", str(tmp_path)])


# As a user starts it

TRAIN = ("train", "two-moons", "--preset", "smoke", "--num-random-features", "64", "--method", "dnn-gp")


def outcome(folder: Path) -> dict[str, float]:
    return json.loads((folder / "two-moons" / "dnn-gp" / "0" / "metrics.json").read_text())["metrics"]


def shell(*command: str, **environment: str) -> "subprocess.Popen[str]":
    clean = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=clean | {"OMP_NUM_THREADS": "1"} | environment, **pipes)


CLI = (sys.executable, "-m", "afield.cli.main")
BIN = Path(sys.executable).parent


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        (*CLI, *TRAIN, "--devices", "2"),
        (str(BIN / "afield"), *TRAIN, "--devices", "2"),
        (str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m", "afield.cli.main", *TRAIN),
    ],
    ids=["module", "script", "torchrun"],
)
def test_one_folder_and_one_table_however_it_is_started(command: tuple[str, ...], tmp_path: Path):
    process = shell(*command, "--out", str(tmp_path), "--accelerator", "cpu")
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert output.count("accuracy/clean") == 1
    assert [r.environment["processes"] for r in run_folder.find(tmp_path)] == [2]
    assert "Traceback" not in errors


@pytest.mark.slow
def test_slurm(tmp_path: Path):
    port = str(free_port())
    job = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "afield", "SLURM_JOB_ID": "1234"}
    job |= {"SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in BOTH]
    command = (*CLI, *TRAIN, "--devices", "2", "--accelerator", "cpu", "--out", str(tmp_path))
    processes = [shell(*command, **job, **rank) for rank in ranks]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert ["accuracy/clean" in out for out, _ in outputs] == [True, False]
    assert [r.environment["processes"] for r in run_folder.find(tmp_path)] == [2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_from_outside_the_same_command_goes_on(tmp_path: Path):
    command = (*CLI, *TRAIN, "--epochs", "40", "--devices", "2", "--accelerator", "cpu")
    whole = shell(*command, "--out", str(tmp_path / "whole"))
    process = shell(*command, "--out", str(tmp_path / "killed"))
    checkpoint = tmp_path / "killed" / "two-moons" / "dnn-gp" / "0" / "checkpoint.pt"
    deadline = time.monotonic() + 200
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "afield: " in errors
    assert "the same command goes on" in errors
    assert "Traceback" not in errors
    again = shell(*command, "--out", str(tmp_path / "killed"))
    assert again.wait(timeout=300) == whole.wait(timeout=300) == 0
    for p in (again, whole):
        p.communicate()
    lines = (checkpoint.parent / "log.jsonl").read_text().splitlines()
    epochs = [json.loads(line).get("epoch") for line in lines]
    assert epochs == [*range(1, 41), None]
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")


def ranks_of(parent: int) -> list[int]:
    """The processes that a command has started, first to last, without Python's resource tracker."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]

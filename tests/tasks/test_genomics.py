"""Genomics: the network against its definition, FASTA files, and the two tasks."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from afield.backbones.genomics_cnn import GenomicsCNN
from afield.bounds.spectral import bounds_of, operator_norm
from afield.experiment.training import fit
from afield.methods import METHODS
from afield.tasks.genomics import RECIPE, REN2019, cut_reads, either_strand, read_fasta, reverse_complement
from tests.conftest import data_file

BASES = "ACGT"


def network(**changes: float) -> GenomicsCNN:
    return GenomicsCNN(**{"filters": 6, "width": 5, "dense": 4, **changes}).double()  # type: ignore[arg-type]


def dense_way(net: GenomicsCNN, codes: Tensor) -> Tensor:
    """As the paper has it: convolution, relu, maximum over all positions."""
    one_hot = F.one_hot(codes.long(), 4).double().transpose(1, 2)
    return F.relu(net.dense(F.relu(net.conv(one_hot)).amax(2)))


# The network


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 40), length=st.integers(5, 40), seed=st.integers(0, 99))
def test_values_and_gradients_are_those_of_the_dense_computation(count: int, length: int, seed: int):
    torch.manual_seed(seed)
    net = network(dropout=0.0)
    codes = torch.randint(4, (count, length), dtype=torch.uint8)
    slope = torch.randn(count, 4, dtype=torch.float64)
    found = []
    for forward in (net, lambda x: dense_way(net, x)):
        net.zero_grad()
        output = forward(codes)
        (output * slope).sum().backward()
        found.append((output.detach(), [p.grad.clone() for p in net.parameters() if p.grad is not None]))
    (h, gradients), (expected, wanted) = found
    torch.testing.assert_close(h, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradients, wanted, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(net(codes), expected, rtol=1e-10, atol=1e-12)


def test_a_repeating_read_has_the_dense_gradient_as_well():
    """All positions tie: whichever is taken picks the same weights."""
    net = network(dropout=0.0)
    codes = torch.zeros(3, 30, dtype=torch.uint8)
    (wanted,) = torch.autograd.grad(dense_way(net, codes).sum(), net.conv.weight)
    (found,) = torch.autograd.grad(net(codes).sum(), net.conv.weight)
    torch.testing.assert_close(found, wanted)


def test_max_response_is_the_best_match_along_the_read(generator: torch.Generator):
    net = network()
    codes = torch.randint(4, (3, 12), generator=generator)
    assert net.conv.bias is not None
    weight, bias = net.conv.weight.detach(), net.conv.bias.detach()
    for read, found in zip(codes, net.max_response(codes).detach(), strict=True):
        for f in range(6):
            best = max(sum(float(weight[f, read[p + k], k]) for k in range(5)) for p in range(8))
            assert float(found[f]) == pytest.approx(best + float(bias[f]), rel=1e-12)


def test_convolution_and_dense_layer_are_bounded():
    model = METHODS["sngp"].build(lambda: GenomicsCNN(filters=8, width=5, dense=8), 3, RECIPE.settings_for("small"))
    model(torch.randint(4, (2, 50)))
    bounded = {name: layer for name, layer in model.named_modules() if bounds_of(layer)}
    assert set(bounded) == {"net.0.conv", "net.0.dense"}
    for layer in bounded.values():
        with torch.no_grad():
            next(iter(layer.parametrizations.weight.parameters())).mul_(1000)  # type: ignore[union-attr]
    for _ in range(30):
        model(torch.randint(4, (2, 50))).sum().backward()  # power iteration, once for each change of the weight
        with torch.no_grad():
            for layer in bounded.values():
                next(iter(layer.parametrizations.weight.parameters())).mul_(1.0)  # type: ignore[union-attr]
    for layer in bounded.values():
        assert operator_norm(layer) == pytest.approx(RECIPE.settings_for("small").bound, rel=0.02)


@pytest.mark.parametrize("codes", [torch.zeros(2, 4, dtype=torch.uint8), torch.zeros(2, 50), torch.zeros(50).long()])
def test_reads_are_rows_of_codes(codes: Tensor):
    with pytest.raises(ValueError, match=r"expects reads \(N, T\) of base codes 0 to 3, T at least 5, got torch"):
        network()(codes)


# FASTA


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(alphabet="ACGTacgtNRY", max_size=200), min_size=1, max_size=4),
    width=st.integers(1, 80),
    zipped=st.booleans(),
)
def test_fasta_round_trip(texts: list[str], width: int, zipped: bool, tmp_path: Path):
    body = ""
    for i, text in enumerate(texts):
        lines = [text[at : at + width] for at in range(0, len(text), width)]
        body += "\n".join([f">sequence {i} of a genome", *lines]) + "\n\n"
    path = tmp_path / ("x.fa.gz" if zipped else "x.fa")
    path.write_bytes(gzip.compress(body.encode()) if zipped else body.encode())
    found = list(read_fasta(path))
    assert [header for header, _ in found] == [f"sequence {i} of a genome" for i in range(len(texts))]
    for text, (_, codes) in zip(texts, found, strict=True):
        assert codes.dtype == torch.uint8
        assert codes.tolist() == [BASES.find(letter) % 5 for letter in text.upper()]


def test_fasta_with_windows_line_ends_and_comments(tmp_path: Path):
    path = tmp_path / "x.fa"
    path.write_bytes(b"; a comment\r\n>one\r\nAC\r\nGU\r\n")
    ((header, codes),) = read_fasta(path)
    assert (header, codes.tolist()) == ("one", [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("body", "message"), [(b"", "it is empty"), (b"ACGT\n", "expected a header that starts with '>', got b'ACGT'")]
)
def test_what_is_no_fasta_file_says_so(body: bytes, message: str, tmp_path: Path):
    path = tmp_path / "x.fa"
    path.write_bytes(body)
    with pytest.raises(ValueError, match=message):
        list(read_fasta(path))


@given(st.text(alphabet="01234", max_size=80), st.integers(1, 12), st.integers(1, 12))
def test_cut_reads_takes_exactly_the_reads_without_unknown_bases(text: str, length: int, step: int):
    expected = [text[at : at + length] for at in range(0, len(text) - length + 1, step)]
    expected = [read for read in expected if "4" not in read]
    reads = cut_reads(torch.tensor([int(c) for c in text], dtype=torch.uint8), length=length, step=step)
    assert reads.shape == (len(expected), length)
    assert ["".join(map(str, read)) for read in reads.tolist()] == expected


def test_reverse_complement():
    reads = torch.tensor([[0, 0, 1, 2]], dtype=torch.uint8)  # AACG
    assert reverse_complement(reads).tolist() == [[1, 2, 3, 3]]  # CGTT
    assert torch.equal(reverse_complement(reverse_complement(reads)), reads)


def test_half_of_the_training_reads_come_from_the_other_strand(generator: torch.Generator):
    reads, genera = torch.randint(4, (2000, 30), dtype=torch.uint8, generator=generator), torch.arange(2000)
    turned, same = either_strand((reads, genera))
    assert turned.dtype == torch.uint8
    assert torch.equal(same, genera)
    other, kept = ((turned == as_before).all(1) for as_before in (reverse_complement(reads), reads))
    assert bool((other ^ kept).all())  # no read of 30 random bases is its own complement
    assert 900 < int(other.sum()) < 1100  # 4.5 standard deviations
    again, _ = either_strand((reads, genera))
    assert not torch.equal(again, turned)


# The tasks


def test_reads_of_ten_genera():
    data_file("genomics/bacteria10_id.npz")
    task = RECIPE(0)
    parts = (task.train, task.val, task.test, task.shifted["new-strains"])
    assert [part.tensors[1].bincount().tolist() for part in parts] == [[n] * 10 for n in (4000, 1000, 1000, 1000)]
    assert task.ood["genera"].tensors[0].shape == (8000, 250)
    assert int(task.train.tensors[0].max()) == 3
    assert RECIPE.settings_for("paper").bound == 10.0
    # A read in two parts would be answered from memory. Homologous regions leave a handful.
    seen = {read.tobytes() for read in task.train.tensors[0].numpy()}
    for part in parts[1:]:
        assert sum(read.tobytes() in seen for read in part.tensors[0].numpy()) < 0.002 * len(part)


def test_smoke_trains_on_a_few_reads_of_every_genus():
    data_file("genomics/bacteria10_id.npz")
    task = RECIPE(0, "smoke")
    assert len(task.train) == 2000
    assert int(task.train.tensors[1].bincount().min()) > 150
    model = fit(task, METHODS["sngp"])
    prediction = METHODS["sngp"].predict(model, task.test.tensors[0])
    accuracy = float((prediction.labels == task.test.tensors[1]).double().mean())
    assert accuracy > 0.15  # one in ten by chance, with a standard error of .013


def test_records_of_ren_et_al():
    data_file("genomics/ren2019_toy.npz")
    task, other = REN2019(0), REN2019(1)
    assert (len(task.train), len(task.val), len(task.test)) == (1001, 501, 500)
    assert len(task.ood["genera"]) == 1001
    both = torch.cat([task.val.tensors[0], task.test.tensors[0]])
    assert len(both.unique(dim=0)) == len(np.load(data_file("genomics/ren2019_toy.npz"))["x_in_val"])
    assert not torch.equal(task.val.tensors[0], other.val.tensors[0])

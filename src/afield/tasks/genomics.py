"""Reads of bacterial DNA: which genus is it from, and is it from any of the known ones at all?

`genomics` has the form of the paper's task (Ren et al. 2019) on data of our own: reads of 250 bases from ten genera;
OOD are reads of eight other genera, two of them close relatives of a known one. Shifted are reads of known genera, but
of strains that were not trained on. Training, validation and test reads come from separate regions of the same
genomes; what is alike in two strains can lie in different regions of each, so that a few reads stand in two parts.

`genomics-ren2019` are the genuine records that Ren et al. published as an example: 1,001 reads to train, too few for
a good classifier; as many again, cut by the seed into validation and test; OOD 1,001 reads of 60 genera. The paper's
full set is not public as a file.

preset   filters, dense   settings
small    512, 512         Adam 1e-3, 20 epochs, bound 2.5: chosen on validation data, results/choices
smoke    64, 64           a twentieth of the data, 2 epochs
paper    2000, 2000       Adam 1e-4 at batch size 128, constant. The paper takes the best of a million steps on
                          validation data; we have less data and no such choice, and stop after 30,000

Only `mc-dropout` and its kin have dropout, at the paper's rate of .1. The Gaussian-process layer learns at 2e-2, also
by that choice. Training reads are turned to the other strand with probability a half: a departure from the paper, whose
set is far larger. Bases are coded A0 C1 G2 T3. `read_fasta` and `cut_reads` make reads of genomes of your own.
"""

import gzip
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from afield.backbones.genomics_cnn import GenomicsCNN
from afield.settings import Settings
from afield.tasks.data import arrays
from afield.tasks.task import Recipe, Task, presets

READ = 250
UNKNOWN = 4  # N and the other letters that stand for more than one base
_CODES = np.full(256, UNKNOWN, dtype=np.uint8)
for _code, _letters in enumerate(("Aa", "Cc", "Gg", "TtUu")):
    _CODES[[ord(letter) for letter in _letters]] = _code
_SIZES = {"smoke": 64, "small": 512, "paper": 2000}
_SMOKE_STEP = 20  # smoke takes one read of this many


def genomics(seed: int, preset: str) -> Task:
    """The same data for every seed: the regions are fixed."""
    data, ood = arrays("genomics/bacteria10_id.npz"), arrays("genomics/bacteria_ood_dev8.npz")
    step = _SMOKE_STEP if preset == "smoke" else 1

    def part(name: str) -> TensorDataset:
        return _dataset(data[f"x_{name}"][::step], data[f"y_{name}"][::step])

    return Task(
        "genomics",
        part("train"),
        part("val"),
        part("test"),
        ood={"genera": TensorDataset(torch.from_numpy(ood["x"][::step]))},
        num_outputs=len(data["classes"]),
        backbone=_backbone(preset),
        shifted={"new-strains": part("test_newstrain")},
        augment=lambda batch, _: either_strand(batch),
    )


def ren2019(seed: int, preset: str) -> Task:
    """The seed cuts the published validation reads into validation and test."""
    data = arrays("genomics/ren2019_toy.npz")
    order = np.random.default_rng(seed).permutation(len(data["y_in_val"]))
    val, test = np.array_split(order, 2)
    return Task(
        "genomics-ren2019",
        _dataset(data["x_in_tr"], data["y_in_tr"]),
        _dataset(data["x_in_val"][val], data["y_in_val"][val]),
        _dataset(data["x_in_val"][test], data["y_in_val"][test]),
        ood={"genera": TensorDataset(torch.from_numpy(data["x_ood_val"]))},
        num_outputs=int(data["y_in_tr"].max()) + 1,
        backbone=_backbone(preset),
        augment=lambda batch, _: either_strand(batch),
    )


def read_fasta(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Header and base codes (T,) of every sequence of a FASTA file, .gz or not; 4 where the base is not known."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        header: str | None = None
        lines: list[bytes] = []
        for line in _lines(file):
            if line.startswith(b">"):
                if header is not None:
                    yield header, _encode(lines)
                header, lines = line[1:].decode("utf-8", "replace").strip(), []
            elif header is None:
                raise ValueError(
                    f"{path} is not a FASTA file: expected a header that starts with '>', got {line[:20]!r}."
                )
            else:
                lines.append(line)
        if header is None:
            raise ValueError(f"{path} is not a FASTA file: it is empty.")
        yield header, _encode(lines)


def cut_reads(codes: Tensor, *, length: int = READ, step: int = READ) -> Tensor:
    """Reads (N, length) every `step` bases of a sequence (T,), without those that hold an unknown base."""
    if len(codes) < length:
        return codes.new_zeros(0, length)
    reads = codes.unfold(0, length, step)
    return reads[(reads < UNKNOWN).all(1)]


def reverse_complement(reads: Tensor) -> Tensor:
    """The same reads (N, T) as the other strand has them: A and T, C and G change places, from the end."""
    return 3 - reads.flip(1)


def either_strand(batch: Any) -> tuple[Tensor, Tensor]:
    """Half of the reads, drawn at random, as the other strand has them: the genus is the same."""
    reads, genera = batch
    other = torch.rand(len(reads), 1, device=reads.device) < 0.5
    return torch.where(other, reverse_complement(reads), reads), genera


def _lines(file: Iterable[bytes]) -> Iterator[bytes]:
    return (line for raw in file if (line := raw.strip()) and not line.startswith(b";"))


def _encode(lines: list[bytes]) -> Tensor:
    letters = np.frombuffer(b"".join(lines), dtype=np.uint8)
    return torch.from_numpy(_CODES[letters])


def _dataset(x: np.ndarray, y: np.ndarray) -> TensorDataset:
    return TensorDataset(torch.from_numpy(x), torch.from_numpy(y.astype(np.int64)))


def _backbone(preset: str) -> partial[GenomicsCNN]:
    size = _SIZES[preset]
    return partial(GenomicsCNN, filters=size, dense=size)


SMALL = Settings(epochs=20, batch_size=128, learning_rate=1e-3, bound=2.5, dropout=0.1)
PAPER = replace(SMALL, epochs=96, learning_rate=1e-4, schedule="constant", bound=10.0)
ADAPTED = {"*gp*": {"head_learning_rate": 2e-2}}
SMOKE = replace(SMALL, epochs=2, learning_rate=3e-3)
RECIPE, REN2019 = (Recipe(load, presets(SMALL, smoke=SMOKE, paper=PAPER), ADAPTED) for load in (genomics, ren2019))

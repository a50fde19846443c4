"""CLINC150 intents (Larson et al. 2019): 150 kinds of request to an assistant, and requests that are none of them.

The published split: 100 training, 20 validation and 30 test sentences an intent, 1000 out-of-scope sentences as OOD.
Out-of-scope sentences for training and validation are left alone: nothing is trained or chosen on them. Five
sentences of the published validation and test parts also stand in its training part; they stay, as in every result on
this set. Sentences are token ids (N, 32), padded at the end (the paper's maximum length), in order of length, so that
batches taken in order have little padding; `batches_by_length` does the same for shuffled ones.

preset   encoder     settings
small    MiniLM      six layers, fine-tuned for 5 epochs, a tenth of the words left out; its embeddings stay
smoke    MiniLM      a tenth of the data, one epoch
paper    BERT-base   the paper's: 40 epochs, 5e-5, decay .01, warm-up .1, 2048 features; from the hub, if not on disk

As in the authors' code there is a 151st output, which no sentence is trained on. The paper's NLL counts the
out-of-scope test sentences under it; ours is `nll/combined`, and `nll/clean` is of the intents alone.

As in the paper only the layer `pooler` is bounded. Departures: our encoder pools by the mean (see
`afield.backbones.transformer`); the output layer has a learning rate of its own, because it starts from nothing; the
posterior is exact, not a moving average, and its length scale comes from the data. The ridge of `paper` is the paper's
.001 as the authors' code has it: an average over examples with ridge r is a sum over N with ridge N r, and features
without sqrt(2 / D) make it N r / (D / 2), 15 / 1024. (By the formula of the appendix, an average of sums over batches
of 256 with sqrt(2 / D), it would be N r / 256, four times that.)
"""

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from afield.backbones.transformer import MAX_LENGTH, TransformerEncoder, encoder_source, tokenize
from afield.errors import DataDamaged
from afield.settings import Settings
from afield.tasks.data import find
from afield.tasks.task import Outline, Recipe, Task, presets

FILE = "clinc/data_full.json"
BERT = "google-bert/bert-base-uncased"
PARTS = ("train", "val", "test", "oos_test")
_POOL = 50  # batches whose examples are sorted by length together
Rows = Sequence[tuple[str, str]]


def clinc(seed: int, preset: str) -> Task:
    """The same data for every seed: the split is published."""
    rows = read(find(FILE))
    number = {intent: i for i, intent in enumerate(sorted({label for _, label in rows["train"]}))}
    if preset == "smoke":
        rows = {part: thin_out(rows[part], 10) for part in PARTS}
    source = encoder_source(BERT if preset == "paper" and "AFIELD_ENCODER" not in os.environ else None)
    ids, pad = tokenize([text for part in PARTS for text, _ in rows[part]], source)
    classes = torch.tensor([number.get(label, -1) for part in PARTS for _, label in rows[part]])
    sizes = [len(rows[part]) for part in PARTS]
    train, val, test, oos = (
        _sort_by_length(*part, pad) for part in zip(ids.split(sizes), classes.split(sizes), strict=True)
    )
    return Task(
        "clinc",
        train,
        val,
        test,
        ood={"oos": TensorDataset(oos.tensors[0])},
        num_outputs=len(number) + 1,
        ood_label=len(number),
        backbone=partial(TransformerEncoder, source, pad=pad),
        augment=lambda batch, settings: drop_words(batch, settings.word_dropout, pad),
        order=partial(batches_by_length, (train.tensors[0] != pad).sum(1)),
    )


def read(path: Path) -> Mapping[str, Rows]:
    """The parts of a CLINC file, each a list of (text, label)."""
    try:
        parts = {str(part): [(str(text), str(label)) for text, label in rows] for part, rows in _parse(path).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise DataDamaged(
            f"{path} is not a CLINC file: expected a JSON object of parts, each a list of [text, label] ({error})."
        ) from error
    if missing := [part for part in PARTS if not parts.get(part)]:
        raise DataDamaged(f"{path} lacks the part(s) {', '.join(missing)} of a CLINC file; it has {', '.join(parts)}.")
    known = {label for _, label in parts["train"]}
    if unknown := {label for part in ("val", "test") for _, label in parts[part]} - known:
        raise DataDamaged(f"{path} has labels in val or test that train lacks: {', '.join(sorted(unknown)[:5])}.")
    return parts


def thin_out(rows: Rows, factor: int) -> Rows:
    """The first of every `factor` rows of each label, at least one."""
    seen: dict[str, int] = defaultdict(int)
    kept = []
    for text, label in rows:
        if seen[label] % factor == 0:
            kept.append((text, label))
        seen[label] += 1
    return kept


def drop_words(batch: Any, rate: float, pad: int) -> tuple[Tensor, Tensor]:
    """Sentences in which words are padding with probability `rate`, all but the first and last token."""
    if not 0 <= rate < 1:
        raise ValueError(f"word_dropout expects a part from 0 to 1, 1 excluded, got {rate}.")
    ids, classes = batch
    if rate == 0:
        return ids, classes
    place = torch.arange(ids.shape[1], device=ids.device)
    inner = (place > 0) & (place < (ids != pad).sum(1, keepdim=True) - 1)
    return ids.masked_fill(inner & (torch.rand(ids.shape, device=ids.device) < rate), pad), classes


def batches_by_length(lengths: Tensor, size: int, generator: torch.Generator) -> list[Tensor]:
    """Shuffled batches of indices with examples of similar length in each, every example in exactly one.

    Examples are shuffled and cut into pools of 50 batches; a pool is sorted by length and cut into batches; the batches
    are shuffled. There are as many batches as without all this, one of them smaller if the size does not divide.
    """
    shuffled = torch.randperm(len(lengths), generator=generator)
    pools = [pool[lengths[pool].argsort(stable=True)] for pool in shuffled.split(_POOL * size)]
    batches = [batch for pool in pools for batch in pool.split(size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def _sort_by_length(ids: Tensor, classes: Tensor, pad: int) -> TensorDataset:
    order = (ids != pad).sum(1).argsort(stable=True)
    return TensorDataset(ids[order], classes[order])


def _untrained_bert() -> TransformerEncoder:
    """BERT-base in shape alone: what a training costs is known without its weights."""
    from transformers import BertConfig, BertModel

    return TransformerEncoder(body=BertModel(BertConfig()))


def _parse(path: Path) -> dict[str, list[list[str]]]:
    with path.open(encoding="utf-8") as file:
        return json.load(file)


SMALL = Settings(
    epochs=5,  # chosen on validation data, as are batch size, learning rate and word dropout: results/choices
    batch_size=32,
    learning_rate=5e-5,
    head_learning_rate=2e-2,
    optimizer="adamw",
    weight_decay=0.01,
    schedule="linear",
    warmup=0.1,
    bounded=("pooler",),
    num_random_features=2048,
    word_dropout=0.1,
    frozen=("*embed*",),  # seven percent of a step, and the words that no sentence has keep their place
    ridge=0.1,
)
PAPER = replace(SMALL, epochs=40, batch_size=256, word_dropout=0.0, frozen=(), ridge=15 / 1024)
RECIPE = Recipe(
    clinc,
    presets(SMALL, smoke=replace(SMALL, epochs=1), paper=PAPER),
    {
        "frozen-gp": {"num_random_features": 1024},  # fitting more takes twice the time for a tenth of a point
        # Layer norm, and the standard deviation .05 of the random directions in the authors' code, is a length scale of
        # 20. The paper's 2 has no effect there: it would be a tenth of all distances.
        "*-paper": {"geometry": "layer", "length_scale": 20.0, "ridge": 15 / 1024},
    },
    {"paper": Outline(15_000, 3000 + 4500 + 1000, torch.ones(1, MAX_LENGTH, dtype=torch.int64), _untrained_bert)},
)

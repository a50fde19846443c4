"""Intents with a frozen transformer: no gradient steps, and it says so when a sentence is none of its business.

Needs pip install "afield[text]" (MiniLM) and clinc/data_full.json (CLINC150) in the folder $AFIELD_DATA.
Run: python examples/intents_frozen_transformer.py [--intents 10] [--sentences 40]      at most 150 and 100
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import afield
from afield.backbones.transformer import TransformerEncoder, tokenize

options = argparse.ArgumentParser()
options.add_argument("--intents", type=int, default=10)
options.add_argument("--sentences", type=int, default=40, help="for training, of each intent")
options = options.parse_args()
torch.manual_seed(0)
clinc = json.loads(Path(os.environ["AFIELD_DATA"], "clinc", "data_full.json").read_text())
names = sorted({intent for _, intent in clinc["train"]})[:: max(1, 150 // options.intents)][: options.intents]


def loader(part: str, most: int) -> DataLoader:
    rows = [(text, intent) for name in names for text, intent in [r for r in clinc[part] if r[1] == name][:most]]
    classes = torch.tensor([names.index(intent) for _, intent in rows])
    return DataLoader(TensorDataset(tokenize([text for text, _ in rows])[0], classes), batch_size=64)


net = nn.Sequential(TransformerEncoder(), nn.Linear(384, len(names)))
model = afield.sngp(net, bound=None, freeze=True, ridge=0.1)  # the encoder stays as it is
started, train = time.perf_counter(), loader("train", options.sentences)
afield.fit_head(model, train)  # the best output weights, exactly, in one pass
afield.fit_posterior(model, train)
afield.calibrate(model, loader("val", 20))
print(f"{len(names)} intents, {len(train.dataset)} sentences, ready in {time.perf_counter() - started:.0f} s")

test, texts = loader("test", 10).dataset.tensors, [text for text, _ in clinc["oos_test"][:100]]
fresh, foreign = model.predict(test[0]), model.predict(tokenize(texts)[0])
right, accepted = (fresh.labels == test[1]).float().mean(), fresh.accept(0.05).float().mean()
print(f"fresh sentences: {right:.1%} right, {accepted:.1%} accepted")
print(f"out of scope:    {foreign.accept(0.05).float().mean():.1%} accepted\n")

own = [text for text, intent in clinc["test"] if intent == names[0]]
others = [*own[10:12], "why is the sky blue", *texts[-2:]]
p = model.predict(tokenize(others)[0])
print(f"{'sentence':60} {'intent':20} {'probability':>11} {'p-value':>8}")
for text, k, sure, value, ok in zip(others, p.labels, p.confidence, p.p_value, p.accept(0.05), strict=True):
    print(f"{text[:60]:60} {names[k]:20} {sure:11.2f} {value:8.3f}{'' if ok else '  I cannot help with that'}")

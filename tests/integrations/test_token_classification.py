"""Hugging Face's token classifiers: tokens are rows, padding and labels of -100 are neither observed nor counted."""

import warnings

import pytest
import torch

import afield
from afield.errors import NoBetterThanGuessing

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("how", ["sngp", "attach"])
def test_a_token_classifier_is_converted_as_it_is(how: str) -> None:
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3
    )
    net = transformers.AutoModelForTokenClassification.from_config(config)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 20, (48, 6), generator=generator)
    mask = (torch.arange(6) < torch.randint(2, 7, (48, 1), generator=generator)).long()
    labels = torch.where(mask.bool(), ids % 3, -100)
    labels[:, 0] = -100
    batch = {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}
    model = getattr(afield, how)(net, num_random_features=16)
    assert model.output == "classifier"
    assert model(**batch).logits.shape == (48, 6, 3)  # and the network's own loss
    if how == "sngp":
        model(**batch).loss.backward()
    assert afield.fit_posterior(model, [batch]) == int((labels != -100).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoBetterThanGuessing)  # it is not trained
        afield.calibrate(model, [batch], num_positions=4)
    p = model.predict({name: t for name, t in batch.items() if name != "labels"})
    assert p.logits.shape == (48, 3, 6)
    assert p.labels.shape == p.p_value.shape == (48, 6)
    assert torch.equal(p.mask, mask.bool())
    assert p.accept_inputs(0.1).shape == (48,)

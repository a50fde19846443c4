"""The model card says what the folder holds, and nothing else."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

import afield
from afield.cli.main import main
from afield.report.model_card import model_card


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model, x = afield.sngp(network(), num_random_features=32), torch.randn(400, 2)
    afield.fit_posterior(model, [(x, torch.arange(400) % 2)])
    afield.calibrate(model, [(torch.randn(450, 2), torch.arange(450) % 2)])
    rule = afield.policy(model.predict(x), coverage=0.9, delta=0.1)
    metadata = {"labels": ["no", "yes"], "policy": dataclasses.asdict(rule)}
    return afield.save(model, tmp_path / "model", metadata=metadata)


def test_card_of_a_saved_model(saved: Path):
    text, model = model_card(saved, network()), afield.load(saved, network())
    assert text.startswith("# Model card: model\n")
    assert f"- the reference of p-values has {len(model.head.reference)} scores" in text
    assert "- the posterior was fitted to 400 examples" in text
    assert "- classes: no, yes" in text
    assert "At least 0.9 of in-domain inputs are answered, with confidence 0.9" in text
    assert "of fresh in-domain inputs are refused, on average" in text
    assert "Figures on test data" not in text  # nobody has measured any
    assert "## Limits" in text
    assert f"- torch: {torch.__version__}" in text


def test_card_of_a_model_that_was_not_calibrated(tmp_path: Path):
    model = afield.sngp(network(), num_random_features=32)
    afield.fit_posterior(model, [(torch.randn(50, 2), torch.arange(50) % 2)])
    text = model_card(afield.save(model, tmp_path), network())
    assert "Not calibrated" in text
    assert "Guarantees" not in text


@pytest.mark.slow
def test_card_of_a_run_has_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main(["train", "two-moons", "--epochs", "2", "--out", str(tmp_path)])
    folder = tmp_path / "two-moons" / "sngp" / "0"
    main(["card", str(folder)])
    text = (folder / "card.md").read_text()
    assert "# Model card: two-moons, sngp" in text
    assert "| far (OOD) | auroc, joined score |" in text
    assert "- training: 1,000 examples" in text

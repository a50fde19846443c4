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
    assert "Metrics on test data" not in text  # nobody has measured any
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


def test_metrics_that_were_told_are_shown_as_such(tmp_path: Path):
    model = afield.sngp(network(), num_random_features=32)
    afield.fit_posterior(model, [(torch.randn(50, 2), torch.arange(50) % 2)])
    metrics = {"accuracy/test": 0.91, "auroc/far": 0.9876, "note": "by hand"}
    text = model_card(afield.save(model, tmp_path, metadata={"metrics": metrics}), network())
    assert "| accuracy/test | 0.9100 |\n| auroc/far | 0.9876 |\n" in text
    assert "As told by" in text


@pytest.mark.slow  # scikit-learn takes seconds to import
def test_card_of_an_estimator_needs_no_net(tmp_path: Path):
    pytest.importorskip("sklearn")
    x = torch.randn(200, 3).numpy()
    small = {"max_iter": 2, "early_stopping": False, "depth": 1, "width": 8, "num_random_features": 32}
    classifier = afield.SNGPClassifier(**small, random_state=0).fit(x, x[:, 0] > 0)
    rule = classifier.policy(torch.randn(100, 3).numpy(), coverage=0.8)
    main(["card", str(classifier.save(tmp_path / "table", policy=rule))])
    text = (tmp_path / "table" / "card.md").read_text()
    assert "- classes: False, True" in text
    assert "At least 0.8 of in-domain inputs are answered" in text
    assert "- the logits are multiplied by" in text


@pytest.mark.slow
def test_card_of_a_folder_of_save_pretrained_needs_no_net(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    from afield.integrations import huggingface

    config = transformers.BertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                     intermediate_size=16, num_labels=2, id2label={0: "ask", 1: "act"})  # fmt: skip
    model = huggingface.attach(transformers.BertForSequenceClassification(config).eval(), num_random_features=32)
    batch = {"input_ids": torch.randint(0, 20, (300, 6)), "labels": torch.arange(300) % 2}
    afield.fit_posterior(model, [batch])
    afield.calibrate(model, [batch])
    rule = dataclasses.asdict(afield.policy(false_alarms=0.05))
    huggingface.save_pretrained(model, tmp_path, metadata={"policy": rule})
    main(["card", str(tmp_path), "--out", str(tmp_path / "out.md")])
    text = (tmp_path / "out.md").read_text()
    assert "- classes: ask, act" in text
    assert "At most 0.05 of in-domain inputs are refused" in text

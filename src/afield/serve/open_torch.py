"""Models of torch as engines: folders of `afield.save`, run folders, estimators, Hugging Face models with texts."""

import hashlib
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from afield.decide.policies import Policy
from afield.deploy.traced import chosen_alpha
from afield.experiment.model_folder import is_saved, open_model
from afield.gp.likelihoods import LIKELIHOODS
from afield.model.saving import INDEX, read_index, read_neighbours
from afield.model.sngp_model import SNGP, Heads
from afield.prediction.positions import refuse_positions
from afield.prediction.prediction import Prediction, likelihood_of
from afield.serve.engine import DATATYPES, TEXT, Arrays, BadInput, Engine, TensorSpec, name_labels, narrow
from afield.serve.explain import explainer

Predict = Callable[[Arrays], Prediction]


def open_folder(folder: Path, net: str | None = None, *, alpha: float | None = None) -> Engine:
    """The engine of a folder that `afield.save`, `save_pretrained`, an estimator or a run has written."""
    if not is_saved(folder):
        opened = open_model(folder, net)
        spec = _input_spec(opened.model, opened.dtype, opened.shape)
        engine = _engine(opened.model, _plain(opened.predict, spec, opened.dtype), spec, opened.identity, opened.labels,
                         alpha=alpha)  # fmt: skip
        return engine if isinstance(opened.model, SNGP) else _as_it_answers(engine, opened.example)
    metadata = read_index(folder)["metadata"]
    if "estimator" in metadata:
        return _open_estimator(folder, alpha)
    if net is None and (folder / "config.json").is_file():
        return _open_huggingface(folder, metadata, alpha)
    opened = open_model(folder, net)
    shape = opened.shape or metadata.get("input_shape")
    spec = _input_spec(opened.model, opened.dtype, None if shape is None else tuple(shape))
    engine = _engine(opened.model, _plain(opened.predict, spec, opened.dtype), spec, _identity(folder), opened.labels,
                     alpha=alpha, policy=metadata.get("policy"))  # fmt: skip
    engine = replace(engine, features=tuple(map(str, metadata.get("columns") or ())))
    return _with_neighbours(engine, folder, opened.model, lambda a: torch.from_numpy(a[spec.name]).to(opened.dtype))


def _open_estimator(folder: Path, alpha: float | None) -> Engine:
    from afield.serve.open_estimator import load_any, open_estimator  # scikit-learn is an extra

    estimator, rule = load_any(folder), read_index(folder)["metadata"].get("policy")
    engine = open_estimator(estimator, alpha=alpha, policy=None if rule is None else Policy.from_dict(rule))
    engine = replace(engine, identity=_identity(folder))
    name = engine.inputs[0].name
    return _with_neighbours(engine, folder, estimator.model_, lambda a: torch.from_numpy(a[name]).double())


def _as_it_answers(engine: Engine, example: Any) -> Engine:
    """The engine of a model without a head to ask, with the columns and classes of an answer of its own."""
    answers = engine.run({engine.inputs[0].name: example[:1].numpy()})
    num_classes = answers["probabilities"].shape[1] if "probabilities" in answers else 0
    return replace(engine, columns=tuple(answers), num_classes=num_classes)


def open_sngp(
    model: SNGP,
    *,
    labels: tuple[str, ...] = (),
    shape: tuple[int, ...] | None = None,
    alpha: float | None = None,
    policy: Policy | None = None,
) -> Engine:
    """The engine of a model that is in memory."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    spec = _input_spec(model, dtype, shape)
    model.eval()
    identity = f"{id(model):x}"
    engine = _engine(model, _plain(model.predict, spec, dtype), spec, identity, labels, alpha=alpha)
    return engine if policy is None else _with_policy(engine, policy, _plain(model.predict, spec, dtype))


def _open_huggingface(folder: Path, metadata: Mapping[str, Any], alpha: float | None) -> Engine:
    from afield.integrations.huggingface import TextClassifier, from_pretrained, labels_of

    identity = _identity(folder)
    if not (folder / "tokenizer_config.json").is_file():  # images, perhaps
        model = from_pretrained(folder).eval()
        spec = _input_spec(model, torch.float32, metadata.get("input_shape"))
        engine = _engine(model, _plain(model.predict, spec, torch.float32), spec, identity, tuple(labels_of(model)),
                         alpha=alpha, policy=metadata.get("policy"))  # fmt: skip
        return _with_neighbours(engine, folder, model, lambda a: torch.from_numpy(a[spec.name]).float())
    classifier, lock = TextClassifier.from_pretrained(folder), threading.Lock()

    def tokenize(arrays: Arrays) -> dict[str, torch.Tensor]:
        with lock:  # tokenizers are not for several threads
            return classifier.tokenize(arrays["text"].tolist())

    def decode(ids: list[int]) -> str:
        return str(classifier.tokenizer.decode(ids, skip_special_tokens=True))

    def predict_texts(arrays: Arrays) -> Prediction:
        return classifier.model.predict(tokenize(arrays))

    spec = TensorSpec("text", TEXT, (-1,))
    engine = _engine(classifier.model, predict_texts, spec, identity, tuple(labels_of(classifier.model)), alpha=alpha,
                     policy=metadata.get("policy"))  # fmt: skip
    return _with_neighbours(engine, folder, classifier.model, tokenize, decode=decode)


def _identity(folder: Path) -> str:
    """A hash of all that answers hang on: the index, with hashes of tensors, policy and labels; and a config."""
    files = [file for file in (folder / INDEX, folder / "config.json") if file.is_file()]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _with_neighbours(
    engine: Engine, folder: Path, model: nn.Module, inputs_of: Callable[[Arrays], Any], **options: Any
) -> Engine:
    """The engine with explanations, if training examples were saved beside the model."""
    kept = read_neighbours(folder)
    if not kept or not isinstance(model, SNGP):
        return engine
    explain = explainer(model, kept, inputs_of, labels=engine.labels, features=engine.features, **options)
    return replace(engine, explain=explain)


def _engine(
    model: nn.Module,
    predict: Predict,
    spec: TensorSpec,
    identity: str,
    labels: tuple[str, ...],
    *,
    alpha: float | None,
    policy: Mapping[str, Any] | None = None,
) -> Engine:
    if isinstance(model, Heads):
        raise ValueError("The service answers with one output, and this model has several heads: serve each by itself.")
    sngp = model if isinstance(model, SNGP) else None
    head = None if sngp is None else sngp.head
    alpha = None if sngp is None else chosen_alpha(sngp, alpha)
    calibrated = head is not None and head.calibrated
    likelihood = LIKELIHOODS["categorical" if head is None else head.likelihood]
    if head is not None and likelihood.has_labels(head.out_features):
        raise ValueError(
            "The service answers with one class a row, and this model has several labels: use model.predict."
        )
    count = likelihood.num_classes(head.out_features) if head is not None and likelihood.of_classes else 0
    columns = ["label", "probabilities"] if likelihood.of_classes else ["mean", "std"]
    columns += ["variance"] * (head is not None) + ["score"] + ["p_value", "accepted"] * calibrated

    def run(arrays: Arrays) -> Arrays:
        return answers_of(_predict(predict, arrays), alpha, labels)

    engine = Engine(
        inputs=(spec,),
        run=run,
        identity=identity,
        platform="afield_torch",
        labels=labels,
        num_classes=count,
        columns=tuple(columns),
        alpha=alpha,
        reference=head.reference.cpu().numpy() if calibrated and head is not None else np.zeros(0),
        spans=head.reference_spans.cpu().numpy() if calibrated and head is not None else np.zeros((0, 2), np.int64),
    )
    return engine if policy is None else _with_policy(engine, Policy.from_dict(policy), predict)


def _with_policy(engine: Engine, rule: Policy, predict: Predict) -> Engine:
    """The engine with the columns of a policy."""

    def run(arrays: Arrays) -> Arrays:
        prediction = _predict(predict, arrays)
        return answers_of(prediction, engine.alpha, engine.labels) | decisions_of(rule, prediction, engine.labels)

    return replace(with_decisions(engine, rule), run=run)


def with_decisions(engine: Engine, rule: Policy) -> Engine:
    """The description of an engine that decides, too: `decision`, and `answer` where errors have different costs."""
    columns = (*engine.columns, "decision", *(["answer"] if _by_cost(rule) else []))
    return replace(engine, columns=columns, policy={"guarantee": rule.guarantee, "risk": rule.risk})


def decisions_of(rule: Policy, prediction: Prediction, labels: tuple[str, ...]) -> Arrays:
    """The columns of a policy."""
    decision = np.where(rule.decide(prediction).numpy(), "answer", "refer").astype(object)
    chosen = {"answer": name_labels(rule.answer(prediction).numpy(), labels)} if _by_cost(rule) else {}
    return {"decision": decision} | chosen


def _by_cost(rule: Policy) -> bool:
    return rule.error_cost is not None and not isinstance(rule.error_cost, int | float)


def _predict(predict: Predict, arrays: Arrays) -> Prediction:
    try:
        with torch.no_grad():
            return predict(arrays)
    except (ValueError, RuntimeError, IndexError, TypeError, KeyError) as error:
        message = " ".join(str(error).split())[:500]
        raise BadInput(f"The model does not take these rows: {message}") from error


def answers_of(p: Prediction, alpha: float | None, labels: tuple[str, ...]) -> Arrays:
    """The columns that a prediction answers with."""
    refuse_positions(p, "The service")
    answers: Arrays = {}
    if p.probs is not None:
        answers["label"] = name_labels(p.labels.numpy(), labels)
        answers["probabilities"] = narrow(p.probs.detach().numpy())
    elif likelihood_of(p).mean is not None:
        answers["mean"] = narrow(p.mean.detach().numpy())
        answers |= {"std": narrow(p.std.detach().numpy())} if p.variance is not None else {}
    if p.variance is not None:
        answers["variance"] = narrow(p.variance.detach().numpy())
    answers["score"] = narrow(p.score().detach().numpy())
    if p.p_value is not None:
        answers["p_value"] = narrow(p.p_value.numpy())
        answers["accepted"] = p.accept(alpha).numpy() if alpha is not None else p.p_value.numpy() > 0
    return answers


def _plain(predict: Callable[[Any], Prediction], spec: TensorSpec, dtype: torch.dtype) -> Predict:
    def call(arrays: Arrays) -> Prediction:
        return predict(torch.from_numpy(arrays[spec.name]).to(dtype))

    return call


def _input_spec(model: nn.Module, dtype: torch.dtype, shape: Any = None) -> TensorSpec:
    """Name, type and shape of the network's first input, as far as they can be read off."""
    net = model.net if isinstance(model, SNGP) else model
    names = [
        name
        for name, p in inspect.signature(net.forward).parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    wire = dtype if dtype in (torch.float64, torch.int64, torch.uint8) else torch.float32
    kind = DATATYPES[str(wire).removeprefix("torch.")]
    return TensorSpec((names or ["input"])[0], kind, (-1, *(tuple(shape) if shape else _guess_shape(net))))


def _guess_shape(net: nn.Module) -> tuple[int, ...]:
    """Of one input, by the first layer that has weights."""
    for layer in net.modules():
        if next(layer.children(), None) is None or isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
            if isinstance(layer, nn.Linear):
                return (layer.in_features,)
            if isinstance(layer, nn.Conv2d):
                return (layer.in_channels, -1, -1)
            if isinstance(layer, nn.Conv1d):
                return (layer.in_channels, -1)
            if any(True for _ in layer.parameters()):
                break
    return (-1,)


def use_threads(count: int) -> None:
    """Threads inside one call of torch: one, where several calls go on at once."""
    torch.set_num_threads(count)

"""Hugging Face: classifiers of `transformers` with a Gaussian-process output layer.

    net = AutoModelForSequenceClassification.from_pretrained(name, num_labels=3)
    model = huggingface.sngp(net)                                 or huggingface.attach(net), if it is trained
    Trainer(model.net, ..., callbacks=[FitPosterior(model)]).train()
    huggingface.save_pretrained(model, "folder", tokenizer)
    classify = TextClassifier.from_pretrained("folder")
    classify(["where is my card?"])       [{"label": ..., "probability": ..., "p_value": ..., "accepted": ...}]

`sngp` and `attach` here call `afield.sngp` and `afield.attach` with what is special to networks of this library:

- the output layer is the last Linear *outside the body*, which a few architectures (XLM-RoBERTa, CamemBERT) register
  first of all;
- as in the paper's appendix, a number as `bound` bounds only the layers between the body and the output layer (BERT's
  pooler, RoBERTa's dense layer): bounds inside harm a pretrained body;
- a decoder (GPT-2, Llama, Qwen) scores every token and then picks one. A Gaussian process wants one hidden vector an
  input, so the token is picked first: `LastToken`, the same network with the same answers.

`Trainer` reads the signature and the configuration of what it trains: give it `model.net`.
"""

import copy
import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from afield.errors import DamagedModel
from afield.gp.likelihoods import LIKELIHOODS
from afield.integrations import every_example_once
from afield.model import convert
from afield.model.calibration import Calibration, calibrate
from afield.model.convert import BoundRules
from afield.model.posterior import fit_posterior
from afield.model.progress import track
from afield.model.saving import load, read_index, save
from afield.model.sngp_model import SNGP
from afield.prediction.prediction import Prediction

try:
    import transformers
    from transformers import PreTrainedModel, TrainerCallback
    from transformers.modeling_outputs import SequenceClassifierOutput
except ImportError as error:
    if (error.name or "").split(".")[0] != "transformers":  # it is installed, and something else is wrong
        raise
    raise ImportError('The Hugging Face integration needs transformers: pip install "afield[huggingface]".') from error

_NO_LIMIT = 100_000  # tokens and more: tokenizers without a limit of their own report 1e30


class LastToken(nn.Module):
    """A decoder that scores its last token alone: the answers of `net`, from one hidden vector (N, d) an input.

    The last token is the network's own choice, the rightmost one that is not padding by its id; without a padding id
    in the configuration, by the attention mask.
    """

    accepts_loss_kwargs = False  # Trainer: the loss is a mean, to be divided when gradients are accumulated

    def __init__(self, net: PreTrainedModel) -> None:
        super().__init__()
        self.config, self.net_type, self.loss_function = net.config, type(net), net.loss_function
        self.body = net.base_model
        self.score = next(child for child in net.children() if isinstance(child, nn.Linear))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        options = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": False, **kwargs}
        tokens = self.body(input_ids, **{k: v for k, v in options.items() if v is not None}).last_hidden_state
        pad = self.config.get_text_config().pad_token_id
        if pad is not None:
            used = input_ids != pad
        else:
            used = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        last = (used.int() * torch.arange(input_ids.shape[1], device=used.device)).argmax(-1).to(tokens.device)
        logits = self.score(tokens[torch.arange(len(tokens), device=tokens.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def sngp(net: PreTrainedModel, bound: BoundRules = 0.95, *, output: str | None = None, **options: Any) -> SNGP:
    """`afield.sngp` for a network of transformers.

    bound    a number for the layers between the body and the output layer; None and mappings as in `afield.sngp`
    output   the name of the Linear that makes the logits, where it is not the last one outside the body
    options  of `afield.sngp`; the likelihood is gaussian where the configuration says regression, and bernoulli, for
             labels that apply each by itself, where it says multi_label_classification

    returns  the `SNGP`; give its `net` to the Trainer
    raises   those of `afield.sngp`

    >>> hf.sngp(bert).output  # bert: a BertForSequenceClassification
    'classifier'
    """
    prepared, output = _prepare(net, output)
    if isinstance(bound, float | int):
        bound = dict.fromkeys(_layers_after_body(prepared, output), float(bound))
    return convert.sngp(prepared, bound, output=output, **_with_likelihood(net, options))


def attach(net: PreTrainedModel, *, output: str | None = None, **options: Any) -> SNGP:
    """`afield.attach` for a trained network of transformers: it keeps its predictions and gains a variance.

    output   the name of the Linear that makes the logits, where it is not the last one outside the body
    options  of `afield.attach`

    returns  the `SNGP`
    raises   those of `afield.attach`

    >>> torch.allclose(hf.attach(bert)(**batch).logits, bert(**batch).logits)
    True
    """
    prepared, output = _prepare(net, output)
    return convert.attach(prepared, output=output, **_with_likelihood(net, options))


class FitPosterior(TrainerCallback):
    """Fit the posterior and calibrate at the end of `Trainer.train`, on the weights that training leaves behind.

    model      the `SNGP` whose `net` the Trainer trains
    train      batches for the posterior; None takes the Trainer's training data, every example once, in evaluation mode
    held_out   batches for calibration; None takes the Trainer's evaluation data, if it evaluated on any. These must
               be examples that the network was not trained on
    options    of `afield.calibrate`

    `calibration` has what `afield.calibrate` found, None before. With `load_best_model_at_end` the best weights are
    back before this runs. With several processes every example counts once.
    """

    def __init__(
        self,
        model: SNGP,
        *,
        train: Iterable[Any] | None = None,
        held_out: Iterable[Any] | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(model, SNGP):
            raise TypeError(
                f"FitPosterior expects the model made by sngp or attach, got {type(model).__name__}: "
                "Trainer(model.net, ..., callbacks=[FitPosterior(model)])."
            )
        self.model, self.train, self.held_out, self.options = model, train, held_out, options
        self.calibration: Calibration | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if kwargs.get("model") is not self.model.net:
            raise ValueError(
                "FitPosterior expects the Trainer to train the network inside its model, whose signature and "
                f"configuration Trainer reads: Trainer(model.net, ...), got {type(kwargs.get('model')).__name__}."
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.model.head.reset_posterior()  # it belongs to weights that are about to change
        self.calibration = None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        train = kwargs["train_dataloader"] if self.train is None else self.train
        held_out = kwargs["eval_dataloader"] if self.held_out is None else self.held_out
        fit_posterior(self.model, every_example_once(train))
        if held_out is not None:
            self.calibration = calibrate(self.model, every_example_once(held_out), **self.options)


def save_pretrained(
    model: SNGP, folder: str | os.PathLike[str], tokenizer: Any = None, *, metadata: Any = None, **neighbours: Any
) -> Path:
    """Write model, configuration and tokenizer (or image processor) to one folder: safetensors and JSON alone.

    tokenizer   its own, or an image processor; None: none is written
    metadata    such as a policy,
    neighbours  and `train`, as in `afield.save`

    returns  the folder
    raises   TypeError if the network is not of transformers; those of `afield.save`

    >>> hf.save_pretrained(text_model, "folder", tokenizer)
    PosixPath('folder')
    """
    config = getattr(model.net, "config", None)
    if not isinstance(config, transformers.PretrainedConfig):
        raise TypeError(
            f"save_pretrained expects a network of transformers inside the model, got {type(model.net).__name__}: use "
            "afield.save(model, folder)."
        )
    config = copy.deepcopy(config)
    config.architectures = [getattr(model.net, "net_type", type(model.net)).__name__]
    config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return save(model, folder, metadata={"labels": labels_of(model), **(metadata or {})}, **neighbours)


def from_pretrained(folder: str | os.PathLike[str]) -> SNGP:
    """The model that `save_pretrained` wrote: the network is built from its configuration, then filled.

    returns  the `SNGP`
    raises   DamagedModel if the folder is not whole, or of a kind that this transformers does not have

    >>> folder = hf.save_pretrained(text_model, "folder")
    >>> torch.equal(hf.from_pretrained(folder).predict(batch).p_value, text_model.predict(batch).p_value)
    True
    """
    return load(folder, network_of(folder))


def network_of(folder: str | os.PathLike[str]) -> nn.Module:
    """The network, untrained, whose model `save_pretrained` wrote.

    returns  a module
    raises   as `from_pretrained`

    >>> type(hf.network_of(hf.save_pretrained(text_model, "folder"))).__name__
    'BertForSequenceClassification'
    """
    read_index(folder)
    if not (Path(folder) / "config.json").is_file():
        raise DamagedModel(f"{folder} has no config.json: it was not written by save_pretrained. Use afield.load.")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    name = (config.architectures or [""])[0]
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise DamagedModel(
            f"{folder} holds a {name or 'network without a name'}, which transformers {transformers.__version__} does "
            "not have. Upgrade transformers, or build the network yourself: afield.load(folder, net)."
        )
    net = kind(config)
    return LastToken(net) if _scores_every_token(net) else net


def labels_of(model: SNGP) -> list[str]:
    """The names of the classes, from the configuration; numbers where it has none.

    returns  a list of strings

    >>> hf.labels_of(text_model)
    ['card', 'rent', 'loan']
    """
    names = getattr(getattr(model.net, "config", None), "id2label", None) or {}
    count = max(model.head.out_features, 2)
    return [str(names.get(k, k)) for k in range(count)] if len(names) == count else [str(k) for k in range(count)]


@dataclass(frozen=True)
class TextClassifier:
    """Texts in, answers out: for each text its label, probability, p-value, whether it is accepted, and score.

    model        fitted and calibrated
    tokenizer    its own
    batch_size   texts at a time; texts of like length go together, which changes no answer
    max_length   tokens at which a text is cut; None: the tokenizer's own limit, or the network's

    `p_value` is small where the text is unlike the held-out data, and `accepted` is `p_value > alpha`: texts like
    those are refused at a rate of at most alpha on average. `score` is the distance behind it: higher is further.
    """

    model: SNGP
    tokenizer: Any
    batch_size: int = 32
    max_length: int | None = None

    def __post_init__(self) -> None:
        if not LIKELIHOODS[self.model.head.likelihood].of_classes:
            raise ValueError(f"TextClassifier expects classes, got a {self.model.head.likelihood} model: use predict.")
        if self.tokenizer.pad_token_id is None:
            raise ValueError(
                "The tokenizer has no padding token, so it makes no batches: tokenizer.pad_token = tokenizer.eos_token."
            )

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], **options: Any) -> "TextClassifier":
        """From a folder that `save_pretrained` wrote, tokenizer included."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return cls(from_pretrained(folder), tokenizer, **options)

    def __call__(
        self, texts: str | Iterable[str], *, alpha: float = 0.01, progress: bool | None = None
    ) -> list[dict[str, Any]]:
        """One dictionary for each text, in their order.

        Of several labels that may apply together: `labels`, the names of those that do, and by name of each label
        `probabilities` and `p_values`, in the place of `label` and `probability`.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        if not texts:
            return []
        p = self.predict(texts, progress=progress)
        columns: dict[str, Any] = {"p_value": p.p_value, "accepted": p.accept(alpha), "score": p.score()}
        of_texts = zip(*(column.tolist() for column in columns.values()), strict=True)
        return [
            answer | dict(zip(columns, values, strict=True))
            for answer, values in zip(_named(p, labels_of(self.model)), of_texts, strict=True)
        ]

    def predict(self, texts: Sequence[str], *, progress: bool | None = None) -> Prediction:
        """The `Prediction` for texts, in their order."""
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"TextClassifier expects texts, got {type(text).__name__} at position {i}: {text!r}.")
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        parts = [
            self.model.predict(self.tokenize([texts[i] for i in batch]))
            for batch in track(batches, "texts", show=progress)
        ]
        position = torch.empty(len(order), dtype=torch.int64)
        position[torch.tensor(order, dtype=torch.int64)] = torch.arange(len(order))
        return Prediction.cat(parts)[position.to(parts[0].logits.device)]

    @property
    def limit(self) -> int | None:
        """Tokens at which a text is cut."""
        own = self.tokenizer.model_max_length
        positions = getattr(self.model.net.config, "max_position_embeddings", None)
        return self.max_length or (own if own < _NO_LIMIT else positions)

    def tokenize(self, texts: list[str]) -> dict[str, Tensor]:
        """What the network takes for texts."""
        encoded = self.tokenizer(
            texts, padding=True, padding_side="right", truncation=True, max_length=self.limit, return_tensors="pt"
        )
        known = inspect.signature(self.model.net.forward).parameters
        return {name: value for name, value in encoded.items() if name in known}


def _named(p: Prediction, names: list[str]) -> list[dict[str, Any]]:
    """What a prediction says of each text, with the names of the classes or labels."""
    if not p.has_labels:
        both = zip(p.labels.tolist(), p.confidence.tolist(), strict=True)
        return [{"label": names[label], "probability": confidence} for label, confidence in both]
    assert p.probs is not None
    assert p.label_p_value is not None
    rows = zip(p.labels.tolist(), p.probs.tolist(), p.label_p_value.tolist(), strict=True)
    return [
        {
            "labels": [name for name, one in zip(names, applies, strict=True) if one],
            "probabilities": dict(zip(names, probs, strict=True)),
            "p_values": dict(zip(names, p_values, strict=True)),
        }
        for applies, probs, p_values in rows
    ]


def _prepare(net: PreTrainedModel, output: str | None) -> tuple[nn.Module, str]:
    """The network that will be converted, and the name of its output layer."""
    if not isinstance(net, PreTrainedModel):
        raise TypeError(f"Expected a network of transformers, got {type(net).__name__}: use afield.sngp or attach.")
    if output is not None:
        return net, output
    if _scores_every_token(net):
        return LastToken(net), "score"
    body = set(map(id, net.base_model.modules()))
    linears = [name for name, m in net.named_modules() if isinstance(m, nn.Linear) and id(m) not in body]
    if not linears:
        raise ValueError(
            f"{type(net).__name__} has no Linear outside its body: use a class with an output layer, such as "
            "AutoModelForSequenceClassification, or name the layer with output=..."
        )
    return net, linears[-1]


def _scores_every_token(net: PreTrainedModel) -> bool:
    """Decoders for classification are a body and one Linear; encoders pool, or drop out, in between."""
    children = list(net.children())
    return (
        type(net).__name__.endswith("ForSequenceClassification")
        and len(children) == 2
        and any(child is net.base_model for child in children)
        and any(isinstance(child, nn.Linear) for child in children)
    )


def _layers_after_body(net: nn.Module, output: str) -> list[str]:
    """The Linear layers between body and output layer: those of the body's pooler, and those outside the body."""
    body: Any = net.body if isinstance(net, LastToken) else net.base_model
    pooler = getattr(body, "pooler", None)
    after = set(map(id, pooler.modules())) if isinstance(pooler, nn.Module) else set()
    inside = set(map(id, body.modules())) - after
    return [n for n, m in net.named_modules() if isinstance(m, nn.Linear) and id(m) not in inside and n != output]


def _with_likelihood(net: PreTrainedModel, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with the likelihood that the configuration asks for unless they have one."""
    one_number = net.config.problem_type is None and net.config.num_labels == 1
    return {**(convert.of_problem(net) or ({"likelihood": "gaussian"} if one_number else {})), **options}

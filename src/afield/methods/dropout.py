"""Monte Carlo dropout: a prediction is the average over S thinned networks (Gal and Ghahramani 2016).

    p(y | x) = 1/S sum_s p(y | x, z_s),      z_s ~ Bernoulli(1 - rate) / (1 - rate), a mask for every dropout layer

Training is the base method's own. At prediction only dropout layers are random; everything else, BatchNorm too, is in
evaluation mode. A posterior is fitted without dropout, and hidden vectors are those without it. Masks come from a seed,
and one mask serves a whole batch: a sample is one thinned network, and what it says of an input does not depend on the
other inputs. (The usual practice, a mask for each row, has the same distribution for any one input.) On `dnn-gp` this
is the paper's MCD-GP. The average is calibrated as a whole (`mixture`).
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from afield.methods.method import BackboneFactory, Method, Model
from afield.methods.mixture import add_scales, calibrate_mixture, logit_scale_of, mix, scales_of
from afield.prediction.prediction import Prediction
from afield.settings import Settings

_KIND = "dropout"
_SAMPLING: ContextVar[torch.Generator | None] = ContextVar("generator of dropout masks", default=None)


def mc_dropout(method: Method[Model], samples: int = 10, *, filter_wise: bool = False, seed: int = 0) -> Method[Model]:
    """The method with its dropout layers (modules, not calls of F.dropout) active at prediction.

    filter_wise  drop whole channels of convolutional features (N, C, ...), in training and at prediction, as
                 Dropout1d and Dropout2d do: neighbouring values are too much alike for masks of their own
    seed         of the masks

    p-values are off: their reference scores were taken without dropout.
    """
    if samples < 1:
        raise ValueError(f"mc_dropout needs at least one sample, got samples={samples}.")

    def build(backbone: BackboneFactory, num_outputs: int, settings: Settings = Settings(), /) -> Model:
        model = method.build(backbone, num_outputs, settings)
        if not _replace_dropout(model, filter_wise, settings.dropout):
            raise ValueError("mc_dropout expects a backbone with dropout layers (nn.Dropout, nn.Dropout2d), got none.")
        return add_scales(model, _KIND)

    def predict(model: Model, x: Any) -> Prediction:
        mixture = mix(predict_samples(model, x), scales_of(model, _KIND))
        return dataclasses.replace(mixture, features=hidden(model, x).features)

    def predict_samples(model: Model, x: Any) -> list[Prediction]:
        predictions = []
        for s in range(samples):
            with _sampling(torch.Generator().manual_seed(seed * samples + s)):
                predictions.append(method.predict(model, x))
        return predictions

    def calibrate(model: Model, val: Iterable[Any], settings: Settings = Settings(), /) -> None:
        calibrate_mixture(
            model,
            _KIND,
            lambda x: predict_samples(model, x),
            val,
            logit_scale=logit_scale_of(model),
            fixed_amplitude=settings.amplitude is not None,
        )

    def finish(model: Model, train: Iterable[Any], val: Iterable[Any], settings: Settings = Settings(), /) -> None:
        method.finish(model, train, val, settings)
        calibrate(model, val, settings)

    hidden = method.hidden or method.predict
    return dataclasses.replace(
        method,
        build=build,
        predict=predict,
        finish=finish,
        trained_as=None if filter_wise else method,
        hidden=hidden,
        calibrate=calibrate,
        own_dropout=True,
    )


class SampledDropout(nn.Module):
    """Dropout that is also active in evaluation mode while `mc_dropout` draws a sample in this thread."""

    def __init__(self, p: float, filter_wise: bool) -> None:
        super().__init__()
        self.p, self.filter_wise = p, filter_wise

    def forward(self, x: Tensor) -> Tensor:
        filters = self.filter_wise and x.dim() > 2
        generator = None if self.training else _SAMPLING.get()
        if generator is None:
            return (torch.feature_dropout if filters else torch.dropout)(x, self.p, self.training)
        shape = (1, x.shape[1], *[1] * (x.dim() - 2)) if filters else (1, *x.shape[1:])
        mask = torch.empty(shape, device=generator.device).bernoulli_(1 - self.p, generator=generator)
        return x * (mask / (1 - self.p) if self.p < 1 else mask).to(x)

    def extra_repr(self) -> str:
        return f"p={self.p}, filter_wise={self.filter_wise}"


@contextlib.contextmanager
def _sampling(generator: torch.Generator) -> Iterator[None]:
    token = _SAMPLING.set(generator)
    try:
        yield
    finally:
        _SAMPLING.reset(token)


def _replace_dropout(model: nn.Module, filter_wise: bool, rate: float | None) -> int:
    """Put `SampledDropout` in the place of every dropout layer, with its own rate or this; how many there were."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # under every name that it has
            if isinstance(child, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
                filters = filter_wise or not isinstance(child, nn.Dropout)
                setattr(parent, name, SampledDropout(child.p if rate is None else rate, filters))
                count += 1
    return count

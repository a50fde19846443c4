"""`het-sngp`: an SNGP whose logits have noise of their own, which varies with the input (Fortuin et al. 2022).

    p(y | x) = E softmax(s (f + V e + d e') + a sqrt(v) e''),      V, d as in `outputs.logit_noise`

Trained by the log loss of the noisy logits. Then posterior and calibration as for `sngp`, whose p-values it keeps: they
rest on how far an input is, and not on how noisy its label. At last the scale s of the logits is chosen by the
validation log loss of the whole, the variance a^2 v being what calibration left.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from afield.gp.likelihoods import LIKELIHOODS
from afield.methods.gp import finish_gp, gaussian_process, predict_gp
from afield.methods.method import BackboneFactory, Method
from afield.model.calibration import cut_in_two
from afield.model.evaluating import evaluating
from afield.model.sngp_model import SNGP
from afield.outputs.logit_noise import LogitNoise, log_loss, noise_variance, probabilities
from afield.prediction.prediction import Prediction
from afield.settings import Settings

_SCALES = torch.logspace(-1, 1, 41, dtype=torch.float64)  # 1 is one of them
_SAMPLES = 1000  # of a prediction


class NoisyLogits(nn.Module):
    """An SNGP and the noise of its logits. Calling it gives the posterior mean."""

    scale: Tensor

    def __init__(self, gp: SNGP, settings: Settings) -> None:
        super().__init__()
        self.gp = gp
        features = gp.head.random_features.num_random_features
        rank = min(settings.noise_rank, gp.head.out_features)
        self.noise = LogitNoise(features, gp.head.out_features, rank, settings.noise_temperature)
        self.num_samples = settings.noise_samples
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    @property
    def net(self) -> nn.ModuleList:
        """Its parts in order: all that reads the hidden vector comes last, as an optimizer expects it."""
        assert isinstance(self.gp.net, nn.Sequential)
        *body, head = self.gp.net.children()
        return nn.ModuleList([*body, nn.ModuleList([head, self.noise])])

    def forward(self, x: Tensor) -> Tensor:
        return self.gp(x)

    def of_hidden(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean (N, K), factor (N, K, R) and standard deviation (N, K) of the logits."""
        phi = self.gp.head.features(h)
        mean = self.gp.head.mean_of(h, phi) / self.noise.temperature
        return mean, *self.noise(phi)


def heteroscedastic(*, bounded: bool = True) -> Method[NoisyLogits]:
    """A Gaussian-process output layer with noise of its logits; `bounded`: hidden layers have the settings' bound."""
    plain = gaussian_process(bounded=bounded)

    def build(backbone: BackboneFactory, num_outputs: int, settings: Settings = Settings(), /) -> NoisyLogits:
        if num_outputs < 2 or LIKELIHOODS[settings.likelihood].num_classes(num_outputs) != num_outputs:
            raise ValueError(
                f"het-sngp expects classes, got {settings.likelihood} targets and {num_outputs} outputs: for numbers "
                'use afield.sngp(net, likelihood="gaussian", noise="input").'
            )
        gp = plain.build(backbone, num_outputs, settings)
        if gp.head_name != gp.output:
            raise ValueError("het-sngp expects a backbone of one hidden vector an input, got one with positions.")
        return NoisyLogits(gp, settings)

    return Method(build, _predict, _loss, _finish)


def _loss(model: NoisyLogits, batch: Any) -> Tensor:
    x, y = batch
    return log_loss(*model.of_hidden(model.gp.hidden(x)), y, model.num_samples).mean()


def _finish(model: NoisyLogits, train: Iterable[Any], val: Iterable[Any], settings: Settings = Settings(), /) -> None:
    finish_gp(model.gp, train, val, settings)
    if settings.logit_scale is not None:
        model.scale.fill_(settings.logit_scale)
        return
    parts, targets = zip(*((_parts(model, predict_gp(model.gp, x)), y) for x, y in val), strict=True)
    whole = [torch.cat(part) for part in zip(*parts, strict=True)]
    rows = cut_in_two(len(whole[0]))[0].to(whole[0].device)
    mean, factor, deviation, variance = (part[rows] for part in whole)
    y = torch.cat(targets).to(mean.device)[rows]
    losses = []
    for scale in _SCALES.tolist():
        probs = _probs(scale, mean, factor, deviation, variance, model.num_samples)
        losses.append(-probs.gather(1, y[:, None]).clamp_min(1e-30).log().double().mean())
    model.scale.copy_(_SCALES[int(torch.stack(losses).argmin())])


@torch.no_grad()
def _parts(model: NoisyLogits, prediction: Prediction) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, factor and standard deviation of the logits, and the posterior variance."""
    assert prediction.features is not None
    assert prediction.variance is not None
    with evaluating(model):
        return *model.of_hidden(prediction.features), prediction.variance


def _probs(scale: float, mean: Tensor, factor: Tensor, deviation: Tensor, variance: Tensor, num_samples: int) -> Tensor:
    epistemic = variance if variance.dim() > 1 else variance[:, None]
    whole = (scale**2 * deviation.square() + epistemic).sqrt()
    return probabilities(scale * mean, scale * factor, whole, num_samples)


def _predict(model: NoisyLogits, x: Any) -> Prediction:
    """The GP's prediction, with probabilities in which the noise counts; `noise` is that of each logit (N, K)."""
    prediction, scale = predict_gp(model.gp, x), float(model.scale)
    mean, factor, deviation, variance = _parts(model, prediction)
    return dataclasses.replace(
        prediction,
        logits=scale * mean,
        probs=_probs(scale, mean, factor, deviation, variance, _SAMPLES),
        members=None,
        noise=scale**2 * noise_variance(factor, deviation),
    )

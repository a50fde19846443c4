"""Settings: how a model is built and trained, as one value. Flags, TOML keys and docs/settings.md follow from it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Settings:
    """How a model is built and trained. Every field is a flag, a TOML key and a row of docs/settings.md."""

    epochs: int = 100
    """Passes over the training data."""
    batch_size: int = 128
    """Examples in a training step."""
    learning_rate: float = 1e-3
    """At its highest."""
    head_learning_rate: float | None = None
    """Of the output layer alone; None: as the rest."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """sgd has Nesterov momentum 0.9."""
    weight_decay: float = 0.0
    """L2 penalty; decoupled for adamw. Random features and biases have none."""
    head_weight_decay: float | None = None
    """Of the output layer alone; None: as the rest; for a Gaussian process of classes its prior's, ridge / examples."""
    schedule: Literal["cosine", "linear", "steps", "tenths", "constant"] = "cosine"
    """How the learning rate falls; steps: times 0.2 at 30%, 60% and 80%; tenths: times 0.1 at 1/3, 2/3 and 8/9."""
    warmup: float = 0.0
    """Part of the training in which the learning rate rises from zero."""
    word_dropout: float = 0.0
    """Part of the words of a training sentence that are left out, anew each time; for tasks of text."""
    frozen: tuple[str, ...] = ()
    """Names of parameters that are not trained, * and ? allowed."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the products in training; weights, posterior and predictions stay in float32."""
    likelihood: Literal["categorical", "bernoulli", "gaussian", "poisson"] = "categorical"
    """Of the targets."""
    bound: float | None = 0.95
    """Largest spectral norm of a hidden layer, for methods that bound it; None: none."""
    bounded: tuple[str, ...] = ()
    """Names of the backbone's layers that are bounded, * and ? allowed; none given: all of them."""
    num_random_features: int = 1024
    """Of the Gaussian process."""
    kernel: Literal["rbf", "matern32", "matern52", "arccos"] = "rbf"
    """That they approximate."""
    orthogonal: bool = True
    """Whether their directions come in orthogonal blocks."""
    geometry: Literal["raw", "standardized", "layer", "unit", "direction", "direction_length"] | None = None
    """Coordinates in which distances of hidden vectors are taken; None: raw, and attached: direction_length."""
    projection: int | None = None
    """Dimensions that the hidden vector is projected to, at random, before; None: it is not."""
    length_scale: float | None = None
    """Of the kernel; None: from the first training batch."""
    fraction: float | None = None
    """Part of the median distance of hidden vectors that is their length scale; None: 1, and attached 0.5."""
    constant: bool = False
    """Whether each output of a Gaussian process has a constant beside its features."""
    variance_features: Literal["auto", "own", "same"] = "auto"
    """Random features of the variance: same as the mean's, own, or auto: own for classes."""
    ridge: float = 1.0
    """Prior precision of the output weights."""
    refit_head: bool = False
    """Whether a Gaussian process's output weights are solved for once training is over."""
    amplitude: float | None = None
    """Of the variance; None: calibrated on validation data."""
    logit_scale: float | None = None
    """Of the logits of a Gaussian process; None: calibrated with the amplitude."""
    covariance: Literal["shared", "per_class"] = "shared"
    """One posterior for all outputs, or one for each."""
    rank: int | None = None
    """Of a low-rank posterior for each output; None: the exact one."""
    curvature: Literal["auto", "unit", "likelihood"] = "auto"
    """Weight of an example in the posterior; auto: unit for classes with a shared covariance."""
    momentum: float | None = None
    """Of a moving average over batches in the place of the sum over examples; None: the sum."""
    predictive: Literal["mean_field", "monte_carlo"] = "mean_field"
    """How the posterior makes probabilities; monte_carlo: from 100 samples."""
    noise_rank: int = 2
    """Of the covariance of the logits' noise, for het-sngp; at most as many as there are classes."""
    noise_temperature: float = 1.0
    """Of the softmax over noisy logits in training."""
    noise_samples: int = 64
    """Draws of the noise in a training step, where there are more than two classes."""
    score: str | None = None
    """On which p-values of a Gaussian process rest; None: joined for classes, else the variance."""
    dropout: float | None = None
    """Rate of the layers that Monte Carlo dropout samples; None: the backbone's own."""
    members: int = 10
    """Of an ensemble."""

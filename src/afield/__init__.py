"""afield: a sense of distance for neural networks.

In one forward pass a model returns calibrated class probabilities and says how far the input lies from what it was
trained on (SNGP: Liu et al., JMLR 2022).

    model = afield.sngp(net)                      your network, distance-aware; train it as before
    afield.fit_posterior(model, train_loader)
    afield.calibrate(model, held_out_loader)
    p = model.predict(x)                          p.probs, p.variance, p.p_value, p.accept(alpha=0.01)

Everything below is imported when it is first asked for. Rooms (`afield.gp`, `afield.tasks`, ...) and the modules that
people use by name (`afield.posterior`, `afield.diagnose`, ...) are there as attributes too.
"""

import importlib
from typing import TYPE_CHECKING, Any

from afield.version import __version__

if TYPE_CHECKING:
    from afield.bounds.spectral import bound, fold
    from afield.decide.policies import policy
    from afield.estimators import SNGPClassifier, SNGPRegressor
    from afield.experiment.model_folder import load
    from afield.gp.head import GaussianProcessHead
    from afield.model.calibration import calibrate
    from afield.model.convert import attach, output_last, sngp
    from afield.model.layers import parameter_groups
    from afield.model.output_weights import fit_head
    from afield.model.posterior import fit_posterior
    from afield.model.saving import save
    from afield.model.sngp_model import SNGP
    from afield.prediction.prediction import Prediction

__all__ = [
    "SNGP",
    "GaussianProcessHead",
    "Prediction",
    "SNGPClassifier",
    "SNGPRegressor",
    "__version__",
    "attach",
    "bound",
    "calibrate",
    "fit_head",
    "fit_posterior",
    "fold",
    "load",
    "output_last",
    "parameter_groups",
    "policy",
    "save",
    "sngp",
]

_HOME = {  # of the public names
    "SNGP": "model.sngp_model",
    "GaussianProcessHead": "gp.head",
    "Prediction": "prediction.prediction",
    "SNGPClassifier": "estimators",
    "SNGPRegressor": "estimators",
    "attach": "model.convert",
    "bound": "bounds.spectral",
    "calibrate": "model.calibration",
    "fit_head": "model.output_weights",
    "fit_posterior": "model.posterior",
    "fold": "bounds.spectral",
    "load": "experiment.model_folder",
    "output_last": "model.convert",
    "parameter_groups": "model.layers",
    "policy": "decide.policies",
    "save": "model.saving",
    "sngp": "model.convert",
}
_MODULES = {  # that are used by their short name
    "scores": "prediction",
    "distance_scores": "prediction",
    "metrics": "prediction",
    "labels": "prediction",
    "spectral": "bounds",
    "features": "gp",
    "posterior": "model",
    "class_changes": "model",
    "diagnose": "model",
    "conformal": "decide",
    "drift": "decide",
    "selection": "decide",
    "export": "deploy",
    "stacked": "methods",
}
_ROOMS = (
    *("errors", "registry", "settings"),
    *("prediction", "bounds", "gp", "outputs", "model", "decide", "deploy"),
    *("backbones", "tasks", "methods", "experiment", "report", "estimators", "integrations", "serve", "cli"),
)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"afield.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"afield.{_MODULES[name]}.{name}")
    elif name in _ROOMS:
        value = importlib.import_module(f"afield.{name}")
    else:
        raise AttributeError(f"module 'afield' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES, *_ROOMS})

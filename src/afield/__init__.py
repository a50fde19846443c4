"""afield: a sense of distance for neural networks.

In one forward pass a model returns calibrated class probabilities and says how far the input lies from what it was
trained on (SNGP: Liu et al., JMLR 2022).

    model = afield.sngp(net)                      your network, distance-aware; train it as before
    afield.fit_posterior(model, train_loader)
    afield.calibrate(model, held_out_loader)
    p = model.predict(x)                          p.probs, p.variance, p.p_value, p.accept(alpha=0.01)
"""

from typing import TYPE_CHECKING, Any

from afield.calibrate import calibrate
from afield.convert import SNGP, attach, sngp
from afield.head import GaussianProcessHead
from afield.persist import load_model as load
from afield.persist import save_model as save
from afield.policy import policy
from afield.posterior import fit_posterior
from afield.predictive import Prediction
from afield.solve import fit_head
from afield.spectral import bound, fold
from afield.version import __version__

if TYPE_CHECKING:
    from afield.estimators import SNGPClassifier, SNGPRegressor

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
    "policy",
    "save",
    "sngp",
]


def __getattr__(name: str) -> Any:
    """The estimators when they are asked for: scikit-learn is an extra."""
    if name in ("SNGPClassifier", "SNGPRegressor"):
        from afield import estimators

        return getattr(estimators, name)
    raise AttributeError(f"module 'afield' has no attribute {name!r}")

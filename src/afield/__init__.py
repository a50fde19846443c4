"""afield: a sense of distance for neural networks.

In one forward pass a model returns calibrated class probabilities and says how far the input lies from what it was
trained on (SNGP: Liu et al., JMLR 2022).

    model = afield.sngp(net)                      your network, distance-aware; train it as before
    afield.fit_posterior(model, train_loader)
    afield.calibrate(model, held_out_loader)
    p = model.predict(x)                          p.probs, p.variance, p.p_value, p.accept(alpha=0.01)
"""

from afield.calibrate import calibrate
from afield.convert import SNGP, attach, sngp
from afield.head import GaussianProcessHead
from afield.persist import load_model as load
from afield.persist import save_model as save
from afield.posterior import fit_posterior
from afield.predictive import Prediction
from afield.solve import fit_head
from afield.spectral import bound, fold
from afield.version import __version__

__all__ = [
    "SNGP",
    "GaussianProcessHead",
    "Prediction",
    "__version__",
    "attach",
    "bound",
    "calibrate",
    "fit_head",
    "fit_posterior",
    "fold",
    "load",
    "save",
    "sngp",
]

"""Methods: how to build, train, finish and query a model. `METHODS[name]` is one; a combination is one line."""

from typing import Any

from afield.methods.attached import attached
from afield.methods.augmix import augmix
from afield.methods.dense import dense
from afield.methods.dropout import mc_dropout
from afield.methods.ensemble import ensemble
from afield.methods.frozen import frozen_attach, frozen_dense, frozen_gp
from afield.methods.gp import PAPER_FORM, gaussian_process
from afield.methods.gp_exact import gp_exact
from afield.methods.gp_hmc import gp_hmc
from afield.methods.gp_random_features import gp_random_features
from afield.methods.gp_variational import gp_variational
from afield.methods.gradient_penalty import gradient_penalty
from afield.methods.heteroscedastic import heteroscedastic
from afield.methods.isomax import isomax_plus
from afield.methods.method import Method
from afield.methods.temperature import with_temperature
from afield.registry import Registry

METHODS: Registry[Method[Any]] = Registry("method")
METHODS["dnn"] = dense()
METHODS["dnn-temperature"] = with_temperature(METHODS["dnn"])
METHODS["attach"] = attached(METHODS["dnn"])
METHODS["dnn-sn"] = dense(bounded=True)
METHODS["dnn-sn-temperature"] = with_temperature(METHODS["dnn-sn"])
METHODS["attach-sn"] = attached(METHODS["dnn-sn"])
METHODS["dnn-gp"] = gaussian_process()
METHODS["sngp"] = gaussian_process(bounded=True)
METHODS["het-sngp"] = heteroscedastic()
METHODS["dnn-gp-paper"] = gaussian_process(settings=PAPER_FORM)
METHODS["sngp-paper"] = gaussian_process(bounded=True, settings=PAPER_FORM)
METHODS["duq-gp"] = gradient_penalty(METHODS["dnn-gp"])
METHODS["isomax-plus"] = isomax_plus()
METHODS["isomax-plus-temperature"] = with_temperature(METHODS["isomax-plus"])
METHODS["mc-dropout"] = mc_dropout(METHODS["dnn"])
METHODS["dnn-sn-dropout"] = mc_dropout(METHODS["dnn-sn"])
METHODS["dnn-gp-dropout"] = mc_dropout(METHODS["dnn-gp"])
METHODS["sngp-dropout"] = mc_dropout(METHODS["sngp"])
METHODS["deep-ensemble"] = ensemble(METHODS["dnn"])
METHODS["dnn-sn-ensemble"] = ensemble(METHODS["dnn-sn"])
METHODS["dnn-gp-ensemble"] = ensemble(METHODS["dnn-gp"])
METHODS["sngp-ensemble"] = ensemble(METHODS["sngp"])
METHODS["dnn-augmix"] = augmix(METHODS["dnn"])
METHODS["dnn-sn-augmix"] = augmix(METHODS["dnn-sn"])
METHODS["dnn-gp-augmix"] = augmix(METHODS["dnn-gp"])
METHODS["sngp-augmix"] = augmix(METHODS["sngp"])
METHODS["frozen-dnn"] = frozen_dense()
METHODS["frozen-dnn-temperature"] = with_temperature(METHODS["frozen-dnn"])
METHODS["frozen-attach"] = frozen_attach()
METHODS["frozen-gp"] = frozen_gp()
METHODS["gp-exact"] = gp_exact()
METHODS["gp-random-features"] = gp_random_features()
METHODS["gp-variational"] = gp_variational()
METHODS["gp-hmc"] = gp_hmc()

__all__ = [
    "METHODS",
    "Method",
    "augmix",
    "ensemble",
    "gradient_penalty",
    "isomax_plus",
    "mc_dropout",
    "with_temperature",
]

"""Methods: how to build, train, finish and query a model. `METHODS[name]` is one."""

from afield.methods.dense import dense
from afield.methods.gp import gaussian_process
from afield.methods.method import Method
from afield.registry import Registry

METHODS: Registry[Method] = Registry("method")
METHODS["dnn"] = dense()
METHODS["dnn-sn"] = dense(0.95)
METHODS["dnn-gp"] = gaussian_process()
METHODS["sngp"] = gaussian_process(0.95)

__all__ = ["METHODS", "Method"]

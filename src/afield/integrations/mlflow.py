"""MLflow: a flavour of its own for models, which every tool of MLflow loads as a `pyfunc`.

    from afield.integrations.mlflow import load_model, log_model

    log_model(model, name="pets", net="mynets:resnet", code_paths=["mynets.py"])        inside mlflow.start_run()
    model = load_model("models:/pets/1")                                     the SNGP
    mlflow.pyfunc.load_model("models:/pets/1").predict(rows)                 a data frame, a row for each input

The folder is that of `afield.save` with `MLmodel` beside it: safetensors and JSON, no pickle. mlflow-skinny will do.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from afield.deploy.traced import chosen_alpha
from afield.experiment.model_folder import open_model
from afield.gp.likelihoods import LIKELIHOODS
from afield.model.saving import save
from afield.model.sngp_model import SNGP
from afield.prediction.prediction import Prediction
from afield.version import __version__

try:
    import mlflow
    import pandas
    from mlflow.models import Model
    from mlflow.utils.model_utils import _add_code_from_conf_to_system_path, _validate_and_copy_code_paths
except ImportError as error:
    raise ImportError(f'{error}. The MLflow integration needs an extra: pip install "afield[mlflow]".') from error

if TYPE_CHECKING:
    from mlflow.models.model import ModelInfo

FLAVOR, _DATA = "afield", "model"


def save_model(
    model: SNGP,
    path: str | os.PathLike[str],
    *,
    net: str,
    metadata: dict[str, Any] | None = None,
    code_paths: list[str] | None = None,
    pip_requirements: Sequence[str] | None = None,
    mlflow_model: Model | None = None,
    **neighbours: Any,
) -> None:
    """Write a model to a new folder, as MLflow has it.

    net               "module:function", which makes the network; its own weights do not matter
    metadata          and `neighbours`, as in `afield.save`
    code_paths        files and folders that hold the module of `net`, which are copied
    pip_requirements  None: this version of afield
    mlflow_model      MLflow gives it, in `log_model`

    returns  nothing
    raises   TypeError if it is no `SNGP`; ValueError if `net` has no colon, or the folder is not empty

    >>> save_model(model, "pets", net="mynets:make")
    >>> sorted(each.name for each in pathlib.Path("pets").iterdir())
    ['MLmodel', 'model', 'requirements.txt']
    """
    if not isinstance(model, SNGP):
        raise TypeError(f"Expected a model made by afield.sngp or afield.attach, got {type(model).__name__}.")
    if ":" not in net:
        raise ValueError(f"net expects module:function, such as mynets:resnet, got {net!r}.")
    folder = Path(path)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: MLflow wants a new folder for each model.")
    folder.mkdir(parents=True, exist_ok=True)
    save(model, folder / _DATA, metadata=metadata, **neighbours)
    code = _validate_and_copy_code_paths(code_paths, str(folder))
    requirements = [f"afield=={__version__}"] if pip_requirements is None else list(pip_requirements)
    (folder / "requirements.txt").write_text("\n".join(requirements) + "\n")
    written = Model() if mlflow_model is None else mlflow_model
    mlflow.pyfunc.add_to_model(written, loader_module=__name__, code=code, pip_requirements="requirements.txt")
    written.add_flavor(FLAVOR, afield_version=__version__, net=net, data=_DATA, code=code)
    written.save(str(folder / "MLmodel"))


def log_model(model: SNGP, name: str = "model", **options: Any) -> "ModelInfo":
    """Log a model to the active run.

    name     of the model in the run
    options  of `save_model`, and those of `mlflow.models.Model.log`

    returns  MLflow's `ModelInfo`
    raises   those of `save_model`

    >>> with mlflow.start_run():
    ...     info = log_model(model, "pets", net="mynets:make")
    >>> torch.equal(load_model(info.model_uri).predict(x).probs, model.predict(x).probs)
    True
    """
    import afield.integrations.mlflow as flavor

    return Model.log(artifact_path=None, name=name, flavor=flavor, model=model, **options)


def load_model(model_uri: str, dst_path: str | None = None) -> SNGP:
    """The model of a URI of MLflow, or of a folder that `save_model` wrote.

    dst_path  where to put its files; None: a temporary folder

    returns  the `SNGP`
    raises   ValueError if the model is of another flavour

    >>> save_model(model, "pets", net="mynets:make")
    >>> type(load_model("pets")).__name__
    'SNGP'
    """
    return _load(Path(mlflow.artifacts.download_artifacts(artifact_uri=model_uri, dst_path=dst_path)))[0]


def _load_pyfunc(path: str) -> "_Pyfunc":
    return _Pyfunc(*_load(Path(path)))


def _load(folder: Path) -> tuple[SNGP, tuple[str, ...]]:
    flavors = Model.load(str(folder)).flavors
    if FLAVOR not in flavors:
        raise ValueError(f"{folder} has no flavour {FLAVOR!r}, only {', '.join(flavors)}: log it with log_model.")
    about = flavors[FLAVOR]
    _add_code_from_conf_to_system_path(str(folder), about)
    opened = open_model(folder / about["data"], about["net"])
    return opened.as_sngp("MLflow"), opened.labels


class _Pyfunc:
    """What MLflow calls: rows in, a data frame out."""

    def __init__(self, model: SNGP, labels: tuple[str, ...]) -> None:
        self.model, self.labels, self.alpha = model, labels, chosen_alpha(model, None)

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> pandas.DataFrame:
        """Label and probability, or mean and std; variance, score; p_value and accepted of a calibrated model.

        `params`: {"alpha": 0.05} for another rate of false alarms behind `accepted`
        """
        values = model_input.to_numpy() if isinstance(model_input, pandas.DataFrame) else model_input
        alpha = (params or {}).get("alpha", self.alpha)
        return self._frame(self._predict(values), alpha)

    def _predict(self, values: Any) -> Prediction:
        if isinstance(values, Mapping):
            return self.model.predict({name: torch.as_tensor(np.asarray(v)) for name, v in values.items()})
        return self.model.predict(np.asarray(values))

    def _frame(self, p: Prediction, alpha: float | None) -> pandas.DataFrame:
        columns: dict[str, Any] = {}
        if LIKELIHOODS[self.model.head.likelihood].of_classes:
            columns["label"] = [self.labels[k] for k in p.labels.tolist()] if self.labels else p.labels.numpy()
            columns["probability"] = p.confidence.numpy()
        else:
            for name, values in (("mean", p.mean), ("std", p.std)):
                wide = values.reshape(len(values), -1).numpy()
                columns |= {name if wide.shape[1] == 1 else f"{name}_{k}": wide[:, k] for k in range(wide.shape[1])}
        if p.variance is not None and p.variance.dim() == 1:
            columns["variance"] = p.variance.numpy()
        columns["score"] = p.score().numpy()
        if p.p_value is not None and alpha is not None:
            columns |= {"p_value": p.p_value.numpy(), "accepted": p.accept(alpha).numpy()}
        return pandas.DataFrame(columns)

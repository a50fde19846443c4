"""`Config`: everything that decides a run."""

import dataclasses
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from afield.methods import METHODS, Method
from afield.settings import Settings
from afield.tasks import PRESETS, TASKS


@dataclass(frozen=True)
class Config:
    """Task, method, seeds and settings of one run."""

    task: str
    method: str = "sngp"
    seed: int = 0
    """Of weights, batches and dropout masks."""
    data_seed: int = 0
    """Of data that is drawn at random, or the number of the split."""
    preset: str = "small"
    settings: Settings = Settings()
    blind: bool = False
    """Predict validation data only, so that test data stays unseen while settings are chosen."""

    def __post_init__(self) -> None:
        TASKS.check(self.task)
        METHODS.check(self.method)
        if self.preset not in PRESETS:
            raise ValueError(f"Unknown preset {self.preset!r}: expected one of {', '.join(PRESETS)}.")
        _check_settings(self.settings)
        if METHODS[self.method].members is None:  # two runs of a single model do not differ in a number of members
            object.__setattr__(self, "settings", replace(self.settings, members=Settings.members))

    @staticmethod
    def of(task: str, method: str = "sngp", *, preset: str = "small", **changes: Any) -> "Config":
        """The task's own settings under a preset, with `changes` to them; also seed, data_seed and blind."""
        own = {name: changes.pop(name) for name in ("seed", "data_seed", "blind") if name in changes}
        settings = _change(TASKS[task].settings_for(preset, method, METHODS[method].settings), changes)
        return Config(task, method, **own, preset=preset, settings=settings)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "Config":
        """The inverse of `to_dict`. A missing setting is None where it may be None, else the task's own."""
        known = {f.name for f in fields(Settings)}
        rest: dict[str, Any] = {name: value for name, value in values.items() if name not in known}
        given = [name for name in known if name in values or name in _OPTIONAL]
        return Config.of(**rest, **{name: values.get(name) for name in given})  # type: ignore[arg-type]

    @staticmethod
    def from_file(file: Path) -> "Config":
        """From a config.toml."""
        try:
            return Config.from_dict(tomllib.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{file} is damaged, or no config of a run: {str(error).rstrip('.')}. Mend it; in a run folder, "
                "--fresh makes it and the run anew."
            ) from error

    def to_dict(self) -> dict[str, Any]:
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "settings"}
        return own | dataclasses.asdict(self.settings)

    @property
    def folder(self) -> Path:
        """Of this run, below the folder of all runs."""
        name = str(self.seed) if self.data_seed == 0 else f"{self.data_seed}-{self.seed}"
        return Path(self.task, self.method, name)

    @property
    def members(self) -> "list[Config]":
        """The runs that an ensemble is made of; empty for a single model."""
        members = METHODS[self.method].members
        if members is None:
            return []
        base, size = _name_of(members.method), members.size or self.settings.members
        return [replace(self, method=base, seed=self.seed * size + i) for i in range(size)]

    @property
    def same_training(self) -> "Config | None":
        """The run of another method that trains the same weights, such as sngp for sngp-dropout, if there is one."""
        method = METHODS[self.method]
        if method.trained_as is None or (method.own_dropout and self.settings.dropout is not None):
            return None
        return replace(self, method=_name_of(method.trained_as))


_AT_LEAST_ONE = ("epochs", "batch_size", "num_random_features", "members", "projection", "rank")
_POSITIVE = (
    "learning_rate",
    "head_learning_rate",
    "bound",
    "length_scale",
    "ridge",
    "amplitude",
    "logit_scale",
    "fraction",
)
_NOT_NEGATIVE = ("weight_decay", "head_weight_decay")
_RATES = ("warmup", "word_dropout", "dropout", "momentum")
_TYPES = get_type_hints(Settings)
_OPTIONAL = {f.name for f in fields(Settings) if "None" in str(f.type)}
UNNAMED = {f.name: None if f.name in _OPTIONAL else f.default for f in fields(Settings)}
"""What a written config means by not naming a setting: None, which TOML has not, or that it was made before it."""


def _check_settings(settings: Settings) -> None:
    """Every value is of its type and in its range, or an error that names it."""
    for name, kind in _TYPES.items():
        value = getattr(settings, name)
        if not is_of(value, kind):
            raise ValueError(f"{name} expects {describe_type(kind)}, got {value!r}.")
        if value is None or isinstance(value, str | tuple):
            continue
        if name in _AT_LEAST_ONE and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
        if name in _POSITIVE and not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}.")
        if name in _NOT_NEGATIVE and not 0 <= value < math.inf:
            raise ValueError(f"{name} must not be negative, got {value}.")
        if name in _RATES and not 0 <= value <= 1:
            raise ValueError(f"{name} must lie between 0 and 1, got {value}.")


def is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of the type of a setting; a whole number will do for a number."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(isinstance(each, str) for each in value)
    if options := get_args(kind):  # such as float | None
        return any(is_of(value, option) for option in options)
    if kind is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def describe_type(kind: Any) -> str:
    """What values a setting takes, in words for a message."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        return "a list of names"
    if options := get_args(kind):
        return " or ".join(map(describe_type, options))
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a name"}.get(kind, "nothing")


def list_folders(configs: Iterable[Config]) -> str:
    """Their folders, as text for a message."""
    return ", ".join(str(config.folder) for config in configs)


def _name_of(method: Method) -> str:
    return next(name for name, other in METHODS.items() if other is method)


def _change(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    unknown = set(changes) - {f.name for f in fields(Settings)}
    if unknown:
        raise ValueError(
            f"Unknown settings: {', '.join(sorted(unknown))}. Known: {', '.join(f.name for f in fields(Settings))}."
        )
    tuples: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()
    }
    return replace(settings, **tuples)

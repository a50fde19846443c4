"""`Config`: all that decides a run."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from afield.methods import METHODS, Method
from afield.settings import Settings
from afield.tasks import TASKS


@dataclass(frozen=True)
class Config:
    """One run."""

    task: str
    method: str = "sngp"
    seed: int = 0
    """Of weights, batches and masks."""
    data_seed: int = 0
    """Of the data that is drawn, or the number of the split."""
    preset: str = "small"
    settings: Settings = Settings()
    blind: bool = False
    """Predict validation data alone: while settings are chosen, test data stays unseen."""

    def __post_init__(self) -> None:
        if METHODS[self.method].members is None:  # a single model has no use for a number of members
            object.__setattr__(self, "settings", replace(self.settings, members=Settings.members))

    @staticmethod
    def of(task: str, method: str = "sngp", *, preset: str = "small", **rest: Any) -> "Config":
        """The task's own settings, but for those given by name; seed, data_seed and blind as well."""
        own = {name: rest.pop(name) for name in ("seed", "data_seed", "blind") if name in rest}
        settings = _replaced(TASKS[task].settings_for(preset, method), rest)
        return Config(task, method, **own, preset=preset, settings=settings)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "Config":
        """From the content of config.toml: a setting that is not there is None where the task's own is not required."""
        known = {f.name for f in fields(Settings)}
        rest: dict[str, Any] = {name: value for name, value in values.items() if name not in known}
        given = [name for name in known if name in values or name in _OPTIONAL]
        return Config.of(**rest, **{name: values.get(name) for name in given})  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "settings"}
        return own | dataclasses.asdict(self.settings)

    @property
    def folder(self) -> Path:
        """Below the folder of all runs."""
        name = str(self.seed) if self.data_seed == 0 else f"{self.data_seed}-{self.seed}"
        return Path(self.task, self.method, name)

    @property
    def members(self) -> "list[Config]":
        """The runs that an ensemble is made of; none for a single model."""
        members = METHODS[self.method].members
        if members is None:
            return []
        base, size = _name(members.method), members.size or self.settings.members
        return [replace(self, method=base, seed=self.seed * size + i) for i in range(size)]

    @property
    def twin(self) -> "Config | None":
        """The run that trains the same weights, if there is one: methods can differ in prediction alone."""
        base = METHODS[self.method].trained_as
        if base is None or self.settings.dropout is not None:
            return None
        return replace(self, method=_name(base))


def _name(method: Method) -> str:
    return next(name for name, other in METHODS.items() if other is method)


_OPTIONAL = {f.name for f in fields(Settings) if "None" in str(f.type)}


def _replaced(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    unknown = set(changes) - {f.name for f in fields(Settings)}
    if unknown:
        raise ValueError(
            f"Unknown settings: {', '.join(sorted(unknown))}. Known: {', '.join(f.name for f in fields(Settings))}."
        )
    lists: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()
    }
    return replace(settings, **lists)


def folders_of(configs: list[Config]) -> str:
    return ", ".join(str(config.folder) for config in configs)

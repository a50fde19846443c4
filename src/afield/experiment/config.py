"""`Config`: everything that decides a run."""

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

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
        if METHODS[self.method].members is None:  # two runs of a single model do not differ in a number of members
            object.__setattr__(self, "settings", replace(self.settings, members=Settings.members))

    @staticmethod
    def of(task: str, method: str = "sngp", *, preset: str = "small", **changes: Any) -> "Config":
        """The task's own settings under a preset, with `changes` to them; also seed, data_seed and blind."""
        own = {name: changes.pop(name) for name in ("seed", "data_seed", "blind") if name in changes}
        settings = _change(TASKS[task].settings_for(preset, method), changes)
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
        return Config.from_dict(tomllib.loads(file.read_text(encoding="utf-8")))

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
        base = METHODS[self.method].trained_as
        if base is None or self.settings.dropout is not None:
            return None
        return replace(self, method=_name_of(base))


_OPTIONAL = {f.name for f in fields(Settings) if "None" in str(f.type)}


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

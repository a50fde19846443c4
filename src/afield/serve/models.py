"""The models of a service by name, each with its versions, reloaded when their files change.

A source is a folder or a file; a folder whose only content are folders named by numbers (`1/`, `2/`, ...) has a version
in each, and the highest is the one that answers by default. Elsewhere the version is the first digits of the model's
hash. All that is served is one immutable mapping, which is replaced in one step: a request reads it once, so that every
answer belongs to one version. A new version that cannot be opened leaves the old one in place.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afield.serve.engine import Engine
from afield.serve.logs import LOGGER, log
from afield.serve.metrics import Metrics
from afield.serve.monitor import Monitor

_FILES = ("afield.json", "config.json", "metrics.json", "model.safetensors", "model.onnx")


@dataclass(frozen=True)
class Version:
    """One version of one model."""

    model: str
    name: str
    engine: Engine
    monitor: Monitor
    stamp: Any = None


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    open   path of a version -> engine; may be called again when the files have changed
    path   None: the engine is in memory, and `open` takes no notice of its argument
    """

    name: str
    open: Callable[[Path], Engine]
    path: Path | None = None

    def versions(self) -> dict[str | None, Path]:
        """Paths of the versions that are there, by name; None: the name is the model's own hash."""
        if self.path is None or not self.path.is_dir():
            return {None: self.path or Path()}
        numbered = [p for p in self.path.iterdir() if p.is_dir() and p.name.isdecimal()]
        if not numbered or any((self.path / name).exists() for name in _FILES):
            return {None: self.path}
        return {p.name: p for p in sorted(numbered, key=lambda p: int(p.name))}


@dataclass
class Models:
    """What is served now. `current` is replaced, never changed.

    monitored  options of `Monitor`; its state folder has one folder for each model and version
    """

    sources: list[Source]
    metrics: Metrics
    state: Path | None = None
    monitored: Mapping[str, Any] = field(default_factory=dict)
    current: Mapping[str, Mapping[str, Version]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        twice = {s.name for s in self.sources if sum(s.name == other.name for other in self.sources) > 1}
        if twice:
            raise ValueError(f"Two models have the name {', '.join(twice)}: name them with NAME=PATH.")
        self._stop, self._failures = threading.Event(), dict[str, str]()
        self._thread: threading.Thread | None = None
        for source in self.sources:
            self._load(source, strict=True)

    def find(self, model: str, version: str | None = None) -> Version | None:
        """The version of a model, or its latest one."""
        versions = self.current.get(model)
        if not versions:
            return None
        return list(versions.values())[-1] if version is None else versions.get(version)

    @property
    def default(self) -> Version | None:
        """The latest version of the first model."""
        return self.find(self.sources[0].name) if self.sources else None

    def watch_files(self, seconds: float = 1.0) -> None:
        """Look for changes now and then, in a thread."""

        def work() -> None:
            while not self._stop.wait(seconds):
                for source in self.sources:
                    self._load(source)

        self._thread = threading.Thread(target=work, name="afield-reload", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for versions in self.current.values():
            for version in versions.values():
                version.monitor.close()

    def _load(self, source: Source, *, strict: bool = False) -> None:
        """Open what is new, and publish it if anything has changed."""
        before = dict(self.current.get(source.name, {}))
        after: dict[str, Version] = {}
        try:
            for name, path in source.versions().items():
                known = next((v for v in before.values() if v.stamp == (name, _stamp(path))), None)
                if source.path is None and before:
                    known = next(iter(before.values()))
                version = known or self._open(source, name, path, before)
                after[version.name] = version
        except Exception as error:
            if strict:
                raise
            if str(error) != self._failures.get(source.name):  # once, not every second
                LOGGER.error("reload failed", extra={"fields": {"model": source.name, "error": str(error)[:500]}})
            self._failures[source.name] = str(error)
            return
        self._failures.pop(source.name, None)
        if after and (list(after) != list(before) or any(before[k] is not v for k, v in after.items())):
            self._publish(source.name, before, after)

    def _open(self, source: Source, name: str | None, path: Path, before: Mapping[str, Version]) -> Version:
        files: Any = None
        while files != (now := _stamp(path)):  # what is written anew while it is read is read again
            files, engine = now, source.open(path)
        stamp, label = (name, files), name or engine.identity[:12]
        if label in before and before[label].engine.identity == engine.identity:  # the same model, saved again
            return Version(source.name, label, before[label].engine, before[label].monitor, stamp)
        state = None if self.state is None else self.state / source.name / f"{label}-{engine.identity[:12]}"
        monitor = Monitor(engine, self.metrics, source.name, label, state=state, **self.monitored)
        self.metrics.loaded.labels(source.name, label).set(time.time())
        return Version(source.name, label, engine, monitor, stamp)

    def _publish(self, name: str, before: Mapping[str, Version], after: Mapping[str, Version]) -> None:
        self.current = {**self.current, name: after}
        log("loaded", model=name, versions=list(after), platform=next(iter(after.values())).engine.platform)
        kept = {id(version.monitor) for version in after.values()}
        for label, version in before.items():
            if id(version.monitor) not in kept:
                version.monitor.close()
            if label not in after:  # now: what was left has been counted
                self.metrics.forget(name, label)


def _stamp(path: Path) -> Any:
    """What changes when a model is written anew."""
    files = [path] if path.is_file() else [path / name for name in _FILES]
    found = []
    for file in files:
        with contextlib.suppress(OSError):
            status = os.stat(file)
            found.append((file.name, status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)

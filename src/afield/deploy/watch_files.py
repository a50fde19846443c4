"""Watch scored files for drift: the rows of all parts, in the order of the files, are one stream.

    watch_files(parts, out / STATE, begin, identity)

A file of state remembers the watch and the parts that it has seen. A part is counted in one step: after a stop the same
call goes on with those that are not counted yet. Each part counts once, also if it is scored anew.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from afield.decide.drift import Watch
from afield.decide.drift_file import load_watch, save_watch
from afield.deploy.read_files import arrow
from afield.deploy.score_files import ROW_GROUP

STATE = ".drift.npz"


def watch_files(
    parts: Sequence[Path], file: Path, begin: Callable[[], Watch], *, identity: str, alpha: float | None = None
) -> Watch:
    """Give the scores of parts to the watch of a file of state, or to a new one that `begin` makes.

    alpha  what the watch must have been made with; None: anything
    """
    if file.is_file():
        watch, about = load_watch(file)
        if about.get("identity") != identity or (alpha is not None and watch.alpha != alpha):
            raise ValueError(
                f"{file} watches the answers of another model, or at another rate ({watch.alpha:g}). Use another "
                "--out, or delete the file."
            )
        counted = list(about["counted"])
    else:
        watch, counted = begin(), []
    for part in parts:
        name = part.relative_to(file.parent).as_posix()
        if name not in counted:
            _count(watch, part)
            counted.append(name)
            save_watch(watch, file, {"identity": identity, "counted": counted})
    return watch


def _count(watch: Watch, part: Path) -> None:
    _, parquet = arrow()
    with parquet.ParquetFile(part) as content:
        for batch in content.iter_batches(ROW_GROUP, columns=["row", "score"]):
            valid = batch.filter(batch.column("score").is_valid())
            scores = valid.column("score").to_numpy(zero_copy_only=False)
            shown = [{"file": part.name.removesuffix(".parquet"), "row": row} for row in valid["row"].to_pylist()]
            watch.update(scores, inputs=shown)

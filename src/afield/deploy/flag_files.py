"""The rows of many files that are far afield: the column `flagged`, with few in-domain rows among the flagged.

    flag_files(parts, fdr)

All rows of all parts that `score_files` wrote are one batch (`decide.selection`). A first pass counts their p-values,
which gives one threshold for all of them; a second writes every part anew with the column, beside the old one, whose
place it takes in one step. Memory does not grow with the files. A part records the selection that it holds, so that the
same call goes on where it was stopped, and does nothing where all is done.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from afield.decide.selection import Counts
from afield.deploy.read_files import arrow
from afield.deploy.score_files import ONE_REFERENCE, ROW_GROUP, write_in_one_step

FLAGGED = "flagged"
NO_P_VALUES = (
    "fdr needs p-values, and this model was never calibrated. Call afield.calibrate(model, held_out_loader) before "
    "saving it, or leave fdr out."
)
_RECORD = b"afield.selection"


@dataclass(frozen=True)
class Selection:
    """What was flagged.

    threshold       the largest p-value that is flagged; 0: none is
    any_dependence  whether the p-values may depend on each other in any way: those of ensembles
    smallest        the smallest p-value there was
    """

    fdr: float
    threshold: float
    any_dependence: bool
    rows: int
    flagged: int
    smallest: float


def flag_files(parts: Sequence[Path], fdr: float) -> Selection:
    """Give every part the column `flagged`: null where there is no p-value, because the row could not be read."""
    _, parquet = arrow()
    counts, one_reference = Counts(), True
    for part in parts:
        with parquet.ParquetFile(part) as file:
            schema = file.schema_arrow
            if "p_value" not in schema.names:
                raise ValueError(f"{part}: {NO_P_VALUES}")
            one_reference &= (schema.metadata or {}).get(ONE_REFERENCE) == b"true"
            for batch in file.iter_batches(ROW_GROUP, columns=["p_value"]):
                counts.add(batch.column(0).drop_null().to_numpy(zero_copy_only=False))
    threshold = counts.threshold(fdr, any_dependence=not one_reference)
    smallest = float(counts.values.min(initial=1.0))
    found = Selection(fdr, threshold, not one_reference, counts.total, counts.count_to(threshold), smallest)
    for part in parts:
        _write(part, found)
    return found


def unflag_files(parts: Sequence[Path]) -> None:
    """Take the column away from all parts that have it: it spoke of another batch."""
    for part in parts:
        _write(part, None)


def _write(part: Path, selection: Selection | None) -> None:
    """Write a part anew, unless it holds this selection; None: no selection."""
    pa, parquet = arrow()
    known = ("fdr", "threshold", "any_dependence")
    record = b"" if selection is None else json.dumps({k: asdict(selection)[k] for k in known}).encode()
    with parquet.ParquetFile(part) as file:
        before = file.schema_arrow
        if (before.metadata or {}).get(_RECORD, b"") == record:
            return
        plain = pa.schema([field for field in before if field.name != FLAGGED])
        metadata = {k: v for k, v in (before.metadata or {}).items() if k != _RECORD}
        schema = plain.with_metadata(metadata)
        if selection is not None:
            schema = plain.append(pa.field(FLAGGED, pa.bool_())).with_metadata(metadata | {_RECORD: record})
        with write_in_one_step(part) as path, parquet.ParquetWriter(path, schema, compression="zstd") as writer:
            for batch in file.iter_batches(ROW_GROUP, columns=plain.names):
                table = pa.Table.from_batches([batch]).replace_schema_metadata(schema.metadata)
                writer.write_table(table if selection is None else _flagged(table, selection, schema))


def _flagged(table: Any, selection: Selection, schema: Any) -> Any:
    """The table with the column behind the others."""
    pa, _ = arrow()
    p_value = table.column("p_value").to_numpy()  # null is NaN here
    return table.append_column(schema.field(FLAGGED), pa.array(p_value <= selection.threshold, mask=np.isnan(p_value)))

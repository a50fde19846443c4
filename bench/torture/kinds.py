"""The kinds of faults, in the order of the table."""

from bench.torture import bits, edits, forks, kills, numbers, pickles, races, ranks, tables, tars
from bench.torture.fault import Kind

KINDS: dict[str, Kind] = {
    module.KIND.name: module.KIND
    for module in (bits, edits, kills, races, forks, pickles, tables, tars, numbers, ranks)
}

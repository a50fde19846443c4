"""Suites: which tasks and methods make a table or a figure of the paper. `SUITES["toy"]` is the low-dimensional one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from afield.experiment import Config
from afield.methods import METHODS
from afield.registry import Registry
from afield.tasks import TASKS

SINGLE = ("dnn", "dnn-sn", "dnn-gp", "sngp")
FIGURE_1D = ("gp-exact", "gp-random-features", "gp-variational")
FIGURE_2D = ("gp-hmc", "deep-ensemble", "mc-dropout", "dnn-gp", "sngp")
LANDSCAPE = ("dnn-gp-dropout", "sngp-dropout", "dnn-gp-ensemble", "sngp-ensemble")


@dataclass(frozen=True)
class Suite:
    """Methods by task, and how many seeds each preset has. `splits`: a seed is a split of the data as well."""

    title: str
    methods: Mapping[str, Sequence[str]]
    seeds: Mapping[str, int]
    splits: bool = False

    def configs(
        self, preset: str = "small", *, methods: Sequence[str] | None = None, seeds: int | None = None
    ) -> list[Config]:
        """All runs of the suite; `methods` and `seeds` in the place of its own."""
        for name in methods or ():
            METHODS[name]
        count = self.seeds[preset] if seeds is None else seeds
        if count < 1:
            raise ValueError(f"A suite needs at least one seed, got {count}.")
        return [
            Config.of(task, method, preset=preset, seed=seed, data_seed=seed if self.splits else 0)
            for task, own in self.methods.items()
            for method in (methods or own)
            for seed in range(count)
        ]


SUITES: Registry[Suite] = Registry("suite")
SUITES["toy"] = Suite(
    "Low-dimensional experiments (paper: figures 1d_exp and 2d_exp)",
    {
        "toy-regression": FIGURE_1D,
        "two-moons": tuple(
            dict.fromkeys((*FIGURE_2D, *SINGLE, "gp-random-features", "duq-gp", "isomax-plus", *LANDSCAPE))
        ),
        "two-ovals": tuple(dict.fromkeys((*FIGURE_2D, "dnn"))),
    },
    {"smoke": 1, "small": 3, "paper": 10},
)

assert all(task in TASKS for suite in SUITES.values() for task in suite.methods)

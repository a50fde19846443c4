"""Suites: the tasks and methods of a table or a figure of the paper. `SUITES["toy"]` has the low-dimensional ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from afield.experiment.config import Config
from afield.experiment.paper import METHOD_OF
from afield.methods import METHODS
from afield.registry import Registry
from afield.tasks import uci

FOUR = ("dnn", "dnn-sn", "dnn-gp", "sngp")
TEMPERATURE = ("dnn-temperature", "dnn-sn-temperature")  # with the weights of dnn and dnn-sn
KEPT = ("attach", "attach-sn")  # with the weights of dnn and dnn-sn
PAPER_FORM = ("dnn-gp-paper", "sngp-paper")
SINGLE = (*FOUR, *TEMPERATURE, *PAPER_FORM)
FIGURE_1D = ("gp-exact", "gp-random-features", "gp-variational")
FIGURE_2D = ("gp-hmc", "deep-ensemble", "mc-dropout", "dnn-gp", "sngp")
LANDSCAPE = ("dnn-gp-dropout", "sngp-dropout", "dnn-gp-ensemble", "sngp-ensemble")

ROWS = (*SINGLE, *KEPT, "mc-dropout", "deep-ensemble", "sngp-ensemble")
CIFAR_ROWS = ("isomax-plus", "isomax-plus-temperature", "duq-gp", *ROWS)
FROZEN = ("frozen-dnn", "frozen-dnn-temperature", "frozen-attach", "frozen-gp")
CROSSES = tuple(
    METHOD_OF[f"{base} + {what}"]
    for what in ("Dropout", "Ensemble", "AugMix")
    for base in ("DNN", "DNN-SN", "DNN-GP", "SNGP")
)

REGRESSION = ("dnn", "sngp", "mc-dropout", "deep-ensemble", "gp-exact")
_MOST_ROWS_EXACT = 10_000  # with more rows, an exact Gaussian process takes hours


@dataclass(frozen=True)
class Suite:
    """Methods by task, and how many seeds each preset has.

    splits  each seed is another split of the data, and not another seed of the training
    pooled  there is one ensemble, and its members are the runs of the single model
    """

    title: str
    methods: Mapping[str, Sequence[str]]
    seeds: Mapping[str, int]
    splits: bool = False
    pooled: bool = False

    def configs(
        self,
        preset: str = "small",
        *,
        methods: Sequence[str] | None = None,
        seeds: int | None = None,
        precision: str | None = None,
    ) -> list[Config]:
        """All runs of the suite. `methods`, `seeds` and `precision` replace those of the suite and its tasks."""
        for name in methods or ():
            METHODS.check(name)
        if preset not in self.seeds:
            raise ValueError(f"Unknown preset {preset!r}: expected one of {', '.join(self.seeds)}.")
        count = self.seeds[preset] if seeds is None else seeds
        if count < 1:
            raise ValueError(f"A suite needs at least one seed, got {count}.")
        given: dict[str, Any] = {"preset": preset} | ({} if precision is None else {"precision": precision})
        number = "data_seed" if self.splits else "seed"
        configs = []
        for task, own in self.methods.items():
            for method in methods or own:
                pooled = self.pooled and METHODS[method].members is not None
                runs = [{"members": count}] if pooled else [{number: i} for i in range(count)]
                configs += [Config.of(task, method, **(given | run)) for run in runs]
        return configs


def _table(task: str, title: str, methods: Sequence[str]) -> Suite:
    seeds = {"smoke": 1, "small": 3, "paper": 10}
    return Suite(title, {task: tuple(dict.fromkeys(methods))}, seeds, pooled=True)


SUITES: Registry[Suite] = Registry("suite")
SUITES["toy"] = Suite(
    "Low-dimensional experiments (paper: figures 1d_exp and 2d_exp)",
    {
        "toy-regression": FIGURE_1D,
        "two-moons": tuple(
            dict.fromkeys(
                (
                    *FIGURE_2D,
                    *SINGLE,
                    "gp-random-features",
                    "duq-gp",
                    "isomax-plus",
                    "isomax-plus-temperature",
                    *LANDSCAPE,
                )
            )
        ),
        "two-ovals": tuple(dict.fromkeys((*FIGURE_2D, *SINGLE))),
    },
    {"smoke": 1, "small": 3, "paper": 10},
)
SUITES["clinc"] = _table("clinc", "Intents, CLINC150 (paper: table clinc)", (*ROWS, *FROZEN))
SUITES["cifar10"] = _table(
    "cifar10", "CIFAR-10 (paper: tables cifar10, cifar10-abl and cifar-ood)", (*CIFAR_ROWS, *CROSSES)
)
SUITES["cifar100"] = _table("cifar100", "CIFAR-100 (paper: tables cifar100 and cifar100-abl)", (*CIFAR_ROWS, *CROSSES))
SUITES["cifar100-3k"] = _table("cifar100-3k", "CIFAR-100 on the 3,000 images at hand", (*CIFAR_ROWS, *CROSSES))
SUITES["imagenet"] = _table("imagenet", "ImageNet (paper: table imagenet)", ROWS)
SUITES["genomics"] = _table("genomics", "Bacteria (paper: table genomics)", ROWS)
SUITES["genomics-ren2019"] = _table("genomics-ren2019", "Bacteria, the published example of 1,001 reads", ROWS)
SUITES["fashion"] = _table("fashion", "Fashion-MNIST, all crosses", (*SINGLE, *KEPT, *CROSSES))
SUITES["shapes"] = Suite(
    "Segmentation of drawn shapes, foreign objects in some pictures",
    {"shapes-segmentation": ("dnn", "dnn-temperature", "attach", "dnn-gp", "sngp")},
    {"smoke": 1, "small": 3, "paper": 3},
)
SUITES["uci"] = Suite(
    "Regression on UCI sets, a split for every seed",
    {name: REGRESSION if rows <= _MOST_ROWS_EXACT else REGRESSION[:-1] for name, (_, rows) in uci.SETS.items()},
    {"smoke": 1, "small": 3, "paper": 20},
    splits=True,
)

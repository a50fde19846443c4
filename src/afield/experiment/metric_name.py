"""The names of metrics in metrics.json, in reports and in the paper's tables: `metric/data/score`.

    accuracy/clean           a metric on one part of the data
    auroc/svhn               an OOD metric on one OOD set, by the score that the paper uses
    auroc/svhn/variance      the same by a named score
    spearman/distance        a metric that is not about one part has its subject in that place

Files and the keys of dictionaries hold the text; whoever needs a part of a name parses it.
"""

from dataclasses import dataclass

from afield.prediction.distance_scores import FITTED
from afield.prediction.scores import SCORES


@dataclass(frozen=True)
class MetricName:
    """What was measured, on which data, by which score. `data` and `score` are empty where there is none to name."""

    metric: str
    data: str = ""
    score: str = ""

    @classmethod
    def parse(cls, text: str) -> "MetricName":
        """Read a name. Data sets may have slashes in their names; a last part is a score if a score has that name."""
        metric, _, rest = text.partition("/")
        data, _, score = rest.rpartition("/")
        return cls(metric, data, score) if data and (score in SCORES or score in FITTED) else cls(metric, rest)

    @property
    def qualifier(self) -> str:
        """The name without the metric: `svhn/variance`."""
        return "/".join(part for part in (self.data, self.score) if part)

    def __str__(self) -> str:
        return "/".join(part for part in (self.metric, self.data, self.score) if part)

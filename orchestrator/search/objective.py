"""The objective of a study: the metric that ranks configurations, its direction and its display."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from trainables import metrics


@dataclass(frozen=True)
class Objective:
    metric: str
    """Name in the study file and in a trial's metrics."""
    title: str
    """Name in tables."""
    test_title: str
    """Name in tables of test results."""
    evaluated_on: str = "on the validation split"
    """What the search evaluates configurations on, for captions."""
    unit: str = ""
    """Appended to the title in headings."""
    lower_is_better: bool = True
    format_spec: str = ".3g"

    @property
    def short(self) -> str:
        """Title for narrow columns; `%` alone for accuracy, the usual metric."""
        return "%" if self.metric == "accuracy" else f"{self.title}{self.unit}"

    def cost(self, score: float) -> float:
        """The score, negated if larger scores are better: smaller costs are better."""
        return score if self.lower_is_better else -score

    def format(self, score: float) -> str:
        return format(score, self.format_spec)

    def standard_error(self, score: float, rows: int) -> float | None:
        """Binomial standard error of an accuracy (or top-5 accuracy) on `rows` rows, in percent; None for other
        metrics."""
        if self.metric not in ("accuracy", "top_5"):
            return None
        share = score / 100
        return 100 * math.sqrt(share * (1 - share) / rows)


@cache
def objective_of(name: str) -> Objective:
    """The objective of a study that ranks configurations by this metric."""
    if name == "squared_error":
        return Objective(name, "squared error", "Squared error ‖θ − θ*‖²", evaluated_on="against the truth")
    metric = metrics.get(name)
    shown = {"unit": " (%)", "format_spec": ".2f"} if metric.percent else {}
    return Objective(name, metric.title, f"Test {metric.title}", lower_is_better=metric.lower_is_better, **shown)


ACCURACY = objective_of("accuracy")

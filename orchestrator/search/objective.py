"""The objective of a study: the metric that ranks configurations, its direction and its display."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
        """The unit, or the title if there is none."""
        return self.unit.strip(" ()") or self.title

    def cost(self, score: float) -> float:
        """Smaller is better."""
        return score if self.lower_is_better else -score

    def format(self, score: float) -> str:
        return format(score, self.format_spec)

    def standard_error(self, score: float, rows: int) -> float | None:
        """Binomial standard error of an accuracy measured on `rows` rows; None for other metrics."""
        if self.metric != "accuracy":
            return None
        share = score / 100
        return 100 * math.sqrt(share * (1 - share) / rows)


ACCURACY = Objective("accuracy", "accuracy", "Test accuracy", unit=" (%)", lower_is_better=False, format_spec=".2f")
LOSS = Objective("loss", "loss", "Test loss")
SQUARED_ERROR = Objective("squared_error", "squared error", "Squared error ‖θ − θ*‖²", evaluated_on="against the truth")
OBJECTIVES = {objective.metric: objective for objective in (ACCURACY, LOSS, SQUARED_ERROR)}

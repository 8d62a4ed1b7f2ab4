"""What a study's trials are judged by: this is the one place that says what a score is and which way is better."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Objective:
    metric: str
    """Its name in a study and among the metrics of a trial."""
    title: str
    """What it is called in tables."""
    final: str
    """What it is called where the winners are judged."""
    found: str = "on the validation split"
    """Where configurations in a search are judged."""
    unit: str = ""
    """Behind the title, in headings."""
    lower_is_better: bool = True
    form: str = ".3g"
    """How a score is printed."""

    @property
    def short(self) -> str:
        """Its unit, or its title where it has none."""
        return self.unit.strip(" ()") or self.title

    def cost(self, score: float) -> float:
        """Smaller is better."""
        return score if self.lower_is_better else -score

    def shown(self, score: float) -> str:
        return format(score, self.form)

    def standard_error(self, score: float, rows: int) -> float | None:
        """Of a score measured on so many rows, where it follows from the score itself."""
        if self.metric != "accuracy":
            return None
        share = score / 100
        return 100 * math.sqrt(share * (1 - share) / rows)


ACCURACY = Objective("accuracy", "accuracy", "Test accuracy", unit=" (%)", lower_is_better=False, form=".2f")
LOSS = Objective("loss", "loss", "Test loss")
SQUARED_ERROR = Objective("squared_error", "squared error", "Squared error ‖θ − θ*‖²", found="against the truth")
OBJECTIVES = {objective.metric: objective for objective in (ACCURACY, LOSS, SQUARED_ERROR)}

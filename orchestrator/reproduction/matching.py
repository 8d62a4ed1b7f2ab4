"""The papers' numbers matched with ours, entry by entry."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.reproduction.our_results import OurResult, OurResults
from orchestrator.reproduction.paper_tables import FEDNEW, FEDSOFIM, HEART, published

MIN_TOLERANCE = 1.0
"""Points of accuracy that never count as a difference, however small the standard deviations."""
FIRST_ORDER = "DP-FedGD"
WITHOUT_DUALS, INDEPENDENT, UNIT_ROWS = "without duals", "independent noise", "unit rows and step 1"
"""Variants in the labels of our studies. The last two test possible explanations of a difference."""


@dataclass(frozen=True)
class Match:
    """One published number and the result of ours that corresponds to it."""

    paper: str
    table: int
    """0 for a source without numbered tables."""
    method: str
    round: int
    paper_mean: float
    paper_std: float
    """nan if the paper gives none."""
    ours: OurResult
    reason: str = ""
    """Why ours differs, in one sentence; empty if it agrees or no rule explains it."""
    reason_kind: str = ""
    """The rule's short name, to count reasons of one kind."""

    @property
    def epsilon(self) -> float:
        return self.ours.epsilon

    @property
    def our_mean(self) -> float:
        return self.ours.mean(self.round)

    @property
    def our_std(self) -> float:
        return self.ours.std(self.round)

    @property
    def final(self) -> bool:
        return self.round == self.ours.last_round

    @property
    def difference(self) -> float:
        return self.our_mean - self.paper_mean

    @property
    def tolerance(self) -> float:
        """Two standard deviations of the difference between one of their runs and one of ours, and at least a point."""
        known = [std for std in (self.paper_std, self.our_std) if not math.isnan(std)]
        return max(MIN_TOLERANCE, 2 * math.hypot(*known))

    @property
    def agrees(self) -> bool:
        return abs(self.difference) <= self.tolerance

    @property
    def comparable(self) -> bool:
        """Whether ours is the paper's method at the eps it claims. DP-FedNew meets its claim only without duals."""
        return self.ours.plain or (self.ours.private_as_claimed and self.ours.label_suffix == WITHOUT_DUALS)

    def same_search(self, other: Match) -> bool:
        return (self.ours.study, self.ours.strategy) == (other.ours.study, other.ours.strategy)


def match_papers(results: OurResults) -> list[Match]:
    makers = (_fedsofim, _ablation, _fednew, _heart)
    return [match for make in makers for match in make(results) if not math.isnan(match.our_mean)]


def _fedsofim(results: OurResults) -> list[Match]:
    matches = [
        Match(FEDSOFIM, row.table, ours.method, row.round, row.mean, row.std, ours)
        for ours in results.select(clients=20)
        for row in published("fedsofim-accuracy")
        if (row.dataset, row.backbone, row.partition) == (ours.dataset, ours.backbone, ours.partition)
        and (row.method, row.epsilon) == (ours.method, ours.epsilon)
    ]
    return sorted(matches, key=lambda match: match.table)


def _ablation(results: OurResults) -> Iterator[Match]:
    for row in published("fedsofim-ablation"):
        for ours in results.select(dataset=row.dataset, method=row.variant, epsilon=row.epsilon):
            if ours.epsilon in tuned_for(ours):
                yield Match(FEDSOFIM, row.table, row.variant, ours.last_round, row.mean, row.std, ours)


def tuned_for(ours: OurResult) -> list[float]:
    """The budgets for which the hyperparameters were tuned, read from the label, such as `full (ε 5 and 10)`."""
    if not ours.label_suffix.startswith("ε "):
        return []
    return [float(text) for text in ours.label_suffix.removeprefix("ε ").split(" and ")]


def _fednew(results: OurResults) -> Iterator[Match]:
    for row in published("fednew-accuracy"):
        setting = {"dataset": row.dataset, "backbone": row.backbone, "partition": row.partition}
        for ours in results.select(**setting, clients=row.clients, method=row.method, epsilon=row.epsilon):
            yield Match(FEDNEW, row.table, row.method, ours.last_round, row.mean, math.nan, ours)


def _heart(results: OurResults) -> Iterator[Match]:
    for row in published("heart-accuracy"):
        for ours in results.select(dataset=row.dataset, method=row.method, epsilon=float(row.epsilon)):
            yield Match(HEART, 0, row.method, ours.last_round, row.mean, math.nan, ours)

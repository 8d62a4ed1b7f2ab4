"""The ways in which a study searches every cell: how it looks for configurations, and how it picks the winner."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

RUNGS = ("rung-1", "rung-2", "rung-3", "rung-4", "rung-5")
SEARCH_STAGES = {
    "grid": ("coarse", "fine", "finer", "finest"),
    "optuna": ("optuna",),
    "random": ("random",),
    "halving": RUNGS,
    "private": ("private",),
}
"""The stages in which each kind of search looks for configurations, in order."""
STAGES = (*dict.fromkeys(stage for stages in SEARCH_STAGES.values() for stage in stages), "contest", "confirm")
"""All stages, in an order that is right for every way."""


class SearchVariant(NamedTuple):
    search: str
    """grid, optuna, random, halving or private"""
    select: str
    """contest: on several seeds, and the best meet again. single: on one seed, its best wins. private: every run has
    noise of its own, and the best noisy score wins."""

    @property
    def name(self) -> str:
        """In the ledger and in tables."""
        return f"{self.search} single" if self.select == "single" else self.search

    @property
    def stages(self) -> tuple[str, ...]:
        """That this way may have, in order."""
        contest = ("contest",) if self.select == "contest" else ()
        return (*SEARCH_STAGES[self.search], *contest, "confirm")

    def compared(self, opened: Container[str]) -> tuple[str, ...]:
        """The search stages whose configurations are up for the win: of halving only the last rung there is, for below
        it they ran fewer rounds."""
        stages = SEARCH_STAGES[self.search]
        return tuple(stage for stage in stages if stage in opened)[-1:] if self.search == "halving" else stages

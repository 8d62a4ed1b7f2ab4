"""One cell searched in one way: which trials come next, given what has ended.

The way `grid` has the stages coarse, fine and confirm; the way `optuna` has the stages optuna (batch after batch) and
confirm. A stage opens when the one before it has ended.
"""

from __future__ import annotations

import hashlib

import search_spaces
from orchestrator.search.optuna_search import OptunaSearch
from orchestrator.search.selection import Choice, Outcome, choose
from orchestrator.study.cells import Cell
from trainables.objective import ACCURACY
from trainables.spec import TrialSpec

SEARCH_STAGES = {"grid": ("coarse", "fine"), "optuna": ("optuna",)}


class CellSearch:
    """One cell searched in one way."""

    def __init__(self, cell: Cell, way: str, rows: int) -> None:
        self.cell, self.way = cell, way
        self.stages: dict[str, list[str]] = {}
        """The trials of every stage that has been opened, in grid order."""
        self._rows = rows
        self._optuna: OptunaSearch | None = None

    @property
    def name(self) -> str:
        return self.cell.id if self.way == "grid" else f"{self.cell.id} ({self.way})"

    def next_trials(self, outcomes: dict[str, Outcome], known: dict[str, TrialSpec]) -> tuple[str, list[TrialSpec]]:
        """The stage to open now that all trials so far have ended, and its trials; no trials: the cell is finished."""
        if "confirm" in self.stages:
            return "confirm", []
        if self.way == "grid":
            if "coarse" not in self.stages:
                return "coarse", self._with_stop_rule(
                    [self.cell.trial("coarse", c) for c in self.cell.space.grid(self.cell.space.coarse)]
                )
            if "fine" not in self.stages:
                winner = choose(self.stages["coarse"], outcomes, self._rows, self.cell.study.judged_by)
                if winner is None:
                    return "confirm", []
                configuration = known[winner.key].hyperparameters
                grid = search_spaces.refine(self.cell.space, self.cell.study.search.refine, configuration)
                return "fine", self._with_stop_rule([self.cell.trial("fine", c) for c in grid])
        else:
            if self._optuna is None:
                self._optuna = OptunaSearch(self.cell)
            batch = self._optuna.next_batch(outcomes)
            if batch:
                return "optuna", batch
        choice = self.choice(outcomes)
        if choice is None:
            return "confirm", []
        configuration = known[choice.key].hyperparameters
        return "confirm", [self.cell.trial("confirm", configuration, seed) for seed in self.cell.study.seeds.confirm]

    def choice(self, outcomes: dict[str, Outcome]) -> Choice | None:
        """The best over all search stages: a fine grid may lie beside what the coarse one found."""
        keys = [key for stage in SEARCH_STAGES[self.way] for key in self.stages.get(stage, [])]
        return choose(keys, outcomes, self._rows, self.cell.study.judged_by)

    def _with_stop_rule(self, trials: list[TrialSpec]) -> list[TrialSpec]:
        """Early stopping compares a trial with its company, so the company is part of what the trial is."""
        halving = self.cell.study.search.early_stopping
        if halving is None:
            return trials
        company = hashlib.sha256("".join(trial.key for trial in trials).encode()).hexdigest()[:16]
        rule = f"halving:{','.join(map(str, halving.rounds))}:{halving.keep:g}:{company}"
        objective = self.cell.study.judged_by
        rule += "" if objective is ACCURACY else f":{objective.metric}"
        return [trial.model_copy(update={"stop_rule": rule}) for trial in trials]

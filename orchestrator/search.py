"""What to run next: the stages of every cell, driven by what has ended. Knows nothing of Ray.

A cell is searched in one way or several. The way `grid` has the stages coarse, fine and confirm; the way `optuna` has
the stages optuna (batch after batch) and confirm. A stage opens when the one before it has ended; its trials are
written to the ledger then, so that an interrupted study goes on with the same trials.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict

import optuna

import search_spaces
from orchestrator.cells import Blueprint, Cell
from orchestrator.ledger import Ledger
from orchestrator.selection import Choice, Outcome, choose
from search_spaces import Configuration, SearchSpace
from trainables.errors import UserError
from trainables.objective import ACCURACY
from trainables.spec import TrialSpec

SEARCH_STAGES = {"grid": ("coarse", "fine"), "optuna": ("optuna",)}


def search_budget(space: SearchSpace) -> int:
    """How many trials a search that is no grid may have: as many as both grids."""
    return space.size(space.coarse) + space.size(space.fine)


class CellSearch:
    """One cell searched in one way."""

    def __init__(self, cell: Cell, way: str, rows: int) -> None:
        self.cell, self.way = cell, way
        self.stages: dict[str, list[str]] = {}
        """The trials of every stage that has been opened, in grid order."""
        self._rows = rows
        self._optuna: _OptunaSearch | None = None

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
                self._optuna = _OptunaSearch(self.cell)
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


class _OptunaSearch:
    """TPE, replayed from its seed: what it asks depends only on what it was told, so a resumed search asks the same."""

    def __init__(self, cell: Cell) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.cell = cell
        self.budget = search_budget(cell.space)
        sampler = optuna.samplers.TPESampler(seed=cell.study.search.optuna.seed, constant_liar=True)
        self.study = optuna.create_study(direction="maximize", sampler=sampler)
        self._asked: list[tuple[optuna.trial.Trial, TrialSpec]] = []
        self._told = 0

    def next_batch(self, outcomes: dict[str, Outcome]) -> list[TrialSpec]:
        """The next suggestions, once all before them have ended; none when the budget is spent."""
        self._tell(outcomes)
        size = min(self.cell.study.search.optuna.batch, self.budget - len(self._asked))
        asked = [self.study.ask() for _ in range(size)]
        trials = [self.cell.trial("optuna", self._suggest(trial)) for trial in asked]
        self._asked += zip(asked, trials, strict=True)
        return trials

    def _tell(self, outcomes: dict[str, Outcome]) -> None:
        for asked, trial in self._asked[self._told :]:
            state, score, _ = outcomes[trial.key]
            if state == "done" and score is not None:
                self.study.tell(asked, -self.cell.study.judged_by.cost(score))
            else:
                self.study.tell(asked, state=optuna.trial.TrialState.FAIL)
        self._told = len(self._asked)

    def _suggest(self, trial: optuna.trial.Trial) -> Configuration:
        space: SearchSpace = self.cell.space
        found: Configuration = dict(space.fixed)
        for name, axis in space.coarse.items():
            values = list(dict.fromkeys([*axis, *space.fine[name]]))
            if not search_spaces.is_numeric(tuple(values)):
                found[name] = trial.suggest_categorical(name, values)  # type: ignore[assignment]
                continue
            low, high = min(float(v) for v in values), max(float(v) for v in values)
            if all(isinstance(value, int) for value in values):
                found[name] = trial.suggest_int(name, int(low), int(high))
            elif (scale := search_spaces.usable_scale(space.scale[name], [low, high])) == "complement":
                found[name] = 1 - trial.suggest_float(name, 1 - high, 1 - low, log=True)
            else:
                found[name] = trial.suggest_float(name, low, high, log=scale == "log")
        return found


class Sweep:
    """The whole study: which trials wait, which have ended, and what that opens."""

    def __init__(self, blueprint: Blueprint, ledger: Ledger) -> None:
        self.blueprint, self.ledger = blueprint, ledger
        self.known: dict[str, TrialSpec] = {}
        """Every trial of every stage that has been opened."""
        self.waiting: dict[str, TrialSpec] = {}
        """Trials to run, in the order they should be."""
        self._open: dict[str, list[CellSearch]] = defaultdict(list)
        self._left: dict[int, int] = {}
        self._recorded = ledger.stages()
        self.outcomes: dict[str, Outcome] = _without_passing_failures(
            ledger.outcomes(blueprint.study.objective), self._recorded
        )
        self.searches = [
            CellSearch(cell, way, len(blueprint.problems[cell.setting.search.key].y_eval))
            for cell in blueprint.cells
            for way in blueprint.study.search.ways
        ]
        for search in self.searches:
            self._advance(search)

    @property
    def finished(self) -> bool:
        return not self._open

    def ended(self, outcomes: dict[str, Outcome]) -> None:
        """Trials have ended and are in the ledger: see which stages that completes."""
        self.outcomes.update(outcomes)
        touched: list[CellSearch] = []
        for key in outcomes:
            self.waiting.pop(key, None)
            for search in self._open.pop(key, []):
                self._left[id(search)] -= 1
                if self._left[id(search)] == 0:
                    touched.append(search)
        for search in touched:
            self._advance(search)

    def _advance(self, search: CellSearch) -> None:
        """Open stages until one has something left to run."""
        while True:
            stage, trials = search.next_trials(self.outcomes, self.known)
            if not trials:
                search.stages.setdefault("confirm", [])
                return
            opened = search.stages.setdefault(stage, [])
            self._record(search, stage, trials, start=len(opened))
            opened += [trial.key for trial in trials]
            left = {trial.key: trial for trial in trials if trial.key not in self.outcomes}
            self.known.update({trial.key: trial for trial in trials})
            if left:
                self._left[id(search)] = len(left)
                for key, trial in left.items():
                    self.waiting.setdefault(key, trial)
                    self._open[key].append(search)
                return

    def _record(self, search: CellSearch, stage: str, trials: list[TrialSpec], start: int) -> None:
        keys = [trial.key for trial in trials]
        recorded = self._recorded.get((search.cell.id, search.way, stage), [])[start : start + len(keys)]
        if recorded != keys[: len(recorded)]:
            raise UserError(
                f"the result folder holds other {stage} trials of {search.cell.id!r} than this version of the program "
                "would run; choose another folder"
            )
        if len(recorded) < len(keys):
            self.ledger.add_stage(search.cell.id, search.way, stage, keys, start)


def _without_passing_failures(
    outcomes: dict[str, Outcome], stages: dict[tuple[str, str, str], list[str]]
) -> dict[str, Outcome]:
    """What has ended, without failed trials that can be tried again: those on which no later stage was built yet."""
    final = set()
    for (cell, way, stage), keys in stages.items():
        later = ("fine", "confirm") if stage == "coarse" else ("confirm",)
        if stage != "confirm" and (stage == "optuna" or any((cell, way, name) in stages for name in later)):
            final.update(keys)
    return {key: outcome for key, outcome in outcomes.items() if outcome[0] != "failed" or key in final}

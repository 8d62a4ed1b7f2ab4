"""What to run next: the stages of every cell, driven by what has ended. Knows nothing of Ray.

A stage's trials are written to the ledger when it opens, so that an interrupted study goes on with the same trials.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

from orchestrator.results.ledger import Ledger
from orchestrator.search.cell_search import HELD, CellSearch
from orchestrator.search.contenders import Outcome
from orchestrator.study.cells import Blueprint
from orchestrator.study.strategies import STAGES
from trainables.errors import UserError
from trainables.federation.trial_spec import TrialSpec


class Sweep:
    """The whole study: which trials wait, which have ended, and what that opens."""

    def __init__(self, blueprint: Blueprint, ledger: Ledger) -> None:
        self.blueprint, self.ledger = blueprint, ledger
        self.known: set[str] = set()
        """Every trial of every stage that has been opened: of what has ended, the ledger keeps the rest."""
        self.waiting: dict[str, TrialSpec] = {}
        """Trials to run, in the order they should be."""
        self._new: list[str] = []
        """Those of them that nobody has asked for yet."""
        self._open: dict[str, tuple[tuple[CellSearch, int], ...]] = {}
        """Of every trial that has not ended, the searches that wait for it, and which of their contenders it is of."""
        self._left: dict[int, int] = {}
        self._recorded = ledger.stages()
        self.outcomes: dict[str, Outcome] = _without_passing_failures(
            ledger.outcomes(blueprint.study.objective), self._recorded, warm=blueprint.study.search.warm_start
        )
        self.searches = [
            CellSearch(
                cell,
                strategy,
                blueprint.validation_rows(cell),
                ledger.secret(cell.id) if strategy.search == "private" else b"",
            )
            for cell in blueprint.cells
            for strategy in blueprint.study.strategies
        ]
        self._held: list[CellSearch] = []
        """Those that wait for others, not for trials of their own."""
        if blueprint.study.search.warm_start:
            self._introduce()
        self._advance_all(self.searches)

    def _introduce(self) -> None:
        """Searches to those on the budgets above and below."""
        kin: dict[tuple[str, str, str], list[CellSearch]] = defaultdict(list)
        for search in self.searches:
            cell = search.cell
            kin[cell.setting.id, cell.method.shown, search.strategy.name].append(search)
        for family in kin.values():
            family.sort(key=lambda search: search.cell.epsilon)
            for below, above in itertools.pairwise(family):
                below.neighbours.append(above)
                above.neighbours.append(below)

    @property
    def finished(self) -> bool:
        return not self._open

    @property
    def running(self) -> int:
        """How many of the known trials have not ended."""
        return len(self._open)

    def newly_waiting(self) -> list[TrialSpec]:
        """What has come to wait since this was last asked: there may be very many, and it is asked often."""
        new, self._new = self._new, []
        return [self.waiting[key] for key in new if key in self.waiting]

    def all_wait_anew(self) -> None:
        """Whoever had asked is gone."""
        self._new = list(self.waiting)

    def left(self, search: CellSearch) -> int:
        """Trials of a cell's last opened stage that have not ended."""
        return self._left.get(id(search), 0)

    def ended(self, outcomes: dict[str, Outcome]) -> None:
        """Trials have ended and are in the ledger: see which stages that completes."""
        self.outcomes.update(outcomes)
        touched: list[CellSearch] = []
        for key in outcomes:
            self.waiting.pop(key, None)
            for search, contender in self._open.pop(key, ()):
                self._tell_lead(search, contender, outcomes[key])
                self._left[id(search)] -= 1
                if self._left[id(search)] == 0:
                    touched.append(search)
        self._advance_all(touched)

    def _advance_all(self, searches: list[CellSearch]) -> None:
        for search in searches:
            self._advance(search)
        held, self._held = self._held, []
        for search in held:  # perhaps for one of those
            self._advance(search)

    def _advance(self, search: CellSearch) -> None:
        """Open stages until one has something left to run."""
        while True:
            stage, trials = opens = search.next_trials(self.outcomes)
            if opens is HELD:
                self._held.append(search)
                return
            if not trials:
                search.stages.setdefault("confirm", [])
                return
            start, seeds = len(search.stages.get(stage, [])), search.seeds_of(stage)
            self._record(search, stage, trials, start)
            search.open(stage, trials)
            self.known.update(trial.key for trial in trials)
            left: set[str] = set()
            for place, trial in enumerate(trials, start):
                if (outcome := self.outcomes.get(trial.key)) is not None:
                    self._tell_lead(search, place // seeds, outcome)
                elif trial.key not in left:
                    left.add(trial.key)
                    if trial.key not in self.waiting:
                        self.waiting[trial.key] = trial
                        self._new.append(trial.key)
                    self._open[trial.key] = (*self._open.get(trial.key, ()), (search, place // seeds))
            if left:
                self._left[id(search)] = len(left)
                return

    def _tell_lead(self, search: CellSearch, contender: int, outcome: Outcome) -> None:
        stage = next(reversed(search.stages))
        search.lead.hear(stage, contender, search.seeds_of(stage), outcome)

    def _record(self, search: CellSearch, stage: str, trials: list[TrialSpec], start: int) -> None:
        keys = [trial.key for trial in trials]
        recorded = self._recorded.get((search.cell.id, search.strategy.name, stage), [])[start : start + len(keys)]
        if recorded != keys[: len(recorded)]:
            raise UserError(
                f"the result folder holds other {stage} trials of {search.cell.id!r} than this version of the program "
                "would run; choose another folder"
            )
        if len(recorded) < len(keys):
            self.ledger.add_stage(search.cell.id, search.strategy.name, stage, keys, start)


def _without_passing_failures(
    outcomes: dict[str, Outcome], stages: dict[tuple[str, str, str], list[str]], *, warm: bool
) -> dict[str, Outcome]:
    """What has ended, without failed trials that can be tried again: those on which no later stage was built yet.
    `warm`: a contest may be built on the searches of other cells, too."""
    final = set()
    contests = {strategy for _, strategy, stage in stages if stage == "contest" and warm}
    for (cell, strategy, stage), keys in stages.items():
        built_upon = any((cell, strategy, later) in stages for later in STAGES[STAGES.index(stage) + 1 :])
        built_upon |= strategy in contests and stage not in ("contest", "confirm")
        if built_upon or stage == "optuna":  # whose next batch follows from those before
            final.update(keys)
    return {key: outcome for key, outcome in outcomes.items() if outcome[0] != "failed" or key in final}

"""The state of a sweep: which trials are to run, which have ended, and which stages open as a result. Independent of
the backend.

The trials of a stage are recorded in the ledger when the stage opens, so an interrupted study continues with the same
trials.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.execution.cell_search import CellSearch
from orchestrator.results.ledger import Ledger, StageKey
from orchestrator.results.searches import as_stored
from orchestrator.search.candidates import Outcome
from orchestrator.search.strategies.private import fixed_grid
from orchestrator.search.variant import SearchVariant
from orchestrator.study.cell_id import CellId
from orchestrator.study.cells import Cell, PreparedStudy
from trainables import plugins
from trainables.errors import UserError
from trainables.federation.trial_spec import TrialSpec
from trainables.models.network_settings import is_network

OPEN_TRIALS = 100_000  # further searches start only while fewer trials are open: a waiting trial takes 1 KB


def purpose(cell: Cell, variant: SearchVariant) -> str:
    """A digest of everything that a private search may compute. Its secret must not be used for anything else."""
    keys = [cell.private_trial(each, 0, "test").key for each in fixed_grid(cell.space)]
    study = cell.study
    parts = [variant.settings.model_dump_json(), str(study.search.trials), study.objective, *keys]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class Sweep:
    def __init__(self, prepared: PreparedStudy, ledger: Ledger) -> None:
        self.prepared, self.ledger = prepared, ledger
        study = prepared.study
        self.known: set[str] = set()
        """Keys of all trials of all open stages, including trials that have ended."""
        self.waiting: dict[str, TrialSpec] = {}
        """Trials that have not ended, including those that run, in the order they should start."""
        self._open: dict[str, tuple[tuple[CellSearch, int], ...]] = {}
        """For every trial that has not ended: the searches that wait for it, with the index of its candidate."""
        self._most_open = OPEN_TRIALS
        """Further searches start only while fewer trials than this are open."""
        self._left: dict[int, int] = {}
        """For every search, by its `id`: the trials of its last open stage that have not ended."""
        self._foreign: set[CellId] = set()
        """Cells whose private search has a secret that someone else may know."""
        self.outcomes: dict[str, Outcome] = ledger.outcomes(study.objective)
        if ledger.failed():
            self.outcomes = without_retryable_failures(
                self.outcomes, ledger.stages(), study.variants, warm_start=study.search.warm_start
            )
        self.searches = [
            CellSearch(
                cell,
                variant,
                self.outcomes,
                prepared.validation_rows(cell.setting),
                self._secret(cell, variant) if variant.strategy.publishes_only_winner else b"",
                prepared.noise(cell),
            )
            for cell in prepared.cells
            for variant in study.variants
        ]
        self._delayed: set[CellSearch] = set()
        """Searches that wait for the searches of neighbouring budgets, not for their own trials."""
        self._resumed: dict[CellSearch, None] = {}
        """Those of `_delayed` with a neighbour whose search has ended meanwhile."""
        self._connect_budgets()
        self._unopened = deque(self.searches)
        """Searches whose first stage opens when fewer trials are open."""
        self._open_following([])

    def _secret(self, cell: Cell, variant: SearchVariant) -> bytes:
        """The secret of a private search, which determines its noise."""
        value, is_own = self.ledger.secret(cell.id, purpose(cell, variant))
        if not is_own:
            self._foreign.add(cell.id)
        return value

    def _connect_budgets(self) -> None:
        """Link the searches of all budgets if the strategy searches them together, and those of neighbouring budgets if
        the winners of one join the contest of the other (warm start)."""
        families: dict[tuple[CellId, str], list[CellSearch]] = defaultdict(list)
        for search in self.searches:
            families[search.cell.id._replace(epsilon=0), search.variant.name].append(search)
        for family in families.values():
            if family[0].variant.strategy.searches_budgets_together:
                memo: dict[str, Any] = {}
                for search in family:
                    search.together = family
                    search.history.budgets, search.history.memo = [each.history for each in family], memo
            if not self.prepared.study.search.warm_start:
                continue
            family = sorted(family, key=lambda search: search.cell.epsilon)
            for below, above in itertools.pairwise(family):
                below.neighbours.append(above)
                above.neighbours.append(below)

    @property
    def finished(self) -> bool:
        return not self._open

    @property
    def unfinished(self) -> int:
        """Number of known trials that have not ended."""
        return len(self._open)

    def left(self, search: CellSearch) -> int:
        """Trials of a search's last open stage that have not ended."""
        return self._left.get(id(search), 0)

    def ended(self, outcomes: dict[str, Outcome]) -> list[TrialSpec]:
        """Trials have ended and are in the ledger: open the stages that this completes, and return their new trials."""
        self.outcomes.update(outcomes)
        completed: list[CellSearch] = []
        for key in outcomes:
            self.waiting.pop(key, None)
            for search, candidate in self._open.pop(key, ()):
                self._update_best(search, candidate, outcomes[key])
                self._left[id(search)] -= 1
                if self._left[id(search)] == 0:
                    completed.append(search)
        with self.ledger.transaction():
            searching = [search for search in completed if "confirm" not in search.stages]
            new = self._open_following(completed)
            for search in searching:
                self._record_winner(search)
            return new

    def open_at_least(self, trials: int) -> None:
        """Open searches until at least this many trials have not ended, if the study has as many: then all slots have
        work, and packs can be balanced."""
        if trials > self._most_open:
            self._most_open = trials
            with self.ledger.transaction():
                self._open_following([])

    def _record_winner(self, search: CellSearch) -> None:
        """Record the winner so far, so that `status` need not compute it, unless a stage runs that may change it."""
        chosen = "confirm" in search.stages or not self.left(search)
        if chosen and not search.variant.strategy.publishes_only_winner:
            self.ledger.set_winner(search.cell.id, search.variant.name, as_stored(search.winner()))

    def _open_following(self, completed: list[CellSearch]) -> list[TrialSpec]:
        """Open the stages after the completed stages of these searches, and further searches while few trials are open.
        Returns the new trials."""
        groups = {id(search) if search.search_over else id(search.together): search for search in completed}
        new = [trial for search in groups.values() for trial in self._advance(search)]
        new += self._advance_resumed()
        while self._unopened and len(self._open) < self._most_open:
            search = self._unopened.popleft()
            if not search.stages:  # not opened with the searches that it proposes with
                new += self._advance(search)
        return new + self._advance_resumed()

    def _advance_resumed(self) -> list[TrialSpec]:
        resumed, self._resumed = self._resumed, {}
        self._delayed -= resumed.keys()
        return [trial for search in resumed for trial in self._advance(search)]

    def _advance(self, search: CellSearch) -> list[TrialSpec]:
        """Open stages of a search, and of the searches that propose with it, until one has trials to run. Returns the
        new trials."""
        new: list[TrialSpec] = []
        while True:
            group = [search] if search.search_over else [each for each in search.together if not each.search_over]
            if any(self.left(each) for each in group):
                break
            # all proposals come before any stage opens, so that they depend on the completed stages alone
            following = [each.next_stage() for each in group]
            opened = [self._open_stage(each, *stage, new) for each, stage in zip(group, following, strict=True)]
            over = (each for each in group if each.search_over)
            self._resumed |= {other: None for each in over for other in each.neighbours if other in self._delayed}
            for other in group:
                # a search whose contest follows does not wait for the other searches of its group
                if other is not search and (other.search_over or search.search_over):
                    new += self._advance(other)
            if not any(opened):
                break
        return new

    def _open_stage(self, search: CellSearch, stage: str, trials: list[TrialSpec], new: list[TrialSpec]) -> bool:
        """Open a stage, and add to `new` the trials that no other search waits for. Returns whether a stage opened."""
        if not trials and stage == "contest":
            self._delayed.add(search)
            return False
        if not trials:
            search.stages.setdefault("confirm", [])
            return False
        self._refuse_foreign(search, trials)
        start, seeds = len(search.stages.get(stage, [])), search.seed_count(stage)
        self._record(search, stage, trials, start)
        search.open(stage, trials)
        self.known.update(trial.key for trial in trials)
        left: set[str] = set()
        place: tuple[CellSearch, int] = (search, -1)
        for position, trial in enumerate(trials, start):
            if place[1] != position // seeds:
                place = (search, position // seeds)  # one tuple for all seeds: there may be a million trials
                alone = (place,)
            if (outcome := self.outcomes.get(trial.key)) is not None:
                self._update_best(search, position // seeds, outcome)
            elif trial.key not in left:
                left.add(trial.key)
                if trial.key not in self.waiting:
                    self.waiting[trial.key] = trial
                    new.append(trial)
                others = self._open.get(trial.key)
                self._open[trial.key] = alone if others is None else (*others, place)
        self._left[id(search)] = len(left)
        return True

    def _refuse_foreign(self, search: CellSearch, trials: list[TrialSpec]) -> None:
        """Raise an error if new trials of a private search would use a secret that someone else may know: with it, the
        noise can be subtracted."""
        if not search.variant.strategy.publishes_only_winner or search.cell.id not in self._foreign:
            return
        if any(trial.key not in self.outcomes for trial in trials):
            raise UserError(
                f"the private search of {search.cell.name!r} began in another folder, on another machine or by another "
                "user, who may know its secret; finish it there, or run the study in a new folder (if it was you on "
                "another machine, copy ~/.local/state/fedsweep/checkpoint.key from there)"
            )

    def _update_best(self, search: CellSearch, candidate: int, outcome: Outcome) -> None:
        stage = next(reversed(search.stages))
        search.best.add(stage, candidate, search.seed_count(stage), outcome)

    def _record(self, search: CellSearch, stage: str, trials: list[TrialSpec], start: int) -> None:
        """Record the trials of a stage from position `start` on. Raises an error if the ledger has other trials there,
        unless a plug-in has changed."""
        keys = [trial.key for trial in trials]
        place = search.cell.id, search.variant.name
        recorded = self.ledger.stage(*place, stage, start, len(keys))
        if recorded != keys[: len(recorded)] and self._plugin_changed(search, trials):
            stages = search.variant.stages
            later = {(*place, each): 0 for each in stages[stages.index(stage) + 1 :]}
            self.ledger.forget((), {(*place, stage): start, **later})
            recorded = []
        if recorded != keys[: len(recorded)]:
            raise UserError(
                f"strategy {search.variant.strategy.name} proposes other trials for stage {stage} of "
                f"{search.cell.name!r} than this folder holds: {self._reason_for_change(search, trials)}"
            )
        if len(recorded) < len(keys):
            self.ledger.add_stage(search.cell.id, search.variant.name, stage, keys, start)

    def _plugin_changed(self, search: CellSearch, trials: list[TrialSpec]) -> bool:
        """Whether trials differ from the recorded ones because a plug-in that computes them has changed. They then run
        again."""
        strategy_is_plugin = bool(plugins.code_hash(type(search.variant.strategy).__module__))
        changed = plugins.changed(self.ledger.plugin_code())
        return bool(changed) and any(trial.code for trial in trials) and not strategy_is_plugin

    def _reason_for_change(self, search: CellSearch, trials: Sequence[TrialSpec]) -> str:
        if changed := plugins.changed(self.ledger.plugin_code()):
            return f"plug-in {', '.join(changed)} has changed; restore it or choose another folder"
        if plugins.code_hash(type(search.variant.strategy).__module__):
            return "its proposals may depend only on the task and the history"
        if is_network(trials[0].problem.model):
            return "their network had other weights, or another version of fedsweep ran them; choose another folder"
        return "another version of fedsweep ran them; choose another folder"


def without_retryable_failures(
    outcomes: dict[str, Outcome],
    stages: Mapping[StageKey, list[str]],
    variants: Sequence[SearchVariant],
    *,
    warm_start: bool,
) -> dict[str, Outcome]:
    """The outcomes, without the failed trials that can run again because no later trial depends on them yet. With warm
    start, a contest depends on the searches of other cells, too. In a strategy that extends its stages, the trials of
    a stage depend on earlier ones of that stage."""
    by_name = {variant.name: variant for variant in variants}
    contests = {name for _, name, stage in stages if stage == "contest" and warm_start}
    final = set()
    for (cell, name, stage), keys in stages.items():
        variant = by_name.get(name)
        if variant is None or stage not in variant.stages:
            continue
        later = variant.stages[variant.stages.index(stage) + 1 :]
        is_search = stage in variant.strategy.stages
        if (
            any((cell, name, other) in stages for other in later)
            or (is_search and name in contests)
            or (is_search and variant.strategy.extends_stages)
        ):
            final.update(keys)
    return {key: outcome for key, outcome in outcomes.items() if outcome[0] != "failed" or key in final}

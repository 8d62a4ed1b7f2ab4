"""The search of every cell, as the ledger records it. Tables, report, status and `best` all start from here."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from orchestrator.results import checks
from orchestrator.results.counts import OPENED
from orchestrator.results.ledger import Ledger, SettingFacts
from orchestrator.search.candidates import Candidate, Outcome
from orchestrator.search.expected_trials import expected_trials, trials_to_come
from orchestrator.search.history import History
from orchestrator.search.objective import Objective
from orchestrator.search.selection import Choice
from orchestrator.search.task import SearchTask
from orchestrator.search.variant import SearchVariant
from orchestrator.search.winner import winner
from orchestrator.study.cell_id import CellId
from orchestrator.study.settings.data import DataSettings
from orchestrator.study.settings.method import MethodSettings
from orchestrator.study.study import Study
from search_spaces import Configuration, SearchSpace
from trainables.errors import UserError


@dataclass(frozen=True)
class SearchedCell:
    """One cell, searched by one variant."""

    study: Study
    cell_id: CellId
    setting: str
    """Name of the data set and partition in tables."""
    method: MethodSettings
    variant: SearchVariant
    facts: SettingFacts | None

    @property
    def epsilon(self) -> float:
        return self.cell_id.epsilon

    @property
    def data(self) -> DataSettings:
        """The data set's section of the study file."""
        return next(data for data in self.study.data if data.id == self.cell_id.data)

    @property
    def objective(self) -> Objective:
        return self.study.objective_spec

    @property
    def cell_name(self) -> str:
        """For display, without the search variant."""
        return self.study.cell_name(self.setting, self.method, self.epsilon)

    @property
    def name(self) -> str:
        """For display."""
        return self.study.cell_name(self.setting, self.method, self.epsilon, self.variant)


@dataclass(frozen=True)
class SearchRecord(SearchedCell):
    """The progress of a cell's search, from the ledger's counts. The trials are read on first access."""

    counts: dict[str, Counter[str]]
    """Trials of every open stage by state; under "opened" all of them."""
    ledger: Ledger = field(compare=False, repr=False)
    secret: bytes = field(compare=False, repr=False)
    known_winner: Any = field(compare=False, default=None)
    """The winner that the ledger holds: a list that is empty if no trial finished; None if it is not known."""
    tasks: dict[tuple[str, str], SearchTask] = field(compare=False, default_factory=dict, repr=False)
    """Cache that all records share, by method and variant. A task has the budget of the first cell that needed it."""

    @cached_property
    def task(self) -> SearchTask:
        rows, cache_key = self.facts.validation_rows if self.facts else 1, (self.method.id, self.variant.name)
        if cache_key not in self.tasks:  # its search space takes long to build
            self.tasks[cache_key] = self.study.search_task(self.method, self.epsilon, self.variant, rows)
        return replace(self.tasks[cache_key], epsilon=self.epsilon, validation_rows=rows, secret=self.secret)

    @cached_property
    def stages(self) -> dict[str, list[str]]:
        """Keys of the trials of every open stage, confirm included."""
        found = self.ledger.stages_of(self.cell_id, self.variant.name)
        return {stage: found[stage] for stage in self.variant.stages if stage in found}

    @cached_property
    def history(self) -> History:
        """Without configurations, which are in the rows of the trials. Stages are read before outcomes: while a study
        runs, outcomes that are read later can only include more trials."""
        stages = self.stages
        return self._history(stages, self.ledger.outcomes(self.study.objective, (self.cell_id, self.variant.name)))

    def with_trials(self, stages: dict[str, list[str]], outcomes: dict[str, Outcome]) -> SearchRecord:
        """Set the trials, which were read already; returns this record."""
        vars(self).update(stages=stages, history=self._history(stages, outcomes))
        return self

    def _history(self, stages: dict[str, list[str]], outcomes: dict[str, Outcome]) -> History:
        searched = {stage: keys for stage, keys in stages.items() if stage != "confirm"}
        return History(self.task, self.variant.seeds, outcomes, searched, trial_seeds=self._trial_seeds())

    def _trial_seeds(self) -> dict[str, int]:
        """Seeds of the runs of a private search, which its winner depends on."""
        strategy = self.variant.strategy
        if not strategy.publishes_only_winner:
            return {}
        keys = [key for stage in strategy.stages for key in self.stages.get(stage, [])]
        return {key: row.content["seed"] for key, row in self.ledger.rows(keys, whole=False).items()}

    @property
    def opened(self) -> dict[str, int]:
        """Number of trials of every open stage."""
        return {stage: counts[OPENED] for stage, counts in self.counts.items()}

    @property
    def ended(self) -> dict[str, int]:
        """Number of trials of every open stage that have ended."""
        return {stage: counts.total() - counts[OPENED] for stage, counts in self.counts.items()}

    @property
    def waiting(self) -> int:
        """Distinct trials of open stages that have not ended."""
        if self.opened == self.ended:
            return 0
        outcomes = self.history.outcomes
        return len({key for keys in self.stages.values() for key in keys if key not in outcomes})

    @cached_property
    def winner(self) -> Choice | None:
        if self.known_winner is not None:
            with contextlib.suppress(ValueError, TypeError, KeyError, IndexError, AttributeError):  # damaged
                return choice_from(self.known_winner)
        return winner(self.variant, self.history)

    @cached_property
    def finished(self) -> bool:
        """Whether no further trial will run: the winner is confirmed, or no trial finished."""
        if not self.counts or self.opened != self.ended:
            return False
        if "confirm" in self.counts:
            return True
        strategy = self.variant.strategy
        complete = not strategy.extends_stages or all(
            self.opened.get(stage, 0) >= count for stage, count in self.expected.items() if stage in strategy.stages
        )
        return self.winner is None and ("contest" in self.counts or complete)

    @property
    def expected(self) -> dict[str, int]:
        """Number of trials by stage: those opened, or those expected if the stage is not open or may still grow."""
        return expected_trials(self.variant, self.task, self.study.search.finalists, self.opened)

    @property
    def to_come(self) -> dict[str, int]:
        """Number of trials that are expected to be added, by stage."""
        if self.finished:
            return {}
        finalists, variants = self.study.search.finalists, self.study.variants
        return trials_to_come(self.variant, self.task, finalists, self.opened, variants)

    @property
    def stages_to_open(self) -> bool:
        """Whether search stages or a contest will still be opened."""
        search = list(self.variant.strategy.expected(self.task))
        last = "contest" if self.variant.has_contest else search[-1]
        return not self.finished and "confirm" not in self.counts and last not in self.counts


def study_of(ledger: Ledger, where: str = "the ledger") -> Study:
    """The study that ran last. `where`: what holds it, for the error message."""
    recorded = ledger.study()
    if recorded is None:
        raise UserError(f"{where} holds no study yet")
    return Study.recorded(recorded[0], ledger.plugins())


def search_records(ledger: Ledger, study: Study, *, verified: bool = False) -> Iterator[SearchRecord]:
    """In the order of the tables: setting, epsilon, method, variant; settings of which no cell has begun are left out.
    `verified`: winners are computed from the trials even if the ledger holds them."""
    counts, winners = ledger.counts(), {} if verified else ledger.winners()
    facts, begun = ledger.settings(), {cell.setting for cell, _ in counts}
    secrets = ledger.secrets()
    tasks: dict[tuple[str, str], SearchTask] = {}
    for setting, name in study.settings.items():
        if setting not in begun:
            continue
        for epsilon in study.epsilons:
            for method in study.methods:
                for variant in study.variants:
                    cell = CellId(*setting, method.id, epsilon)
                    found = counts.get((cell, variant.name), {})
                    yield SearchRecord(
                        *(study, cell, name, method, variant, facts.get(setting)),
                        counts={stage: found[stage] for stage in variant.stages if stage in found},
                        ledger=ledger,
                        secret=secrets.get(cell, b""),
                        known_winner=winners.get((cell, variant.name)),
                        tasks=tasks,
                    )


def as_stored(choice: Choice | None) -> list[Any]:
    """A choice in the form that `Ledger.set_winner` takes."""
    if choice is None:
        return []
    return [list(choice.candidate.keys), choice.score, choice.spread, choice.failed, choice.within_standard_error]


def choice_from(stored: Any) -> Choice | None:
    """The inverse of `as_stored`."""
    if not stored:
        return None
    keys, score, spread, failed, near = stored
    return Choice(
        Candidate(tuple(map(checks.key, keys))),
        *(checks.number(score), checks.number(spread), checks.count(failed)),
        within_standard_error=None if near is None else checks.count(near),
    )


def configuration_of(spec: Mapping[str, Any], space: SearchSpace) -> Configuration:
    """The configuration of a trial, from its specification."""
    return space.configuration(spec["hyperparameters"], clip=spec["privacy"]["clip"], rounds=spec["rounds"])

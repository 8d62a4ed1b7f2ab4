"""The search of every cell, as the ledger records it. Tables, report, status and `best` all start from here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from orchestrator.results.ledger import Ledger, Row, SettingFacts
from orchestrator.search.candidates import Outcomes
from orchestrator.search.expected_trials import expected_trials, trials_to_come
from orchestrator.search.history import History
from orchestrator.search.selection import Choice
from orchestrator.search.variant import SearchVariant
from orchestrator.search.winner import winner
from orchestrator.study.cell_id import CellId
from orchestrator.study.settings.method import MethodSettings
from orchestrator.study.study import Study
from search_spaces import Configuration, SearchSpace


@dataclass(frozen=True)
class SearchRecord:
    """One cell, searched by one variant."""

    study: Study
    cell_id: CellId
    setting: str
    """Name of the data set and partition in tables."""
    method: MethodSettings
    variant: SearchVariant
    facts: SettingFacts | None
    stages: dict[str, list[str]]
    """Keys of the trials of every open stage, confirm included."""
    history: History = field(compare=False)
    """Without configurations, which are in the rows of the trials."""

    @property
    def epsilon(self) -> float:
        return self.cell_id.epsilon

    @property
    def cell_name(self) -> str:
        """For display."""
        return self.study.cell_name(self.setting, self.method, self.epsilon)

    @property
    def name(self) -> str:
        """For display."""
        return self.study.cell_name(self.setting, self.method, self.epsilon, self.variant)

    @property
    def opened(self) -> dict[str, int]:
        """Number of trials of every open stage."""
        return {stage: len(keys) for stage, keys in self.stages.items()}

    @property
    def waiting(self) -> int:
        """Distinct trials of open stages that have not ended."""
        outcomes = self.history.outcomes
        return len({key for keys in self.stages.values() for key in keys if key not in outcomes})

    @cached_property
    def winner(self) -> Choice | None:
        return winner(self.variant, self.history)

    @cached_property
    def finished(self) -> bool:
        """Whether no further trial will run: the winner is confirmed, or no trial finished."""
        if not self.stages or self.waiting:
            return False
        if "confirm" in self.stages:
            return True
        strategy = self.variant.strategy
        complete = not strategy.extends_stages or all(
            self.opened.get(stage, 0) >= count for stage, count in self.expected.items() if stage in strategy.stages
        )
        return self.winner is None and ("contest" in self.stages or complete)

    @property
    def expected(self) -> dict[str, int]:
        """Trials of every stage: opened, or expected."""
        return expected_trials(self.variant, self.history.task, self.study.search.finalists, self.opened)

    @property
    def to_come(self) -> dict[str, int]:
        """Trials that later stages will add."""
        if self.finished:
            return {}
        finalists, variants = self.study.search.finalists, self.study.variants
        return trials_to_come(self.variant, self.history.task, finalists, self.opened, variants)

    @property
    def stages_to_open(self) -> bool:
        """Whether search stages or a contest will still be opened."""
        search = list(self.variant.strategy.expected(self.history.task))
        last = "contest" if self.variant.has_contest else search[-1]
        return not self.finished and "confirm" not in self.stages and last not in self.stages


def search_records(ledger: Ledger, study: Study) -> Iterator[SearchRecord]:
    """In the order of the tables: setting, epsilon, method, variant; settings of which no cell has begun are left out.
    Stages are read before outcomes: while a study runs, what is read later can only know more."""
    stages = ledger.stages()
    outcomes: Outcomes = ledger.outcomes(study.objective)
    facts, begun = ledger.settings(), {cell.setting for cell, _, _ in stages}
    secrets = ledger.secrets()
    for setting, name in study.settings.items():
        if setting not in begun:
            continue
        known = facts.get(setting)
        for epsilon in study.epsilons:
            for method in study.methods:
                for variant in study.variants:
                    cell = CellId(*setting, method.id, epsilon)
                    keys = {stage: (cell, variant.name, stage) for stage in variant.stages}
                    opened = {stage: stages[key] for stage, key in keys.items() if key in stages}
                    searched = {stage: trials for stage, trials in opened.items() if stage != "confirm"}
                    rows = known.validation_rows if known else 1
                    task = study.search_task(method, epsilon, variant, rows, secrets.get(cell, b""))
                    seeds = _trial_seeds(ledger, variant, opened)
                    history = History(task, variant.seeds, outcomes, searched, trial_seeds=seeds)
                    yield SearchRecord(study, cell, name, method, variant, known, opened, history)


def configuration_of(row: Row, space: SearchSpace) -> Configuration:
    spec = json.loads(row.spec)
    return space.configuration(spec["hyperparameters"], clip=spec["privacy"]["clip"], rounds=spec["rounds"])


def _trial_seeds(ledger: Ledger, variant: SearchVariant, stages: Mapping[str, list[str]]) -> dict[str, int]:
    """Seeds of the runs of a private search, which its winner depends on."""
    if not variant.strategy.publishes_only_winner:
        return {}
    keys = [key for stage in variant.strategy.stages for key in stages.get(stage, [])]
    return {key: json.loads(row.spec)["seed"] for key, row in ledger.rows(keys, whole=False).items()}

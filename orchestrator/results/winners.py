"""What a ledger says about every cell of its study: the winner of its search and what became of it in confirm."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from orchestrator.results.ledger import Ledger, Row
from orchestrator.search.contenders import Contender, contenders_of
from orchestrator.search.private_search import best_of, fixed_grid, score_deviation
from orchestrator.search.selection import Choice, choose, win_contest
from orchestrator.study.objective import Objective
from orchestrator.study.settings import SECRET, DataSettings, MethodSettings, Study
from orchestrator.study.strategies import RUNGS, SEARCH_STAGES, SearchVariant
from search_spaces import Axis
from trainables.data import partition
from trainables.errors import UserError
from trainables.spec import HyperValue

PUBLIC_METRICS = ("accuracy", "loss")  # on the test rows; what clients measure beside them is not private
CHUNK = 1000  # rows in memory at a time: a search may have very many, and a row holds all its metrics


class Score(NamedTuple):
    """What the study's objective measures on the test rows, over the seeds that got there."""

    mean: float
    std: float
    """Sample standard deviation (ddof = 1); nan for a single seed."""
    seeds: int


@dataclass(frozen=True)
class SearchResult:
    """The search stages of a cell and its contest, as far as their trials have ended."""

    choice: Choice | None
    """As it stands: of the contest where there is one, else of the search stages."""
    chosen: dict[str, HyperValue] | None
    """The winner's configuration: its hyperparameters, and what the search space says beyond them."""
    by_one_seed: dict[str, HyperValue] | None
    """What the first search seed alone would have chosen."""
    found_in: tuple[str, ...]
    """The search stages whose configurations hold the winner."""
    configurations: int
    """Distinct ones of all search stages that have been opened, ended or not."""
    trials: int
    """Distinct trials of all stages before confirm that have been opened, ended or not."""
    trial_rounds: int
    """That those have run which have ended."""
    states: Counter[str]
    axes: dict[str, dict[str, Axis]]
    """The values tried of every hyperparameter, by stage."""
    seconds: tuple[float, ...]
    """Seconds per round of every trial."""

    @cached_property
    def tried(self) -> dict[str, Axis]:
        """The values tried of every hyperparameter, in any stage."""
        names = dict.fromkeys(name for axes in self.axes.values() for name in axes)
        return {
            name: tuple(dict.fromkeys(value for axes in self.axes.values() for value in axes.get(name, ())))
            for name in names
        }


def actual_epsilon(row: Row) -> float:
    return row.epsilon_local if row.trial.privacy.release == "local" else row.epsilon_secure


@dataclass(frozen=True)
class CellResult:
    """One method in one setting at one privacy budget, searched in one way."""

    setting: str
    method: MethodSettings
    epsilon: float
    strategy: str
    """Its name."""
    plain: bool
    """Whether it is the study's first way, whose cells go by their plain names."""
    data: DataSettings | None
    """Where the study says the data comes from."""
    search: SearchResult
    confirm: dict[int, Row]
    """By seed, in the study's order: those that have ended, however they ended."""
    seeds: tuple[int, ...]
    """All confirm seeds of the study."""
    missing: int
    """Trials known to be still to run."""
    more_to_come: bool
    """Whether stages that are not open yet will add to the missing trials."""
    objective: Objective
    last: int
    """The last round of its confirm runs."""
    standing: Hashable = None
    """Of its trials in the ledger: as long as it is the same, so is everything here."""

    @property
    def id(self) -> str:
        name = f"{self.setting} / {self.method.shown} / eps {self.epsilon:g}"
        return name if self.plain else f"{name} ({self.strategy})"

    @cached_property
    def curve(self) -> dict[int, Score]:
        """Test score by round."""
        seeds = {seed: _scores(row, self.objective) for seed, row in self.confirm.items()}
        frame = pd.DataFrame({seed: pd.Series(values, dtype=float) for seed, values in seeds.items()}).sort_index()
        table = pd.DataFrame({"mean": frame.mean(axis=1), "std": frame.std(axis=1), "seeds": frame.count(axis=1)})
        found = table[table["seeds"] > 0]
        return {
            int(t): Score(float(mean), float(std), int(seeds))
            for t, mean, std, seeds in zip(found.index, found["mean"], found["std"], found["seeds"], strict=True)
        }

    def scores_at(self, t: int) -> dict[int, float]:
        """Test score after a round, by seed, of the seeds that got there."""
        found = {seed: _scores(row, self.objective) for seed, row in self.confirm.items()}
        return {seed: values[t] for seed, values in found.items() if t in values}

    @cached_property
    def keeps_its_claim(self) -> bool:
        """Whether the noise of every confirm run buys what is claimed, as the study's release is seen."""
        return all(actual_epsilon(row) <= row.epsilon_claimed * (1 + 1e-6) for row in self.confirm.values())

    def complete(self, t: int) -> bool:
        """Whether every seed has a test score at this round."""
        return t in self.curve and self.curve[t].seeds == len(self.seeds)


def _scores(row: Row, objective: Objective) -> dict[int, float]:
    """Up to where the trial was sound: the evaluation that found it diverged judged a broken model."""
    last = row.rounds - 1 if row.state == "diverged" else math.inf
    return {
        t: value for t, value in row.metrics.get(objective.metric, {}).items() if t <= last and math.isfinite(value)
    }


@dataclass(frozen=True)
class Results:
    study: Study
    cells: tuple[CellResult, ...]
    """In the order of the tables: setting, epsilon, method, way."""
    facts: dict[str, int]
    states: Counter[str]
    """How the trials of all these cells have ended."""

    @cached_property
    def settings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.setting for cell in self.cells))

    def of(self, setting: str, epsilon: float | None = None) -> list[CellResult]:
        return [c for c in self.cells if c.setting == setting and epsilon in (None, c.epsilon)]

    @property
    def several_strategies(self) -> bool:
        return len(self.study.strategies) > 1

    @classmethod
    def read(cls, ledger: Ledger, earlier: Results | None = None) -> Results:
        """`earlier`: of the same ledger; cells that have not changed since are taken from there."""
        recorded = ledger.study()
        if recorded is None:
            raise UserError("the ledger holds no study yet")
        study = Study.recorded(recorded[0], ledger.plugins()).as_shown
        known = {cell.id: cell for cell in earlier.cells} if earlier and earlier.study == study else {}
        reader = _Reader(ledger, study, known)
        cells = tuple(
            reader.cell(setting, method, epsilon, strategy)
            for setting in reader.settings()
            for epsilon in study.epsilons
            for method in study.methods
            for strategy in study.strategies
        )
        return cls(study, cells, reader.facts, reader.states())


class _Reader:
    """Stages first, then outcomes, then rows: while a study runs, what is read later can only know more."""

    def __init__(self, ledger: Ledger, study: Study, known: Mapping[str, CellResult]) -> None:
        self.ledger, self.study, self.known = ledger, study, known
        self.stages = ledger.stages()
        self.outcomes = ledger.outcomes(study.objective)
        self.facts = ledger.facts()
        self.sources = _sources(study)
        self._seen: set[str] = set()

    def settings(self) -> list[str]:
        """In the order of the study."""
        found = dict.fromkeys(_setting_of(cell, self.study) for cell, _, _ in self.stages)
        known = [setting for setting in self.sources if setting in found]
        return known + [setting for setting in found if setting is not None and setting not in known]

    def states(self) -> Counter[str]:
        return Counter(self.outcomes[key][0] for key in self._seen if key in self.outcomes)

    def cell(self, setting: str, method: MethodSettings, epsilon: float, strategy: SearchVariant) -> CellResult:
        name = f"{setting} / {method.shown} / eps {epsilon:g}"
        opened = {
            stage: self.stages[name, strategy.name, stage]
            for stage in strategy.stages
            if (name, strategy.name, stage) in self.stages
        }
        rows = self.facts.get(f"validation_rows:{setting}", 1)
        standing = (rows, *((stage, len(keys), *self._counted(keys)) for stage, keys in opened.items()))
        plain = strategy == self.study.strategies[0]
        known = self.known.get(name if plain else f"{name} ({strategy.name})")
        if known and known.standing == standing and strategy.search != "private":
            self._seen.update(key for keys in opened.values() for key in keys)
            return known
        ended = self.ledger.rows(opened.get("confirm", []))
        if strategy.search == "private":
            search = self._private_search(method, epsilon, opened, rows)
            confirm = dict(zip([SECRET], map(_published, ended.values()), strict=False))
            runs = opened.pop("private", [])  # how many there are is secret
            if runs and all(key in self.outcomes for key in runs) and search.choice is None:
                opened["confirm"] = []  # nothing ran to its end
        else:
            search = self._search(method, strategy, opened, rows)
            confirm = {row.trial.seed: row for row in ended.values()}
        self._seen.update(key for keys in opened.values() for key in keys)
        missing, more_to_come = self._missing(strategy, opened, search)
        seeds = tuple(self.study.seeds.confirm)
        return CellResult(
            setting=setting,
            method=method,
            epsilon=epsilon,
            strategy=strategy.name,
            plain=plain,
            data=self.sources.get(setting),
            search=search,
            confirm={seed: confirm[seed] for seed in seeds if seed in confirm},
            seeds=seeds,
            missing=missing,
            more_to_come=more_to_come,
            objective=self.study.judged_by,
            last=max((row.trial.rounds for row in confirm.values()), default=self.study.rounds_of(method, "confirm")),
            standing=standing,
        )

    def _counted(self, keys: Sequence[str]) -> tuple[tuple[str, int], ...]:
        """How many ended how. What has ended stays as it is, but for what failed, which may be run again."""
        return tuple(sorted(Counter(self.outcomes[key][0] for key in keys if key in self.outcomes).items()))

    def _search(
        self, method: MethodSettings, strategy: SearchVariant, opened: dict[str, list[str]], validation_rows: int
    ) -> SearchResult:
        stages = {stage: keys for stage, keys in opened.items() if stage != "confirm"}
        keys = list(dict.fromkeys(key for keys in stages.values() for key in keys))
        ended = [key for key in keys if key in self.outcomes]
        space = method.space()
        configurations: dict[str, dict[str, HyperValue]] = {}
        seconds, trial_rounds = [], 0
        for start in range(0, len(ended), CHUNK):
            for key, row in self.ledger.rows(ended[start : start + CHUNK], whole=False).items():
                spec = json.loads(row.spec)
                beyond = space.run_settings(clip=spec["privacy"]["clip"], rounds=spec["rounds"])
                configurations[key] = {**spec["hyperparameters"], **beyond}
                trial_rounds += row.rounds
                if row.rounds:
                    seconds.append(row.seconds / row.rounds)
        searched = {stage: self._contenders(strategy, opened, stage) for stage in stages if stage != "contest"}
        compared = self._compared(strategy, searched)
        choice = self._choice(strategy, opened, compared, validation_rows)
        winner = configurations[choice.key] if choice else None
        alone = [Contender((c.key,)) for stage in compared for c in searched.get(stage, ()) if c.key in self.outcomes]
        luckiest = choose(list(dict.fromkeys(alone)), self.outcomes, validation_rows, self.study.judged_by)
        return SearchResult(
            choice=choice,
            chosen=winner,
            by_one_seed=configurations[luckiest.key] if luckiest else None,
            found_in=tuple(
                stage
                for stage, members in searched.items()
                if winner is not None
                and stage in compared
                and any(configurations.get(c.key) == winner for c in members)
            ),
            # above the first rung there are none but those that were on it
            configurations=len({c for stage, members in searched.items() if stage not in RUNGS[1:] for c in members}),
            trials=len(keys),
            trial_rounds=trial_rounds,
            states=Counter(self.outcomes[key][0] for key in ended),
            axes={
                stage: _axes([configurations[c.key] for c in members if c.key in configurations])
                for stage, members in searched.items()
            },
            seconds=tuple(seconds),
        )

    def _private_search(
        self, method: MethodSettings, epsilon: float, opened: dict[str, list[str]], rows: int
    ) -> SearchResult:
        """Of a private search the winner alone, and the grid that it was drawn from, once all runs have ended."""
        grid, keys = fixed_grid(method.space()), opened.get("private", [])
        winner, chosen = None, None
        if keys and all(key in self.outcomes for key in keys):
            specs = {key: json.loads(row.spec) for key, row in self.ledger.rows(keys, whole=False).items()}
            seeds = {key: specs[key]["seed"] for key in keys}
            winner = best_of(seeds, self.outcomes, score_deviation(self.study, epsilon, rows))
            if winner is not None:
                spec = specs[winner.key]
                beyond = method.space().run_settings(clip=spec["privacy"]["clip"], rounds=spec["rounds"])
                chosen = {**spec["hyperparameters"], **beyond}
        return SearchResult(
            choice=winner,
            chosen=chosen,
            by_one_seed=None,
            found_in=("private",) if chosen else (),
            configurations=len(grid),
            trials=1 if chosen else 0,
            trial_rounds=0,
            states=Counter({"done": 1} if chosen else {}),
            axes={"private": _axes(grid)},
            seconds=(),
        )

    def _contenders(self, strategy: SearchVariant, opened: dict[str, list[str]], *stages: str) -> list[Contender]:
        """Each once, whichever stages it is in."""
        found = (contenders_of(opened.get(s, []), len(self.study.seeds_of(strategy, s))) for s in stages)
        return list(dict.fromkeys(contender for members in found for contender in members))

    def _choice(
        self, strategy: SearchVariant, opened: dict[str, list[str]], compared: tuple[str, ...], validation_rows: int
    ) -> Choice | None:
        """Among those of which every seed has ended; before a contest has results, as the search sees it."""
        objective = self.study.judged_by
        met = [c for c in self._contenders(strategy, opened, "contest") if c.ended(self.outcomes)]
        if met:
            return win_contest(met, self.outcomes, objective)
        searched = self._contenders(strategy, opened, *compared)
        return choose([c for c in searched if c.ended(self.outcomes)], self.outcomes, validation_rows, objective)

    def _compared(self, strategy: SearchVariant, searched: dict[str, list[Contender]]) -> tuple[str, ...]:
        """The search stages among which the winner is looked for: of those in which any contender has ended."""
        return strategy.compared(
            [stage for stage, members in searched.items() if any(c.ended(self.outcomes) for c in members)]
        )

    def _missing(self, strategy: SearchVariant, opened: dict[str, list[str]], search: SearchResult) -> tuple[int, bool]:
        """How many trials of a cell are still to run, and whether that is only the least."""
        waiting = len({key for keys in opened.values() for key in keys if key not in self.outcomes})
        if "confirm" in opened:
            return waiting, False
        if opened and not waiting and search.choice is None:
            return 0, False  # nothing ran to its end: there is no winner to confirm
        contest = bool(self.study.seeds.contest) and "contest" in strategy.stages
        ends = {"grid": "fine", "halving": self.study.search.halving.stages[-1]}
        last = "contest" if contest else ends.get(strategy.search, SEARCH_STAGES[strategy.search][-1])
        return waiting + len(self.study.seeds.confirm), last not in opened


def _published(row: Row) -> Row:
    """A confirm run as it may be shown: without its seed, and without what clients measured beside their releases."""
    spec = {**json.loads(row.spec), "seed": SECRET}
    metrics = {name: values for name, values in row.metrics.items() if name in PUBLIC_METRICS}
    return replace(row, key="", spec=json.dumps(spec), metrics=metrics)


def _axes(configurations: list[dict[str, HyperValue]]) -> dict[str, Axis]:
    """The values of every hyperparameter, in the order in which they were tried."""
    values: dict[str, dict[HyperValue, None]] = {}
    for configuration in configurations:
        for name, value in configuration.items():
            values.setdefault(name, {})[value] = None
    return {name: tuple(tried) for name, tried in values.items()}


def _sources(study: Study) -> dict[str, DataSettings]:
    """The settings a study gives rise to, in its order. A data set without a label goes by its file or source."""
    found: dict[str, DataSettings] = {}
    for data in study.data:
        for text in study.partitions:
            dealt = partition.to_text(study.partition(text))
            for name in [data.label] if data.label else [data.source, Path(data.source).stem]:
                found.setdefault(" / ".join(part for part in (name, data.backbone, dealt) if part), data)
    return found


def _setting_of(cell: str, study: Study) -> str | None:
    """A cell's setting is its name without the method and the budget; None if the study has no such cell."""
    endings = (f" / {method.shown} / eps {epsilon:g}" for method in study.methods for epsilon in study.epsilons)
    fitting = [ending for ending in endings if cell.endswith(ending)]
    return cell.removesuffix(max(fitting, key=len)) if fitting else None

"""The results of a study, read from its ledger: for every cell the winner of its search and its confirm runs."""

from __future__ import annotations

import json
import math
import sqlite3
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from orchestrator.results.clients import ClientAccuracy, ClientRows, by_client, client_rows
from orchestrator.results.counts import OPENED
from orchestrator.results.ledger import Digest, Ledger, Row, SettingFacts
from orchestrator.results.records import records_of
from orchestrator.results.searches import (
    SearchedCell,
    SearchRecord,
    as_stored,
    configuration_of,
    search_records,
    study_of,
)
from orchestrator.results.trial_columns import TrialColumns
from orchestrator.search.candidates import Outcome
from orchestrator.search.objective import Objective
from orchestrator.search.selection import Choice
from orchestrator.search.strategies.private import fixed_grid
from orchestrator.search.variant import SECRET
from orchestrator.search.winner import competing_stages, winner_of_first_seed
from orchestrator.study.cell_id import SettingId
from orchestrator.study.study import Study
from search_spaces import Axis, Configuration, SearchSpace
from trainables.federation.trial_spec import TrialSpec
from trainables.metrics import METRICS

if TYPE_CHECKING:
    from orchestrator.results.surfaces import StudySurface


class Score(NamedTuple):
    """The study's objective on the test rows, over the seeds that reached a round."""

    mean: float
    std: float
    """Sample standard deviation (ddof = 1); nan for a single seed."""
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Score:
        """From one value for each seed."""
        mean, count = sum(values) / len(values), len(values)
        squares = sum((mean - value) ** 2 for value in values)
        return cls(mean, math.sqrt(squares / (count - 1)) if count > 1 else math.nan, count)


@dataclass(frozen=True)
class SearchResult:
    """The search stages and the contest of a cell, as far as their trials have ended."""

    choice: Choice | None
    """The winner so far: of the contest if it has results, else of the search stages."""
    chosen: Configuration | None
    """The winner's configuration."""
    by_one_seed: Configuration | None
    """What the first search seed alone would have chosen."""
    found_in: tuple[str, ...]
    """The search stages that hold the winner; the contest, if the strategy proposed it only there."""
    configurations: int
    """Distinct configurations of all search stages opened so far."""
    trials: int
    """Distinct trials of all stages before confirm opened so far."""
    trial_rounds: int
    """Rounds run by these trials, as far as they have ended."""
    states: Counter[str]
    axes: dict[str, dict[str, Axis]]
    """The values tried of every hyperparameter, by stage."""
    seconds: tuple[float, ...]
    """Seconds per round of every ended trial before confirm."""
    missing: int
    """Trials that have not ended, with those that later stages are expected to add; confirm runs included."""
    more_to_come: bool
    """Whether stages that are not open yet contribute to the missing trials, so that their number may change."""
    digest: str = ""
    """Digest of its trials; while the digest is the same, so is this result. Empty if the trials were not verified."""
    worst_epsilon: float | None = None
    """The largest claimed or actual eps of the runs of a private search; None for others, and before it begins."""

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
class CellResult(SearchedCell):
    """A search with its results."""

    stages: dict[str, list[str]]
    """Keys of the trials of every open stage that may be shown, confirm included."""
    search: SearchResult
    confirm: dict[int, Row]
    """Ended confirm trials by seed, in the study's order."""
    progress: Hashable
    """The setting's facts and the ledger's counts of trials; while they are the same, so is this result."""

    @property
    def seeds(self) -> list[int]:
        """All confirm seeds of the study."""
        return self.study.seeds.confirm

    @cached_property
    def last(self) -> int:
        """Last round of its confirm runs."""
        planned = self.study.stage_rounds(self.method).confirm
        return max((row.trial.rounds for row in self.confirm.values()), default=planned)

    @cached_property
    def curve(self) -> dict[int, Score]:
        """Test score by round."""
        by_round: dict[int, list[float]] = {}
        for row in self.confirm.values():
            for t, value in _scores(row, self.objective).items():
                by_round.setdefault(t, []).append(value)
        return {t: Score.of(values) for t, values in sorted(by_round.items())}

    def scores_at(self, t: int) -> dict[int, float]:
        """Test score after round t, by seed, of the seeds that reached it."""
        by_seed = {seed: _scores(row, self.objective) for seed, row in self.confirm.items()}
        return {seed: values[t] for seed, values in by_seed.items() if t in values}

    @cached_property
    def keeps_its_claim(self) -> bool:
        """Whether the actual eps of every confirm run is at most the claimed one, in the study's release model."""
        return all(actual_epsilon(row) <= row.epsilon_claimed * (1 + 1e-6) for row in self.confirm.values())

    def complete(self, t: int) -> bool:
        """Whether every seed has a test score at round t."""
        return t in self.curve and self.curve[t].seeds == len(self.seeds)


def _scores(row: Row, objective: Objective) -> dict[int, float]:
    """The objective by round, without the evaluation that found that the trial had diverged."""
    last = row.rounds - 1 if row.state == "diverged" else math.inf
    return {
        t: value for t, value in row.metrics.get(objective.metric, {}).items() if t <= last and math.isfinite(value)
    }


@dataclass(frozen=True)
class Results:
    study: Study
    cells: tuple[CellResult, ...]
    """In the order of the tables: setting, epsilon, method, variant."""
    states: Counter[str]
    """Number of ended trials in all stages of the ledger, by state; of a private study, those that may be shown."""
    records: Mapping[str, int]
    """By data set, the group of records it belongs to: data sets of one group are about the same records."""
    client_rows: Mapping[SettingId, ClientRows]
    """Rows by client, of the settings whose test rows have clients."""
    class_counts: Mapping[SettingId, Sequence[Sequence[int]]]
    """Train rows of every class at every client, in the partition with the highest seed; empty for a private search."""
    surfaces: tuple[StudySurface, ...] = ()
    """One for every setting and method that the strategy `surface` has searched."""

    @cached_property
    def settings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.setting for cell in self.cells))

    def of(self, setting: str, epsilon: float | None = None) -> list[CellResult]:
        return [cell for cell in self._by_setting.get(setting, ()) if epsilon in (None, cell.epsilon)]

    @cached_property
    def _by_setting(self) -> dict[str, list[CellResult]]:
        found: dict[str, list[CellResult]] = {}
        for cell in self.cells:
            found.setdefault(cell.setting, []).append(cell)
        return found

    def facts(self, setting: str) -> SettingFacts | None:
        return next((cell.facts for cell in self.cells if cell.setting == setting), None)

    def by_metric(self, metric: str) -> Results:
        """The same results with another metric as the objective, for tables of its test values."""
        study = self.study.model_copy(update={"objective": metric})
        return replace(self, study=study, cells=tuple(replace(cell, study=study) for cell in self.cells))

    def by_client(self, cell: CellResult) -> list[ClientAccuracy]:
        """The clients' test accuracies, lowest first; empty where test rows have no clients."""
        return by_client(cell, [row.correct for row in cell.confirm.values()], self.client_rows)

    @property
    def several_strategies(self) -> bool:
        return len(self.study.variants) > 1

    @classmethod
    def read(
        cls,
        ledger: Ledger,
        earlier: Results | None = None,
        collector: TrialCollector | None = None,
        *,
        verified: bool = False,
    ) -> Results:
        """`earlier`: results of the same ledger; cells that have not changed since are reused. `collector`: gets the
        trials of all other cells while they are read. `verified`: rows must match their checksums, and the ledger's
        counts must be those of the trials; private searches are not verified."""
        study = study_of(ledger).as_shown
        known = {cell.name: cell for cell in earlier.cells} if earlier and earlier.study == study else {}
        reader = _Reader(ledger, study, known, collector, verified)
        searches = list(search_records(ledger, study, verified=True))
        if collector is not None:
            collector.begin(study, len(searches))
        cells = tuple(map(reader.cell, searches))
        states = Counter(reader.shown.values()) if study.private else ledger.totals()
        states.pop(OPENED, None)
        records, clients = records_of(study, ledger.fingerprints()), {} if study.private else client_rows(ledger)
        counts = {} if study.private else {setting: table for (setting, _), table in ledger.partitions().items()}
        surfaces = _surfaces(ledger, study, earlier.surfaces if earlier else ())
        return cls(study, cells, states, records, clients, counts, surfaces)


def _surfaces(ledger: Ledger, study: Study, earlier: Sequence[StudySurface]) -> tuple[StudySurface, ...]:
    """The surfaces of the study. Unchanged ones are taken from `earlier`, because a fit takes seconds."""
    if "surface" not in study.search.strategies:
        return ()
    from orchestrator.results.surfaces import study_surfaces  # imports SciPy, which is slow

    return tuple(next((old for old in earlier if old == new), new) for new in study_surfaces(ledger, study))


def record_winners(ledger: Ledger, results: Results) -> None:
    """Store the winners in the ledger, so that `status` and `best` need not compute them. Winners of private searches
    are not stored."""
    known = ledger.winners()
    with ledger.transaction():
        for cell in results.cells:
            place, winner = (cell.cell_id, cell.variant.name), as_stored(cell.search.choice)
            if cell.stages and known.get(place) != winner and not cell.variant.strategy.publishes_only_winner:
                ledger.set_winner(*place, winner)


class TrialCollector(Protocol):
    """Receives the ended trials while results are read from a ledger."""

    def begin(self, study: Study, searches: int) -> None: ...

    def add(self, cell: SearchedCell, stage: str, trials: TrialColumns) -> None:
        """Not called for the trials of a private search."""

    def end(self, cell: CellResult) -> None:
        """All trials of a search have been added; or none, if its result was taken from `recall`."""

    def recall(self, name: str) -> SearchResult | None:
        """An earlier result of a search, if there is one."""


class _SearchTrials:
    """Collects what the result of a search needs from its trials."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._configurations: dict[tuple[int, Any, Any], tuple[Any, Configuration]] = {}
        """By `id` of the hyperparameters (one object for all seeds), clip and rounds. The hyperparameters are kept, so
        that their `id` stays unique."""
        self.stages: dict[str, list[str]] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.configurations: dict[str, Configuration] = {}
        """Configurations of the trials before confirm."""
        self.rounds: dict[str, int] = {}
        """By the full key of a trial: a trial that continues a shorter one adds only its further rounds."""
        self.seconds: list[float] = []
        self.states: Counter[str] = Counter()

    def add(self, trials: TrialColumns, metric: str, *, searched: bool) -> None:
        """`searched`: whether they belong to a stage before confirm."""
        if metric in ("accuracy", "loss"):
            scores: Sequence[float | None] = trials.accuracy if metric == "accuracy" else trials.loss
        else:
            scores = [row.score(metric) for row in Row.from_columns(trials)]
        self.outcomes.update(zip(trials.key, zip(trials.state, scores, trials.loss, strict=True), strict=True))
        if not searched:
            return
        new = [place for place, key in enumerate(trials.key) if key not in self.configurations]
        if len(new) < len(trials.key):  # trials of an earlier stage
            trials = trials.at(new)
        self.configurations.update(zip(trials.key, map(self._configuration, trials.content), strict=True))
        for key, spec, content, rounds in zip(trials.key, trials.spec, trials.content, trials.rounds, strict=True):
            full_key = key if content.get("stop_after") is None else TrialSpec.model_validate_json(spec).full_key
            self.rounds[full_key] = max(rounds, self.rounds.get(full_key, 0))
        timed = zip(trials.seconds, trials.rounds, strict=True)
        self.seconds += [seconds / rounds for seconds, rounds in timed if rounds]
        self.states.update(trials.state)

    def _configuration(self, content: Mapping[str, Any]) -> Configuration:
        chosen = content["hyperparameters"]
        cache_key = id(chosen), content["privacy"]["clip"], content["rounds"]
        if cache_key not in self._configurations:
            self._configurations[cache_key] = chosen, configuration_of(content, self._space)
        return self._configurations[cache_key][1]


class _Reader:
    def __init__(
        self,
        ledger: Ledger,
        study: Study,
        known: Mapping[str, CellResult],
        collector: TrialCollector | None,
        verified: bool,
    ) -> None:
        self.ledger, self.study, self.known, self.collector = ledger, study, known, collector
        self.verified = verified
        self.whole = study.objective not in ("accuracy", "loss") or bool(study.trial_metrics)
        """Whether metrics are needed that have no column."""
        self.shown: dict[str, str] = {}
        """The states of the trials of private searches that may be shown."""

    def cell(self, record: SearchRecord) -> CellResult:
        strategy = record.variant.strategy
        counts = ((stage, *sorted(counts.items())) for stage, counts in record.counts.items())
        progress = (record.facts, *counts)
        known = self.known.get(record.name)
        if known and known.progress == progress and not strategy.publishes_only_winner:
            return known
        if strategy.publishes_only_winner:
            search = self._private_search(record)
            shown = {stage: keys for stage, keys in record.stages.items() if stage not in strategy.stages}
            outcomes = record.history.outcomes
            self.shown |= {key: outcomes[key][0] for keys in shown.values() for key in keys if key in outcomes}
        else:
            search = self._recalled(record) or self._search(record)
            shown = record.stages
        facts = {f.name: getattr(record, f.name) for f in fields(SearchedCell)} | {"stages": shown}
        cell = CellResult(**facts, search=search, confirm=confirm_runs(record), progress=progress)
        if self.collector is not None:
            self.collector.end(cell)
        return cell

    def _digest(self, record: SearchRecord) -> Digest | None:
        """A digest to which the trials will be added; None if rows are not verified."""
        counts = {stage: sorted(counts.items()) for stage, counts in record.counts.items()}
        return Digest(repr((record.facts, counts)).encode()) if self.verified else None

    def _recalled(self, record: SearchRecord) -> SearchResult | None:
        """The known result, if the trials are still those that it was computed from. Their rows are verified."""
        known = self.collector.recall(record.name) if self.collector is not None else None
        digest = self._digest(record)
        if known is None or digest is None:
            return None
        place = record.cell_id, record.variant.name
        names = self.ledger.stage_names(*place)
        opened = {
            stage: self.ledger.verify_stage(*place, stage, digest) for stage in record.variant.stages if stage in names
        }
        if digest.hexdigest() != known.digest:
            return None
        vars(record)["stages"] = opened
        return known

    def _read_trials(self, record: SearchRecord, digest: Digest | None) -> _SearchTrials:
        """Read every row once. With very many trials, this takes most of the time."""
        ledger, place, found = self.ledger, (record.cell_id, record.variant.name), _SearchTrials(record.task.space)
        names = ledger.stage_names(*place)
        for stage in record.variant.stages:
            if stage not in names:
                continue
            opened = found.stages[stage] = []
            states: Counter[str] = Counter()
            for keys, trials in ledger.stage_trials(*place, stage, whole=self.whole, digest=digest):
                opened += keys
                if trials is not None:
                    states.update(trials.state)
                    found.add(trials, self.study.objective, searched=stage != "confirm")
                    if self.collector is not None:
                        self.collector.add(record, stage, trials)
            if self.verified and +record.counts.get(stage, Counter()) != states + Counter({OPENED: len(opened)}):
                raise sqlite3.DataError(f"the counts of stage {stage} of {record.name} are not those of its trials")
        return found

    def _search(self, record: SearchRecord) -> SearchResult:
        digest = self._digest(record)
        trials = self._read_trials(record, digest)
        history = record.with_trials(trials.stages, trials.outcomes).history
        configurations = trials.configurations
        searched = {stage: history.candidates(stage) for stage in history.stages if stage != "contest"}
        competing = competing_stages(record.variant, history)
        choice, of_one_seed = record.winner, winner_of_first_seed(record.variant, history)
        winner = configurations[choice.key] if choice else None
        adding = [stage for stage in searched if record.variant.strategy.adds_configurations(stage)]
        holding = [
            stage
            for stage, candidates in searched.items()
            if winner is not None
            and stage in competing
            and any(configurations.get(c.key) == winner for c in candidates)
        ]
        return SearchResult(
            choice=choice,
            chosen=winner,
            by_one_seed=configurations[of_one_seed.key] if of_one_seed else None,
            found_in=tuple(holding) if holding or winner is None else ("contest",),
            configurations=len({candidate for stage in adding for candidate in searched[stage]}),
            trials=len({key for keys in history.stages.values() for key in keys}),
            trial_rounds=sum(trials.rounds.values()),
            states=trials.states,
            axes={
                stage: _axes(configurations[c.key] for c in candidates if c.key in configurations)
                for stage, candidates in searched.items()
            },
            seconds=tuple(trials.seconds),
            missing=record.waiting + sum(record.to_come.values()),
            more_to_come=record.stages_to_open,
            digest=digest.hexdigest() if digest else "",
        )

    def _private_search(self, record: SearchRecord) -> SearchResult:
        """Only the winner, once all runs have ended, and the grid that it was drawn from: the number of runs is
        secret."""
        space, stages = record.method.space(), record.variant.strategy.stages
        choice, chosen = record.winner, None
        if choice is not None:
            (row,) = self.ledger.rows([choice.key], whole=False).values()
            chosen = configuration_of(row.content, space)
        grid = fixed_grid(space)
        return SearchResult(
            choice=choice,
            chosen=chosen,
            by_one_seed=None,
            found_in=stages if chosen else (),
            configurations=len(grid),
            trials=1 if chosen else 0,
            trial_rounds=0,
            states=Counter({"done": 1} if chosen else {}),
            axes=dict.fromkeys(stages, _axes(grid)),
            seconds=(),
            missing=0 if record.finished else 1,
            more_to_come=not record.finished and "confirm" not in record.stages,
            worst_epsilon=self._worst_epsilon(record),
        )

    def _worst_epsilon(self, record: SearchRecord) -> float | None:
        keys = [key for keys in record.stages.values() for key in keys]
        runs = self.ledger.rows(keys, whole=False).values()
        return max([record.epsilon, *map(actual_epsilon, runs)]) if keys else None


def confirm_runs(record: SearchRecord) -> dict[int, Row]:
    """The ended confirm trials by seed, in the study's order, as they may be shown."""
    ended = record.ledger.rows(record.ledger.stage(record.cell_id, record.variant.name, "confirm"))
    if record.variant.strategy.publishes_only_winner:
        runs = dict(zip([SECRET], map(_without_private_values, ended.values()), strict=False))
    else:
        runs = {row.content["seed"]: row for row in ended.values()}
    return {seed: runs[seed] for seed in record.study.seeds.confirm if seed in runs}


def _without_private_values(row: Row) -> Row:
    """A confirm run as it may be shown: without its key, its seed, the key of its noise and the hash of the data, and
    with the metrics of the test rows alone. The noise does not protect what clients measured besides their releases."""
    spec = {**json.loads(row.spec), "seed": SECRET}
    spec.pop("noise_key", None)
    spec["problem"]["data"]["fingerprint"] = ""
    metrics = {name: values for name, values in row.metrics.items() if name in METRICS}
    return replace(row, key="", spec=json.dumps(spec), metrics=metrics)


def _axes(configurations: Iterable[Configuration]) -> dict[str, Axis]:
    """The values of every hyperparameter, in the order tried."""
    values: dict[str, dict[Any, None]] = {}
    for configuration in configurations:
        for name, value in configuration.items():
            values.setdefault(name, {})[value] = None
    return {name: tuple(tried) for name, tried in values.items()}

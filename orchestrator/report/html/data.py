"""The page's data for one study, as plain values for JSON, from the ledger alone: the same ledger gives the same page.
Configurations, curves and points beyond the size limits are left out here, and the page says how many."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import search_spaces
from orchestrator.report import palette
from orchestrator.report.html import findings_text
from orchestrator.report.html.configurations import Configuration, Groups, ranked, varied
from orchestrator.report.html.importance import importance
from orchestrator.report.html.surface_data import surface_data
from orchestrator.report.tables import PER_SETTING, render
from orchestrator.report.tables.accuracy import final_accuracy
from orchestrator.report.tables.common import data_fingerprints, missing_text, thinned
from orchestrator.report.tables.privacy import with_search
from orchestrator.report.tables.publication import prices, with_price
from orchestrator.report.tables.timing import seconds_per_round
from orchestrator.results import status
from orchestrator.results.ledger import Ledger, Row, Session
from orchestrator.results.searches import SearchedCell
from orchestrator.results.trial_columns import TrialColumns
from orchestrator.results.winners import CellResult, Results, SearchResult, actual_epsilon
from orchestrator.search.objective import objective_of
from orchestrator.study.cell_id import SettingId
from orchestrator.study.study import Study
from trainables import metrics
from trainables.data.partition import divergence_from_uniform
from trainables.limited_yaml import shown_yaml
from trainables.spec import ENGINE_VERSION

MOST_BYTES = 4_500_000  # of the data of a page
MOST_CONFIGURATIONS = 30_000  # of a page: about 2 MB
MOST_POINTS = 200  # of a curve
TRACES = 20  # configurations of a cell with validation curves
METRICS = {
    "accuracy": "accuracy (%)",
    "loss": "loss",
    "train_loss": "train loss",
    "squared_error": "squared error",
    "clipped_share": "clipped gradients (%)",
    "signal_norm": "signal norm",
    "noise_norm": "noise norm",
}


@dataclass(frozen=True)
class Limits:
    """Size limits of a cell: configurations, configurations with curves, points of a curve."""

    configurations: int
    traces: int = TRACES
    points: int = MOST_POINTS

    @property
    def halved(self) -> Limits:
        return Limits(self.configurations // 2, max(1, self.traces // 2), max(10, self.points // 2))


class Memory:
    """Reuses the data of unchanged cells when a growing ledger is read repeatedly."""

    def __init__(self) -> None:
        self.results: Results | None = None
        self.limits: Limits | None = None
        self.most = Limits(MOST_CONFIGURATIONS)
        """The limits before any were halved."""
        self.cells: dict[str, tuple[CellResult, Any, int]] = {}
        """The data of every cell, and its size in bytes."""
        self.searches: dict[str, tuple[CellResult, _Cell]] = {}
        """Every cell's search with the limits `most`, so that smaller limits need not read its trials again."""
        self._search, self._contest = Groups(), Groups()

    # the `TrialCollector` interface, called by `Results.read`

    def begin(self, study: Study, searches: int) -> None:
        if self.limits is None:
            self.most = Limits(MOST_CONFIGURATIONS // max(1, searches))

    def add(self, cell: SearchedCell, stage: str, trials: TrialColumns) -> None:
        if stage in cell.variant.strategy.stages:
            self._search.add(stage, trials, cell.objective)
        elif stage == "contest":
            self._contest.add(stage, trials, cell.objective)

    def recall(self, name: str) -> SearchResult | None:
        return None

    def end(self, cell: CellResult) -> None:
        found, contest = self._search.configurations, self._contest.configurations
        self.searches[cell.name] = cell, _Cell(cell, found, contest, self.most.configurations)
        self._search, self._contest = Groups(), Groups()


def gather(
    ledger: Ledger, name: str, running: str | None = None, most: int = MOST_BYTES, memory: Memory | None = None
) -> dict[str, Any]:
    """The page's data for one ledger. `name`: the name of these results on the page; `running`: the driver, if there is
    one; `most`: the size limit in bytes."""
    memory = memory or Memory()
    results = memory.results = Results.read(ledger, memory.results, collector=memory)
    common = _plain(_study_data(ledger, name, running, results))
    limits, left = memory.limits or memory.most, most - _size(common)
    while (cells := _cells(ledger, results, limits, memory, left)) is None:
        limits = limits.halved
    return {**common, "cells": cells}


def _cells(ledger: Ledger, results: Results, limits: Limits, memory: Memory, most: int) -> list[Any] | None:
    """The data of all cells; None if they exceed `most` bytes and the limits can be halved."""
    if limits != memory.limits:
        memory.cells, memory.limits = {}, limits
    size = 1  # of the JSON list
    for cell in results.cells:
        known = memory.cells.get(cell.name)
        if known is None or known[0] is not cell:
            content = _plain(memory.searches[cell.name][1].content(ledger, limits))
            known = memory.cells[cell.name] = cell, content, _size(content)
        size += known[2] + 1
        if size > most and limits.configurations > 1:
            return None
    return [memory.cells[cell.name][1] for cell in results.cells]


def _study_data(ledger: Ledger, name: str, running: str | None, results: Results) -> dict[str, Any]:
    study, objective, source = results.study, results.study.objective_spec, ledger.study()
    return {
        "name": name,
        "study": study.name,
        "description": study.description,
        "objective": {
            "metric": objective.metric,
            "title": objective.title,
            "final": objective.test_title,
            "unit": objective.unit,
            "lower": objective.lower_is_better,
            "digits": 2 if objective.format_spec == ".2f" else None,
        },
        "metrics": METRICS | {o.metric: f"{o.title}{o.unit}" for o in map(objective_of, study.trial_metrics)},
        "methods": [method.shown for method in study.methods],
        "looks": {
            variant.name: [palette.look(number, index) for number in range(len(study.methods))]
            for index, variant in enumerate(study.variants)
        },
        "epsilons": study.epsilons,
        "strategies": [variant.name for variant in study.variants],
        "samples_ranges": {variant.name: variant.strategy.samples_ranges for variant in study.variants},
        "settings": results.settings,
        "seeds": study.seeds.model_dump(),
        "status": _status(ledger, name, running, results),
        "findings": findings_text.summary(results),
        "caveats": findings_text.caveats(results),
        "surfaces": [surface_data(surface) for surface in results.surfaces],
        "tables": _tables(results),
        "partitions": [] if study.private else _partitions(ledger, study),  # class counts are not private
        "privacy": study.privacy.model_dump(),
        "private": study.private,
        "sessions": []
        if study.private  # they would reveal the number of runs
        else [{"began": session.began, "ended": _ended(session)} for session in ledger.sessions()],
        "provenance": {
            "source": shown_yaml(source[1]) if source else "",
            "fingerprints": data_fingerprints(ledger, study),
            "plugins": ledger.plugins(),
            "engine": ENGINE_VERSION,
            "facts": {s: vars(facts) for s in results.settings if (facts := results.facts(s))},
        },
    }


def _status(ledger: Ledger, name: str, running: str | None, results: Results) -> dict[str, Any]:
    found = status.of(ledger, name, running)
    if results.study.private:  # only the winners may be counted
        ended = results.states.total()
        found |= {"trials": dict(results.states), "trials_ended": ended, "trials_expected": None, "failed": {}}
        found |= {"time": {"elapsed_s": None, "trial_rounds_per_second": None, "left_s": None}, "retries": []}
    fields = ("finished", "running", "cells_ended", "cells_total", "trials", "trials_ended")
    return {key: found[key] for key in (*fields, "time", "failed", "retries")} | {
        "missing": missing_text(results.cells),
        "best": status.best_texts(found),
    }


class _Cell:
    """One method in one setting at one budget: its search by configuration, its confirm runs by seed."""

    def __init__(
        self, cell: CellResult, found: Sequence[Configuration], contest: Sequence[Configuration], most: int
    ) -> None:
        """`found`: the configurations of the search, of which the best `most` and the winner are kept; `contest`: the
        configurations of the contest."""
        self.cell, strategy = cell, cell.variant.strategy
        stages = {stage: keys for stage, keys in cell.stages.items() if stage in strategy.stages}
        compared = set(strategy.competing(stages))
        order = ranked(found, cell.objective)
        # configurations that can win come first; the sort is stable
        order.sort(key=lambda number: compared.isdisjoint(found[number].stages))
        self._count, self._order, self._won = len(order), order[:most], self._winner(found)
        shown = {*self._order, *([] if self._won is None else [self._won])}
        self.configurations = {number: found[number] for number in sorted(shown)}
        self._varied = varied(found)
        self._best, self._ended = self._best_so_far(found), sum(len(c.keys) for c in found)
        self._axes = [self._axis(name, found) for name in self._varied]
        self._shares = [share for stage in stages for share in self._importance(stage, found)]
        self.contest = [contest[number] for number in ranked(contest, cell.objective)]

    def content(self, ledger: Ledger, limits: Limits) -> dict[str, Any]:
        cell, choice, final = self.cell, self.cell.search.choice, self.cell.curve.get(self.cell.last)
        return {
            "id": cell.name,
            "setting": cell.setting,
            "method": cell.method.shown,
            "epsilon": cell.epsilon,
            "strategy": cell.variant.name,
            "missing": cell.search.missing,
            "complete": cell.complete(cell.last),
            "final": final._asdict() if final else None,
            "keeps_its_claim": cell.keeps_its_claim,
            "actual": max((actual_epsilon(row) for row in cell.confirm.values()), default=None),
            "with_search": with_search(cell, cell.study),
            "chosen": cell.search.chosen,
            "validation": choice.score if choice else None,
            "near": choice.within_standard_error if choice else None,
            "states": dict(cell.search.states),
            "confirm": [_run(seed, row, limits.points) for seed, row in cell.confirm.items()],
            "search": self._search(ledger, limits),
            "contest": self._contest(),
            "steady": cell.variant.strategy.prefers_small_spread,
            "best": self._best,
            "search_ended": self._ended,
            "importance": self._shares,
        }

    def _search(self, ledger: Ledger, limits: Limits) -> dict[str, Any]:
        """The configurations of the search, as one list per column, which is compact."""
        order, won = self._order, self._won
        kept = sorted({*order[: limits.configurations], *([] if won is None else [won])})
        traced = order[: min(limits.traces, limits.configurations)]
        found = [self.configurations[number] for number in kept]
        best = [number for number in traced if self.configurations[number].mean is not None]
        return {
            "axes": self._axes,
            "values": [[c.values.get(name) for c in found] for name in self._varied],
            "stages": [c.stages for c in found],
            "state": [c.state for c in found],
            "mean": [c.mean for c in found],
            "std": [c.std for c in found],
            "seeds": [len(c.seeds) for c in found],
            "seconds": [c.seconds for c in found],
            "winner": None if won is None else kept.index(won),
            "left_out": self._count - len(kept),
            "traces": self._traces(ledger, best, kept, limits.points),
        }

    def _best_so_far(self, found: Sequence[Configuration]) -> list[tuple[int, float]]:
        """The best mean over seeds by number of ended search trials, in the order of proposal: one point for every new
        best. A stage with more rounds starts over, because scores after different numbers of rounds are not
        comparable."""
        variant, cost, ended, level = self.cell.variant, self.cell.objective.cost, 0, ""
        points: list[tuple[int, float]] = []
        for configuration in found:
            ended, stage = ended + len(configuration.keys), configuration.stages[0]
            score = configuration.mean
            if score is None or len(configuration.seeds) < len(variant.seeds(stage)):
                continue
            restarts = variant.restarts(stage) and stage != level
            if restarts or not points or cost(score) < cost(points[-1][1]):
                points.append((ended, score))
            level = stage if restarts else level
        return thinned(points, MOST_POINTS)

    def _contest(self) -> list[dict[str, Any]]:
        """The finalists on the contest seeds, best first."""
        return [
            {
                "values": [c.values.get(name) for name in self._varied],
                **{"mean": c.mean, "std": c.std, "seeds": len(c.seeds), "state": c.state, "won": self._is_winner(c)},
            }
            for c in self.contest
        ]

    def _axis(self, name: str, found: Sequence[Configuration]) -> dict[str, Any]:
        tried = tuple(dict.fromkeys(c.values[name] for c in found if name in c.values))
        scale = self.cell.method.space().scale.get(name, "linear")
        numeric = search_spaces.is_numeric(tried)
        usable = search_spaces.usable_scale(scale, [float(v) for v in tried]) if numeric else "names"
        return {"name": name, "scale": usable, "numeric": numeric}

    def _winner(self, found: Sequence[Configuration]) -> int | None:
        """The index of the winner among the configurations of the search; the one with the most rounds if several
        match. Trials of the contest are not part of `found`."""
        alike = [number for number, c in enumerate(found) if self._is_winner(c)]
        return max(alike, key=lambda number: float(found[number].values["rounds"]), default=None)

    def _is_winner(self, configuration: Configuration) -> bool:
        chosen = self.cell.search.chosen
        return chosen is not None and chosen.items() <= configuration.values.items()

    def _traces(self, ledger: Ledger, best: Sequence[int], kept: Sequence[int], points: int) -> list[dict[str, Any]]:
        places = {number: place for place, number in enumerate(kept)}
        return [
            {"configuration": places[number], **_run(row.content["seed"], row, points, scores_only=True)}
            for number in best
            for row in ledger.rows(self.configurations[number].keys).values()
        ]

    def _importance(self, stage: str, found: Sequence[Configuration]) -> list[dict[str, Any]]:
        """Importance of the hyperparameters in one stage, because each stage is a grid and their union is not; empty
        if fewer than two hyperparameters vary, or no score does."""
        shares = importance([c for c in found if stage in c.stages], self.cell.objective)
        if shares is None or len(shares.single) < 2:  # one alone explains everything
            return []
        pairs = {f"{a} × {b}": value for (a, b), value in shares.pairs.items()}
        shape = {"stage": stage, "exact": shares.exact, "n": shares.configurations}
        return [{**shape, "single": shares.single, "pairs": pairs}]


def _run(seed: int, row: Row, most: int, *, scores_only: bool = False) -> dict[str, Any]:
    """A trial's curves, thinned to at most `most` points. `scores_only`: without measurements such as norms."""
    last = row.rounds - 1 if row.state == "diverged" else math.inf
    curves = {}
    for name, values in row.metrics.items():
        if name in metrics.METRICS or (name in METRICS and not scores_only):
            points = [(t, value) for t, value in sorted(values.items()) if t <= last and math.isfinite(value)]
            curves[name] = thinned(points, most)
    rounds = sorted({t for points in curves.values() for t, _ in points})
    return {
        "seed": seed,
        "state": row.state,
        "rounds": rounds,
        "seconds": row.seconds,
        "curves": {
            name: [by_round.get(t) for t in rounds] for name, points in curves.items() if (by_round := dict(points))
        },
    }


def _ended(session: Session) -> list[tuple[float, int]]:
    """Times and cumulative counts of ended trials, thinned."""
    counts = accumulate(trials for _, trials, _ in session.batches)
    return thinned(((at, count) for (at, _, _), count in zip(session.batches, counts, strict=True)), MOST_POINTS)


def _tables(results: Results) -> list[dict[str, Any]]:
    found = [
        {"kind": kind, "setting": setting, **_table(results, table, setting)}
        for setting in results.settings
        for kind, build in {"final": final_accuracy, **PER_SETTING}.items()
        if (table := build(results, setting)) is not None
    ]
    return [*found, {"kind": "timing", "setting": "", **_table(results, seconds_per_round(results))}]


def _table(results: Results, table: render.Table, setting: str | None = None) -> dict[str, Any]:
    return {
        "title": table.title,
        "caption": [
            " ".join([table.summary, *prices(results, setting)]),
            with_price(results, table, setting).caption,
        ],
        "columns": table.columns,
        "align": table.align,
        "groups": [
            {
                "heading": group.heading,
                "rows": [list(row) for row in group.rows],
                "bold": [[int(isinstance(text, render.Bold)) for text in row] for row in group.rows],
            }
            for group in table.groups
        ],
        "csv": render.to_csv(table) if len(table.data.columns) else "",
    }


def _partitions(ledger: Ledger, study: Study) -> list[dict[str, Any]]:
    import numpy as np

    names = ledger.names()

    def named(setting: SettingId, counts: list[list[int]]) -> dict[str, Sequence[str]]:
        """Names of classes and clients; empty if they have only numbers. Other partitions make clients of their own."""
        classes, clients = names.get(setting.data, ((), ()))
        explicit = setting.partition == "explicit" and len(clients) == len(counts)
        return {"classes": classes if len(classes) == len(counts[0]) else (), "clients": clients if explicit else ()}

    return [
        {
            "setting": study.settings.get(setting, " / ".join(setting)),
            "seed": seed,
            "counts": counts,
            **named(setting, counts),
            "divergence": divergence_from_uniform(np.array(counts)).tolist() if len(counts[0]) > 1 else None,
        }
        for (setting, seed), counts in ledger.partitions().items()
    ]


def _plain(value: Any) -> Any:
    """Values that JSON can hold, with seven digits, or all digits above 1e8 (times); nan becomes null, an infinity the
    text "inf" or "-inf"."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None if math.isnan(value) else str(value)
        return value if abs(value) > 1e8 else float(f"{value:.7g}")
    return value


def _size(value: Any) -> int:
    return len(as_json(value).encode())


def as_json(value: Any) -> str:
    """JSON for a script element: escaped so that no character can end the element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text

"""The status of a results folder, read from its ledger."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.results.counts import OPENED
from orchestrator.results.ledger import Ledger, Row, Session
from orchestrator.results.locations import results_location
from orchestrator.results.searches import SearchRecord, configuration_of, search_records, study_of
from orchestrator.search.objective import objective_of
from orchestrator.search.selection import Choice
from search_spaces import Configuration, SearchSpace

RECENT_BATCHES = 20


def read(results: Path | str) -> dict[str, Any]:
    where = results_location(results)
    with where.open_for_reading() as folder, Ledger.read(folder) as ledger:
        return of(ledger, str(results), running=holder(folder) or where.lock_holder())


def of(ledger: Ledger, results: str, running: str | None) -> dict[str, Any]:
    """`running`: the process that runs the study at this moment, if any."""
    study = study_of(ledger, f"results folder {results}")
    records = [record for record in search_records(ledger, study) if record.counts]
    totals = ledger.totals()
    known = totals.pop(OPENED, 0)
    best = _best_rows(ledger, records)
    cells = [_cell(record, best) for record in records]
    total = len(study.settings) * len(study.methods) * len(study.epsilons) * len(study.variants)
    rounds_left = 0
    for record in records:
        rounds, variant = study.stage_rounds(record.method), record.variant
        for stage, count in (*_missing(record).items(), *record.to_come.items()):
            rounds_left += count * variant.last_round(stage, variant.planned_rounds(stage, rounds))
    all_begun = len(cells) == total
    sessions = ledger.sessions()
    return {
        "study": study.name,
        "objective": study.objective,
        "stages": list(study.stages),
        "finished": all_begun and all(cell["ended"] for cell in cells),
        "running": running,
        "cells_ended": sum(cell["ended"] for cell in cells),
        "cells_total": total,
        "trials": dict(sorted(totals.items())),
        "trials_ended": totals.total(),
        "trials_expected": known + sum(sum(r.to_come.values()) for r in records) if all_begun else None,
        "confirm": {
            "done": sum(cell["stages"].get("confirm", {"done": 0})["done"] for cell in cells),
            "total": sum(cell["expected"].get("confirm", 0) for cell in cells),
        },
        "time": _time(sessions, rounds_left, running is not None),
        "computed_on": _computed_on(sessions),
        "nodes": ledger.trials_by_node(),
        "code": ledger.trials_by_code(),
        "stalled": [
            {"node": stall.node, "trials": stall.trials, "seconds": max(0.0, time.time() - stall.since)}
            for stall in (ledger.stalls() if running else ())
        ],
        "worker_logs": sessions[-1].environment.get("logs") if sessions else None,
        "cells": cells,
        "failed": ledger.failed(),
        "retries": [{"trials": count, "first": key, "reason": reason} for count, key, reason in ledger.failures()],
    }


def _best(record: SearchRecord) -> Choice | None:
    """The winner so far, if it may be shown and finished on every seed."""
    best = None if record.variant.strategy.publishes_only_winner else record.winner
    return None if best is not None and best.failed else best


def _best_rows(ledger: Ledger, records: Iterable[SearchRecord]) -> dict[str, Row]:
    keys = [best.key for record in records if (best := _best(record)) is not None]
    rows = ledger.rows(keys, whole=False)
    if missing := [key for key in keys if key not in rows]:
        raise sqlite3.DataError(f"trial {missing[0]!r} wins a search but has no row")
    return rows


def _cell(record: SearchRecord, rows: Mapping[str, Row]) -> dict[str, Any]:
    """The status of one search. `rows`: the rows of the winners, by key."""
    best, ended = _best(record), record.ended
    return {
        "cell": record.cell_name,
        "setting": record.setting,
        "method": record.method.shown,
        "epsilon": record.epsilon,
        "strategy": record.variant.name,
        "name": record.name,
        "ended": record.finished,
        "stages": {stage: {"done": ended[stage], "total": total} for stage, total in record.opened.items()},
        "expected": record.opened if record.finished else record.expected,
        f"best_validation_{record.study.objective}": best.score if best else None,
        "best_hyperparameters": _tuned(rows[best.key], record.task.space) if best else None,
    }


def _missing(record: SearchRecord) -> dict[str, int]:
    """Trials of every open stage that have not ended."""
    ended = record.ended
    return {stage: opened - ended[stage] for stage, opened in record.opened.items()}


def _tuned(row: Row, space: SearchSpace) -> Configuration:
    """The hyperparameters that the search varies; best.yaml has all."""
    configuration = configuration_of(row.content, space)
    return {name: value for name, value in configuration.items() if name in {*space.coarse, *space.fine}}


def _computed_on(sessions: list[Session]) -> dict[str, int]:
    """Number of trials by kind of device: between kinds, results differ in the last bits."""
    counts: Counter[str] = Counter()
    for session in sessions:
        if session.environment:
            device, kernel, machine = (session.environment.get(name, "?") for name in ("device", "kernel", "machine"))
            counts[f"{device}, {kernel} kernel, {machine}"] += session.computed
    return {where: count for where, count in counts.items() if count}


# ---- time


def _time(sessions: list[Session], rounds_left: int, running: bool) -> dict[str, float | None]:
    """Seconds that drivers have worked, the recent rate, and the seconds left at that rate; None where unknown."""
    if not sessions:
        return {"elapsed_s": None, "trial_rounds_per_second": None, "left_s": None}
    elapsed = sum(session.last - session.began for session in sessions)
    if running:
        elapsed += max(0.0, time.time() - sessions[-1].last)
    rate = next((rate for session in reversed(sessions) if (rate := _rate(session)) is not None), None)
    return {
        "elapsed_s": elapsed,
        "trial_rounds_per_second": rate,
        "left_s": 0.0 if not rounds_left else rounds_left / rate if rate else None,
    }


def _rate(session: Session) -> float | None:
    """Trial-rounds per second over the last batches, timed from the end of the first of them. A single batch is timed
    from the beginning of the session, which includes the start of Ray."""
    recent = session.batches[-RECENT_BATCHES:]
    if not recent:
        return None
    began, counted = (recent[0][0], recent[1:]) if len(recent) > 1 else (session.began, recent)
    seconds = session.last - began
    return sum(rounds for _, _, rounds in counted) / seconds if seconds > 0 else None


def holder(folder: Path) -> str | None:
    """The process that runs the study at this moment, if any."""
    try:
        descriptor = os.open(folder / "ledger.lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return os.read(descriptor, 200).decode(errors="replace").strip()
    finally:
        os.close(descriptor)
    return None


def as_text(found: dict[str, Any]) -> str:
    objective = objective_of(found["objective"])
    state = "finished" if found["finished"] else f"running ({found['running']})" if found["running"] else "not finished"
    lines = [f"study {found['study']}: {state}, {found['cells_ended']} of {found['cells_total']} cells ended"]
    lines.append("trials: " + (", ".join(f"{count} {name}" for name, count in found["trials"].items()) or "none"))
    if not found["finished"] and found["trials_expected"]:
        confirm = found["confirm"]
        lines[-1] += (
            f"; {found['trials_ended']} of about {found['trials_expected']} have ended, "
            f"of confirm {confirm['done']} of {confirm['total']}"
        )
    lines += _time_text(found)
    best = "best in the search" if found["finished"] else "best so far"
    lines += [f"{best}: {text}" for text in best_texts(found)]
    shown = [stage for stage in found["stages"] if any(stage in cell["stages"] for cell in found["cells"])]
    width = max((len(cell["name"]) for cell in found["cells"]), default=4)
    rows = [[_count(cell["stages"].get(stage)) for stage in shown] for cell in found["cells"]]
    column = max(8, *(len(text) for row in [shown, *rows] for text in row)) + 2 if shown else 0
    lines.append(
        f"{'cell':<{width}}  "
        + "".join(f"{stage:>{column}}" for stage in shown)
        + f"  best validation {objective.short}"
    )
    for cell, counts in zip(found["cells"], rows, strict=True):
        best = cell[f"best_validation_{objective.metric}"]
        lines.append(
            f"{cell['name']:<{width}}  "
            + "".join(f"{count:>{column}}" for count in counts)
            + (f"  {objective.format(best)}" if best is not None else "  ·")
        )
    if found["computed_on"]:
        counted = (f"{count} trials on {where}" for where, count in found["computed_on"].items())
        lines.append(f"computed: {'; '.join(counted)}")
    if found["nodes"]:
        lines.append("by node: " + ", ".join(f"{node} {count}" for node, count in found["nodes"].items()))
    if len(found["code"]) > 1:
        lines.append("by code: " + ", ".join(f"{code} {count}" for code, count in found["code"].items()))
    lines += [
        f"no progress for {duration(stall['seconds'])} on node {stall['node']}: a pack of {stall['trials']} trials"
        for stall in found["stalled"]
    ]
    if found["worker_logs"] and (found["running"] or found["retries"] or found["failed"]):
        lines.append(f"logs of the workers, on every node: {found['worker_logs']}")
    lines += [f"retried: a pack of {retry['trials']} trials: {retry['reason']}" for retry in found["retries"]]
    lines += _failures_text(found["failed"])
    return "\n".join(lines)


def _failures_text(failed: dict[str, str]) -> list[str]:
    """Each reason once, with the number of its trials, and the traceback if there is one."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in failed.items():
        by_reason.setdefault(reason, []).append(key)
    lines = []
    for reason, keys in by_reason.items():
        sentence, *trace = reason.splitlines() or [""]
        others = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        lines += [f"failed: trial {keys[0]}{others}: {sentence}", *(f"    {line}" for line in trace)]
    return lines


def _time_text(found: dict[str, Any]) -> list[str]:
    spent = found["time"]
    if spent["elapsed_s"] is None:
        return []
    parts = [f"time: {duration(spent['elapsed_s'])}"]
    if spent["trial_rounds_per_second"] is not None:
        parts.append(f"{spent['trial_rounds_per_second']:.4g} trial-rounds/s")
    if not found["finished"] and spent["left_s"] is not None and not found["stalled"]:
        parts.append(f"about {duration(spent['left_s'])} left{'' if found['running'] else ' once resumed'}")
    return [", ".join(parts)]


def best_texts(found: dict[str, Any]) -> list[str]:
    """For every setting and budget, the method with the best validation score so far and its hyperparameters."""
    objective = objective_of(found["objective"])
    name = f"best_validation_{objective.metric}"
    leaders: dict[tuple[str, float], dict[str, Any]] = {}
    for cell in found["cells"]:
        at, score = (cell["setting"], cell["epsilon"]), cell[name]
        if score is not None and (at not in leaders or objective.cost(score) < objective.cost(leaders[at][name])):
            leaders[at] = cell
    texts = []
    for (setting, epsilon), cell in sorted(leaders.items()):
        chosen = ", ".join(
            f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in cell["best_hyperparameters"].items()
        )
        shown = f"{objective.format(cell[name])}{objective.unit.strip(' ()')}"
        texts.append(
            f"{setting}, eps {epsilon:g}: {cell['method']}, validation {shown}{f' ({chosen})' if chosen else ''}"
        )
    return texts


def duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 90 else f"{hours:.1f} h"


def _count(count: dict[str, int] | None) -> str:
    return f"{count['done']}/{count['total']}" if count else "·"

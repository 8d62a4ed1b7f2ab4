"""How a result folder stands, read from its ledger alone."""

from __future__ import annotations

import fcntl
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from orchestrator.results.ledger import Ledger, Session
from orchestrator.results.locations import results_location
from orchestrator.search import extent
from orchestrator.search.contenders import Contender, Outcome, contenders_of
from orchestrator.search.selection import Choice, leader
from orchestrator.study.objective import OBJECTIVES
from orchestrator.study.settings import MethodSettings, Study
from orchestrator.study.strategies import STAGES, SearchVariant
from search_spaces import SearchSpace
from trainables.errors import UserError
from trainables.spec import HyperValue

RECENT_BATCHES = 20


def read(results: Path | str) -> dict[str, Any]:
    where = results_location(results)
    with where.open_for_reading() as folder, Ledger.read(folder) as ledger:
        return of(ledger, str(results), running=holder(folder) or where.lock_holder())


def of(ledger: Ledger, results: str, running: str | None) -> dict[str, Any]:
    """`running`: who runs the study at this moment, if anyone."""
    recorded, stages = ledger.study(), ledger.stages()
    if recorded is None:
        raise UserError(f"result folder {results} holds no study yet")
    study = Study.recorded(recorded[0], ledger.plugins())
    outcomes, failures = ledger.outcomes(study.objective), ledger.failures()
    failed = [key for key, (state, _, _) in outcomes.items() if state == "failed"]
    reasons = {key: row.reason for key, row in ledger.rows(failed).items()}
    spaces = {method.shown: method.space() for method in study.methods}
    cells: list[dict[str, Any]] = []
    known: set[str] = set()
    rounds_left = more = 0
    strategies = {strategy.name: strategy for strategy in study.strategies}
    for cell, name in dict.fromkeys((cell, strategy) for cell, strategy, _ in stages):
        opened = {stage: stages[cell, name, stage] for stage in STAGES if (cell, name, stage) in stages}
        named, strategy = _named(cell, study), strategies.get(name)
        if named is None or strategy is None:
            continue  # of an earlier form of the study
        setting, method, epsilon = named
        done = {stage: sum(key in outcomes for key in keys) for stage, keys in opened.items()}
        counts = {stage: len(keys) for stage, keys in opened.items()}
        expected = extent.expected_trials(study, method, spaces[method.shown], strategy, counts)
        ended = _has_ended(strategy, opened, outcomes, expected)
        known.update(key for keys in opened.values() for key in keys)
        to_come = {} if ended else extent.yet_to_open(study, method, spaces[method.shown], strategy, counts)
        if ended:
            expected = counts
        more += sum(to_come.values())
        for stage, count in (*((s, counts[s] - done[s]) for s in opened), *to_come.items()):
            rounds_left += count * study.last_round_of(method, stage)
        best = _best(strategy, opened, outcomes, study)
        cells.append(
            {
                "cell": cell,
                "setting": setting,
                "method": method.shown,
                "epsilon": epsilon,
                "strategy": strategy.name,
                "name": cell if strategy == study.strategies[0] else f"{cell} ({strategy.name})",
                "ended": ended,
                "stages": {stage: {"done": done[stage], "total": counts[stage]} for stage in opened},
                "expected": expected,
                f"best_validation_{study.objective}": best.score if best else None,
                "best_hyperparameters": _tuned(ledger, best.contender, spaces[method.shown]) if best else None,
            }
        )
    order = [method.shown for method in study.methods]
    cells.sort(key=lambda cell: (cell["setting"], cell["epsilon"], order.index(cell["method"])))
    not_begun = _cells_in(study) * len(strategies) - len(cells)
    states = Counter(outcomes[key][0] for key in known if key in outcomes)
    sessions = ledger.sessions()
    return {
        "study": study.name,
        "objective": study.objective,
        "finished": not not_begun and all(cell["ended"] for cell in cells),
        "running": running,
        "cells_ended": sum(cell["ended"] for cell in cells),
        "cells_total": _cells_in(study) * len(strategies),
        "trials": dict(sorted(states.items())),
        "trials_ended": len(known & outcomes.keys()),
        "trials_expected": len(known) + more if not not_begun else None,
        "confirm": {
            "done": sum(cell["stages"].get("confirm", {"done": 0})["done"] for cell in cells),
            "total": sum(cell["expected"].get("confirm", 0) for cell in cells),
        },
        "time": _time(sessions, rounds_left, running is not None),
        "computed_on": _computed_on(sessions),
        "worker_logs": sessions[-1].surroundings.get("logs") if sessions else None,
        "cells": cells,
        "failed": reasons,
        "retries": [{"trials": count, "first": key, "reason": reason} for count, key, reason in failures],
    }


def _cells_in(study: Study) -> int:
    return len(study.data) * len(study.partitions) * len(study.methods) * len(study.epsilons)


def _named(cell: str, study: Study) -> tuple[str, MethodSettings, float] | None:
    """A cell's setting, method and budget, from its name."""
    endings = {
        f" / {method.shown} / eps {epsilon:g}": (method, epsilon)
        for method in study.methods
        for epsilon in study.epsilons
    }
    fitting = [ending for ending in endings if cell.endswith(ending)]
    if not fitting:
        return None
    ending = max(fitting, key=len)
    return cell.removesuffix(ending), *endings[ending]


def _best(
    strategy: SearchVariant, opened: dict[str, list[str]], outcomes: dict[str, Outcome], study: Study
) -> Choice | None:
    """The configuration that leads; of a private search nobody is told."""
    if strategy.search == "private":
        return None

    def of(*stages: str) -> list[Contender]:
        found = (contenders_of(opened.get(stage, []), len(study.seeds_of(strategy, stage))) for stage in stages)
        return list(dict.fromkeys(contender for members in found for contender in members))

    begun = [stage for stage in opened if any(c.ended(outcomes) for c in of(stage))]
    choice = leader(of("contest"), of(*strategy.compared(begun)), outcomes, study.judged_by)
    return None if choice is None or choice.lost else choice


def _tuned(ledger: Ledger, best: Contender, space: SearchSpace) -> dict[str, HyperValue]:
    """What the search varies; the rest is in best.yaml."""
    trial = ledger.rows([best.key])[best.key].trial
    values = {**trial.hyperparameters, **space.run_settings(clip=trial.privacy.clip, rounds=trial.rounds)}
    return {name: value for name, value in values.items() if name in {*space.coarse, *space.fine}}


def _has_ended(
    strategy: SearchVariant, opened: dict[str, list[str]], outcomes: dict[str, Outcome], expected: dict[str, int]
) -> bool:
    """Whether nothing more will be opened: confirmed, or without anything to confirm."""
    if any(key not in outcomes for keys in opened.values() for key in keys):
        return False
    if "confirm" in opened:
        return True
    deciding = ("contest",) if "contest" in opened else strategy.compared(opened)
    keys = [key for stage in deciding for key in opened.get(stage, [])]
    if not keys or any(outcomes[key][0] == "done" for key in keys):
        return False
    return strategy.search in ("grid", "halving") or "contest" in opened or len(keys) >= expected[strategy.search]


def _computed_on(sessions: list[Session]) -> dict[str, int]:
    """How many trials every kind of device has computed: kinds differ in the last bits."""
    found: Counter[str] = Counter()
    for session in sessions:
        if around := session.surroundings:
            device, kernel, machine = (around.get(name, "?") for name in ("device", "kernel", "machine"))
            found[f"{device}, {kernel} kernel, {machine}"] += session.computed
    return {where: count for where, count in found.items() if count}


# ---- how long it took, and will


def _time(sessions: list[Session], rounds_left: int, running: bool) -> dict[str, float | None]:
    """Seconds that drivers have worked, the rate of late, and what is left at that rate; None where the ledger does not
    know."""
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
    """Over the last batches. The first one's time includes Ray's start, so it counts only where it is alone."""
    recent = session.batches[-RECENT_BATCHES:]
    if not recent:
        return None
    began, counted = (recent[0][0], recent[1:]) if len(recent) > 1 else (session.began, recent)
    seconds = session.last - began
    return sum(rounds for _, _, rounds in counted) / seconds if seconds > 0 else None


def holder(folder: Path) -> str | None:
    """Who runs the study right now, if anyone."""
    try:
        descriptor = os.open(folder / "ledger.lock", os.O_RDONLY)
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
    objective = OBJECTIVES[found["objective"]]
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
    shown = [stage for stage in STAGES if any(stage in cell["stages"] for cell in found["cells"])]
    width = max((len(cell["name"]) for cell in found["cells"]), default=4)
    lines.append(
        f"{'cell':<{width}}  " + "".join(f"{stage:>10}" for stage in shown) + f"  best validation {objective.short}"
    )
    for cell in found["cells"]:
        counts = [cell["stages"].get(stage) for stage in shown]
        best = cell[f"best_validation_{objective.metric}"]
        lines.append(
            f"{cell['name']:<{width}}  "
            + "".join(f"{_count(c):>10}" for c in counts)
            + (f"  {objective.shown(best)}" if best is not None else "  ·")
        )
    if found["computed_on"]:
        counted = (f"{count} trials on {where}" for where, count in found["computed_on"].items())
        lines.append(f"computed: {'; '.join(counted)}")
    if found["worker_logs"] and (found["running"] or found["retries"] or found["failed"]):
        lines.append(f"the workers' logs, on every node: {found['worker_logs']}")
    lines += [f"retried: a pack of {retry['trials']} trials: {retry['reason']}" for retry in found["retries"]]
    lines += [f"failed: trial {key}: {reason}" for key, reason in found["failed"].items()]
    return "\n".join(lines)


def _time_text(found: dict[str, Any]) -> list[str]:
    spent = found["time"]
    if spent["elapsed_s"] is None:
        return []
    parts = [f"time: {duration(spent['elapsed_s'])}"]
    if spent["trial_rounds_per_second"] is not None:
        parts.append(f"{spent['trial_rounds_per_second']:.4g} trial-rounds/s")
    if not found["finished"] and spent["left_s"] is not None:
        parts.append(f"about {duration(spent['left_s'])} left{'' if found['running'] else ' once it goes on'}")
    return [", ".join(parts)]


def best_texts(found: dict[str, Any]) -> list[str]:
    """For every setting and budget the method that leads on the validation rows, and with what."""
    objective = OBJECTIVES[found["objective"]]
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
        shown = f"{objective.shown(cell[name])}{objective.unit.strip(' ()')}"
        texts.append(
            f"{setting}, eps {epsilon:g}: {cell['method']}, validation {shown}{f' ({chosen})' if chosen else ''}"
        )
    return texts


def duration(seconds: float) -> str:
    """For people."""
    minutes, hours = seconds / 60, seconds / 3600
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 90 else f"{hours:.1f} h"


def _count(count: dict[str, int] | None) -> str:
    return f"{count['done']}/{count['total']}" if count else "·"

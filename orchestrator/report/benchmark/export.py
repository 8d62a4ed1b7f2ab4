"""A ledger as one Parquet table, one row per trial and evaluated round, with a data card."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from orchestrator.report.benchmark import card
from orchestrator.report.benchmark.columns import COLUMNS, FILE, HYPER
from orchestrator.report.tables.common import data_fingerprints
from orchestrator.report.tables.render import write_text
from orchestrator.results.ledger import Ledger, Row
from orchestrator.results.trial_columns import CHUNK
from orchestrator.results.winners import Results
from trainables.errors import UserError
from trainables.files import replacing


@dataclass(frozen=True)
class _Member:
    """The cell and stages of a trial."""

    setting: str
    label: str
    stages: tuple[str, ...]


def write_export(folder: Path, to: Path) -> list[Path]:
    """Write trials.parquet and its data card."""
    with Ledger.read(folder) as ledger:
        results = Results.read(ledger)
        if results.study.private:
            raise UserError(f"results folder {folder} holds a private search, whose trials must not be exported")
        members = _members(ledger, results)
        if not members:
            raise UserError(f"results folder {folder} has no trial to export")
        hypers = _hyperparameters(ledger, members)
        schema = pyarrow.schema(
            [(name, getattr(pyarrow, "float64" if kind == "double" else kind)()) for name, (kind, _) in COLUMNS.items()]
            + [(f"{HYPER}{name}", pyarrow.float64() if number else pyarrow.string()) for name, number in hypers.items()]
        )
        to.mkdir(parents=True, exist_ok=True)
        counts: Counter[str] = Counter()
        with (
            replacing(to / FILE) as file,
            pyarrow.parquet.ParquetWriter(file, schema, compression="zstd") as writer,
        ):
            for chunk in _chunks(list(members)):
                rows = ledger.rows(chunk)
                records = [r for row in rows.values() for r in _records(results, row, members[row.key], hypers)]
                writer.write_table(pyarrow.Table.from_pylist(records, schema=schema))
                counts.update({"rows": len(records), "trials": len(rows)})
                counts.update(f"state:{row.state}" for row in rows.values())
        text = card.page(results, data_fingerprints(ledger, results.study), counts, hypers)
        written = write_text(to / "README.md", text)
    return [to / FILE, written]


def _members(ledger: Ledger, results: Results) -> dict[str, _Member]:
    """Every trial that has ended, in the order of cells and stages; a trial of several cells belongs to the first."""
    outcomes = ledger.outcomes()
    found: dict[str, _Member] = {}
    for cell in results.cells:
        for stage, keys in cell.stages.items():
            for key in keys:
                if key in outcomes:
                    known = found.get(key, _Member(cell.setting, cell.method.shown, ()))
                    found[key] = _Member(known.setting, known.label, tuple(dict.fromkeys((*known.stages, stage))))
    return found


def _chunks(keys: list[str]) -> Iterator[list[str]]:
    return (keys[start : start + CHUNK] for start in range(0, len(keys), CHUNK))


def _hyperparameters(ledger: Ledger, members: Iterable[str]) -> dict[str, bool]:
    """For each hyperparameter, whether all its values are numbers."""
    found: dict[str, bool] = {}
    for chunk in _chunks(list(members)):
        for row in ledger.rows(chunk).values():
            for name, value in json.loads(row.spec)["hyperparameters"].items():
                number = isinstance(value, int | float) and not isinstance(value, bool)
                found[name] = found.get(name, True) and number
    return dict(sorted(found.items()))


def _records(results: Results, row: Row, member: _Member, hypers: dict[str, bool]) -> list[dict[str, Any]]:
    trial = row.trial
    chosen = trial.hyperparameters
    same = {
        **{"study": results.study.name, "setting": member.setting, "dataset": member.setting.split(" / ")[0]},
        **{"partition": member.setting.split(" / ")[-1], "clients": trial.problem.partition.clients},
        **{"model": trial.problem.model, "method": trial.method, "label": member.label},
        **trial.privacy.model_dump(include={"epsilon", "delta", "clip", "release", "adjacency", "level"}),
        "precision": trial.precision,
        **{"epsilon_local": row.epsilon_local, "epsilon_secure": row.epsilon_secure},
        **{"configuration": configuration(chosen), "seed": trial.seed, "stages": "+".join(member.stages)},
        **{"split": trial.problem.evaluate_on, "state": row.state, "key": row.key},
        **{"rounds": row.rounds, "of_rounds": trial.rounds},
        "seconds_per_round": row.seconds / row.rounds if row.rounds else math.nan,
        **{f"{HYPER}{name}": _cell(chosen.get(name), number) for name, number in hypers.items()},
    }
    rounds = sorted({t for by_round in row.metrics.values() for t in by_round}) or [row.rounds]
    metrics = {name: row.metrics.get(name, {}) for name in ("accuracy", "loss")}
    return [{**same, "round": t, **{name: values.get(t) for name, values in metrics.items()}} for t in rounds]


def configuration(values: dict[str, Any]) -> str:
    return json.dumps(values, sort_keys=True)


def _cell(value: Any, number: bool) -> float | str | None:
    return None if value is None else float(value) if number else str(value)

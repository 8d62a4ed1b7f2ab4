"""The result tables, built from the ledger alone: the same ledger gives the same files, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from orchestrator.report.tables import best, index, render
from orchestrator.report.tables.accuracy import accuracy, rounds_to_95
from orchestrator.report.tables.clients import clients
from orchestrator.report.tables.differences import differences
from orchestrator.report.tables.frontier import frontier
from orchestrator.report.tables.mcnemar import mcnemar
from orchestrator.report.tables.partitions import partitions
from orchestrator.report.tables.privacy import privacy, trade_offs
from orchestrator.report.tables.publication import with_price
from orchestrator.report.tables.selection_table import selection
from orchestrator.report.tables.timing import seconds_per_round
from orchestrator.report.tables.trials_file import TrialsFile
from orchestrator.report.tables.tuning import hyperparameters, search_strategies
from orchestrator.results import frames
from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import Results
from trainables.files import subfolder

PER_SETTING: dict[str, Callable[[Results, str], render.Table | None]] = {
    "accuracy": accuracy,
    "hyperparameters": hyperparameters,
    "selection": selection,
    "frontier": frontier,
    "search-strategies": search_strategies,
    "rounds-to-95": rounds_to_95,
    "differences": differences,
    "mcnemar": mcnemar,
    "partitions": partitions,
    "clients": clients,
    "privacy": privacy,
}
"""By file name, except that the first file is named after the objective. A builder returns None if its table does not
apply to the study."""


def write_tables(ledger: Ledger, folder: Path) -> tuple[list[Path], Results]:
    """Write tables/, timing/ and best.yaml into a results folder; return the paths of all files written, and the
    results that they show. Except in a private search, the rows behind them must match their checksums."""
    trials = TrialsFile(folder)
    results = Results.read(ledger, collector=trials, verified=True)
    tables, endings = subfolder(folder, "tables"), render.endings(results.settings)
    written: list[Path] = []
    entries: list[index.Entry] = []
    stems = [render.slug(results.study.objective), *PER_SETTING]
    for setting in results.settings:
        built = {kind: build(results, setting) for kind, build in PER_SETTING.items()}
        built = {render.slug(results.study.objective): built.pop("accuracy"), **built}
        for metric in results.study.metrics:
            view, stem = results.by_metric(metric), render.slug(metric)
            built |= {stem: accuracy(view, setting), f"differences-{stem}": differences(view, setting)}
        stems = list(dict.fromkeys([*stems, *built]))
        for stem, table in built.items():
            if table is not None:
                table = with_price(results, table, setting)
                entries.append(index.Entry(setting, stem + endings[setting], table))
                written += render.write_table(table, tables, stem + endings[setting])
    written.append(trials.write(tables / "trials.csv", ledger, results))
    for name, frame in (
        ("seeds", frames.rounds(ledger, results, "confirm")),
        ("trade-off", trade_offs(results)),
    ):
        repeatable = frame.drop(columns="seconds", errors="ignore")  # not reproducible: in timing/ only
        written.append(render.write_text(tables / f"{name}.csv", render.frame_to_csv(repeatable)))
    written.append(render.write_text(tables / "README.md", index.page(results, entries)))
    timing = with_price(results, seconds_per_round(results))
    written += render.write_table(timing, subfolder(folder, "timing"), "seconds-per-round")
    written.append(render.write_text(folder / "best.yaml", best.page(results)))
    _remove_outdated(tables, stems, written)
    return written, results


def _remove_outdated(tables: Path, stems: Iterable[str], written: list[Path]) -> None:
    """Remove tables without a setting in their file names that an earlier call wrote and this one did not: for example,
    the study had one setting then and has several now."""
    for stem in stems:
        for ending in ("md", "csv", "tex"):
            path = tables / f"{stem}.{ending}"
            if path not in written:
                path.unlink(missing_ok=True)

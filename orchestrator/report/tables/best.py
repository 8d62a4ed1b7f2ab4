"""best.yaml: every winner, with everything needed to train it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from orchestrator.report.tables.publication import sentences
from orchestrator.report.tables.render import one_line
from orchestrator.results.ledger import Ledger, Row
from orchestrator.results.searches import SearchedCell, search_records, study_of
from orchestrator.results.winners import Results, confirm_runs
from orchestrator.search.selection import Choice
from orchestrator.search.variant import SECRET
from trainables import plugins
from trainables.data import partition
from trainables.data.partition import PartitionSpec
from trainables.privacy.publication import ANALYST_ONLY
from trainables.urls import shown_url

HEADER = """\
# The chosen configuration of every cell. To reproduce a confirm run exactly:
#   fedsweep train --from best.yaml --cell "NAME" --seed SEED
"""
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # in C, where PyYAML has it
PRIVATE_HEADER = """\
# The chosen configuration of every cell. To train one with fresh noise, which spends its epsilon once more:
#   fedsweep train --from best.yaml --cell "NAME" --secret-noise
"""


def page(results: Results) -> str:
    chosen = ((cell, cell.confirm, cell.search.choice) for cell in results.cells)
    cells = {cell.name: _entry(cell, runs, choice) for cell, runs, choice in chosen if runs}
    return text(cells, sentences(results), PRIVATE_HEADER if results.study.private else HEADER)


def text(cells: Mapping[str, Mapping[str, Any]], remarks: Iterable[str] = (ANALYST_ONLY,), header: str = HEADER) -> str:
    header = header.rstrip("\n") + f"{plugins.import_options()}\n"
    header += "".join(f"# {one_line(sentence)}\n" for sentence in remarks)
    return header + content(cells)


def content(cells: Mapping[str, Mapping[str, Any]]) -> str:
    """best.yaml without its header."""
    return yaml.dump({"cells": cells}, Dumper=DUMPER, sort_keys=False, allow_unicode=True, width=120)


def chosen_cells(ledger: Ledger) -> dict[str, dict[str, Any]]:
    """The chosen configurations by cell name, as in best.yaml."""
    study = study_of(ledger).as_shown
    confirmed = ((record, confirm_runs(record)) for record in search_records(ledger, study))
    return {record.name: _entry(record, runs, record.winner) for record, runs in confirmed if runs}


def _entry(cell: SearchedCell, runs: Mapping[int, Row], choice: Choice | None) -> dict[str, Any]:
    """The cell in best.yaml. Its values come from a confirm trial, not from the study, because the scores belong to
    that trial. `runs`: the confirm runs by seed."""
    trial = next(iter(runs.values())).trial
    problem = trial.problem
    return {
        "method": trial.method,
        "hyperparameters": dict(trial.hyperparameters),
        **dict(trial.privacy),
        "preprocess": trial.preprocess.model_dump(),
        "aggregate": trial.aggregate,
        **({} if trial.precision == "float32" else {"precision": trial.precision}),
        "rounds": trial.rounds,
        "evaluate_every": trial.evaluate_every,
        "data": shown_url(cell.data.source),
        "setting": cell.setting,
        **({"records": cell.data.records} if cell.data.records else {}),
        **({"fingerprint": problem.data.fingerprint} if problem.data.fingerprint else {}),
        **({} if problem.data.stratified else {"stratified": False}),
        "validation_fraction": problem.data.validation_fraction,
        "validation_seed": problem.data.validation_seed,
        **({} if problem.data.validation_by == "row" else {"validation_by": problem.data.validation_by}),
        "partition": _partition_text(problem.partition),
        "clients": problem.partition.clients,
        "partition_seed": _partition_seed(runs),
        "model": problem.model,
        **({"code": trial.code} if trial.code else {}),
        "train_on": problem.train_on,
        "evaluate_on": problem.evaluate_on,
        **({"metrics": list(trial.metrics)} if trial.metrics else {}),
        **_scores(cell.objective.metric, runs, choice),
    }


def _scores(metric: str, runs: Mapping[int, Row], choice: Choice | None) -> dict[str, Any]:
    """Validation and test scores; secret seeds are left out."""
    scores = {seed: row.score(metric) for seed, row in runs.items()}
    return {
        "seeds": [seed for seed in scores if seed != SECRET],
        f"validation_{metric}": choice.score if choice else None,
        f"test_{metric}": scores.get(SECRET, scores),
    }


def _partition_seed(runs: Mapping[int, Row]) -> int | dict[int, int]:
    """The partition seed of all runs; if it differs, a dict by the seed of the run."""
    seeds = {seed: row.trial.problem.partition.seed for seed, row in runs.items()}
    return seeds if len(set(seeds.values())) > 1 else next(iter(seeds.values()))


def _partition_text(spec: PartitionSpec) -> str:
    """A text that `partition.parse` turns into the same spec. The usual text may round the parameter; this one then has
    all its digits."""
    text = partition.to_text(spec)
    exact = partition.parse(text, clients=spec.clients, seed=spec.seed) == spec
    return text if exact else f"{spec.kind}:{spec.parameter!r}"

"""best.yaml: every winner, with everything needed to train it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from orchestrator.report.tables.publication import sentences
from orchestrator.report.tables.render import one_line
from orchestrator.results.locations import read_text
from orchestrator.results.winners import CellResult, Results
from orchestrator.search.variant import SECRET
from orchestrator.study.reading import read_yaml
from trainables import plugins
from trainables.data import partition
from trainables.data.partition import PartitionSpec
from trainables.errors import UserError
from trainables.urls import shown

HEADER = """\
# The chosen configuration of every cell. To reproduce a confirm run exactly:
#   fedsweep train --from best.yaml --cell "NAME" --seed SEED
"""
PRIVATE_HEADER = """\
# The chosen configuration of every cell. To train one with fresh noise, which spends its epsilon once more:
#   fedsweep train --from best.yaml --cell "NAME" --secret-noise
"""


def page(results: Results) -> str:
    cells = {cell.name: _entry(cell) for cell in results.cells if cell.confirm}
    header = (PRIVATE_HEADER if results.study.private else HEADER).rstrip("\n") + f"{plugins.import_options()}\n"
    header += "".join(f"# {one_line(sentence)}\n" for sentence in sentences(results))
    return header + yaml.safe_dump({"cells": cells}, sort_keys=False, allow_unicode=True, width=120)


def read_best(file: Path | str) -> dict[str, dict[str, Any]]:
    """The chosen configurations by cell name."""
    try:
        content, _ = read_yaml(read_text(file), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}".replace("\n", " ")) from None
    if not isinstance(content, dict) or not isinstance(content.get("cells"), dict):
        raise UserError(f"{file} is not a best.yaml: it has no mapping of cells")
    return content["cells"]


def _entry(cell: CellResult) -> dict[str, Any]:
    """Taken from a confirm trial, not from the study, because the scores belong to that trial."""
    trial = next(iter(cell.confirm.values())).trial
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
        "data": shown(cell.data.source),
        "setting": cell.setting,
        **({"records": cell.data.records} if cell.data.records else {}),
        **({"fingerprint": problem.data.fingerprint} if problem.data.fingerprint else {}),
        **({} if problem.data.stratified else {"stratified": False}),
        "validation_fraction": problem.data.validation_fraction,
        "validation_seed": problem.data.validation_seed,
        **({} if problem.data.validation_by == "row" else {"validation_by": problem.data.validation_by}),
        "partition": _partition_text(problem.partition),
        "clients": problem.partition.clients,
        "partition_seed": _partition_seed(cell),
        "model": problem.model,
        "train_on": problem.train_on,
        "evaluate_on": problem.evaluate_on,
        **_scores(cell),
    }


def _scores(cell: CellResult) -> dict[str, Any]:
    """Validation and test scores; secret seeds are left out."""
    metric, choice = cell.objective.metric, cell.search.choice
    scores = {seed: row.score(metric) for seed, row in cell.confirm.items()}
    return {
        "seeds": [seed for seed in scores if seed != SECRET],
        f"validation_{metric}": choice.score if choice else None,
        f"test_{metric}": scores.get(SECRET, scores),
    }


def _partition_seed(cell: CellResult) -> int | dict[int, int]:
    """One for all runs, or by the seed of the run."""
    seeds = {seed: row.trial.problem.partition.seed for seed, row in cell.confirm.items()}
    return seeds if len(set(seeds.values())) > 1 else next(iter(seeds.values()))


def _partition_text(spec: PartitionSpec) -> str:
    """Parsed by `partition.parse` to the same spec: with all digits of the parameter if the usual text has fewer."""
    text = partition.to_text(spec)
    exact = partition.parse(text, clients=spec.clients, seed=spec.seed) == spec
    return text if exact else f"{spec.kind}:{spec.parameter!r}"

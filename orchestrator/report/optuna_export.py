"""Export to Optuna, for optuna-dashboard. An Optuna trial is a configuration with its mean over seeds, so that
`best_trial` is no single lucky seed."""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from orchestrator.report.html.configurations import Configuration, grouped
from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import CellResult, Results
from trainables.errors import UserError
from trainables.files import open_plain

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

APPLICATION = 0x0FED5EE9
"""In the header of an exported SQLite file, to recognise it."""


def write_optuna(ledger: Ledger, results: Results, folder: Path) -> list[str]:
    """Up to two Optuna studies per cell: its search, and its contest on other seeds."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "optuna.db"
    _remove_earlier_export(file)
    # not as a URL: a folder's name may hold %2F, ? and braces, which would lead to another file
    storage = optuna.storages.RDBStorage("sqlite://", engine_kwargs={"creator": lambda: _connected(file.absolute())})
    directions = optuna.study.StudyDirection
    direction = directions.MINIMIZE if results.study.objective_spec.lower_is_better else directions.MAXIMIZE
    for cell in results.cells:
        search = [stage for stage in cell.stages if stage not in ("contest", "confirm")]
        contest = [stage for stage in cell.stages if stage == "contest"]
        for name, stages in ((_name(cell), search), (f"{_name(cell)} / contest", contest)):
            if not (configurations := grouped(ledger, cell, stages)):
                continue
            study = optuna.create_study(study_name=name, storage=storage, direction=direction)
            found = distributions([c.values for c in configurations], cell.method.space().scale)
            for configuration in configurations:
                study.add_trial(_trial(ledger, cell, configuration, found))
    storage.engine.dispose()
    return [str(file)]


def _connected(file: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(str(file))
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    return connection


def _remove_earlier_export(file: Path) -> None:
    """Remove the files of an earlier export, and links in their place; raises UserError for other files."""
    present = [path for ending in ("", "-journal", "-wal", "-shm") if os.path.lexists(path := Path(f"{file}{ending}"))]
    foreign = [path for path in present if not path.is_symlink()]
    if foreign and not _is_export(file):
        raise UserError(f"{foreign[0]} is not an earlier export of fedsweep; choose another folder with --out")
    for path in present:
        path.unlink()


def _is_export(file: Path) -> bool:
    try:
        with open_plain(file) as content:
            header = content.read(72)
    except (OSError, UserError):
        return False
    return header[68:] == APPLICATION.to_bytes(4, "big")


def _name(cell: CellResult) -> str:
    name = f"{cell.setting} / {cell.method.shown} / eps {cell.epsilon:g}"
    return name if cell.variant == cell.study.variants[0] else f"{name} ({cell.variant.name})"


def _trial(ledger: Ledger, cell: CellResult, configuration: Configuration, found: Mapping[str, Any]) -> FrozenTrial:
    """A configuration with all its seeds. Its state is FAIL if one seed diverged or failed, because a mean over the
    others would be too good, and PRUNED if the strategy stopped it early."""
    from optuna.trial import TrialState, create_trial

    metric, choice = cell.objective.metric, cell.search.choice
    rows = list(ledger.rows(configuration.keys).values())
    curves = [{t: v for t, v in row.metrics.get(metric, {}).items() if math.isfinite(v)} for row in rows]
    rounds = sorted(set(curves[0]).intersection(*curves[1:]))
    state = TrialState.COMPLETE if configuration.mean is not None else TrialState.FAIL
    if state == TrialState.COMPLETE and _stopped_early(cell, configuration.stages):
        state = TrialState.PRUNED
    winners: Container[str] = choice.candidate.keys if choice else ()
    return create_trial(
        state=state,
        value=configuration.mean if state == TrialState.COMPLETE else None,
        params=configuration.values,
        distributions={name: found[name] for name in configuration.values},
        user_attrs={
            "stages": configuration.stages,
            "seeds": configuration.seeds,
            "scores": configuration.scores,
            "keys": configuration.keys,
            "winner": any(key in winners for key in configuration.keys),
            "epsilon_claimed": _largest([row.epsilon_claimed for row in rows]),
            "epsilon_local": _largest([row.epsilon_local for row in rows]),
            "epsilon_secure": _largest([row.epsilon_secure for row in rows]),
        },
        intermediate_values={t: fmean(curve[t] for curve in curves) for t in rounds},
    )


def _stopped_early(cell: CellResult, stages: Sequence[str]) -> bool:
    """Whether the strategy stopped the configuration before the last round."""
    rounds = cell.study.last_round
    return all(cell.variant.last_round(stage, rounds) < rounds for stage in stages)


def _largest(epsilons: Sequence[float]) -> float | None:
    """None for infinity, which JSON does not have."""
    return largest if math.isfinite(largest := max(epsilons)) else None


def distributions(configurations: list[dict[str, Any]], scales: Mapping[str, str]) -> dict[str, Any]:
    """The range of tried values of every hyperparameter, which Optuna's plots show."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    values: dict[str, dict[Any, None]] = {}
    for configuration in configurations:
        for name, value in configuration.items():
            values.setdefault(name, {})[value] = None
    distributions: dict[str, Any] = {}
    for name, tried in values.items():
        if any(value is None or isinstance(value, bool | str) for value in tried):
            distributions[name] = CategoricalDistribution(tuple(tried))
            continue
        low, high = min(tried), max(tried)
        range_of = IntDistribution if all(isinstance(value, int) for value in tried) else FloatDistribution
        distributions[name] = range_of(low, high, log=scales.get(name) == "log" and low > 0)
    return distributions

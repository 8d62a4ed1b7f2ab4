"""Forgets trials, so that they run again: those that a node has computed, with longer trials that continue them, or
those whose rows are damaged.

Later stages were opened because of the results of these trials. Such stages are removed, and the search, a pure
function of the results, opens stages again: the same ones if the results are the same. Trials of a removed stage keep
their results, which are used if the search proposes them again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from orchestrator.results.ledger import Ledger, StageKey
from orchestrator.results.locations import results_location
from orchestrator.results.searches import study_of
from orchestrator.search.variant import SearchVariant
from orchestrator.study.study import Study
from trainables.errors import UserError
from trainables.federation.trial_spec import TrialSpec


class Forgotten(NamedTuple):
    trials: int
    stages: int
    """Stages that the search decides again."""


def forget_node(results: Path | str, node: str) -> Forgotten:
    location = results_location(results)
    with location.open_for_reading() as folder, Ledger.read(folder) as ledger:
        _check(ledger, results, node)
    location = results_location(results)
    with location.open_for_writing(), Ledger.write(location.folder) as ledger:
        study = _check(ledger, results, node)
        keys = {key for key, origin in ledger.origins().items() if node in origin.nodes}
        location.checkpoints.remove_all()  # the node may have computed a part of them
        return _forget(ledger, study, keys | _continuing(ledger, keys))


def _continuing(ledger: Ledger, keys: Collection[str]) -> set[str]:
    """The longer trials that may have continued lanes of these trials."""
    trials = {key: TrialSpec.model_validate_json(row.spec) for key, row in ledger.rows(keys, whole=False).items()}
    reached: dict[str, int] = {}
    for trial in trials.values():
        if trial.stop_after is not None:
            reached[trial.full_key] = min(trial.stop_after, reached.get(trial.full_key, trial.stop_after))
    if not reached:
        return set()
    rows = ledger.rows(ledger.outcomes(), whole=False)
    others = (trials.get(key) or TrialSpec.model_validate_json(row.spec) for key, row in rows.items())
    return {trial.key for trial in others if trial.last_round > reached.get(trial.full_key, trial.last_round)}


def damaged_trials(results: Path | str) -> list[str]:
    """The keys of the trials whose rows do not match their checksums."""
    with results_location(results).open_for_reading() as folder, Ledger.read(folder) as ledger:
        return ledger.damaged_rows()


def counts_are_right(results: Path | str) -> bool:
    """Whether the counts of trials by stage and state, which `status` shows, are right."""
    with results_location(results).open_for_reading() as folder, Ledger.read(folder) as ledger:
        return ledger.counts_are_right()


def forget_damaged(results: Path | str) -> Forgotten:
    location = results_location(results)
    with location.open_for_writing(), Ledger.write(location.folder) as ledger:
        study, keys = study_of(ledger, f"results folder {results}"), ledger.damaged_rows()
        ledger.correct_counts()
        return _forget(ledger, study, keys)


def _forget(ledger: Ledger, study: Study, keys: Collection[str]) -> Forgotten:
    stages = dependent_stages(ledger.stages(), keys, study.variants, warm_start=study.search.warm_start)
    ledger.forget(keys, stages)
    return Forgotten(len(keys), len(stages))


def _check(ledger: Ledger, results: Path | str, node: str) -> Study:
    """The study; raises if the node has computed no trial."""
    study, known = study_of(ledger, f"results folder {results}"), ledger.trials_by_node()
    if node not in known:
        raise UserError(f"node = {node!r} has computed no trial of {results}; nodes: {', '.join(known) or 'none'}")
    return study


def dependent_stages(
    stages: Mapping[StageKey, Sequence[str]],
    keys: Collection[str],
    variants: Sequence[SearchVariant],
    *,
    warm_start: bool,
) -> dict[StageKey, int]:
    """The stages that were opened because of these trials, with the first position that depends on them."""
    by_name = {variant.name: variant for variant in variants}
    dependent: dict[StageKey, int] = {}
    searches_changed: set[str] = set()
    """Variants in which the search of some cell changed."""
    for (cell, name, stage), members in stages.items():
        first = next((position for position, key in enumerate(members) if key in keys), None)
        variant = by_name.get(name)
        if first is None or variant is None or stage not in variant.stages:
            continue
        if variant.strategy.extends_stages and stage in variant.strategy.stages and first + 1 < len(members):
            dependent[cell, name, stage] = min(first + 1, dependent.get((cell, name, stage), first + 1))
        dependent |= dict.fromkeys(((cell, name, later) for later in _after(variant, stage)), 0)
        if stage in variant.strategy.stages:
            searches_changed.add(name)
            if variant.strategy.searches_budgets_together:
                for key, position in _of_other_budgets(stages, (cell, name, stage), first, variant).items():
                    dependent[key] = min(position, dependent.get(key, position))
    for cell, name, stage in stages:
        if warm_start and name in searches_changed and stage in ("contest", "confirm"):
            dependent[cell, name, stage] = 0  # the best configurations of other budgets join the contest
    return {key: position for key, position in dependent.items() if key in stages}


def _of_other_budgets(
    stages: Mapping[StageKey, Sequence[str]], changed: StageKey, first: int, variant: SearchVariant
) -> dict[StageKey, int]:
    """The stages in the searches of the other budgets that depend on a changed trial, with the first such position.
    Batches of all budgets have the same sizes, so positions correspond."""
    cell, name, stage = changed
    dependent: dict[StageKey, int] = {}
    for other, other_name, _ in stages:
        if other_name == name and other != cell and other._replace(epsilon=cell.epsilon) == cell:
            dependent[other, name, stage] = first + 1
            dependent |= dict.fromkeys(((other, name, later) for later in _after(variant, stage)), 0)
    return dependent


def _after(variant: SearchVariant, stage: str) -> tuple[str, ...]:
    return variant.stages[variant.stages.index(stage) + 1 :]

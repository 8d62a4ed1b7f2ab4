"""How many trials a cell's search will have, estimated before all its stages have started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from orchestrator.search.task import SearchTask
from orchestrator.search.variant import SearchVariant


def expected_trials(
    variant: SearchVariant, task: SearchTask, finalists: int, opened: Mapping[str, int]
) -> dict[str, int]:
    """The number of trials of each stage: the number in `opened` if the stage has started and cannot grow, else the
    expected number. `finalists`: the most configurations in a contest."""
    configurations = dict(variant.strategy.expected(task))
    if variant.has_contest:
        competing = variant.strategy.competing(configurations)
        configurations["contest"] = min(finalists, sum(configurations[stage] for stage in competing))
    configurations["confirm"] = 1
    counts = {stage: count * len(variant.seeds(stage)) for stage, count in configurations.items()}
    if variant.strategy.extends_stages:  # a stage that has started may grow
        opened = {stage: count for stage, count in opened.items() if stage not in variant.strategy.stages}
    counts |= opened
    return {stage: counts[stage] for stage in variant.stages if stage in counts}


def trials_to_come(
    variant: SearchVariant,
    task: SearchTask,
    finalists: int,
    opened: Mapping[str, int],
    variants: Sequence[SearchVariant],
) -> dict[str, int]:
    """The number of trials still to be added, by stage. In stages that the strategy's `already_run` names, trials that
    an earlier stage runs are not counted. If one of `variants` is the contest variant of the same strategy, the stages
    in which it runs the same trials are not counted."""
    expected = expected_trials(variant, task, finalists, opened)
    to_come = {stage: count - opened.get(stage, 0) for stage, count in expected.items()}
    contest = replace(variant, select="contest")
    shared = variant.strategy.fixed_configurations(task) if variant != contest and contest in variants else ()
    for stage, configurations in variant.strategy.already_run(task).items():
        if to_come.get(stage):
            to_come[stage] -= configurations * len(variant.seeds(stage))
    return {stage: count for stage, count in to_come.items() if count and stage not in shared}

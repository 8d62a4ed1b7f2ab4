"""Chooses the winner of a cell's search from the results so far, for the sweep, tables, status, report and `best`."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.search import selection
from orchestrator.search.candidates import Candidate
from orchestrator.search.history import History
from orchestrator.search.selection import Choice
from orchestrator.search.variant import SearchVariant
from search_spaces import Configuration, unique


def competing_stages(variant: SearchVariant, history: History) -> tuple[str, ...]:
    """The search stages whose candidates can win, among the stages in which a candidate has ended."""
    return variant.strategy.competing([stage for stage in history.stages if history.ended(stage)])


def winner(variant: SearchVariant, history: History) -> Choice | None:
    """The winner of the contest, or of the search as long as no candidate of a contest has ended; None if no trial
    finished there. The strategy `private` has its own rule."""
    task = history.task
    if variant.strategy.publishes_only_winner:
        return variant.strategy.choose(task, history)
    if contest := history.ended("contest"):
        steady = variant.strategy.prefers_small_spread
        return selection.win_contest(
            contest, history.outcomes, task.objective, rows=task.validation_rows, prefer_small_spread=steady
        )
    candidates = history.ended(*competing_stages(variant, history))
    return selection.choose(candidates, history.outcomes, task.validation_rows, task.objective)


def winner_of_first_seed(variant: SearchVariant, history: History) -> Choice | None:
    """The winner of the search, without a contest, if only the first trial of every candidate counted."""
    stages, outcomes = competing_stages(variant, history), history.outcomes
    firsts = [c.key for stage in stages for c in history.candidates(stage) if c.key in outcomes]
    alone = [Candidate((key,)) for key in dict.fromkeys(firsts)]
    return selection.choose(alone, outcomes, history.task.validation_rows, history.task.objective)


def best_configurations(variant: SearchVariant, history: History, count: int) -> list[Configuration]:
    """What the strategy's `finalists` returns; if None, the `count` best of all competing stages, best first."""
    chosen = variant.strategy.finalists(history.task, history, count)
    if chosen is not None:
        return chosen
    return unique(map(history.configuration, history.ranked(*competing_stages(variant, history))))[:count]


def finalists(
    variant: SearchVariant, history: History, count: int, guests: Sequence[Configuration] = ()
) -> list[Configuration]:
    """The configurations of the contest, at most `count`: the best of the search, then `guests`, the best of the
    searches at neighbouring budgets. Guests displace the last ones of the search, but never its best one. Without a
    configuration of the search there is no contest."""
    own = best_configurations(variant, history, count)
    if not own:
        return []
    invited = [guest for guest in unique(guests) if guest not in own][: count - 1]
    return [*own[: count - len(invited)], *invited]

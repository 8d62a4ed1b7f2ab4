"""Checks of a strategy that a plug-in defines: of its class when it is loaded, of every proposal when it is made."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from orchestrator.search.strategies.base import Proposal, Strategy
from orchestrator.section import Section
from trainables.errors import UserError


def check_class(strategy: type[Strategy]) -> None:
    """Raise unless the class can be used; the message names its file and line."""
    problem = _problem(strategy)
    if problem:
        place = f"{inspect.getsourcefile(strategy)}:{inspect.getsourcelines(strategy)[1]}"
        raise UserError(f"plug-in {place}: strategy {strategy.__name__} {problem}")


def _problem(strategy: type[Strategy]) -> str:
    for attribute in ("name", "stages"):
        if not hasattr(strategy, attribute):
            return f"has no `{attribute}`"
    name, stages = strategy.name, strategy.stages
    if not isinstance(name, str) or not name or any(character.isspace() for character in name):
        return f"is not usable: `name` = {name!r} is not one word"
    if not isinstance(stages, tuple) or not stages or not all(isinstance(stage, str) and stage for stage in stages):
        return f"is not usable: `stages` = {stages!r} is not a tuple of names"
    if not isinstance(strategy.Settings, type) or not issubclass(strategy.Settings, Section):
        return "is not usable: `Settings` is not a subclass of Section"
    missing = sorted(getattr(strategy, "__abstractmethods__", ()))
    return f"does not define `{missing[0]}`" if missing else ""


def check_proposal(strategy: Strategy, proposal: Proposal | None, opened: dict[str, list[str]]) -> None:
    """Raise if a proposal cannot be run. `opened`: the stages so far."""
    problem = _problem_of(strategy, proposal, opened)
    if problem:
        raise UserError(f"strategy {strategy.name} {problem}")


def _problem_of(strategy: Strategy, proposal: Proposal | None, opened: dict[str, list[str]]) -> str:
    if proposal is None:
        return "" if opened else "proposed no configurations; None is for the end of a search"
    if not isinstance(proposal, Proposal):
        return f"proposed a {type(proposal).__name__} instead of a Proposal or None"
    stage, configurations, seeds = proposal
    if stage not in strategy.stages:
        return f"proposed stage {stage!r}, which its `stages` lack"
    if not len(configurations):
        return f"proposed no configurations for stage {stage!r}; None ends a search"
    for configuration in configurations:
        if not isinstance(configuration, Mapping):
            return f"proposed {configuration!r}, which is not a dictionary of hyperparameters"
    if seeds is not None and not strategy.publishes_only_winner:
        return "proposed seeds; only the study sets seeds, except for a private search"
    if seeds is not None and len(seeds) != len(configurations):
        return f"proposed {len(configurations)} configurations and {len(seeds)} seeds"
    last = next(reversed(opened), "")
    if stage in opened and stage != last:
        return f"adds to stage {stage!r} after stage {last!r} was opened"
    if stage in opened and not strategy.extends_stages:
        return (
            f"proposed stage {stage!r} again; a strategy that adds to a stage declares extends_stages = True, and one "
            "that has finished returns None"
        )
    return ""

"""Checks of a strategy that a plug-in defines: of its class when it is loaded, of what its methods return whenever they
are called. Without them, a wrong value would fail later, in code that does not name the plug-in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import wraps
from numbers import Integral
from typing import Any

import search_spaces
from orchestrator.search.strategies.base import Proposal, Strategy
from orchestrator.section import Section
from search_spaces import Configuration, SearchSpace
from trainables.errors import UserError


def check_class(strategy: type[Strategy]) -> None:
    """Raise unless the class can be used; the message names its file and line."""
    problem = _problem(strategy)
    if problem:
        raise UserError(f"{place(strategy)}: strategy {strategy.__name__} {problem}")
    for name, base in inspect.getmembers(Strategy, inspect.isfunction):
        if inspect.getattr_static(strategy, name) is not base:
            _check_signature(strategy, name, list(inspect.signature(base).parameters))
    _check_signature(strategy, "__init__", ["self"])


def _check_signature(strategy: type[Strategy], name: str, parameters: list[str]) -> None:
    method = getattr(strategy, name)
    if not callable(method):
        raise UserError(f"{place(strategy)}: strategy {strategy.__name__}: `{name}` is not a method")
    is_bound = isinstance(inspect.getattr_static(strategy, name), staticmethod | classmethod)
    own = inspect.signature(method)
    try:
        own.bind(*parameters[1 if is_bound else 0 :])
    except TypeError:
        raise UserError(
            f"{place(strategy, name)}: strategy {strategy.__name__}: `{name}({', '.join(own.parameters)})` must take "
            f"({', '.join(parameters)})"
        ) from None


def place(strategy: type[Strategy], method: str = "") -> str:
    """The file and line of a strategy or of one of its methods, to begin an error message."""
    function = inspect.unwrap(getattr(strategy, method)) if method else None
    code = getattr(function, "__code__", None)
    if code is not None and getattr(function, "__module__", "") == strategy.__module__:  # not inherited
        return f"plug-in {code.co_filename}:{code.co_firstlineno}"
    return f"plug-in {inspect.getsourcefile(strategy)}:{inspect.getsourcelines(strategy)[1]}"


def _problem(strategy: type[Strategy]) -> str:
    """Why the class cannot be used; empty if it can."""
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


# ---- what its methods return


def with_checks(strategy: Strategy) -> Strategy:
    """The same strategy; from now on its methods raise if what they return cannot be used."""
    for name, find_problem in _CHECKS.items():
        setattr(strategy, name, _with_check(strategy, name, find_problem))
    return strategy


def _with_check(strategy: Strategy, name: str, find_problem: Callable[..., str]) -> Callable[..., Any]:
    method = getattr(strategy, name)

    @wraps(method)
    def checked(*arguments: Any) -> Any:
        returned = method(*arguments)
        if problem := find_problem(strategy, returned, *arguments):
            where = place(type(strategy), name)
            raise UserError(f"{where}: strategy {strategy.name}: `{name}` returned {problem}")
        return returned

    return checked


def _is_count(value: object, low: int = 0) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= low


def _is_list_of_configurations(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, Mapping) for each in value)


def _unknown_stage(strategy: Strategy, stages: Iterable[str]) -> str:
    unknown = [stage for stage in stages if stage not in strategy.stages]
    return f"stage {unknown[0]!r}, which is not in its `stages`" if unknown else ""


def _counts(strategy: Strategy, returned: object, *_: object) -> str:
    if not isinstance(returned, Mapping) or not all(map(_is_count, returned.values())):
        return f"{returned!r}, which is not a dictionary from stages to numbers of configurations"
    return _unknown_stage(strategy, returned)


def _expected(strategy: Strategy, returned: object, *_: object) -> str:
    if returned == {}:
        return "{}, which is not a number of configurations for at least one stage"
    return _counts(strategy, returned)


def _fixed_configurations(strategy: Strategy, returned: object, *_: object) -> str:
    if not isinstance(returned, Mapping) or not all(map(_is_list_of_configurations, returned.values())):
        return f"{returned!r}, which is not a dictionary from stages to lists of configurations"
    return _unknown_stage(strategy, returned)


def _competing(strategy: Strategy, returned: object, stages: Container[str]) -> str:
    if not isinstance(returned, tuple | list):
        return f"{returned!r}, which is not a tuple of stages"
    unknown = [stage for stage in returned if stage not in stages]
    return f"stage {unknown[0]!r}, which is not among the given stages" if unknown else ""


def _planned_rounds(strategy: Strategy, returned: object, *_: object) -> str:
    return "" if _is_count(returned, low=1) else f"{returned!r}, which is not a number of rounds"


def _last_round(strategy: Strategy, returned: Any, stage: str, planned: int, settings: Section) -> str:
    fits = _is_count(returned, low=1) and returned <= planned
    return "" if fits else f"{returned!r}, which is not a number of rounds from 1 to {planned}"


def _text(strategy: Strategy, returned: object, *_: object) -> str:
    return "" if returned is None or isinstance(returned, str) else f"{returned!r}, which is not text"


def _finalists(strategy: Strategy, returned: object, *_: object) -> str:
    if returned is None or _is_list_of_configurations(returned):
        return ""
    return f"{returned!r}, which is not a list of configurations"


_CHECKS: dict[str, Callable[..., str]] = {
    "expected": _expected,
    "already_run": _counts,
    "fixed_configurations": _fixed_configurations,
    "competing": _competing,
    "planned_rounds": _planned_rounds,
    "last_round": _last_round,
    "check_space": _text,
    "check_settings": _text,
    "finalists": _finalists,
}
"""By method name: a function of the strategy, the returned value and the arguments. It returns why the value cannot be
used, or an empty string."""


# ---- proposals


def check_proposal(strategy: Strategy, proposal: Proposal | None, opened: dict[str, list[str]]) -> None:
    """Raise if a proposal cannot be run. `opened`: the trial keys of all stages so far."""
    problem = _problem_of(strategy, proposal, opened)
    if problem:
        raise UserError(f"{place(type(strategy), 'propose')}: strategy {strategy.name} {problem}")


def _problem_of(strategy: Strategy, proposal: Proposal | None, opened: dict[str, list[str]]) -> str:
    if proposal is None:
        return "" if opened else "proposed no configurations: its first answer was None, which ends a search"
    if not isinstance(proposal, Proposal):
        return f"proposed a {type(proposal).__name__} instead of a Proposal or None"
    stage, configurations, seeds = proposal
    if stage not in strategy.stages:
        return f"proposed stage {stage!r}, which is not in its `stages`"
    if not isinstance(configurations, Sequence):
        return f"proposed a {type(configurations).__name__} instead of a list of configurations"
    if not configurations:
        return f"proposed no configurations for stage {stage!r}; None ends a search"
    for configuration in configurations:
        if not isinstance(configuration, Mapping):
            return f"proposed {configuration!r}, which is not a dictionary of hyperparameters"
    if seeds is not None and not (strategy.publishes_only_winner or strategy.chooses_seeds):
        return "proposed seeds; a strategy that does so declares chooses_seeds = True"
    if seeds is None and strategy.chooses_seeds:
        return "proposed no seeds, although it declares chooses_seeds = True"
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


def check_configuration(configuration: Configuration, space: SearchSpace) -> None:
    """Raise unless a proposed configuration has a value for every hyperparameter of the space, only hyperparameters of
    the method, and only valid values."""
    searchable = search_spaces.hyperparameters_of(space.method)
    for name, value in configuration.items():
        if name not in searchable:
            raise UserError(f"{space.method} has no hyperparameter {name!r}; it has: {', '.join(searchable)}")
        checked = searchable[name].check(value)
        if isinstance(value, str) and not isinstance(checked, str):
            raise UserError(f"{name} = {value!r} is text instead of a {type(checked).__name__}")
    missing = [name for name in (*space.fixed, *space.coarse) if name not in configuration]
    if missing:
        raise UserError(f"{missing[0]!r} is missing")

"""Optuna's samplers by name: all that sample from ranges, with those of their options that a study file can set."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from trainables.errors import UserError, one_of

if TYPE_CHECKING:
    import optuna

Option = bool | int | float | str
_KINDS: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str, "None": None}
_WARNINGS = ("warn_independent_sampling", "warn_asynchronous_seeding")  # they concern what users cannot change


def build(name: str, seed: int, options: Mapping[str, Option]) -> optuna.samplers.BaseSampler:
    """A sampler; raises a `UserError` if its name or an option is wrong."""
    import optuna

    known = _classes()
    one_of(known, sampler=name)
    parameters = inspect.signature(known[name]).parameters
    kinds = {each: kind for each, p in parameters.items() if each != "seed" and (kind := _kind(p.annotation))}
    for option, value in options.items():
        if option not in kinds:
            raise UserError(f"options: {option!r} is no option of sampler {name!r}; it has: {', '.join(kinds)}")
        try:
            TypeAdapter(kinds[option]).validate_python(value, strict=True)
        except ValidationError:
            annotation = parameters[option].annotation
            raise UserError(f"options: {option} = {value!r} is not of the type {annotation}") from None
    defaults = {option: False for option in _WARNINGS if option in parameters and parameters[option].default is True}
    if "constant_liar" in parameters:
        defaults["constant_liar"] = True  # keeps the configurations of a batch apart
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        try:
            return known[name](seed=seed, **{**defaults, **options})
        except (ValueError, TypeError) as error:
            raise UserError(f"options of sampler {name!r}: {error}") from None


def problem(name: str, options: Mapping[str, Option]) -> str:
    """Why the sampler cannot be used on this machine; empty if it can."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study(sampler=build(name, 0, options))
        for _ in range(2):  # some samplers need another package from the second trial on
            trial = study.ask()
            study.tell(trial, trial.suggest_float("x", 0, 1) + trial.suggest_float("y", 0, 1))
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        return f"sampler = {name!r} needs the package {missing!r}, which is not installed: pip install {missing}"
    except UserError as error:
        return str(error)
    return ""


def _classes() -> dict[str, Any]:
    """The sampler classes that accept a seed and need no other argument, by their name in a study file. Grid samplers
    are left out: the strategy `grid` replaces them."""
    import optuna

    found: dict[str, Any] = {}
    for title in optuna.samplers.__all__:
        value = getattr(optuna.samplers, title)
        if not inspect.isclass(value) or inspect.isabstract(value) or title == "BruteForceSampler":
            continue
        required = [p for p in inspect.signature(value).parameters.values() if p.default is p.empty]
        if "seed" in inspect.signature(value).parameters and not required:
            found[title.removesuffix("Sampler").lower()] = value
    return found


def _kind(annotation: Any) -> Any:
    """The type of an option, from its annotation; None if a study file cannot set options of this type."""
    parts = [part.strip() for part in str(annotation).split("|")]
    if not all(part in _KINDS for part in parts):
        return None
    kind = _KINDS[parts[0]]
    for part in parts[1:]:
        kind = kind | _KINDS[part]
    return kind

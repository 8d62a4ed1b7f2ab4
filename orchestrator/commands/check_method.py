"""`fedsweep check-method`."""

from __future__ import annotations

import importlib
import os
from typing import Annotated, Any

import typer

from orchestrator.commands.options import Hyperparameters, Json, key_values
from orchestrator.console import echo, emit_json
from trainables.errors import UserError

MOST_PROCESSES = 8  # each takes 0.5 GB of memory


def check_method(
    method: Annotated[str, typer.Argument(metavar="MODULE:CLASS", help="Method class, or a packaged method.")],
    twin: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Readable reference implementation of the server step to compare with: "
            "twin(W, G, t, state, **hyperparameters).",
        ),
    ] = None,
    hyperparameters: Hyperparameters = None,
    repetitions: Annotated[
        int, typer.Option(help="Runs of each statistical audit with the planted record, and as many without it.")
    ] = 4_000,
    json: Json = False,
) -> None:
    """Run the contract tests of a method. They cover lanes, hosts, restarts, account, noise and audit; exits with 1 on
    failure."""
    from trainables import methods
    from trainables.audit import contract

    if ":" in method:
        cls = _load(method)
        if not (isinstance(cls, type) and issubclass(cls, methods.Method)):
            raise UserError(f"{method} is not a class derived from Method")
        examined = methods.METHODS.get(getattr(cls, "name", ""))
        if not isinstance(examined, cls):
            if not getattr(cls, "name", ""):
                problem = "has no `name`"
            elif missing := sorted(getattr(cls, "__abstractmethods__", ())):
                problem = f"does not define `{missing[0]}`"
            else:
                problem = "is not defined in this module"
            raise UserError(f"{method} {problem}")
    else:
        examined = methods.get(method)
    reference = _load(twin) if twin else None
    results = []
    hypers = key_values(hyperparameters)
    for result in contract.run_checks(
        examined,
        hypers,
        reference,
        repetitions,
        on_start=lambda check: _print(f"{check}: ", json),
        processes=min(os.cpu_count() or 1, MOST_PROCESSES),
    ):
        results.append(result)
        _print(f"FAILED: {result.failure}\n" if result.failure else "passed\n", json)
    failed = [result for result in results if result.failure]
    if json:
        emit_json({"method": examined.name, "checks": [vars(result) for result in results]})
    else:
        echo(f"{examined.name}: {len(results) - len(failed)} of {len(results)} checks passed")
    if failed:
        raise typer.Exit(1)


def _print(text: str, json: bool) -> None:
    """Print without a line break; to standard error if standard output is JSON."""
    echo(text, nl=False, err=json)


def _load(text: str) -> Any:
    """The object named MODULE:NAME; the module is loaded as a plug-in."""
    from trainables import plugins

    module, _, name = text.rpartition(":")
    if not module or not name:
        raise UserError(f"{text!r} is not of the form MODULE:NAME")
    plugins.use(module)
    loaded = getattr(importlib.import_module(plugins.module_name(module)), name, None)
    if loaded is None:
        raise UserError(f"module {module} has no {name!r}")
    return loaded

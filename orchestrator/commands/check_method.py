"""`fedsweep check-method`."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer

from orchestrator.commands.options import Hyperparameters, Json, key_values
from orchestrator.console import emit_json
from trainables.errors import UserError


def check_method(
    method: Annotated[str, typer.Argument(metavar="MODULE:CLASS", help="A method of your own, or a packaged name.")],
    twin: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="The server's step written for reading, twin(W, G, t, state, **hyperparameters), to hold it against.",
        ),
    ] = None,
    hyperparameters: Hyperparameters = None,
    repetitions: Annotated[int, typer.Option(help="Runs of the audit with the planted record.")] = 4_000,
    json: Json = False,
) -> None:
    """Run on a method what every packaged one is tested for: lanes, hosts, restarts, account, audit; exit with 1 if it
    breaks something."""
    from trainables import methods
    from trainables.audit import contract

    if ":" in method:
        made = _named(method)
        if not (isinstance(made, type) and issubclass(made, methods.Method)):
            raise UserError(f"{method} is not a class derived from Method")
        examined = methods.METHODS.get(getattr(made, "name", ""))
        if not isinstance(examined, made):
            raise UserError(f"{method} is abstract, has no name, or was not found in its module")
    else:
        examined = methods.get(method)
    reference = _named(twin) if twin else None
    findings = []
    hypers = key_values(hyperparameters)
    for finding in contract.examine(examined, hypers, reference, repetitions, lambda check: _say(f"{check}: ", json)):
        findings.append(finding)
        _say(f"broken: {finding.complaint}\n" if finding.complaint else "holds\n", json)
    broken = [finding for finding in findings if finding.complaint]
    if json:
        emit_json({"method": examined.name, "findings": [vars(finding) for finding in findings]})
    else:
        typer.echo(f"{examined.name}: {len(findings) - len(broken)} of {len(findings)} checks hold")
    if broken:
        raise typer.Exit(1)


def _say(text: str, json: bool) -> None:
    """At once: a check may take a while. What was asked for is on standard output."""
    typer.echo(text, nl=False, err=json)


def _named(text: str) -> Any:
    """What MODULE:NAME stands for; the module is loaded as a plug-in."""
    from trainables import plugins

    module, _, name = text.rpartition(":")
    if not module or not name:
        raise UserError(f"{text!r} is not MODULE:NAME")
    plugins.use(module)
    found = getattr(importlib.import_module(plugins.module_name(module)), name, None)
    if found is None:
        raise UserError(f"module {module} has no {name!r}")
    return found

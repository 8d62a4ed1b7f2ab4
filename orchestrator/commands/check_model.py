"""`fedsweep check-model`."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.commands.options import Json
from orchestrator.console import echo, emit_json


def check_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model as in a study, for example low-rank:8.")],
    features: Annotated[
        int, typer.Option(min=1, help="Number of features of a row; some networks accept only one.")
    ] = 6,
    json: Json = False,
) -> None:
    """Run the contract tests of a model. They cover shapes, gradient, lanes, clip and training; exits with 1 on
    failure."""
    from trainables.audit import model_contract

    results = []
    checks = model_contract.run_checks(model, lambda check: echo(f"{check}: ", nl=False, err=json), features=features)
    for result in checks:
        results.append(result)
        echo(f"FAILED: {result.failure}" if result.failure else "passed", err=json)
    failed = [result for result in results if result.failure]
    if json:
        emit_json({"model": model, "checks": [vars(result) for result in results]})
    else:
        echo(f"{model}: {len(results) - len(failed)} of {len(results)} checks passed")
    if failed:
        raise typer.Exit(1)

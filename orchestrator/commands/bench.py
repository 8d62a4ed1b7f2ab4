"""`fedsweep bench`."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from orchestrator.commands.options import Json
from orchestrator.console import emit_json, show, stderr


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions and no growth curves.")] = False,
    search: Annotated[
        str | None,
        typer.Option(
            "--search", metavar="DATA", help="Measure the regret of grid, random, Optuna and halving on this data."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Measure how fast this machine sweeps. Compares packs with one trial at a time and with plain Ray Tune."""
    if search is not None:
        import torch

        from orchestrator.bench.regret import RegretOptions, regrets, table

        options = RegretOptions(
            data=search,
            strategies=("grid", "optuna", "random", "halving"),
            repetitions=3 if quick else 20,
            evaluation_seeds=5 if quick else 20,
            device="cuda" if torch.cuda.is_available() else "cpu",
        )
        cells = [cell for method in options.methods for cell in regrets(options, method)]
        show(cells, json, table(cells))
        return
    from orchestrator.bench.machine import bench as measure

    with contextlib.redirect_stdout(sys.stderr):  # Ray prints warnings about the number of actors
        report = measure(quick, stderr.print)
    if json:
        emit_json(report)

"""`fedsweep bench`."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from orchestrator.commands.options import Json
from orchestrator.console import emit_json, stderr


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions, no growth curves.")] = False,
    search: Annotated[
        str, typer.Option("--search", metavar="DATA", help="Instead: the regret of every way to search on these data.")
    ] = "",
    json: Json = False,
) -> None:
    """Measure this machine: lanes, packs and the naive way, side by side in one run."""
    if search:
        import torch

        from benchmarks.regret import main as run_regret

        repetitions = ["--repetitions", "3", "--judges", "5"] if quick else []
        device = "cuda" if torch.cuda.is_available() else "cpu"
        run_regret(
            ["--data", search, "--strategies", "grid", "optuna", "random", "halving", "--device", device, *repetitions]
        )
        return
    from benchmarks.bench import bench as run_bench

    with contextlib.redirect_stdout(sys.stderr):  # Ray has its say about so many actors
        report = run_bench(quick, stderr.print)
    if json:
        emit_json(report)

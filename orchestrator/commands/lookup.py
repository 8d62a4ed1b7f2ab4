"""`fedsweep lookup`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.commands.options import Json, key_values
from orchestrator.console import echo, emit_json
from trainables.errors import UserError


def lookup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Table written by `fedsweep export`.")],
    method: Annotated[str, typer.Option(help="Method in the table, by name or label.")],
    epsilon: Annotated[float, typer.Option(help="Privacy budget in the table.")],
    setting: Annotated[str | None, typer.Option(help="Data, backbone and partition.  [default: the only one]")] = None,
    split: Annotated[str, typer.Option(help="Scores on the validation or the test rows.")] = "validation",
    hyperparameters: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Only configurations with this value; repeatable."),
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Seed to average over; repeatable.  [default: all]")] = None,
    best: Annotated[int, typer.Option(help="Number of configurations to show.")] = 5,
    json: Json = False,
) -> None:
    """Look up training runs in an exported table. Shows scores by round of matching configurations, best first."""
    from orchestrator.report.benchmark.lookup import Task

    task = Task.load(file, method, epsilon, setting=setting, split=split, seeds=seed)
    wanted = {name: _value(text) for name, text in key_values(hyperparameters).items()}
    unknown = [name for name in wanted if name not in task.axes]
    if unknown:
        raise UserError(f"--set {unknown[0]} is not searched over in the table; it has: {', '.join(task.axes)}")
    runs: list[dict[str, Any]] = []
    for configuration in task.configurations:
        curve = task.curve(configuration)
        if curve and all(configuration.get(name) == value for name, value in wanted.items()):
            runs.append({"configuration": {name: configuration.get(name) for name in task.axes}, task.metric: curve})
    if not runs:
        conditions = [f"{name} = {value}" for name, value in {**wanted, **({"seed": seed} if seed else {})}.items()]
        raise UserError(f"no run of {method} has {' and '.join(conditions) or 'a score'}")
    runs.sort(key=lambda entry: (task.was_cut(entry["configuration"]), -_last(entry[task.metric])))
    if json:
        emit_json({"method": method, "epsilon": epsilon, "split": split, "runs": runs})
        return
    for entry in runs[:best]:
        values = ", ".join(f"{name}={value}" for name, value in entry["configuration"].items())
        by_round = "  ".join(f"{t}: {value:.2f}" for t, value in entry[task.metric].items())
        echo(f"{values}\n    {by_round}")
    if len(runs) > best:
        echo(f"and {len(runs) - best} more")


def _last(curve: dict[int, float]) -> float:
    """The last score; -inf for nan, so that it sorts last."""
    value = list(curve.values())[-1]
    return value if value == value else float("-inf")


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)

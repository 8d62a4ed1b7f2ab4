"""`fedsweep train`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from orchestrator.commands.options import (
    DATA_HELP,
    Address,
    Hyperparameters,
    Json,
    key_values,
    refuse_options,
    training_options,
)
from orchestrator.console import emit_json, number, stderr
from orchestrator.execution.training_options import TrainingOptions
from orchestrator.results.doubts import NOISY, least_useful_accuracy, noise_to_signal
from trainables.choices import Release
from trainables.errors import UserError

if TYPE_CHECKING:  # torch and Ray take seconds to import: fail on bad options before that
    from orchestrator.execution.training import Training
    from trainables.federation.lane_result import LaneResult
    from trainables.federation.problem import Problem
    from trainables.federation.trial_spec import TrialSpec

WITH_FROM = ("from_file", "cell", "seed", "data", "hosts", "address", "json", "save", "secret_noise", "records")
"""Options that may be combined with --from; the cell fixes all others."""

MOST_COLUMNS = 6
"""Most metrics in the table, so that it fits into a terminal; more if the run itself names many. Diagnostics come
last and are left out first."""


@training_options(
    *("method", "epsilon", "mu", "delta", "rounds", "clients", "partition", "partition_seed", "seed", "release"),
    *("adjacency", "defaults", "clip", "clipping", "level", "secret_participation", "center", "center_bound"),
    *("scale", "length", "aggregate", "model"),
    *("train_on", "evaluate_on", "evaluate_every", "validation_fraction", "validation_by"),
    *("secret_noise", "records", "hosts"),
)
def train(
    context: typer.Context,
    *,
    data: Annotated[str | None, typer.Option(help=f"{DATA_HELP}  [default: synthetic-frozen]")] = None,
    options: TrainingOptions,
    hyperparameters: Hyperparameters = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="NAME", help="Evaluate a further metric, such as macro_f1; repeatable."),
    ] = None,
    from_file: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Retrain a winner of a sweep from its best.yaml (file or URL). Only --cell, --seed, --data, --hosts, "
            "--address, --save, --secret-noise, --records and --json can be combined with it.",
        ),
    ] = None,
    cell: Annotated[
        str | None,
        typer.Option(help="With --from: the cell, or a part of its name that no other has.  [default: the only one]"),
    ] = None,
    address: Address = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npz",
            help="Save the model with its provenance and privacy account; a network as FILE.safetensors.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Train one model and print its metrics and privacy account."""
    from orchestrator.execution import training as trainings

    if save is not None and (save.exists() or save.is_symlink()):
        raise UserError(f"--save {save} already exists; choose another name")
    if save is not None and not save.resolve().parent.is_dir():
        raise UserError(f"--save {save}: there is no folder {save.resolve().parent}")
    options = replace(options, hyperparameters=key_values(hyperparameters), metrics=metrics or [], address=address)
    if from_file is not None:
        refuse_options(context, WITH_FROM, "--from: the cell is trained as in the sweep")
        training = trainings.from_best(
            *(from_file, cell, options.seed, data), records=options.records, secret_noise=options.secret_noise
        )
    else:
        if cell is not None:
            raise UserError(f"cell = {cell!r} goes with --from")
        training = trainings.set_up(data or "synthetic-frozen", options)
    if save is not None:
        from trainables.federation.saved_model import check_file_name  # imports torch

        check_file_name(save, training.trial.problem.model)
    _run(training, options, save, json)


def _run(training: Training, options: TrainingOptions, save: Path | None, json: bool) -> None:
    from orchestrator.execution.training import saved_model
    from orchestrator.execution.training import train as run_training
    from orchestrator.search.objective import objective_of
    from trainables.privacy.plan import delta_note
    from trainables.privacy.publication import ANALYST_ONLY, simulated_note

    trial, privacy, plan = training.trial, training.trial.privacy, training.plan
    split = training.problem.partition
    notes = [*training.problem.data.notes, *split.notes, delta_note(privacy, split.sizes)]
    if options.secret_noise:
        notes.append(simulated_note([trial.problem.partition.kind]))
    if trial.evaluate_every > trial.rounds:
        notes.append(
            f"evaluate_every = {trial.evaluate_every} exceeds the {trial.rounds} rounds: only the last one is evaluated"
        )
    for note in filter(None, notes):
        stderr.print(f"note: {note}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("starting", total=trial.rounds)

        def on_round(t: int, result: LaneResult) -> None:
            first = objective_of(next(iter(training.shown), "accuracy"))
            values = list(result.metrics.get(first.metric, {}).values())
            latest = f", {first.title} {first.format(values[-1])}" if values else ""
            progress.update(task, completed=t, description=f"{trial.method} at eps {privacy.epsilon:g}{latest}")

        trained = run_training(training, address=options.address, hosts=options.hosts, on_round=on_round)
    result = trained.result
    out = stderr if json else Console(highlight=False)
    as_released = " (as released)" if trial.hyperparameters.get("as_released") is True else ""
    title = f"{trial.method}{as_released}, evaluated on the {trial.problem.evaluate_on} set"
    out.print(_metrics_table(title, result, training.shown))
    out.print(_settings(trial, len(training.problem.partition.sizes)))
    out.print(
        f"claimed epsilon {number(privacy.epsilon)} ({privacy.level} level, {privacy.release}, {privacy.adjacency}, "
        f"delta {privacy.delta:g}); actual epsilon {_by_release(plan.actual_epsilon)}"
    )
    if plan.unsampled != plan.actual_epsilon:
        out.print(f"if the adversary knows which rows or users were sampled: {_by_release(plan.unsampled)}")
    out.print(f"{trained.seconds_per_round:.4f} s per round; state: {result.state}")
    for doubt in _doubts(training.problem, trial.rounds, result):
        stderr.print(f"note: {doubt}")
    if save is not None:
        saved_model(training, trained, secret=options.secret_noise).save(save)
        what = (
            f"may be published at its actual epsilon in the release model {privacy.release}; this epsilon does not "
            "include the cost of choosing the hyperparameters, if that used the data"
            if options.secret_noise
            else "is for the analyst: its noise can be computed from the seed. To publish a model, add --secret-noise"
        )
        out.print(f"saved to {save}, which {what}; what is printed here is for the analyst")
    if json:
        emit_json(
            {
                "method": trial.method,
                "key": None if options.secret_noise else trial.key,
                "state": result.state,
                "hyperparameters": trial.hyperparameters,
                "model": trial.problem.model,
                "privacy": privacy.model_dump(mode="json"),
                "preprocess": trial.preprocess.model_dump(),
                "aggregate": trial.aggregate,
                "precision": trial.precision,
                "accuracy": result.metrics["accuracy"],
                "metrics": result.metrics,
                "epsilon": {"claimed": privacy.epsilon, "actual": plan.actual_epsilon, "unsampled": plan.unsampled},
                "noise_multiplier": plan.noise_multiplier,
                "seconds_per_round": trained.seconds_per_round,
                "note": ANALYST_ONLY,
            }
        )


def _doubts(problem: Problem, rounds: int, result: LaneResult) -> Iterator[str]:
    """Why the model may be of little use, by the same criteria as in the report of a study."""
    import numpy as np

    remedy = "a larger epsilon, more rows or, if only the sum is visible, --release secure-aggregation helps"
    signal, noise = (list(result.metrics.get(name, {}).values()) for name in ("signal_norm", "noise_norm"))
    if (ratio := noise_to_signal(sum(noise), sum(signal), rounds)) > NOISY:
        yield f"noise exceeds signal, summed over all rounds ({ratio:.1f} times): {remedy}"
    counts, accuracy = np.bincount(problem.data.y_train), list(result.metrics.get("accuracy", {}).values())
    largest = 100 * counts.max() / counts.sum()
    if accuracy and accuracy[-1] <= least_useful_accuracy(largest, len(problem.y_eval)):
        yield f"this is not clearly better than always answering the largest class ({largest:.1f}% of the train rows)"


def _by_release(epsilons: Mapping[Release, float]) -> str:
    return ", ".join(f"{number(epsilon)} ({release})" for release, epsilon in epsilons.items())


def _settings(trial: TrialSpec, clients: int) -> str:
    """The clients, and what is done to features and gradients."""
    from trainables.data.partition import to_text

    used, weights = trial.preprocess, "size" if trial.aggregate == "size" else "equal"
    shares = {"scaled": used.scale, "centred": used.center}
    cost = "" if math.isinf(trial.privacy.epsilon) else " with {:.1%} of the budget"
    parts = [f"{word}{cost.format(share)}" for word, share in shares.items() if share]
    parts = [f"scaled by the declared length {used.length:g}"] * bool(used.length) + parts
    which = "of the data set" if trial.problem.partition.kind == "explicit" else f"({to_text(trial.problem.partition)})"
    return (
        f"{clients} clients {which}, {weights} weights; features {' and '.join(parts) or 'as they are'}; "
        f"clip {trial.privacy.clip:g}"
    )


def _metrics_table(title: str, result: LaneResult, shown: Sequence[str]) -> Table:
    """`shown`: the metrics of the first columns."""
    from orchestrator.search.objective import objective_of

    table = Table(title=title, title_justify="left")
    headings = {name: f"{objective_of(name).title}{' %' * bool(objective_of(name).unit)}" for name in shown} | {
        "squared_error": "squared error",
        "accuracy": "accuracy %",
        "loss": "loss",
        "train_loss": "train loss",
        "clipped_share": "clipped %",
        "signal_norm": "signal norm",
        "noise_norm": "noise norm",
    }
    measured = [name for name in headings if result.metrics.get(name)][: max(MOST_COLUMNS, len(shown) + 2)]
    table.add_column("round", justify="right")
    for name in measured:
        table.add_column(headings[name], justify="right", overflow="fold")
    for t in result.metrics["loss"]:
        table.add_row(str(t), *(f"{result.metrics[name][t]:.3f}" for name in measured))
    return table

"""`fedsweep train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from orchestrator.commands.options import (
    DATA_HELP,
    Address,
    Adjacency,
    AdjacencyModel,
    Aggregate,
    AggregateBy,
    Center,
    CenterBound,
    Clients,
    Clip,
    Clipping,
    ClippingBy,
    Delta,
    Epsilon,
    EvaluateOn,
    Json,
    Level,
    LevelModel,
    ModelText,
    Mu,
    PartitionSeed,
    PartitionText,
    Release,
    ReleaseModel,
    Rounds,
    SecretParticipation,
    Settings,
    TrainOn,
    key_values,
    refuse_options,
)
from orchestrator.console import emit_json, number, stderr
from trainables.errors import UserError

if TYPE_CHECKING:  # torch and Ray take seconds to import; a mistake on the command line should not cost them
    from orchestrator.execution.training import Training
    from trainables.federation.lane_result import LaneResult


WITH_A_CELL = ("from_file", "cell", "seed", "data", "hosts", "address", "json", "save", "secret_noise")
"""Options that count with --from; everything else the cell itself says."""


def train(
    context: typer.Context,
    data: Annotated[str | None, typer.Option(help=f"{DATA_HELP}  [default: synthetic-frozen]")] = None,
    method: Annotated[str, typer.Option(help="See `fedsweep methods`.")] = "dp-fedsofim",
    epsilon: Epsilon = None,
    mu: Mu = None,
    delta: Delta = 1e-5,
    rounds: Rounds = 70,
    clients: Clients = 20,
    partition: PartitionText = "dirichlet:0.5",
    partition_seed: PartitionSeed = 42,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the noise.")] = 42,
    release: ReleaseModel = Release.LOCAL,
    adjacency: AdjacencyModel = Adjacency.REPLACE,
    clip: Clip = 10.0,
    clipping: ClippingBy = Clipping.PLAIN,
    level: LevelModel = Level.RECORD,
    secret_participation: SecretParticipation = 1.0,
    center: Center = 0.0,
    center_bound: CenterBound = 16.0,
    aggregate: AggregateBy = Aggregate.UNIFORM,
    model: ModelText = "softmax",
    settings: Settings = None,
    train_on: Annotated[
        TrainOn, typer.Option(help="all: every train row; train: keep the validation split out.")
    ] = TrainOn.ALL,
    evaluate_on: Annotated[EvaluateOn, typer.Option(help="Which rows accuracy is measured on.")] = EvaluateOn.TEST,
    evaluate_every: Annotated[int, typer.Option(help="Rounds between evaluations.")] = 10,
    validation_fraction: Annotated[float, typer.Option(help="Share of the train rows held out.")] = 0.1,
    from_file: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Train a winner of a sweep again, from its best.yaml or the URL of it; of the other options only "
            "--cell, --seed, --data, --hosts, --address, --save, --secret-noise and --json count then.",
        ),
    ] = None,
    cell: Annotated[str | None, typer.Option(help="With --from: which cell; default: the only one.")] = None,
    hosts: Annotated[int | None, typer.Option(help="Client hosts; default: one per core.")] = None,
    address: Address = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Keep the model, with where it is from and its account.")
    ] = None,
    secret_noise: Annotated[
        bool,
        typer.Option(
            "--secret-noise",
            help="Draw the seed of noise and weights from the operating system; nobody is told it and it is not kept.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Train one federation and print its accuracy and its privacy account."""
    from orchestrator.execution import training as trainings

    if save is not None and save.exists():
        raise UserError(f"--save {save} is there already; choose another name")
    if save is not None and not save.resolve().parent.is_dir():
        raise UserError(f"--save {save}: there is no folder {save.resolve().parent}")
    if from_file is not None:
        refuse_options(context, WITH_A_CELL, "--from: the cell is trained as the sweep trained it")
        training = trainings.from_best(from_file, cell, seed, data)
        if secret_noise:
            training = trainings.with_secret_seed(training)
    else:
        if cell is not None:
            raise UserError(f"cell = {cell!r} goes with --from")
        training = trainings.set_up(
            data or "synthetic-frozen",
            method=method,
            hyperparameters=key_values(settings or []),
            epsilon=epsilon,
            mu=mu,
            delta=delta,
            clip=clip,
            clipping=clipping.value,
            release=release.value,
            adjacency=adjacency.value,
            level=level.value,
            secret_participation=secret_participation,
            center=center,
            center_bound=center_bound,
            aggregate=aggregate.value,
            model=model,
            partition=partition,
            clients=clients,
            partition_seed=partition_seed,
            rounds=rounds,
            evaluate_every=evaluate_every,
            train_on=train_on.value,
            evaluate_on=evaluate_on.value,
            validation_fraction=validation_fraction,
            seed=seed,
            secret_noise=secret_noise,
            hosts=hosts,
            address=address,
        )
    _train(training, hosts, address, json, save, secret_noise)


def _train(
    training: Training, hosts: int | None, address: str | None, json: bool, save: Path | None, secret: bool
) -> None:
    from orchestrator.execution.training import saved_model
    from orchestrator.execution.training import train as run_training
    from trainables.privacy.plan import delta_note

    trial, privacy = training.trial, training.trial.privacy
    of_delta = delta_note(privacy, training.problem.partition.sizes)
    seldom = f"evaluate_every = {trial.evaluate_every} is more than the {trial.rounds} rounds: only the last is judged"
    notes = [of_delta or "", seldom if trial.evaluate_every > trial.rounds else ""]
    for note in (*training.problem.partition.notes, *filter(None, notes)):
        stderr.print(f"note: {note}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("starting Ray", total=trial.rounds)

        def on_round(t: int, result: LaneResult) -> None:
            accuracy = list(result.metrics["accuracy"].values())
            latest = f", accuracy {accuracy[-1]:.2f}%" if accuracy else ""
            progress.update(task, completed=t, description=f"{trial.method} at eps {privacy.epsilon:g}{latest}")

        trained = run_training(training, address=address, hosts=hosts, on_round=on_round)
    result, actual, unsampled = trained.result, training.plan.actual_epsilon, training.plan.unsampled
    out = stderr if json else Console(highlight=False)  # what was asked for is on standard output, in either form
    released = " (as released)" if trial.hyperparameters.get("as_released") is True else ""
    out.print(_shown(trial.method + released, result, trial.problem.evaluate_on))
    out.print(
        f"epsilon claimed {number(privacy.epsilon)} ({privacy.level} level, {privacy.release}, {privacy.adjacency}, "
        f"delta {privacy.delta:g}); "
        + "actual "
        + ", ".join(f"{number(value)} as {model}" for model, value in actual.items())
    )
    if unsampled != actual:
        out.print(
            "to one who knows which rows (or users) were sampled: "
            + ", ".join(f"{number(value)} as {model}" for model, value in unsampled.items())
        )
    out.print(f"{trained.seconds_per_round:.4f} s per round; state: {result.state}")
    if save is not None:
        saved_model(training, trained, secret=secret).save(save)
        out.print(f"saved in {save}")
    if json:
        emit_json(
            {
                "method": trial.method,
                "key": None if secret else trial.key,
                "state": result.state,
                "hyperparameters": trial.hyperparameters,
                "model": trial.problem.model,
                "privacy": privacy.model_dump(mode="json"),
                "preprocess": trial.preprocess.model_dump(),
                "aggregate": trial.aggregate,
                "precision": trial.precision,
                "accuracy": result.metrics["accuracy"],
                "metrics": result.metrics,
                "epsilon": {"claimed": privacy.epsilon, "actual": actual, "unsampled": unsampled},
                "noise_multiplier": training.plan.noise_multiplier,
                "seconds_per_round": trained.seconds_per_round,
            }
        )


def _shown(method: str, result: LaneResult, evaluated_on: str) -> Table:
    table = Table(title=f"{method}, judged on the {evaluated_on} set", title_justify="left")
    headings = {
        "squared_error": "squared error",
        "accuracy": "accuracy %",
        "loss": "loss",
        "train_loss": "train loss",
        "clipped_share": "clipped %",
        "signal_norm": "signal norm",
        "noise_norm": "noise norm",
    }
    measured = [name for name in headings if result.metrics.get(name)]
    table.add_column("round", justify="right")
    for name in measured:
        table.add_column(headings[name], justify="right")
    for t in result.metrics["loss"]:
        table.add_row(str(t), *(f"{result.metrics[name][t]:.3f}" for name in measured))
    return table

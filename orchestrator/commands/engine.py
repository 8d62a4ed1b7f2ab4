"""One run at a time: methods, calibrate, partition, train; the audit and the benchmark."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from orchestrator.commands.options import (
    DATA_HELP,
    Address,
    Adjacency,
    AdjacencyModel,
    Clients,
    Clip,
    Data,
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
    Settings,
    TrainOn,
)
from orchestrator.console import emit_json, number, stderr
from trainables.errors import UserError, in_range

if TYPE_CHECKING:  # torch and Ray take seconds to import; a mistake on the command line should not cost them
    from orchestrator.training import Training
    from trainables.server import LaneResult

app = typer.Typer()


@app.command("methods")
def methods_command(json: Json = False) -> None:
    """List the methods with their hyperparameters, defaults and papers."""
    from trainables.methods import METHODS

    if json:
        emit_json(
            [
                {
                    "name": method.name,
                    "title": method.title,
                    "paper": method.paper,
                    "levels": list(method.levels),
                    "releases": method.program(method.check({})).name,
                    "hyperparameters": [
                        {
                            "name": h.name,
                            "default": h.default,
                            "description": h.description,
                            "choices": list(h.choices) or None,
                            "low": h.low if math.isfinite(h.low) else None,
                            "high": h.high if math.isfinite(h.high) else None,
                        }
                        for h in method.hyperparameters
                    ],
                }
                for method in METHODS.values()
            ]
        )
        return
    for method in METHODS.values():
        typer.echo(f"{method.name}  ({method.title}; {method.paper})")
        for h in method.hyperparameters:
            typer.echo(f"    {h.name} = {h.default}    {h.description}")


@app.command()
def calibrate(
    epsilon: Epsilon = None,
    mu: Mu = None,
    delta: Delta = 1e-5,
    rounds: Rounds = 70,
    clients: Clients = 20,
    clip: Clip = 10.0,
    release: ReleaseModel = Release.LOCAL,
    adjacency: AdjacencyModel = Adjacency.REPLACE,
    json: Json = False,
) -> None:
    """Say how much noise a budget needs: one noisy gradient a round, clients of equal size."""
    from trainables.privacy.plan import Event, PrivacyPlan, PrivacySettings

    in_range(1, 10**6, rounds=rounds)
    in_range(1, 10**7, clients=clients)
    epsilon = _epsilon(epsilon, mu, delta)
    settings = PrivacySettings(
        epsilon=epsilon, delta=delta, clip=clip, release=release.value, adjacency=adjacency.value
    ).check()
    plan = PrivacyPlan.calibrate(settings, [Event("gradient", rounds, settings.sensitivity)], sizes=[1] * clients)
    found: dict[str, Any] = {
        "mu": plan.mu(settings.release),
        "noise_multiplier": plan.noise_multiplier,
        "noise_std_sum": plan.noise_multiplier * clip,
        "noise_std_client": plan.noise_std["gradient"],
        "epsilon": {"claimed": epsilon, "bought": plan.bought},
    }
    if json:
        emit_json(found)
        return
    typer.echo(f"mu                 {number(found['mu'])}")
    typer.echo(f"noise multiplier   {found['noise_multiplier']:.2f}   (sigma_g)")
    typer.echo(f"noise of the sum   {number(found['noise_std_sum'])}   (standard deviation, clip x sigma_g)")
    typer.echo(f"noise of a client  {number(found['noise_std_client'])}   (added to its sum of clipped gradients)")
    for model, bought in plan.bought.items():
        typer.echo(f"epsilon bought     {number(bought)}   seen as {model}")


@app.command("partition")
def partition_command(
    data: Data,
    partition: PartitionText = "dirichlet:0.5",
    clients: Clients = 20,
    partition_seed: PartitionSeed = 42,
    json: Json = False,
) -> None:
    """Show which client would hold how many rows of which class."""
    from trainables.data import features
    from trainables.data import partition as partitions

    loaded = features.load(data)
    dealt = partitions.partition(loaded, partitions.parse(partition, clients=clients, seed=partition_seed))
    counts = dealt.counts(loaded)
    divergence = partitions.divergence_from_uniform(counts)
    absent = (counts == 0).sum(axis=1)
    for note in dealt.notes:
        stderr.print(f"note: {note}")
    if json:
        emit_json(
            {
                "counts": counts.tolist(),
                "sizes": list(dealt.sizes),
                "kl_from_uniform": divergence.tolist(),
                "kl_mean": float(divergence.mean()),
                "kl_max": float(divergence.max()),
                "absent_classes": absent.tolist(),
                "absent_mean": float(absent.mean()),
                "notes": list(dealt.notes),
            }
        )
        return
    width = max(6, len(str(max(dealt.sizes))) + 1)
    typer.echo("client " + "".join(f"{f'cls {c}':>{width}}" for c in range(loaded.classes)) + f"{'total':>8}")
    for client, row in enumerate(counts):
        typer.echo(f"{client:>6} " + "".join(f"{value:>{width}}" for value in row) + f"{row.sum():>8}")
    sizes = counts.sum(axis=1)
    typer.echo(f"sizes {sizes.min()} to {sizes.max()}, mean {sizes.mean():.1f}, std {sizes.std():.1f}")
    typer.echo(f"KL from uniform: mean {divergence.mean():.3f}, max {divergence.max():.3f}")
    typer.echo(f"absent classes per client: mean {absent.mean():.1f}, max {absent.max()}")


@app.command()
def train(
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
    level: LevelModel = Level.RECORD,
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
            "--cell, --seed, --data, --hosts, --address and --json count then.",
        ),
    ] = None,
    cell: Annotated[str | None, typer.Option(help="With --from: which cell; default: the only one.")] = None,
    hosts: Annotated[int | None, typer.Option(help="Client hosts; default: one per core.")] = None,
    address: Address = None,
    json: Json = False,
) -> None:
    """Train one federation and print its accuracy and its privacy account."""
    from orchestrator import training as trainings
    from trainables import methods
    from trainables.data import features
    from trainables.data import partition as partitions
    from trainables.privacy.plan import PrivacySettings

    if from_file is not None:
        training = trainings.from_best(from_file, cell, seed, data)
    else:
        if cell is not None:
            raise UserError(f"cell = {cell!r} goes with --from")
        privacy = PrivacySettings(
            epsilon=_epsilon(epsilon, mu, delta, default=10.0),
            delta=delta,
            clip=clip,
            release=release.value,
            adjacency=adjacency.value,
            level=level.value,
        ).check()
        dealt = partitions.parse(partition, clients=clients, seed=partition_seed)
        if hosts is not None:
            in_range(1, 10**6 if address else os.cpu_count() or 1, hosts=hosts)
        chosen = methods.get(method).check(_key_values(settings or []))  # cheap mistakes first: data take a while
        training = trainings.prepare(
            features.load(data or "synthetic-frozen", seed),
            partition=dealt,
            model=model,
            validation_fraction=validation_fraction,
            train_on=train_on.value,
            evaluate_on=evaluate_on.value,
            method=method,
            hyperparameters=chosen,
            privacy=privacy,
            rounds=rounds,
            evaluate_every=evaluate_every,
            seed=seed,
        )
    _train(training, hosts, address, json)


def _train(training: Training, hosts: int | None, address: str | None, json: bool) -> None:
    from orchestrator.training import train as run_training

    trial, privacy = training.trial, training.trial.privacy
    for note in training.problem.partition.notes:
        stderr.print(f"note: {note}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True) as progress:
        task = progress.add_task("starting Ray", total=trial.rounds)

        def on_round(t: int, result: LaneResult) -> None:
            accuracy = list(result.metrics["accuracy"].values())
            latest = f", accuracy {accuracy[-1]:.2f}%" if accuracy else ""
            progress.update(task, completed=t, description=f"{trial.method} at eps {privacy.epsilon:g}{latest}")

        trained = run_training(training, address=address, hosts=hosts, on_round=on_round)
    result, bought, unsampled = trained.result, training.plan.bought, training.plan.unsampled
    released = " (as released)" if trial.hyperparameters.get("as_released") is True else ""
    _show_training(trial.method + released, result, trial.problem.evaluate_on)
    stderr.print(
        f"epsilon claimed {number(privacy.epsilon)} ({privacy.level} level, {privacy.release}, {privacy.adjacency}, "
        f"delta {privacy.delta:g}); "
        + "bought "
        + ", ".join(f"{number(value)} as {model}" for model, value in bought.items())
    )
    if unsampled != bought:
        stderr.print(
            "to one who knows which rows were sampled: "
            + ", ".join(f"{number(value)} as {model}" for model, value in unsampled.items())
        )
    stderr.print(f"{trained.seconds_per_round:.4f} s per round; state: {result.state}")
    if json:
        emit_json(
            {
                "method": trial.method,
                "key": trial.key,
                "state": result.state,
                "hyperparameters": trial.hyperparameters,
                "model": trial.problem.model,
                "privacy": privacy.model_dump(mode="json"),
                "accuracy": result.metrics["accuracy"],
                "metrics": result.metrics,
                "epsilon": {"claimed": privacy.epsilon, "bought": bought, "unsampled": unsampled},
                "noise_multiplier": training.plan.noise_multiplier,
                "seconds_per_round": trained.seconds_per_round,
            }
        )


def _show_training(method: str, result: LaneResult, evaluated_on: str) -> None:
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
    stderr.print(table)


@app.command("audit")
def audit_command(
    method: Annotated[str, typer.Argument(help="See `fedsweep methods`.")],
    epsilon: Epsilon = None,
    mu: Mu = None,
    delta: Delta = 1e-5,
    rounds: Rounds = 3,
    clients: Annotated[int, typer.Option(help="Clients of a sum; seen locally, there is one.")] = 2,
    release: ReleaseModel = Release.LOCAL,
    adjacency: AdjacencyModel = Adjacency.REPLACE,
    level: LevelModel = Level.RECORD,
    model: ModelText = "softmax",
    settings: Settings = None,
    repetitions: Annotated[int, typer.Option(help="Runs with the planted record, and as many without.")] = 20_000,
    noise_factor: Annotated[float, typer.Option(help="Multiplies the noise: below 1 the audit should object.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the first run.")] = 0,
    json: Json = False,
) -> None:
    """Try to tell from the releases whether a planted record is there; exit with 1 if that goes beyond the claim."""
    from trainables.audit import CONFIDENCE, audit
    from trainables.privacy.plan import PrivacySettings

    epsilon = _epsilon(epsilon, mu, delta, default=1.0)
    privacy = PrivacySettings(
        epsilon=epsilon, delta=delta, release=release.value, adjacency=adjacency.value, level=level.value
    ).check()
    found = audit(
        method,
        privacy,
        _key_values(settings or []),
        model=model,
        rounds=rounds,
        clients=clients,
        repetitions=repetitions,
        noise_factor=noise_factor,
        seed=seed,
    )
    bought = found.plan.bought[privacy.release]
    if json:
        emit_json(
            {
                "method": method,
                "hyperparameters": found.trial.hyperparameters,
                "repetitions": repetitions,
                "confidence": CONFIDENCE,
                "epsilon": {"claimed": epsilon, "bought": bought, "at_least": found.epsilon},
                "mu": {"claimed": found.claimed_mu, "at_least": None if found.sampled else found.mu},
                "plain_epsilon_at_least": found.plain_epsilon,
                "caught": found.caught,
            }
        )
    else:
        scope = f"{privacy.release}, {privacy.adjacency}, {privacy.level} level, delta {delta:g}, {rounds} rounds"
        typer.echo(f"claimed    eps {number(epsilon)} (mu {number(found.claimed_mu)}); {scope}")
        typer.echo(f"bought     eps {number(bought)}, by the account")
        if found.sampled:
            typer.echo(f"seen       eps at least {number(found.plain_epsilon)}; for secret samples there is no mu")
        else:
            typer.echo(f"seen       eps at least {number(found.epsilon)} (mu at least {number(found.mu)})")
            typer.echo(f"           eps at least {number(found.plain_epsilon)} without knowing that noise is Gaussian")
        typer.echo(f"           with {CONFIDENCE:.0%} confidence, from twice {repetitions} runs")
        verdict = "caught: the releases tell more than is claimed" if found.caught else "not seen to exceed the claim"
        if bought > epsilon * 1.001 and not found.caught:
            verdict += ", though by the account it does"
        typer.echo(f"verdict    {verdict}")
    if found.caught:
        raise typer.Exit(1)


@app.command()
def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions, no growth curves.")] = False,
    json: Json = False,
) -> None:
    """Measure this machine: lanes, packs and the naive way, side by side in one run."""
    from orchestrator.bench import bench as run_bench

    with contextlib.redirect_stdout(sys.stderr):  # Ray has its say about so many actors
        report = run_bench(quick, stderr.print)
    if json:
        emit_json(report)


def _epsilon(epsilon: float | None, mu: float | None, delta: float, default: float | None = None) -> float:
    """The budget, stated as eps or as mu."""
    if mu is not None:
        from trainables.privacy.gaussian import epsilon_of

        if epsilon is not None:
            raise UserError(f"epsilon = {epsilon:g} and mu = {mu:g} state the budget twice")
        in_range(0, math.inf, open_low=True, mu=mu)
        return epsilon_of(mu, delta)
    stated = default if epsilon is None else epsilon
    if stated is None:
        raise UserError("the budget is missing; state it with --epsilon or --mu")
    return stated


def _key_values(pairs: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise UserError(f"--set {pair!r} is not of the form KEY=VALUE")
        if name in found:
            raise UserError(f"--set names {name!r} twice")
        found[name] = value
    return found

"""`fedsweep audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.commands.options import (
    Adjacency,
    AdjacencyModel,
    Aggregate,
    AggregateBy,
    Center,
    Clipping,
    ClippingBy,
    Delta,
    Epsilon,
    Json,
    Level,
    LevelModel,
    ModelText,
    Mu,
    Release,
    ReleaseModel,
    Rounds,
    SecretParticipation,
    Settings,
    key_values,
    refuse_options,
)
from orchestrator.console import emit_json, number
from trainables.errors import UserError

WITH_A_FOLDER = ("target", "cell", "canaries", "noise_factor", "seed", "json")
"""Options that count for a result folder; everything else the cell itself says."""


def audit(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="METHOD|DIR",
            help="A method (see `fedsweep methods`); or a result folder, whose winner is audited in one run: of the "
            "options only --cell, --canaries, --noise-factor, --seed and --json count then.",
        ),
    ],
    epsilon: Epsilon = None,
    mu: Mu = None,
    delta: Delta = 1e-5,
    rounds: Rounds = 3,
    clients: Annotated[int, typer.Option(help="Clients of a sum; seen locally, there is one.")] = 2,
    release: ReleaseModel = Release.LOCAL,
    adjacency: AdjacencyModel = Adjacency.REPLACE,
    level: LevelModel = Level.RECORD,
    secret_participation: SecretParticipation = 1.0,
    clipping: ClippingBy = Clipping.PLAIN,
    center: Center = 0.0,
    aggregate: AggregateBy = Aggregate.UNIFORM,
    model: ModelText = "softmax",
    settings: Settings = None,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="The method's defaults, not the settings under which most shows.")
    ] = False,
    cell: Annotated[str | None, typer.Option(help="With a result folder: which cell; default: the only one.")] = None,
    canaries: Annotated[
        int | None, typer.Option(help="With a result folder: how many; default: as can be told apart, 1000 at most.")
    ] = None,
    repetitions: Annotated[int, typer.Option(help="Runs with the planted record, and as many without.")] = 20_000,
    noise_factor: Annotated[float, typer.Option(help="Multiplies the noise: below 1 the audit should object.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the first run.")] = 0,
    json: Json = False,
) -> None:
    """Try to tell from the releases whether a planted record is there; exit with 1 if that goes beyond the claim."""
    if is_folder(target):
        refuse_options(context, WITH_A_FOLDER, "a result folder: the cell is audited as the sweep trained it")
        _one_run(target, cell, canaries, noise_factor, seed, json)
        return
    if cell is not None or canaries is not None:
        raise UserError(f"--{'canaries' if cell is None else 'cell'} goes with a result folder, not with a method")
    method = target
    from trainables.audit import paired as auditing
    from trainables.privacy.gaussian import budget
    from trainables.privacy.plan import PrivacySettings

    epsilon = 1.0 if epsilon is None and mu is None else budget(epsilon, mu, delta)
    privacy = PrivacySettings(
        epsilon=epsilon,
        delta=delta,
        release=release.value,
        adjacency=adjacency.value,
        level=level.value,
        clipping=clipping.value,
        secret_participation=secret_participation,
    ).check()
    found = auditing.audit(
        method,
        privacy,
        {**(auditing.defaults(method) if defaults else {}), **key_values(settings or [])},
        model=model,
        center=center,
        aggregate=aggregate.value,
        rounds=rounds,
        clients=clients,
        repetitions=repetitions,
        noise_factor=noise_factor,
        seed=seed,
    )
    actual = found.plan.actual_epsilon[privacy.release]
    if json:
        emit_json(
            {
                "method": method,
                "hyperparameters": found.trial.hyperparameters,
                "repetitions": repetitions,
                "confidence": auditing.CONFIDENCE,
                "epsilon": {"claimed": epsilon, "actual": actual, "at_least": found.epsilon},
                "mu": {"claimed": found.claimed_mu, "at_least": None if found.sampled else found.mu},
                "plain_epsilon_at_least": found.plain_epsilon,
                "power": {"mu": found.power.mu, "epsilon": found.power.epsilon, "noise": found.power.noise},
                "caught": found.caught,
            }
        )
    else:
        scope = f"{privacy.release}, {privacy.adjacency}, {privacy.level} level, delta {delta:g}, {rounds} rounds"
        typer.echo(f"claimed    eps {number(epsilon)} (mu {number(found.claimed_mu)}); {scope}")
        typer.echo(f"actual     eps {number(actual)}, by the account")
        if found.sampled:
            typer.echo(f"seen       eps at least {number(found.plain_epsilon)}; for secret samples there is no mu")
        else:
            typer.echo(f"seen       eps at least {number(found.epsilon)} (mu at least {number(found.mu)})")
            typer.echo(f"           eps at least {number(found.plain_epsilon)} without knowing that noise is Gaussian")
        typer.echo(f"           with {auditing.CONFIDENCE:.0%} confidence, from twice {repetitions} runs")
        power = found.power
        typer.echo(
            f"power      would have caught eps {number(power.epsilon)} or more, or {power.noise:.2f} of the noise or "
            f"less, {auditing.CONFIDENCE:.0%} of the time"
        )
        verdict = "caught: the releases tell more than is claimed" if found.caught else "not seen to exceed the claim"
        if actual > epsilon * 1.001 and not found.caught:
            verdict += ", though by the account it does"
        typer.echo(f"verdict    {verdict}")
    if found.caught:
        raise typer.Exit(1)


def is_folder(target: str) -> bool:
    """Whether it is a result folder, here or at a URL, and no method."""
    from trainables.methods import METHODS

    return target not in METHODS and ("://" in target or "/" in target or Path(target).is_dir())


def _one_run(folder: str, cell: str | None, canaries: int | None, noise_factor: float, seed: int, json: bool) -> None:
    """The winner of a cell, trained once more with canaries among its rows."""
    from orchestrator.execution.study_run import chosen_cells
    from orchestrator.execution.training import from_cells
    from trainables.audit import one_run as auditing

    training = from_cells(chosen_cells(folder), folder, cell, seed, None)
    found = auditing.one_run_audit(
        training.trial, training.problem, canaries=canaries, noise_factor=noise_factor, seed=seed
    )
    privacy = training.trial.privacy
    actual = found.plan.actual_epsilon[privacy.release]
    if json:
        emit_json(
            {
                "method": training.trial.method,
                "hyperparameters": training.trial.hyperparameters,
                "canaries": found.canaries,
                "guesses": found.guesses,
                "right": found.right,
                "confidence": auditing.CONFIDENCE,
                "epsilon": {"claimed": privacy.epsilon, "actual": actual, "at_least": found.epsilon},
                "power": {"epsilon": found.most, "noise": found.noise},
                "caught": found.caught,
            }
        )
    else:
        scope = f"{privacy.release}, {privacy.adjacency}, delta {privacy.delta:g}, {training.trial.rounds} rounds"
        typer.echo(f"claimed    eps {number(privacy.epsilon)}; {training.trial.method}, {scope}")
        typer.echo(f"actual     eps {number(actual)}, by the account")
        typer.echo(
            f"seen       eps at least {number(found.epsilon)} with {auditing.CONFIDENCE:.0%} confidence: {found.right} "
            f"of {found.guesses} guesses are right, for {found.canaries} canaries in one run"
        )
        typer.echo(f"power      {_power(found.noise, found.most, privacy.epsilon)}")
        verdict = "caught: the releases tell more than is claimed" if found.caught else "not seen to exceed the claim"
        typer.echo(f"verdict    {verdict}")
    if found.caught:
        raise typer.Exit(1)


def _power(noise: float, most: float, claimed: float) -> str:
    if most <= claimed:
        return f"none: {number(most)} is the most that so many guesses could show; take more --canaries"
    if noise == 0:
        return "none: no part of the noise that was tried would have been caught; take more --canaries"
    return (
        f"would have caught {noise:g} of the noise, tried with the same data; at most eps {number(most)} can be shown"
    )

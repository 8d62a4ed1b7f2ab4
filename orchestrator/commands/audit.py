"""`fedsweep audit`."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.commands.options import (
    Adjacency,
    AdjacencyModel,
    Aggregate,
    AggregateBy,
    Center,
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
    Settings,
    key_values,
)
from orchestrator.console import emit_json, number


def audit(
    method: Annotated[str, typer.Argument(help="See `fedsweep methods`.")],
    epsilon: Epsilon = None,
    mu: Mu = None,
    delta: Delta = 1e-5,
    rounds: Rounds = 3,
    clients: Annotated[int, typer.Option(help="Clients of a sum; seen locally, there is one.")] = 2,
    release: ReleaseModel = Release.LOCAL,
    adjacency: AdjacencyModel = Adjacency.REPLACE,
    level: LevelModel = Level.RECORD,
    center: Center = 0.0,
    aggregate: AggregateBy = Aggregate.UNIFORM,
    model: ModelText = "softmax",
    settings: Settings = None,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="The method's defaults, not the settings under which most shows.")
    ] = False,
    repetitions: Annotated[int, typer.Option(help="Runs with the planted record, and as many without.")] = 20_000,
    noise_factor: Annotated[float, typer.Option(help="Multiplies the noise: below 1 the audit should object.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the first run.")] = 0,
    json: Json = False,
) -> None:
    """Try to tell from the releases whether a planted record is there; exit with 1 if that goes beyond the claim."""
    from trainables import audit as auditing
    from trainables.privacy.gaussian import budget
    from trainables.privacy.plan import PrivacySettings

    epsilon = 1.0 if epsilon is None and mu is None else budget(epsilon, mu, delta)
    privacy = PrivacySettings(
        epsilon=epsilon, delta=delta, release=release.value, adjacency=adjacency.value, level=level.value
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
    bought = found.plan.bought[privacy.release]
    if json:
        emit_json(
            {
                "method": method,
                "hyperparameters": found.trial.hyperparameters,
                "repetitions": repetitions,
                "confidence": auditing.CONFIDENCE,
                "epsilon": {"claimed": epsilon, "bought": bought, "at_least": found.epsilon},
                "mu": {"claimed": found.claimed_mu, "at_least": None if found.sampled else found.mu},
                "plain_epsilon_at_least": found.plain_epsilon,
                "power": {"mu": found.power.mu, "epsilon": found.power.epsilon, "noise": found.power.noise},
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
        typer.echo(f"           with {auditing.CONFIDENCE:.0%} confidence, from twice {repetitions} runs")
        power = found.power
        typer.echo(
            f"power      would have caught eps {number(power.epsilon)} or more, or {power.noise:.2f} of the noise or "
            f"less, {auditing.CONFIDENCE:.0%} of the time"
        )
        verdict = "caught: the releases tell more than is claimed" if found.caught else "not seen to exceed the claim"
        if bought > epsilon * 1.001 and not found.caught:
            verdict += ", though by the account it does"
        typer.echo(f"verdict    {verdict}")
    if found.caught:
        raise typer.Exit(1)

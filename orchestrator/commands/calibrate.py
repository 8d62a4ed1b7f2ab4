"""`fedsweep calibrate`."""

from __future__ import annotations

from typing import Any

import typer

from orchestrator.commands.options import (
    Adjacency,
    AdjacencyModel,
    Clients,
    Clip,
    Delta,
    Epsilon,
    Json,
    Mu,
    Release,
    ReleaseModel,
    Rounds,
    budget,
)
from orchestrator.console import emit_json, number
from trainables.errors import in_range


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
    epsilon = budget(epsilon, mu, delta)
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

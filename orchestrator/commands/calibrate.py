"""`fedsweep calibrate`."""

from __future__ import annotations

import math
from typing import Annotated, Any

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
    search: Annotated[
        float | None,
        typer.Option(
            help="The budget is that of a private search: the best of a secret, geometric number of runs with this "
            "mean, each with noise of its own; only that one is released."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Say how much noise a budget needs: one noisy gradient a round, clients of equal size."""
    from trainables.privacy.gaussian import budget, mu_of
    from trainables.privacy.plan import Event, PrivacyPlan, PrivacySettings
    from trainables.privacy.private_selection import all_released, base_for, best_released, best_released_by_renyi

    in_range(1, 10**6, rounds=rounds)
    in_range(1, 10**7, clients=clients)
    total = epsilon = budget(epsilon, mu, delta)
    if search is not None:
        in_range(1, 10**9, search=search)
        epsilon = base_for(total, search, delta)
        in_range(0, math.inf, "(]", epsilon_of_a_run=epsilon)
    settings = PrivacySettings(
        epsilon=epsilon, delta=delta, clip=clip, release=release.value, adjacency=adjacency.value
    ).check()
    plan = PrivacyPlan.calibrate(settings, [Event("gradient", rounds, settings.sensitivity)], sizes=[1] * clients)
    found: dict[str, Any] = {
        "mu": plan.mu(settings.release),
        "noise_multiplier": plan.noise_multiplier,
        "noise_std_sum": plan.noise_multiplier * clip,
        "noise_std_client": plan.noise_std["gradient"],
        "epsilon": {"claimed": epsilon, "actual": plan.actual_epsilon},
    }
    prices: dict[str, float] = {}
    if search is not None:
        of_a_run = mu_of(epsilon, delta)
        prices = {
            "best released": best_released(of_a_run, search, delta),
            "by Renyi divergences": best_released_by_renyi(of_a_run, search, delta),
            "all released": all_released(of_a_run, search, delta),
        }
        found["search"] = {"runs": search, "epsilon": total, "epsilon_of_a_run": epsilon, "prices": prices}
    if json:
        emit_json(found)
        return
    if search is not None:
        typer.echo(f"every run trains   at epsilon {number(epsilon)}, {number(search)} runs on average")
    for what, price in prices.items():
        typer.echo(f"epsilon of search  {number(price)}   {what}")
    typer.echo(f"mu                 {number(found['mu'])}")
    typer.echo(f"noise multiplier   {found['noise_multiplier']:.2f}   (sigma_g)")
    typer.echo(f"noise of the sum   {number(found['noise_std_sum'])}   (standard deviation, clip x sigma_g)")
    typer.echo(f"noise of a client  {number(found['noise_std_client'])}   (added to its sum of clipped gradients)")
    for model, actual in plan.actual_epsilon.items():
        typer.echo(f"actual epsilon     {number(actual)}   seen as {model}")

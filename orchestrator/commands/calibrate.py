"""`fedsweep calibrate`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any

import typer

from orchestrator.commands.options import Json, number_of_clients, training_options
from orchestrator.console import number, show
from orchestrator.execution.training_options import TrainingOptions
from trainables.errors import in_range


@training_options("epsilon", "mu", "delta", "rounds", "clients", "clip", "release", "adjacency", clients=20, clip=10.0)
def calibrate(
    options: TrainingOptions,
    search: Annotated[
        float | None,
        typer.Option(
            metavar="RUNS",
            help="The budget covers a private search: a secret, geometrically distributed number of runs with this "
            "mean, of which only the best is released.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Compute the noise that a privacy budget needs. Assumes one noisy gradient per round and clients of equal size."""
    from trainables.privacy.gaussian import budget, mu_of
    from trainables.privacy.plan import Event, PrivacyPlan
    from trainables.privacy.private_selection import all_released, base_for, best_released, best_released_by_renyi

    in_range(1, 10**6, rounds=options.rounds)
    clients = number_of_clients(options)
    in_range(1, 10**7, clients=clients)
    delta = options.delta
    total = epsilon = budget(options.epsilon, options.mu, delta)
    if search is not None:
        in_range(1, 10**9, search=search)
        epsilon = base_for(total, search, delta)
        in_range(0, math.inf, "(]", epsilon_of_a_run=epsilon)
    settings = replace(options, epsilon=epsilon, mu=None).privacy()
    gradients = Event("gradient", options.rounds, settings.sensitivity)
    plan = PrivacyPlan.calibrate(settings, [gradients], sizes=[1] * clients)
    report: dict[str, Any] = {
        "mu": plan.mu(settings.release),
        "noise_multiplier": plan.noise_multiplier,
        "noise_std_sum": plan.noise_multiplier * settings.clip,
        "noise_std_client": plan.noise_std["gradient"],
        "epsilon": {"claimed": epsilon, "actual": plan.actual_epsilon},
    }
    search_epsilons: dict[str, float] = {}
    if search is not None:
        mu = mu_of(epsilon, delta)
        search_epsilons = {
            "best released": best_released(mu, search, delta),
            "by Renyi divergences": best_released_by_renyi(mu, search, delta),
            "all released": all_released(mu, search, delta),
        }
        report["search"] = {"runs": search, "epsilon": total, "epsilon_of_a_run": epsilon, "prices": search_epsilons}
    lines = [
        *([] if search is None else [f"epsilon of a run   {number(epsilon)}   ({number(search)} runs on average)"]),
        *(f"epsilon of search  {number(value)}   ({what})" for what, value in search_epsilons.items()),
        f"mu                 {number(report['mu'])}",
        f"noise multiplier   {plan.noise_multiplier:.2f}   (sigma_g)",
        f"noise of the sum   {number(report['noise_std_sum'])}   (standard deviation, clip x sigma_g)",
        f"noise of a client  {number(report['noise_std_client'])}   (added to its sum of clipped gradients)",
        *(f"actual epsilon     {number(actual)}   ({model})" for model, actual in plan.actual_epsilon.items()),
    ]
    show(report, json, lines)

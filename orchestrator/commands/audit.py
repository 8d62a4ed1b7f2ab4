"""`fedsweep audit`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.commands.options import (
    Hyperparameters,
    Json,
    key_values,
    number_of_clients,
    refuse_options,
    training_options,
)
from orchestrator.console import echo, emit_json, number
from orchestrator.execution.training_options import TrainingOptions
from trainables.errors import UserError

WITH_FOLDER = ("target", "cell", "canaries", "noise_factor", "seed", "json")
"""Options that may be combined with a results folder; the cell fixes all others."""
WITH_PROGRAM = ("program", "data", "epsilon", "mu", "delta", "adjacency", "canaries", "seed", "json")
"""Options that may be combined with --program."""


@training_options(
    *("epsilon", "mu", "delta", "rounds", "clients", "release", "adjacency", "level", "secret_participation"),
    *("clipping", "center", "aggregate", "model", "seed"),
    rounds=3,
    clients=2,
    seed=0,
    center=0.0,
    aggregate="uniform",
)
def audit(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="METHOD|DIR",
            help="Method (see `fedsweep methods`), or a results folder, whose winner is audited in one training run "
            "and which allows only --cell, --canaries, --noise-factor, --seed and --json.",
        ),
    ] = None,
    *,
    options: TrainingOptions,
    hyperparameters: Hyperparameters = None,
    program: Annotated[
        str | None,
        typer.Option(
            metavar="CMD",
            help="Audit this program in one run instead: it is called with a feature file and an output folder, and "
            "writes weights.npy or its releases (see docs/audit.md).",
        ),
    ] = None,
    data: Annotated[
        str, typer.Option(help="With --program: the data that canaries are planted in.")
    ] = "synthetic-frozen:2000,200,20,4",
    defaults: Annotated[
        bool,
        typer.Option(
            "--defaults",
            help="Audit the default hyperparameters, not the settings that reveal most. Not the --defaults of train.",
        ),
    ] = False,
    cell: Annotated[str | None, typer.Option(help="With a results folder: the cell.  [default: the only one]")] = None,
    canaries: Annotated[
        int | None,
        typer.Option(
            help="With a results folder or --program: number of canaries (records, or clients at user level).  "
            "[default: as many as are distinguishable, at most 1000; 500 with --program]"
        ),
    ] = None,
    repetitions: Annotated[int, typer.Option(help="Runs with the planted record, and as many without it.")] = 20_000,
    noise_factor: Annotated[
        float, typer.Option(help="Multiply the noise by this factor; well below 1 the audit should find a violation.")
    ] = 1.0,
    json: Json = False,
) -> None:
    """Test the claimed budget by attacking the releases.

    The attack guesses from the releases whether a planted record took part in the training. Exits with 1 if they reveal
    more than the claim allows. With --release local one client is simulated.
    """
    if program is not None:
        refuse_options(context, WITH_PROGRAM, "--program: it trains as it likes")
        _audit_program(program, data, options, canaries, json)
        return
    if target is None:
        raise UserError("nothing to audit: name a method or a results folder, or give --program")
    if is_folder(target):
        refuse_options(context, WITH_FOLDER, "a results folder: the cell is audited as the sweep trained it")
        _audit_winner(target, cell, canaries, noise_factor, options.seed, json)
        return
    if cell is not None or canaries is not None:
        option, program = ("canaries", " or --program") if cell is None else ("cell", "")
        raise UserError(f"--{option} goes with a results folder{program}, not with a method")
    from trainables.audit import paired

    if options.epsilon is None and options.mu is None:
        options = replace(options, epsilon=1.0)
    options = replace(options, defaults="paper")
    privacy, rounds = options.privacy(), options.rounds
    result = paired.audit(
        target,
        privacy,
        {**(paired.defaults(target) if defaults else {}), **key_values(hyperparameters)},
        model=options.model,
        center=options.center or 0.0,
        aggregate=options.aggregation(),
        rounds=rounds,
        clients=number_of_clients(options),
        repetitions=repetitions,
        noise_factor=noise_factor,
        seed=options.seed,
    )
    actual, power = result.plan.actual_epsilon[privacy.release], result.power
    if json:
        emit_json(
            {
                "method": target,
                "hyperparameters": result.trial.hyperparameters,
                "repetitions": repetitions,
                "confidence": paired.CONFIDENCE,
                "epsilon": {"claimed": privacy.epsilon, "actual": actual, "at_least": result.epsilon},
                "mu": {"claimed": result.claimed_mu, "at_least": None if result.sampled else result.mu},
                "plain_epsilon_at_least": result.plain_epsilon,
                "power": {"mu": power.mu, "epsilon": power.epsilon, "noise": power.noise},
                "caught": result.caught,
            }
        )
    else:
        scope = f"{privacy.release}, {privacy.adjacency}, {privacy.level} level, delta {privacy.delta:g}"
        echo(f"claimed    eps {number(privacy.epsilon)} (mu {number(result.claimed_mu)}); {scope}, {rounds} rounds")
        echo(f"actual     eps {number(actual)}, by the privacy account")
        if result.sampled:
            echo(f"measured   eps at least {number(result.plain_epsilon)}; mu is not defined for secret samples")
        else:
            echo(f"measured   eps at least {number(result.epsilon)} (mu at least {number(result.mu)})")
            echo(f"           eps at least {number(result.plain_epsilon)} without assuming Gaussian noise")
        echo(f"           with {paired.CONFIDENCE:.0%} confidence, from 2 x {repetitions} runs")
        echo(
            f"power      detects eps {number(power.epsilon)} or more, or {power.noise:.2f} of the noise or less, "
            f"{paired.CONFIDENCE:.0%} of the time"
        )
        exceeds = actual > privacy.epsilon * 1.001 and not result.caught
        echo(_verdict(result.caught) + (", although the account exceeds it" if exceeds else ""))
    if result.caught:
        raise typer.Exit(1)


def is_folder(target: str) -> bool:
    """Whether the target is a results folder, local or at a URL, rather than a method."""
    from trainables.methods import METHODS

    return target not in METHODS and ("://" in target or "/" in target or Path(target).is_dir())


def _audit_winner(
    folder: str, cell: str | None, canaries: int | None, noise_factor: float, seed: int, json: bool
) -> None:
    """Train the winner of a cell once more, with canaries among its records or, at user level, its clients."""
    from orchestrator.execution.study_run import chosen_cells
    from orchestrator.execution.training import from_cells
    from trainables.audit import coin_bounds, one_run

    training = from_cells(chosen_cells(folder), folder, cell, seed, None)
    result = one_run.one_run_audit(
        training.trial, training.problem, canaries=canaries, noise_factor=noise_factor, seed=seed
    )
    privacy = training.trial.privacy
    actual = result.plan.actual_epsilon[privacy.release]
    if json:
        emit_json(
            {
                "method": training.trial.method,
                "hyperparameters": training.trial.hyperparameters,
                "canaries": result.canaries,
                "guesses": result.guesses,
                "correct": result.correct,
                "confidence": coin_bounds.CONFIDENCE,
                "epsilon": {"claimed": privacy.epsilon, "actual": actual, "at_least": result.epsilon},
                "fdp_epsilon_at_least": None if result.sampled else result.fdp_epsilon,
                "plain_epsilon_at_least": None if result.sampled else result.plain_epsilon,
                "power": {"noise": result.detectable_noise},
                "caught": result.caught,
            }
        )
    else:
        scope = f"{privacy.release}, {privacy.adjacency}, {privacy.level} level, delta {privacy.delta:g}"
        scope += f", {training.trial.rounds} rounds"
        echo(f"claimed    eps {number(privacy.epsilon)}; {training.trial.method}, {scope}")
        echo(f"actual     eps {number(actual)}, by the privacy account")
        echo(
            f"measured   eps at least {number(result.epsilon)} with {coin_bounds.CONFIDENCE:.0%} confidence, for "
            f"Gaussian noise: scores of {result.canaries} canaries in one run"
        )
        if result.sampled:
            echo("           if users take part as often as planned")
        else:
            echo(
                f"           eps at least {number(result.fdp_epsilon)} for any Gaussian-DP run, "
                f"{number(result.plain_epsilon)} for any run: {result.correct} of {result.guesses} guesses are correct"
            )
        echo(
            f"power      detects {result.detectable_noise:.2f} of the noise or less, "
            f"{coin_bounds.CONFIDENCE:.0%} of the time"
        )
        echo(_verdict(result.caught))
    if result.caught:
        raise typer.Exit(1)


def _audit_program(program: str, data: str, options: TrainingOptions, canaries: int | None, json: bool) -> None:
    """Run an external program once, with canaries among the rows of its data."""
    import tempfile

    from trainables.audit import program as programs
    from trainables.data import features
    from trainables.privacy.gaussian import budget

    claimed = budget(options.epsilon, options.mu, options.delta)
    with tempfile.TemporaryDirectory(prefix="fedsweep-audit-") as folder:
        result = programs.audit_program(
            program,
            features.load(data),
            claimed,
            options.delta,
            adjacency=options.adjacency,
            canaries=500 if canaries is None else canaries,
            folder=Path(folder),
            seed=options.seed,
        )
    if json:
        emit_json(
            {
                "program": program,
                "canaries": result.canaries,
                "guesses": result.guesses,
                "correct": result.correct,
                "confidence": programs.CONFIDENCE,
                "epsilon": {"claimed": claimed, "at_least": result.epsilon},
                "mu": {"at_least": result.mu, "estimate": result.mu_estimate},
                "fdp_epsilon_at_least": result.fdp_epsilon,
                "caught": result.caught,
            }
        )
    else:
        echo(f"claimed    eps {number(claimed)}; {options.adjacency}, delta {options.delta:g}")
        echo(
            f"measured   eps at least {number(result.epsilon)} with {programs.CONFIDENCE:.0%} confidence, for "
            f"Gaussian noise: scores of {result.canaries} canaries in one run (mu about {number(result.mu_estimate)})"
        )
        echo(f"           eps at least {number(result.fdp_epsilon)} for any Gaussian-DP program")
        echo(_verdict(result.caught))
    if result.caught:
        raise typer.Exit(1)


def _verdict(caught: bool) -> str:
    return f"verdict    {'FAILED: the releases reveal more than is claimed' if caught else 'consistent with the claim'}"

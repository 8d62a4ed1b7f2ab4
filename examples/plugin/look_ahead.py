"""A plug-in whose clients release more than one gradient per round. docs/write-a-method.md explains it.

fedsweep check-method examples/plugin/look_ahead.py:DPLookAhead
"""

from __future__ import annotations

import torch

from fedsweep.plugins import (
    ClientProgram,
    ClientRound,
    Event,
    Hyperparameter,
    Hypers,
    Method,
    Run,
    State,
    learning_rate,
)


class LookAhead(ClientProgram):
    """Release a second gradient, at the point that a step along the first one reaches."""

    name = "look ahead"
    hypers = ("look_ahead",)

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        first = self.noisy_gradient(client, theta, step=0)
        return self.noisy_gradient(client, theta - client.hypers["look_ahead"] * first, step=1)


class DPLookAhead(Method):
    name = "dp-look-ahead"
    title = "DP-LookAhead"
    paper = "an example in the documentation"
    hyperparameters = (
        learning_rate(0.5),
        Hyperparameter("look_ahead", 0.1, "length of the look-ahead step", low=0),
    )

    def program(self, hypers: Hypers, level: str = "record") -> ClientProgram:
        return LookAhead()

    def releases(self, run: Run) -> tuple[Event, ...]:
        return (Event("gradient", 2 * run.rounds, run.privacy.sensitivity, aggregated=False),)

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        return theta - hypers["learning_rate"] * G

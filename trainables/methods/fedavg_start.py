"""Two-stage methods: rounds of FedAvg, then rounds that refine the result. Each stage has its share of the budget."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

from trainables.errors import UserError
from trainables.lazy import torch
from trainables.methods.base import ClientRound, Hyperparameter, Method, Run
from trainables.methods.local_steps import LOCAL_STEPS, LocalSteps, client_learning_rate
from trainables.privacy.plan import Event


@dataclass(frozen=True)
class FedAvgStart(LocalSteps):
    """Local steps in the first `start_rounds` rounds, `refine` in the later ones."""

    start_rounds: int

    @property
    def name(self) -> str:
        return f"{self.start_rounds} rounds of {self.steps} local steps, then {self.refinement}"

    @property
    @abstractmethod
    def refinement(self) -> str:
        """Names the release of the second stage, as part of the program's name."""

    @abstractmethod
    def refine(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        """The client's release in a round of the second stage."""

    def gradient(self, client: ClientRound, y: torch.Tensor, step: int) -> torch.Tensor:
        return self.noisy_gradient(client, y, step, purpose="start")

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        return super().round(client, theta) if client.t <= self.start_rounds else self.refine(client, theta)


def share(name: str, default: float, description: str) -> Hyperparameter:
    """A share of the budget (of mu squared)."""
    return Hyperparameter(name, default, description, low=0, high=1, open_low=True, open_high=True)


class FedAvgStartMethod(Method):
    start_hyperparameters = (
        Hyperparameter(
            "fedavg_rounds", 1, "rounds of FedAvg before the second stage", low=1, integer=True, shared=True
        ),
        replace(LOCAL_STEPS, default=50, description="K, local steps of a client in a round of FedAvg"),
        client_learning_rate(1.0),
        share("fedavg_share", 0.5, "share of the budget (of mu squared) for the rounds of FedAvg"),
    )

    def start_event(self, run: Run) -> Event:
        """Every local step is a release; secure aggregation hides it only if it is the round's only step."""
        rounds, steps = int(run.hypers["fedavg_rounds"]), int(run.hypers["local_steps"])
        if rounds >= run.rounds:
            raise UserError(f"fedavg_rounds = {rounds} leaves none of {run.rounds} rounds for the second stage")
        share = float(run.hypers["fedavg_share"])
        return Event("start", rounds * steps, run.privacy.sensitivity, share=share, aggregated=steps == 1)

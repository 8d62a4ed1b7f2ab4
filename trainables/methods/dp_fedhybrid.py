"""DP-FedHybrid: rounds of DP-FedAvg, then DP-FedSGD from there.

first `fedavg_rounds` rounds:  theta <- theta + mean update after K local steps
later rounds:                  theta <- theta - eta G,  G = mean noisy gradient
"""

from __future__ import annotations

from dataclasses import dataclass

from trainables.lazy import torch
from trainables.methods.base import ClientProgram, ClientRound, Hypers, Run, State, learning_rate
from trainables.methods.fedavg_start import FedAvgStart, FedAvgStartMethod
from trainables.privacy.plan import Event, Level


@dataclass(frozen=True)
class FedAvgThenGradient(FedAvgStart):
    refinement = "noisy gradient"

    def refine(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        return self.noisy_gradient(client, theta)


class DPFedHybrid(FedAvgStartMethod):
    name = "dp-fedhybrid"
    title = "DP-FedHybrid"
    paper = "Auddy, Paul and Peng 2026, arXiv:2605.18656"
    hyperparameters = (*FedAvgStartMethod.start_hyperparameters, learning_rate(1.0))

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        return FedAvgThenGradient(int(hypers["local_steps"]), int(hypers["fedavg_rounds"]))

    def releases(self, run: Run) -> tuple[Event, ...]:
        start = self.start_event(run)
        rounds = run.rounds - int(run.hypers["fedavg_rounds"])
        return (start, Event("gradient", rounds, run.privacy.sensitivity, share=1 - start.share))

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        return theta + G if t <= hypers["fedavg_rounds"] else theta - hypers["learning_rate"] * G

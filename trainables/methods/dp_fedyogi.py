"""DP-FedYogi: DP-FedAdam with another second moment, which changes by at most (1 - beta2) G^2 a round.

v <- v - (1 - beta2) sign(v - G^2) G^2,  starting from v = tau^2
"""

from __future__ import annotations

from trainables.lazy import torch
from trainables.methods.base import Hypers, State
from trainables.methods.dp_fedadam import DPFedAdam


class DPFedYogi(DPFedAdam):
    name = "dp-fedyogi"
    title = "DP-FedYogi"

    def initial_state(self, theta: torch.Tensor, hypers: Hypers) -> State:
        return {**super().initial_state(theta, hypers), "v": torch.zeros_like(theta) + hypers["tau"].square()}

    def second_moment(self, v: torch.Tensor, G: torch.Tensor, beta2: torch.Tensor) -> torch.Tensor:
        squared = G.square()
        return v - (1 - beta2) * torch.sign(v - squared) * squared

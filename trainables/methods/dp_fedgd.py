"""DP-FedGD: gradient descent on the mean of the clients' noisy gradients.

    theta <- theta - eta G

G is the mean over clients of u_i = (sum of clipped gradients + noise) / |D_i|, eta the learning rate. At user level,
u_i is the client's mean gradient, clipped as a whole, plus noise.
"""

from __future__ import annotations

from trainables.lazy import torch
from trainables.methods.base import Hypers, Method, State, learning_rate
from trainables.privacy.plan import LEVELS


class DPFedGD(Method):
    name = "dp-fedgd"
    title = "DP-FedGD"
    paper = "McMahan et al. 2017; Krouka et al. 2025 (baseline of DP-FedSOFIM, arXiv:2601.09166)"
    levels = LEVELS
    hyperparameters = (learning_rate(0.1),)

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        return theta - hypers["learning_rate"] * G

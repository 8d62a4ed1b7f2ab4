"""DP-FedAdam: Adam on the server, with the mean noisy gradient G in place of the gradient.

1. m <- beta1 m + (1 - beta1) G
2. v <- beta2 v + (1 - beta2) G^2
3. theta <- theta - eta m_hat / (sqrt(v_hat) + tau),  m_hat = m / (1 - beta1^t),  v_hat = v / (1 - beta2^t)
"""

from __future__ import annotations

from trainables.lazy import torch
from trainables.methods.base import Hyperparameter, Hypers, Method, State, initial_power, learning_rate
from trainables.privacy.plan import LEVELS


class DPFedAdam(Method):
    name = "dp-fedadam"
    title = "DP-FedAdam"
    paper = "Reddi et al. 2020 (baseline of DP-FedSOFIM, arXiv:2601.09166)"
    levels = LEVELS
    records_step = True
    hyperparameters = (
        learning_rate(0.02),
        Hyperparameter("beta1", 0.9, "decay of the first moment", low=0, high=1, open_high=True),
        Hyperparameter("beta2", 0.999, "decay of the second moment", low=0, high=1, open_high=True),
        Hyperparameter("tau", 1e-2, "added to the root of the second moment", low=0, open_low=True),
    )

    def initial_state(self, theta: torch.Tensor, hypers: Hypers) -> State:
        moments = {"m": torch.zeros_like(theta), "v": torch.zeros_like(theta)}
        return {**moments, "beta1_t": initial_power(theta), "beta2_t": initial_power(theta)}

    def second_moment(self, v: torch.Tensor, G: torch.Tensor, beta2: torch.Tensor) -> torch.Tensor:
        return beta2 * v + (1 - beta2) * G.square()

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        beta1, beta2 = hypers["beta1"], hypers["beta2"]
        state["m"] = beta1 * state["m"] + (1 - beta1) * G
        state["v"] = self.second_moment(state["v"], G, beta2)
        state["beta1_t"], state["beta2_t"] = state["beta1_t"] * beta1, state["beta2_t"] * beta2
        m_hat = state["m"] / (1 - state["beta1_t"]).to(theta)
        v_hat = state["v"] / (1 - state["beta2_t"]).to(theta)
        return theta - hypers["learning_rate"] * m_hat / (v_hat.sqrt() + hypers["tau"])

"""DP-FedSOFIM: the server preconditions with the inverse of a rank-one proxy of the Fisher matrix, F = rho I + M M^T.

    1. M <- beta M + (1 - beta) G                             momentum, optionally divided by 1 - beta^t
    2. d = F^-1 M = M / (rho + ||M||^2)                       direction: momentum (default)
       d = F^-1 G = (G - M (M.G) / (rho + ||M||^2)) / rho     direction: gradient
    3. theta <- theta - eta (d + lambda theta)                lambda: weight decay

The paper's text uses `direction: gradient`, the authors' released program `direction: momentum`. With the paper's tuned
hyperparameters only the second reproduces the paper's numbers; the first diverges (docs/methods.md).
"""

from __future__ import annotations

from trainables.lazy import torch
from trainables.methods.base import AUTO, Hyperparameter, Hypers, Method, State, initial_power, learning_rate
from trainables.privacy.plan import LEVELS, PrivacySettings
from trainables.spec import HyperValue


class DPFedSOFIM(Method):
    name = "dp-fedsofim"
    title = "DP-FedSOFIM"
    paper = "Nair et al. 2026, arXiv:2601.09166"
    levels = LEVELS
    second_order = True
    records_step = True
    hyperparameters = (
        learning_rate(0.8),
        Hyperparameter("rho", 0.5, "regularisation of the Fisher proxy", low=0, open_low=True),
        Hyperparameter("beta", 0.9, "decay of the momentum M", low=0, high=1, open_high=True),
        Hyperparameter("weight_decay", 5e-4, "lambda; 0 in the paper's text, 5e-4 in its program", low=0),
        Hyperparameter(
            "direction",
            "momentum",
            "the vector to precondition: momentum (released program) or gradient (published text)",
            choices=("momentum", "gradient"),
        ),
        Hyperparameter(
            "bias_correction", AUTO, "divide M by 1 - beta^t; auto: if epsilon <= 1", boolean=True, auto=True
        ),
        Hyperparameter(
            "warmup_rounds",
            AUTO,
            "first rounds, which step along M without preconditioning; auto: 10 if epsilon <= 0.5, else 0",
            low=0,
            integer=True,
            auto=True,
        ),
        Hyperparameter(
            "blend_rounds",
            0,
            "rounds over which preconditioning is blended in linearly; 0: no blending",
            low=0,
            integer=True,
        ),
        Hyperparameter(
            "variant",
            "full",
            "ablations: ema_only steps along M, grad_only along G",
            choices=("full", "ema_only", "grad_only"),
        ),
    )

    def resolve(self, hypers: dict[str, HyperValue], privacy: PrivacySettings) -> dict[str, HyperValue]:
        automatic: dict[str, HyperValue] = {
            "bias_correction": privacy.epsilon <= 1,
            "warmup_rounds": 10 if privacy.epsilon <= 0.5 else 0,
        }
        return {name: automatic[name] if value == AUTO else value for name, value in hypers.items()}

    def initial_state(self, theta: torch.Tensor, hypers: Hypers) -> State:
        return {"M": torch.zeros_like(theta), "beta_t": initial_power(theta), "t": theta.new_zeros(len(theta), 1)}

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        beta = hypers["beta"]
        state["M"] = beta * state["M"] + (1 - beta) * G
        state["beta_t"], state["t"] = state["beta_t"] * beta, state["t"] + 1
        M = torch.where(hypers["bias_correction"] > 0, state["M"] / (1 - state["beta_t"]).to(theta), state["M"])
        direction = {"full": self.preconditioned, "ema_only": lambda *_: M, "grad_only": lambda *_: G}
        step = direction[hypers["variant"]](state["t"], M, G, hypers) + hypers["weight_decay"] * theta
        return theta - hypers["learning_rate"] * step

    def preconditioned(self, t: torch.Tensor, M: torch.Tensor, G: torch.Tensor, hypers: Hypers) -> torch.Tensor:
        """F^-1 M or F^-1 G, with warm-up and blending; `t` is (lanes, 1)."""
        rho, squared = hypers["rho"], (M * M).sum(1, keepdim=True)
        if hypers["direction"] == "momentum":  # for M, the general form below would lose digits by cancellation
            isotropic, preconditioned = M / rho, M / (rho + squared)
        else:
            isotropic = G / rho
            along = (M * G).sum(1, keepdim=True)
            preconditioned = isotropic - M * (along / (rho * rho + rho * squared))
        blended = (hypers["blend_rounds"].clamp(min=1).reciprocal() * t).clamp(max=1)
        direction = isotropic + blended * (preconditioned - isotropic)
        return torch.where(hypers["warmup_rounds"] >= t, M, direction)

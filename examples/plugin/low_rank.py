"""A low-rank head: the scores of a row x are B A x, where A has few rows. `model: low-rank:8` has rank 8."""

from __future__ import annotations

import torch

from fedsweep.plugins import Head, UserError, Weights


class LowRank(Head):
    name = "low-rank"
    linear_in_features = True

    def __init__(self, parameter: str, features: int, classes: int) -> None:
        super().__init__(parameter, features, classes)
        if not parameter.isdecimal() or int(parameter) < 1:
            raise UserError(f"model = 'low-rank:{parameter}': the rank is a whole number from 1 on")
        self.rank = int(parameter)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"down": (self.features + 1, self.rank), "up": (self.rank, self.classes), "bias": (self.classes,)}

    def forward(self, weights: Weights, x: torch.Tensor) -> torch.Tensor:
        return x @ weights["down"] @ weights["up"] + weights["bias"]

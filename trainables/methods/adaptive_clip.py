"""Users whose clip follows their own updates: the private median of the updates' norms (Andrew et al. 2021).

Beside its update a user releases whether it was clipped, in one vector with one noise: (update clipped to C_t, then
kappa C_t if it was longer, else 0). That vector is never longer than sqrt(1 + kappa^2) C_t, so a round is one Gaussian
release, and its price holds the count's. The noise is the plan's, made for the first clip C_1, times C_t / C_1: C_t
follows from what was released before, so everybody knows it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainables.lazy import torch
from trainables.methods.base import ClientRound, State, clip_norm
from trainables.methods.local_steps import LocalSteps, UserLocalSteps
from trainables.models import Model

COUNT_SHARE = 0.1
"""The part of a release's squared length, and so of mu squared, that is for the count."""
KAPPA = math.sqrt(COUNT_SHARE / (1 - COUNT_SHARE))
LENGTH = math.sqrt(1 + KAPPA**2)
"""How long a release can be, in clips."""
QUANTILE, RATE = 0.5, 0.2
"""Which norm the clip goes to, and how fast, as in the paper: C <- C exp(-RATE (share of unclipped - QUANTILE))."""


@dataclass(frozen=True)
class AdaptiveLocalSteps(UserLocalSteps):
    """A user's update, and whether it was clipped."""

    adapts_clip = True

    @property
    def name(self) -> str:
        return f"{super().name}, adaptive clip"

    def release_size(self, model: Model) -> int:
        return model.dimension + 1

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        update, clip = LocalSteps.round(self, client, theta), client.broadcast["clip"]
        longer = torch.linalg.vector_norm(update, dim=-1, keepdim=True) > clip
        both = torch.cat([clip_norm(update, clip), longer * (KAPPA * clip)], dim=-1)
        return client.noised_update(both, clip / client.clip)


def taken_apart(G: torch.Tensor, state: State) -> torch.Tensor:
    """The mean update; the clip in `state` is then the next round's. Noise may carry the count beyond what there is."""
    unclipped = (1 - G[:, -1:] / (KAPPA * state["clip"])).clamp(0, 1)
    state["clip"] = state["clip"] * torch.exp(-RATE * (unclipped - QUANTILE))
    return G[:, :-1]

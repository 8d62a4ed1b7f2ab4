"""Adaptive clipping at user level: the clip follows the private median of the updates' norms (Andrew et al. 2021).

    client:  release = (clip(update, C_t), kappa C_t b) + noise C_t / C_1,  b = 1 if ||update|| > C_t, else 0
    server:  C_{t+1} = C_t exp(-0.2 (share of unclipped updates - 0.5))

Update and b are one Gaussian release of norm at most sqrt(1 + kappa^2) C_t, so the account covers b too. The plan
calibrates the noise for C_1. Scaling it by C_t / C_1 is safe because C_t is public: it follows from earlier releases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainables.lazy import torch
from trainables.methods.base import ClientRound, clip_norm
from trainables.methods.local_steps import LocalSteps, UserLocalSteps
from trainables.models import Model

COUNT_SHARE = 0.1
"""The share of mu squared that is spent on b."""
KAPPA = math.sqrt(COUNT_SHARE / (1 - COUNT_SHARE))
RELEASE_NORM = math.sqrt(1 + KAPPA**2)
"""The largest norm of a release, in units of the clip."""
QUANTILE, RATE = 0.5, 0.2
"""Target quantile of the norms, and step size of the clip, as in the paper."""


@dataclass(frozen=True)
class AdaptiveLocalSteps(UserLocalSteps):
    """A user's clipped update, and whether it was clipped."""

    adapts_clip = True

    @property
    def name(self) -> str:
        return f"{super().name}, adaptive clip"

    def release_size(self, model: Model) -> int:
        return model.dimension + 1

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        update, clip = LocalSteps.round(self, client, theta), client.broadcast["clip"]
        longer = torch.linalg.vector_norm(update, dim=-1, keepdim=True, dtype=torch.float64) > clip
        release = torch.cat([clip_norm(update, clip), longer * (KAPPA * clip)], dim=-1)
        return client.noised_update(release, clip / client.clip)


def split_release(G: torch.Tensor, clip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean update and the next round's clip. Noise can move the share of unclipped updates out of [0, 1]."""
    unclipped = (1 - G[:, -1:] / (KAPPA * clip)).clamp(0, 1)
    return G[:, :-1], clip * torch.exp(-RATE * (unclipped - QUANTILE))

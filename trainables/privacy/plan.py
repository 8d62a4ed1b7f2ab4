"""Mechanism and account in one frozen object: what noise is added, and what that noise really buys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from trainables.errors import UserError, in_range, one_of
from trainables.privacy.gaussian import epsilon_of, mu_of

Release = Literal["local", "secure-aggregation"]
Adjacency = Literal["replace-one", "add-remove"]
RELEASES: tuple[Release, ...] = ("local", "secure-aggregation")
ADJACENCIES: tuple[Adjacency, ...] = ("replace-one", "add-remove")


class PrivacySettings(BaseModel):
    """The claim: what a run promises. An infinite epsilon is the non-private arm."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    epsilon: float
    delta: float = 1e-5
    clip: float = 10.0
    release: Release = "local"
    adjacency: Adjacency = "replace-one"

    def check(self) -> PrivacySettings:
        in_range(0, math.inf, open_low=True, epsilon=self.epsilon)
        in_range(0, 1, open_low=True, open_high=True, delta=self.delta)
        in_range(0, math.inf, open_low=True, open_high=True, clip=self.clip)
        one_of(RELEASES, release=self.release)
        one_of(ADJACENCIES, adjacency=self.adjacency)
        return self

    @property
    def record_sensitivity(self) -> float:
        """How far one record moves a client's sum of clipped gradients, in l2 norm."""
        return self.clip * (2.0 if self.adjacency == "replace-one" else 1.0)


@dataclass(frozen=True)
class Event:
    """`count` Gaussian releases of one purpose by every client in the course of a run."""

    purpose: str
    count: int
    sensitivity: float
    """How far one record moves the sum that is released, in l2 norm."""
    share: float = 1.0
    """The part of the budget (of mu squared) that all releases of this purpose may spend together."""
    aggregated: bool = True
    """Whether secure aggregation hides a single client's release. Not so for local steps after the first: they follow
    the client's own noisy weights, which the clients' noises together do not cover."""
    noise_factor: float = 1.0
    """The noise that is added over the noise that would be right. Not 1 only where a released program got it wrong."""


@dataclass(frozen=True)
class PrivacyPlan:
    """What every client adds to its own sums, by purpose, and what that costs under either release model.

    A client releases (sum + noise) / |D_i|. Under `local` its own release is seen; under `secure-aggregation` only the
    sum of all releases is. A record of the smallest client weighs most in that sum, so with unequal sizes the account
    follows that client: `concentration` is max_i w_i / ||w||, w_i = 1/|D_i|, which is 1/sqrt(n) for equal sizes.
    """

    settings: PrivacySettings
    clients: int
    concentration: float
    events: tuple[Event, ...]
    noise_std: Mapping[str, float]
    """Standard deviation of the noise each client adds to its sum, by purpose. Zero in the non-private arm."""

    @classmethod
    def calibrate(cls, settings: PrivacySettings, events: Sequence[Event], *, sizes: Sequence[int]) -> PrivacyPlan:
        """The least noise for which the claim holds, rounded up to what float32 can hold."""
        settings.check()
        if not math.isclose(sum(e.share for e in events), 1.0):
            raise UserError(f"shares of the privacy budget add up to {sum(e.share for e in events):g}, not to 1")
        concentration = _concentration(sizes)
        mu = mu_of(settings.epsilon, settings.delta)
        noise_std = {}
        for e in events:
            seen = _seen(e, settings.release, concentration)
            right = 0.0 if math.isinf(mu) else e.sensitivity * seen * math.sqrt(e.count / e.share) / mu
            noise_std[e.purpose] = _float32_up(right * e.noise_factor)
            if math.isinf(noise_std[e.purpose]):
                raise UserError(
                    f"clip = {settings.clip:g} needs more noise than float32 holds, at epsilon = {settings.epsilon:g}"
                )
        return cls(settings, len(sizes), concentration, tuple(events), noise_std)

    def mu(self, release: Release) -> float:
        """The mu-GDP of everything that is released, as one who sees `release` sees it."""
        total = 0.0
        for event in self.events:
            std = self.noise_std[event.purpose]
            if std == 0:
                return math.inf
            total += event.count * (event.sensitivity * _seen(event, release, self.concentration) / std) ** 2
        return math.sqrt(total)

    @cached_property
    def bought(self) -> dict[Release, float]:
        """The eps that the noise really added buys, under each release model."""
        return {release: epsilon_of(self.mu(release), self.settings.delta) for release in RELEASES}

    @property
    def noise_multiplier(self) -> float:
        """sigma_g of the papers, for what is released first: a client's noise has variance (clip * sigma_g)^2 / n."""
        return self.noise_std[self.events[0].purpose] * math.sqrt(self.clients) / self.settings.clip


def _seen(event: Event, release: Release, concentration: float) -> float:
    """How much of one client's move shows against the noise, as one who sees `release` sees it."""
    return concentration if release == "secure-aggregation" and event.aggregated else 1.0


def _concentration(sizes: Sequence[int]) -> float:
    weights = 1.0 / np.asarray(sizes, dtype=np.float64)
    return float(weights.max() / np.linalg.norm(weights))


def _float32_up(value: float) -> float:
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    return float(np.nextafter(rounded, np.float32(np.inf)) if float(rounded) < value else rounded)

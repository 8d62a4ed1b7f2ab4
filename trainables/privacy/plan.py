"""Mechanism and account in one frozen object: what noise is added, and what that noise really buys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from pydantic import BaseModel, ConfigDict, field_validator

from trainables.choices import ADJACENCIES, CLIPPINGS, LEVELS, RELEASES, Adjacency, Clipping, Level, Release
from trainables.errors import UserError, in_range, one_of
from trainables.privacy.gaussian import epsilon_of, mu_of
from trainables.privacy.sampled import LEAST_SAMPLED_DELTA, Sampled, scaled_to
from trainables.privacy.sampled import epsilon_of as epsilon_of_samples

FAR_BEYOND = 1e4  # an eps of no privacy at all


def known_adjacency(name: object) -> object:
    """A record that is added or removed changes |D_i|, which every release is divided by: its noise would tell."""
    if name == "add-remove":
        raise ValueError(
            "adjacency = 'add-remove' cannot be kept where releases are divided by |D_i|; zero-out can: "
            "a record is there or counts as nothing, and |D_i| is a public constant"
        )
    return name


class PrivacySettings(BaseModel):
    """The claim: what a run promises. An infinite epsilon is the non-private arm."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    epsilon: float
    delta: float = 1e-5
    clip: float = 10.0
    release: Release = "local"
    adjacency: Adjacency = "replace-one"
    """What neighbours differ in: a record is exchanged, or one counts as nothing (its sum is 0) while |D_i| stays."""
    level: Level = "record"
    """Whose privacy: one record's, or that of a client with all it holds. `clip` bounds what such a one contributes."""
    clipping: Clipping = "plain"
    """How gradients are brought to `clip`: longer ones are shortened; or all become about as long, which costs the
    same, for nothing is longer then either. Or users' updates are shortened, and `clip` is only the first round's:
    it follows their median norm, which is released too."""
    secret_participation: float = 1.0
    """The probability with which a user takes part in a round, drawn afresh each time and known to nobody else."""

    _known = field_validator("adjacency", mode="before")(known_adjacency)

    def check(self) -> PrivacySettings:
        in_range(0, math.inf, "(]", epsilon=self.epsilon)
        in_range(0, 1, "()", delta=self.delta)
        in_range(0, math.inf, "()", clip=self.clip)
        one_of(RELEASES, release=self.release)
        one_of(ADJACENCIES, adjacency=self.adjacency)
        one_of(LEVELS, level=self.level)
        one_of(CLIPPINGS, clipping=self.clipping)
        in_range(0, 1, "(]", secret_participation=self.secret_participation)
        return self

    @property
    def adjacency_factor(self) -> float:
        """How often its bound a record (or a user) can move a sum: replacing one takes it away and adds another."""
        return 2.0 if self.adjacency == "replace-one" else 1.0

    @property
    def sensitivity(self) -> float:
        """How far one record moves a client's sum of clipped gradients, or one user its clipped update, in l2 norm."""
        return self.clip * self.adjacency_factor


def delta_note(settings: PrivacySettings, sizes: Sequence[int]) -> str | None:
    """What to say where delta allows too much: a whole record (or user) published, now and then."""
    if math.isinf(settings.epsilon):
        return None
    return large_delta(settings.delta, settings.level, sum(sizes) if settings.level == "record" else len(sizes))


def large_delta(delta: float, level: Level, count: int) -> str | None:
    """The same of so many records, or users."""
    if delta <= 1 / count:
        return None
    what = "records" if level == "record" else "users"
    return f"delta = {delta:g} is above 1/N = {1 / count:.2g}, of {count} {what}: too much for a claim of privacy"


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
    """Whether secure aggregation hides a single client's release. Not so where a release follows noise that only its
    client knows, as local steps after the first do: later noise of the sum then tells earlier noise."""
    sampling: float = 1.0
    """The probability with which a record (or a user) is in one release, drawn afresh and in secret each time."""
    hidden_by_sum: bool = False
    """Whether only a sum hides who takes part: one who sees every client's release gets no credit for the secret."""
    equal_weights: bool = False
    """Whether all clients' noise weighs the same in the sum of releases, however large they are."""
    calibrated_for: float | None = None
    """The sensitivity that the noise is made for, where a released program got it wrong; else it is the true one."""


@dataclass(frozen=True)
class PrivacyPlan:
    """What every client adds to its own sums, by purpose, and what that costs under either release model.

    At record level a client releases (sum + noise) / |D_i|, at user level update + noise. Under `local` its own release
    is seen; under `secure-aggregation` only the sum of all releases is, with equal weights or weighted by |D_i|. With
    equal ones a record of the smallest client weighs most in that sum, so with unequal sizes the account follows that
    client; weighted by size all records weigh the same, but a large client as a user weighs most.
    """

    settings: PrivacySettings
    weights: tuple[float, ...]
    """Every client's factor in the sum of sums: 1/|D_i|, or 1 at user level; times |D_i| where they are so weighted."""
    events: tuple[Event, ...]
    noise_std: Mapping[str, float]
    """Standard deviation of the noise each client adds to its sum, by purpose. Zero in the non-private arm."""

    @classmethod
    def calibrate(
        cls, settings: PrivacySettings, events: Sequence[Event], *, sizes: Sequence[int], by_size: bool = False
    ) -> PrivacyPlan:
        """The least noise for which the claim holds, rounded up to what float32 can hold. `by_size`: releases are
        weighted by |D_i|."""
        settings.check()
        if all(e.calibrated_for is None for e in events) and not math.isclose(sum(e.share for e in events), 1.0):
            raise UserError(f"shares of the privacy budget add up to {sum(e.share for e in events):g}, not to 1")
        of_sums = [1.0 / size if settings.level == "record" else 1.0 for size in sizes]
        weights = tuple(w * size if by_size else w for w, size in zip(of_sums, sizes, strict=True))
        mu = mu_of(settings.epsilon, settings.delta)
        right = {}
        for e in events:
            seen = _seen(e, settings.release, weights)
            moves = e.sensitivity if e.calibrated_for is None else e.calibrated_for
            right[e.purpose] = 0.0 if math.isinf(mu) else moves * seen * math.sqrt(e.count / e.share) / mu
        if any(e.sampling < 1 for e in events) and not math.isinf(mu):
            in_range(LEAST_SAMPLED_DELTA, 1, **{"delta of a method that samples": settings.delta})
            # what would be right without sampling is the start; the proportions stay
            believed = [
                replace(e, sensitivity=e.sensitivity if e.calibrated_for is None else e.calibrated_for) for e in events
            ]
            sampled = _sampled(believed, right, settings, settings.release, weights)
            scale = scaled_to(settings.epsilon, sampled, settings.adjacency, settings.delta)
            right = {purpose: std * scale for purpose, std in right.items()}
        noise_std = {purpose: _float32_up(std) for purpose, std in right.items()}
        if math.inf in noise_std.values():
            raise UserError(
                f"clip = {settings.clip:g} needs more noise than float32 holds, at epsilon = {settings.epsilon:g}"
            )
        return cls(settings, weights, tuple(events), noise_std)

    @property
    def clients(self) -> int:
        return len(self.weights)

    def mu(self, release: Release) -> float:
        """The mu-GDP of everything that is released, as one who sees `release` sees it and who knows the samples."""
        total = 0.0
        for event in self.events:
            std = self.noise_std[event.purpose]
            if std == 0:
                return math.inf
            total += event.count * (event.sensitivity * _seen(event, release, self.weights) / std) ** 2
        return math.sqrt(total)

    @cached_property
    def actual_epsilon(self) -> dict[Release, float]:
        """The eps that the noise really added buys, under each release model."""
        if not any(event.sampling < 1 for event in self.events):
            return self.unsampled
        return {
            release: known
            if known > FAR_BEYOND  # no distribution is that wide, and samples can only make it less
            else epsilon_of_samples(
                _sampled(self.events, self.noise_std, self.settings, release, self.weights),
                self.settings.adjacency,
                self.settings.delta,
            )
            for release, known in self.unsampled.items()
        }

    @cached_property
    def unsampled(self) -> dict[Release, float]:
        """The same for one who knows which records were in each sample: no credit for sampling."""
        return {release: epsilon_of(self.mu(release), self.settings.delta) for release in RELEASES}

    @property
    def noise_multiplier(self) -> float:
        """sigma_g of the papers, for what is released first: a client's noise has variance (clip * sigma_g)^2 / n."""
        return self.noise_std[self.events[0].purpose] * math.sqrt(self.clients) / self.settings.clip


def _sampled(
    events: Sequence[Event],
    noise_std: Mapping[str, float],
    settings: PrivacySettings,
    release: Release,
    weights: Sequence[float],
) -> tuple[Sampled, ...]:
    return tuple(
        Sampled(
            e.count,
            noise_std[e.purpose] * settings.adjacency_factor / (e.sensitivity * _seen(e, release, weights)),
            1.0 if e.hidden_by_sum and release == "local" else e.sampling,
        )
        for e in events
    )


def _seen(event: Event, release: Release, weights: Sequence[float]) -> float:
    """How much of one client's move shows against the noise, as one who sees `release` sees it: in a sum, at most
    max_i w_i / ||w||, which is 1/sqrt(n) for equal weights."""
    if release == "local" or not event.aggregated:
        return 1.0
    squares = np.square(np.asarray([1.0] * len(weights) if event.equal_weights else weights, dtype=np.float64))
    return float(np.sqrt(squares.max() / squares.sum()))


def _float32_up(value: float) -> float:
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    return float(np.nextafter(rounded, np.float32(np.inf)) if float(rounded) < value else rounded)

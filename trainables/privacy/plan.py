"""The privacy settings of a run, and the plan that holds mechanism and account in one immutable object.

A run is a list of `Event`s. Event e is `count_e` Gaussian releases of l2 sensitivity s_e with noise of standard
deviation sigma_e. Together they are mu-GDP with

    mu^2 = sum over e of count_e (v_e s_e / sigma_e)^2

where v_e <= 1 is the visibility of one client under the release model: 1 under `local`, max_i w_i / ||w|| under
`secure-aggregation`, with w_i the client's weight in the sum. `PrivacyPlan.calibrate` chooses sigma_e such that mu^2
is the mu^2 of the claimed (eps, delta), split by the events' shares. The actual eps is computed from the sigma_e that
the clients use. Releases over secret samples are accounted numerically (`sampled`)."""

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

MAX_SAMPLED_EPSILON = 1e4  # above this eps there is no privacy, and sampling is not accounted for


def known_adjacency(name: object) -> object:
    """Refuse add-remove: adding a record changes |D_i|, which divides every release, so the scale of the noise would
    reveal it."""
    if name == "add-remove":
        raise ValueError(
            "adjacency = 'add-remove' does not hold for releases divided by |D_i|; zero-out does: "
            "a record is present or contributes 0, and |D_i| is a public constant"
        )
    return name


class PrivacySettings(BaseModel):
    """The claim of a run: (epsilon, delta)-DP, its unit of privacy, and what the adversary sees. An infinite epsilon
    means no privacy."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    epsilon: float
    delta: float = 1e-5
    clip: float = 10.0
    release: Release = "local"
    adjacency: Adjacency = "replace-one"
    """Neighbouring data sets: one record is replaced, or one contributes 0 while |D_i| stays the same."""
    level: Level = "record"
    """The unit of privacy: a record, or a user (a client with all its records). `clip` bounds its contribution."""
    clipping: Clipping = "plain"
    """plain: contributions longer than `clip` are scaled down to it. automatic: all are scaled to about `clip`, at the
    same privacy cost. adaptive (user level): `clip` is used in round 1, then follows the private median norm."""
    secret_participation: float = 1.0
    """Probability that a user takes part in a round. Every user decides secretly and independently in every round."""

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
        """Largest change of a sum by one record (or user), in units of its bound: 2 if replaced, 1 if zeroed."""
        return 2.0 if self.adjacency == "replace-one" else 1.0

    @property
    def sensitivity(self) -> float:
        """l2 sensitivity of a client's sum of clipped gradients to a record, or of a clipped update to its user."""
        return self.clip * self.adjacency_factor


def delta_note(settings: PrivacySettings, sizes: Sequence[int]) -> str | None:
    """A warning if delta > 1/N, which would allow publishing a random record (or user); else None."""
    if math.isinf(settings.epsilon):
        return None
    return large_delta(settings.delta, settings.level, sum(sizes) if settings.level == "record" else len(sizes))


def large_delta(delta: float, level: Level, count: int) -> str | None:
    """`delta_note`, given the number of records or users."""
    if delta <= 1 / count:
        return None
    what = "records" if level == "record" else "users"
    return f"delta = {delta:g} is above 1/N = {1 / count:.2g}, with {count} {what}: too large for a privacy claim"


@dataclass(frozen=True)
class Event:
    """`count` Gaussian releases of one purpose by every client during a run."""

    purpose: str
    """What is released, such as `gradient`; each purpose has independent noise."""
    count: int
    """Releases per client and run."""
    sensitivity: float
    """l2 sensitivity of the released sum to one record (or user)."""
    share: float = 1.0
    """The share of the budget (of mu squared) for all releases of this purpose together."""
    aggregated: bool = True
    """Whether the account counts the other clients' noise under secure aggregation. Set it to False if a release
    depends on the client's own earlier noise, as local steps after the first do: later sums then reveal earlier
    noise."""
    sampling: float = 1.0
    """Probability that a record (or user) is in one release, drawn secretly and independently for every release."""
    hidden_by_sum: bool = False
    """Whether participation is secret only in a sum of releases. The account then ignores `sampling` under local
    release."""
    equal_weights: bool = False
    """Whether all clients have weight 1 in the sum of releases, regardless of their size."""
    calibrated_for: float | None = None
    """The sensitivity that the noise is calibrated for. Differs from `sensitivity` only for published programs that use
    a wrong one; None: `sensitivity`."""


@dataclass(frozen=True)
class PrivacyPlan:
    """The noise that every client adds, by purpose, and its privacy cost under both release models.

    A client releases (sum + noise) / |D_i| at record level, update + noise at user level. Under `local` the adversary
    sees every release; under `secure-aggregation` only their sum, with equal weights or weighted by |D_i|. The account
    holds for the client with the largest w_i, whose release is hidden least. At record level, this is the smallest
    client if clients have equal weights; if they are weighted by |D_i|, all w_i are equal. At user level, all w_i are
    equal if clients have equal weights; if they are weighted by |D_i|, it is the largest client.
    """

    settings: PrivacySettings
    weights: tuple[float, ...]
    """w_i, client i's factor in the sum of releases: 1/|D_i| (user level: 1), times |D_i| if size-weighted."""
    events: tuple[Event, ...]
    noise_std: Mapping[str, float]
    """Standard deviation of the noise each client adds to its sum, by purpose; 0 if epsilon is infinite."""

    @classmethod
    def calibrate(
        cls, settings: PrivacySettings, events: Sequence[Event], *, sizes: Sequence[int], by_size: bool = False
    ) -> PrivacyPlan:
        """The least noise for which the claim holds, rounded up to float32; with secret samples, up to 0.1% more. An
        event with `calibrated_for` gets the noise for that sensitivity instead. `by_size`: weight releases by |D_i|."""
        settings.check()
        if all(e.calibrated_for is None for e in events) and not math.isclose(sum(e.share for e in events), 1.0):
            raise UserError(f"the shares of the privacy budget add up to {sum(e.share for e in events):g}, not to 1")
        unweighted = [1.0 / size if settings.level == "record" else 1.0 for size in sizes]
        weights = tuple(w * size if by_size else w for w, size in zip(unweighted, sizes, strict=True))
        mu = mu_of(settings.epsilon, settings.delta)
        stds = {}
        for e in events:
            visible = _visible(e, settings.release, weights)
            sensitivity = e.sensitivity if e.calibrated_for is None else e.calibrated_for
            stds[e.purpose] = 0.0 if math.isinf(mu) else sensitivity * visible * math.sqrt(e.count / e.share) / mu
        if any(e.sampling < 1 for e in events) and not math.isinf(mu):
            in_range(LEAST_SAMPLED_DELTA, 1, **{"delta of a method that samples": settings.delta})
            # scale the noise that suffices without sampling; its proportions between purposes stay
            assumed = [
                replace(e, sensitivity=e.sensitivity if e.calibrated_for is None else e.calibrated_for) for e in events
            ]
            sampled = _sampled(assumed, stds, settings, settings.release, weights)
            scale = scaled_to(settings.epsilon, sampled, settings.adjacency, settings.delta)
            stds = {purpose: std * scale for purpose, std in stds.items()}
        noise_std = {purpose: _float32_up(std) for purpose, std in stds.items()}
        if math.inf in noise_std.values():
            raise UserError(
                f"clip = {settings.clip:g} needs more noise than float32 holds, at epsilon = {settings.epsilon:g}"
            )
        return cls(settings, weights, tuple(events), noise_std)

    @property
    def clients(self) -> int:
        return len(self.weights)

    def mu(self, release: Release) -> float:
        """mu of all releases under the release model `release`, for an adversary who knows the samples."""
        return math.sqrt(sum(self.mu_of(event, release) ** 2 for event in self.events))

    def mu_of(self, event: Event, release: Release) -> float:
        """mu of the releases of one event."""
        std = self.noise_std[event.purpose]
        if std == 0:
            return math.inf
        return math.sqrt(event.count) * event.sensitivity * _visible(event, release, self.weights) / std

    @cached_property
    def actual_epsilon(self) -> dict[Release, float]:
        """The eps of the noise that clients add, under each release model."""
        if not any(event.sampling < 1 for event in self.events):
            return self.unsampled
        return {
            release: known
            if known > MAX_SAMPLED_EPSILON  # too wide for a discretised distribution; sampling can only lower it
            else epsilon_of_samples(
                _sampled(self.events, self.noise_std, self.settings, release, self.weights),
                self.settings.adjacency,
                self.settings.delta,
            )
            for release, known in self.unsampled.items()
        }

    @cached_property
    def unsampled(self) -> dict[Release, float]:
        """`actual_epsilon` against an adversary who knows which records (or users) were sampled."""
        return {release: epsilon_of(self.mu(release), self.settings.delta) for release in RELEASES}

    @property
    def mechanism(self) -> tuple[Sampled, ...]:
        """The releases as sampled Gaussian mechanisms, under the claimed release model."""
        return _sampled(self.events, self.noise_std, self.settings, self.settings.release, self.weights)

    @property
    def noise_multiplier(self) -> float:
        """sigma_g in the papers, of the first event: a client's noise has variance (clip sigma_g)^2 / n."""
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
            noise_std[e.purpose] * settings.adjacency_factor / (e.sensitivity * _visible(e, release, weights)),
            1.0 if e.hidden_by_sum and release == "local" else e.sampling,
        )
        for e in events
    )


def _visible(event: Event, release: Release, weights: Sequence[float]) -> float:
    """v_e: 1 if single releases are visible; in a sum max_i w_i / ||w||, which is 1/sqrt(n) for equal weights."""
    if release == "local" or not event.aggregated:
        return 1.0
    squares = np.square(np.asarray([1.0] * len(weights) if event.equal_weights else weights, dtype=np.float64))
    return float(np.sqrt(squares.max() / squares.sum()))


def _float32_up(value: float) -> float:
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    return float(np.nextafter(rounded, np.float32(np.inf)) if float(rounded) < value else rounded)

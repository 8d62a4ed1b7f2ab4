"""An empirical check of the account: how well can one who sees the releases tell whether a planted record is there?

The real engine runs many times on two neighbouring data sets; repetitions are lanes with seeds of their own. One half
of the runs teaches the adversary a statistic of everything released and a threshold, the other half counts its errors.
The statistic is a likelihood ratio: it looks at where the releases lie (linear) and at how far they scatter
(quadratic), for a noise scale can tell as much as a mean.
Clopper and Pearson's bounds on them bound from below what the mechanism leaks:

* mu: a mu-GDP mechanism allows no test with Phi^-1(1 - false positives) - Phi^-1(false negatives) > mu;
* eps, plainly: an (eps, delta)-DP one allows none with 1 - delta - false negatives > e^eps false positives, nor with
  the two exchanged. It is much weaker, but holds for any mechanism: where samples are secret, only this one does.

The data make the planted record as visible as can be. There are few rows; weights start at zero and hardly move (the
account knows no learning rate), so that it contributes its full bound every round while the other rows, in pairs of
opposite labels, cancel. What is not caught may still be there: every audit says how much it would have caught.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import beta, binom

from trainables import methods
from trainables.choices import Aggregate
from trainables.data.features import FeatureSet
from trainables.data.partition import Partition, PartitionSpec
from trainables.errors import UserError, in_range
from trainables.federation.client_host import HostReply, Sent
from trainables.federation.exact_sum import from_grid
from trainables.federation.pack import ClientWork, check
from trainables.federation.problem import Problem, Shipment, in_process
from trainables.federation.server import HostsHere, Server
from trainables.federation.trial_spec import DataSpec, Preprocess, ProblemSpec, TrialSpec
from trainables.models import Model
from trainables.privacy.gaussian import epsilon_of, mu_of
from trainables.privacy.plan import Level, PrivacyPlan, PrivacySettings
from trainables.spec import HyperValue

CONFIDENCE = 0.95
CLIP = 0.5  # what follows has longer gradients at zero weights: all are clipped
LEARNING_RATE = 1e-3
LANES = 1024  # of one pack

Row = tuple[float, int]
"""A feature and a label."""
PLANTED: Row = (6.0, 1)
OTHER: Row = (1.0, 0)
"""What replaces it: a gradient all but opposite, and other features for what is made of those alone."""
PAIR: tuple[Row, Row] = ((1.0, 0), (1.0, 1))
"""Rows whose gradients cancel."""


@dataclass(frozen=True)
class Power:
    """The smallest violation that an audit of this size catches with probability `CONFIDENCE`."""

    mu: float
    """What releases must tell, as mu."""
    epsilon: float
    """The same as eps, at the claimed delta."""
    noise: float
    """The part of the planned noise that would have told as much, given how visible the planted record was."""


@dataclass(frozen=True)
class Audit:
    """What was claimed and what was seen. A bound holds with `CONFIDENCE`."""

    trial: TrialSpec
    plan: PrivacyPlan
    repetitions: int
    mu: float
    """A lower bound, for a mechanism of Gaussian releases over all records."""
    epsilon_of_mu: float
    plain_epsilon: float
    """A lower bound for any mechanism."""
    power: Power

    @property
    def sampled(self) -> bool:
        return any(event.sampling < 1 for event in self.plan.events)

    @property
    def epsilon(self) -> float:
        """The lower bound that counts."""
        return self.plain_epsilon if self.sampled else self.epsilon_of_mu

    @property
    def caught(self) -> bool:
        """Whether the releases tell more than the claim allows."""
        return self.epsilon > self.trial.privacy.epsilon

    @property
    def claimed_mu(self) -> float:
        return mu_of(self.trial.privacy.epsilon, self.trial.privacy.delta)


def audit(
    method: str,
    privacy: PrivacySettings,
    hyperparameters: Mapping[str, HyperValue],
    *,
    model: str = "softmax",
    center: float = 0.0,
    aggregate: Aggregate = "uniform",
    rounds: int = 3,
    clients: int = 2,
    repetitions: int = 20_000,
    noise_factor: float = 1.0,
    public_sizes: bool = True,
    seed: int = 0,
) -> Audit:
    """Run a method `repetitions` times with the planted record (or user) and as often without. The clip is the data's
    own. Two checks of the check: the noise is that of the plan, times `noise_factor`; without `public_sizes` releases
    are divided by how many rows there really are."""
    in_range(1, 10**4, rounds=rounds)
    in_range(2, 1000, clients=clients)
    in_range(100, 10**6, repetitions=repetitions)
    in_range(0, 100, "(]", noise_factor=noise_factor)
    in_range(0, 2**40, seed=seed)
    if math.isinf(privacy.epsilon):
        raise UserError("epsilon = inf claims nothing that could be audited")
    settings = privacy.model_copy(update={"clip": CLIP}).check()
    chosen = methods.get(method).check({**most_visible(method, privacy.level), **hyperparameters})
    seen, plans, problems = [], [], neighbours(settings, model, clients)
    for world, problem in enumerate(problems):
        trial = TrialSpec(
            problem=problem.spec,
            method=method,
            hyperparameters=chosen,
            privacy=settings,
            rounds=rounds,
            evaluate_every=rounds,
            seed=seed + world * repetitions,
            preprocess=Preprocess(center=center, bound=CLIP),
            aggregate=aggregate,
        )
        plans.append(check(trial, problems[0]))
        sizes = (problems[0] if public_sizes else problem).partition.sizes
        seen.append(releases(trial, problem, repetitions, noise_factor, sizes))
    there, away = seen
    half = repetitions // 2
    adversary = Adversary.taught(there[:half], away[:half])
    taught = Mistakes(adversary.scores(there[:half]), adversary.scores(away[:half]), settings.delta)
    tried = Mistakes(adversary.scores(there[half:]), adversary.scores(away[half:]), settings.delta)
    mu = tried.mu(np.zeros(1)).item()  # where either is as likely
    extremes = np.quantile(np.concatenate([taught.there, taught.away]), np.linspace(0.005, 0.995, 199))
    plain = tried.epsilon(extremes[[np.argmax(taught.epsilon(extremes))]]).item()
    sampled = any(event.sampling < 1 for event in plans[0].events)
    least = least_caught(settings.epsilon, settings.delta, repetitions - half, plain=sampled)
    # noise and mu are inverse to each other, so far as the record shows
    shown = min(1.0, tried.apart * noise_factor / plans[0].mu(settings.release))
    noise = mu_of(settings.epsilon, settings.delta) * shown / least
    power = Power(least, epsilon_of(least, settings.delta), noise)
    return Audit(trial, plans[0], repetitions, mu, epsilon_of(mu, settings.delta), plain, power)


# ---- what is run


def most_visible(method: str, level: Level) -> dict[str, HyperValue]:
    """Hyperparameters under which the planted record shows most; what else is asked for goes before them."""
    rates: dict[str, HyperValue] = {"sampling_rate": 1.0, "participation": 1.0, "local_steps": 1, "hessian_clip": 0.01}
    rates["every"] = 2  # turns enough for their sum to show, and not all rounds
    if level == "user":  # what a user sends must be longer than the clip, and not follow the last round's noise
        rates |= {"client_learning_rate": 10.0, "feature_clip": 0.1, "alpha": 0.1, "rho": 0.01}
    names = [h.name for h in methods.get(method).hyperparameters]
    return {name: rates.get(name, LEARNING_RATE) for name in names if name in rates or name.endswith("learning_rate")}


def defaults(method: str) -> dict[str, HyperValue]:
    return {h.name: h.default for h in methods.get(method).hyperparameters}


def neighbours(settings: PrivacySettings, model: str, clients: int) -> tuple[Problem, Problem]:
    """Two data sets that differ in one record, or in one user.

    Seen locally, a client is all that matters; in a sum there are others. The planted one is the smallest. A record
    that counts as nothing is left out; what is known of the sizes is what they are with it.
    """
    replaced = settings.adjacency == "replace-one"
    if settings.level == "record":
        rest = list(PAIR)
        there, away = [*rest, PLANTED], [*rest, OTHER] if replaced else rest
    else:
        there, away = [PLANTED] * 2, [OTHER] * 2 if replaced else list(PAIR)
    others = [] if settings.release == "local" else [list(PAIR) * (len(there) // 2 + 1)] * (clients - 1)
    return _problem("there", [there, *others], model), _problem("away", [away, *others], model)


def _problem(name: str, clients: Sequence[Sequence[Row]], model: str) -> Problem:
    rows = [*(row for held in clients for row in held), *PAIR]  # the last two are nobody's, but show both labels
    x = np.array([[feature] for feature, _ in rows], dtype=np.float32)
    y = np.array([label for _, label in rows], dtype=np.int64)
    ends = np.cumsum([len(held) for held in clients])
    dealt = Partition(tuple(np.arange(end - len(held), end) for end, held in zip(ends, clients, strict=True)))
    content = f"audit:{name}:{clients}"
    spec = ProblemSpec(
        data=DataSpec(fingerprint=content),
        partition=PartitionSpec(kind="explicit", clients=len(clients)),
        train_on="all",
        evaluate_on="test",
        model=model,
    )
    return Problem(spec, FeatureSet(name, content, x, y, x, y), dealt, x, y)


def from_zero(model: Model) -> Model:
    """The same model with all weights zero at first, whatever the seed."""
    kind: Any = type(model)
    zero = type(f"{kind.__name__}FromZero", (kind,), {"initial": lambda self, seed: torch.zeros(self.dimension)})
    return zero(**vars(model))


class OverheardHosts(HostsHere):
    """A host whose every release is written down, lane by lane, on its way to the server."""

    def __init__(self, noise_factor: float) -> None:
        super().__init__(1)
        self.heard: list[torch.Tensor] = []
        self._factor = noise_factor

    def prepare(self, work: ClientWork) -> list[torch.Tensor]:
        totals = super().prepare(self._changed(work))
        self.heard.append(totals[0][torch.from_numpy(work.distinct_noises()[1])])
        return totals

    def round(self, work: ClientWork, t: int, sent: Sent, diagnose: bool) -> list[HostReply]:
        replies = super().round(self._changed(work), t, sent, diagnose)
        self.heard.append(replies[0].total)
        return replies

    def _changed(self, work: ClientWork) -> ClientWork:
        if self._factor == 1:
            return work
        scaled = {name: (std * self._factor).astype(np.float32) for name, std in work.noise_std.items()}
        return replace(work, noise_std=scaled)


def releases(
    trial: TrialSpec, problem: Problem, repetitions: int, noise_factor: float, sizes: tuple[int, ...]
) -> NDArray[np.float64]:
    """Everything that is released in the course of a run, a row for every repetition. `sizes`: the public ones."""
    shipment: Shipment = replace(in_process(problem), model=from_zero(problem.model), sizes=sizes)
    rows = []
    lanes = 1 if trial.preprocess.center else LANES  # every seed has a centre, and features, of its own
    for start in range(0, repetitions, lanes):
        seeds = range(trial.seed + start, trial.seed + min(start + lanes, repetitions))
        hosts = OverheardHosts(noise_factor)
        server = Server(hosts)
        server.open([trial.model_copy(update={"seed": seed}) for seed in seeds], shipment)
        server.advance(trial.rounds)
        rows.append(from_grid(torch.cat(hosts.heard, dim=1)).numpy())
    found = np.concatenate(rows)
    if not np.isfinite(found).all():
        raise UserError(f"{trial.method} diverges with these hyperparameters, so there is nothing to compare")
    return found


# ---- what the adversary makes of it


def most_telling(there: NDArray[np.float64], away: NDArray[np.float64]) -> NDArray[np.float64]:
    """The direction in which the two kinds of runs differ most, against their common spread (Fisher's)."""
    spread = np.sqrt((there.var(0) + away.var(0)) / 2)
    scale = np.where(spread > 0, spread, 1.0)
    common = (np.cov(there / scale, rowvar=False) + np.cov(away / scale, rowvar=False)) / 2
    regular = common + 1e-6 * np.eye(len(scale))  # some releases may follow from others
    return np.linalg.solve(regular, (there.mean(0) - away.mean(0)) / scale) / scale


@dataclass(frozen=True)
class Adversary:
    """Two views of everything released, the most telling direction and the scatter, and the likelihood of both views
    with and without the planted record, as if they were Gaussian."""

    direction: NDArray[np.float64]
    centre: NDArray[np.float64]
    spread: NDArray[np.float64]
    fits: tuple[tuple[NDArray[Any], NDArray[Any]], ...]
    """Mean and inverse covariance of the views, with and without."""
    offset: float

    @classmethod
    def taught(cls, there: NDArray[np.float64], away: NDArray[np.float64]) -> Adversary:
        """From runs with and without the record."""
        direction = most_telling(there, away)
        both = np.concatenate([there - there.mean(0), away - away.mean(0)])
        spread = both.std(0)
        found = cls(direction, (there.mean(0) + away.mean(0)) / 2, np.where(spread > 0, spread, np.inf), (), 0.0)
        fits: list[tuple[NDArray[Any], NDArray[Any]]] = []
        offset = 0.0
        for sign, views in zip((1, -1), map(found._views, (there, away)), strict=True):
            covariance = np.cov(views, rowvar=False) + 1e-12 * np.eye(2)
            fits.append((views.mean(0), np.linalg.inv(covariance)))
            offset -= sign * np.linalg.slogdet(covariance)[1] / 2
        return replace(found, fits=tuple(fits), offset=offset)

    def _views(self, runs: NDArray[np.float64]) -> NDArray[np.float64]:
        centred = runs - self.centre
        return np.stack([centred @ self.direction, ((centred / self.spread) ** 2).mean(1)], axis=1)

    def scores(self, runs: NDArray[np.float64]) -> NDArray[np.float64]:
        """The logarithm of the ratio of likelihoods: the higher, the likelier is the record there."""
        views = self._views(runs)
        there, away = (-0.5 * np.einsum("ij,jk,ik->i", views - mean, inverse, views - mean)
                       for mean, inverse in self.fits)  # fmt: skip
        found: NDArray[np.float64] = there - away + self.offset
        return found


@dataclass(frozen=True)
class Mistakes:
    """Scores of runs with and without the planted record. The adversary says "there" above a threshold."""

    there: NDArray[np.float64]
    away: NDArray[np.float64]
    delta: float

    @property
    def apart(self) -> float:
        """mu as it looks, between even chances; not a bound."""
        positive, negative = (self.away > 0).mean(), (self.there <= 0).mean()
        return float(np.clip(-ndtri(positive) - ndtri(negative), 0, 1e3))

    def rates(self, thresholds: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Upper bounds on the rates of false positives and of false negatives."""
        positives = (self.away[:, None] > thresholds).sum(0)
        negatives = (self.there[:, None] <= thresholds).sum(0)
        return at_most(positives, len(self.away)), at_most(negatives, len(self.there))

    def mu(self, thresholds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Lower bounds on mu."""
        positive, negative = self.rates(thresholds)
        return np.maximum(0.0, -ndtri(positive) - ndtri(negative))

    def epsilon(self, thresholds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Lower bounds on eps, of any mechanism."""
        positive, negative = self.rates(thresholds)
        ratios = ((1 - self.delta - negative) / positive, (1 - self.delta - positive) / negative)
        return np.log(np.maximum(1.0, np.maximum(*ratios)))


def at_most(count: NDArray[np.int64], of: int) -> NDArray[np.float64]:
    """Clopper and Pearson's upper bound on a rate. Two of them hold together with `CONFIDENCE`."""
    exact = beta.ppf(1 - (1 - CONFIDENCE) / 2, count + 1, np.maximum(of - count, 1))
    return np.where(count == of, 1.0, exact)


def least_caught(epsilon: float, delta: float, runs: int, *, plain: bool) -> float:
    """The smallest mu of a Gaussian mechanism that a test on so many runs of each kind catches with probability
    `CONFIDENCE` at a claim of eps: both counts of errors may be as bad as chance has it once in forty. `plain`: by the
    bound for any mechanism, at the best threshold."""
    shifts = np.linspace(-4, 4, 161) if plain else np.zeros(1)  # of the threshold, from the middle
    chance = 1 - (1 - CONFIDENCE) / 2

    def seen(mu: float) -> float:
        positive, negative = (at_most(np.asarray(binom.ppf(chance, runs, ndtr(-mu / 2 + s)), dtype=np.int64), runs)
                              for s in (-shifts, shifts))  # fmt: skip
        if not plain:
            return float((-ndtri(positive) - ndtri(negative)).max()) - mu_of(epsilon, delta)
        ratios = np.maximum((1 - delta - negative) / positive, (1 - delta - positive) / negative)
        return float(np.log(np.maximum(ratios, 1e-300)).max()) - epsilon

    low, high = mu_of(epsilon, delta), 2 * mu_of(epsilon, delta)
    while seen(high) <= 0:
        if high > 1e3:
            return math.inf
        low, high = high, 2 * high
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if seen(middle) > 0 else (middle, high)
    return high

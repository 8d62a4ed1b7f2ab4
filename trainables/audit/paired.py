"""Paired audit: how well can an adversary who sees all releases tell whether a planted record is in the data?

The real engine runs many times on two neighbouring data sets; repetitions are lanes with different seeds. Half of the
runs train the adversary: a likelihood ratio of everything released, and a threshold. The ratio uses the positions of
the releases (linear) and their scatter (quadratic), since the scale of the noise can reveal as much as its mean. The
adversary's errors are counted in the other half. Clopper-Pearson bounds on the error rates give lower bounds on what
the mechanism leaks:

* mu: a mu-GDP mechanism allows no test with Phi^-1(1 - false positives) - Phi^-1(false negatives) > mu;
* plain eps: an (eps, delta)-DP mechanism allows none with 1 - delta - false negatives > e^eps false positives, nor with
  the two rates exchanged. This bound is much weaker but holds for any mechanism; with secret sampling, only this holds.

A bound above the claimed eps means that the method adds too little noise or releases something it does not account for.
A bound below it proves nothing, so every audit also reports the smallest violation that it would have detected.

The data make the planted record as visible as possible. There are few rows. Weights start at zero and hardly move (the
account does not depend on the learning rate), so the record contributes its full bound in every round, while the other
rows, in pairs of opposite labels, cancel.
"""

from __future__ import annotations

import copy
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
from trainables.federation.client_host import Broadcast, HostReply
from trainables.federation.exact_sum import from_grid
from trainables.federation.hosts import Hosts
from trainables.federation.pack import ClientWork, check
from trainables.federation.problem import Problem, ProblemData
from trainables.federation.server import Server
from trainables.federation.trial_spec import DataSpec, Preprocess, ProblemSpec, TrialSpec
from trainables.models import Model
from trainables.privacy.gaussian import epsilon_of, mu_of
from trainables.privacy.plan import Level, PrivacyPlan, PrivacySettings
from trainables.spec import HyperValue

CONFIDENCE = 0.95
CLIP = 0.5  # all rows below have longer gradients at zero weights, so all are clipped
LEARNING_RATE = 1e-3
LANES = 1024  # per pack

Row = tuple[float, int]
"""A feature and a label."""
PLANTED: Row = (6.0, 1)
OTHER: Row = (1.0, 0)
"""Replaces the planted record. Its gradient is almost opposite, and its feature differs too: some releases depend on
features alone."""
PAIR: tuple[Row, Row] = ((1.0, 0), (1.0, 1))
"""Rows whose gradients cancel."""


@dataclass(frozen=True)
class Power:
    """The smallest violation that an audit of this size detects with probability `CONFIDENCE`."""

    mu: float
    epsilon: float
    """The same violation as eps, at the claimed delta."""
    noise: float
    """The fraction of the planned noise that gives this violation, given how visible the planted record was."""


@dataclass(frozen=True)
class Audit:
    """The claim, and lower bounds on what the releases reveal. Each bound holds with probability `CONFIDENCE`."""

    trial: TrialSpec
    plan: PrivacyPlan
    repetitions: int
    mu: float
    """Lower bound for a mechanism with Gaussian releases and without sampling."""
    epsilon_of_mu: float
    plain_epsilon: float
    """Lower bound for any mechanism."""
    power: Power

    @property
    def sampled(self) -> bool:
        return any(event.sampling < 1 for event in self.plan.events)

    @property
    def epsilon(self) -> float:
        """The strongest lower bound that is valid for this method."""
        return self.plain_epsilon if self.sampled else self.epsilon_of_mu

    @property
    def caught(self) -> bool:
        """Whether the releases reveal more than the claim allows."""
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
    """Run a method `repetitions` times with the planted record (or user) and as often without, always with `CLIP`.
    `hyperparameters` take precedence over `most_visible`. Two options test the audit itself: `noise_factor` scales
    the planned noise, and without `public_sizes` releases are divided by the true number of rows."""
    in_range(1, 10**4, rounds=rounds)
    in_range(2, 1000, clients=clients)
    in_range(100, 10**6, repetitions=repetitions)
    in_range(0, 100, "(]", noise_factor=noise_factor)
    in_range(0, 2**40, seed=seed)
    if math.isinf(privacy.epsilon):
        raise UserError("epsilon = inf claims no privacy, so there is nothing to audit")
    settings = privacy.model_copy(update={"clip": CLIP}).check()
    chosen = methods.get(method).check({**most_visible(method, privacy.level), **hyperparameters})
    problems = neighbours(settings, model, clients)
    runs, plans = [], []
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
        runs.append(releases(trial, problem, repetitions, noise_factor, sizes))
    (present, absent), plan = runs, plans[0]
    half = repetitions // 2
    adversary = Adversary.fit(present[:half], absent[:half])
    training = Scores(adversary.scores(present[:half]), adversary.scores(absent[:half]), settings.delta)
    test = Scores(adversary.scores(present[half:]), adversary.scores(absent[half:]), settings.delta)
    mu = test.mu(np.zeros(1)).item()  # the threshold at which both are equally likely
    thresholds = np.quantile(np.concatenate([training.present, training.absent]), np.linspace(0.005, 0.995, 199))
    plain = test.epsilon(thresholds[[np.argmax(training.epsilon(thresholds))]]).item()
    sampled = any(event.sampling < 1 for event in plan.events)
    detectable = smallest_detectable_mu(settings.epsilon, settings.delta, repetitions - half, plain=sampled)
    # the estimated mu as a fraction of the plan's; mu is inversely proportional to the noise
    visibility = min(1.0, test.mu_estimate * noise_factor / plan.mu(settings.release))
    noise = mu_of(settings.epsilon, settings.delta) * visibility / detectable
    power = Power(detectable, epsilon_of(detectable, settings.delta), noise)
    return Audit(trial, plan, repetitions, mu, epsilon_of(mu, settings.delta), plain, power)


# ---- the runs


def most_visible(method: str, level: Level) -> dict[str, HyperValue]:
    """Hyperparameters that make the planted record most visible."""
    values: dict[str, HyperValue] = {"sampling_rate": 1.0, "participation": 1.0, "local_steps": 1, "hessian_clip": 0.01}
    values["every"] = 2  # a turn in every second round: several turns, whose sum is visible, but not all rounds
    if level == "user":  # a user's update must be longer than the clip, and independent of the last round's noise
        values |= {"client_learning_rate": 10.0, "feature_clip": 0.1, "alpha": 0.1, "rho": 0.01}
    names = [h.name for h in methods.get(method).hyperparameters]
    return {name: values.get(name, LEARNING_RATE) for name in names if name in values or name.endswith("learning_rate")}


def defaults(method: str) -> dict[str, HyperValue]:
    return {h.name: h.default for h in methods.get(method).hyperparameters}


def neighbours(settings: PrivacySettings, model: str, clients: int) -> tuple[Problem, Problem]:
    """Two data sets that differ in one record, or in one user.

    With local release one client is enough; with secure aggregation there are others, all larger than the one with the
    planted record. With zero-out adjacency the record is missing from the second data set, while the public sizes
    include it; a user instead has rows whose gradients cancel.
    """
    replaced = settings.adjacency == "replace-one"
    if settings.level == "record":
        present = [*PAIR, PLANTED]
        absent = [*PAIR, OTHER] if replaced else [*PAIR]
    else:
        present, absent = [PLANTED] * 2, [OTHER] * 2 if replaced else [*PAIR]
    others = [] if settings.release == "local" else [list(PAIR) * (len(present) // 2 + 1)] * (clients - 1)
    return _problem("there", [present, *others], model), _problem("away", [absent, *others], model)


def _problem(name: str, clients: Sequence[Sequence[Row]], model: str) -> Problem:
    # the last two rows, which no client holds, ensure that both labels occur
    rows = [*(row for client in clients for row in client), *PAIR]
    x = np.array([[feature] for feature, _ in rows], dtype=np.float32)
    y = np.array([label for _, label in rows], dtype=np.int64)
    ends = np.cumsum([len(client) for client in clients])
    partition = Partition(tuple(np.arange(end - len(rows), end) for end, rows in zip(ends, clients, strict=True)))
    content = f"audit:{name}:{clients}"
    spec = ProblemSpec(
        data=DataSpec(fingerprint=content),
        partition=PartitionSpec(kind="explicit", clients=len(clients)),
        train_on="all",
        evaluate_on="test",
        model=model,
    )
    return Problem(spec, FeatureSet(name, content, x, y, x, y), partition, x, y)


def from_zero(model: Model) -> Model:
    """The same model with zero initial weights for every seed."""
    kind: Any = type(model)
    zero = type(f"{kind.__name__}FromZero", (kind,), {"initial": lambda self, seed: torch.zeros(self.dimension)})
    copied = copy.copy(model)
    object.__setattr__(copied, "__class__", zero)
    return copied


class RecordingHosts(Hosts):
    """One host that records the sum of its clients' releases in every round, lane by lane. With local release there is
    one client, so the sum is its release."""

    def __init__(self, noise_factor: float) -> None:
        super().__init__(1)
        self.recorded: list[torch.Tensor] = []
        self._factor = noise_factor

    def prepare(self, work: ClientWork) -> list[torch.Tensor]:
        totals = super().prepare(self._with_noise_factor(work))
        self.recorded.append(totals[0][torch.from_numpy(work.distinct_noises()[1])])
        return totals

    def round(self, work: ClientWork, t: int, sent: Broadcast, diagnose: bool) -> list[HostReply]:
        replies = super().round(self._with_noise_factor(work), t, sent, diagnose)
        self.recorded.append(replies[0].total)
        return replies

    def _with_noise_factor(self, work: ClientWork) -> ClientWork:
        if self._factor == 1:
            return work
        scaled = {name: (std * self._factor).astype(np.float32) for name, std in work.noise_std.items()}
        return replace(work, noise_std=scaled)


def releases(
    trial: TrialSpec, problem: Problem, repetitions: int, noise_factor: float, sizes: tuple[int, ...]
) -> NDArray[np.float64]:
    """All releases of a run, one row per repetition. `sizes`: the public sizes."""
    data: ProblemData = replace(ProblemData.of(problem), model=from_zero(problem.model), sizes=sizes)
    rows = []
    for start in range(0, repetitions, LANES):
        seeds = range(trial.seed + start, trial.seed + min(start + LANES, repetitions))
        hosts = RecordingHosts(noise_factor)
        server = Server(hosts)
        server.open([trial.model_copy(update={"seed": seed}) for seed in seeds], data)
        server.advance(trial.rounds)
        rows.append(from_grid(torch.cat(hosts.recorded, dim=1)).numpy())
    values = np.concatenate(rows)
    if not np.isfinite(values).all():
        raise UserError(f"{trial.method} diverges with these hyperparameters, so there is nothing to compare")
    return values


# ---- the adversary


def fisher_direction(present: NDArray[np.float64], absent: NDArray[np.float64]) -> NDArray[np.float64]:
    """The direction in which the two kinds of runs differ most, relative to their common covariance."""
    spread = np.sqrt((present.var(0) + absent.var(0)) / 2)
    scale = np.where(spread > 0, spread, 1.0)
    common = (np.cov(present / scale, rowvar=False) + np.cov(absent / scale, rowvar=False)) / 2
    regular = common + 1e-6 * np.eye(len(scale))  # some releases may be functions of others
    return np.linalg.solve(regular, (present.mean(0) - absent.mean(0)) / scale) / scale


@dataclass(frozen=True)
class Adversary:
    """A likelihood ratio test on two statistics of all releases: the projection on Fisher's direction, and the scatter.
    With and without the planted record, both are modelled as Gaussian."""

    direction: NDArray[np.float64]
    centre: NDArray[np.float64]
    spread: NDArray[np.float64]
    fits: tuple[tuple[NDArray[Any], NDArray[Any]], ...]
    """Mean and inverse covariance of the statistics, with and without the record."""
    offset: float

    @classmethod
    def fit(cls, present: NDArray[np.float64], absent: NDArray[np.float64]) -> Adversary:
        """Fit to runs with and without the record."""
        direction = fisher_direction(present, absent)
        both = np.concatenate([present - present.mean(0), absent - absent.mean(0)])
        spread = both.std(0)
        adversary = cls(
            direction, (present.mean(0) + absent.mean(0)) / 2, np.where(spread > 0, spread, np.inf), (), 0.0
        )
        fits: list[tuple[NDArray[Any], NDArray[Any]]] = []
        offset = 0.0
        for sign, statistics in zip((1, -1), map(adversary._statistics, (present, absent)), strict=True):
            covariance = np.cov(statistics, rowvar=False) + 1e-12 * np.eye(2)
            fits.append((statistics.mean(0), np.linalg.inv(covariance)))
            offset -= sign * np.linalg.slogdet(covariance)[1] / 2
        return replace(adversary, fits=tuple(fits), offset=offset)

    def _statistics(self, runs: NDArray[np.float64]) -> NDArray[np.float64]:
        centred = runs - self.centre
        return np.stack([centred @ self.direction, ((centred / self.spread) ** 2).mean(1)], axis=1)

    def scores(self, runs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Log-likelihood ratios: the higher, the likelier the record is present."""
        statistics = self._statistics(runs)
        present, absent = (-0.5 * np.einsum("ij,jk,ik->i", statistics - mean, inverse, statistics - mean)
                       for mean, inverse in self.fits)  # fmt: skip
        ratios: NDArray[np.float64] = present - absent + self.offset
        return ratios


@dataclass(frozen=True)
class Scores:
    """Scores of runs with and without the planted record. Above a threshold, the adversary guesses "present"."""

    present: NDArray[np.float64]
    absent: NDArray[np.float64]
    delta: float

    @property
    def mu_estimate(self) -> float:
        """Estimate of mu at threshold 0; not a bound."""
        positive, negative = (self.absent > 0).mean(), (self.present <= 0).mean()
        return float(np.clip(-ndtri(positive) - ndtri(negative), 0, 1e3))

    def rates(self, thresholds: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Upper bounds on the false positive and the false negative rate at each threshold."""
        positives = (self.absent[:, None] > thresholds).sum(0)
        negatives = (self.present[:, None] <= thresholds).sum(0)
        return rate_upper_bound(positives, len(self.absent)), rate_upper_bound(negatives, len(self.present))

    def mu(self, thresholds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Lower bounds on mu."""
        positive, negative = self.rates(thresholds)
        return np.maximum(0.0, -ndtri(positive) - ndtri(negative))

    def epsilon(self, thresholds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Lower bounds on eps that hold for any mechanism."""
        positive, negative = self.rates(thresholds)
        ratios = ((1 - self.delta - negative) / positive, (1 - self.delta - positive) / negative)
        return np.log(np.maximum(1.0, np.maximum(*ratios)))


def rate_upper_bound(count: NDArray[np.int64], total: int) -> NDArray[np.float64]:
    """Clopper-Pearson upper bound on a rate. Two of them hold jointly with probability `CONFIDENCE`."""
    exact = beta.ppf(1 - (1 - CONFIDENCE) / 2, count + 1, np.maximum(total - count, 1))
    return np.where(count == total, 1.0, exact)


def smallest_detectable_mu(epsilon: float, delta: float, runs: int, *, plain: bool) -> float:
    """The smallest mu of a Gaussian mechanism for which this many runs of each kind refute a claim of eps with
    probability `CONFIDENCE`: each error count is taken at its upper 2.5% quantile. `plain`: with the bound for any
    mechanism, at the best threshold."""
    shifts = np.linspace(-4, 4, 161) if plain else np.zeros(1)  # of the threshold, from the middle of both means
    quantile = 1 - (1 - CONFIDENCE) / 2

    def excess(mu: float) -> float:
        positive, negative = (rate_upper_bound(np.asarray(binom.ppf(quantile, runs, ndtr(-mu / 2 + s)), np.int64), runs)
                              for s in (-shifts, shifts))  # fmt: skip
        if not plain:
            return float((-ndtri(positive) - ndtri(negative)).max()) - mu_of(epsilon, delta)
        ratios = np.maximum((1 - delta - negative) / positive, (1 - delta - positive) / negative)
        return float(np.log(np.maximum(ratios, 1e-300)).max()) - epsilon

    low, high = mu_of(epsilon, delta), 2 * mu_of(epsilon, delta)
    while excess(high) <= 0:
        if high > 1e3:
            return math.inf
        low, high = high, 2 * high
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    return high

"""One-run audit of a training run on its own data (Steinke, Nasr and Jagielski 2023).

Canaries replace some of the clients' rows. A fair coin decides for each which of two records is used: the canary or its
opposite (with zero-out adjacency: the canary or no record). The run is trained once, as the study trained it. An
adversary who sees all releases and knows every other row then guesses the coins. If an (eps, delta)-DP run has m
canaries, r guesses are correct at most as often as r coins that each fall right with probability e^eps / (e^eps + 1),
plus a term in delta. Many correct guesses therefore bound eps from below, and a bound above the claimed eps means that
the run adds too little noise.

The guess subtracts the noiseless release of the known rows and regresses the remainder on the canaries' clipped
gradients (ridge regression for all canaries together, since their gradients are not orthogonal). The bound holds for
any guesses; worse guesses only make it weaker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from scipy.stats import binom

from trainables.audit.paired import CONFIDENCE
from trainables.errors import UserError, in_range
from trainables.federation.client_host import Broadcast, ClientStates, HostReply
from trainables.federation.exact_sum import from_grid
from trainables.federation.hosts import Hosts
from trainables.federation.pack import ClientWork, check, program_of
from trainables.federation.problem import Problem, ProblemData
from trainables.federation.server import Server
from trainables.federation.trial_spec import TrialSpec
from trainables.models import centring
from trainables.models.centres import Centres
from trainables.models.shard import Shard
from trainables.privacy.gaussian import mu_of
from trainables.privacy.plan import PrivacyPlan

LENGTH = 4.0  # norm of a canary's features in clips: its gradient is clipped unless the canary is memorised
MAX_FRACTION = 0.5  # of a client's rows that canaries may replace
MAX_DEFAULT_CANARIES = 1000
FACTORS = (0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05, 0.02)  # of the noise, tried for the audit's power
POWER_RUNS = 400  # simulated audits, to choose the number of guesses
GUESSED_FRACTIONS = (1.0, 0.5, 0.25, 0.1, 0.05, 0.02)  # of the canaries: those with the largest scores


@dataclass(frozen=True)
class OneRunAudit:
    """The claim, and a lower bound on eps from one run. The bound holds with probability `CONFIDENCE`."""

    trial: TrialSpec
    plan: PrivacyPlan
    canaries: int
    guesses: int
    correct: int
    epsilon: float
    """The lower bound."""
    max_epsilon: float
    """The bound if all guesses were correct: the most that this number of canaries can show."""
    noise: float
    """The largest tried fraction of the planned noise that would have been detected; 0 for none."""

    @property
    def caught(self) -> bool:
        """Whether the releases reveal more than the claim allows."""
        return self.epsilon > self.trial.privacy.epsilon


def one_run_audit(
    trial: TrialSpec, problem: Problem, *, canaries: int | None = None, noise_factor: float = 1.0, seed: int = 0
) -> OneRunAudit:
    """Train once with canaries among the rows and guess their coins; then with less and less noise, to find the power.
    `noise_factor` scales the planned noise, to test the audit itself."""
    plan, privacy = check(trial, problem), trial.privacy
    in_range(0, 100, "(]", noise_factor=noise_factor)
    in_range(0, 2**40, seed=seed)
    if math.isinf(privacy.epsilon):
        raise UserError("epsilon = inf claims no privacy, so there is nothing to audit")
    if privacy.level != "record":
        raise UserError(f"level = {privacy.level!r}: the canaries of a one-run audit are records")
    if any(event.sampling < 1 for event in plan.events):
        raise UserError(f"method {trial.method} samples rows, which hides canaries; audit the method by its name")
    if program_of(trial).release_size(problem.model) != problem.model.dimension:
        raise UserError(f"method {trial.method} releases more than gradients; audit the method by its name")
    if not isinstance(problem.data.x_train, np.ndarray):
        raise UserError(f"data {problem.data.name} stays on disk, so canaries cannot replace its rows")
    count = default_canaries(trial, problem) if canaries is None else canaries
    in_range(10, 10**5, canaries=count)
    room = _room(problem)
    if count > room:
        raise UserError(f"canaries = {count}, but the clients' rows have room for {room}")
    guesses = best_guess_count(privacy.epsilon, privacy.delta, count)
    correct = _correct_guesses(trial, problem, plan, count, guesses, noise_factor, seed)
    return OneRunAudit(
        trial,
        plan,
        count,
        guesses,
        correct,
        epsilon_lower_bound(count, guesses, correct, privacy.delta),
        epsilon_lower_bound(count, guesses, guesses, privacy.delta),
        _detectable_noise(trial, problem, plan, count, guesses, seed),
    )


def default_canaries(trial: TrialSpec, problem: Problem) -> int:
    """As many canaries as can be distinguished: half the number of released dimensions, limited by the rows."""
    releases = len(problem.partition.rows) if trial.privacy.release == "local" else 1
    return min(MAX_DEFAULT_CANARIES, _room(problem), releases * problem.model.dimension // 2)


def _room(problem: Problem) -> int:
    return sum(int(MAX_FRACTION * size) for size in problem.partition.sizes)


def _correct_guesses(
    trial: TrialSpec, problem: Problem, plan: PrivacyPlan, canaries: int, guesses: int, factor: float, seed: int
) -> int:
    """Train once and guess the canaries with the largest scores: how many guesses are correct."""
    planted = Canaries.plant(problem, trial, canaries, seed)
    hosts = AuditedHosts(planted, plan, factor)
    server = Server(hosts)
    server.open([trial], planted.data(planted.coins))
    server.advance(trial.rounds)
    scores = hosts.scores()
    if not np.isfinite(scores).all():
        raise UserError(f"{trial.method} diverges with canaries among its rows, so there is nothing to guess from")
    largest = np.argsort(-np.abs(scores), kind="stable")[:guesses]
    return int((np.sign(scores) == planted.coins)[largest].sum())


def _detectable_noise(
    trial: TrialSpec, problem: Problem, plan: PrivacyPlan, canaries: int, guesses: int, seed: int
) -> float:
    """The largest of `FACTORS` whose correct guesses refute the claim with a margin for chance; 0 if none does."""
    needed = guesses_needed(trial.privacy.epsilon, trial.privacy.delta, canaries, guesses)
    for factor in FACTORS if needed <= guesses else ():
        correct = _correct_guesses(trial, problem, plan, canaries, guesses, factor, seed + 1)
        if binom.ppf(1 - CONFIDENCE, guesses, correct / guesses) >= needed:
            return factor
    return 0.0


# ---- canaries among the rows


@dataclass(frozen=True)
class Canaries:
    """Canaries that replace some rows of a problem."""

    problem: Problem
    trial: TrialSpec
    rows: NDArray[np.int64]
    """The train rows that they replace."""
    clients: NDArray[np.int64]
    """The client of each."""
    coins: NDArray[np.int64]
    """1: the canary is used; -1: its opposite, or no record."""
    x: NDArray[np.float32]
    y: NDArray[np.int64]

    @classmethod
    def plant(cls, problem: Problem, trial: TrialSpec, count: int, seed: int) -> Canaries:
        rng = np.random.default_rng(seed)
        available = [rng.permutation(rows)[: int(MAX_FRACTION * len(rows))] for rows in problem.partition.rows]
        clients = np.repeat(np.arange(len(available)), [len(rows) for rows in available])
        chosen = rng.permutation(len(clients))[:count]
        directions = rng.standard_normal((count, problem.data.features))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        labels = rng.integers(0, problem.data.classes, count)
        coins = 2 * rng.integers(0, 2, count) - 1
        x = (LENGTH * trial.privacy.clip * directions).astype(np.float32)
        return cls(problem, trial, np.concatenate(available)[chosen], clients[chosen], coins, x, labels)

    @property
    def replaced(self) -> bool:
        """Whether the opposite record replaces an absent canary, or nothing does."""
        return self.trial.privacy.adjacency == "replace-one"

    def data(self, coins: NDArray[np.int64]) -> ProblemData:
        """The clients' data for these coins. The public sizes |D_i| do not depend on them."""
        shipped = ProblemData.of(self.problem)
        x, y = shipped.x.copy(), shipped.y.copy()
        signs = coins if self.replaced else np.ones_like(coins)
        x[self.rows], y[self.rows] = signs[:, None] * self.x, self.y
        return replace(shipped, x=x, y=y, rows=shipped.rows if self.replaced else self._without(self.rows[coins < 0]))

    def _without(self, absent: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        return tuple(rows[~np.isin(rows, absent)] for rows in self.problem.partition.rows)

    def effects(self, work: ClientWork, theta: torch.Tensor) -> NDArray[np.float64]:
        """For every canary, half the difference that its coin makes to its client's sum of clipped gradients."""
        present = self._gradients(1, work, theta)
        return (present - self._gradients(-1, work, theta)) / 2 if self.replaced else present / 2

    def _gradients(self, sign: int, work: ClientWork, theta: torch.Tensor) -> NDArray[np.float64]:
        x, clip, model = sign * self.x, torch.from_numpy(work.clip), self.problem.model
        shard = Shard.build([(x[i : i + 1], self.y[i : i + 1]) for i in range(len(self.y))])
        if work.centre is not None:
            shard = shard.with_centres(Centres.of(work.centre, "cpu"))
        options = {"automatic": True} if work.automatic else {}
        gradients, _ = centring.clipped_gradient_sum(model, shard, theta, clip, **options)
        return gradients[:, 0].numpy()


class AuditedHosts(Hosts):
    """One host per client, whose releases the adversary sees. Each has two reference hosts without noise: one trains
    with all coins at 1, the other with all coins at -1. Their mean release is what the known rows contribute, and the
    difference gives the scale of a canary's effect."""

    def __init__(self, canaries: Canaries, plan: PrivacyPlan, noise_factor: float) -> None:
        clients = len(canaries.problem.partition.rows)
        super().__init__(clients)
        self._canaries, self._factor = canaries, noise_factor
        self._references = [(Hosts(clients), canaries.data(sign * np.ones_like(canaries.coins))) for sign in (1, -1)]
        self._std = plan.noise_std[plan.events[0].purpose]
        count = len(canaries.coins)
        self._gram, self._projections = np.zeros((count, count)), np.zeros(count)  # the normal equations of the coins

    def scores(self) -> NDArray[np.float64]:
        """One for every canary: positive if its coin was probably 1."""
        return np.linalg.solve(self._gram + np.eye(len(self._gram)), self._projections).astype(np.float64)

    def prepare(self, work: ClientWork) -> list[torch.Tensor]:
        return super().prepare(_scaled(work, self._factor))

    def round(self, work: ClientWork, t: int, sent: Broadcast, diagnose: bool) -> list[HostReply]:
        without_noise, references = _scaled(work, 0.0), []
        for hosts, data in self._references:
            if work.program.stateful and t > 1:  # a client's state depends on its own releases
                hosts.restore(replace(without_noise, data=data), ClientStates.merge(self.states(), t - 1))
            references.append(hosts.round(replace(without_noise, data=data), t, sent, diagnose=False))
        replies = super().round(_scaled(work, self._factor), t, sent, diagnose)
        effects = self._canaries.effects(work, sent["theta"])
        local = self._canaries.trial.privacy.release == "local"
        total, variance = np.zeros(effects.shape[1]), 0.0
        for (client,), reply, high, low in zip(work.assignment, replies, *references, strict=True):
            own = self._canaries.clients == client
            released, above, below = (from_grid(part.total)[0].numpy() for part in (reply, high, low))
            direction = effects[own].sum(0)
            # how the release scales the sum of gradients: 1 / |D_i|, times the step size if it is a step
            scale = float((above - below) @ direction) / max(2 * float(direction @ direction), 1e-300)
            effects[own] *= scale
            unexplained = released - (above + below) / 2
            if local and own.any() and scale:
                self._observe(own, unexplained, effects[own], (scale * self._std) ** 2)
            total += unexplained
            variance += (scale * self._std) ** 2
        if not local and variance:
            self._observe(np.full(len(effects), True), total, effects, variance)
        return replies

    def _observe(
        self, own: NDArray[np.bool_], release: NDArray[np.float64], effects: NDArray[np.float64], variance: float
    ) -> None:
        """Add one release with noise of this variance to the normal equations of its canaries."""
        self._gram[np.ix_(own, own)] += effects @ effects.T / variance
        self._projections[own] += effects @ release / variance


def _scaled(work: ClientWork, factor: float) -> ClientWork:
    return replace(work, noise_std={name: (std * factor).astype(np.float32) for name, std in work.noise_std.items()})


# ---- bounds from correct guesses


def tail_probability(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Upper bound on the probability of this many correct guesses or more in an (eps, delta)-DP run (theorem 5.2)."""
    coin = float(expit(epsilon))
    below = binom.pmf(
        np.arange(correct - 1, -1, -1), guesses, coin
    ).cumsum()  # correct - i to correct - 1, i = 1, 2, ...
    alpha = float((below / np.arange(1, correct + 1)).max(initial=0.0))
    return min(1.0, float(binom.sf(correct - 1, guesses, coin)) + alpha * delta * 2 * canaries)


def epsilon_lower_bound(canaries: int, guesses: int, correct: int, delta: float) -> float:
    """The largest eps that these guesses refute."""
    level = 1 - CONFIDENCE
    if tail_probability(canaries, guesses, correct, 0.0, delta) > level:
        return 0.0
    low, high = 0.0, 1.0
    while tail_probability(canaries, guesses, correct, high, delta) <= level:
        low, high = high, 2 * high
        if high > 1e3:
            return low
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if tail_probability(canaries, guesses, correct, middle, delta) <= level else (low, middle)
        )
    return low


def guesses_needed(epsilon: float, delta: float, canaries: int, guesses: int) -> int:
    """The number of correct guesses that refutes eps; guesses + 1 if no number does."""
    low, high = guesses // 2, guesses + 1
    while low < high:
        middle = (low + high) // 2
        refuted = middle <= guesses and tail_probability(canaries, guesses, middle, epsilon, delta) <= 1 - CONFIDENCE
        low, high = (low, middle) if refuted else (middle + 1, high)
    return low


def smallest_detectable_mu(epsilon: float, delta: float, canaries: int, guesses: int) -> float:
    """The smallest mu of the canaries for which an audit of this size refutes eps with probability `CONFIDENCE`;
    simulated with a fixed seed, for coins observed in Gaussian noise."""
    noise = np.random.default_rng(0).standard_normal((POWER_RUNS, canaries))
    needed = guesses_needed(epsilon, delta, canaries, guesses)
    if needed > guesses:
        return math.inf

    def is_detected(mu: float) -> bool:
        scores = noise + mu / 2  # all coins are 1: a guess is correct if the score is positive
        largest = np.argpartition(-np.abs(scores), guesses - 1, axis=1)[:, :guesses]
        correct = (np.take_along_axis(scores, largest, axis=1) > 0).sum(1)
        return float((correct >= needed).mean()) >= CONFIDENCE

    low, high = 0.0, mu_of(epsilon, delta)
    while not is_detected(high):
        low, high = high, 2 * high
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if is_detected(middle) else (middle, high)
    return high


def best_guess_count(epsilon: float, delta: float, canaries: int) -> int:
    """The number of guesses with the greatest power. It does not depend on the data."""
    counts = sorted({max(1, round(fraction * canaries)) for fraction in GUESSED_FRACTIONS})
    return min(counts, key=lambda count: (smallest_detectable_mu(epsilon, delta, canaries, count), -count))

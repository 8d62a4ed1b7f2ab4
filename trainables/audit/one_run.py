"""One-run audit of a training run on its own data (Steinke, Nasr and Jagielski 2023).

Canaries replace some of the clients' rows. A fair coin decides for each which of two records is used: the canary or its
opposite (with zero-out adjacency: the canary or no record). The run is trained once, as the study trained it. An
adversary who sees all releases and knows every other row subtracts the noiseless release of the known rows, and
regresses the remainder on the canaries' clipped gradients. How much this says about the coins bounds eps from below
(`coin_bounds`), and a bound above the claimed eps means that the run adds too little noise.

Trials that differ only in their seed are audited together, one lane each, with the same coins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from trainables.audit.coin_bounds import (
    CoinScores,
    best_guess_count,
    detectable_ratio,
    epsilon_lower_bound,
    fdp_mu_bound,
)
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
from trainables.privacy.gaussian import epsilon_of, mu_of
from trainables.privacy.plan import PrivacyPlan

LENGTH = 4.0  # norm of a canary's features in clips: its gradient is clipped unless the canary is memorised
MAX_FRACTION = 0.5  # of a client's rows that canaries may replace
MAX_DEFAULT_CANARIES = 1000


@dataclass(frozen=True)
class OneRunAudit:
    """The claim, and lower bounds on eps from one run. Each holds with probability `CONFIDENCE`."""

    trial: TrialSpec
    plan: PrivacyPlan
    canaries: int
    guesses: int
    correct: int
    mu: float
    """Lower bound on mu if releases are known up to the coins and Gaussian noise of any scale."""
    visible_mu: float
    """mu of the most visible canary with noise as planned."""

    @cached_property
    def epsilon(self) -> float:
        """The lower bound for Gaussian noise."""
        return epsilon_of(self.mu, self.trial.privacy.delta)

    @cached_property
    def fdp_epsilon(self) -> float:
        """Lower bound for any mu-GDP mechanism, from the guesses."""
        return epsilon_of(fdp_mu_bound(self.correct, self.guesses, self.canaries), self.trial.privacy.delta)

    @cached_property
    def plain_epsilon(self) -> float:
        """Lower bound for any (eps, delta)-DP mechanism, from the guesses."""
        return epsilon_lower_bound(self.canaries, self.guesses, self.correct, self.trial.privacy.delta)

    @property
    def caught(self) -> bool:
        """Whether the releases reveal more than the claim allows."""
        return self.epsilon > self.trial.privacy.epsilon

    @property
    def noise(self) -> float:
        """The fraction of the planned noise that is detected with probability `CONFIDENCE`."""
        claimed = mu_of(self.trial.privacy.epsilon, self.trial.privacy.delta)
        return self.visible_mu / claimed * detectable_ratio(self.canaries)


def one_run_audit(
    trial: TrialSpec, problem: Problem, *, canaries: int | None = None, noise_factor: float = 1.0, seed: int = 0
) -> OneRunAudit:
    """Train once with canaries among the rows and bound eps from what the releases say about their coins.
    `noise_factor` scales the planned noise, to test the audit itself."""
    (found,) = audit_lanes([trial], problem, canaries=canaries, noise_factor=noise_factor, seed=seed)
    return found


def audit_lanes(
    trials: Sequence[TrialSpec],
    problem: Problem,
    *,
    canaries: int | None = None,
    noise_factor: float = 1.0,
    seed: int = 0,
) -> list[OneRunAudit]:
    """The same for several trials that differ in their seed, in one pack."""
    trial = trials[0]
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
    planted = Canaries.plant(problem, trial, count, seed)
    hosts = AuditedHosts(planted, plan, noise_factor, len(trials))
    server = Server(hosts)
    server.open(trials, planted.data(planted.coins))
    server.advance(trial.rounds)
    guesses = best_guess_count(plan.mu(privacy.release), count)
    return [_result(each, plan, hosts.scores(lane), guesses) for lane, each in enumerate(trials)]


def _result(trial: TrialSpec, plan: PrivacyPlan, scores: CoinScores, guesses: int) -> OneRunAudit:
    if not (np.isfinite(scores.gram).all() and np.isfinite(scores.projections).all()):
        raise UserError(f"{trial.method} diverges with canaries among its rows, so there is nothing to guess from")
    guessed = scores.guesses()
    largest = np.argsort(-np.abs(guessed), kind="stable")[:guesses]
    correct = int((np.sign(guessed) == scores.coins)[largest].sum())
    return OneRunAudit(trial, plan, len(guessed), guesses, correct, scores.gaussian_mu_bound(), scores.mu)


def default_canaries(trial: TrialSpec, problem: Problem) -> int:
    """As many canaries as can be distinguished: half the number of released dimensions, limited by the rows."""
    releases = len(problem.partition.rows) if trial.privacy.release == "local" else 1
    return min(MAX_DEFAULT_CANARIES, _room(problem), releases * problem.model.dimension // 2)


def _room(problem: Problem) -> int:
    return sum(int(MAX_FRACTION * size) for size in problem.partition.sizes)


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
        """For every canary and lane, half the difference that its coin makes to its client's sum of gradients."""
        present = self._gradients(1, work, theta)
        return (present - self._gradients(-1, work, theta)) / 2 if self.replaced else present / 2

    def _gradients(self, sign: int, work: ClientWork, theta: torch.Tensor) -> NDArray[np.float64]:
        x, clip, model = sign * self.x, torch.from_numpy(work.clip), self.problem.model
        shard = Shard.build([(x[i : i + 1], self.y[i : i + 1]) for i in range(len(self.y))])
        if work.centre is not None:
            shard = shard.with_centres(Centres.of(work.centre, "cpu", work.factor))
        options = {"automatic": True} if work.automatic else {}
        gradients, _ = centring.clipped_gradient_sum(model, shard, theta, clip, **options)
        return gradients.numpy()


class AuditedHosts(Hosts):
    """One host per client, whose releases the adversary sees. Each has two reference hosts without noise: one trains
    with all coins at 1, the other with all coins at -1. Their mean release is what the known rows contribute, and the
    difference gives the scale of a canary's effect."""

    def __init__(self, canaries: Canaries, plan: PrivacyPlan, noise_factor: float, lanes: int) -> None:
        clients = len(canaries.problem.partition.rows)
        super().__init__(clients)
        self._canaries, self._factor = canaries, noise_factor
        self._references = [(Hosts(clients), canaries.data(sign * np.ones_like(canaries.coins))) for sign in (1, -1)]
        self._std = plan.noise_std[plan.events[0].purpose]
        count = len(canaries.coins)
        # the normal equations of the coins, for every lane
        self._gram, self._projections = np.zeros((lanes, count, count)), np.zeros((lanes, count))

    def scores(self, lane: int) -> CoinScores:
        clients = self._canaries.clients
        groups = clients if self._canaries.trial.privacy.release == "local" else np.zeros_like(clients)
        return CoinScores(self._gram[lane], self._projections[lane], self._canaries.coins, groups)

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
        seen = [[from_grid(part.total).numpy() for part in parts] for parts in (replies, *references)]
        for lane in range(effects.shape[1]):
            self._observe_lane(work, lane, effects[:, lane], [[part[lane] for part in parts] for parts in seen])
        return replies

    def _observe_lane(
        self, work: ClientWork, lane: int, effects: NDArray[np.float64], seen: list[list[NDArray[np.float64]]]
    ) -> None:
        """`seen`: the releases of all clients, and those of the reference hosts."""
        local = self._canaries.trial.privacy.release == "local"
        total, variance = np.zeros(effects.shape[1]), 0.0
        for (client,), released, above, below in zip(work.assignment, *seen, strict=True):
            own = np.flatnonzero(self._canaries.clients == client)
            direction = effects[own].sum(0)
            # how the release scales the sum of gradients: 1 / |D_i|, times the step size if it is a step
            scale = float((above - below) @ direction) / max(2 * float(direction @ direction), 1e-300)
            effects[own] *= scale
            unexplained = released - (above + below) / 2
            if local and own.size and scale:
                self._observe(lane, own, unexplained, effects[own], (scale * self._std) ** 2)
            total += unexplained
            variance += (scale * self._std) ** 2
        if not local and variance:
            self._observe(lane, np.arange(len(effects)), total, effects, variance)

    def _observe(
        self,
        lane: int,
        own: NDArray[np.int64],
        release: NDArray[np.float64],
        effects: NDArray[np.float64],
        variance: float,
    ) -> None:
        """Add one release with noise of this variance to the normal equations of its canaries."""
        self._gram[lane][np.ix_(own, own)] += effects @ effects.T / variance
        self._projections[lane, own] += effects @ release / variance


def _scaled(work: ClientWork, factor: float) -> ClientWork:
    return replace(work, noise_std={name: (std * factor).astype(np.float32) for name, std in work.noise_std.items()})

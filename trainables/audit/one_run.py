"""One-run audit of a training run on its own data (Steinke, Nasr and Jagielski 2023).

Canaries replace some of the clients' rows; at user level, some of the clients. A fair coin decides for each which of
two records is used: the canary or its opposite (with zero-out adjacency: the canary or no record). The run is trained
once, as the study trained it. An adversary who sees all releases and knows every other row subtracts the noiseless
release of the known rows, and regresses the remainder on the canaries' effects: their clipped gradients, or a user's
whole update. The evidence about the coins gives a lower bound on eps (`coin_bounds`). A bound above the claimed eps
means that the run adds too little noise.

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

from trainables import methods
from trainables.audit.canaries import MAX_DEFAULT_CANARIES, MAX_FRACTION, Canaries
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
from trainables.federation.problem import Problem
from trainables.federation.server import Server
from trainables.federation.trial_spec import TrialSpec
from trainables.privacy.gaussian import epsilon_of, mu_of
from trainables.privacy.plan import PrivacyPlan
from trainables.privacy.sampled import epsilon_of as epsilon_of_samples


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
    """mu of the most visible canary, over all releases, with noise as planned."""
    release_mu: float
    """The same for a single release."""

    @property
    def sampled(self) -> bool:
        """Whether users take part secretly. The guesses then do not bound eps, because they use knowledge of who took
        part."""
        return self.plan.mechanism[0].rate < 1

    @cached_property
    def epsilon(self) -> float:
        """The lower bound for Gaussian noise. If users take part secretly: the eps of the planned releases at the noise
        level that was measured, provided that users take part as often as planned."""
        privacy, planned = self.trial.privacy, self.plan.mechanism[0]
        if not self.sampled:
            return epsilon_of(self.mu, privacy.delta)
        if self.mu == 0:
            return 0.0
        multiplier = privacy.adjacency_factor * self.visible_mu / (self.release_mu * self.mu)
        return epsilon_of_samples((replace(planned, multiplier=multiplier),), privacy.adjacency, privacy.delta)

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
    def detectable_noise(self) -> float:
        """A run that adds at most this fraction of the planned noise is caught with probability `CONFIDENCE`."""
        privacy = self.trial.privacy
        if self.sampled:
            visible, claimed = self.release_mu, privacy.adjacency_factor / self.plan.mechanism[0].multiplier
        else:
            visible, claimed = self.visible_mu, mu_of(privacy.epsilon, privacy.delta)
        return visible / claimed * detectable_ratio(self.canaries)


def one_run_audit(
    trial: TrialSpec, problem: Problem, *, canaries: int | None = None, noise_factor: float = 1.0, seed: int = 0
) -> OneRunAudit:
    """Train once with canaries among the rows, and bound eps by what the releases reveal about their coins.
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
    """`one_run_audit` of several trials that differ only in their seed, in one pack."""
    trial = trials[0]
    plan, privacy = check(trial, problem), trial.privacy
    in_range(0, 100, "(]", noise_factor=noise_factor)
    in_range(0, 2**40, seed=seed)
    if math.isinf(privacy.epsilon):
        raise UserError("epsilon = inf claims no privacy, so there is nothing to audit")
    if program_of(trial).samples:
        raise UserError(
            f"method {trial.method} samples rows, which hides canaries; use `fedsweep audit {trial.method}`"
        )
    if not getattr(methods.get(trial.method), "linear", True):
        raise UserError(
            f"the releases of {trial.method} are not linear in its noise; use `fedsweep audit {trial.method}`"
        )
    if program_of(trial).release_size(problem.model) != problem.model.dimension:
        raise UserError(f"method {trial.method} releases more than gradients; use `fedsweep audit {trial.method}`")
    if not isinstance(problem.data.x_train, np.ndarray):
        raise UserError(f"data {problem.data.name} stays on disk, so canaries cannot replace its rows")
    count = default_canaries(trial, problem) if canaries is None else canaries
    in_range(10, 10**5, canaries=count)
    most = _max_canaries(trial, problem)
    if count > most:
        where = "the clients' rows have" if privacy.level == "record" else "the clients have"
        raise UserError(f"canaries = {count}, but {where} room for {most}")
    planted = Canaries.plant(problem, trial, count, seed)
    hosts = AuditedHosts(planted, plan, noise_factor, len(trials))
    server = Server(hosts)
    server.open(trials, planted.data(planted.coins))
    server.advance(trial.rounds)
    guesses = best_guess_count(plan.mu(privacy.release), count)
    return [
        _result(each, plan, hosts.scores(lane), hosts.release_mu(lane), guesses) for lane, each in enumerate(trials)
    ]


def _result(trial: TrialSpec, plan: PrivacyPlan, scores: CoinScores, release_mu: float, guesses: int) -> OneRunAudit:
    if not (np.isfinite(scores.gram).all() and np.isfinite(scores.projections).all()):
        raise UserError(f"{trial.method} diverges with canaries among its rows, so it cannot be audited")
    guessed = scores.guesses()
    largest = np.argsort(-np.abs(guessed), kind="stable")[:guesses]
    correct = int((np.sign(guessed) == scores.coins)[largest].sum())
    mu = scores.gaussian_mu_bound()
    return OneRunAudit(trial, plan, len(guessed), guesses, correct, mu, scores.mu, release_mu)


def default_canaries(trial: TrialSpec, problem: Problem) -> int:
    """As many canaries as can be distinguished: half the number of released dimensions. The number of rows
    or users and `MAX_DEFAULT_CANARIES` limit it."""
    releases = len(problem.partition.rows) if trial.privacy.release == "local" else 1
    return min(MAX_DEFAULT_CANARIES, _max_canaries(trial, problem), releases * problem.model.dimension // 2)


def _max_canaries(trial: TrialSpec, problem: Problem) -> int:
    sizes = problem.partition.sizes
    return len(sizes) if trial.privacy.level == "user" else sum(int(MAX_FRACTION * size) for size in sizes)


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
        self._releases = np.zeros((lanes, count))
        """The number of releases that every canary is in."""

    def scores(self, lane: int) -> CoinScores:
        clients = self._canaries.clients
        groups = clients if self._canaries.trial.privacy.release == "local" else np.zeros_like(clients)
        return CoinScores(self._gram[lane], self._projections[lane], self._canaries.coins, groups)

    def release_mu(self, lane: int) -> float:
        """mu of the most visible canary in one release, with noise as planned."""
        squares = np.diagonal(self._gram[lane]) / np.maximum(self._releases[lane], 1)
        return float(2 * np.sqrt(squares.max()))

    def prepare(self, work: ClientWork) -> list[torch.Tensor]:
        return super().prepare(_scaled(work, self._factor))

    def round(self, work: ClientWork, t: int, sent: Broadcast, diagnose: bool) -> list[HostReply]:
        without_noise, references = _scaled(work, 0.0), []
        for hosts, data in self._references:
            if work.program.stateful and t > 1:  # a client's state depends on its own releases
                hosts.restore(replace(without_noise, data=data), ClientStates.merge(self.states(), t - 1))
            references.append(hosts.round(replace(without_noise, data=data), t, sent, diagnose=False))
        replies = super().round(_scaled(work, self._factor), t, sent, diagnose)
        gradients = self._canaries.gradients(work, sent["theta"])
        seen = [[from_grid(part.total).numpy() for part in parts] for parts in (replies, *references)]
        for lane in range(gradients.shape[1]):
            self._observe_lane(work, lane, gradients[:, lane], [[part[lane] for part in parts] for parts in seen])
        return replies

    def _observe_lane(
        self, work: ClientWork, lane: int, gradients: NDArray[np.float64], seen: list[list[NDArray[np.float64]]]
    ) -> None:
        """Add the releases of a round. `seen`: the releases of all clients, then those of their two reference hosts."""
        local = self._canaries.trial.privacy.release == "local"
        size = len(seen[0][0])
        effects, total, variance = np.zeros((len(gradients), size)), np.zeros(size), 0.0
        for (client,), released, plus, minus in zip(work.assignment, *seen, strict=True):
            own = np.flatnonzero(self._canaries.clients == client)
            effects[own], scale = self._canaries.effects(work, client, gradients[own], plus, minus)
            residual = released - (plus + minus) / 2
            if local and own.size and scale:
                self._observe(lane, own, residual, effects[own], (scale * self._std) ** 2)
            total += residual
            variance += (scale * self._std) ** 2
        if not local and variance:
            self._observe(lane, np.arange(len(effects)), total, effects, variance)

    def _observe(
        self,
        lane: int,
        own: NDArray[np.int64],
        residual: NDArray[np.float64],
        effects: NDArray[np.float64],
        variance: float,
    ) -> None:
        """Add one release to the normal equations of its canaries. `residual`: the release minus what the known rows
        contribute. `variance`: of its noise."""
        self._gram[lane][np.ix_(own, own)] += effects @ effects.T / variance
        self._projections[lane, own] += effects @ residual / variance
        self._releases[lane, own] += effects.any(axis=1)


def _scaled(work: ClientWork, factor: float) -> ClientWork:
    return replace(work, noise_std={name: (std * factor).astype(np.float32) for name, std in work.noise_std.items()})

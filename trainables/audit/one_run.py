"""An audit of somebody's own training, in one run (Steinke, Nasr and Jagielski 2023).

Some of the clients' rows give their place to canaries, and a fair coin says of each which of two records stands there:
the canary or its opposite (where a record counts as nothing: the canary or nothing). The run is trained once, as the
study trained it. One who saw all releases, and who knows every other row, then guesses the coins. An (eps, delta)-DP
run with m canaries lets nobody have v of r guesses right more often than r coins that fall right with probability
e^eps / (e^eps + 1), but for a little more that delta allows; so many right guesses bound eps from below.

The guess: what the known rows would have released without noise is taken off; what is left is compared with every
canary's own clipped gradient, for all canaries together (ridge regression, for their gradients are not orthogonal).
Whatever the guesses are, the bound holds; worse ones only show less.
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
from trainables.federation.client_host import ClientStates, HostReply, Sent
from trainables.federation.exact_sum import from_grid
from trainables.federation.pack import ClientWork, check, program_of
from trainables.federation.problem import Problem, Shipment, in_process
from trainables.federation.server import HostsHere, Server
from trainables.federation.trial_spec import TrialSpec
from trainables.models.centring import centred
from trainables.models.shard import Shard
from trainables.privacy.gaussian import mu_of
from trainables.privacy.plan import PrivacyPlan

LENGTH = 4.0  # of a canary's features, as a multiple of the clip: its gradient is clipped unless it is learnt by heart
MOST_OF_A_CLIENT = 0.5  # of whose rows canaries may take the place
MOST_CANARIES = 1000  # by default
FACTORS = (0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05, 0.02)  # of the noise, for what would have been caught
POWER_RUNS = 400  # of a simulated audit, for its power
SHARES = (1.0, 0.5, 0.25, 0.1, 0.05, 0.02)  # of the canaries that may be guessed: the surest ones


@dataclass(frozen=True)
class OneRunAudit:
    """What was claimed and what one run showed. The bound holds with `CONFIDENCE`."""

    trial: TrialSpec
    plan: PrivacyPlan
    canaries: int
    guesses: int
    right: int
    epsilon: float
    """A lower bound."""
    most: float
    """What the bound would be if all guesses were right: no more can be shown with so many canaries."""
    noise: float
    """The largest part of the planned noise that would have been caught, of those that were tried; 0 for none."""

    @property
    def caught(self) -> bool:
        return self.epsilon > self.trial.privacy.epsilon


def one_run_audit(
    trial: TrialSpec, problem: Problem, *, canaries: int | None = None, noise_factor: float = 1.0, seed: int = 0
) -> OneRunAudit:
    """Train once with canaries among the rows and guess which ones; then again with less and less noise, to see from
    where on that is noticed. `noise_factor`: to check the check."""
    plan, privacy = check(trial, problem), trial.privacy
    in_range(0, 100, "(]", noise_factor=noise_factor)
    in_range(0, 2**40, seed=seed)
    if math.isinf(privacy.epsilon):
        raise UserError("epsilon = inf claims nothing that could be audited")
    if privacy.level != "record":
        raise UserError(f"level = {privacy.level!r}: the canaries of an audit in one run are records")
    if any(event.sampling < 1 for event in plan.events):
        raise UserError(f"method {trial.method} samples rows, which hides canaries; audit the method by its name")
    if program_of(trial).release_size(problem.model) != problem.model.dimension:
        raise UserError(f"method {trial.method} releases more than gradients; audit the method by its name")
    if not isinstance(problem.data.x_train, np.ndarray):
        raise UserError(f"data {problem.data.name} stays in its file, where no canaries can be put among its rows")
    count = room_for(trial, problem) if canaries is None else canaries
    in_range(10, 10**5, canaries=count)
    room = sum(int(MOST_OF_A_CLIENT * size) for size in problem.partition.sizes)
    if count > room:
        raise UserError(f"canaries = {count}, but the clients' rows have room for {room}")
    guesses = guesses_for(privacy.epsilon, privacy.delta, count)
    right = _right(trial, problem, plan, count, guesses, noise_factor, seed)
    return OneRunAudit(
        trial,
        plan,
        count,
        guesses,
        right,
        at_least(count, guesses, right, privacy.delta),
        at_least(count, guesses, guesses, privacy.delta),
        _smallest_caught(trial, problem, plan, count, guesses, seed),
    )


def room_for(trial: TrialSpec, problem: Problem) -> int:
    """How many canaries can be told from each other: half as many as what is seen has directions, and no more than
    there is room for among the rows."""
    seen = len(problem.partition.rows) if trial.privacy.release == "local" else 1
    rows = sum(int(MOST_OF_A_CLIENT * size) for size in problem.partition.sizes)
    return min(MOST_CANARIES, rows, seen * problem.model.dimension // 2)


def _right(
    trial: TrialSpec, problem: Problem, plan: PrivacyPlan, canaries: int, guesses: int, factor: float, seed: int
) -> int:
    """Of the surest guesses, how many are right."""
    planted = Planted.among(problem, trial, canaries, seed)
    hosts = Overhearing(planted, plan, factor)
    server = Server(hosts)
    server.open([trial], planted.shipment(planted.coins))
    server.advance(trial.rounds)
    scores = hosts.scores()
    if not np.isfinite(scores).all():
        raise UserError(f"{trial.method} diverges with canaries among its rows, so there is nothing to guess from")
    surest = np.argsort(-np.abs(scores), kind="stable")[:guesses]
    return int((np.sign(scores) == planted.coins)[surest].sum())


def _smallest_caught(
    trial: TrialSpec, problem: Problem, plan: PrivacyPlan, canaries: int, guesses: int, seed: int
) -> float:
    """The largest part of the noise at which as many guesses are right as are needed, and so many more that chance
    would hardly have it otherwise; 0 where none of those tried is."""
    enough = needed(trial.privacy.epsilon, trial.privacy.delta, canaries, guesses)
    for factor in FACTORS if enough <= guesses else ():
        right = _right(trial, problem, plan, canaries, guesses, factor, seed + 1)
        if binom.ppf(1 - CONFIDENCE, guesses, right / guesses) >= enough:
            return factor
    return 0.0


# ---- canaries among the rows


@dataclass(frozen=True)
class Planted:
    """A problem in which canaries have taken the place of some rows."""

    problem: Problem
    trial: TrialSpec
    slots: NDArray[np.int64]
    """The train rows that they stand in."""
    clients: NDArray[np.int64]
    """Who holds each."""
    coins: NDArray[np.int64]
    """1: the canary is there, -1: its opposite, or nothing."""
    x: NDArray[np.float32]
    y: NDArray[np.int64]

    @classmethod
    def among(cls, problem: Problem, trial: TrialSpec, count: int, seed: int) -> Planted:
        drawn = np.random.default_rng(seed)
        held = problem.partition.rows
        room = [drawn.permutation(rows)[: int(MOST_OF_A_CLIENT * len(rows))] for rows in held]
        places = np.concatenate(room)
        owners = np.repeat(np.arange(len(held)), [len(rows) for rows in room])
        chosen = drawn.permutation(len(places))[:count]
        directions = drawn.standard_normal((count, problem.data.features))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        labels = drawn.integers(0, problem.data.classes, count)
        coins = 2 * drawn.integers(0, 2, count) - 1
        x = (LENGTH * trial.privacy.clip * directions).astype(np.float32)
        return cls(problem, trial, places[chosen], owners[chosen], coins, x, labels)

    @property
    def replaced(self) -> bool:
        """Whether there is something in a canary's place where it is not."""
        return self.trial.privacy.adjacency == "replace-one"

    def shipment(self, coins: NDArray[np.int64]) -> Shipment:
        """The data as clients have them if the coins fall so. |D_i| is always the same."""
        shipped = in_process(self.problem)
        x, y = shipped.x.copy(), shipped.y.copy()
        signs = coins if self.replaced else np.ones_like(coins)
        x[self.slots], y[self.slots] = signs[:, None] * self.x, self.y
        return replace(shipped, x=x, y=y, rows=shipped.rows if self.replaced else self._without(self.slots[coins < 0]))

    def _without(self, gone: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        return tuple(rows[~np.isin(rows, gone)] for rows in self.problem.partition.rows)

    def effects(self, work: ClientWork, theta: torch.Tensor) -> NDArray[np.float64]:
        """Of every canary, what is added to its client's sum of clipped gradients if its coin fell to 1, and taken off
        if not."""
        there = self._gradients(1, work, theta)
        return (there - self._gradients(-1, work, theta)) / 2 if self.replaced else there / 2

    def _gradients(self, sign: int, work: ClientWork, theta: torch.Tensor) -> NDArray[np.float64]:
        x = centred(sign * self.x, work.centre)
        shard = Shard.build([(x[i : i + 1], self.y[i : i + 1]) for i in range(len(self.y))])
        how = {"automatic": True} if work.automatic else {}
        found, _ = self.problem.model.clipped_gradient_sum(shard, theta, torch.from_numpy(work.clip), **how)
        return found[:, 0].numpy()


class Overhearing(HostsHere):
    """A host for every client, whose releases are heard on their way. Beside each stand two that add no noise: for one
    all coins fell to 1, for the other none did. What lies between their releases is what there is to tell."""

    def __init__(self, planted: Planted, plan: PrivacyPlan, noise_factor: float) -> None:
        clients = len(planted.problem.partition.rows)
        super().__init__(clients)
        self._planted, self._factor = planted, noise_factor
        self._shadows = [(HostsHere(clients), planted.shipment(sign * np.ones_like(planted.coins))) for sign in (1, -1)]
        self._std = plan.noise_std[plan.events[0].purpose]
        count = len(planted.coins)
        self._gram, self._told = np.zeros((count, count)), np.zeros(count)

    def scores(self) -> NDArray[np.float64]:
        """One for every canary: above 0 where its coin seems to have fallen to 1."""
        return np.linalg.solve(self._gram + np.eye(len(self._gram)), self._told).astype(np.float64)

    def prepare(self, work: ClientWork) -> list[torch.Tensor]:
        return super().prepare(_scaled(work, self._factor))

    def round(self, work: ClientWork, t: int, sent: Sent, diagnose: bool) -> list[HostReply]:
        quiet, shadows = _scaled(work, 0.0), []
        for hosts, shipment in self._shadows:
            if work.program.stateful and t > 1:  # what a client keeps follows from what it has released
                hosts.restore(replace(quiet, shipment=shipment), ClientStates.merged(self.states(), t - 1))
            shadows.append(hosts.round(replace(quiet, shipment=shipment), t, sent, diagnose=False))
        replies = super().round(_scaled(work, self._factor), t, sent, diagnose)
        effects = self._planted.effects(work, sent["theta"])
        local = self._planted.trial.privacy.release == "local"
        told, variance = np.zeros(effects.shape[1]), 0.0
        for (client,), reply, high, low in zip(work.assignment, replies, *shadows, strict=True):
            mine = self._planted.clients == client
            seen, above, below = (from_grid(part.total)[0].numpy() for part in (reply, high, low))
            all_of_mine = effects[mine].sum(0)
            # how a release follows a sum of gradients: 1 / |D_i| for a plain one, a step's length times that for a step
            scale = float((above - below) @ all_of_mine) / max(2 * float(all_of_mine @ all_of_mine), 1e-300)
            effects[mine] *= scale
            if local and mine.any() and scale:
                self._hear(mine, seen - (above + below) / 2, effects[mine], (scale * self._std) ** 2)
            told += seen - (above + below) / 2
            variance += (scale * self._std) ** 2
        if not local and variance:
            self._hear(np.full(len(effects), True), told, effects, variance)
        return replies

    def _hear(
        self, who: NDArray[np.bool_], told: NDArray[np.float64], effects: NDArray[np.float64], variance: float
    ) -> None:
        """The normal equations of the coins, given what is told of them with noise of this variance."""
        self._gram[np.ix_(who, who)] += effects @ effects.T / variance
        self._told[who] += effects @ told / variance


def _scaled(work: ClientWork, factor: float) -> ClientWork:
    return replace(work, noise_std={name: (std * factor).astype(np.float32) for name, std in work.noise_std.items()})


# ---- what right guesses tell


def chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """At most how often an (eps, delta)-DP run lets so many guesses, or more, be right (theorem 5.2)."""
    coin = float(expit(epsilon))
    below = binom.pmf(np.arange(right - 1, -1, -1), guesses, coin).cumsum()  # at least right - i, for i = 1, 2, ...
    alpha = float((below / np.arange(1, right + 1)).max(initial=0.0))
    return min(1.0, float(binom.sf(right - 1, guesses, coin)) + alpha * delta * 2 * canaries)


def at_least(canaries: int, guesses: int, right: int, delta: float) -> float:
    """The lower bound on eps."""
    level = 1 - CONFIDENCE
    if chance(canaries, guesses, right, 0.0, delta) > level:
        return 0.0
    low, high = 0.0, 1.0
    while chance(canaries, guesses, right, high, delta) <= level:
        low, high = high, 2 * high
        if high > 1e3:
            return low
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if chance(canaries, guesses, right, middle, delta) <= level else (low, middle)
    return low


def needed(epsilon: float, delta: float, canaries: int, guesses: int) -> int:
    """How many guesses must be right for eps to be exceeded; more than there are, where none suffice."""
    low, high = guesses // 2, guesses + 1
    while low < high:
        middle = (low + high) // 2
        exceeded = middle <= guesses and chance(canaries, guesses, middle, epsilon, delta) <= 1 - CONFIDENCE
        low, high = (low, middle) if exceeded else (middle + 1, high)
    return low


def least_caught(epsilon: float, delta: float, canaries: int, guesses: int) -> float:
    """The smallest mu with which canaries must show for an audit of this size to catch a claim of eps 95 times in 100;
    by simulation with fixed numbers, for coins seen in Gaussian noise."""
    drawn = np.random.default_rng(0).standard_normal((POWER_RUNS, canaries))
    enough = needed(epsilon, delta, canaries, guesses)
    if enough > guesses:
        return math.inf

    def caught(mu: float) -> bool:
        scores = drawn + mu / 2  # all coins at 1: the sign is the guess
        surest = np.argpartition(-np.abs(scores), guesses - 1, axis=1)[:, :guesses]
        right = (np.take_along_axis(scores, surest, axis=1) > 0).sum(1)
        return float((right >= enough).mean()) >= CONFIDENCE

    low, high = 0.0, mu_of(epsilon, delta)
    while not caught(high):
        low, high = high, 2 * high
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if caught(middle) else (middle, high)
    return high


def guesses_for(epsilon: float, delta: float, canaries: int) -> int:
    """How many of the canaries are guessed, the surest: as many as catch most, which depends on no data."""
    counts = sorted({max(1, round(share * canaries)) for share in SHARES})
    return min(counts, key=lambda count: (least_caught(epsilon, delta, canaries, count), -count))

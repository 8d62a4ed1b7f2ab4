"""Noise-shift audit: every change of a record must equal a shift of the noise that the account allows.

Let R(D, z) be everything visible in a run on data D with standardised noise z. If for neighbouring data D and D' there
is a shift w with

    R(D, z) = R(D', z + w) for every z,   ||w|| <= mu,

where the shift of a noise depends only on what was visible before it was drawn, then D and D' are as hard to tell apart
as N(0, 1) and N(mu, 1): the run is mu-GDP for this pair. The audit runs the real engine on D, then on D', finds w round
by round, and replays both runs with other noise to see that w is still right. It needs no statistics, so a method
cannot pass by luck: a part of a release without noise, noise that is used twice, scaled by the data, or drawn from
elsewhere has no such w, or one that is longer than the account says.

A shift is found in one of two ways:

* Linear: a round draws one new noise of the size of the release, and the release contains it times a number c. Then
  w = (R(D) - R(D')) / c. In a sum of releases the shift is spread over all clients, in proportion to their c.
* Step by step, for example for several local steps: every noise is shifted by the difference between D and D' in the
  client's sums of gradients (or Hessians) that were computed just before it.

The server of the second run gets the releases of the first, which are the same. Whatever it sends must then be the same
too: otherwise the server knows something about the data that it did not get from the releases.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainables.audit.watched_host import (
    Address,
    Played,
    Shifts,
    WatchedHost,
    noise_of_clients_only,
    observed_draw,
)
from trainables.federation.batch_round import Diagnostics
from trainables.federation.client_host import Broadcast, HostReply
from trainables.federation.exact_sum import GRID, to_grid
from trainables.federation.hosts import Hosts
from trainables.federation.pack import ClientWork, plan_of
from trainables.federation.problem import ProblemData
from trainables.federation.server import Server
from trainables.federation.trial_spec import TrialSpec
from trainables.privacy import noise
from trainables.privacy.participation import takes_part
from trainables.privacy.plan import Event, PrivacyPlan

Vector = NDArray[np.float64]
ROUNDING = 128 * float(np.finfo(np.float32).eps)
"""Relative differences below this are rounding."""
NEGLIGIBLE = 2e-3  # fraction of the noise in a number: a larger difference is never taken for rounding
FAR = 20.0  # in standard deviations: flips the sign of a gradient; Adam's first step depends only on the sign
AMPLIFICATION_TRIALS, AMPLIFICATION_TIMES = 8, 2.0  # random moves of the noise, and the factor on their largest effect
SLACK = 1.002  # factor by which a shift may be longer than accounted, for rounding
NO_SHIFT = 1e-4  # in standard deviations: shorter ones are rounding


class ShiftError(Exception):
    """No shift of the noise explains a release. The message says which release."""


@dataclass(frozen=True)
class Call:
    """A call of all hosts. Rounds start at 1; round 0 is the release before the first round."""

    work: ClientWork
    t: int
    sent: Broadcast


@dataclass
class Reference:
    """The run on D: its hosts, and what was called and released."""

    hosts: list[WatchedHost]
    calls: list[Call] = field(default_factory=list)
    played: list[list[Played]] = field(default_factory=list)
    states: list[list[Any]] = field(default_factory=list)
    """States of the hosts before every call."""

    def drawn_before(self, number: int, client: int) -> frozenset[Address]:
        """The addresses of the client's noise that were drawn before a call."""
        return frozenset(address for played in self.played[:number] for address in played[client].tape.drawn)


@dataclass(frozen=True)
class Shift:
    """What one pair of neighbouring data sets costs, in mu squared, by purpose."""

    cost: Mapping[str, float]
    plan: PrivacyPlan
    diverged: int | None
    """The first round that was not examined, because the weights were not finite."""

    @property
    def mu(self) -> float:
        return math.sqrt(sum(self.cost.values()))


def find_shift(trial: TrialSpec, data: ProblemData, neighbour: ProblemData | None, client: int) -> Shift:
    """The shift between runs on `data` and on `neighbour`, which differ in one client's rows. If `neighbour` is None,
    the client is a user who releases noise alone in the second run. Raises ShiftError if no shift exists."""
    plan = plan_of(trial, data.sizes)
    reference = Reference([WatchedHost(index) for index in range(len(data.sizes))])
    changed = frozenset[int]() if neighbour is None else _changed_rows(data, neighbour, client)
    coupled = _Coupled(reference, plan, client, changed, absent=neighbour is None)
    with noise_of_clients_only([event.purpose for event in plan.events]):
        expected = _run(trial, data, _Recorder(reference))
        check_draws(reference, plan, trial)
        ended = _run(trial, neighbour or data, coupled)
    if any(not np.array_equal(a, b, equal_nan=True) for a, b in zip(expected, ended, strict=True)):
        raise ShiftError("the weights or the server's state depend on the data, and not only through the releases")
    return Shift(coupled.cost, plan, coupled.diverged)


def _changed_rows(data: ProblemData, other: ProblemData, client: int) -> frozenset[int]:
    """The client's rows, counted from 0, that differ or are missing."""
    rows, others = data.rows[client], other.rows[client]
    both = min(len(rows), len(others))
    same_x = (data.x[rows[:both]] == other.x[others[:both]]).all(axis=1)
    same = same_x & (data.y[rows[:both]] == other.y[others[:both]])
    return frozenset([*np.flatnonzero(~same).tolist(), *range(both, max(len(rows), len(others)))])


def check_draws(reference: Reference, plan: PrivacyPlan, trial: TrialSpec) -> None:
    """Check that every noise is drawn as often as the plan says, and that secret samples are drawn as accounted."""
    rounds: dict[tuple[int, Address], set[int]] = {}
    for call, played in zip(reference.calls, reference.played, strict=True):
        for client, one in enumerate(played):
            for address in one.tape.drawn:
                rounds.setdefault((client, address), set()).add(call.t)
    for event in plan.events:
        mine = [(client, address) for client, address in rounds if address[2] == event.purpose]
        if mine and (event.count == 1 or any(len(rounds[key]) > 1 for key in mine)):
            continue  # accounted as one release of all rounds together, whose cost is measured
        drawn = max((sum(c == client for c, _ in mine) for client in {c for c, _ in mine}), default=0)
        if drawn != event.count:
            raise ShiftError(
                f"the account has {event.count} releases of purpose {event.purpose!r}, but a client draws this noise "
                f"{drawn} times"
            )
    _check_samples(reference, [event for event in plan.events if event.sampling < 1 and not event.hidden_by_sum])


def _check_samples(reference: Reference, events: list[Event]) -> None:
    """A program may use a sample without being observed, so every sample that it draws counts."""
    if not events:
        return
    rate, count = min(event.sampling for event in events), sum(event.count for event in events)
    drawn = [0] * len(reference.hosts)
    for call, played in zip(reference.calls, reference.played, strict=True):
        for client, one in enumerate(played):
            steps = [step for step, _ in one.tape.samples]
            created = [sample.rate for sample, _ in one.tape.created_samples]
            if any(used > rate for used in (*created, *(used for _, used in one.tape.samples))):
                raise ShiftError(f"the account has samples of {rate:g} of the rows, but round {call.t} uses more")
            if None in steps or len(set(steps)) < len(steps):
                raise ShiftError(f"the account has an independent sample for every sum, but round {call.t} reuses one")
            drawn[client] += len(created)
    if max(drawn) > count:
        raise ShiftError(f"the account has {count} samples of rows, but a client draws {max(drawn)}")


def _run(trial: TrialSpec, data: ProblemData, hosts: _Observed) -> list[Vector]:
    """Run all rounds, as far as the weights are finite. Returns the server's states of all rounds and its weights."""
    server = Server(hosts)
    server.open([trial], data)
    states = []
    for t in range(trial.rounds):  # the server drops its lane after the last round
        server.progress(t)
        states += [value.numpy().copy() for state in server._states for value in state.values()]
    (result,) = server.advance(trial.rounds)
    if result.state == "failed":
        raise ShiftError(result.reason.partition("\n")[0])
    final = server.final_weights()
    return states if final is None else [*states, final]


class _Observed(Hosts):
    """One watched host per client."""

    def __init__(self, hosts: list[WatchedHost]) -> None:
        super().__init__(0)
        self.count, self._hosts = len(hosts), hosts

    def called(self, call: Call) -> list[torch.Tensor]:
        """The releases, on the exact grid."""
        raise NotImplementedError

    def prepare(self, work: ClientWork) -> list[torch.Tensor]:
        return self.called(Call(work, 0, {}))

    def round(self, work: ClientWork, t: int, broadcast: Broadcast, diagnose: bool) -> list[HostReply]:
        sent = {name: value.clone() for name, value in broadcast.items()}
        diagnostics = Diagnostics.zeros_like(broadcast["theta"]) if diagnose else None
        return [HostReply(total, diagnostics) for total in self.called(Call(work, t, sent))]


def _is_finite(call: Call) -> bool:
    """Whether the weights are finite. Other values that are sent need not be, such as an infinite bound."""
    return "theta" not in call.sent or bool(torch.isfinite(call.sent["theta"]).all())


def _reply(played: Played) -> torch.Tensor:
    return to_grid(torch.from_numpy(played.release)).unsqueeze(0)


class _Recorder(_Observed):
    """The run on D."""

    def __init__(self, reference: Reference) -> None:
        super().__init__(reference.hosts)
        self._reference = reference

    def called(self, call: Call) -> list[torch.Tensor]:
        reference = self._reference
        reference.calls.append(call)
        reference.states.append([host._states for host in reference.hosts])
        played = [host.play(call.work, call.t, call.sent) for host in reference.hosts]
        reference.played.append(played)
        for host, one in zip(reference.hosts, played, strict=True):
            host.move_on(one)
        return [_reply(one) for one in played]


class _Coupled(_Observed):
    """The run on D', with noise shifted so that its releases equal those on D."""

    def __init__(
        self, reference: Reference, plan: PrivacyPlan, client: int, changed: frozenset[int], absent: bool
    ) -> None:
        """`changed`: the rows of the client that differ."""
        super().__init__([WatchedHost(index) for index in range(len(reference.hosts))])
        self._reference, self._plan, self._client, self._absent = reference, plan, client, absent
        self._changed = changed
        self._number = 0
        self._rng = np.random.default_rng(5)
        self.cost: dict[str, float] = {}
        self.diverged: int | None = None

    def called(self, call: Call) -> list[torch.Tensor]:
        theirs, number = self._reference, self._number
        self._number += 1
        before = theirs.calls[number]
        if call.sent.keys() != before.sent.keys() or any(
            not torch.equal(call.sent[name].nan_to_num(), before.sent[name].nan_to_num()) for name in call.sent
        ):
            raise ShiftError(f"round {call.t}: what the server sends depends on more than the releases")
        replies = [_reply(one) for one in theirs.played[number]]
        if not _is_finite(call):
            self.diverged = self.diverged or call.t
            return replies
        pairs = [
            _Pair(before, call, their, our, played, theirs.drawn_before(number, index), states)
            for index, (their, our, played, states) in enumerate(
                zip(theirs.hosts, self._hosts, theirs.played[number], theirs.states[number], strict=True)
            )
        ]
        fresh = [address for played in theirs.played[number] for address in played.tape.fresh]
        credited = {event.purpose for event in self._plan.events if event.aggregated}
        summed = self._plan.settings.release == "secure-aggregation" and {a[2] for a in fresh} <= credited
        shifts = self._together(pairs) if summed else [self._alone(i, pair) for i, pair in enumerate(pairs)]
        self._check_not_left_out(call, pairs, shifts)
        for pair, shift in zip(pairs, shifts, strict=True):
            for address, value in shift.items():
                self.cost[address[2]] = self.cost.get(address[2], 0.0) + float(value @ value)
            pair.settle({} if self._absent else shift)
        return replies

    def _host(self, call: Call) -> int:
        """The host of the client whose rows change."""
        return call.work.assignment.index((self._client,))

    def _check_not_left_out(self, call: Call, pairs: list[_Pair], shifts: list[Shifts]) -> None:
        """Check that a record outside a secret sample, or a user who secretly takes no part, changes no release."""
        sampled = {event.purpose: event for event in self._plan.events if event.sampling < 1}
        moved = {a[2] for shift in shifts for a, value in shift.items() if np.abs(value).max() > NO_SHIFT}
        if call.t == 0 or moved.isdisjoint(sampled):
            return
        if all(sampled[purpose].hidden_by_sum for purpose in moved & sampled.keys()):
            seed, q = int(call.work.seeds[0]), call.work.secret_participation
            if not takes_part(seed, self._client, call.t, q):
                raise ShiftError(f"round {call.t}: a user who does not take part changes the release")
        elif self._changed.isdisjoint(pairs[self._host(call)].played.tape.sampled_rows):
            raise ShiftError(f"round {call.t}: a record that is not in the sample changes the release")

    def _alone(self, index: int, pair: _Pair) -> Shifts:
        """The shift of one client, whose release is visible."""
        if self._absent:
            return pair.absent(self._rng) if index == self._host(pair.call) else {}
        return pair.shift(self._rng)

    def _together(self, pairs: list[_Pair]) -> list[Shifts]:
        """The shifts of all clients if only the sum of their releases is visible: the shift is spread over them."""
        members = [pair for pair in pairs if pair.played.tape.drawn]
        if not members:
            return [{} for _ in pairs]
        found = [pair.gain(self._rng) for pair in members]
        if any(gain is None for gain in found):
            raise ShiftError(
                f"round {members[0].call.t}: the account credits the noise of all clients, but a release is not a sum "
                "plus one noise: declare aggregated=False"
            )
        gains = [gain for gain in found if gain is not None]
        total = sum(gain.factor**2 for gain in gains)
        if self._absent:
            changed = pairs[self._host(members[0].call)]
            gap = next(p.signal(g.address) for p, g in zip(members, gains, strict=True) if p is changed)
        else:
            gap = np.sum([p.played.release - g.release for p, g in zip(members, gains, strict=True)], axis=0)
        spread = [{gain.address: gain.factor * gap / total} for gain in gains]
        for scale in () if self._absent else (0.0, 3.0):  # with the same noise, and with other noise
            other = [{gain.address: scale * self._rng.standard_normal(gap.size)} for gain in gains]
            theirs = [pair.replay(extra).release for pair, extra in zip(members, other, strict=True)]
            ours = [p.play(shift, extra).release for p, shift, extra in zip(members, spread, other, strict=True)]
            sizes = [np.abs(r) + abs(g.factor) + members[0].weights for r, g in zip(theirs, gains, strict=True)]
            size, noise = np.sum(sizes, axis=0), math.sqrt(total)
            if not _equal(np.sum(theirs, axis=0), np.sum(ours, axis=0), size, noise):
                raise ShiftError(
                    f"round {members[0].call.t}: no shift of the clients' noise hides a record in the sum of the "
                    "releases"
                )
        by_pair = {id(pair): shift for pair, shift in zip(members, spread, strict=True)}
        return [by_pair.get(id(pair), {}) for pair in pairs]


@dataclass(frozen=True)
class _Gain:
    """A release that is a signal plus `factor` times one new noise."""

    address: Address
    factor: float
    release: Vector
    """The release on D' with the noise of D."""


@dataclass
class _Pair:
    """One client in one round, on D and on D'."""

    before: Call
    call: Call
    their: WatchedHost
    our: WatchedHost
    played: Played
    """The round on D."""
    drawn_before: frozenset[Address]
    states: Any
    response: Vector | float = 0.0
    """How far new noise of one standard deviation moves each number of the release."""

    def replay(self, extra_shifts: Shifts | None = None) -> Played:
        """The round on D once more, with other noise."""
        host, kept = self.their, (self.their._states, self.their.drawn_before)
        host._states, host.drawn_before = self.states, self.drawn_before
        try:
            return host.play(self.before.work, self.call.t, self.call.sent, extra_shifts=extra_shifts)
        finally:
            host._states, host.drawn_before = kept

    def play(
        self,
        shifts: Shifts | None = None,
        extra_shifts: Shifts | None = None,
        reference: list[torch.Tensor] | None = None,
    ) -> Played:
        return self.our.play(
            self.call.work, self.call.t, self.call.sent, shifts=shifts, extra_shifts=extra_shifts, reference=reference
        )

    def settle(self, shift: Shifts) -> None:
        """Continue from the round on D' with this shift. A shifted round is played again, after all replays of D: an
        object that both runs share then holds no state of D."""
        self.our.move_on(self.play(shifts=shift) if shift else self.ours)

    @cached_property
    def ours(self) -> Played:
        """The round on D' with the noise of D."""
        return self.play()

    def shift(self, rng: np.random.Generator) -> Shifts:
        """The shift that makes the release on D' equal to that on D."""
        if np.array_equal(self.ours.release, self.played.release):
            return {}
        self._check_noise_everywhere(rng)
        for find in (self._linear, self._stepwise):
            found = find(rng)
            if found is not None:
                return found
        raise ShiftError(f"round {self.call.t}: no shift of the noise hides a record in the release")

    def _check_noise_everywhere(self, rng: np.random.Generator) -> None:
        """Raise if a nonzero number of the release contains no new noise. Also measures `response`."""
        release, tape = self.ours.release, self.ours.tape
        extra = {address: _directions(rng, tape.drawn[address][1]) for address in tape.fresh}
        response = np.zeros_like(release)
        other = {address: _directions(rng, value.size) for address, value in extra.items()}
        for direction, scale in itertools.product((extra, other), (1.0, -1.0, FAR, -FAR)) if extra else ():
            moved = self.play(extra_shifts={address: scale * value for address, value in direction.items()}).release
            self.response = np.maximum(self.response, np.abs(moved - release) / abs(scale))
        for scale in (1.0, 1e3, -1e3) if extra else ():  # large in both directions: a first step of Adam is only a sign
            moved = self.play(extra_shifts={address: scale * value for address, value in extra.items()}).release
            response += np.abs(moved - release)
            if response.all():
                break
        bare = np.flatnonzero((response == 0) & (release != 0))
        if bare.size:
            raise ShiftError(
                f"round {self.call.t}: {bare.size} of {response.size} coordinates of a release have no new noise, the "
                f"first is number {bare[0]}"
            )

    def gain(self, rng: np.random.Generator) -> _Gain | None:
        """The release as a signal plus a factor times one new noise; None if it does not have this form."""
        ours = self.ours
        if len(ours.tape.fresh) != 1:
            return None
        (address,) = ours.tape.fresh
        size = ours.tape.drawn[address][1]
        if size != ours.release.size or not ours.release.any():
            return None
        direction = _directions(rng, size)
        response = self.play(extra_shifts={address: direction}).release - ours.release
        factor = float(response @ direction / (direction @ direction))
        magnitude = np.abs(ours.release) + abs(factor) + self.weights
        if factor == 0 or not _equal(response, factor * direction, magnitude, abs(factor)):
            return None
        return _Gain(address, factor, ours.release)

    def _linear(self, rng: np.random.Generator) -> Shifts | None:
        gain = self.gain(rng)
        if gain is None:
            return None
        shift = {gain.address: (self.played.release - gain.release) / gain.factor}
        return shift if self._holds(rng, [gain.address], shift, None) else None

    def _stepwise(self, rng: np.random.Generator) -> Shifts | None:
        tape = self.play(reference=self.played.tape.sums).tape
        if not tape.fresh or not self._holds(rng, tape.fresh, {}, self.played.tape.sums):
            return None
        return {address: tape.shifts[address] for address in tape.fresh if address in tape.shifts}

    def _holds(
        self, rng: np.random.Generator, addresses: list[Address], shift: Shifts, sums: list[torch.Tensor] | None
    ) -> bool:
        """Whether the releases are equal, also with other noise."""
        sizes = self.played.tape.drawn
        for scale in (0.0, 3.0):  # with the same noise, and with other noise
            extra = {a: scale * rng.standard_normal(sizes[a][1]) for a in addresses if a in sizes}
            theirs = self.replay(extra) if scale else self.played
            reference = None if sums is None else theirs.tape.sums
            ours = self.play(shift, extra, reference)
            is_equal = _equal(theirs.release, ours.release, self.response + self.weights, self.response)
            if not is_equal and not self._is_amplified_rounding(rng, theirs.release, ours.release, extra):
                return False
        return True

    def _is_amplified_rounding(self, rng: np.random.Generator, release: Vector, ours: Vector, extra: Shifts) -> bool:
        """Whether rounding can move every coordinate of the release on D as far as to that on D'. A later step may
        amplify the rounding of an earlier one, for example by the inverse of a noisy Hessian. So the noise is moved by
        as much as rounding, in several directions: what that changes costs no more than a shift of this length."""
        sizes, found = self.played.tape.drawn, np.zeros_like(release)
        for _ in range(AMPLIFICATION_TRIALS):
            moved = {
                address: extra.get(address, 0.0) + ROUNDING * rng.standard_normal(sizes[address][1])
                for address in self.played.tape.fresh
            }
            found = np.maximum(found, np.abs(self.replay(moved).release - release))
            if np.all(np.abs(release - ours) <= AMPLIFICATION_TIMES * found):
                return True
        return False

    @property
    def weights(self) -> Vector:
        """Magnitudes of the weights: a release may hold differences from them. 0 for numbers beyond the weights."""
        found, theta = np.zeros_like(self.played.release), self.call.sent.get("theta")
        if theta is not None:
            known = theta.abs().double().flatten().numpy()[: found.size]
            found[: known.size] = known
        return found

    def signal(self, address: Address) -> Vector:
        """The release on D without its new noise."""
        noise = self.replay().release - self.replay({address: -self._normals(address)}).release
        return self.played.release - noise

    def _normals(self, address: Address) -> Vector:
        seed, (t, step, purpose) = int(self.call.work.seeds[0]), address
        (client,) = self.call.work.assignment[self.their.index]
        with observed_draw():
            drawn = noise.Address(seed, client, t, step, purpose).normal(self.played.tape.drawn[address][1])
        return drawn.astype(np.float64)

    def absent(self, rng: np.random.Generator) -> Shifts:
        """The shift if the user contributes nothing on D', and so releases noise alone."""
        gain = self.gain(rng)
        if gain is None:
            raise ShiftError(f"round {self.call.t}: the release of a user is not an update plus one noise")
        return {gain.address: self.signal(gain.address) / gain.factor}


def _directions(rng: np.random.Generator, size: int) -> Vector:
    """Random numbers, none of them close to 0."""
    return rng.choice([-1.0, 1.0], size) * rng.uniform(0.5, 2.0, size)


def _equal(first: Vector, second: Vector, size: Vector | float, noise: Vector | float) -> bool:
    """Whether all numbers are equal up to rounding. The tolerance of a number is relative to it and its `size`, and at
    most a small part of the `noise` in it: a larger tolerance could hide a record."""
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        return False
    largest = np.maximum(np.maximum(np.abs(first), np.abs(second)), size)
    return bool((np.abs(first - second) <= np.minimum(ROUNDING * largest + 4 / GRID, NEGLIGIBLE * noise)).all())

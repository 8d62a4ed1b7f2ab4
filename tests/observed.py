"""The real engine, overheard: every look at a client's rows, every noise drawn, every value that leaves a client.

One host has one client, so what a host answers is what leaves that client. A run can be repeated from what the server
sent, with other noise or with other sums over the rows: which of them a release follows, and how, is then measured.
Whatever else a program might do with the rows is refused, in words: it would go unnoticed otherwise.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from trainables.federation import client_host, lane_vectors
from trainables.federation.exact_sum import from_grid
from trainables.federation.hosts import Hosts
from trainables.federation.pack import ClientWork
from trainables.federation.problem import Problem, ProblemData
from trainables.federation.server import Server
from trainables.federation.trial_spec import TrialSpec
from trainables.methods import dp_fednew
from trainables.privacy.noise import Address

CENTRE, ONCE = -1, 0
"""When a thing is released before the first round: the mean of the features, then what a method prepares."""

Vectors = Mapping[Any, np.ndarray]
"""What is added, by query or by draw."""


@dataclass(frozen=True)
class Query:
    """A look at a client's rows."""

    client: int
    t: int
    number: int
    """Of the client's looks in this round."""
    kind: str
    bound: float
    """What one record can contribute, as far as it is bounded here."""
    rate: float = 1.0
    sample: tuple[int, ...] = ()
    """The address of the sample it looked at."""
    coin: bool = False
    """Whether `rate` is that of a coin which decides if what is made of the look leaves the client at all."""


@dataclass(frozen=True)
class Draw:
    """A noise vector, as it was handed to a program: `std` times what stands at its address, with this sign
    (and of any size, where it is a factor)."""

    client: int
    t: int
    """When it was asked for. Where it stands may be another round."""
    address: tuple[int, int, int, int, str]
    std: float
    sign: float
    size: int


@dataclass
class Record:
    """What was seen, in order."""

    seen: list[Query | Draw] = field(default_factory=list)
    sent: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """By round, what the server said."""
    released: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    """By client and round."""
    work: dict[int, ClientWork] = field(default_factory=dict)
    """The work that clients were given, by round."""
    coins: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Thrown by clients to see whether they take part: seed, client, round, step."""

    @property
    def clients(self) -> int:
        return 1 + max(client for client, _ in self.released)

    @property
    def rounds(self) -> list[int]:
        return sorted({t for _, t in self.released})

    def of(self, client: int, t: int) -> list[Query | Draw]:
        return [one for one in self.seen if (one.client, one.t) == (client, t)]

    def draws(self) -> dict[tuple, Draw]:
        """By address, each as it was first asked for."""
        found: dict[tuple, Draw] = {}
        for one in self.seen:
            if isinstance(one, Draw):
                found.setdefault(one.address, one)
        return found

    def queries(self) -> list[Query]:
        return [one for one in self.seen if isinstance(one, Query)]


def run(trial: TrialSpec, of: Problem) -> Record:
    """A whole run of the engine in this process."""
    record = Record()
    clients = len(of.partition.sizes)
    with _watching(record, {}, {}):
        server = Server(_Hosts(clients, record))
        server.open([trial], ProblemData.of(of))
        server.advance(trial.rounds)
    return record


def again(record: Record, noise: Vectors | None = None, sums: Vectors | None = None) -> dict[tuple[int, int], Any]:
    """What the clients release if the server says the same. `noise` is added to what stands at an address, `sums` to
    what a query finds."""
    repeated = Record()
    with _watching(repeated, noise or {}, sums or {}):
        hosts = _Hosts(record.clients, repeated)
        for t, work in record.work.items():
            if t in (CENTRE, ONCE):
                hosts.prepare(work)
            else:
                hosts.round(work, t, record.sent[t], False)
    return repeated.released


class _Hosts(Hosts):
    def __init__(self, clients: int, record: Record) -> None:
        super().__init__(clients)
        self.record = record

    def prepare(self, work):
        totals = super().prepare(work)
        self._note(work, CENTRE if work.needs_centre else ONCE, totals)
        return totals

    def round(self, work, t, sent, diagnose):
        replies = super().round(work, t, sent, diagnose)
        self.record.sent[t] = {name: value.clone() for name, value in sent.items()}
        self._note(work, t, [reply.total for reply in replies])
        return replies

    def _note(self, work, t, totals):
        self.record.work[t] = work
        for clients, total in zip(work.assignment, totals, strict=True):
            (client,) = clients
            self.record.released[client, t] = from_grid(total)[0].numpy()


@contextlib.contextmanager
def _watching(record: Record, noise: Vectors, sums: Vectors) -> Iterator[None]:
    drawn: list[tuple[tuple, np.ndarray]] = []
    samples: list[tuple[int, ...]] = []
    plain_normal, plain_generator = Address.normal, Address.generator

    def normal(self, size):
        address = (self.seed, self.client, self.round, self.step, self.purpose)
        found = plain_normal(self, size)
        if self.client >= 0:
            if address in noise:
                found = found + noise[address].astype(np.float32)
            drawn.append((address, found))
        return found

    def generator(self):
        if self.purpose == "sample":
            samples.append((self.client, self.round, self.step))
        if self.purpose == "takes part":
            record.coins.append((self.seed, self.client, self.round, self.step))
        return plain_generator(self)

    def fill_normals(out, clients, seeds, *rest):
        for (i, client), (j, seed) in itertools.product(enumerate(clients), enumerate(seeds)):
            out[i, j] = Address(seed, client, *rest).normal(out.shape[2])

    class Watched(client_host.BatchRound):
        """What a program sees of its one client."""

        def __init__(self, batch, t, work, *rest):
            self._unseen = 1
            super().__init__(batch, t, work, *rest)
            (self._client,) = batch.clients
            self._noisy = None
            self._when = CENTRE if t == ONCE and work.needs_centre else t
            self._unseen = 0

        @contextlib.contextmanager
        def _own(self):
            self._unseen += 1
            yield
            self._unseen -= 1

        def rows_by_centre(self):
            return ((lanes, WatchedRows(rows, self)) for lanes, rows in super().rows_by_centre())

        @property
        def model(self):
            return self._model if self._unseen else WatchedModel(self._model)

        @model.setter
        def model(self, value):
            self._model = value

        def looked(self, kind, bound, found, rate=1.0, sample=()):
            number = sum(isinstance(one, Query) for one in record.of(self._client, self._when))
            coin = self._secret < 1 and self._when > ONCE
            rate = self._secret if coin else rate
            query = Query(self._client, self._when, number, kind, float(bound), rate, sample, coin)
            record.seen.append(query)
            if query in sums:
                found = found + torch.from_numpy(sums[query]).to(found).view(found.shape)
            return found

        def sample(self, rate, step=0):
            with self._own():
                return super().sample(rate, step)

        def clipped_gradient_sum(self, theta, sample=None):
            with self._own():
                found = super().clipped_gradient_sum(theta, sample)
            rate = 1.0 if sample is None else sample.rate
            return self.looked("gradients", self._lanes.clip[0], found, rate, samples[-1] if rate < 1 else ())

        def gradient_mean(self, theta, sample=None):
            with self._own():
                found = super().gradient_mean(theta, sample)
            rate = 1.0 if sample is None else sample.rate
            return self.looked("mean gradient", np.inf, found, rate, samples[-1] if rate < 1 else ())

        def noise(self, purpose, step=0, t=None, factor=1, size=None):
            with self._own():
                return self._drawn(super().noise(purpose, step, t, factor, size), factor)

        def distinct_noise(self, purpose, size):
            with self._own():
                return self._drawn(super().distinct_noise(purpose, size), 1)

        def _drawn(self, value, sign):
            address, standard = drawn[-1]
            flat = value.flatten().numpy().astype(np.float64)
            length = standard.astype(np.float64) @ standard
            std = flat @ standard / length / sign if length else 0.0
            assert np.abs(flat - sign * std * standard).max() <= 1e-5 * abs(sign * std) * np.abs(standard).max()
            record.seen.append(Draw(self._client, self._when, address, float(std), float(sign), standard.size))
            return value

    class WatchedRows:
        def __init__(self, shard, client):
            self._shard, self._client = shard, client

        def feature_sum(self, bound):
            return self._client.looked("features", bound, self._shard.feature_sum(bound))

        def gram(self, bound):
            return self._client.looked("squares", bound, self._shard.gram(bound))

        def spectrum(self, bound):
            found = self._shard.spectrum(bound)
            self._client.looked("curvature", bound**2, found[0])
            return found

        def hessian(self, hessian_sum, theta, bound):
            highest = bound if isinstance(bound, float) else bound.max()
            return self._client.looked("curvature", highest, hessian_sum(self._shard, theta, bound))

        def __getattr__(self, name):
            raise AssertionError(f"shard.{name}: the contract of the account does not cover this access to records")

    class WatchedModel:
        def __init__(self, model):
            self._model = model

        def clipped_hessian_sum(self, rows, theta, bound):
            return rows.hessian(self._model.clipped_hessian_sum, theta, bound)

        def __getattr__(self, name):
            if name in ("blocks", "dimension", "rows", "columns"):
                return getattr(self._model, name)
            raise AssertionError(f"model.{name}: the contract of the account does not cover this access to records")

    hessian_sum = dp_fednew.clipped_hessian_sum
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Address, "normal", normal)
        patch.setattr(Address, "generator", generator)
        patch.setattr(lane_vectors, "fill_normals", fill_normals)
        patch.setattr(client_host.ClientHost, "round_view", Watched)
        patch.setattr(dp_fednew, "clipped_hessian_sum", lambda rows, *rest: rows.hessian(hessian_sum, *rest))
        yield

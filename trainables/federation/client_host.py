"""The client host: an actor that keeps the shards of its clients on its device and answers one call a round."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainables.choices import Aggregate
from trainables.data.stored import StoredRows
from trainables.federation.denormals import taken_for_zero
from trainables.federation.exact_sum import to_grid, to_grid_
from trainables.federation.pack import CENTRE, ClientWork
from trainables.federation.problem import fetch
from trainables.federation.staging import Staging
from trainables.methods.base import Parts, Sample, State
from trainables.models import Model, kernels
from trainables.models.centring import centred
from trainables.models.lanes import SHAPES
from trainables.models.recorded import Recordings
from trainables.models.shard import Shard
from trainables.privacy.noise import Address
from trainables.privacy.participation import participants, takes_part


@dataclass(frozen=True)
class HostDiagnostics:
    """Sums over the host's clients, for the experimenter's eyes; not private, never a release."""

    loss: torch.Tensor
    clipped: torch.Tensor
    signal: torch.Tensor
    noise: torch.Tensor


@dataclass(frozen=True)
class HostReply:
    """What leaves a host in a round: the sum of its clients' releases, on the exact grid."""

    total: torch.Tensor
    diagnostics: HostDiagnostics | None


class ClientStateLostError(RuntimeError):
    """A host was started anew and its clients' states are gone: the pack must be taken up from a snapshot."""


@dataclass(frozen=True)
class ClientStates:
    """What every client keeps, after round t, laned."""

    lanes: tuple[str, ...]
    t: int
    clients: dict[int, State]

    @classmethod
    def merged(cls, parts: Sequence[ClientStates | None], t: int) -> ClientStates:
        """The states of all hosts together, after round t. One that was started again since has none."""
        found = [part for part in parts if part is not None and part.t == t]
        if len(found) < len(parts):
            raise ClientStateLostError(f"{len(parts) - len(found)} client hosts do not hold the state after round {t}")
        return cls(found[0].lanes, t, {c: state for part in found for c, state in part.clients.items()})

    def of(self, clients: Iterable[int]) -> ClientStates:
        """The states of some clients."""
        return ClientStates(self.lanes, self.t, {client: self.clients[client] for client in clients})


Sent = Mapping[str, torch.Tensor]
"""What goes out to the hosts: `theta`, and what the method broadcasts beside it."""


GradientSum = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Batch:
    """Clients that a host computes together, and their rows."""

    clients: tuple[int, ...]
    shard: Shard
    gradient_sum: GradientSum
    """The model's sum of clipped gradients over all rows, of weights and bounds."""
    automatic_sum: GradientSum
    """The same, clipped automatically."""

    @classmethod
    def load(cls, clients: tuple[int, ...], shard: Shard, model: Model) -> Batch:
        def gradient_sum(theta: torch.Tensor, clip: torch.Tensor) -> torch.Tensor:
            return model.clipped_gradient_sum(shard, theta, clip)[0]

        def automatic_sum(theta: torch.Tensor, clip: torch.Tensor) -> torch.Tensor:
            return model.clipped_gradient_sum(shard, theta, clip, automatic=True)[0]

        if shard.x.is_cuda:
            return cls(clients, shard, Recordings(gradient_sum), Recordings(automatic_sum))
        return cls(clients, shard, gradient_sum, automatic_sum)


class ClientHost:
    def __init__(self, index: int, device: str = "cpu") -> None:
        self.index = index
        self.device = device
        self._held: str | None = None
        self._batches: list[Batch] = []
        self._states: tuple[tuple[str, ...], int, list[State]] | None = None
        """The lanes, the round, and what the clients of every batch keep: (clients, lanes, ...)."""
        self._prepared: tuple[ClientWork, _Lanes] | None = None
        self._staging: Staging | None = None
        if device == "cpu":
            torch.set_num_threads(1)  # more cores means more hosts: no thread ever waits for another inside a round

    def prepare(self, work: ClientWork) -> torch.Tensor:
        """What the clients release once, before the first round, summed on the exact grid: the mean of their features,
        if those are to be centred and are not yet, else what their program says."""
        with taken_for_zero():
            return self._prepare(work)

    def _prepare(self, work: ClientWork) -> torch.Tensor:
        self._hold(work)
        lanes = self._lanes(work)
        once = []
        for batch in self._batches:
            everyone = torch.ones(len(batch.clients), len(work.lanes), 1, device=self.device)
            view = _Clients(batch, 0, work, lanes, everyone)
            if work.bound is not None and work.centre is None:
                once.append(view.noisy_feature_mean(work.bound) * _even(batch.shard.size, work))
            else:
                once.append(
                    work.program.prepare(view) * _weights(batch.shard.size, work.shipment.sizes, work.aggregate)
                )
        return torch.stack([to_grid(part).sum(0) for part in once]).sum(0)

    def round(self, work: ClientWork, t: int, sent: Sent, diagnose: bool) -> HostReply:
        """Every client's release for round t, summed: a pure function of the arguments and of the clients' states
        after round t - 1, which must be here."""
        with taken_for_zero():
            return self._round(work, t, sent, diagnose)

    def _round(self, work: ClientWork, t: int, sent: Sent, diagnose: bool) -> HostReply:
        self._hold(work)
        states = self._states_before(work, t)
        broadcast = {name: value.to(self.device) for name, value in sent.items()}
        weights = broadcast.pop("theta")
        lanes = self._lanes(work)
        size = work.program.release_size(work.shipment.model)
        total = torch.zeros(weights.shape[0], size, dtype=torch.float64, device=self.device)
        reported = _Reported(weights) if diagnose else None
        for batch, state in zip(self._batches, states, strict=True):
            present = lanes.present(batch.clients, t, work)
            if present is None:
                continue
            view = _Clients(batch, t, work, lanes, present, broadcast, state, reported)
            release = work.program.round(view, weights).expand(len(batch.clients), *total.shape)
            view.kept_secret()
            total += to_grid(release if work.all_alike else release * present).sum(0)
        self._states = (work.lanes, t, states)
        return HostReply(total, reported.collect() if reported else None)

    def _lanes(self, work: ClientWork) -> _Lanes:
        """Kept from round to round where the work comes as the same object."""
        if self._prepared is None or self._prepared[0] is not work:
            if self.device == "cuda" and self._staging is None:
                self._staging = Staging()
            self._prepared = (work, _Lanes(work, self.device, self._staging))
        return self._prepared[1]

    def _states_before(self, work: ClientWork, t: int) -> list[State]:
        """The clients' states after round t - 1, batch by batch, for the lanes that are still there."""
        if t == 1 or not work.program.stateful:
            return [{} for _ in self._batches]
        if self._states is None or self._states[1] != t - 1 or not set(work.lanes) <= set(self._states[0]):
            raise ClientStateLostError(f"client host {self.index} does not hold the state after round {t - 1}")
        lanes, _, kept = self._states
        # copies of the dictionaries: a round that fails half-way must leave the states as they were
        if lanes == work.lanes:
            return [dict(state) for state in kept]
        index = [lanes.index(lane) for lane in work.lanes]
        return [{name: value[:, index] for name, value in state.items()} for state in kept]

    def states(self) -> ClientStates | None:
        """For checkpoints: client by client, on the CPU."""
        if self._states is None:
            return None
        lanes, t, kept = self._states
        found = {
            client: {name: value[i].cpu() for name, value in state.items()}
            for batch, state in zip(self._batches, kept, strict=True)
            for i, client in enumerate(batch.clients)
        }
        return ClientStates(lanes, t, found)

    def restore(self, work: ClientWork, states: ClientStates) -> None:
        self._hold(work)
        kept = [
            {
                name: torch.stack([states.clients[client][name] for client in batch.clients]).to(self.device)
                for name in states.clients[batch.clients[0]]
            }
            for batch in self._batches
        ]
        self._states = (states.lanes, states.t, kept)

    def _hold(self, work: ClientWork) -> None:
        """Load the clients' rows, unless they are here already."""
        mine = work.assignment[self.index]
        # samples have as many rows as chance will have it; and whoever takes part rarely is not to be computed in vain
        apart = work.program.samples or work.program.participation < 1
        centre = "" if work.centre is None else hashlib.sha256(work.centre.tobytes()).hexdigest()
        held = f"{work.shipment.key}:{mine}:{apart}:{centre}:{work.precision}"
        if self._held == held:
            return
        self._batches, self._states = [], None
        x, y, rows = (fetch(part) for part in (work.shipment.x, work.shipment.y, work.shipment.rows))
        shape, sizes = SHAPES[self.device], work.shipment.sizes
        features_of = _picker(x, {client: rows[client] for client in mine})
        for clients, length in shape.batches(mine, sizes, apart):
            parts = [(centred(features_of(client), work.centre), y[rows[client]]) for client in clients]
            public = [sizes[client] for client in clients]
            shard = Shard.build(parts, self.device, rows=length, sizes=public, precision=work.precision)
            self._batches.append(Batch.load(clients, shard, work.shipment.model))
        self._held = held


def _picker(x: NDArray[np.float32] | StoredRows, rows: Mapping[int, NDArray[np.int64]]) -> Callable[[int], Any]:
    """Gives every client's features, once. What lies in a file is read in one pass for all of them."""
    if isinstance(x, StoredRows):
        return dict(zip(rows, x.parts(list(rows.values())), strict=True)).pop
    return lambda client: x[rows[client]]


def _weights(size: torch.Tensor, sizes: Sequence[int], aggregate: Aggregate) -> torch.Tensor:
    """How clients weigh where all take part: 1 in the mean."""
    return size * (len(sizes) / sum(sizes)) if aggregate == "size" else torch.ones_like(size)


def _even(size: torch.Tensor, work: ClientWork) -> torch.Tensor:
    """In the mean of the features every record weighs the same, or every user."""
    return _weights(size, work.shipment.sizes, "size" if work.level == "record" else "uniform")


class _Lanes:
    """The lanes' vectors on the device, and the noise of a seed drawn once for all lanes that have it."""

    def __init__(self, work: ClientWork, device: str, staging: Staging | None) -> None:
        self._staging = staging
        self.device, self.shape = device, (len(work.lanes), work.shipment.model.dimension)
        self.clip = torch.from_numpy(work.clip).to(device)
        self.std = {name: torch.from_numpy(std).to(device).unsqueeze(1) for name, std in work.noise_std.items()}
        self.seeds, self._seed_of_lane, count = np.unique(work.seeds, return_inverse=True, return_counts=True)
        self.which = torch.from_numpy(self._seed_of_lane).to(device)
        by_seed = torch.from_numpy(np.argsort(self._seed_of_lane, kind="stable")).to(device)
        self.of_seed = by_seed.split(count.tolist())
        """Which lanes have each seed."""
        self.distinct = torch.from_numpy(work.distinct_noises()[0]).to(device)
        self._addressed: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        """Clients and seeds on the device, for noise that is made there."""
        self.hypers = {name: torch.from_numpy(v).to(device).unsqueeze(1) for name, v in work.hypers.items()}
        self._everyone: dict[int, torch.Tensor] = {}
        """How clients weigh where all are alike, by their number."""

    def present(self, clients: Sequence[int], t: int, work: ClientWork) -> torch.Tensor | None:
        """How clients weigh in a round, (clients, lanes, 1), and 0 where they do not take part; none, if nobody does.
        The weights of those who take part are 1 in the mean."""
        if work.all_alike:
            if len(clients) not in self._everyone:
                self._everyone[len(clients)] = torch.ones(len(clients), len(work.lanes), 1, device=self.device)
            return self._everyone[len(clients)]
        sizes, share, mine = np.asarray(work.shipment.sizes), work.program.participation, np.asarray(clients)
        chosen = [participants(int(seed), t, len(sizes), share) for seed in self.seeds]
        table = np.stack([some[mine] for some in chosen], axis=1).astype(np.float32)
        if not table.any():
            return None
        if work.aggregate == "size":
            table *= (sizes[mine, None] / [sizes[some].mean() for some in chosen]).astype(np.float32)
        return torch.from_numpy(table[:, self._seed_of_lane]).to(self.device).unsqueeze(2)

    def coins(self, clients: Sequence[int], t: int, probability: float) -> torch.Tensor:
        """(clients, lanes, 1): 1 where a client takes part in a round, by a coin of its own that nobody else sees."""
        fallen = [[takes_part(int(seed), client, t, probability) for seed in self.seeds] for client in clients]
        table = np.asarray(fallen, dtype=np.float32)
        return torch.from_numpy(table[:, self._seed_of_lane]).to(self.device).unsqueeze(2)

    def noise(self, clients: Sequence[int], t: int, step: int, purpose: str, size: int) -> torch.Tensor:
        drawn = self._drawn(clients, t, step, purpose, size)
        return drawn[:, self.which].mul_(self.std[purpose])

    def distinct_noise(self, clients: Sequence[int], t: int, purpose: str, size: int) -> torch.Tensor:
        drawn = self._drawn(clients, t, 0, purpose, size)
        return drawn[:, self.which[self.distinct]] * self.std[purpose][self.distinct]

    def _drawn(self, clients: Sequence[int], t: int, step: int, purpose: str, size: int) -> torch.Tensor:
        def draw(into: NDArray[np.float32]) -> None:
            for i, client in enumerate(clients):
                for j, seed in enumerate(self.seeds):
                    into[i, j] = Address(int(seed), client, t, step, purpose).normal(size)

        shape = (len(clients), len(self.seeds), size)
        if self.device == "cuda" and kernels.chosen("cuda") == "triton":
            return self._made_there(tuple(clients), t, step, purpose, size)
        if self._staging is not None:
            return self._staging.sent(shape, draw)
        drawn = np.empty(shape, dtype=np.float32)
        draw(drawn)
        return torch.from_numpy(drawn)

    def _made_there(self, clients: tuple[int, ...], t: int, step: int, purpose: str, size: int) -> torch.Tensor:
        from trainables.privacy import noise_triton

        if clients not in self._addressed:
            numbers = (np.asarray(clients, dtype=np.int64), self.seeds.astype(np.int64))
            there, seeds = (torch.from_numpy(some).to(self.device) for some in numbers)
            self._addressed[clients] = there, seeds
        return noise_triton.normals(*self._addressed[clients], t, step, purpose, size)


class _Reported:
    """Diagnostics of a round, summed over clients."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.loss = torch.zeros(weights.shape[0], dtype=torch.float64, device=weights.device)
        self.clipped = torch.zeros_like(self.loss)
        self.signal = torch.zeros(weights.shape, dtype=torch.float64, device=weights.device)
        self.noise = torch.zeros_like(self.signal)

    def collect(self) -> HostDiagnostics:
        return HostDiagnostics(self.loss, self.clipped, self.signal, self.noise)


class _Clients:
    """The clients of a batch in one round, as their program sees them."""

    def __init__(
        self,
        batch: Batch,
        t: int,
        work: ClientWork,
        lanes: _Lanes,
        present: torch.Tensor,
        broadcast: Mapping[str, torch.Tensor] | None = None,
        state: State | None = None,
        reported: _Reported | None = None,
    ) -> None:
        self.t, self.rounds, self._program, self._level = t, work.rounds, work.program, work.level
        self.model, self.shard, self.size = work.shipment.model, batch.shard, batch.shard.size
        self.clip = lanes.clip.unsqueeze(1)
        self.hypers: Mapping[str, torch.Tensor] = lanes.hypers
        self.broadcast: Mapping[str, torch.Tensor] = broadcast or {}
        self.state: State = {} if state is None else state
        self._clients, self._lanes, self._present, self._all_alike = batch.clients, lanes, present, work.all_alike
        self._whole: Parts = [(slice(None), batch.shard)]
        self._secret, self._answered = work.secret_participation, False
        self._automatic, self._sums = work.automatic, {False: batch.gradient_sum, True: batch.automatic_sum}
        self._reported, self._report_noise, self._noise_over = reported, reported, self.size

    def clipped_gradient_sum(self, theta: torch.Tensor, sample: Sample | None = None) -> torch.Tensor:
        parts, over = (self._whole, self.size) if sample is None else (sample.parts, sample.rate * self.size)
        return self._gradient_sum(theta, self._lanes.clip, parts, over, self._automatic)

    def gradient_mean(self, theta: torch.Tensor, sample: Sample | None = None) -> torch.Tensor:
        # the largest number, not infinity: filling rows have an infinite norm, and their share of it must be zero
        unbounded = torch.full_like(self._lanes.clip, torch.finfo(theta.dtype).max)
        report_noise = self._report_noise
        parts, over = (self._whole, self.size) if sample is None else (sample.parts, sample.rate * self.size)
        mean = (self._gradient_sum(theta, unbounded, parts, over) / over).to(theta.dtype)
        # the noise comes once, to what is made of the gradients of all steps
        self._report_noise, self._noise_over = report_noise, torch.ones_like(self.size)
        return mean

    def _gradient_sum(
        self, theta: torch.Tensor, clip: torch.Tensor, parts: Parts, over: torch.Tensor, automatic: bool = False
    ) -> torch.Tensor:
        """`over`: what a report divides the sum by."""
        reported = self._reported
        if reported is None:
            self._report_noise = None  # a further local step
        self._reported, self._noise_over = None, over  # of several steps the first one, at theta itself, is reported
        if reported is None and parts is self._whole:
            return self._sums[automatic](theta, clip)
        how = {"automatic": True} if automatic else {}  # a plug-in's head may know plain clipping alone
        sums = []
        for lanes, shard in parts:
            part, diagnostics = self.model.clipped_gradient_sum(
                shard, theta[..., lanes, :], clip[lanes], diagnose=reported is not None, **how
            )
            sums.append(part)
            if reported is not None and diagnostics is not None:
                reported.loss[lanes] += self._mean(diagnostics.loss.unsqueeze(2), over, lanes).squeeze(1)
                reported.clipped[lanes] += self._mean(diagnostics.clipped.unsqueeze(2), over, lanes).squeeze(1)
                reported.signal[lanes] += self._mean(part, over, lanes)
        if parts is self._whole:
            return sums[0]
        total = self.zeros().double()
        for (lanes, _), part in zip(parts, sums, strict=True):
            total[:, lanes] = part
        return total

    def _mean(self, values: torch.Tensor, over: torch.Tensor, lanes: slice | torch.Tensor) -> torch.Tensor:
        """For a report: over the clients that are present."""
        mean = values / over
        if not self._all_alike:
            mean = mean * self._present[:, lanes]
        return to_grid_(mean.double()).sum(0)

    def sample(self, rate: float, step: int = 0) -> Sample:
        if rate == 1:
            return Sample(self._whole, rate)
        if not self._program.samples:
            raise RuntimeError(f"{self._program.name} looks at samples of rows: let its `samples` be true")
        sizes = [int(size) for size in self.size.flatten()]
        parts: list[tuple[slice | torch.Tensor, Shard]] = []
        for seed, lanes in zip(self._lanes.seeds, self._lanes.of_seed, strict=True):
            chosen = [
                np.flatnonzero(Address(int(seed), client, self.t, step, "sample").generator().random(size) < rate)
                for client, size in zip(self._clients, sizes, strict=True)
            ]
            parts.append((lanes, self.shard.sample(chosen)))
        return Sample(parts, rate)

    def noise(
        self, purpose: str, step: int = 0, t: int | None = None, factor: float = 1, size: int | None = None
    ) -> torch.Tensor:
        width = self._lanes.shape[1] if size is None else size
        noise = self._lanes.noise(self._clients, self.t if t is None else t, step, purpose, width)
        if factor != 1:
            noise.mul_(factor)
        if self._report_noise is not None and size is None:
            self._report_noise.noise += self._mean(noise, self._noise_over, slice(None))
        return noise

    def noised_update(self, update: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        noise = self.noise("gradient", size=update.shape[-1]) * scale
        self._answered = True
        if self._report_noise is not None:  # of what is added to weights, without what may stand behind it
            over = self._noise_over * self._secret
            self._report_noise.noise += self._mean(noise[..., : self._lanes.shape[1]], over, slice(None))
        if self._secret == 1:
            return update + noise
        return (update * self._lanes.coins(self._clients, self.t, self._secret) + noise) / self._secret

    def kept_secret(self) -> None:
        """After a round: a secret that is paid for by less noise must be one."""
        if self._secret < 1 and not self._answered:
            raise RuntimeError(f"{self._program.name} tells who takes part: let its release be a `noised_update`")

    def turn_mask(self, every: int) -> torch.Tensor:
        turns = [float((self.t - 1 - client) % every == 0) for client in self._clients]
        return torch.tensor(turns, device=self._lanes.device).view(-1, 1, 1)

    def noise_std(self, purpose: str) -> torch.Tensor:
        return self._lanes.std[purpose]

    def zeros(self) -> torch.Tensor:
        return torch.zeros(len(self._clients), *self._lanes.shape, device=self._lanes.device)

    def distinct_noise(self, purpose: str, size: int) -> torch.Tensor:
        return self._lanes.distinct_noise(self._clients, self.t, purpose, size)

    def noisy_feature_mean(self, bound: float) -> torch.Tensor:
        """The mean of the rows' features, each clipped to `bound`, with noise: a record's in the sum, a user's in the
        mean. (clients, distinct noises, features)"""
        total = self.shard.feature_sum(bound).unsqueeze(1)
        noise = self.distinct_noise(CENTRE, total.shape[2])
        return total / self.size + noise if self._level == "user" else (total + noise) / self.size

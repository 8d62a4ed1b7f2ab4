"""The client host: an actor that keeps the shards of its clients on its device and answers one call a round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trainables.exact import to_grid
from trainables.methods.base import State
from trainables.models.lanes import SHAPES
from trainables.models.softmax import Shard, SoftmaxHead
from trainables.pack import ClientWork
from trainables.privacy.noise import Address
from trainables.problem import fetch


@dataclass(frozen=True)
class HostDiagnostics:
    """Sums over the host's clients, for the experimenter's eyes; not private, never a release."""

    loss: NDArray
    clipped: NDArray
    signal: NDArray
    noise: NDArray


@dataclass(frozen=True)
class HostReply:
    """What leaves a host in a round: the sum of its clients' releases, on the exact grid."""

    total: NDArray[np.float64]
    prepared: NDArray[np.float64] | None
    """In the first round, the sum of what the clients release once."""
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
    def merged(cls, parts: Iterable[ClientStates | None]) -> ClientStates:
        """The states of all hosts together."""
        found = [part for part in parts if part is not None]
        return cls(found[0].lanes, found[0].t, {c: state for part in found for c, state in part.clients.items()})

    def of(self, clients: Iterable[int]) -> ClientStates:
        """The states of some clients."""
        return ClientStates(self.lanes, self.t, {client: self.clients[client] for client in clients})


Sent = Mapping[str, NDArray[np.float32]]
"""What goes out to the hosts: `theta`, and what the method broadcasts beside it."""


@dataclass(frozen=True)
class Batch:
    """Clients that a host computes together, and their rows."""

    clients: tuple[int, ...]
    shard: Shard


class ClientHost:
    def __init__(self, index: int, device: str = "cpu") -> None:
        self.index = index
        self.device = device
        self._held: str | None = None
        self._batches: list[Batch] = []
        self._states: tuple[tuple[str, ...], int, list[State]] | None = None
        """The lanes, the round, and what the clients of every batch keep: (clients, lanes, ...)."""
        if device == "cpu":
            torch.set_num_threads(1)  # more cores means more hosts: no thread ever waits for another inside a round

    def round(self, work: ClientWork, t: int, sent: Sent, diagnose: bool) -> HostReply:
        """Every client's release for round t, summed: a pure function of the arguments and of the clients' states
        after round t - 1, which must be here."""
        self._hold(work)
        states = self._states_before(work, t)
        broadcast = {name: torch.from_numpy(np.array(value)).to(self.device) for name, value in sent.items()}
        weights = broadcast.pop("theta")
        lanes = _Lanes(work, weights)
        total = torch.zeros(weights.shape, dtype=torch.float64, device=self.device)
        prepared: torch.Tensor | None = None
        reported = _Reported(weights) if diagnose else None
        for batch, state in zip(self._batches, states, strict=True):
            view = _Clients(batch, t, work.shipment.model, lanes, broadcast, state, reported)
            once = work.program.prepare(view) if t == 1 else None
            if once is not None:
                part = to_grid(once).sum(0)
                prepared = part if prepared is None else prepared + part
            total += to_grid(work.program.round(view, weights)).sum(0)
        self._states = (work.lanes, t, states)
        return HostReply(
            total.cpu().numpy(),
            None if prepared is None else prepared.cpu().numpy(),
            reported.collect() if reported else None,
        )

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
        held = f"{work.shipment.key}:{mine}"
        if self._held == held:
            return
        self._batches, self._states = [], None
        x, y, rows = (fetch(part) for part in (work.shipment.x, work.shipment.y, work.shipment.rows))
        together = [mine] if SHAPES[self.device].clients_together else [(client,) for client in mine]
        for clients in together:
            parts = [(x[rows[client]], y[rows[client]]) for client in clients]
            self._batches.append(Batch(clients, Shard.build(parts, self.device)))
        self._held = held


class _Lanes:
    """The lanes' vectors on the device, and the noise of a seed drawn once for all lanes that have it."""

    def __init__(self, work: ClientWork, weights: torch.Tensor) -> None:
        self.clip = torch.from_numpy(work.clip).to(weights)
        self.std = {name: torch.from_numpy(std).to(weights).unsqueeze(1) for name, std in work.noise_std.items()}
        self.seeds, which = np.unique(work.seeds, return_inverse=True)
        self.which = torch.from_numpy(which).to(weights.device)
        self.distinct = torch.from_numpy(work.distinct_noises()[0]).to(weights.device)
        self.weights = weights
        self.hypers = {name: torch.from_numpy(v).to(weights).unsqueeze(1) for name, v in work.hypers.items()}

    def noise(self, clients: Sequence[int], t: int, step: int, purpose: str) -> torch.Tensor:
        drawn = self._drawn(clients, t, step, purpose, self.weights.shape[1])
        return drawn[:, self.which] * self.std[purpose]

    def distinct_noise(self, clients: Sequence[int], t: int, purpose: str, size: int) -> torch.Tensor:
        drawn = self._drawn(clients, t, 0, purpose, size)
        return drawn[:, self.which[self.distinct]] * self.std[purpose][self.distinct]

    def _drawn(self, clients: Sequence[int], t: int, step: int, purpose: str, size: int) -> torch.Tensor:
        drawn = np.empty((len(clients), len(self.seeds), size), dtype=np.float32)
        for i, client in enumerate(clients):
            for j, seed in enumerate(self.seeds):
                drawn[i, j] = Address(int(seed), client, t, step, purpose).normal(size)
        return torch.from_numpy(drawn).to(self.weights)


class _Reported:
    """Diagnostics of a round, summed over clients."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.loss = torch.zeros(weights.shape[0], dtype=torch.float64, device=weights.device)
        self.clipped = torch.zeros_like(self.loss)
        self.signal = torch.zeros(weights.shape, dtype=torch.float64, device=weights.device)
        self.noise = torch.zeros_like(self.signal)

    def collect(self) -> HostDiagnostics:
        return HostDiagnostics(*(part.cpu().numpy() for part in (self.loss, self.clipped, self.signal, self.noise)))


class _Clients:
    """The clients of a batch in one round, as their program sees them."""

    def __init__(
        self,
        batch: Batch,
        t: int,
        model: SoftmaxHead,
        lanes: _Lanes,
        broadcast: Mapping[str, torch.Tensor],
        state: State,
        reported: _Reported | None,
    ) -> None:
        self.t, self.size = t, batch.shard.size
        self.hypers: Mapping[str, torch.Tensor] = lanes.hypers
        self.broadcast, self.state = broadcast, state
        self._batch, self._model, self._lanes = batch, model, lanes
        self._reported, self._report_noise = reported, reported

    def clipped_gradient_sum(self, theta: torch.Tensor) -> torch.Tensor:
        if self._reported is None:
            self._report_noise = None  # a further local step
        reported = self._reported
        total, diagnostics = self._model.clipped_gradient_sum(
            self._batch.shard, theta, self._lanes.clip, diagnose=reported is not None
        )
        if reported is not None and diagnostics is not None:
            self._reported = None  # of several local steps the first one, at theta itself, is reported
            size = self.size.squeeze(2)
            reported.loss += to_grid(diagnostics.loss / size).sum(0)
            reported.clipped += to_grid(diagnostics.clipped / size).sum(0)
            reported.signal += to_grid(total / self.size).sum(0)
        return total

    def noise(self, purpose: str, step: int = 0, t: int | None = None, sign: int = 1) -> torch.Tensor:
        noise = sign * self._lanes.noise(self._batch.clients, self.t if t is None else t, step, purpose)
        if self._report_noise is not None:
            self._report_noise.noise += to_grid(noise / self.size).sum(0)
        return noise

    def zeros(self) -> torch.Tensor:
        shape = (self._batch.shard.clients, *self._lanes.weights.shape)
        return torch.zeros(shape, dtype=self._lanes.weights.dtype, device=self._lanes.weights.device)

    def clipped_gram(self, bound: float) -> torch.Tensor:
        shard = self._batch.shard
        scaled = shard.x * (bound / shard.norm).clamp(max=1)
        return (scaled.mT @ scaled).flatten(1)

    def distinct_noise(self, purpose: str, size: int) -> torch.Tensor:
        return self._lanes.distinct_noise(self._batch.clients, self.t, purpose, size)

"""The client host: an actor that keeps the shards of its clients on its device and answers one call a round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trainables.exact import to_grid
from trainables.methods.base import State
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
    """What clients keep, after round t, laned."""

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

    def on(self, device: str) -> ClientStates:
        moved = {client: {n: v.to(device) for n, v in state.items()} for client, state in self.clients.items()}
        return ClientStates(self.lanes, self.t, moved)


Sent = Mapping[str, NDArray[np.float32]]
"""What goes out to the hosts: `theta`, and what the method broadcasts beside it."""


class ClientHost:
    def __init__(self, index: int, device: str = "cpu") -> None:
        self.index = index
        self.device = device
        self._held: str | None = None
        self._shards: dict[int, Shard] = {}
        self._states: ClientStates | None = None
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
        for client in work.assignment[self.index]:
            shard, state = self._shards[client], states[client]
            view = _Client(client, t, shard, work.shipment.model, lanes, broadcast, state, reported)
            once = work.program.prepare(view) if t == 1 else None
            if once is not None:
                prepared = to_grid(once) if prepared is None else prepared + to_grid(once)
            total += to_grid(work.program.round(view, weights))
        self._states = ClientStates(work.lanes, t, states)
        return HostReply(
            total.cpu().numpy(),
            None if prepared is None else prepared.cpu().numpy(),
            reported.collect() if reported else None,
        )

    def _states_before(self, work: ClientWork, t: int) -> dict[int, State]:
        """The clients' states after round t - 1, for the lanes that are still there."""
        mine = work.assignment[self.index]
        if t == 1 or not work.program.stateful:
            return {client: {} for client in mine}
        kept = self._states
        if kept is None or kept.t != t - 1 or not set(work.lanes) <= set(kept.lanes):
            raise ClientStateLostError(f"client host {self.index} does not hold the state after round {t - 1}")
        # copies of the dictionaries: a round that fails half-way must leave the states as they were
        if kept.lanes == work.lanes:
            return {client: dict(state) for client, state in kept.clients.items()}
        index = [kept.lanes.index(lane) for lane in work.lanes]
        return {client: {name: value[index] for name, value in state.items()} for client, state in kept.clients.items()}

    def states(self) -> ClientStates | None:
        """For checkpoints."""
        return self._states.on("cpu") if self._states else None

    def restore(self, states: ClientStates) -> None:
        self._states = states.on(self.device)

    def _hold(self, work: ClientWork) -> None:
        """Load the clients' rows, unless they are here already."""
        mine = work.assignment[self.index]
        held = f"{work.shipment.key}:{mine}"
        if self._held == held:
            return
        self._shards.clear()
        x, y, rows = (fetch(part) for part in (work.shipment.x, work.shipment.y, work.shipment.rows))
        for client in mine:
            self._shards[client] = Shard.build(x[rows[client]], y[rows[client]], self.device)
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

    def noise(self, client: int, t: int, step: int, purpose: str) -> torch.Tensor:
        return self._drawn(client, t, step, purpose, self.weights.shape[1])[self.which] * self.std[purpose]

    def distinct_noise(self, client: int, t: int, purpose: str, size: int) -> torch.Tensor:
        return self._drawn(client, t, 0, purpose, size)[self.which[self.distinct]] * self.std[purpose][self.distinct]

    def _drawn(self, client: int, t: int, step: int, purpose: str, size: int) -> torch.Tensor:
        drawn = np.stack([Address(int(seed), client, t, step, purpose).normal(size) for seed in self.seeds])
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


class _Client:
    """One client in one round, as its program sees it."""

    def __init__(
        self,
        client: int,
        t: int,
        shard: Shard,
        model: SoftmaxHead,
        lanes: _Lanes,
        broadcast: Mapping[str, torch.Tensor],
        state: State,
        reported: _Reported | None,
    ) -> None:
        self.t, self.size = t, shard.size
        self.hypers: Mapping[str, torch.Tensor] = lanes.hypers
        self.broadcast, self.state = broadcast, state
        self._client = client
        self._shard, self._model, self._lanes = shard, model, lanes
        self._reported, self._report_noise = reported, reported

    def clipped_gradient_sum(self, theta: torch.Tensor) -> torch.Tensor:
        reported = self._reported
        total, diagnostics = self._model.clipped_gradient_sum(
            self._shard, theta, self._lanes.clip, diagnose=reported is not None
        )
        if reported is not None and diagnostics is not None:
            self._reported = None  # of several local steps the first one, at theta itself, is reported
            reported.loss += to_grid(diagnostics.loss / self.size)
            reported.clipped += to_grid(diagnostics.clipped / self.size)
            reported.signal += to_grid(total / self.size)
        return total

    def noise(self, purpose: str, step: int = 0, t: int | None = None) -> torch.Tensor:
        noise = self._lanes.noise(self._client, self.t if t is None else t, step, purpose)
        if self._report_noise is not None:
            self._report_noise.noise += to_grid(noise / self.size)
            self._report_noise = None
        return noise

    def clipped_gram(self, bound: float) -> torch.Tensor:
        scaled = self._shard.x * (bound / self._shard.norm).clamp(max=1)
        return (scaled.T @ scaled).flatten()

    def distinct_noise(self, purpose: str, size: int) -> torch.Tensor:
        return self._lanes.distinct_noise(self._client, self.t, purpose, size)

"""The client host: an actor that keeps the shards of its clients on its device and answers one call a round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trainables.exact import to_grid
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
    diagnostics: HostDiagnostics | None


class ClientHost:
    def __init__(self, index: int, device: str = "cpu") -> None:
        self.index = index
        self.device = device
        self._held: str | None = None
        self._shards: dict[int, Shard] = {}
        if device == "cpu":
            torch.set_num_threads(1)  # more cores means more hosts: no thread ever waits for another inside a round

    def round(self, work: ClientWork, t: int, theta: NDArray[np.float32], diagnose: bool) -> HostReply:
        """Every client's release for round t, summed. A pure function of its arguments."""
        self._hold(work)
        weights = torch.from_numpy(np.array(theta)).to(self.device)
        lanes = _Lanes(work, weights)
        total = torch.zeros(weights.shape, dtype=torch.float64, device=self.device)
        reported = _Reported(weights) if diagnose else None
        for client in work.assignment[self.index]:
            view = _Client(client, t, self._shards[client], work.shipment.model, lanes, reported)
            total += to_grid(work.program.round(view, weights))
        return HostReply(total.cpu().numpy(), reported.collect() if reported else None)

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
        self.weights = weights

    def noise(self, client: int, t: int, step: int, purpose: str) -> torch.Tensor:
        size = self.weights.shape[1]
        drawn = np.stack([Address(int(seed), client, t, step, purpose).normal(size) for seed in self.seeds])
        return torch.from_numpy(drawn).to(self.weights)[self.which] * self.std[purpose]


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
        self, client: int, t: int, shard: Shard, model: SoftmaxHead, lanes: _Lanes, reported: _Reported | None
    ) -> None:
        self.size = shard.size
        self._client, self._t = client, t
        self._shard, self._model, self._lanes, self._reported = shard, model, lanes, reported

    def clipped_gradient_sum(self, theta: torch.Tensor) -> torch.Tensor:
        reported = self._reported
        total, diagnostics = self._model.clipped_gradient_sum(
            self._shard, theta, self._lanes.clip, diagnose=reported is not None
        )
        if reported is not None and diagnostics is not None:
            reported.loss += to_grid(diagnostics.loss / self.size)
            reported.clipped += to_grid(diagnostics.clipped / self.size)
            reported.signal += to_grid(total / self.size)
        return total

    def noise(self, purpose: str, step: int = 0) -> torch.Tensor:
        noise = self._lanes.noise(self._client, self._t, step, purpose)
        if self._reported is not None:
            self._reported.noise += to_grid(noise / self.size)
        return noise

"""The clients of a batch in one round, as their program sees them (`ClientRound` in trainables/methods/base.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainables.federation.exact_sum import to_grid_
from trainables.federation.lane_vectors import LaneVectors, noise_at
from trainables.federation.pack import CENTRE, LENGTHS, ClientWork
from trainables.methods.base import Parts, Sample, State
from trainables.models import Model, centring, kernels, recorded
from trainables.models.network import NetworkModel
from trainables.models.recorded import Function, Recordings
from trainables.models.shard import Shard
from trainables.privacy.lengths import TYPICAL
from trainables.privacy.noise import Address, keyed

GradientSum = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SUM, NOISY = "sum", "noisy"


@dataclass(frozen=True)
class Batch:
    """Clients that a host computes together, and their rows."""

    clients: tuple[int, ...]
    shard: Shard
    sums: Mapping[bool, GradientSum]
    """The model's sum of clipped gradients over all rows, as a function of weights and clip bounds. The key: whether
    clipping is automatic."""
    noisy: Recordings | None
    """Has `ClientRound.noisy_gradient` as the functions (NOISY, key), of weights, round, step, clip bounds and the
    tensors of `LaneVectors.noise_inputs`. None: it is not recorded."""

    @classmethod
    def load(cls, clients: tuple[int, ...], shard: Shard, model: Model) -> Batch:
        network, sums = isinstance(model, NetworkModel), {kind: _sum_of(model, shard, kind) for kind in (False, True)}
        if not shard.x.is_cuda or (isinstance(model, NetworkModel) and not model.can_be_recorded(shard)):
            return cls(clients, shard, sums, None)
        recordings = recordings_of(sums, shard, network)
        recorded_sums = {kind: _recorded_sum(recordings, kind) for kind in sums}
        noise_on_device = kernels.chosen("cuda") == "triton"
        return cls(clients, shard, recorded_sums, recordings if noise_on_device and not network else None)


def _sum_of(model: Model, shard: Shard, automatic: bool) -> GradientSum:
    options = {"automatic": True} if automatic else {}  # a plug-in's model may support plain clipping only

    def gradient_sum(theta: torch.Tensor, clip: torch.Tensor) -> torch.Tensor:
        return centring.clipped_gradient_sum(model, shard, theta, clip, **options)[0]

    return gradient_sum


def recordings_of(sums: Mapping[bool, GradientSum], shard: Shard, network: bool) -> Recordings:
    """Recordings of gradient sums and noisy gradients: together, so that a pack with other lanes drops all of them."""
    functions: dict[Hashable, Function] = {}
    for kind, gradient_sum in sums.items():
        functions[SUM, kind] = _as_tuple(gradient_sum)
        functions[NOISY, kind] = _with_noise(gradient_sum, shard)
    return Recordings(functions, network=network)


def _as_tuple(gradient_sum: GradientSum) -> Function:
    return lambda theta, clip: (gradient_sum(theta, clip),)


def _recorded_sum(recordings: Recordings, automatic: bool) -> GradientSum:
    return lambda theta, clip: recordings((SUM, automatic), theta, clip)[0]


def _with_noise(gradient_sum: GradientSum, shard: Shard) -> Function:
    def noisy(
        theta: torch.Tensor, t: torch.Tensor, step: torch.Tensor, clip: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor]:
        noise = noise_at(t, step, theta.shape[-1], *inputs)
        return (_noisy_mean(gradient_sum(theta, clip), noise, shard.size, theta.dtype),)

    return noisy


def _noisy_mean(total: torch.Tensor, noise: torch.Tensor, size: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return ((total + noise) / size).to(dtype)


@dataclass(frozen=True)
class Diagnostics:
    """Sums over clients, for the experimenter only: not private, and never released."""

    loss: torch.Tensor
    clipped: torch.Tensor
    signal: torch.Tensor
    noise: torch.Tensor

    @classmethod
    def zeros_like(cls, theta: torch.Tensor) -> Diagnostics:
        vectors = torch.zeros(2, *theta.shape, dtype=torch.float64, device=theta.device)
        return cls(*vectors.new_zeros(2, theta.shape[0]), *vectors)


class BatchRound:
    """The `ClientRound` of a batch. `client_weights`: (clients, lanes, 1), 0 for clients that do not take part."""

    def __init__(
        self,
        batch: Batch,
        t: int,
        work: ClientWork,
        lanes: LaneVectors,
        client_weights: torch.Tensor,
        broadcast: Mapping[str, torch.Tensor] | None = None,
        state: State | None = None,
        diagnostics: Diagnostics | None = None,
    ) -> None:
        self.t, self.rounds, self._program, self._level = t, work.rounds, work.program, work.level
        self.model, self._shard, self.size = work.data.model, batch.shard, batch.shard.size
        self.clip = lanes.clip.unsqueeze(1)
        self.hypers: Mapping[str, torch.Tensor] = lanes.hypers
        self.broadcast: Mapping[str, torch.Tensor] = broadcast or {}
        self.state: State = {} if state is None else state
        self._clients, self._lanes = batch.clients, lanes
        self._weights, self._all_alike = client_weights, work.all_alike
        self._all_rows: Parts = [(slice(None), batch.shard)]
        self._secret, self._secret_kept = work.secret_participation, False
        self._bound = math.inf if work.bound is None else work.bound
        self._length = work.length
        self._automatic, self._sums, self._noisy = work.automatic, batch.sums, batch.noisy
        # diagnostics cover the first local step, at theta itself, and the noise that belongs to it
        self._diagnose_gradient, self._diagnose_noise, self._noise_divisor = diagnostics, diagnostics, self.size

    def clipped_gradient_sum(self, theta: torch.Tensor, sample: Sample | None = None) -> torch.Tensor:
        parts, divisor = self._rows_of(sample)
        return self._gradient_sum(theta, self._lanes.clip, parts, divisor, self._automatic)

    def gradient_mean(self, theta: torch.Tensor, sample: Sample | None = None) -> torch.Tensor:
        # the largest float, not infinity: padding rows have an infinite norm, and must contribute zero
        unbounded = torch.full_like(self._lanes.clip, torch.finfo(theta.dtype).max)
        diagnose_noise = self._diagnose_noise
        parts, divisor = self._rows_of(sample)
        mean = (self._gradient_sum(theta, unbounded, parts, divisor) / divisor).to(theta.dtype)
        # a program that uses this mean adds noise once, after all its steps: keep measuring until then
        self._diagnose_noise, self._noise_divisor = diagnose_noise, torch.ones_like(self.size)
        return mean

    def noisy_gradient(self, theta: torch.Tensor, step: int = 0, purpose: str = "gradient") -> torch.Tensor:
        small = recorded.is_small(len(self._clients), theta)
        if self._noisy is None or not small or self._diagnose_gradient is not None:
            return _noisy_mean(self.clipped_gradient_sum(theta), self.noise(purpose, step), self.size, theta.dtype)
        self._diagnose_noise = None  # a further local step
        moment, constants = self._lanes.noise_inputs(self._clients, self.t, step, purpose)
        (mean,) = self._noisy((NOISY, self._automatic), theta, *moment, constants=(self._lanes.clip, *constants))
        return mean

    def _rows_of(self, sample: Sample | None) -> tuple[Parts, torch.Tensor]:
        """The rows, and what a mean over them is divided by."""
        return (self._all_rows, self.size) if sample is None else (sample.parts, sample.rate * self.size)

    def _gradient_sum(
        self, theta: torch.Tensor, clip: torch.Tensor, parts: Parts, divisor: torch.Tensor, automatic: bool = False
    ) -> torch.Tensor:
        diagnostics = self._diagnose_gradient
        if diagnostics is None:
            self._diagnose_noise = None  # a further local step
        self._diagnose_gradient, self._noise_divisor = None, divisor
        if diagnostics is None and parts is self._all_rows:
            return self._sums[automatic](theta, clip)
        options: dict[str, Any] = {"automatic": True} if automatic else {}  # as in `_sum_of`
        sums = []
        for lanes, shard in parts:
            part, measured = centring.clipped_gradient_sum(
                *(self.model, shard.for_lanes(lanes), theta[..., lanes, :], clip[lanes]),
                diagnose=diagnostics is not None,
                **options,
            )
            sums.append(part)
            if diagnostics is not None and measured is not None:
                diagnostics.loss[lanes] += self._mean(measured.loss.unsqueeze(2), divisor, lanes).squeeze(1)
                diagnostics.clipped[lanes] += self._mean(measured.clipped.unsqueeze(2), divisor, lanes).squeeze(1)
                diagnostics.signal[lanes] += self._mean(part, divisor, lanes)
        if parts is self._all_rows:
            return sums[0]
        total = self.zeros().double()
        for (lanes, _), part in zip(parts, sums, strict=True):
            total[:, lanes] = part
        return total

    def _mean(self, values: torch.Tensor, divisor: torch.Tensor, lanes: slice | torch.Tensor) -> torch.Tensor:
        """For diagnostics: values / divisor, summed over the clients that take part, on the exact grid."""
        mean = values / divisor
        if not self._all_alike:
            mean = mean * self._weights[:, lanes]
        return to_grid_(mean.double()).sum(0)

    def sample(self, rate: float, step: int = 0) -> Sample:
        if rate == 1:
            return Sample(self._all_rows, rate)
        if not self._program.samples:
            raise RuntimeError(f"{self._program.name} samples rows: its `samples` must be true")
        # algorithms for networks are chosen by the number of rows, and round differently: it must be public
        multiple = most_sampled(int(self.size.max()), rate) if isinstance(self.model, NetworkModel) else 1
        parts: list[tuple[slice | torch.Tensor, Shard]] = [
            (lanes, self._shard.sample(self.sampled_rows(int(seed), rate, step), multiple))
            for seed, lanes in zip(self._lanes.seeds, self._lanes.lanes_of_seed, strict=True)
        ]
        return Sample(parts, rate)

    def sampled_rows(self, seed: int, rate: float, step: int) -> list[NDArray[np.int64]]:
        """The indices of the rows in a sample, for every client of the batch."""
        sizes = [int(size) for size in self.size.flatten()]
        purpose = keyed("sample", self._lanes.noise_key)
        return [
            np.flatnonzero(Address(seed, client, self.t, step, purpose).generator().random(size) < rate)
            for client, size in zip(self._clients, sizes, strict=True)
        ]

    def noise(
        self, purpose: str, step: int = 0, t: int | None = None, factor: float = 1, size: int | None = None
    ) -> torch.Tensor:
        width = self._lanes.shape[1] if size is None else size
        noise = self._lanes.noise(self._clients, self.t if t is None else t, step, purpose, width)
        if factor != 1:
            noise.mul_(factor)
        if self._diagnose_noise is not None and size is None:
            self._diagnose_noise.noise.add_(self._mean(noise, self._noise_divisor, slice(None)))
        return noise

    def noised_update(self, update: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        noise = self.noise("gradient", size=update.shape[-1]) * scale
        self._secret_kept = True
        if self._diagnose_noise is not None:  # an update may have more columns than the weights: those are left out
            divisor = self._noise_divisor * self._secret
            self._diagnose_noise.noise.add_(self._mean(noise[..., : self._lanes.shape[1]], divisor, slice(None)))
        if self._secret == 1:
            return update + noise
        present = self._lanes.secret_participation(self._clients, self.t, self._secret)
        return (update * present + noise) / self._secret

    def check_participation_kept_secret(self) -> None:
        """Call this after a round. Secret participation needs less noise, but the release must hide who took part."""
        if self._secret < 1 and not self._secret_kept:
            raise RuntimeError(f"{self._program.name} reveals who takes part: its release must be a `noised_update`")

    def turn_mask(self, every: int) -> torch.Tensor:
        turns = [float((self.t - 1 - client) % every == 0) for client in self._clients]
        return torch.tensor(turns, device=self._lanes.device).view(-1, 1, 1)

    def noise_std(self, purpose: str) -> torch.Tensor:
        return self._lanes.std[purpose]

    def zeros(self) -> torch.Tensor:
        return torch.zeros(len(self._clients), *self._lanes.shape, device=self._lanes.device)

    def distinct_noise(self, purpose: str, size: int) -> torch.Tensor:
        return self._lanes.distinct_noise(self._clients, self.t, purpose, size)

    def rows_by_centre(self) -> Iterator[tuple[slice | torch.Tensor, Shard]]:
        return self._shard.by_centre()

    def for_distinct_noises(self, function: Callable[[Shard], torch.Tensor]) -> torch.Tensor:
        values, of_lane = [], torch.zeros(self._lanes.shape[0], dtype=torch.int64, device=self._lanes.device)
        for number, (lanes, rows) in enumerate(self.rows_by_centre()):
            of_lane[lanes] = number
            values.append(function(rows))
        return torch.stack(values, dim=1)[:, of_lane[self._lanes.distinct]]

    def noisy_length_shares(self) -> torch.Tensor:
        """The share of the rows in each length bin, (clients, distinct noises, bins). Noise is added as
        in `noisy_feature_mean`."""
        total = self.for_distinct_noises(lambda rows: rows.length_counts())
        noise = self.distinct_noise(LENGTHS, total.shape[2])
        return total / self.size + noise if self._level == "user" else (total + noise) / self.size

    def _feature_sums(self) -> torch.Tensor:
        if self._length is None:
            return self.for_distinct_noises(lambda rows: centring.feature_sum(self.model, rows, self._bound))
        found, which = np.unique(self._length[self._lanes.distinct.cpu().numpy()], return_inverse=True)
        factors = [TYPICAL / length for length in found.tolist()]
        sums = [self._shard.feature_sum(self._bound / factor) * factor for factor in factors]
        return torch.stack(sums, dim=1)[:, torch.from_numpy(which.reshape(-1)).to(self._lanes.device)]

    def noisy_feature_mean(self) -> torch.Tensor:
        """The mean of the scaled features, every row clipped, (clients, distinct noises, features). At record
        level noise is added to the sum, at user level to the mean."""
        total = self._feature_sums()
        noise = self.distinct_noise(CENTRE, total.shape[2])
        return total / self.size + noise if self._level == "user" else (total + noise) / self.size


def most_sampled(rows: int, rate: float) -> int:
    """A public number of rows that a sample hardly ever exceeds: more than six standard deviations above its mean."""
    return min(rows, math.ceil(rate * rows + 6 * math.sqrt(rate * (1 - rate) * rows)) + 6)

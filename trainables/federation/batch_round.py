"""The clients of a batch in one round, as their program sees them (`ClientRound` in trainables/methods/base.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainables.federation.exact_sum import to_grid_
from trainables.federation.lane_vectors import LaneVectors, noise_at
from trainables.federation.pack import CENTRE, LENGTHS, ClientWork
from trainables.methods.base import Parts, Sample, State
from trainables.models import Model, centring, kernels
from trainables.models.network import NetworkModel
from trainables.models.recorded import SMALL, Recordings
from trainables.models.shard import Shard
from trainables.privacy.lengths import TYPICAL
from trainables.privacy.noise import Address, keyed

GradientSum = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Batch:
    """Clients that a host computes together, and their rows."""

    clients: tuple[int, ...]
    shard: Shard
    sums: Mapping[bool, GradientSum]
    """The model's sum of clipped gradients over all rows, as a function of weights and clip bounds. The key: whether
    clipping is automatic."""
    noisy: Mapping[bool, Recordings]
    """`ClientRound.noisy_gradient`, recorded; empty if it cannot be. The inputs are weights, round, step, clip bounds
    and the other addresses of the noise (`LaneVectors.noise_addresses`)."""

    @classmethod
    def load(cls, clients: tuple[int, ...], shard: Shard, model: Model) -> Batch:
        network = isinstance(model, NetworkModel)
        kinds = {automatic: _gradient_sum_of(model, shard, automatic) for automatic in (False, True)}
        sums, noisy = kinds, {}
        if shard.x.is_cuda and (not isinstance(model, NetworkModel) or model.can_be_recorded(shard)):
            sums = {automatic: _recorded(one, large=network) for automatic, one in kinds.items()}
        if shard.x.is_cuda and not network and kernels.chosen("cuda") == "triton":
            noisy = {automatic: Recordings(_noisy_mean_of(one, shard)) for automatic, one in kinds.items()}
        return cls(clients, shard, sums, noisy)


def _gradient_sum_of(model: Model, shard: Shard, automatic: bool) -> GradientSum:
    options = {"automatic": True} if automatic else {}  # a plug-in's model may support plain clipping only

    def gradient_sum(theta: torch.Tensor, clip: torch.Tensor) -> torch.Tensor:
        return centring.clipped_gradient_sum(model, shard, theta, clip, **options)[0]

    return gradient_sum


def _recorded(gradient_sum: GradientSum, *, large: bool) -> GradientSum:
    recordings = Recordings(lambda theta, clip: (gradient_sum(theta, clip),), large=large)
    return lambda theta, clip: recordings(theta, clip)[0]


def _noisy_mean_of(gradient_sum: GradientSum, shard: Shard) -> Callable[..., tuple[torch.Tensor]]:
    """Computes what `BatchRound.noisy_gradient` does, operation by operation."""

    def noisy_mean(
        theta: torch.Tensor, t: torch.Tensor, step: torch.Tensor, clip: torch.Tensor, *addresses: torch.Tensor
    ) -> tuple[torch.Tensor]:
        noise = noise_at(t, step, theta.shape[-1], *addresses)
        return (((gradient_sum(theta, clip) + noise) / shard.size).to(theta.dtype),)

    return noisy_mean


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
        if not self._noisy or theta.shape[-2] > SMALL or self._diagnose_gradient is not None:
            return ((self.clipped_gradient_sum(theta) + self.noise(purpose, step)) / self.size).to(theta.dtype)
        self._diagnose_noise = None  # a further local step
        t, at, *others = self._lanes.noise_addresses(self._clients, self.t, step, purpose)
        (mean,) = self._noisy[self._automatic](theta, t, at, constants=(self._lanes.clip, *others))
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
        options: dict[str, Any] = (
            {"automatic": True} if automatic else {}
        )  # a plug-in's model may support plain clipping only
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

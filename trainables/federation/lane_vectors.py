"""The lanes' hyperparameters, noise and participation on a client host's device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trainables.federation.pack import ClientWork
from trainables.federation.staging import Staging
from trainables.models import kernels
from trainables.privacy.noise import fill_normals, keyed
from trainables.privacy.participation import participants, takes_part


class LaneVectors:
    """One value per lane of a pack. Noise is drawn once per seed and shared by the lanes with that seed."""

    def __init__(self, work: ClientWork, device: str, staging: Staging | None) -> None:
        self._staging = staging
        self.noise_key = work.noise_key
        self.device, self.shape = device, (len(work.lanes), work.data.model.dimension)
        self.clip = torch.from_numpy(work.clip).to(device)
        self.std = {name: torch.from_numpy(std).to(device).unsqueeze(1) for name, std in work.noise_std.items()}
        self.hypers = {name: torch.from_numpy(v).to(device).unsqueeze(1) for name, v in work.hypers.items()}
        self.seeds, self._seed_index, count = np.unique(work.seeds, return_inverse=True, return_counts=True)
        self._seed_index_on_device = torch.from_numpy(self._seed_index).to(device)
        by_seed = torch.from_numpy(np.argsort(self._seed_index, kind="stable")).to(device)
        self.lanes_of_seed = by_seed.split(count.tolist())
        self.distinct = torch.from_numpy(work.distinct_noises()[0]).to(device)
        """One lane for every distinct noise (`ClientWork.distinct_noises`)."""
        self._client_and_seed_numbers: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        """Client numbers and seeds as tensors on the device, for noise that is generated there."""
        self._ones: dict[int, torch.Tensor] = {}
        """Equal weights, by the number of clients."""

    def client_weights(self, clients: Sequence[int], t: int, work: ClientWork) -> torch.Tensor | None:
        """Weights of clients in round t, (clients, lanes, 1): 0 for those that do not take part. Over all that do,
        also on other hosts, the mean is 1. None if none of these clients takes part."""
        if work.all_alike:
            if len(clients) not in self._ones:
                self._ones[len(clients)] = torch.ones(len(clients), len(work.lanes), 1, device=self.device)
            return self._ones[len(clients)]
        sizes, share, ids = np.asarray(work.data.sizes), work.program.participation, np.asarray(clients)
        cohorts = [participants(int(seed), t, len(sizes), share) for seed in self.seeds]
        table = np.stack([cohort[ids] for cohort in cohorts], axis=1).astype(np.float32)
        if not table.any():
            return None
        if work.aggregate == "size":
            table *= (sizes[ids, None] / [sizes[cohort].mean() for cohort in cohorts]).astype(np.float32)
        return self._per_lane(table)

    def secret_participation(self, clients: Sequence[int], t: int, probability: float) -> torch.Tensor:
        """(clients, lanes, 1): 1 where a client takes part in round t. Only the client itself knows."""
        key = self.noise_key
        drawn = [[takes_part(int(seed), client, t, probability, key) for seed in self.seeds] for client in clients]
        return self._per_lane(np.asarray(drawn, dtype=np.float32))

    def _per_lane(self, by_seed: NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(by_seed[:, self._seed_index]).to(self.device).unsqueeze(2)

    def noise(self, clients: Sequence[int], t: int, step: int, purpose: str, size: int) -> torch.Tensor:
        normals = self._normals(clients, t, step, purpose, size)
        return normals[:, self._seed_index_on_device].mul_(self.std[purpose])

    def distinct_noise(self, clients: Sequence[int], t: int, purpose: str, size: int) -> torch.Tensor:
        """One noise for every distinct combination of seed and noise scales, instead of one per lane."""
        normals = self._normals(clients, t, 0, purpose, size)
        return normals[:, self._seed_index_on_device[self.distinct]] * self.std[purpose][self.distinct]

    def _normals(self, clients: Sequence[int], t: int, step: int, purpose: str, size: int) -> torch.Tensor:
        """Standard normals, (clients, seeds, size)."""
        purpose = keyed(purpose, self.noise_key)

        def fill(array: NDArray[np.float32]) -> None:
            fill_normals(array, clients, self.seeds.tolist(), t, step, purpose)

        shape = (len(clients), len(self.seeds), size)
        if self.device == "cuda" and kernels.chosen("cuda") == "triton":
            return self._normals_on_gpu(tuple(clients), t, step, purpose, size)
        if self._staging is not None:
            return self._staging.copy(shape, fill)
        normals = np.empty(shape, dtype=np.float32)
        fill(normals)
        return torch.from_numpy(normals)

    def _normals_on_gpu(self, clients: tuple[int, ...], t: int, step: int, purpose: str, size: int) -> torch.Tensor:
        from trainables.privacy import noise_triton

        return noise_triton.normals(*self._clients_and_seeds(clients), t, step, purpose, size)

    def _clients_and_seeds(self, clients: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        if clients not in self._client_and_seed_numbers:
            ids, seeds = np.asarray(clients, dtype=np.int64), self.seeds.astype(np.int64)
            self._client_and_seed_numbers[clients] = (
                torch.from_numpy(ids).to(self.device),
                torch.from_numpy(seeds).to(self.device),
            )
        return self._client_and_seed_numbers[clients]

    def noise_inputs(
        self, clients: tuple[int, ...], t: int, step: int, purpose: str
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """The arguments of `noise_at`: round and step, and those that are the same tensors throughout a pack."""
        from trainables.privacy import noise_triton

        words = noise_triton.words(keyed(purpose, self.noise_key), self.device)
        moment = noise_triton.number(t, self.device), noise_triton.number(step, self.device)
        return moment, (self.std[purpose], self._seed_index_on_device, words, *self._clients_and_seeds(clients))


def noise_at(
    t: torch.Tensor,
    step: torch.Tensor,
    size: int,
    std: torch.Tensor,
    seed_index: torch.Tensor,
    words: torch.Tensor,
    clients: torch.Tensor,
    seeds: torch.Tensor,
) -> torch.Tensor:
    """`LaneVectors.noise` on a GPU, with tensors only."""
    from trainables.privacy import noise_triton

    return noise_triton.normals_at(clients, seeds, t, step, words, size)[:, seed_index].mul_(std)

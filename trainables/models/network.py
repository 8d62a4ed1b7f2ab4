"""A network whose norm layers, biases, LoRA factors and head train behind a cut.

Rows reach the model as activations at the cut, which `at_cut` computes once. Lanes are computed one after the other,
and each client's rows in blocks of a fixed size: neither other lanes nor other clients change a lane's bits.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainables.errors import UserError
from trainables.lazy import torch
from trainables.models.clipping import factors_
from trainables.models.gradients import MARGIN
from trainables.models.head import Head
from trainables.models.network_settings import NetworkSettings
from trainables.models.shard import Diagnostics, Shard
from trainables.plugin_errors import plugin_errors

if TYPE_CHECKING:
    from trainables.models.networks import Network

CELLS = {"cpu": 1 << 22, "cuda": 1 << 30}
"""Largest total size of the trained layers' outputs for a block of rows."""
ALL_CELLS = 8  # the outputs of all layers, most of which are not kept, may be this many times as large
LARGEST_BLOCK = 1 << 14  # rows
RECORDED_BYTES = 8  # memory that a recording keeps for every number in the outputs of a block's layers
RECORDED_SHARE = 0.125  # largest share of a GPU's memory for a recording
RECORDED_BLOCKS = 64  # largest number of blocks of rows in a recording: each has hundreds of kernels per lane


@lru_cache(maxsize=16)
def network_model(settings: NetworkSettings, features: int, classes: int, source: object) -> NetworkModel:
    """Cached, because checking a network takes a second. `source`: what defines the network's weights, as a part of the
    cache key."""
    return NetworkModel(settings, features, classes)


class NetworkModel(Head):
    name = "network"

    def __init__(self, settings: NetworkSettings, features: int, classes: int) -> None:
        from trainables.models import networks  # imports torch

        super().__init__(settings.text, features, classes)
        self.settings = settings
        self._tails: dict[tuple[str, torch.dtype], Any] = {}
        with plugin_errors(f"network {settings.network!r} for rows of {features} features"):
            self.network = networks.load(settings, features, classes)
            self._measure()

    def configured(self, hyperparameters: Mapping[str, Any]) -> NetworkModel:
        """The model with those hyperparameters of a trial that belong to it."""
        settings = self.settings.with_hyperparameters(hyperparameters)
        if settings == self.settings:
            return self
        other = copy.copy(self)
        other.settings, other._tails, other.parameter = settings, {}, settings.text
        other._shapes = other._tail("cpu", torch.float32).shapes(self.classes)
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_tails": {}}

    def _measure(self) -> None:
        """Check the network, and measure its sizes."""
        from trainables.models import network_check  # imports torch
        from trainables.models.tail import Tail

        tail = Tail(self.settings.with_scales(1.0), self.network)  # a small scale would hide errors
        self._shapes = tail.shapes(self.classes)
        trained = 0.1 * torch.randn(self.dimension, generator=torch.Generator().manual_seed(0))
        try:
            with _fixed_algorithms():
                arrays, known = self.arrays(self.initial(0) + trained), self.network.takes_images
                forward = network_check.checked(tail, arrays, self.features, known=known)
        except UserError as error:
            raise UserError(f"network {self.settings.network!r}: {error}") from None
        self.cut_shape = forward.cut_shape
        self.operations = 2.0 * forward.operations + 4.0 * self.dimension
        """Operations for one row in a round: a forward pass, and a backward pass through the same frozen weights."""
        self._trained_values = max(1, forward.trained_values)
        self._values, self._prefix_values = max(1, forward.values), max(1, forward.prefix_values)
        self.layers = forward.layers + 1
        """Number of layers that are computed in every round, with the head."""

    # ---- the interface of models

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def forward(self, weights: Any, x: torch.Tensor) -> torch.Tensor:
        return self._tail(x.device.type, torch.float32).scores(self._at_cut_shape(x[None, :-1]), weights)[0]

    def initial(self, seed: int) -> torch.Tensor:
        """All changes of the network start at 0, so training starts from the network as it is. Only the head and LoRA's
        first factor start at random."""
        weights = super().initial(seed)
        for name, values in self.arrays(weights).items():
            if name != "head" and not name.endswith(".lora_down"):
                values.zero_()
        return weights

    def at_cut(self, x: NDArray[np.float32], device: str = "cpu", *, public_size: int = 0) -> NDArray[np.float32]:
        """Rows of features as flat activations at the cut. `public_size`: compute at least this many rows, because
        algorithms are chosen, and round, by the number of rows."""
        tail, step = self._tail(device, torch.float32), _largest_block(ALL_CELLS * CELLS[device] // self._prefix_values)
        count = len(x)
        if count < public_size:
            x = np.concatenate([x, np.zeros((public_size - count, self.features), dtype=np.float32)])
        with torch.no_grad(), _fixed_algorithms():
            parts = [
                tail.at_cut(torch.from_numpy(x[start : start + step]).to(device)).flatten(1).cpu().numpy()
                for start in range(0, len(x), step)
            ]
        empty = np.zeros((0, int(np.prod(self.cut_shape))), dtype=np.float32)
        return np.concatenate([empty, *parts])[:count]

    def clipped_gradient_sum(
        self,
        shard: Shard,
        theta: torch.Tensor,
        clip: torch.Tensor,
        *,
        diagnose: bool = False,
        automatic: bool = False,
    ) -> tuple[torch.Tensor, Diagnostics | None]:
        per_client = theta if theta.dim() == 3 else theta.expand(shard.clients, *theta.shape)
        shared = [self.arrays(theta[lane]) for lane in range(len(theta))] if theta.dim() == 2 else []
        total = torch.zeros(per_client.shape, dtype=torch.float64, device=theta.device)
        losses = torch.zeros(per_client.shape[:2], dtype=theta.dtype, device=theta.device)
        clipped = torch.zeros_like(losses)
        centres = shard.centres_for(theta.shape[-2])
        bounds = clip.double() * (1 - MARGIN)
        dtype = torch.bfloat16 if shard.precision == "bf16" else torch.float32
        tail = self._tail(theta.device.type, dtype)
        for client, rows in self._blocks(shard):
            x, labels = self._at_cut_shape(shard.x[client, rows, :-1].to(dtype)), shard.y[client, rows]
            real = torch.isfinite(shard.norm[client, rows, 0])
            for lane in range(theta.shape[-2]):
                arrays = shared[lane] if shared else self.arrays(per_client[client, lane])
                centre = None if centres is None else centres.means[centres.of_lane[lane : lane + 1]]
                with torch.no_grad(), _fixed_algorithms():
                    found, loss = tail.gradients(x, labels, arrays, centre)
                    norms = torch.stack([part.squared_norms() for part in found]).sum(0).sqrt()
                    finite = torch.isfinite(norms) & real
                    factors = factors_(norms.where(finite, 1), bounds[lane], automatic).where(finite, 0)
                    total[client, lane] += torch.cat([part.weighted_sum(factors) for part in found])
                losses[client, lane] += loss.where(real, 0).sum()
                clipped[client, lane] += ((factors < 1) & real).sum()
        return total, Diagnostics(losses, clipped) if diagnose else None

    def scores(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tail, step = self._tail(x.device.type, torch.float32), self._block(x.device.type)
        arrays, rows = self.arrays(weights), x[:, :-1].float()
        with torch.no_grad(), _fixed_algorithms():
            return torch.cat(
                [tail.scores(self._at_cut_shape(rows[a : a + step]), arrays) for a in range(0, len(rows), step)]
            )

    def evaluate(self, shard: Shard, theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if shard.centres is not None:
            theta = shard.centres.for_raw_features(theta, self.blocks[0])
        return super().evaluate(shard.without_centres(), theta)

    def feature_sum(self, shard: Shard, bound: float) -> torch.Tensor:
        """For every client, the sum of its rows' head inputs before training, each clipped; in float64. An absent
        record adds nothing."""
        tail = self._tail(shard.x.device.type, torch.float32)
        start = self.arrays(torch.zeros(self.dimension, device=shard.x.device))
        total = torch.zeros(shard.clients, tail.inputs, dtype=torch.float64, device=shard.x.device)
        for client, rows in self._blocks(shard):
            with torch.no_grad(), _fixed_algorithms():
                x = self._at_cut_shape(shard.x[client, rows, :-1].float())
                inputs = tail.head_inputs(x, start).double().nan_to_num(0, 0, 0)
            inputs = inputs.masked_fill(~torch.isfinite(shard.norm[client, rows, :1]), 0)
            norm = torch.linalg.vector_norm(inputs, dim=1, keepdim=True)
            total[client] += (inputs * (bound * (1 - MARGIN) / norm).clamp(max=1)).nan_to_num(0).sum(0)
        return total

    def plain(self, weights: torch.Tensor) -> Network:
        """The plain torch module with these weights."""
        found: Network = self._tail("cpu", torch.float32).plain(self.arrays(weights))
        return found

    def state_dict(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state dict of that module."""
        found: dict[str, torch.Tensor] = self.plain(weights).module.state_dict()
        return found

    def can_be_recorded(self, shard: Shard) -> bool:
        """Whether gradient sums of these rows can be recorded as a CUDA graph. A graph keeps the memory of a block's
        activations, so it must hold several clients: hosts that compute client by client would keep one graph for each.
        A plug-in's network may wait for the device, which a recording cannot."""
        from trainables.data.backbones import BACKBONES  # imports torch

        values = min(shard.rows, self._block("cuda")) * self._values
        memory = torch.cuda.get_device_properties(shard.x.device).total_memory
        fits = RECORDED_BYTES * values <= RECORDED_SHARE * memory and len(list(self._blocks(shard))) <= RECORDED_BLOCKS
        return self.settings.network in BACKBONES and shard.clients > 1 and fits

    # ---- blocks of rows

    def _tail(self, device: str, dtype: torch.dtype) -> Any:
        """A copy of the network per device and precision."""
        if (device, dtype) not in self._tails:
            from trainables.models.tail import Tail  # imports torch

            tail = Tail(self.settings, self.network)
            layout = torch.channels_last if device == "cuda" else torch.contiguous_format
            for part in (*tail.prefix.modules(), *tail.body.modules()):
                if isinstance(part, torch.nn.Conv2d):
                    part.weight.data = part.weight.data.contiguous(memory_format=layout)
            tail.to(device, dtype)
            self._tails[device, dtype] = tail
        return self._tails[device, dtype]

    def _at_cut_shape(self, x: torch.Tensor) -> torch.Tensor:
        shaped = x.unflatten(1, self.cut_shape) if len(self.cut_shape) > 1 else x
        if x.is_cuda and shaped.dim() == 4:
            return shaped.contiguous(memory_format=torch.channels_last)
        return shaped.contiguous()

    def _block(self, device: str) -> int:
        """Rows of a block."""
        return _largest_block(min(CELLS[device] // self._trained_values, ALL_CELLS * CELLS[device] // self._values))

    def _blocks(self, shard: Shard) -> Iterator[tuple[int, slice]]:
        """Blocks of rows of every client, without the padding, which comes last. A sample is computed with its padding,
        and rows that are not finite are computed, too: algorithms are chosen, and round, by the number of rows, so it
        must be a public number."""
        step = self._block(shard.x.device.type)
        counts = [shard.rows if shard.is_sample else min(size, shard.rows) for size in shard.public_sizes]
        for client, count in enumerate(counts):
            for start in range(0, count, step):
                yield client, slice(start, min(start + step, count))


def _largest_block(rows: int) -> int:
    """The largest power of two that is at most this many rows, within limits."""
    return min(LARGEST_BLOCK, 1 << max(3, rows.bit_length() - 1))


@contextlib.contextmanager
def _fixed_algorithms() -> Iterator[None]:
    """Make convolutions use deterministic algorithms in full precision, whatever ran before."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield

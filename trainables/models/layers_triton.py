"""The gradients of batch norm's scale and shift, for every image and channel, in one pass over the activations.

torch needs four passes and a copy. Activations are channels-last: a tile holds some positions of all channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_CHANNELS = 1024
TILE = 4096  # numbers of a tile


@triton.jit
def _kernel(x, error, mean, of_product, of_error, positions, channels, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """One program per image."""
    image = tl.program_id(0)
    channel = tl.arange(0, WIDTH)
    real = channel < channels
    centre = tl.load(mean + channel, mask=real, other=0.0)
    start = image.to(tl.int64) * positions * channels
    products = tl.zeros((WIDTH,), dtype=tl.float32)
    errors = tl.zeros((WIDTH,), dtype=tl.float32)
    for first in range(0, positions, BLOCK):
        position = first + tl.arange(0, BLOCK)
        at = start + position[:, None] * channels + channel[None, :]
        mask = (position[:, None] < positions) & real[None, :]
        values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        derivative = tl.load(error + at, mask=mask, other=0.0).to(tl.float32)
        products += tl.sum((values - centre[None, :]) * derivative, axis=0)
        errors += tl.sum(derivative, axis=0)
    tl.store(of_product + image * channels + channel, products, mask=real)
    tl.store(of_error + image * channels + channel, errors, mask=real)


def fits(x: Tensor, error: Tensor) -> bool:
    last = torch.channels_last
    same = x.shape == error.shape and x.dtype == error.dtype
    return same and x.shape[1] <= MOST_CHANNELS and all(part.is_contiguous(memory_format=last) for part in (x, error))


def centred_sums(x: Tensor, error: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """See `layers.centred_sums`."""
    images, channels, height, width = x.shape
    products, errors = torch.empty(2, images, channels, device=x.device, dtype=torch.float32)
    padded = triton.next_power_of_2(channels)
    block = max(1, min(triton.next_power_of_2(height * width), TILE // padded))
    arguments = (x, error, mean.float(), products, errors, height * width, channels)
    _kernel[(images,)](*arguments, BLOCK=block, WIDTH=padded)
    return products, errors

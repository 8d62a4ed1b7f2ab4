"""How many lanes a GPU has memory for.

Measured on an H200 (torch's peak of reserved memory; every method, 20 and 200 clients, 256 and 1,024 lanes, 64 and 512
features, the linear head and `mlp:32`): what grows with the lanes are vectors as long as the weights, for every client;
the rest are the chunks of rows that are in work. The estimate lay above all measured peaks but dp-fedfc's, whose solves
it does not know: a pack that runs out of memory all the same is cut in half by whoever gave it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainables.models import Model
from trainables.models.lanes import MAX_CLIENTS, SHAPES

ALWAYS = 1 << 30  # libraries, their workspaces, the evaluation
PER_CELL = 60  # bytes for every row, class and lane of a chunk in work
PER_WEIGHT = 120  # bytes for every client, lane and weight
SHARE = 0.8  # of what is free: the allocator cannot use the last of it


def lanes_that_fit(model: Model, sizes: Sequence[int], stateful: bool, free: float) -> int:
    """For the clients of one host, by the number of their rows, and bytes of free memory."""
    shape = SHAPES["cuda"]
    together = min(len(sizes), MAX_CLIENTS)
    clients, step = shape.chunk(model.width, together)
    cells = clients * min(max(sizes), step) * model.width * shape.lanes
    room = SHARE * free - ALWAYS - PER_CELL * cells
    kept = 4 * model.dimension * len(sizes) if stateful else 0
    return max(0, int(room // (PER_WEIGHT * together * model.dimension + kept)))


def free_bytes(share: float) -> float:
    """Of this process's GPU, of which it may use a share; with what it holds itself of the pack before."""
    free, total = torch.cuda.mem_get_info()
    return min(float(free) + torch.cuda.memory_reserved(), share * total)

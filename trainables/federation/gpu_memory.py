"""How many lanes a GPU has memory for.

Most memory is used by vectors as long as the weights, for every client and lane, and by the chunks of rows that are
being computed. The constants were measured on an H200 (torch's peak of reserved memory; every method, 20 and 200
clients, 256 and 1,024 lanes, 64 and 512 features, the linear model and `mlp:32`). The estimate is above all measured
peaks except those of dp-fedfc, whose solves it ignores. The scheduler splits a pack that still runs out of memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainables.models import Model
from trainables.models.lanes import MAX_CLIENTS, SHAPES

ALWAYS = 1 << 30  # libraries, their workspaces, the evaluation
PER_CELL = 60  # bytes for every number of a chunk; a row has `Model.width` numbers per lane
PER_WEIGHT = 120  # bytes for every client, lane and weight
PER_CENTRED_WEIGHT = 24  # further bytes if features are centred: weights for raw features, sums before centring
SHARE = 0.8  # of the free memory: the allocator cannot use all of it


def lanes_that_fit(model: Model, sizes: Sequence[int], stateful: bool, free: float, centred: bool = False) -> int:
    """`sizes`: rows of the clients of one host. `free`: bytes of free memory."""
    shape = SHAPES["cuda"]
    together = min(len(sizes), MAX_CLIENTS)
    clients, step = shape.chunk(model.width, together)
    cells = clients * min(max(sizes), step) * model.width * shape.lanes
    available = SHARE * free - ALWAYS - PER_CELL * cells
    state = 4 * model.dimension * len(sizes) if stateful else 0
    weights = PER_WEIGHT * together * model.dimension
    if centred:  # at worst every lane has its own centre, and so its own norms of all rows
        weights += PER_CENTRED_WEIGHT * together * model.dimension + 4 * sum(sizes)
    return max(0, int(available // (weights + state)))


def free_bytes(share: float) -> float:
    """Free memory of this process's GPU, but at most the fraction `share` of its total memory. Memory that this process
    has cached counts as free."""
    free, total = torch.cuda.mem_get_info()
    return min(float(free) + torch.cuda.memory_reserved(), share * total)

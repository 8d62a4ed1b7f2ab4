"""`fedsweep partition`."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.commands.options import DATA_HELP, Json, training_options
from orchestrator.console import show, stderr
from orchestrator.execution.training_options import TrainingOptions


@training_options("partition", "clients", "partition_seed")
def partition(
    data: Annotated[str, typer.Option(help=DATA_HELP)],
    options: TrainingOptions,
    json: Json = False,
) -> None:
    """Show the rows per client and class of a partition."""
    from trainables.data import features
    from trainables.data import partition as partitions

    loaded = features.load(data)
    clients = partitions.clients_of(options.clients, loaded)
    spec = partitions.parse(options.partition, clients=clients, seed=options.partition_seed)
    split = partitions.partition(loaded, spec)
    counts = split.counts(loaded)
    divergence = partitions.divergence_from_uniform(counts)
    absent = (counts == 0).sum(axis=1)
    for note in split.notes:
        stderr.print(f"note: {note}")
    report = {
        "counts": counts.tolist(),
        "sizes": list(split.sizes),
        "kl_from_uniform": divergence.tolist(),
        "kl_mean": float(divergence.mean()),
        "kl_max": float(divergence.max()),
        "absent_classes": absent.tolist(),
        "absent_mean": float(absent.mean()),
        "notes": list(split.notes),
    }
    width, sizes = max(6, len(str(max(split.sizes))) + 1), counts.sum(axis=1)
    lines = [
        "client " + "".join(f"{f'cls {c}':>{width}}" for c in range(loaded.classes)) + f"{'total':>8}",
        *(f"{i:>6} " + "".join(f"{n:>{width}}" for n in row) + f"{row.sum():>8}" for i, row in enumerate(counts)),
        f"sizes {sizes.min()} to {sizes.max()}, mean {sizes.mean():.1f}, std {sizes.std():.1f}",
        f"KL from uniform: mean {divergence.mean():.3f}, max {divergence.max():.3f}",
        f"absent classes per client: mean {absent.mean():.1f}, max {absent.max()}",
    ]
    show(report, json, lines)

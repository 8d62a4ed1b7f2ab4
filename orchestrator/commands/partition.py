"""`fedsweep partition`."""

from __future__ import annotations

import typer

from orchestrator.commands.options import Clients, Data, Json, PartitionSeed, PartitionText
from orchestrator.console import emit_json, stderr


def partition(
    data: Data,
    partition: PartitionText = "dirichlet:0.5",
    clients: Clients = 20,
    partition_seed: PartitionSeed = 42,
    json: Json = False,
) -> None:
    """Show which client would hold how many rows of which class."""
    from trainables.data import features
    from trainables.data import partition as partitions

    loaded = features.load(data)
    dealt = partitions.partition(loaded, partitions.parse(partition, clients=clients, seed=partition_seed))
    counts = dealt.counts(loaded)
    divergence = partitions.divergence_from_uniform(counts)
    absent = (counts == 0).sum(axis=1)
    for note in dealt.notes:
        stderr.print(f"note: {note}")
    if json:
        emit_json(
            {
                "counts": counts.tolist(),
                "sizes": list(dealt.sizes),
                "kl_from_uniform": divergence.tolist(),
                "kl_mean": float(divergence.mean()),
                "kl_max": float(divergence.max()),
                "absent_classes": absent.tolist(),
                "absent_mean": float(absent.mean()),
                "notes": list(dealt.notes),
            }
        )
        return
    width = max(6, len(str(max(dealt.sizes))) + 1)
    typer.echo("client " + "".join(f"{f'cls {c}':>{width}}" for c in range(loaded.classes)) + f"{'total':>8}")
    for client, row in enumerate(counts):
        typer.echo(f"{client:>6} " + "".join(f"{value:>{width}}" for value in row) + f"{row.sum():>8}")
    sizes = counts.sum(axis=1)
    typer.echo(f"sizes {sizes.min()} to {sizes.max()}, mean {sizes.mean():.1f}, std {sizes.std():.1f}")
    typer.echo(f"KL from uniform: mean {divergence.mean():.3f}, max {divergence.max():.3f}")
    typer.echo(f"absent classes per client: mean {absent.mean():.1f}, max {absent.max()}")

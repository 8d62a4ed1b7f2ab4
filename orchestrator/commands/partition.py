"""`fedsweep partition`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

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
    spec = partitions.choose(options.partition, options.clients, seed=options.partition_seed, data=loaded)
    split = partitions.partition(loaded, spec)
    counts = split.counts(loaded)
    divergence = partitions.divergence_from_uniform(counts)
    absent = (counts == 0).sum(axis=1)
    for note in split.notes:
        stderr.print(f"note: {note}")
    report: dict[str, Any] = {
        "counts": counts.tolist(),
        "sizes": list(split.sizes),
        "kl_from_uniform": divergence.tolist(),
        "kl_mean": float(divergence.mean()),
        "kl_max": float(divergence.max()),
        "absent_classes": absent.tolist(),
        "absent_mean": float(absent.mean()),
        "notes": list(split.notes),
    }
    sizes = counts.sum(axis=1)
    classes = list(loaded.class_names) or [f"cls {c}" for c in range(loaded.classes)]
    rows = [f"{i:>6}" for i in range(len(counts))]
    if spec.kind == "explicit" and loaded.client_names:
        names = loaded.client_names
        rows = [f"{number}  {name:<{max(map(len, names))}}" for number, name in zip(rows, names, strict=True)]
        report["clients"] = list(loaded.client_names)
    widths = [max(len(name), len(str(max(split.sizes))), 5) + 1 for name in classes]

    def line(first: str, values: Iterable[Any], total: Any) -> str:
        columns = "".join(f"{value:>{width}}" for value, width in zip(values, widths, strict=True))
        return f"{first:<{len(rows[0])}} {columns}{total:>8}"

    lines = [
        line("client".rjust(6), classes, "total"),
        *(line(client, row, row.sum()) for client, row in zip(rows, counts, strict=True)),
        f"sizes {sizes.min()} to {sizes.max()}, mean {sizes.mean():.1f}, std {sizes.std():.1f}",
        f"KL from uniform: mean {divergence.mean():.3f}, max {divergence.max():.3f}",
        f"absent classes per client: mean {absent.mean():.1f}, max {absent.max()}",
    ]
    show(report, json, lines)

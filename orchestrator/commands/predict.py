"""`fedsweep predict`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.commands.options import Json
from orchestrator.console import number, show, stderr
from trainables.errors import UserError
from trainables.files import replacing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from trainables.federation.saved_model import SavedModel

SHOWN_LABELS = 3


def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL.npz", help="Model saved by `fedsweep train --save`.")],
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="Feature file with x_test and, optionally, y_test; or a table, a folder of images or an image, if the "
            "model was trained on one.",
        ),
    ],
    output: Annotated[Path, typer.Option(metavar="FILE.csv", help="Output file, one line per row.")],
    probabilities: Annotated[bool, typer.Option("--probabilities", help="Also write a probability per class.")] = False,
    backbone: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Your function that returns the model's backbone; or FILE.py:FUNCTION."
        ),
    ] = "",
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE", help="State dict of the backbone, if it was not the published one.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the backbone: auto, cpu or cuda.")] = "auto",
    json: Json = False,
) -> None:
    """Predict classes with a saved model. Predicts the test rows of a feature file, all rows of a table, or all images
    in a folder. If there are labels, also prints the metrics that the model was trained with."""
    import pandas as pd

    from orchestrator.report.tables.render import frame_to_csv
    from trainables.data import features
    from trainables.federation.saved_model import SavedModel

    saved = SavedModel.load(model)
    epsilon, delta = _budget(saved.provenance, model)
    if output.exists() or output.is_symlink():
        raise UserError(f"--output {output} already exists; choose another name")
    columns: dict[str, list[Any]] = {}
    notes: Sequence[str] = ()
    if saved.backbone and not saved.schema and data.suffix != ".npz" and data.exists():
        rows, names, labels = _through_backbone(saved, data, backbone, weights, device)
        columns["row"] = list(names)
    else:
        rows, labels, notes = features.rows_to_predict(str(data), saved.schema, saved.backbone)
    predicted = saved.predict(rows)
    columns["class"] = predicted.tolist()
    if probabilities:
        by_class = saved.probabilities(rows).T.tolist()
        shown = saved.class_names or range(saved.classes)
        columns |= {f"probability of {name}": values for name, values in zip(shown, by_class, strict=True)}
    with replacing(output) as file:
        file.write(frame_to_csv(pd.DataFrame(columns)).encode())
    scores, about_labels = _scored(saved, rows, predicted, labels)
    for note in notes:
        stderr.print(f"note: {note}")
    lines = [
        f"{len(predicted)} prediction{'s' * (len(predicted) != 1)} written to {output}",
        *_described(scores),
        *about_labels,
        f"the model was trained at epsilon {number(epsilon)}, delta {delta:g}",
    ]
    about = {"accuracy": scores.get("accuracy"), "metrics": scores, "notes": [*notes, *about_labels]}
    about |= {"provenance": saved.provenance}
    show({"rows": len(predicted), **about}, json, lines)


def _scored(
    saved: SavedModel, rows: NDArray, predicted: NDArray, labels: NDArray | None
) -> tuple[dict[str, float], list[str]]:
    """Metrics of the rows with a label, and sentences about the labels. No metrics if the model knows no label."""
    import numpy as np

    if labels is None:
        return {}, []
    texts = labels.astype(str)
    known = saved.class_names or tuple(map(str, range(saved.classes)))
    of_model = np.isin(texts, known)
    given = of_model | (texts != "")
    lines = [] if given.all() else [f"rows without a label, which do not count: {(~given).sum()}"]
    unknown = given & ~of_model
    if unknown.any():
        names = np.unique(texts[unknown])
        named = ", ".join(map(repr, names[:SHOWN_LABELS].tolist())) + ", ..." * (len(names) > SHOWN_LABELS)
        lines.append(f"rows with a label that the model does not know ({named}): {unknown.sum()}")
    if not of_model.any():
        return {}, lines
    if unknown.any():
        lines[-1] += "; they count as wrong, and other metrics need known labels"
    counts = np.unique(texts[given], return_counts=True)[1]
    lines.insert(0, f"always answering the largest class: {100 * counts.max() / counts.sum():.2f}%")
    return _scores(saved, rows[given], predicted[given], texts[given], known), lines


def _scores(
    saved: SavedModel, rows: NDArray, predicted: NDArray, labels: NDArray, known: Sequence[str]
) -> dict[str, float]:
    """The metrics that the model was trained with, if scores and labels determine them, and always the accuracy."""
    import torch

    from trainables import metrics
    from trainables.metrics.base import BuiltIn, Predictions

    recorded = saved.provenance.get("metrics")
    names = dict.fromkeys([*(recorded if isinstance(recorded, dict) else {}), "accuracy"])
    numbers = {name: number for number, name in enumerate(known)}
    of = None
    if numbers.keys() >= set(labels.tolist()):
        classes = torch.tensor([numbers[label] for label in labels.tolist()])
        of = Predictions(torch.tensor(saved.scores(rows)).double(), classes, None)
    values: dict[str, float] = {}
    for name in names:
        metric = metrics.METRICS.get(name)
        if name == "accuracy":
            values[name] = 100 * float((predicted.astype(str) == labels).mean())
        elif of is not None and metric is not None and not isinstance(metric, BuiltIn) and not metric.needs_clients:
            values[name] = float(metric.compute(of))
    return values


def _described(scores: dict[str, float]) -> list[str]:
    from orchestrator.search.objective import objective_of

    found = [(objective_of(name), value) for name, value in scores.items()]
    return [f"{metric.title}: {metric.format(value)}{'%' * bool(metric.unit)}" for metric, value in found]


def _through_backbone(
    saved: SavedModel, data: Path, named: str, weights: Path | None, device: str
) -> tuple[NDArray, list[str], NDArray | None]:
    """Features of images or texts, their names, and their classes if any has one."""
    import tempfile

    import numpy as np

    from orchestrator.commands.data_prepare import progress_bars
    from trainables.data.backbones.extraction import extract_pieces
    from trainables.data.feature_file import read_backbone
    from trainables.data.sources.own import rows_to_predict
    from trainables.federation.torch_model import backbone_of

    backbone = backbone_of(saved.backbone, named=named, weights=weights)
    items, names, classes = rows_to_predict(data, read_backbone(saved.backbone), backbone)
    with tempfile.TemporaryDirectory() as folder, progress_bars() as update:
        pieces = extract_pieces(
            *(items, backbone.network, backbone.to_input),
            folder=Path(folder),
            identity=backbone.identity,
            device=device,
            batch=backbone.batch,
            progress=lambda done, total: update("rows", done, total),
        )
        rows = np.concatenate([np.load(piece, allow_pickle=False) for piece in pieces]).astype(np.float32)
    return rows, names, np.array(classes) if any(classes) else None


def _budget(provenance: dict[str, Any], model: Path) -> tuple[float, float]:
    try:
        return float(provenance["epsilon"]["claimed"]), float(provenance["delta"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UserError(f"{model} states no epsilon and delta: it is not a model that fedsweep saved") from None

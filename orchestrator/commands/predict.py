"""`fedsweep predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.commands.options import Json
from orchestrator.console import number, show
from trainables.errors import UserError
from trainables.files import replacing


def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL.npz", help="Model saved by `fedsweep train --save`.")],
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="Feature file with x_test and, optionally, y_test; or a table, if the model was trained on one.",
        ),
    ],
    output: Annotated[Path, typer.Option(metavar="FILE.csv", help="Output file, one line per row.")],
    json: Json = False,
) -> None:
    """Predict classes with a saved model. Of the test rows of a feature file, or of all rows of a table; prints the
    accuracy if there are labels."""
    import csv
    import io

    from trainables.data import features
    from trainables.federation.saved_model import SavedModel

    saved = SavedModel.load(model)
    epsilon, delta = _budget(saved.provenance, model)
    if output.exists() or output.is_symlink():
        raise UserError(f"--output {output} already exists; choose another name")
    rows, labels = features.rows_to_predict(str(data), saved.schema)
    predicted = saved.predict(rows)
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([["class"], *([name] for name in predicted.tolist())])
    with replacing(output) as file:
        file.write(text.getvalue().encode())
    accuracy = None if labels is None else 100 * float((predicted.astype(str) == labels.astype(str)).mean())
    lines = [
        f"{len(predicted)} predictions written to {output}",
        *([] if accuracy is None else [f"accuracy: {accuracy:.2f}%"]),
        f"the model was trained at epsilon {number(epsilon)}, delta {delta:g}",
    ]
    show({"rows": len(predicted), "accuracy": accuracy, "provenance": saved.provenance}, json, lines)


def _budget(provenance: dict[str, Any], model: Path) -> tuple[float, float]:
    try:
        return float(provenance["epsilon"]["claimed"]), float(provenance["delta"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{model} states no epsilon and delta: it is not a model that fedsweep saved") from None

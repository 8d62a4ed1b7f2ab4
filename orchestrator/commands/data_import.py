"""`fedsweep data import`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.commands.next_steps import show_training
from orchestrator.commands.options import Json
from orchestrator.commands.sweep import output_errors
from orchestrator.console import echo, emit_json, stderr
from trainables.errors import UserError
from trainables.files import replacing

if TYPE_CHECKING:
    from trainables.data.importing.conversion import Converted
    from trainables.data.importing.schema import Schema

SHOWN_NAMES = 20


def import_(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="CSV, Parquet, JSON lines, SVMlight, .npy or .npz file, or a folder of .npy files."
        ),
    ],
    label: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column with the classes.")] = None,
    client: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column that names the client of a row.")] = None,
    split: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column that says train or test.  [default: draw test rows]")
    ] = None,
    test_fraction: Annotated[
        float | None, typer.Option(help="Share of the rows that is drawn as test rows.  [default: 0.2]")
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option(metavar="FILE.yaml", help="Schema of the table.  [default: NAME.schema.yaml next to it]"),
    ] = None,
    draft_schema: Annotated[
        bool, typer.Option("--draft-schema", help="Write a draft of the schema for you to check, and nothing else.")
    ] = False,
    to: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Output file.  [default: NAME.npz in the current folder]")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the summary and write no feature file.")] = False,
    json: Json = False,
) -> None:
    """Turn a table into a feature file. Nothing is fitted to the data: ranges and categories are those of a schema."""
    from trainables.data.importing.conversion import convert_file

    source = file.rstrip("/") or file
    settings, found = _schema(source, schema, label, client, split, test_fraction, draft_schema)
    if draft_schema:
        _write_draft(source, settings, schema)
        return
    target = to or Path(f"{Path(source).stem}.npz")
    if not dry_run:
        check_target(target)
    if found:
        stderr.print(f"schema: {found}")
    converted = convert_file(source, settings)
    summary = _summary(source, converted)
    if not json:
        echo(_as_text(summary))
    if not dry_run:
        _write(converted, target)
    if json:
        emit_json({**summary, "written": None if dry_run else target})
    elif not dry_run:
        _show_next_steps(target, converted)


def _schema(
    source: str,
    given: str | None,
    label: str | None,
    client: str | None,
    split: str | None,
    test_fraction: float | None,
    drafting: bool,
) -> tuple[Schema, str]:
    """The schema, updated by the options, and the schema file; an empty text if there is none."""
    from trainables.data.importing.conversion import schema_path
    from trainables.data.importing.schema import Schema, read_schema
    from trainables.errors import in_range

    expected = schema_path(source)
    file = given or (expected if "://" not in source and Path(expected).is_file() else "")
    settings = Schema() if drafting or not file else read_schema(file)
    options: dict[str, Any] = {"label": label, "client": client, "split": split}
    for name, value in options.items():
        stated = getattr(settings, name)
        if value is not None and stated and stated != value:
            raise UserError(f"--{name} {value}: the schema {file} says {name}: {stated}")
    if test_fraction is not None:
        if split or settings.split:
            raise UserError(
                f"--test-fraction {test_fraction:g}: the column {split or settings.split!r} names the test rows"
            )
        if "test_fraction" in settings.model_fields_set and settings.test_fraction != test_fraction:
            stated = f"the schema {file} says test_fraction: {settings.test_fraction:g}"
            raise UserError(f"--test-fraction {test_fraction:g}: {stated}")
        in_range(0, 1, "()", test_fraction=test_fraction)
        options["test_fraction"] = test_fraction
    return settings.model_copy(update={name: value for name, value in options.items() if value is not None}), file


def _write_draft(source: str, settings: Schema, given: str | None) -> None:
    from trainables.data.importing import conversion, draft, reading

    target = Path(given or conversion.schema_path(source))
    if target.exists() or target.is_symlink():
        raise UserError(f"schema {target} already exists; remove it first, or name another with --schema")
    settings = conversion.with_default_roles(source, settings)
    table = reading.read_table(source, conversion.roles_of(settings))
    for name in filter(None, conversion.roles_of(settings)):
        conversion.column_of(source, table, name)
    text = draft.draft(source, table, settings)
    with output_errors("--schema"), replacing(target) as file:
        file.write(text.encode())
    echo(target)
    stderr.print(
        "Check every line of it: a schema must be public knowledge, and this draft was written from the data. "
        f"Then: fedsweep data import {shlex.quote(source)}"
    )


def check_target(target: Path) -> None:
    if target.suffix != ".npz":
        raise UserError(f"--to {target}: the name of a feature file must end in .npz")
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} already exists; choose another name with --to")
    if not target.resolve().parent.is_dir():
        raise UserError(f"--to {target}: there is no folder {target.resolve().parent}")


def _write(converted: Converted, target: Path) -> None:
    import numpy as np

    try:
        with replacing(target) as file:
            np.savez(file, **converted.arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}") from None


def _summary(source: str, converted: Converted) -> dict[str, Any]:
    import numpy as np

    arrays = converted.arrays
    names = arrays["class_names"].tolist()
    counts, of_test = (np.bincount(arrays[part], minlength=len(names)) for part in ("y_train", "y_test"))
    summary: dict[str, Any] = {
        "source": source,
        "rows": {"train": len(arrays["y_train"]), "test": len(arrays["y_test"])},
        "features": arrays["x_train"].shape[1],
        "columns": list(converted.schema.columns or {}),
        "classes": dict(zip(names, counts.tolist(), strict=True)),
        "test_classes": dict(zip(names, of_test.tolist(), strict=True)),
        "clients": None,
        "unused": converted.unused,
        "notes": converted.notes,
    }
    if "client_train" in arrays:
        sizes = np.bincount(arrays["client_train"])
        summary["clients"] = {
            "count": len(sizes),
            "smallest": int(sizes.min()),
            "median": float(np.median(sizes)),
            "largest": int(sizes.max()),
            "with_one_row": int((sizes == 1).sum()),
        }
    return summary


def _first(names: Sequence[str]) -> str:
    more = f", and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"{', '.join(names[:SHOWN_NAMES])}{more}"


def _as_text(summary: dict[str, Any]) -> str:
    rows, clients = summary["rows"], summary["clients"]
    classes = [f"{name} {count} + {summary['test_classes'][name]}" for name, count in summary["classes"].items()]
    lines = [
        f"rows      {rows['train']} train, {rows['test']} test",
        f"features  {summary['features']} from {_first(summary['columns'])}",
        f"classes   {len(classes)}; train + test rows of each: {_first(classes)}",
    ]
    if clients:
        lines.append(
            f"clients   {clients['count']} with {clients['smallest']} to {clients['largest']} train rows, median "
            f"{clients['median']:g}; {clients['with_one_row']} with a single row"
        )
    if summary["unused"]:
        lines.append(f"not used  {', '.join(summary['unused'])}")
    return "\n".join([*lines, *(f"note: {note}" for note in summary["notes"])])


def _show_next_steps(target: Path, converted: Converted) -> None:
    echo(f"written to {target}")
    if "client_train" in converted.arrays:
        stderr.print(f"to see its clients: fedsweep partition --data {shlex.quote(str(target))}")
    show_training(target)

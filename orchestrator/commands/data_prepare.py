"""`fedsweep data prepare`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn

from orchestrator.commands.data_import import check_target
from orchestrator.commands.next_steps import show_training
from orchestrator.console import echo, stderr
from trainables.errors import UserError

if TYPE_CHECKING:
    from trainables.data.importing.schema import Schema
    from trainables.data.sources.preparing import Options

From = Annotated[
    list[Path] | None,
    typer.Option("--from", metavar="PATH", help="Downloaded file of the source, or a folder of them; repeatable."),
]
Device = Annotated[str, typer.Option(help="Device: auto, cpu or cuda.")]


def prepare(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME",
            help="See `fedsweep data list`; or a folder of images with a subfolder per class, or a table.",
        ),
    ],
    backbone: Annotated[
        str,
        typer.Option(
            help="Backbone of your images or texts, such as efficientnet-lite0, timm.MODEL, MODULE:FUNCTION or "
            "FILE.py:FUNCTION."
        ),
    ] = "",
    image: Annotated[str, typer.Option(metavar="COLUMN", help="Column of a table with the paths of images.")] = "",
    text: Annotated[str, typer.Option(metavar="COLUMN", help="Column of a table with texts.")] = "",
    label: Annotated[str, typer.Option(metavar="COLUMN", help="Column of a table with the classes.")] = "",
    client: Annotated[str, typer.Option(metavar="COLUMN", help="Column that names the client of a row.")] = "",
    split: Annotated[str, typer.Option(metavar="COLUMN", help="Column that says train or test.")] = "",
    test_fraction: Annotated[float, typer.Option(help="Share of your rows that is drawn as test rows.")] = 0.2,
    given: From = None,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Output folder of published data, or output file of your data.  [default: $FEDSWEEP_DATA, or the "
            "user's cache; NAME.npz in the current folder for your data]",
        ),
    ] = None,
    device: Device = "auto",
    batch: Annotated[
        int | None, typer.Option(help="Images or texts per batch through the backbone.  [default: by backbone]")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE", help="State dict of the backbone, instead of the published one.")
    ] = None,
) -> None:
    """Extract features of images or texts.

    Published data is downloaded and verified; images and texts can also be yours. Existing feature files are kept."""
    from trainables import plugins
    from trainables.data.backbones.backbone import is_function
    from trainables.data.importing.schema import Schema
    from trainables.data.sources import own, preparing
    from trainables.errors import in_range

    in_range(0, 1, "()", test_fraction=test_fraction)
    function = plugins.use_function(backbone) if is_function(backbone) else None
    options = preparing.Options(tuple(given or ()), to, device, batch, weights, function)
    own_names = [name for name in names if own.is_own(name)]
    if own_names and len(names) > 1:
        raise UserError(f"data {own_names[0]} is your own: prepare it by itself")
    for name in [] if own_names else names:  # refuse unknown names before any download
        preparing.find_recipe(name, backbone)
    with progress_bars(DownloadColumn()) as download, progress_bars() as extraction:
        options = replace(options, on_download=download, on_extract=extraction)
        if not own_names:
            for name in names:
                echo(preparing.prepare(name, options, backbone))
            return
        schema = Schema(label=label, client=client, split=split, test_fraction=test_fraction)
        target = _prepare_own(names[0], backbone, schema, image, text, options)
    echo(target)
    show_training(target)


def _prepare_own(name: str, backbone: str, schema: Schema, image: str, text: str, options: Options) -> Path:
    from trainables.data.backbones.backbone import CHOICES
    from trainables.data.sources import own, preparing

    source = name.rstrip("/") or name
    target = options.to or Path(f"{Path(source).resolve().stem}.npz")
    check_target(target)
    if not backbone:
        raise UserError(f"data {source} needs a backbone; choose one with --backbone: {CHOICES}")
    if image and text:
        raise UserError("--image and --text: choose one of them")
    rows = own.read_rows(source, schema, image or text)
    own.prepare(rows, preparing.chosen_backbone(backbone, options).of_texts(bool(text)), target, options)
    for note in rows.notes:
        stderr.print(f"note: {note}")
    return target


@contextlib.contextmanager
def progress_bars(amount: ProgressColumn | None = None) -> Iterator[Callable[[str, int, int | None], None]]:
    """A callback that shows one progress bar per name."""
    columns = (TextColumn("{task.description}"), BarColumn(), amount or MofNCompleteColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        bars: dict[str, TaskID] = {}

        def update(name: str, done: int, total: int | None) -> None:
            if name not in bars:
                bars[name] = progress.add_task(name)
            progress.update(bars[name], completed=done, total=total)

        yield update

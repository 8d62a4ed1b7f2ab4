"""`fedsweep data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.commands.data_import import import_
from orchestrator.commands.data_prepare import Device, From, prepare
from orchestrator.commands.options import Json
from orchestrator.console import echo, show, stderr

data = typer.Typer(help="Import tables and prepare published data.", no_args_is_help=True)
data.command(name="import")(import_)
data.command()(prepare)


@data.command(name="list")
def list_(json: Json = False) -> None:
    """List the published data sets.

    Shows their sources, and which of them are prepared."""
    from trainables.data.sources import catalogue, fetching

    folder = fetching.data_folder()
    rows = [
        {
            "name": recipe.name,
            "exists": (folder / f"{recipe.name}.npz").is_file(),
            "about": catalogue.SOURCES[recipe.source].about,
            "backbone": recipe.backbone,
            "files": [vars(file) for file in catalogue.SOURCES[recipe.source].files],
        }
        for recipe in catalogue.recipes()
    ]
    weights = [{"backbone": name, **vars(file)} for name, file in catalogue.WEIGHTS.items()]
    lines = [
        f"{'*' if row['exists'] else ' '} {row['name']:<24} {row['about']}"
        + (f", features of {row['backbone']}" if row["backbone"] else "")
        for row in rows
    ]
    lines.append(f"\n* exists in {folder}. Make one with `fedsweep data prepare NAME`.")
    lines.append(f"Other backbones for image sets: SOURCE-BACKBONE with {', '.join(catalogue.WEIGHTS)} or timm.MODEL")
    show({"folder": folder, "data": rows, "weights": weights}, json, lines)


@data.command()
def verify(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="Feature files.  [default: all prepared ones]")
    ] = None,
    json: Json = False,
) -> None:
    """Check feature files and downloads.

    Arrays and downloads must match their checksums."""
    from trainables.data import features
    from trainables.data.sources import catalogue, fetching, preparing
    from trainables.errors import UserError

    sources = [file for source in catalogue.SOURCES.values() for file in source.files]
    rows = []
    for path in paths or sorted(fetching.data_folder().glob("*.npz")):
        try:
            loaded, provenance = features.load(str(path)), preparing.provenance_of(path)
            shape = f"{len(loaded.y_train)} + {len(loaded.y_test)} rows, {loaded.features} features"
            origin = f"made from {provenance['source']}" if provenance else "no provenance"
            rows.append({"path": path, "valid": True, "finding": f"{shape}, {loaded.classes} classes; {origin}"})
        except UserError as error:
            rows.append({"path": path, "valid": False, "finding": str(error)})
    for file in [] if paths else [*sources, *catalogue.WEIGHTS.values()]:
        path = fetching.cached_path(file)
        if path.is_file():
            problem = fetching.checksum_error(path, file.checksum)
            finding = problem or ("checksum matches" if file.checksum else "no published checksum")
            rows.append({"path": path, "valid": not problem, "finding": finding})
    lines = [f"{'ok   ' if row['valid'] else 'WRONG'} {row['path']}: {row['finding']}" for row in rows]
    nothing = f"nothing to verify in {fetching.data_folder()} and {fetching.cache_folder() / 'sources'}"
    show(rows, json, lines or [nothing])
    if not all(row["valid"] for row in rows):
        raise typer.Exit(1)


@data.command()
def pretrain(
    backbone: Annotated[str, typer.Argument(metavar="BACKBONE", help="resnet20, resnet32, resnet44, resnet56, vgg16.")],
    to: Annotated[Path, typer.Option(metavar="FILE", help="Output file for the state dict.")],
    on: Annotated[str, typer.Option(metavar="SOURCE", help="Image set to train on.")] = "cifar100",
    epochs: Annotated[int, typer.Option(help="Number of epochs.")] = 200,
    batch: Annotated[int, typer.Option(help="Images per step.")] = 256,
    learning_rate: Annotated[float, typer.Option(help="Initial learning rate, with cosine decay.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the order of images.")] = 42,
    given: From = None,
    device: Device = "auto",
) -> None:
    """Train a backbone from scratch. After an interruption, the same command resumes from the last full epoch."""
    from trainables.data.backbones.pretraining import Epoch, Schedule
    from trainables.data.backbones.pretraining import pretrain as train
    from trainables.data.sources import catalogue, fetching, formats
    from trainables.errors import UserError, one_of

    one_of([name for name, source in catalogue.SOURCES.items() if source.format in catalogue.IMAGES], on=on)
    schedule = Schedule(epochs, batch, learning_rate, seed=seed)
    if to.exists():
        raise UserError(f"{to} already exists; choose another name")
    source = catalogue.SOURCES[on]
    raw = formats.read(source, {file.name: fetching.fetch(file, given or ()) for file in source.files})

    def on_epoch(epoch: Epoch) -> None:
        stderr.print(f"epoch {epoch.number} of {epochs}: loss {epoch.loss:.4f}, test accuracy {epoch.accuracy:.2f}%")

    train(backbone, raw.arrays, to, schedule, device, on_epoch)
    echo(to)

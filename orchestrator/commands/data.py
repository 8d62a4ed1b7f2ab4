"""`fedsweep data`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn

from orchestrator.commands.options import Json
from orchestrator.console import emit_json, stderr

if TYPE_CHECKING:
    from trainables.data.sources.catalogue import File

data = typer.Typer(help="Feature files from where the data are published.", no_args_is_help=True)

From = Annotated[
    list[Path] | None,
    typer.Option("--from", metavar="PATH", help="A file of the source, or a folder of them; may be repeated."),
]
To = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where to write; default: $FEDSWEEP_DATA, or the user's cache.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


@data.command(name="list")
def list_(json: Json = False) -> None:
    """What can be made, of what, and what is there already."""
    from trainables.data.sources import catalogue, fetching

    folder = fetching.data_folder()
    rows = [
        {
            "name": each.name,
            "there": (folder / f"{each.name}.npz").is_file(),
            "about": catalogue.SOURCES[each.source].about,
            "backbone": each.backbone,
            "files": [_file(file) for file in catalogue.SOURCES[each.source].files],
        }
        for each in catalogue.recipes()
    ]
    if json:
        weights = [{"backbone": name, **_file(file)} for name, file in catalogue.WEIGHTS.items()]
        emit_json({"folder": folder, "data": rows, "weights": weights})
        return
    for row in rows:
        through = f", through {row['backbone']}" if row["backbone"] else ""
        typer.echo(f"{'*' if row['there'] else ' '} {row['name']:<24} {row['about']}{through}")
    typer.echo(f"\n* is in {folder}; fedsweep data prepare NAME makes one, and any image set goes with any backbone:")
    typer.echo(f"  SOURCE-BACKBONE with {', '.join(catalogue.WEIGHTS)} or timm.MODEL")


def _file(file: File) -> dict[str, str]:
    return {"name": file.name, "url": file.url, "checksum": file.checksum}


@data.command()
def prepare(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="See `fedsweep data list`.")],
    given: From = None,
    to: To = None,
    device: Device = "auto",
    batch: Annotated[int, typer.Option(help="Images that go through a backbone at once.")] = 500,
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A backbone's state dict, instead of the published one.")
    ] = None,
) -> None:
    """Make feature files: fetch, check, extract. What is there already is not made again."""
    from trainables.data.sources import preparing

    for name in names:  # a wrong name is said before anything is fetched
        preparing.known(name)
    for name in names:
        with _bars(DownloadColumn()) as fetched, _bars(MofNCompleteColumn()) as extracted:
            options = preparing.Options(tuple(given or ()), to, device, batch, weights, fetched, extracted)
            path = preparing.prepare(name, options)
        typer.echo(path)


@contextlib.contextmanager
def _bars(amount: ProgressColumn) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar for everything that is reported on."""
    with Progress(TextColumn("{task.description}"), BarColumn(), amount, console=stderr, transient=True) as progress:
        bars: dict[str, TaskID] = {}

        def told(name: str, done: int, total: int | None) -> None:
            if name not in bars:
                bars[name] = progress.add_task(name)
            progress.update(bars[name], completed=done, total=total)

        yield told


@data.command()
def verify(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE...", help="Feature files; default: all that are there.")
    ] = None,
    json: Json = False,
) -> None:
    """Check feature files against their provenance, and downloads against their checksums."""
    from trainables.data import features
    from trainables.data.sources import catalogue, fetching, preparing
    from trainables.errors import UserError

    sources = [file for source in catalogue.SOURCES.values() for file in source.files]
    found = []
    for path in paths or sorted(fetching.data_folder().glob("*.npz")):
        try:
            loaded, stated = features.load(str(path)), preparing.provenance_of(path)
            shape = f"{len(loaded.y_train)} + {len(loaded.y_test)} rows, {loaded.features} features"
            said = f"made from {stated['source']}" if stated else "says nothing of where it comes from"
            found.append({"path": path, "sound": True, "finding": f"{shape}, {loaded.classes} classes; {said}"})
        except UserError as error:
            found.append({"path": path, "sound": False, "finding": str(error)})
    for file in [] if paths else [*sources, *catalogue.WEIGHTS.values()]:
        path = fetching.cache_folder() / "sources" / file.name
        if path.is_file():
            problem = fetching.wrong(path, file.checksum)
            finding = problem or ("as published" if file.checksum else "no checksum is published")
            found.append({"path": path, "sound": not problem, "finding": finding})
    if json:
        emit_json(found)
    else:
        for row in found:
            typer.echo(f"{'ok   ' if row['sound'] else 'WRONG'} {row['path']}: {row['finding']}")
        if not found:
            typer.echo(f"nothing to verify in {fetching.data_folder()} and {fetching.cache_folder() / 'sources'}")
    if not all(row["sound"] for row in found):
        raise typer.Exit(1)


@data.command()
def pretrain(
    backbone: Annotated[str, typer.Argument(metavar="BACKBONE", help="resnet20, resnet32, resnet44, resnet56, vgg16.")],
    to: Annotated[Path, typer.Option(metavar="FILE", help="Where the state dict goes.")],
    on: Annotated[str, typer.Option(metavar="SOURCE", help="The images to train on.")] = "cifar100",
    epochs: Annotated[int, typer.Option(help="Passes over the images.")] = 200,
    batch: Annotated[int, typer.Option(help="Images a step.")] = 256,
    learning_rate: Annotated[float, typer.Option(help="At the beginning; it falls along a cosine.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Of the initial weights and of the order of images.")] = 42,
    given: From = None,
    device: Device = "auto",
) -> None:
    """Train a backbone from scratch. Interrupted, the same command goes on after the last whole epoch."""
    from trainables.data.backbones.pretraining import Epoch, Schedule
    from trainables.data.backbones.pretraining import pretrain as train
    from trainables.data.sources import catalogue, fetching, formats
    from trainables.errors import UserError, one_of

    one_of([name for name, source in catalogue.SOURCES.items() if source.format in catalogue.IMAGES], on=on)
    schedule = Schedule(epochs, batch, learning_rate, seed=seed)
    if to.exists():
        raise UserError(f"{to} is there already; nothing finished is overwritten")
    source = catalogue.SOURCES[on]
    raw = formats.read(source, {file.name: fetching.fetch(file, given or ()) for file in source.files})

    def told(epoch: Epoch) -> None:
        stderr.print(f"epoch {epoch.number} of {epochs}: loss {epoch.loss:.4f}, test accuracy {epoch.accuracy:.2f}%")

    train(backbone, raw.arrays, to, schedule, device, told)
    typer.echo(to)

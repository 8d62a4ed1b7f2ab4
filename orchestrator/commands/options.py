"""Options that several commands share, and how their values are parsed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer

from orchestrator.execution.training_options import TrainingOptions
from trainables.choices import Clients
from trainables.errors import UserError, in_range

Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON to standard output.")]
JsonEvents = Annotated[bool, typer.Option("--json", help="Print one line of JSON per event to standard output.")]
DATA_HELP = (
    "Feature file (.npz), table with a schema (.csv, .parquet, .jsonl, .svm, .npy), "
    "synthetic-frozen[:TRAIN,TEST,FEATURES,CLASSES], synthetic:ALPHA,BETA, or "
    "simulated:TASK,CLIENTS,MEAN_SIZE,SIZES,DIMENSION[,SEED] with TASK logistic, multinomial or poisson and SIZES "
    "equal, uniform or lognormal."
)
Hyperparameters = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a hyperparameter; repeatable.")
]
Address = Annotated[
    str | None,
    typer.Option(
        envvar="RAY_ADDRESS",  # set in jobs that `ray job submit` started
        help="Address of a Ray cluster to run on (auto or HOST:PORT).  [default: start a local Ray]",
    ),
]
Backend = Annotated[
    Literal["ray", "local"],
    typer.Option(help="Where trials run: on Ray, or in this process. Results are the same."),
]
StudyName = Annotated[str, typer.Argument(metavar="STUDY", help="Study file, or name of a packaged study.")]
Folder = Annotated[str, typer.Argument(metavar="DIR", help="Results folder, or its URL (s3://bucket/folder).")]
Resources = Annotated[
    list[str] | None,
    typer.Option(
        "--resource",
        metavar="KEY=VALUE",
        help="Override a key of the study's resources section for this run: hosts, gpus_per_host, lanes_per_pack, "
        "federations, memory_gib_per_host, accelerator or placement; repeatable. Results stay the same, except for "
        "rounding on another kind of device.",
    ),
]
StopAfter = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Start no new packs after this time (90m, 2h, 1.5d); running packs finish."),
]
Shard = Annotated[
    str | None,
    typer.Option(
        metavar="K/N", help="Run only every N-th cell, starting with the K-th; combine with `fedsweep merge`."
    ),
]


@dataclass(frozen=True)
class RunOptions:
    """How a sweep runs, for `run` and `resume`."""

    backend: Backend = "ray"
    address: Address = None
    resource: Resources = None
    stop_after: StopAfter = None
    shard: Shard = None
    json: JsonEvents = False


def training_options(*names: str, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the parameter `options` of a command by one option per name.

    Types, defaults and help texts are those of `TrainingOptions`; `defaults` are specific to the command.
    """
    annotations = get_type_hints(TrainingOptions, include_extras=True)
    fields = inspect.signature(TrainingOptions).parameters

    def parameter(name: str) -> inspect.Parameter:
        kind, text = get_args(annotations[name])
        flag = f"--{name.replace('_', '-')}"
        if name in defaults:
            text, _, _ = text.partition("  [default:")
        if kind == Clients | None:  # typer does not know such unions
            kind, option = str, typer.Option(flag, help=text, metavar="NUMBER", parser=_clients)
        else:
            option = typer.Option(flag, help=text)
        default = defaults.get(name, fields[name].default)
        return fields[name].replace(annotation=Annotated[kind, option], default=default)

    return lambda command: _expanded(command, TrainingOptions, [parameter(name) for name in names])


def run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `options` of a command by the fields of `RunOptions`."""
    return _expanded(command, RunOptions, inspect.signature(RunOptions, eval_str=True).parameters.values())


def _expanded(
    command: Callable[..., None], build: Callable[..., Any], parameters: Iterable[inspect.Parameter]
) -> Callable[..., None]:
    """The command with these parameters in place of `options`, whose value is built from theirs by `build`."""
    by_name = {given.name: given for given in parameters}

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(options=build(**{name: values.pop(name) for name in by_name}), **values)

    expanded: list[inspect.Parameter] = []
    for given in inspect.signature(command, eval_str=True).parameters.values():
        expanded += by_name.values() if given.name == "options" else [given]
    keywords = [given.replace(kind=inspect.Parameter.KEYWORD_ONLY) for given in expanded]
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    return run


def _clients(text: str | int) -> Clients:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise UserError(f"clients = {text!r} is neither a whole number nor auto") from None


def number_of_clients(options: TrainingOptions) -> int:
    """The number of clients, for commands without a data set: `auto` is refused."""
    if not isinstance(options.clients, int):
        raise UserError("clients = 'auto' needs a data set that names clients; give a number")
    return options.clients


def shard_of(text: str | None) -> tuple[int, int]:
    """Parse K/N."""
    if text is None:
        return 1, 1
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise UserError(f"shard = {text!r} is not K/N with K from 1 to N")
    return int(part), int(parts)


def seconds_of(text: str | None) -> float | None:
    """Parse a time such as 30s, 90m, 2h or 1.5d."""
    if text is None:
        return None
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    try:
        seconds = float(text[:-1]) * units[text[-1:]]
    except (ValueError, KeyError):
        raise UserError(f"stop-after = {text!r} is not a time like 30s, 90m, 2h or 1.5d") from None
    in_range(0, 1e8, "(]", stop_after=seconds)
    return seconds


def key_values(pairs: list[str] | None) -> dict[str, Any]:
    """Parse the values of --set."""
    values: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise UserError(f"--set {pair!r} is not of the form KEY=VALUE")
        if name in values:
            raise UserError(f"--set sets {name!r} twice")
        values[name] = value
    return values


def refuse_options(context: typer.Context, allowed: Sequence[str], conflict: str) -> None:
    """Refuse options that would be ignored. `conflict`: what they cannot be combined with, and why."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name not in allowed and source is not None and source.name == "COMMANDLINE":
            raise UserError(f"{option.opts[0]} cannot be combined with {conflict}")

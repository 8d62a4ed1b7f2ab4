"""Options that several commands share, and how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from trainables.errors import UserError, in_range


class Release(StrEnum):
    LOCAL = "local"
    SECURE = "secure-aggregation"


class Adjacency(StrEnum):
    REPLACE = "replace-one"
    ZERO_OUT = "zero-out"


class Level(StrEnum):
    RECORD = "record"
    USER = "user"


class Aggregate(StrEnum):
    UNIFORM = "uniform"
    SIZE = "size"


class Clipping(StrEnum):
    PLAIN = "plain"
    AUTOMATIC = "automatic"
    ADAPTIVE = "adaptive"


class TrainOn(StrEnum):
    ALL = "all"
    TRAIN = "train"


class EvaluateOn(StrEnum):
    TEST = "test"
    VALIDATION = "validation"


Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON on standard output.")]
DATA_HELP = (
    "An .npz file of features, synthetic-frozen[:TRAIN,TEST,FEATURES,CLASSES] or synthetic:ALPHA,BETA; or "
    "simulated:TASK,CLIENTS,MEAN_SIZE,SIZES,DIMENSION[,SEED] with TASK logistic, multinomial or poisson and SIZES "
    "equal, uniform or lognormal."
)
Data = Annotated[str, typer.Option(help=DATA_HELP)]
Clients = Annotated[int, typer.Option(help="Number of clients.")]
PartitionText = Annotated[str, typer.Option("--partition", help="iid, dirichlet:ALPHA, classes:K or explicit.")]
PartitionSeed = Annotated[int, typer.Option(help="Seed of the partition; not changed by --seed.")]
Epsilon = Annotated[float | None, typer.Option(help="Privacy budget; inf for the non-private arm.")]
Mu = Annotated[float | None, typer.Option(help="The budget as mu of Gaussian differential privacy, in place of eps.")]
Delta = Annotated[float, typer.Option(help="Probability that the guarantee may fail with.")]
Clip = Annotated[float, typer.Option(help="l2 bound on a per-example gradient; at user level, on a client's update.")]
ClippingBy = Annotated[
    Clipping,
    typer.Option(
        help="How gradients come to that bound: longer ones are shortened, or all become about as long; or, of users, "
        "it follows their median update."
    ),
]
LevelModel = Annotated[Level, typer.Option(help="Whose privacy: one record's, or a client's with all its records.")]
SecretParticipation = Annotated[
    float,
    typer.Option(
        help="Probability with which a user takes part in a round, which only it knows; 1: all do. For user level and "
        "secure aggregation."
    ),
]
ModelText = Annotated[
    str, typer.Option("--model", help="softmax, the linear head, mlp:HIDDEN, logistic, multinomial or poisson.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A hyperparameter; may be repeated.")
]
Rounds = Annotated[int, typer.Option(help="Federated rounds.")]
ReleaseModel = Annotated[
    Release,
    typer.Option(help="Who is not trusted: every client's own release is private, or only their sum."),
]
Center = Annotated[
    float, typer.Option(help="Share of mu squared for a private mean that is taken off the features; 0: none.")
]
CenterBound = Annotated[float, typer.Option(help="l2 bound on a row in that mean.")]
AggregateBy = Annotated[Aggregate, typer.Option(help="How clients weigh in the mean of their releases.")]
AdjacencyModel = Annotated[
    Adjacency,
    typer.Option(
        help="What neighbouring data sets differ in: a record exchanged, or one that counts as nothing (sizes stay)."
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        envvar="RAY_ADDRESS",  # as in a job that `ray job submit` started
        help="Join the Ray at this address (auto or HOST:PORT); default: start one here.",
    ),
]
StudyName = Annotated[str, typer.Argument(metavar="STUDY", help="A study file, or the name of a packaged study.")]
Folder = Annotated[str, typer.Argument(metavar="DIR", help="A result folder, or its URL (s3://bucket/folder).")]
Resources = Annotated[
    list[str] | None,
    typer.Option(
        "--resource",
        metavar="KEY=VALUE",
        help="Instead of the study's: hosts, gpus_per_host, lanes_per_pack, federations or placement, for this run; "
        "may be repeated. Never changes a result.",
    ),
]


StopAfter = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="End after this time (90m, 2h, 1.5d), once the packs in flight have ended."),
]


Shard = Annotated[
    str | None,
    typer.Option(metavar="K/N", help="Run every N-th cell, from the K-th on; fedsweep merge puts the parts together."),
]


def shard_of(text: str | None) -> tuple[int, int]:
    """K/N: which of how many parts."""
    if text is None:
        return 1, 1
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise UserError(f"shard = {text!r} is not K/N with K from 1 to N")
    return int(part), int(parts)


def seconds_of(text: str | None) -> float | None:
    """A time as 30s, 90m, 2h or 1.5d."""
    if text is None:
        return None
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    try:
        found = float(text[:-1]) * units[text[-1:]]
    except (ValueError, KeyError):
        raise UserError(f"stop-after = {text!r} is not a time like 30s, 90m, 2h or 1.5d") from None
    in_range(0, 1e8, "(]", stop_after=found)
    return found


def key_values(pairs: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise UserError(f"--set {pair!r} is not of the form KEY=VALUE")
        if name in found:
            raise UserError(f"--set names {name!r} twice")
        found[name] = value
    return found


def refuse_options(context: typer.Context, counted: Sequence[str], with_what: str) -> None:
    """An option that would be ignored is refused. `with_what`: what it does not go with, and why."""
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "")
        if option.name not in counted and given is not None and given.name == "COMMANDLINE":
            raise UserError(f"{option.opts[0]} does not go with {with_what}")

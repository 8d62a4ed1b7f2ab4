"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Release(StrEnum):
    LOCAL = "local"
    SECURE = "secure-aggregation"


class Adjacency(StrEnum):
    REPLACE = "replace-one"
    ADD_REMOVE = "add-remove"


class Level(StrEnum):
    RECORD = "record"
    USER = "user"


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
LevelModel = Annotated[Level, typer.Option(help="Whose privacy: one record's, or a client's with all its records.")]
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
AdjacencyModel = Annotated[Adjacency, typer.Option(help="What neighbouring data sets differ in.")]
Address = Annotated[
    str | None,
    typer.Option(
        envvar="RAY_ADDRESS",  # as in a job that `ray job submit` started
        help="Join the Ray at this address (auto or HOST:PORT); default: start one here.",
    ),
]

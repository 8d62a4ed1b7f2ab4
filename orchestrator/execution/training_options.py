"""The options of one training run, shared by `fedsweep train`, `fedsweep.train` and the engine.

Each field carries its help text. Only the standard library is imported here: the command line reads this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from trainables.choices import (
    Adjacency,
    Aggregate,
    Clients,
    Clipping,
    EvaluateOn,
    Level,
    Release,
    TrainOn,
    ValidationBy,
)
from trainables.federation.lane_result import LaneResult

if TYPE_CHECKING:
    from trainables.privacy.plan import PrivacySettings


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What to train, at which privacy budget, and where to run it."""

    method: Annotated[str, "Method to train; see `fedsweep methods`."] = "dp-fedsofim"
    hyperparameters: Annotated[Mapping[str, float | int | bool | str], "The method's hyperparameters."] = field(
        default_factory=dict
    )
    epsilon: Annotated[float | None, "Privacy budget; inf trains without privacy."] = None
    mu: Annotated[float | None, "Privacy budget as mu of Gaussian differential privacy, instead of epsilon."] = None
    delta: Annotated[float, "Delta of the (epsilon, delta) guarantee."] = 1e-5
    rounds: Annotated[int, "Number of federated rounds."] = 70
    clients: Annotated[Clients, "Number of clients; auto: as many as the data set names."] = 20
    partition: Annotated[str, "Split of the train rows: iid, dirichlet:ALPHA, classes:K or explicit."] = "dirichlet:0.5"
    partition_seed: Annotated[int, "Seed of the partition, independent of the seed of the run."] = 42
    seed: Annotated[int, "Seed of the initial weights and, unless it is secret, of the noise."] = 42
    release: Annotated[
        Release, "What an adversary sees: the release of each client (local) or only their sum (secure-aggregation)."
    ] = "local"
    adjacency: Annotated[
        Adjacency,
        "How neighbouring data sets differ: one record is replaced by another (replace-one), or one record contributes "
        "nothing while client sizes stay the same (zero-out).",
    ] = "replace-one"
    clip: Annotated[float, "l2 bound on a per-example gradient; at user level, on a client's update."] = 10.0
    clipping: Annotated[
        Clipping,
        "plain: scale down gradients above the bound; automatic: scale all gradients to about the bound; adaptive: "
        "the bound follows the median norm of the users' updates.",
    ] = "plain"
    level: Annotated[Level, "Unit of privacy: one record, or one client with all its records (user)."] = "record"
    secret_participation: Annotated[
        float,
        "Probability that a client takes part in a round, known only to the client; 1: always. Values below 1 need "
        "user level and secure aggregation.",
    ] = 1.0
    center: Annotated[
        float, "Share of mu squared spent on a private mean that is subtracted from the features; 0: no centring."
    ] = 0.0
    center_bound: Annotated[float, "l2 bound on a row in the private mean, after scaling."] = 16.0
    scale: Annotated[
        float, "Share of the budget for the private typical length of a row, which becomes about 8; 0: none."
    ] = 0.0
    length: Annotated[float, "Typical length of a row, if it is public, instead of --scale; 0: not declared."] = 0.0
    aggregate: Annotated[
        Aggregate, "Weights of the clients in the mean of their releases: equal, or proportional to their sizes."
    ] = "uniform"
    model: Annotated[str, "softmax (a linear head), mlp:HIDDEN, logistic, multinomial or poisson."] = "softmax"
    train_on: Annotated[TrainOn, "all: every train row; train: all but the validation rows."] = "all"
    evaluate_on: Annotated[EvaluateOn, "Rows to evaluate on."] = "test"
    evaluate_every: Annotated[int, "Rounds between evaluations."] = 10
    validation_fraction: Annotated[float, "Share of the train rows, or clients, held out for validation."] = 0.1
    validation_by: Annotated[ValidationBy, "Hold out rows of every client (row) or whole clients (client)."] = "row"
    secret_noise: Annotated[
        bool, "Draw the noise from the operating system and do not record it, so that the model may be published."
    ] = False
    records: Annotated[
        str, "Name of the records, shared by data files prepared from the same ones; see `fedsweep account`."
    ] = ""
    hosts: Annotated[
        int | None, "Number of client hosts (processes).  [default: one per core; a small run needs no other process]"
    ] = None
    address: Annotated[
        str | None, "Address of a Ray cluster; without it, a local Ray is started, unless the run is small."
    ] = None
    on_round: Annotated[
        Callable[[int, LaneResult], None] | None, "Called after every round with its number and the result so far."
    ] = None

    def privacy(self) -> PrivacySettings:
        """The checked privacy claim."""
        from trainables.privacy.gaussian import budget
        from trainables.privacy.plan import PrivacySettings

        return PrivacySettings(
            epsilon=budget(self.epsilon, self.mu, self.delta),
            delta=self.delta,
            clip=self.clip,
            clipping=self.clipping,
            release=self.release,
            adjacency=self.adjacency,
            level=self.level,
            secret_participation=self.secret_participation,
        ).check()

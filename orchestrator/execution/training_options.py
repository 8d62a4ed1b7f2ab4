"""The options of one training run, shared by `fedsweep train`, `fedsweep.train` and the engine.

Each field carries its help text. This module must import fast, because every start of the command line reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from trainables.choices import (
    Adjacency,
    Aggregate,
    Clients,
    Clipping,
    Defaults,
    EvaluateOn,
    Level,
    Release,
    TrainOn,
    ValidationBy,
)
from trainables.federation.lane_result import LaneResult

if TYPE_CHECKING:
    from orchestrator.study.settings.preprocess import PreprocessSettings
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
    clients: Annotated[
        Clients | None,
        "Number of clients.  [default: auto (as many as the data set names) with the partition explicit, else 20]",
    ] = None
    partition: Annotated[
        str | None,
        "Split of the train rows: iid, dirichlet:ALPHA, classes:K, or explicit for the clients that the data set "
        "names.  [default: explicit if it names any, else dirichlet:0.5]",
    ] = None
    partition_seed: Annotated[int, "Seed of the partition, independent of the seed of the run."] = 42
    seed: Annotated[int, "Seed of the initial weights, and of the noise unless the noise is secret."] = 42
    release: Annotated[
        Release, "What an adversary sees: the release of each client (local) or only their sum (secure-aggregation)."
    ] = "local"
    adjacency: Annotated[
        Adjacency,
        "How neighbouring data sets differ: one record is replaced by another (replace-one), or one record contributes "
        "nothing while client sizes stay the same (zero-out).",
    ] = "replace-one"
    defaults: Annotated[
        Defaults,
        "Defaults of --clip, --center, --scale and --aggregate. adaptive: features are scaled and centred privately, "
        "clients are weighted by their numbers of rows (record level), and the clip is 3. paper: no scaling, no "
        "centring, equal weights, clip 10, as in the DP-FedSOFIM paper. Any of --center, --center-bound, --scale and "
        "--length replaces scaling and centring as a whole.",
    ] = "adaptive"
    clip: Annotated[
        float | None, "l2 bound on a per-example gradient; at user level, on a client's update.  [default: --defaults]"
    ] = None
    clipping: Annotated[
        Clipping,
        "plain: scale down gradients above the bound; automatic: scale all gradients to about the bound; adaptive: "
        "the bound follows the median norm of the users' updates.",
    ] = "plain"
    level: Annotated[Level, "Unit of privacy: one record, or one client with all its records (user)."] = "record"
    secret_participation: Annotated[
        float,
        "Probability that a client takes part in a round; only the client knows whether it does. 1: always. Values "
        "below 1 need user level and secure aggregation.",
    ] = 1.0
    center: Annotated[
        float | None,
        "Share of mu squared spent on a private mean that is subtracted from the features; 0: no centring.  "
        "[default: --defaults]",
    ] = None
    center_bound: Annotated[
        float | None, "l2 bound on a row in the private mean, after scaling.  [default: 16 with --center]"
    ] = None
    scale: Annotated[
        float | None,
        "Share of mu squared spent on a private estimate of the typical row length; rows are then scaled to a length "
        "of about 8. 0: no scaling.  [default: --defaults]",
    ] = None
    length: Annotated[
        float | None, "Typical row length, if it is public knowledge; replaces --scale. 0: not given."
    ] = None
    aggregate: Annotated[
        Aggregate | None,
        "Weights of the clients in the mean of their releases: equal, or proportional to their sizes.  "
        "[default: --defaults]",
    ] = None
    model: Annotated[
        str,
        "softmax (a linear head), mlp:HIDDEN, logistic, multinomial, poisson, or network:NAME,cut=STAGE,train=KINDS.",
    ] = "softmax"
    train_on: Annotated[TrainOn, "all: every train row; train: all but the validation rows."] = "all"
    evaluate_on: Annotated[EvaluateOn, "Rows to evaluate on."] = "test"
    evaluate_every: Annotated[int, "Rounds between evaluations."] = 10
    metrics: Annotated[list[str], "Further metrics, such as macro_f1. Progress shows the first of them."] = field(
        default_factory=list
    )
    validation_fraction: Annotated[float, "Share of the train rows, or clients, held out for validation."] = 0.1
    validation_by: Annotated[ValidationBy, "Hold out rows of every client (row) or whole clients (client)."] = "row"
    secret_noise: Annotated[
        bool, "Draw the noise from the operating system and do not record it, so that the model may be published."
    ] = False
    records: Annotated[
        str, "Name of the records; data files prepared from the same records share it. See `fedsweep account`."
    ] = ""
    hosts: Annotated[
        int | None, "Number of client hosts (processes).  [default: one per core; a small run starts none]"
    ] = None
    address: Annotated[
        str | None, "Address of a Ray cluster; without it, a local Ray is started, unless the run is small."
    ] = None
    on_round: Annotated[
        Callable[[int, LaneResult], None] | None, "Called after every round with its number and the result so far."
    ] = None

    @property
    def _adaptive(self) -> bool:
        """Whether the adaptive defaults apply. They do not if a published program runs `as_released` by its authors."""
        return self.defaults == "adaptive" and self.hyperparameters.get("as_released") is not True

    def aggregation(self) -> Aggregate:
        """How clients are weighted: `aggregate`, or the default if it is not given."""
        return self.aggregate or ("size" if self._adaptive and self.level == "record" else "uniform")

    def preprocess(self) -> PreprocessSettings:
        """The checked settings of preprocessing. Its shares of the budget may be `auto`."""
        from orchestrator.study.settings.preprocess import ADAPTIVE, PreprocessSettings
        from trainables.federation.trial_spec import Preprocess

        named = {"center": self.center, "bound": self.center_bound, "scale": self.scale, "length": self.length}
        given: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        if self._adaptive and not given:
            return ADAPTIVE
        return PreprocessSettings(**Preprocess(**given).check().model_dump())

    def privacy(self) -> PrivacySettings:
        """The checked privacy settings, with defaults filled in."""
        from orchestrator.study.adaptive_defaults import CLIP
        from trainables.privacy.gaussian import budget
        from trainables.privacy.plan import PrivacySettings

        clip = CLIP if self._adaptive and self.clipping != "adaptive" else PrivacySettings.model_fields["clip"].default
        return PrivacySettings(
            epsilon=budget(self.epsilon, self.mu, self.delta),
            delta=self.delta,
            clip=clip if self.clip is None else self.clip,
            clipping=self.clipping,
            release=self.release,
            adjacency=self.adjacency,
            level=self.level,
            secret_participation=self.secret_participation,
        ).check()

"""The study: what to sweep over. Checked in full before anything runs; errors name the file and line.

`resources` only changes how the cluster is used. All settings that change results are outside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from orchestrator.search.objective import Objective, objective_of
from orchestrator.search.strategies import STRATEGIES
from orchestrator.search.task import SearchTask, StageRounds
from orchestrator.search.variant import SECRET, SearchVariant, Select
from orchestrator.section import Section
from orchestrator.study.adaptive_defaults import with_defaults
from orchestrator.study.cell_id import SettingId
from orchestrator.study.errors import invalid
from orchestrator.study.settings.data import DataSettings
from orchestrator.study.settings.method import MethodSettings, ModelText
from orchestrator.study.settings.preprocess import PreprocessSettings
from orchestrator.study.settings.privacy import PrivacyStudySettings
from orchestrator.study.settings.resources import ResourceSettings
from orchestrator.study.settings.rounds import RoundSettings
from orchestrator.study.settings.search import SearchSettings
from orchestrator.study.settings.seeds import SeedSettings
from orchestrator.study.settings.validation import ValidationSettings
from trainables import metrics, plugins
from trainables.choices import Aggregate, Clients, Defaults, Precision
from trainables.data import partition
from trainables.data.features import FeatureSet
from trainables.data.partition import PartitionSpec
from trainables.errors import UserError
from trainables.methods import METHODS
from trainables.models.network_settings import is_network
from trainables.privacy.gaussian import epsilon_of


class Study(Section):
    """What to sweep over: data, methods and budgets."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Letters, digits and . _ -; also the default name of the results folder."""
    description: str = ""
    """A sentence for the report."""
    data: list[DataSettings] = Field(min_length=1)
    partitions: list[str] = Field(default=[partition.DEFAULT], min_length=1)
    """How the train rows are divided among the clients: iid, dirichlet:ALPHA, classes:K, explicit. Where neither this
    nor a number of clients is given: explicit if the data set names clients, else dirichlet:0.5."""
    clients: Clients = partition.CLIENTS
    """Number of clients; auto, or not given with the partition explicit: as many as the data set names."""
    model: ModelText = "softmax"
    """The head that is trained on the features: softmax, mlp:HIDDEN (one hidden layer), or a generalised linear model
    (logistic, multinomial, poisson); auto: the model that simulated data were drawn from. A mapping {network, cut,
    train} trains layers of a network, too; see train-layers.md."""
    precision: Precision = "float32"
    """Precision of the matrix products. tf32 and bf16 are faster on GPUs and change results slightly; sums stay in
    float32, and the clip is still exact."""
    objective: str = "accuracy"
    """The metric that ranks configurations and that tables show; see metrics.md."""
    metrics: list[str] = []
    """Further metrics to evaluate; each gets a table."""
    methods: list[MethodSettings] = Field(min_length=1)
    epsilons: list[float] = Field(min_length=1)
    """Privacy budgets: numbers, .inf for no noise, or "mu=NUMBER". They are shown in ascending order."""
    defaults: Defaults = "adaptive"
    """What applies where `privacy.clip`, `preprocess` and `aggregate` are not given. adaptive: features are scaled and
    centred privately, clients weigh in proportion to their rows (record level), and the clip is tuned; defaults.md
    explains it. paper: the main paper's choices, which are the defaults of those keys."""
    privacy: PrivacyStudySettings = PrivacyStudySettings()
    preprocess: PreprocessSettings = PreprocessSettings()
    """Private scaling and centring of the features."""
    aggregate: Aggregate = "uniform"
    """Weight of each client in the mean of the releases: equal (uniform), or proportional to |D_i| (size)."""
    rounds: RoundSettings = RoundSettings()
    seeds: SeedSettings = SeedSettings()
    evaluate_every: int = Field(default=10, ge=1)
    """Rounds between evaluations; the last round is always evaluated."""
    validation: ValidationSettings = ValidationSettings()
    confirm_train_on: Literal["all", "train"] = "all"
    """Rows that winners are trained on for the final runs: all train rows, or without the validation rows."""
    search: SearchSettings = SearchSettings()
    compare_to: str = ""
    """The method (or its label) that the tables `differences` and `mcnemar` compare the others with; default: the last
    one."""
    resources: ResourceSettings = ResourceSettings()

    # ---- validation

    @model_validator(mode="after")
    def _methods_carry_their_precision(self) -> Study:
        """Copy the study's precision to its methods, whose names in tables show it."""
        if self.precision != "float32":
            self.methods[:] = [
                method if method.precision else method.model_copy(update={"precision": self.precision})
                for method in self.methods
            ]
        return self

    @model_validator(mode="after")
    def _methods_carry_the_defaults(self) -> Study:
        """Copy the defaults to the methods, whose names in tables show their options. A recorded study sets all keys,
        so it gets no defaults."""
        if self.defaults == "adaptive":
            given = self.model_fields_set
            self.methods[:] = [
                with_defaults(
                    method,
                    scaled="preprocess" not in given and not is_network(method.model or self.model),
                    size_weighted="aggregate" not in given and self.privacy.level == "record",
                    clip_tuned="clip" not in self.privacy.model_fields_set and self.privacy.clipping != "adaptive",
                )
                for method in self.methods
            ]
        return self

    @field_validator("objective", mode="before")
    @classmethod
    def _one_objective(cls, value: Any) -> Any:
        if isinstance(value, list):
            raise ValueError("it is the one metric that ranks configurations; list further ones under metrics")
        return value

    @field_validator("methods", mode="before")
    @classmethod
    def _all_methods(cls, value: Any) -> Any:
        return list(METHODS) if value == "all" else value

    @field_validator("clients")
    @classmethod
    def _at_least_one_client(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{value} is less than 1")
        return value

    @model_validator(mode="before")
    @classmethod
    def _explicit_clients_are_counted(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(named := value.get("partitions"), list) and "explicit" in named:
            return {"clients": "auto", **value}
        return value

    @model_validator(mode="before")
    @classmethod
    def _budgets_from_mu(cls, value: Any) -> Any:
        """A budget may be given as mu: "mu=1" is the eps of 1-GDP at the study's delta."""
        if not isinstance(value, dict) or not isinstance(value.get("epsilons"), list):
            return value
        privacy = value.get("privacy")
        delta = privacy.get("delta") if isinstance(privacy, dict) else None
        try:
            usable = PrivacyStudySettings.model_validate({"delta": delta}).delta  # may be text: YAML's 1e-6 is
        except ValidationError:  # none is given, or the error is reported later
            usable = PrivacyStudySettings().delta
        budgets = [_epsilon(budget, usable, number) for number, budget in enumerate(value["epsilons"])]
        return {**value, "epsilons": budgets}

    @field_validator("epsilons")
    @classmethod
    def _positive(cls, values: list[float]) -> list[float]:
        for value in values:
            if math.isnan(value) or value <= 0:
                raise ValueError(f"epsilon {value:g} is not above 0")
        if len({f"{value:g}" for value in values}) != len(values):  # as tables print them
            raise ValueError("an epsilon is named twice")
        return sorted(values)

    @model_validator(mode="after")
    def _strategies_fit_the_spaces(self) -> Study:
        for name in self.search.strategies:
            for method in self.methods:
                if reason := STRATEGIES[name].check_space(method.space()):
                    raise invalid(f"{method.shown} {reason}", "search", "strategies")
        return self

    @model_validator(mode="after")
    def _single_seed_trials_need_a_contest(self) -> Study:
        for name in self.search.strategies:
            if STRATEGIES[name].chooses_seeds and ("single" in self.search.select or not self.seeds.contest):
                raise invalid(
                    f"strategy {name} runs one seed of a configuration; its winner needs a contest (search.select: "
                    "contest, and seeds.contest)",
                    "search",
                    "strategies",
                )
        return self

    @model_validator(mode="after")
    def _metrics_are_known(self) -> Study:
        named: list[tuple[str, tuple[str | int, ...]]] = [(self.objective, ("objective",))]
        named += [(metric, ("metrics", number)) for number, metric in enumerate(self.metrics)]
        for name, at in named:
            try:
                metrics.get(name)
            except UserError as error:
                raise invalid(str(error).removeprefix("metric = "), *at) from None
        if len({self.objective, *self.metrics}) <= len(self.metrics):
            raise invalid("a metric is named twice", "metrics")
        return self

    @model_validator(mode="after")
    def _private_search_needs_bounded_metrics_of_records(self) -> Study:
        unbounded = [name for name in (self.objective, *self.metrics) if metrics.get(name).row_influence is None]
        if self.private and unbounded:
            known = [name for name, metric in metrics.METRICS.items() if metric.row_influence is not None]
            raise invalid(
                f"metric {unbounded[0]}: the influence of one row on it is not known, which a private search needs; "
                f"it is known for {', '.join(known)}",
                "objective" if unbounded[0] == self.objective else "metrics",
            )
        if self.private and self.privacy.level != "record":
            level = self.privacy.level
            sentence = f"level = {level!r}: a private search protects records, because users both train and validate"
            raise invalid(sentence, "privacy", "level")
        return self

    @model_validator(mode="after")
    def _partitions_are_distinct(self) -> Study:
        parsed: list[PartitionSpec] = []
        for number, text in enumerate(self.partitions):
            try:
                spec = self.partition(text)
            except UserError as error:
                raise invalid(str(error), "partitions", number) from None
            if spec in parsed:
                raise invalid(f"partition {text!r} is named twice", "partitions", number)
            parsed.append(spec)
        return self

    @model_validator(mode="after")
    def _data_are_distinct(self) -> Study:
        for number, data in enumerate(self.data):
            for other in self.data[:number]:
                if data.shown == other.shown:
                    sentence = f"two data sets are called {data.shown!r}; give one of them a label"
                    raise invalid(sentence, "data", number, "source")
                if data.id == other.id:
                    sentence = f"data {other.source} and {data.source} have the same name; rename one of the files"
                    raise invalid(sentence, "data", number, "source")
        return self

    @model_validator(mode="after")
    def _methods_are_distinct(self) -> Study:
        shown = [method.shown for method in self.methods]
        for number, method in enumerate(self.methods):
            if method.shown in shown[:number]:
                raise invalid(f"method {method.shown} is named twice; give one of them a label", "methods", number)
            for other in self.methods[:number]:
                if method.id == other.id:
                    raise invalid(
                        f"methods {other.shown} and {method.shown} differ in their label only", "methods", number
                    )
        if self.compare_to and self.compare_to not in [*shown, *(m.name for m in self.methods)]:
            sentence = f"compare_to = {self.compare_to!r} is none of the methods: {', '.join(shown)}"
            raise invalid(sentence, "compare_to")
        return self

    # ---- derived values

    def with_clients_of(self, data: Sequence[FeatureSet]) -> Study:
        """The study with the partition `explicit`, if it sets neither partitions nor a number of clients and its data
        sets name clients; else unchanged. Raises if only some of the data sets name clients."""
        given = self.model_fields_set
        is_open = "partitions" not in given and ("clients" not in given or self.clients == "auto")
        own = [one for one in data if one.clients is not None]
        if not is_open or not own:
            return self
        if len(own) < len(data):
            other = next(one.name for one in data if one.clients is None)
            raise UserError(f"data {own[0].name} names clients and data {other} does not; set partitions and clients")
        return self.model_copy(update={"partitions": ["explicit"], "clients": "auto"})

    def partition(self, text: str, data: FeatureSet | None = None) -> PartitionSpec:
        """The partition of the first search seed. `data`: the data set that gives the number of clients if it is
        auto."""
        clients = partition.clients_of(self.clients, data)
        seed = self.seeds.partition_seed(self.seeds.search[0], self.seeds.search)
        return partition.parse(text, clients=clients, seed=seed)

    @property
    def settings(self) -> dict[SettingId, str]:
        """Every data set with every partition, in the order of the tables, with its name there."""
        return {
            SettingId(data.id, shown): " / ".join(
                part for part in (data.label or data.id, data.backbone, shown) if part
            )
            for data in self.data
            for shown in (partition.to_text(self.partition(text)) for text in self.partitions)
        }

    def cell_name(
        self, setting: str, method: MethodSettings, epsilon: float, variant: SearchVariant | None = None
    ) -> str:
        """For display. The search variant is part of the name unless it is the study's first."""
        name = f"{setting} / {method.shown} / eps {epsilon:g}"
        return name if variant in (None, self.variants[0]) else f"{name} ({variant.name})"

    def stage_rounds(self, method: MethodSettings) -> StageRounds:
        own = method.fixed.get("rounds", method.rounds)
        return StageRounds(*(3 * [int(own)] if own is not None else self.rounds.model_dump().values()))

    @property
    def variants(self) -> tuple[SearchVariant, ...]:
        """How every cell is searched: each strategy with each selection rule."""
        seeds = self.seeds.search, self.seeds.contest, self.seeds.confirm
        rules: list[Select] = ["contest"] if self.private else self.search.select
        return tuple(
            SearchVariant(STRATEGIES[name], rule, self.search.section(name), *seeds)
            for name in self.search.strategies
            for rule in rules
        )

    @property
    def trials_are_exact(self) -> bool:
        """Whether the number of trials is known before anything has run, if none fails."""
        return len(self.variants) == 1 and self.variants[0].strategy.is_exact(self.search.refine)

    @property
    def budgets_depend(self) -> bool:
        """Whether the search of a cell depends on the results of other budgets."""
        return self.search.warm_start or any(variant.strategy.searches_budgets_together for variant in self.variants)

    @property
    def may_add_stages(self) -> bool:
        """Whether results may call for stages beyond the expected ones."""
        return any(variant.strategy.may_add_stages(self.search.refine) for variant in self.variants)

    @property
    def stages(self) -> tuple[str, ...]:
        """Every stage that some variant may have, in order."""
        names = dict.fromkeys(stage for variant in self.variants for stage in variant.strategy.stages)
        contest = ("contest",) if any(variant.has_contest for variant in self.variants) else ()
        return (*names, *contest, "confirm")

    def search_task(
        self, method: MethodSettings, epsilon: float, variant: SearchVariant, validation_rows: int, secret: bytes = b""
    ) -> SearchTask:
        return SearchTask(
            space=method.space(),
            rounds=self.stage_rounds(method),
            objective=self.objective_spec,
            validation_rows=validation_rows,
            trials=self.search.trials,
            refine=self.search.refine,
            settings=variant.settings,
            epsilon=epsilon,
            delta=self.privacy.delta,
            seeds=tuple(self.seeds.search),
            budgets=len(self.epsilons),
            packs_save_time=self.packs_save_time(method),
            secret=secret,
        )

    def packs_save_time(self, method: MethodSettings) -> bool:
        """Whether a trial takes less time in a pack than alone. Lanes of a network are computed one after the other."""
        return not is_network(method.model or self.model)

    @property
    def trial_metrics(self) -> tuple[str, ...]:
        """The metrics that are not part of every evaluation."""
        return metrics.not_built_in((self.objective, *self.metrics))

    @property
    def private(self) -> bool:
        """Whether only winners are shown, so that the tables may be published."""
        return self.search.publishes_only_winners

    @property
    def as_shown(self) -> Study:
        """For tables: a private search shows one run per cell, and not its seed."""
        if not self.private:
            return self
        return self.model_copy(update={"seeds": self.seeds.model_copy(update={"confirm": [SECRET]})})

    @property
    def last_round(self) -> int:
        """Last round of the longest confirm runs."""
        return max(self.stage_rounds(method).confirm for method in self.methods)

    @property
    def objective_spec(self) -> Objective:
        return objective_of(self.objective)

    @property
    def reference(self) -> MethodSettings:
        """The method that the others are compared with."""
        for method in self.methods:
            if self.compare_to in (method.shown, method.name):
                return method
        return self.methods[-1]

    @classmethod
    def recorded(cls, text: str, imports: Sequence[str] = ()) -> Study:
        """From the JSON in a ledger. `imports`: the plug-ins that the study was run with."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            missing = plugins.not_loaded(imports)
            if missing:
                options = plugins.import_options(missing)
                raise UserError(
                    f"the study of this folder cannot be read without its plug-ins; add{options}, or from Python "
                    f"call fedsweep.plugins.use({missing[0]!r})"
                ) from None
            for details in error.errors():
                if "--import" in details["msg"]:
                    sentence = details["msg"].removeprefix("Value error, ")
                    raise UserError(
                        f"the study of this folder cannot be read without its plug-ins: {sentence}"
                    ) from None
            raise


def _epsilon(budget: Any, delta: float, number: int) -> Any:
    if not isinstance(budget, str) or not budget.startswith("mu="):
        return budget
    try:
        return epsilon_of(float(budget.removeprefix("mu=")), delta)
    except (ValueError, UserError) as error:
        raise invalid(f"budget {budget!r} is not mu=NUMBER: {error}", "epsilons", number) from None

"""The study file: what to sweep over. Typed, checked in full before anything runs, with file and line in the message.

What changes results stands in the body; what only changes how fast they come stands under `resources`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

import search_spaces
from orchestrator.study.objective import OBJECTIVES, Objective
from orchestrator.study.strategies import RUNGS, SearchVariant
from search_spaces import SearchSpace
from trainables import plugins
from trainables.choices import Aggregate, Precision
from trainables.data import partition
from trainables.data.partition import PartitionSpec
from trainables.errors import UserError
from trainables.federation.trial_spec import Preprocess
from trainables.methods import METHODS
from trainables.privacy.gaussian import epsilon_of
from trainables.privacy.plan import Adjacency, Clipping, Level, Release, known_adjacency
from trainables.spec import HyperValue

SECRET = -1
"""Stands where a seed would, and nobody is told it."""
LARGEST_GRID = 100_000
"""Configurations of a method in one stage: far more than anyone runs, and still planned in seconds."""


def wrong(sentence: str, *at: str | int) -> PydanticCustomError:
    """What a check of several settings found, and which of them it is about: the message points to its line."""
    return PydanticCustomError("wrong", "{sentence}", {"sentence": sentence, "at": at})


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class DataSettings(Settings):
    """A data set: a feature file (relative to the study file) or a built-in set, and what to call it in tables."""

    source: str
    """A file of features, or a built-in, simulated or plug-in's set."""
    label: str = Field(default="", max_length=60)
    """What tables call it."""
    backbone: str = Field(default="", max_length=60)
    """What made the features, for tables."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, cls | str | dict):
            raise ValueError("it should be a feature file or a generated set, or a mapping with its source")
        return {"source": value} if isinstance(value, str) else value


class PreprocessSettings(Settings):
    """What is done to the features before the first round; trainables/spec.py says more of it."""

    center: float = Field(default=0.0, ge=0, lt=1)
    """The share of the budget (of mu squared) that a private mean, taken off the features, may cost."""
    bound: float = Field(default=Preprocess().bound, gt=0, allow_inf_nan=False)
    """The l2 bound on a row for that mean."""


class SpaceSettings(Settings):
    """A search space of the study's own, in place of the packaged one: what a file of search_spaces/ holds."""

    coarse: dict[str, list[HyperValue]]
    """Axes of the wide grid and their values."""
    fine: dict[str, list[HyperValue]] = {}
    """The same axes, near where winners are expected; without it, as coarse. `refine: zoom` does not look at it."""
    scale: dict[str, str] = {}
    """Of axes: log, linear or complement."""
    fixed: dict[str, HyperValue] = {}
    """Hyperparameters that are not tuned."""


class MethodSettings(Settings):
    """A method with what the study changes of its search space. A label tells two variants of one method apart."""

    name: str
    """As `fedsweep methods` lists it."""
    label: str = Field(default="", max_length=60)
    """What tables call this variant."""
    rounds: int | None = Field(default=None, ge=1, le=10**6)
    """Of all its stages, where they are not the study's: methods differ in how many they need."""
    clip: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Where it is not the study's."""
    clipping: Clipping | None = None
    """Where it is not the study's: a method can stand in a table both ways."""
    preprocess: PreprocessSettings | None = None
    """Where it is not the study's: a method can stand in a table both ways."""
    aggregate: Aggregate | None = None
    """Where it is not the study's."""
    precision: Precision | None = None
    """Where it is not the study's."""
    search_space: SpaceSettings | None = None
    """In place of the packaged one; a file of the method's name beside the study is taken for it."""
    fixed: dict[str, HyperValue] = {}
    """Hyperparameters that are no longer tuned."""
    coarse: dict[str, list[HyperValue]] = {}
    """Axes of the coarse grid given anew, or added."""
    fine: dict[str, list[HyperValue]] = {}
    """The same of the fine grid."""
    scale: dict[str, str] = {}
    """Of axes: log, linear or complement."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, dict) and len(value) == 1 and "name" not in value:
            ((name, changes),) = value.items()
            if changes is not None and not isinstance(changes, dict):
                raise ValueError(f"the changes of {name} are {changes!r}, not a mapping")
            return {"name": name, **(changes or {})}
        if not isinstance(value, cls | dict) or (isinstance(value, dict) and "name" not in value):
            raise ValueError("it should be the name of a method, or one name with its changes")
        return value

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in METHODS:
            known = f"choose one of: {', '.join(METHODS)}"
            raise ValueError(f"method {name!r} is unknown; --import MODULE loads a plug-in's, else {known}")
        return name

    @model_validator(mode="after")
    def _space_is_valid(self) -> MethodSettings:
        try:
            space = self.space()
        except UserError as error:
            raise ValueError(str(error)) from None
        if "as_released" in {*space.coarse, *space.fine}:
            raise ValueError(f"as_released of {self.name} is not searched over; set it under fixed")
        for stage, axes in (("coarse", space.coarse), ("fine", space.fine)):
            if space.size(axes) > LARGEST_GRID:
                raise ValueError(
                    f"the {stage} grid of {self.name} has {space.size(axes)} configurations, more than {LARGEST_GRID}; "
                    "give shorter axes or fix some of them"
                )
        if self.rounds is not None and "rounds" in {*space.coarse, *space.fixed}:
            raise ValueError(f"rounds of {self.name} are both set and in its search space")
        if self.clip is not None and "clip" in {*space.coarse, *space.fixed}:
            raise ValueError(f"clip of {self.name} is both set and in its search space")
        return self

    def space(self) -> SearchSpace:
        own = self.search_space
        if own is not None:
            space = search_spaces.build(self.name, own.coarse, own.fine or own.coarse, own.scale, own.fixed)
        elif self.coarse and not search_spaces.has(self.name):
            space = search_spaces.build(self.name, {}, {}, {}, {})  # the study gives it all
        else:
            space = search_spaces.load(self.name)
        return space.changed(fixed=self.fixed, coarse=self.coarse, fine=self.fine, scale=self.scale)

    @property
    def shown(self) -> str:
        """Its name in tables. "(as released)" and reduced precision are always part of it, also after a label."""
        options = self._reduced_precision if self.label else self.own_options
        name = ", ".join([self.label or METHODS[self.name].title, *options])
        return f"{name} (as released)" if self.as_released else name

    @property
    def own_options(self) -> list[str]:
        """The options that this method sets for itself, as its name in tables lists them."""
        centred = ["centred"] if self.preprocess is not None and self.preprocess.center else []
        weighted = ["size-weighted"] if self.aggregate == "size" else []
        clipped = [f"{self.clipping} clipping"] if self.clipping in ("automatic", "adaptive") else []
        return [*centred, *weighted, *clipped, *self._reduced_precision]

    @property
    def _reduced_precision(self) -> list[str]:
        return [self.precision] if self.precision not in (None, "float32") else []

    @cached_property
    def as_released(self) -> bool:
        return self.space().fixed.get("as_released") is True


class RoundSettings(Settings):
    """Federated rounds of a trial, by stage."""

    coarse: int = Field(default=50, ge=1, le=10**6)
    """Of the first search stage."""
    fine: int = Field(default=50, ge=1, le=10**6)
    """Of all later ones, and Optuna's. A contest has as many as confirm."""
    confirm: int = Field(default=70, ge=1, le=10**6)
    """Of the winners' runs that are judged on the test rows."""


class SeedSettings(Settings):
    """Winners are chosen on other seeds than those that confirm them."""

    search: list[int] = Field(default=[1, 2, 3], min_length=1)
    """Of every configuration in a search, which is judged by its mean."""
    contest: list[int] = [11, 12, 13, 14, 15]
    """Of the best configurations of a search, when they meet again; without any, the search itself decides."""
    confirm: list[int] = Field(default=[42, 123, 7, 99, 1000], min_length=1)
    """With which winners are trained anew and judged."""
    partition: int | list[int] | Literal["per-seed"] = 42
    """Who holds which rows: the same for all seeds; or dealt anew with each run's own seed; or with a list of seeds, of
    which the runs of a stage take one after the other, from the beginning again after the last."""

    @field_validator("search", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, int) else value

    @field_validator("partition")
    @classmethod
    def _usable(cls, value: int | list[int] | str) -> int | list[int] | str:
        seeds = value if isinstance(value, list) else [value] if isinstance(value, int) else []
        if value == [] or any(not 0 <= seed < 2**32 for seed in seeds) or len(set(seeds)) != len(seeds):
            raise ValueError(f"partition seeds {value} must be distinct, not negative and below 2^32")
        return value

    @field_validator("search", "contest", "confirm")
    @classmethod
    def _distinct(cls, seeds: list[int], info: ValidationInfo) -> list[int]:
        if seeds and (len(set(seeds)) != len(seeds) or min(seeds) < 0 or max(seeds) >= 2**63):
            raise ValueError(f"{info.field_name} seeds {seeds} must be distinct, not negative and below 2^63")
        return seeds

    @model_validator(mode="after")
    def _contest_is_fresh(self) -> SeedSettings:
        both = sorted({*self.search} & {*self.contest})
        if both:
            raise ValueError(f"seed {both[0]} is both a search and a contest seed; a contest needs fresh ones")
        largest = max(*self.search, *self.contest, *self.confirm)
        if self.partition == "per-seed" and largest >= 2**32:
            raise ValueError(f"partition: per-seed needs seeds below 2^32, and {largest} is not")
        return self

    def partition_of(self, seed: int, among: Sequence[int]) -> int:
        """The seed of the partition that a run with this seed has. `among`: the seeds of its stage."""
        if isinstance(self.partition, int):
            return self.partition
        if self.partition == "per-seed":
            return seed
        return self.partition[among.index(seed) % len(self.partition)]


class PrivacyStudySettings(Settings):
    """What a budget is meant to promise; docs/privacy.md says what each of these means."""

    delta: float = Field(default=1e-5, gt=0, lt=1)
    """The probability that the guarantee may fail with."""
    clip: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """The l2 bound on what a record (or a user) contributes."""
    clipping: Clipping = "plain"
    """How a record's gradient g comes to that bound C: plain shortens the longer ones; automatic takes
    C g / (‖g‖ + 0.01) of all. adaptive is for users' updates: C is the first round's bound and then follows the median
    of their lengths, which is released with the updates."""
    secret_participation: float = Field(default=1.0, gt=0, le=1)
    """The probability with which a user takes part in a round, which only it knows; needs level: user and release:
    secure-aggregation."""
    release: Release = "local"
    """Who is not trusted: whoever sees a client's own release, or only their sum."""
    adjacency: Adjacency = "replace-one"
    """What neighbouring data sets differ in."""
    level: Level = "record"
    """Whose privacy: one record's, or a client's with all its records."""

    _known = field_validator("adjacency", mode="before")(known_adjacency)


class ValidationSettings(Settings):
    """Train rows that the search is judged on."""

    fraction: float = Field(default=0.1, gt=0, lt=1)
    """Of every class."""
    seed: int = Field(default=42, ge=0, lt=2**63)
    """Of the draw."""


NO_EARLY_STOPPING = "early stopping within packs is gone"


class HalvingSettings(Settings):
    """Configurations drawn at random run a few rounds, the best of them more, until those that are left run to the end.
    Altogether that takes about as many rounds as `trials` configurations run to the end."""

    rungs: int = Field(default=3, ge=2, le=len(RUNGS))
    """On the last one configurations run to the end."""
    keep: float = Field(default=1 / 3, gt=0, lt=1)
    """The share of a rung that goes on to the next, where it runs 1 / keep times as many rounds."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Of the draws."""

    @property
    def stages(self) -> tuple[str, ...]:
        """Its rungs."""
        return RUNGS[: self.rungs]

    def rounds(self, last: int) -> list[int]:
        """Of every rung, where the last has so many."""
        return [_at_least(last * self.keep**above) for above in reversed(range(self.rungs))]

    def last_round(self, stage: str, rounds: int) -> int:
        """That is computed of so many: a rung below the last has only the first of those that a trial has paid for."""
        return self.rounds(rounds)[self.stages.index(stage)] if stage in RUNGS else rounds

    def sizes(self, trials: int, last: int) -> list[int]:
        """Configurations on every rung, if none is lost, for the rounds of so many that run to the end."""
        cost = sum(self.keep**n * rounds / last for n, rounds in enumerate(self.rounds(last)))
        found = [max(1, int(trials / cost))]
        while len(found) < self.rungs:
            found.append(self.kept(found[-1]))
        return found

    def kept(self, count: int) -> int:
        """Of so many on a rung."""
        return _at_least(count * self.keep)


def _at_least(amount: float) -> int:
    """Rounded up, but not for the last bits of a product."""
    return max(1, math.ceil(round(amount, 9)))


class OptunaSettings(Settings):
    """TPE, asked and told in batches."""

    batch: int = Field(default=16, ge=1)
    """How many configurations are asked for at a time."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Of its sampler."""


class RandomSettings(Settings):
    """Configurations drawn at random from the ranges of the grids."""

    seed: int = Field(default=42, ge=0, lt=2**32)
    """Of the draws."""


class PrivateSettings(Settings):
    """A search of which only the winner is shown; docs/privacy.md says what that costs."""

    runs: Literal["geometric", "logarithmic"] = "geometric"
    """How the number of runs, which stays secret, is distributed; `trials` is its mean."""
    score: float = Field(default=1.0, gt=0, le=10)
    """The mu of a run's score, as a part of the mu of the run: up to 1 it costs nothing more, since no record both
    trains and validates."""


class SearchSettings(Settings):
    """How winners are looked for and picked."""

    strategies: list[Literal["grid", "optuna", "random", "halving", "private"]] = Field(default=["grid"], min_length=1)
    """Each is a search of its own. private: its tables may be published."""
    select: list[Literal["contest", "single"]] = Field(default=["contest"], min_length=1)
    """How the winner is picked. contest: configurations are judged by their mean over the search seeds, and the best
    meet again on fresh ones. single: the best on the first search seed wins, as in the papers."""
    contenders: int = Field(default=8, ge=1, le=1000)
    """How many meet in a contest."""
    warm_start: bool = False
    """The best of the budgets above and below, of the same method on the same data, meet in a contest, too."""
    refine: Literal["table", "zoom"] = "zoom"
    """The fine grid: as the search space prints it, or around the coarse winner."""
    trials: int | None = Field(default=None, ge=1, le=LARGEST_GRID)
    """How many configurations Optuna or a random search tries, halving for about as many rounds, or a private search
    on average; without it, as many as the coarse and the fine grid."""
    optuna: OptunaSettings = OptunaSettings()
    random: RandomSettings = RandomSettings()
    halving: HalvingSettings = HalvingSettings()
    private: PrivateSettings = PrivateSettings()

    @model_validator(mode="before")
    @classmethod
    def _halving_is_a_way(cls, said: Any) -> Any:
        if not isinstance(said, dict) or "early_stopping" not in said:
            return said
        if said["early_stopping"] is not None:  # older ledgers say that there is none
            raise wrong(f"{NO_EARLY_STOPPING}; strategies: [halving] stops across packs", "early_stopping")
        return {name: value for name, value in said.items() if name != "early_stopping"}

    @field_validator("select", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("strategies", "select")
    @classmethod
    def _once(cls, names: list[str], info: ValidationInfo) -> list[str]:
        if len(set(names)) != len(names):
            raise ValueError(f"{info.field_name} {names} names one twice")
        return names

    @model_validator(mode="after")
    def _warm_start_needs_a_contest(self) -> SearchSettings:
        if self.warm_start and ("contest" not in self.select or "private" in self.strategies):
            raise wrong("warm_start brings more contenders to a contest, and there is none", "warm_start")
        return self

    @model_validator(mode="after")
    def _private_shows_nothing_else(self) -> SearchSettings:
        if "private" not in self.strategies:
            return self
        if len(self.strategies) > 1:
            raise wrong(
                f"strategies = {self.strategies}: private goes alone, for the others show what it hides", "strategies"
            )
        return self


class ResourceSettings(Settings):
    """Never changes a result."""

    hosts: int | Literal["auto"] = Field(default="auto")
    """Client hosts of a federation; auto: by the cores of a node."""
    gpus_per_host: float | Literal["auto"] = Field(default="auto")
    """auto: a whole GPU where there is one, else none. Several hosts can share one: 0.5."""
    lanes_per_pack: int | Literal["auto"] = Field(default="auto")
    """How many trials are computed side by side; auto: as many as pay, or fit."""
    federations: int | Literal["auto"] = Field(default="auto")
    """How many work side by side at most; auto: as many as the cluster has room for."""
    memory_gib_per_host: float = Field(default=0.0, ge=0, le=1e5)
    """What Ray is to set aside for a host; 0: nothing."""
    accelerator: str = Field(default="", pattern=r"^[A-Za-z0-9._-]{0,64}$")
    """The kind of GPU, as Ray calls it (H200, A100): only nodes that have it are used."""
    placement: Literal["pack", "spread"] = "pack"
    """Whether a federation's hosts share a node or are spread over nodes."""

    @field_validator("gpus_per_host")
    @classmethod
    def _not_negative(cls, value: float | str) -> float | str:
        if isinstance(value, float | int) and not 0 <= value <= 64:
            raise ValueError(f"{value} is not in [0, 64]")
        return value

    @field_validator("hosts", "lanes_per_pack", "federations")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{value} is less than 1")
        return value


class Study(Settings):
    """What to sweep over: data, methods, budgets; and how."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Letters, digits and . _ -; the result folder is called so by default."""
    description: str = ""
    """A sentence for the report."""
    data: list[DataSettings] = Field(min_length=1)
    partitions: list[str] = Field(default=["dirichlet:0.5"], min_length=1)
    """How the train rows are dealt to the clients: iid, dirichlet:ALPHA, classes:K, explicit."""
    clients: int | Literal["auto"] = 20
    """auto: as many as the data set names."""
    model: str = "softmax"
    """The head that is trained on the features: softmax, mlp:HIDDEN with one hidden layer, or a generalised linear
    model; auto: the one that simulated data were drawn from."""
    precision: Precision = "float32"
    """Of the products that gradients are made of: tf32 and bf16 are faster on GPUs, and change results a little; sums
    stay in float32, and no contribution becomes longer than the clip."""
    objective: Literal["accuracy", "loss", "squared_error"] = "accuracy"
    """The metric that configurations are chosen by and that tables show; see orchestrator/study/objective.py."""
    methods: list[MethodSettings] = Field(min_length=1)
    epsilons: list[float] = Field(min_length=1)
    """The privacy budgets: numbers, .inf for no noise, or "mu=NUMBER"."""
    privacy: PrivacyStudySettings = PrivacyStudySettings()
    preprocess: PreprocessSettings = PreprocessSettings()
    """A private mean taken off the features: {center: SHARE of mu squared, bound: l2 bound on a row}."""
    aggregate: Aggregate = "uniform"
    """How clients weigh in the mean of their releases: all the same (uniform), or by |D_i| (size)."""
    rounds: RoundSettings = RoundSettings()
    seeds: SeedSettings = SeedSettings()
    evaluate_every: int = Field(default=10, ge=1)
    """Rounds between evaluations; the last round is always one."""
    validation: ValidationSettings = ValidationSettings()
    confirm_train_on: Literal["all", "train"] = "all"
    """Which rows the winners are trained on before they meet the test set."""
    search: SearchSettings = SearchSettings()
    compare_to: str = ""
    """The method (or its label) that McNemar's test holds the others against; default: the last one."""
    resources: ResourceSettings = ResourceSettings()

    @model_validator(mode="after")
    def _methods_know_their_precision(self) -> Study:
        """Their names say it, in whatever table they stand."""
        if self.precision != "float32":
            self.methods[:] = [
                method if method.precision else method.model_copy(update={"precision": self.precision})
                for method in self.methods
            ]
        return self

    @field_validator("methods", mode="before")
    @classmethod
    def _all_methods(cls, value: Any) -> Any:
        return list(METHODS) if value == "all" else value

    @field_validator("clients")
    @classmethod
    def _some_clients(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{value} is less than 1")
        return value

    @model_validator(mode="before")
    @classmethod
    def _from_mu(cls, value: Any) -> Any:
        """A budget may be stated as mu: "mu=1" is the eps that 1-GDP has at the study's delta."""
        if not isinstance(value, dict) or not isinstance(value.get("epsilons"), list):
            return value
        privacy = value.get("privacy")
        delta = privacy.get("delta") if isinstance(privacy, dict) else None
        usable = delta if isinstance(delta, float) and 0 < delta < 1 else PrivacyStudySettings().delta
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
        return values

    @model_validator(mode="after")
    def _rungs_compare_equal_rounds(self) -> Study:
        searched = next((method for method in self.methods if "rounds" in method.space().coarse), None)
        if "halving" in self.search.strategies and searched:
            raise wrong(
                f"halving compares after equal rounds, but {searched.shown} searches over rounds",
                "search",
                "strategies",
            )
        return self

    @model_validator(mode="after")
    def _private_scores_are_shares_of_records(self) -> Study:
        if self.private and self.objective != "accuracy":
            raise wrong(f"objective = {self.objective!r}: a private search is judged by accuracy", "objective")
        if self.private and self.privacy.level != "record":
            sentence = (
                f"level = {self.privacy.level!r}: a private search protects records, for users train and validate"
            )
            raise wrong(sentence, "privacy", "level")
        return self

    @model_validator(mode="after")
    def _partitions_are_distinct(self) -> Study:
        parsed: list[PartitionSpec] = []
        for number, text in enumerate(self.partitions):
            try:
                spec = self.partition(text)
            except UserError as error:
                raise wrong(str(error), "partitions", number) from None
            if spec in parsed:
                raise wrong(f"partition {text!r} is named twice", "partitions", number)
            parsed.append(spec)
        return self

    @model_validator(mode="after")
    def _names_are_distinct(self) -> Study:
        shown = [method.shown for method in self.methods]
        for number, name in enumerate(shown):
            if name in shown[:number]:
                raise wrong(f"method {name} is named twice; give one of them a label", "methods", number)
        if self.compare_to and self.compare_to not in [*shown, *(m.name for m in self.methods)]:
            sentence = f"compare_to = {self.compare_to!r} is none of the methods: {', '.join(shown)}"
            raise wrong(sentence, "compare_to")
        return self

    def partition(self, text: str, named: int | None = None) -> PartitionSpec:
        """One of the partitions, as the first search seed has it; `named`: how many clients the data set names."""
        clients = (named or 1) if self.clients == "auto" else self.clients
        return partition.parse(
            text, clients=clients, seed=self.seeds.partition_of(self.seeds.search[0], self.seeds.search)
        )

    def rounds_of(self, method: MethodSettings, stage: str) -> int:
        """Where its configurations do not say it themselves."""
        own = method.fixed.get("rounds", method.rounds)
        if own is not None:
            return int(own)
        if stage in ("private", "contest", "confirm"):
            return self.rounds.confirm
        return self.rounds.coarse if stage == "coarse" else self.rounds.fine

    def last_round_of(self, method: MethodSettings, stage: str) -> int:
        """That is computed."""
        return self.search.halving.last_round(stage, self.rounds_of(method, stage))

    @property
    def strategies(self) -> tuple[SearchVariant, ...]:
        """In which every cell is searched."""
        if self.private:
            return (SearchVariant("private", "private"),)
        return tuple(
            SearchVariant(search, select) for search in self.search.strategies for select in self.search.select
        )

    @property
    def private(self) -> bool:
        """Whether all that is shown of it may be published."""
        return "private" in self.search.strategies

    @property
    def as_shown(self) -> Study:
        """For tables: a private search has one run to show, whose seed nobody is told."""
        if not self.private:
            return self
        return self.model_copy(update={"seeds": self.seeds.model_copy(update={"confirm": [SECRET]})})

    def seeds_of(self, strategy: SearchVariant, stage: str) -> list[int]:
        """That every configuration of a stage is run with."""
        if strategy.search == "private":
            return [SECRET]
        if stage in ("contest", "confirm"):
            return self.seeds.contest if stage == "contest" else self.seeds.confirm
        return self.seeds.search[:1] if strategy.select == "single" else self.seeds.search

    @property
    def last_round(self) -> int:
        """Of the confirm runs that last longest."""
        return max(self.rounds_of(method, "confirm") for method in self.methods)

    @classmethod
    def recorded(cls, text: str, imports: Sequence[str] = ()) -> Study:
        """As a ledger keeps it. A plug-in that is not loaded is no damage; `imports`: those that it was run with."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            missing = plugins.not_loaded(imports)
            if missing:
                raise UserError(
                    f"the study of this folder cannot be read without its plug-ins; say{plugins.import_options(missing)}, "
                    f"or from Python fedsweep.plugins.use({missing[0]!r})"
                ) from None
            for wrong_here in error.errors():
                if NO_EARLY_STOPPING in wrong_here["msg"]:
                    raise UserError(
                        "this folder was made by an earlier version, with early stopping within packs; that reads it"
                    ) from None
                if "--import" in wrong_here["msg"]:
                    sentence = wrong_here["msg"].removeprefix("Value error, ")
                    raise UserError(
                        f"the study of this folder cannot be read without its plug-ins: {sentence}"
                    ) from None
            raise

    @property
    def judged_by(self) -> Objective:
        return OBJECTIVES[self.objective]

    @property
    def reference(self) -> MethodSettings:
        """The method that the others are compared with."""
        for method in self.methods:
            if self.compare_to in (method.shown, method.name):
                return method
        return self.methods[-1]


def _epsilon(budget: Any, delta: float, number: int) -> Any:
    if not isinstance(budget, str) or not budget.startswith("mu="):
        return budget
    try:
        return epsilon_of(float(budget.removeprefix("mu=")), delta)
    except (ValueError, UserError) as error:
        raise wrong(f"budget {budget!r} is not mu=NUMBER: {error}", "epsilons", number) from None

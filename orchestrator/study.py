"""The study file: what to sweep over. Typed, checked in full before anything runs, with file and line in the message.

What changes results stands in the body; what only changes how fast they come stands under `resources`.
"""

from __future__ import annotations

import math
import os
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

import search_spaces
from search_spaces import SearchSpace
from trainables.data import partition
from trainables.errors import UserError
from trainables.methods import METHODS
from trainables.objective import OBJECTIVES, Objective
from trainables.privacy.gaussian import epsilon_of
from trainables.privacy.plan import Adjacency, Level, Release
from trainables.spec import HyperValue, PartitionSpec

Stage = Literal["coarse", "fine", "optuna", "confirm"]


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class DataSettings(Settings):
    """A data set: a feature file (relative to the study file) or a built-in set, and what to call it in tables."""

    source: str
    label: str = Field(default="", max_length=60)
    backbone: str = Field(default="", max_length=60)

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value


class MethodSettings(Settings):
    """A method with what the study changes of its search space. A label tells two variants of one method apart."""

    name: str
    label: str = Field(default="", max_length=60)
    rounds: int | None = Field(default=None, ge=1, le=10**6)
    """Of all its stages, where they are not the study's: methods differ in how many they need."""
    fixed: dict[str, HyperValue] = {}
    coarse: dict[str, list[HyperValue]] = {}
    fine: dict[str, list[HyperValue]] = {}

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
        return value

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in METHODS:
            raise ValueError(f"method {name!r} is unknown; it is one of: {', '.join(METHODS)}")
        return name

    @model_validator(mode="after")
    def _space_is_valid(self) -> MethodSettings:
        try:
            space = self.space()
        except UserError as error:
            raise ValueError(str(error)) from None
        if "as_released" in {*space.coarse, *space.fine}:
            raise ValueError(f"as_released of {self.name} is not searched over; set it under fixed")
        return self

    def space(self) -> SearchSpace:
        return search_spaces.load(self.name).changed(fixed=self.fixed, coarse=self.coarse, fine=self.fine)

    @property
    def shown(self) -> str:
        """Its name in tables. What runs as its authors released it is always marked so."""
        name = self.label or METHODS[self.name].title
        return f"{name} (as released)" if self.as_released else name

    @cached_property
    def as_released(self) -> bool:
        return self.space().fixed.get("as_released") is True


class RoundSettings(Settings):
    coarse: int = Field(default=50, ge=1, le=10**6)
    fine: int = Field(default=50, ge=1, le=10**6)
    confirm: int = Field(default=70, ge=1, le=10**6)


class SeedSettings(Settings):
    search: int = Field(default=42, ge=0, lt=2**63)
    confirm: list[int] = Field(default=[42, 123, 7], min_length=1)
    partition: int = Field(default=42, ge=0, lt=2**32)
    """Who holds which rows is the same for all seeds: it belongs to the data."""

    @field_validator("confirm")
    @classmethod
    def _distinct(cls, seeds: list[int]) -> list[int]:
        if len(set(seeds)) != len(seeds) or min(seeds) < 0 or max(seeds) >= 2**63:
            raise ValueError(f"confirm seeds {seeds} must be distinct, not negative and below 2^63")
        return seeds


class PrivacyStudySettings(Settings):
    delta: float = Field(default=1e-5, gt=0, lt=1)
    clip: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    release: Release = "local"
    adjacency: Adjacency = "replace-one"
    level: Level = "record"


class ValidationSettings(Settings):
    fraction: float = Field(default=0.1, gt=0, lt=1)
    seed: int = Field(default=42, ge=0, lt=2**63)


class HalvingSettings(Settings):
    """Successive halving: after each of these rounds only the best `keep` of a cell's running configurations go on."""

    rounds: list[int] = Field(min_length=1)
    keep: float = Field(default=0.5, gt=0, lt=1)


class OptunaSettings(Settings):
    """TPE with the same number of trials as the grids, asked and told in batches."""

    batch: int = Field(default=16, ge=1)
    seed: int = Field(default=42, ge=0, lt=2**32)


class SearchSettings(Settings):
    ways: list[Literal["grid", "optuna"]] = Field(default=["grid"], min_length=1)
    refine: Literal["table", "zoom"] = "table"
    optuna: OptunaSettings = OptunaSettings()
    early_stopping: HalvingSettings | None = None

    @field_validator("ways")
    @classmethod
    def _once(cls, ways: list[str]) -> list[str]:
        if len(set(ways)) != len(ways):
            raise ValueError(f"ways {ways} names one twice")
        return ways


class ResourceSettings(Settings):
    """Never changes a result."""

    hosts: int | Literal["auto"] = Field(default="auto")
    """Client hosts of a federation; auto: by the cores of a node."""
    gpus_per_host: float | Literal["auto"] = Field(default="auto")
    """auto: a whole GPU where there is one, else none. Several hosts can share one: 0.5."""
    lanes_per_pack: int | Literal["auto"] = Field(default="auto")
    placement: Literal["pack", "spread"] = "pack"
    """Whether a federation's hosts share a node or are spread over nodes."""

    @field_validator("gpus_per_host")
    @classmethod
    def _not_negative(cls, value: float | str) -> float | str:
        if isinstance(value, float | int) and not 0 <= value <= 64:
            raise ValueError(f"{value} is not in [0, 64]")
        return value

    @field_validator("hosts", "lanes_per_pack")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{value} is less than 1")
        return value


class Study(Settings):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    description: str = ""
    data: list[DataSettings] = Field(min_length=1)
    partitions: list[str] = Field(default=["dirichlet:0.5"], min_length=1)
    clients: int | Literal["auto"] = 20
    """auto: as many as the data set names."""
    model: str = "softmax"
    """The head that is trained on the features: softmax, mlp:HIDDEN with one hidden layer, or a generalised linear
    model; auto: the one that simulated data were drawn from."""
    objective: Literal["accuracy", "loss", "squared_error"] = "accuracy"
    """The metric that configurations are chosen by and that tables show; trainables/objective.py says more of it."""
    methods: list[MethodSettings] = Field(min_length=1)
    epsilons: list[float] = Field(min_length=1)
    privacy: PrivacyStudySettings = PrivacyStudySettings()
    rounds: RoundSettings = RoundSettings()
    seeds: SeedSettings = SeedSettings()
    evaluate_every: int = Field(default=10, ge=1)
    validation: ValidationSettings = ValidationSettings()
    confirm_train_on: Literal["all", "train"] = "all"
    """Which rows the winners are trained on before they meet the test set."""
    search: SearchSettings = SearchSettings()
    compare_to: str = ""
    """The method (or its label) that McNemar's test holds the others against; default: the last one."""
    resources: ResourceSettings = ResourceSettings()

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
        return {**value, "epsilons": [_epsilon(budget, usable) for budget in value["epsilons"]]}

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
    def _stops_where_it_looks(self) -> Study:
        halving = self.search.early_stopping
        fewest = min(self.rounds_of(method, stage) for method in self.methods for stage in ("coarse", "fine"))
        for t in halving.rounds if halving else []:
            if t >= fewest:
                raise ValueError(f"early_stopping at round {t}, but a search has only {fewest} rounds")
            if t < 1 or t % self.evaluate_every != 0:
                raise ValueError(
                    f"early_stopping at round {t}, but evaluations come every {self.evaluate_every} rounds"
                )
        return self

    @model_validator(mode="after")
    def _partitions_are_distinct(self) -> Study:
        try:
            parsed = [self.partition(text) for text in self.partitions]
        except UserError as error:
            raise ValueError(str(error)) from None
        for text, spec in zip(self.partitions, parsed, strict=True):
            if parsed.count(spec) > 1:
                raise ValueError(f"partition {text!r} is named twice")
        return self

    @model_validator(mode="after")
    def _names_are_distinct(self) -> Study:
        shown = [method.shown for method in self.methods]
        for name in shown:
            if shown.count(name) > 1:
                raise ValueError(f"method {name} is named twice; give one of them a label")
        if self.compare_to and self.compare_to not in [*shown, *(m.name for m in self.methods)]:
            raise ValueError(f"compare_to = {self.compare_to!r} is none of the methods: {', '.join(shown)}")
        return self

    def partition(self, text: str, named: int | None = None) -> PartitionSpec:
        """One of the partitions; `named`: how many clients the data set names."""
        clients = (named or 1) if self.clients == "auto" else self.clients
        return partition.parse(text, clients=clients, seed=self.seeds.partition)

    def rounds_of(self, method: MethodSettings, stage: str) -> int:
        if method.rounds is not None:
            return method.rounds
        return {"coarse": self.rounds.coarse, "confirm": self.rounds.confirm}.get(stage, self.rounds.fine)

    @property
    def last_round(self) -> int:
        """Of the confirm runs that last longest."""
        return max(self.rounds_of(method, "confirm") for method in self.methods)

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


def _epsilon(budget: Any, delta: float) -> Any:
    if not isinstance(budget, str) or not budget.startswith("mu="):
        return budget
    try:
        return epsilon_of(float(budget.removeprefix("mu=")), delta)
    except (ValueError, UserError) as error:
        raise ValueError(f"budget {budget!r} is not mu=NUMBER: {error}") from None


# ---- reading


def packaged() -> list[str]:
    """The names of the studies that come with the package."""
    folder = resources.files("orchestrator") / "studies"
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def load(name: str) -> tuple[Study, str]:
    """A study by path or by the name of a packaged one, and its text."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UserError(f"study file {name} cannot be read: {reason}") from None
        return parse(text, str(path), path.resolve().parent), text
    if name in packaged():
        text = (resources.files("orchestrator") / "studies" / f"{name}.yaml").read_text(encoding="utf-8")
        return parse(text, name, Path.cwd()), text
    raise UserError(f"study {name!r} is neither a file nor a packaged study ({', '.join(packaged())})")


def parse(text: str, file: str, folder: Path) -> Study:
    """Feature files are looked for beside the study file."""
    try:
        content = yaml.safe_load(text)
        marks = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise UserError(f"{file}: not valid YAML: it is nested without end") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark else file
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise UserError(f"{where}: not valid YAML: {problem}") from None
    _refuse_repeated_keys(marks, file)
    if not isinstance(content, dict):
        raise UserError(f"{file}: a study is a mapping of settings, this is {type(content).__name__}")
    try:
        study = Study.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        line = _line(marks, first["loc"])
        name = ".".join(str(part) for part in first["loc"] if not _internal(part))
        message = first["msg"].removeprefix("Value error, ")
        shown = f" (found {first['input']!r})" if isinstance(first["input"], str | int | float) else ""
        raise UserError(f"{file}:{line}: {name + ': ' if name else ''}{message}{shown}") from None
    return study.model_copy(update={"data": [_located(data, folder) for data in study.data]})


def _refuse_repeated_keys(node: Any, file: str) -> None:
    """YAML lets the last one win in silence."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if key.value in seen:
                raise UserError(f"{file}:{key.start_mark.line + 1}: {key.value!r} is given twice")
            seen.add(key.value)
            _refuse_repeated_keys(value, file)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated_keys(item, file)


def _located(data: DataSettings, folder: Path) -> DataSettings:
    """A feature file by its whole path, so that the study can be resumed from anywhere. It is looked for beside the
    study file, in the current folder and in $FEDSWEEP_DATA."""
    if not data.source.endswith(".npz"):
        return data
    places = [folder, Path.cwd(), Path(os.environ.get("FEDSWEEP_DATA", "."))]
    found = [place / data.source for place in places if (place / data.source).is_file()]
    return data.model_copy(update={"source": str(found[0].resolve())}) if found else data


def changed_resources(of: ResourceSettings, settings: list[str]) -> ResourceSettings:
    """With some settings given as KEY=VALUE."""
    content = of.model_dump()
    for text in settings:
        key, _, value = text.partition("=")
        if key not in content:
            raise UserError(f"resource {text!r} is not KEY=VALUE with a key of: {', '.join(content)}")
        content[key] = value
        try:
            ResourceSettings.model_validate({key: value})
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise UserError(f"resource {text!r}: {message}") from None
    return ResourceSettings.model_validate(content)


def check_extension(old: Study, new: Study) -> None:
    """A result folder takes a changed study only if it adds to the old one: everything shown before is shown still."""
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    for study in (before, after):
        for free in ("resources", "description", "compare_to"):
            del study[free]
        for data in study["data"]:
            # a file may move; that its content is the same is checked by its hash
            data["source"] = Path(data["source"]).stem if data["source"].endswith(".npz") else data["source"]
    _check_extension("", before, after)


GROWING = ("data", "partitions", "methods", "epsilons", "seeds.confirm", "search.ways")


def _check_extension(path: str, before: Any, after: Any) -> None:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in before:
            _check_extension(f"{path}.{name}" if path else name, before[name], after.get(name))
    elif path in GROWING:
        lost = [item for item in before if item not in after]
        if lost:
            raise UserError(
                f"the folder's study has {path} {_short(lost[0])}, the new one has not; choose another folder"
            )
        if path == "seeds.confirm" and after[: len(before)] != before:
            raise UserError(f"new {path} must come after the old ones, {before}; choose another folder")
    elif before != after:
        raise UserError(
            f"the study has {path} = {_short(after)}, the folder was made with {_short(before)}; choose another folder"
        )


def _short(value: Any) -> str:
    text = value["name"] if isinstance(value, dict) and "name" in value else value
    return repr(text) if len(repr(text)) < 80 else repr(text)[:77] + "..."


def _internal(part: str | int) -> bool:
    """Names of pydantic's own making in an error's location, such as the branch of a union."""
    return isinstance(part, str) and (part in ("int", "float", "str", "bool") or "[" in part)


def _line(node: Any, location: tuple[str | int, ...]) -> int:
    """The line of the deepest part of the location that stands in the file."""
    line = node.start_mark.line if node is not None else 0
    for part in location:
        if isinstance(node, yaml.MappingNode):
            entries = [(key, value) for key, value in node.value if key.value == str(part)]
            if not entries and len(node.value) == 1:  # `- dp-fedsofim: {…}`: one step down, the same part again
                node = node.value[0][1]
                entries = (
                    [(k, v) for k, v in node.value if k.value == str(part)]
                    if isinstance(node, yaml.MappingNode)
                    else []
                )
            if not entries:
                break
            key, node = entries[0]
            line = key.start_mark.line
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line
        else:
            break
    return line + 1

"""From a study to its cells, and from a cell to its trials."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal
from weakref import WeakKeyDictionary

from orchestrator.study.adaptive_defaults import with_shares
from orchestrator.study.cell_id import CellId, SettingId
from orchestrator.study.errors import errors_point_to
from orchestrator.study.settings.method import MethodSettings
from orchestrator.study.study import Study
from search_spaces import RUN_NAMES, Configuration, SearchSpace
from trainables import models
from trainables.data import features, partition, simulated
from trainables.errors import UserError
from trainables.federation.pack import check, code_of, plan_of
from trainables.federation.problem import Problem
from trainables.federation.trial_spec import DataSpec, Preprocess, ProblemSpec, TrialSpec
from trainables.methods import METHODS
from trainables.methods.base import Method
from trainables.models.network_settings import is_network
from trainables.privacy.plan import PrivacySettings, large_delta
from trainables.spec import HyperValue

MOST_CHECKED = 100_000
_CHECKED: WeakKeyDictionary[Method, dict[str, dict[str, HyperValue]]] = WeakKeyDictionary()
"""Checked hyperparameters, by method and text of the configuration."""


@dataclass(frozen=True)
class Setting:
    """A data set with a partition, as its cells use it."""

    id: SettingId
    name: str
    """For display."""
    search: Mapping[int, ProblemSpec]
    """The problem of each search and contest seed. Simulated data without a seed are drawn again for each."""
    confirm: Mapping[int, ProblemSpec]
    """The problem of each confirm seed."""
    sizes: tuple[int, ...]
    """Rows per client in the search."""
    features: int
    classes: int
    can_be_centred: bool
    """Whether the model allows centred and scaled features."""


@dataclass(frozen=True)
class Cell:
    """One method tuned for one setting and one privacy budget."""

    study: Study
    setting: Setting
    method: MethodSettings
    epsilon: float

    @cached_property
    def id(self) -> CellId:
        return CellId(*self.setting.id, self.method.id, self.epsilon)

    @property
    def name(self) -> str:
        """For display."""
        return self.study.cell_name(self.setting.name, self.method, self.epsilon)

    @cached_property
    def space(self) -> SearchSpace:
        return self.method.space()

    @cached_property
    def _privacy(self) -> PrivacySettings:
        own = {"clip": self.method.clip, "clipping": self.method.clipping}
        changed = {name: value for name, value in own.items() if value}
        return PrivacySettings(epsilon=self.epsilon, **self.study.privacy.model_dump() | changed)

    @cached_property
    def _privacy_of_clip(self) -> Callable[[float], PrivacySettings]:
        """Trials with the same clip share their settings."""
        return cache(lambda clip: self._privacy.model_copy(update={"clip": clip}))

    @cached_property
    def _code(self) -> str:
        """Hash of the plug-ins' code and a network's weights. The first problem stands for all: they share model and
        kind of partition."""
        problem, setting = next(iter(self._search_problems.values())), self.setting
        names = self.study.trial_metrics
        return code_of(self.method.name, problem, names, features=setting.features, classes=setting.classes)

    @cached_property
    def _preprocess(self) -> Preprocess:
        own = self.method.preprocess
        given = self.study.preprocess if own is None else own
        own_model = self.method.model
        allowed = self.setting.can_be_centred if own_model is None else not is_network(own_model)
        return with_shares(given, self._privacy, self.setting.sizes, self.setting.features, allowed=allowed)

    @cached_property
    def _search_problems(self) -> Mapping[int, ProblemSpec]:
        return {seed: with_model(spec, self.method) for seed, spec in self.setting.search.items()}

    @cached_property
    def _confirm_problems(self) -> Mapping[int, ProblemSpec]:
        return {seed: with_model(spec, self.method) for seed, spec in self.setting.confirm.items()}

    def private_trial(
        self, configuration: Configuration, seed: int, evaluate_on: Literal["validation", "test"], noise_key: str = ""
    ) -> TrialSpec:
        """A run of a private search. Its weights do not depend on the rows that evaluate it."""
        first = self.study.seeds.search[0]
        (trial,) = self.trials(configuration, [first], self.study.stage_rounds(self.method).confirm)
        problem = trial.problem.model_copy(update={"evaluate_on": evaluate_on})
        return trial.model_copy(update={"problem": problem, "seed": seed, "noise_key": noise_key})

    def trials(
        self,
        configuration: Configuration,
        seeds: Sequence[int],
        rounds: int,
        stop_after: int | None = None,
        *,
        confirm: bool = False,
    ) -> list[TrialSpec]:
        """A configuration with each of these seeds. `rounds` applies unless the configuration sets them."""
        hyperparameters = _checked(METHODS[self.method.name], configuration)
        privacy = self._privacy
        if "clip" in configuration:
            privacy = self._privacy_of_clip(float(configuration["clip"]))
        problems = self._confirm_problems if confirm else self._search_problems
        metrics, common = self.study.trial_metrics, None
        trials = []
        for seed in seeds:
            if common is None:  # all parts are validated already, and seeds share them
                common = {
                    "problem": problems[seed],
                    "method": self.method.name,
                    "hyperparameters": hyperparameters,
                    "privacy": privacy,
                    "rounds": int(configuration.get("rounds", rounds)),
                    "stop_after": stop_after,
                    "evaluate_every": self.study.evaluate_every,
                    "seed": seed,
                    "preprocess": self._preprocess,
                    "aggregate": self.method.aggregate or self.study.aggregate,
                    "precision": self.method.precision or "float32",
                    "metrics": metrics,
                    "code": self._code,
                    "noise_key": "",
                }
            trials.append(TrialSpec.trusted({**common, "problem": problems[seed], "seed": seed}))
        return trials


def with_model(spec: ProblemSpec, method: MethodSettings) -> ProblemSpec:
    """The problem with the method's own model, if it has one."""
    return spec if method.model is None else spec.model_copy(update={"model": method.model})


def _checked(method: Method, configuration: Configuration) -> dict[str, HyperValue]:
    """The checked hyperparameters of a configuration. Cells with the same configuration share one object: there may be
    a million trials."""
    known = _CHECKED.setdefault(method, {})
    given = {name: value for name, value in configuration.items() if name not in RUN_NAMES}
    if (found := known.get(text := repr(given))) is None:  # as text, because 1 == True
        if len(known) >= MOST_CHECKED:
            known.clear()
        found = known[text] = method.check(given)
    return found


@dataclass(frozen=True)
class PreparedStudy:
    """A study with its data: all cells, in the order of the tables."""

    study: Study
    """The study, as `Study.with_clients_of` returns it."""
    cells: tuple[Cell, ...]
    problems: Mapping[str, Problem]
    """By the key of the problem's specification."""
    fingerprints: Mapping[str, str]
    """Content hash of every data set, by its id."""

    @classmethod
    def prepare(cls, study: Study) -> PreparedStudy:
        """Load and partition the data, and check every cell: everything that is wrong is reported here."""
        for variant in study.variants:
            with errors_point_to("search", variant.strategy.name):
                if reason := variant.strategy.check_settings(variant.settings):
                    raise UserError(reason)
        problems: dict[str, Problem] = {}
        fingerprints: dict[str, str] = {}
        cells: list[Cell] = []
        loads = [_load(study, number) for number in range(len(study.data))]
        with errors_point_to("data"):
            study = study.with_clients_of([draws[study.seeds.search[0]] for draws in loads])
        for number, (data, draws) in enumerate(zip(study.data, loads, strict=True)):
            loaded = draws[study.seeds.search[0]]
            fingerprints[data.id] = loaded.fingerprint
            model = loaded.task or "softmax" if study.model == "auto" else study.model
            with errors_point_to("model"):
                models.parse(model, features=loaded.features, classes=loaded.classes)
            if study.validation.by == "row":
                with errors_point_to("validation", "fraction"):
                    loaded.validation_rows(study.validation.fraction, study.validation.seed, not study.private)
            for index in range(len(study.partitions)):
                setting = _setting(study, number, index, model, draws, problems)
                cells += [Cell(study, setting, m, epsilon) for epsilon in study.epsilons for m in study.methods]
        for problem, (index, method) in itertools.product(list(problems.values()), enumerate(study.methods)):
            with errors_point_to("methods", index, "model"):
                spec = with_model(problem.spec, method)
                if spec.key not in problems:
                    problems[spec.key] = replace(problem, spec=spec)
                    models.parse(spec.model, features=problem.data.features, classes=problem.data.classes)
        prepared = cls(study, tuple(cells), problems, fingerprints)
        for cell in cells:
            with errors_point_to("methods", study.methods.index(cell.method)):
                _check_cell(cell, problems)
        return prepared

    def validation_rows(self, setting: Setting) -> int:
        return len(self.problems[next(iter(setting.search.values())).key].y_eval)

    def test_rows(self, setting: Setting) -> int:
        return len(self.problems[next(iter(setting.confirm.values())).key].y_eval)

    def noise(self, cell: Cell) -> Callable[[int], float]:
        """The noise multiplier of a cell's runs, by their number of rounds; see `SearchTask.noise`."""
        sizes = self.problems[next(iter(cell.setting.search.values())).key].partition.sizes
        example = cell.space.grid(cell.space.coarse)[0]

        @cache
        def multiplier(rounds: int) -> float:
            (trial,) = cell.trials({**example, "rounds": rounds}, cell.study.seeds.search[:1], rounds)
            return math.sqrt(rounds) / plan_of(trial, sizes).mu(trial.privacy.release)

        return multiplier

    @property
    def settings(self) -> list[Setting]:
        return list({cell.setting.id: cell.setting for cell in self.cells}.values())

    def clients(self) -> list[str]:
        """For every setting, how many clients there are, and where they come from."""
        lines = []
        for setting in self.settings:
            sizes, explicit = setting.sizes, setting.id.partition == "explicit"
            which = "clients of the data set" if explicit else "simulated clients"
            lines.append(f"{setting.name}: {len(sizes)} {which}, {min(sizes)} to {max(sizes)} rows in the search")
        return lines

    def data_notes(self) -> list[str]:
        """What was noted when tables became features; nothing for a private search."""
        if self.study.private:
            return []
        found = (problem.data for problem in self.problems.values())
        return list(dict.fromkeys(f"{data.name}: {note}" for data in found for note in data.notes))

    def delta_notes(self) -> list[str]:
        """A note for every setting whose delta is larger than 1 / its number of records, or of users."""
        if all(math.isinf(epsilon) for epsilon in self.study.epsilons):
            return []
        privacy = self.study.privacy
        notes = [(s, large_delta(privacy.delta, privacy.level, self.protected(s))) for s in self.settings]
        return [f"{setting.name}: {note}" for setting, note in notes if note]

    def protected(self, setting: Setting) -> int:
        """Number of records, or users, to protect: the smallest among the confirm runs."""
        sizes = [self.problems[spec.key].partition.sizes for spec in setting.confirm.values()]
        return min(sum(clients) if self.study.privacy.level == "record" else len(clients) for clients in sizes)

    @property
    def most_weights(self) -> int:
        """Weights of the largest model."""
        return max(problem.model.dimension for problem in self.problems.values())

    @property
    def most_clients(self) -> int:
        return max(len(problem.partition.rows) for problem in self.problems.values())


def _load(study: Study, number: int) -> dict[int, features.FeatureSet]:
    """A data set, as each seed uses it: simulated data without a seed are drawn again for each."""
    source = study.data[number].source
    by_seed = simulated.drawn_by_seed(source)
    if by_seed and study.private:
        raise UserError(f"data {source}: a private search is about one draw of the data; give it a seed")
    seeds = [*study.seeds.search, *study.seeds.contest, *study.seeds.confirm]
    with errors_point_to("data", number, "source"):
        loaded = features.load(source, seeds[0])
    return {seed: features.load(source, seed) if by_seed and seed != seeds[0] else loaded for seed in seeds}


def _setting(
    study: Study,
    number: int,
    index: int,
    model: str,
    draws: Mapping[int, features.FeatureSet],
    problems: dict[str, Problem],
) -> Setting:
    """Data set `number` with partition `index`; adds its problems to `problems`."""
    data, loaded = study.data[number], draws[study.seeds.search[0]]
    by_role: dict[str, dict[int, ProblemSpec]] = {"search": {}, "confirm": {}}
    with errors_point_to("partitions", index):
        partitioned = study.partition(study.partitions[index], loaded)
        first = ProblemSpec(
            data=DataSpec(
                fingerprint=loaded.fingerprint,
                validation_fraction=study.validation.fraction,
                validation_seed=study.validation.seed,
                validation_by=study.validation.by,
                stratified=not study.private,
            ),
            partition=partitioned,
            model=model,
            train_on="train",
            evaluate_on="validation",
        )
        stages = (("search", study.seeds.search), ("search", study.seeds.contest), ("confirm", study.seeds.confirm))
        for role, seeds in stages:
            for seed in seeds:
                spec = by_role[role][seed] = _problem_of_seed(first, study, role, draws[seed], seed, seeds)
                if spec.key not in problems:
                    problems[spec.key] = Problem.prepare(draws[seed], spec)
    with errors_point_to("objective"):
        _check_objective(problems[first.key], study)
    if study.private:
        seed = study.seeds.search[0]
        tested = by_role["search"][seed].model_copy(update={"evaluate_on": "test"})
        problems[tested.key] = Problem.prepare(draws[seed], tested)
    setting_id = SettingId(data.id, partition.to_text(partitioned))
    model_of_first = problems[first.key].model
    return Setting(
        setting_id,
        study.settings[setting_id],
        by_role["search"],
        by_role["confirm"],
        sizes=tuple(problems[first.key].partition.sizes),
        features=loaded.features,
        classes=loaded.classes,
        can_be_centred=getattr(model_of_first, "linear_in_features", True),
    )


def _problem_of_seed(
    first: ProblemSpec, study: Study, role: str, drawn: features.FeatureSet, seed: int, stage_seeds: list[int]
) -> ProblemSpec:
    """The problem of one seed: its draw of the data, its partition, and the rows that evaluate it."""
    changes: dict[str, Any] = {"data": first.data.model_copy(update={"fingerprint": drawn.fingerprint})}
    if first.partition.kind != "explicit":
        partition_seed = study.seeds.partition_seed(seed, stage_seeds)
        changes["partition"] = first.partition.model_copy(update={"seed": partition_seed})
    if role == "confirm":
        changes |= {"train_on": study.confirm_train_on, "evaluate_on": "test"}
    return first.model_copy(update=changes)


def _check_cell(cell: Cell, problems: Mapping[str, Problem]) -> None:
    """Every configuration of both grids must be valid and have a privacy plan. One of them is checked with all contest
    and confirm seeds, whose partitions may differ."""
    study, rounds = cell.study, cell.study.stage_rounds(cell.method)
    example = cell.space.grid(cell.space.coarse)[0]
    trials = [
        *cell.trials(example, study.seeds.contest, rounds.confirm),
        *cell.trials(example, study.seeds.confirm, rounds.confirm, confirm=True),
    ]
    for axes, of_stage in ((cell.space.coarse, rounds.coarse), (cell.space.fine, rounds.fine)):
        for configuration in cell.space.grid(axes):
            trials += cell.trials(configuration, study.seeds.search[:1], of_stage)
            trials += cell.trials(configuration, study.seeds.confirm[:1], rounds.confirm, confirm=True)
            if study.private:
                _check_price(cell, configuration, problems)
    for trial in trials:
        check(trial, problems[trial.problem.key])


def _check_price(cell: Cell, configuration: Configuration, problems: Mapping[str, Problem]) -> None:
    """Raise if the privacy cost of a private search over this configuration is not known."""
    trial = cell.private_trial(configuration, 0, "test")
    if any(event.sampling < 1 for event in check(trial, problems[trial.problem.key]).events):
        raise UserError(f"method {trial.method} samples rows: the price of a private search is not known for it")


def _check_objective(problem: Problem, study: Study) -> None:
    if study.objective == "squared_error" and problem.truth is None:
        raise UserError(f"objective = 'squared_error': data {problem.data.name} has no truth for {problem.spec.model}")
    if study.objective == "accuracy" and problem.data.task == "poisson":
        raise UserError(f"objective = 'accuracy': the labels of data {problem.data.name} are counts, not classes")

"""From a study to its cells, and from a cell to its trials."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from orchestrator.study.pointing import SettingError, about
from orchestrator.study.settings import MethodSettings, Study
from search_spaces import RUN_NAMES, Configuration, SearchSpace
from trainables import models
from trainables.data import features, partition, simulated
from trainables.errors import UserError
from trainables.federation.pack import check, code_of
from trainables.federation.problem import Problem
from trainables.federation.trial_spec import DataSpec, Preprocess, ProblemSpec, TrialSpec
from trainables.methods import METHODS
from trainables.privacy.plan import PrivacySettings, large_delta

ALL_FIELDS = set(TrialSpec.model_fields)  # one set for all trials: a set of its own is a quarter of a trial's memory
Evaluated = Literal["validation", "test"]


@dataclass(frozen=True)
class Setting:
    """A data set with a partition: what the cells of one block of a table share."""

    label: str
    backbone: str
    partition: str
    search: Mapping[int, ProblemSpec]
    """What configurations are judged on before confirm, by seed: a simulation without a seed of its own is drawn anew
    for each."""
    confirm: Mapping[int, ProblemSpec]
    """The same for the confirm seeds."""

    @property
    def id(self) -> str:
        return " / ".join(part for part in (self.label, self.backbone, self.partition) if part)


@dataclass(frozen=True)
class Cell:
    """One method tuned for one setting and one privacy budget."""

    study: Study
    setting: Setting
    method: MethodSettings
    epsilon: float

    @property
    def id(self) -> str:
        return f"{self.setting.id} / {self.method.shown} / eps {self.epsilon:g}"

    @cached_property
    def space(self) -> SearchSpace:
        return self.method.space()

    @cached_property
    def _privacy(self) -> PrivacySettings:
        stated = self.study.privacy.model_dump()
        own = {"clip": self.method.clip, "clipping": self.method.clipping}
        return PrivacySettings(epsilon=self.epsilon, **stated | {name: value for name, value in own.items() if value})

    @cached_property
    def _preprocess(self) -> Preprocess:
        own = self.method.preprocess
        return Preprocess(**(self.study.preprocess if own is None else own).model_dump())

    def _clipped(self, clip: float) -> PrivacySettings:
        return self._privacy.model_copy(update={"clip": clip})

    def configuration(self, trial: TrialSpec) -> Configuration:
        """What `trial` made of it: all hyperparameters, and what the search space says beyond them."""
        beyond = self.space.run_settings(clip=trial.privacy.clip, rounds=trial.rounds)
        return {**trial.hyperparameters, **beyond} if beyond else trial.hyperparameters  # there may be very many

    def secret_trial(self, configuration: Configuration, seed: int, evaluate_on: Evaluated) -> TrialSpec:
        """A run of a private search, with noise of its own; judged on the test rows it is the same run, to the last
        bit of its weights."""
        trial = self.trial("private", configuration, self.study.seeds.search[0])
        problem = trial.problem.model_copy(update={"evaluate_on": evaluate_on})
        return trial.model_copy(update={"problem": problem, "seed": seed})

    def trial(self, stage: str, configuration: Configuration, seed: int | None = None) -> TrialSpec:
        """A configuration as a trial of a stage, by default with the stage's first seed."""
        seeds = self.study.seeds
        if seed is None:
            seed = {"confirm": seeds.confirm, "contest": seeds.contest}.get(stage, seeds.search)[0]
        return self.trials(stage, configuration, [seed])[0]

    def trials(self, stage: str, configuration: Configuration, seeds: Sequence[int]) -> list[TrialSpec]:
        """With each of these seeds. There may be very many: what they share is checked, and held, once."""
        own = METHODS[self.method.name].check({n: value for n, value in configuration.items() if n not in RUN_NAMES})
        privacy = self._clipped(float(configuration["clip"])) if "clip" in configuration else self._privacy
        rounds = int(configuration.get("rounds", self.study.rounds_of(self.method, stage)))
        last = self.study.search.halving.last_round(stage, rounds)
        problems = self.setting.confirm if stage == "confirm" else self.setting.search
        return [
            TrialSpec.model_construct(  # all parts are checked already
                ALL_FIELDS,
                problem=problems[seed],
                method=self.method.name,
                hyperparameters=own,
                privacy=privacy,
                rounds=rounds,
                evaluate_every=self.study.evaluate_every,
                seed=seed,
                preprocess=self._preprocess,
                aggregate=self.method.aggregate or self.study.aggregate,
                stop_after=last if last < rounds else None,
                precision=self.method.precision or "float32",
                code=code_of(self.method.name, problems[seed]),
            )
            for seed in seeds
        ]


@dataclass(frozen=True)
class Blueprint:
    """A study with its data: all cells, in the order of the tables."""

    study: Study
    cells: tuple[Cell, ...]
    problems: Mapping[str, Problem]
    """By the key of the problem's specification."""
    fingerprints: Mapping[str, str]
    """By data label: what the data was when the study was first run."""

    @classmethod
    def draw(cls, study: Study) -> Blueprint:
        """Loads the data and deals it out: everything wrong with them is said here."""
        problems: dict[str, Problem] = {}
        fingerprints: dict[str, str] = {}
        cells: list[Cell] = []
        for number, data in enumerate(study.data):
            anew = simulated.drawn_by_seed(data.source)
            if anew and study.private:
                raise UserError(f"data {data.source}: a private search is about one draw of the data; give it a seed")
            searched = [*study.seeds.search, *study.seeds.contest]
            with about("data", number, "source"):
                loaded = features.load(data.source, searched[0])
            draws = {
                seed: features.load(data.source, seed) if anew and seed != searched[0] else loaded
                for seed in (*searched, *study.seeds.confirm)
            }
            model = loaded.task or "softmax" if study.model == "auto" else study.model
            with about("model"):
                models.parse(model, features=loaded.features, classes=loaded.classes)
            with about("validation", "fraction"):
                loaded.validation_rows(study.validation.fraction, study.validation.seed)
            label = data.label or loaded.name
            name = f"{label} {data.backbone}".strip()
            if name in fingerprints:
                raise SettingError(
                    f"two data sets are called {name!r}; give one of them a label", ("data", number, "source")
                )
            fingerprints[name] = loaded.fingerprint
            content = DataSpec(
                fingerprint=loaded.fingerprint,
                validation_fraction=study.validation.fraction,
                validation_seed=study.validation.seed,
            )
            for place, text in enumerate(study.partitions):
                with about("partitions", place):
                    dealt = study.partition(text, loaded.clients)
                    first = ProblemSpec(
                        data=content, partition=dealt, model=model, train_on="train", evaluate_on="validation"
                    )
                    by_seed: dict[str, dict[int, ProblemSpec]] = {"search": {}, "confirm": {}}
                    for role, seeds in (
                        ("search", study.seeds.search),
                        ("search", study.seeds.contest),
                        ("confirm", study.seeds.confirm),
                    ):
                        for seed in seeds:
                            spec = by_seed[role][seed] = _of_seed(first, study, role, draws[seed], seed, seeds)
                            if spec.key not in problems:
                                problems[spec.key] = Problem.prepare(draws[seed], spec)
                with about("objective"):
                    _check_objective(problems[first.key], study)
                if study.private:
                    shown = by_seed["search"][study.seeds.search[0]].model_copy(update={"evaluate_on": "test"})
                    problems[shown.key] = Problem.prepare(draws[study.seeds.search[0]], shown)
                setting = Setting(label, data.backbone, partition.to_text(dealt), **by_seed)
                cells += [Cell(study, setting, m, epsilon) for epsilon in study.epsilons for m in study.methods]
        blueprint = cls(study, tuple(cells), problems, fingerprints)
        for cell in cells:  # what cannot be run or priced is found before anything runs
            with about("methods", study.methods.index(cell.method)):
                _check_cell(cell, problems)
        return blueprint

    def validation_rows(self, cell: Cell) -> int:
        """How many rows its configurations are judged on."""
        return len(self.problems[next(iter(cell.setting.search.values())).key].y_eval)

    def delta_notes(self) -> list[str]:
        """Of every setting for whose records, or users, delta is too large."""
        if all(math.isinf(epsilon) for epsilon in self.study.epsilons):
            return []
        privacy = self.study.privacy
        counts = {cell.setting.id: self.protected(cell.setting) for cell in self.cells}
        notes = ((setting, large_delta(privacy.delta, privacy.level, count)) for setting, count in counts.items())
        return [f"{setting}: {note}" for setting, note in notes if note]

    def protected(self, setting: Setting) -> int:
        """How many records, or users, there are to protect: the fewest that any confirm run has."""
        dealt = [self.problems[spec.key].partition.sizes for spec in setting.confirm.values()]
        return min(sum(sizes) if self.study.privacy.level == "record" else len(sizes) for sizes in dealt)

    @property
    def most_weights(self) -> int:
        """Of the largest model."""
        return max(problem.model.dimension for problem in self.problems.values())

    @property
    def most_clients(self) -> int:
        return max(len(problem.partition.rows) for problem in self.problems.values())


def _of_seed(
    first: ProblemSpec, study: Study, role: str, drawn: features.FeatureSet, seed: int, among: list[int]
) -> ProblemSpec:
    """What the runs of a seed have: their draw of the data, their partition, and the rows that judge them."""
    changes: dict[str, Any] = {"data": first.data.model_copy(update={"fingerprint": drawn.fingerprint})}
    if first.partition.kind != "explicit":  # which says itself who holds what
        changes["partition"] = first.partition.model_copy(update={"seed": study.seeds.partition_of(seed, among)})
    if role == "confirm":
        changes |= {"train_on": study.confirm_train_on, "evaluate_on": "test"}
    return first.model_copy(update=changes)


def _check_cell(cell: Cell, problems: Mapping[str, Problem]) -> None:
    some, seeds = cell.space.grid(cell.space.coarse)[0], cell.study.seeds
    for stage, of_stage in (("contest", seeds.contest), ("confirm", seeds.confirm)):
        for seed in of_stage:  # partitions may differ
            check(trial := cell.trial(stage, some, seed), problems[trial.problem.key])
    for stage, axes in (("coarse", cell.space.coarse), ("fine", cell.space.fine)):
        for configuration in cell.space.grid(axes):
            for trial in (cell.trial(stage, configuration), cell.trial("confirm", configuration)):
                check(trial, problems[trial.problem.key])
            if cell.study.private:
                _check_price(cell, configuration, problems)


def _check_price(cell: Cell, configuration: Configuration, problems: Mapping[str, Problem]) -> None:
    trial = cell.secret_trial(configuration, 0, "test")
    if any(event.sampling < 1 for event in check(trial, problems[trial.problem.key]).events):
        raise UserError(f"method {trial.method} samples rows: the price of a private search is not known for it")


def _check_objective(problem: Problem, study: Study) -> None:
    if study.objective == "squared_error" and problem.truth is None:
        raise UserError(f"objective = 'squared_error': data {problem.data.name} has no truth for {problem.spec.model}")
    if study.objective == "accuracy" and problem.data.task == "poisson":
        raise UserError(f"objective = 'accuracy': the labels of data {problem.data.name} are counts, not classes")

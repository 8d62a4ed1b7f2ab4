"""From a study to its cells, and from a cell to its trials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from orchestrator.study import MethodSettings, Study
from search_spaces import Configuration, SearchSpace
from trainables.data import features, partition
from trainables.errors import UserError
from trainables.methods import METHODS
from trainables.pack import check
from trainables.privacy.plan import PrivacySettings
from trainables.problem import Problem
from trainables.spec import DataSpec, ProblemSpec, TrialSpec


@dataclass(frozen=True)
class Setting:
    """A data set with a partition: what the cells of one block of a table share."""

    label: str
    backbone: str
    partition: str
    search: ProblemSpec
    confirm: ProblemSpec

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
        return PrivacySettings(epsilon=self.epsilon, **self.study.privacy.model_dump())

    def trial(self, stage: str, configuration: Configuration, seed: int | None = None) -> TrialSpec:
        """A configuration as a trial of a stage; search stages use the search seed."""
        study, confirm = self.study, stage == "confirm"
        rounds = {"coarse": study.rounds.coarse, "confirm": study.rounds.confirm}.get(stage, study.rounds.fine)
        return TrialSpec.model_construct(  # all parts are checked already, and there may be very many
            problem=self.setting.confirm if confirm else self.setting.search,
            method=self.method.name,
            hyperparameters=METHODS[self.method.name].check(configuration),
            privacy=self._privacy,
            rounds=rounds,
            evaluate_every=study.evaluate_every,
            seed=study.seeds.search if seed is None else seed,
        )


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
        for data in study.data:
            loaded = features.load(data.source)
            label = data.label or loaded.name
            name = f"{label} {data.backbone}".strip()
            if name in fingerprints:
                raise UserError(f"two data sets are called {name!r}; give one of them a label")
            fingerprints[name] = loaded.fingerprint
            content = DataSpec(
                fingerprint=loaded.fingerprint,
                validation_fraction=study.validation.fraction,
                validation_seed=study.validation.seed,
            )
            for text in study.partitions:
                dealt = partition.parse(text, clients=study.clients, seed=study.seeds.partition)
                search = ProblemSpec(
                    data=content, partition=dealt, model=study.model, train_on="train", evaluate_on="validation"
                )
                confirm = search.model_copy(update={"train_on": study.confirm_train_on, "evaluate_on": "test"})
                for spec in (search, confirm):
                    problems[spec.key] = Problem.prepare(loaded, spec)
                setting = Setting(label, data.backbone, partition.show(dealt), search, confirm)
                cells += [Cell(study, setting, m, epsilon) for epsilon in study.epsilons for m in study.methods]
        blueprint = cls(study, tuple(cells), problems, fingerprints)
        for cell in cells:  # what cannot be run or priced is found before anything runs
            for stage, axes in (("coarse", cell.space.coarse), ("fine", cell.space.fine)):
                for configuration in cell.space.grid(axes):
                    for trial in (cell.trial(stage, configuration), cell.trial("confirm", configuration)):
                        check(trial, problems[trial.problem.key])
        return blueprint

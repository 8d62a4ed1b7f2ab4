"""Our side of the comparison: every cell of some results folders."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import CellResult, Results, Score, actual_epsilon
from trainables.errors import UserError
from trainables.spec import HyperValue

PAPER_STUDY_PREFIX = "paper-"
"""A study with this prefix in its name searches as the papers did."""


@dataclass(frozen=True, eq=False)
class OurResult:
    """One cell of one study, searched with one search variant."""

    study: str
    clients: int | str
    setting: str
    label: str
    epsilon: float
    strategy: str
    """Name of the search variant."""
    as_released: bool
    """The method runs as in its authors' program."""
    claim_holds: bool
    """The actual eps of every confirm run is at most the claimed eps."""
    actual_epsilon: float
    """The largest actual eps of the confirm runs, in the study's release model."""
    last_round: int
    curve: Mapping[int, Score]
    """Test score by round, for rounds that every confirm seed reached."""
    chosen: Mapping[str, HyperValue]
    """The hyperparameters that won the search."""
    validation_score: float
    """Score of the chosen hyperparameters; nan without a winner."""
    first_seed_score: float
    """Final test score of the first confirm seed; nan if it did not finish."""
    first_seed_correct: bytes | None = None
    """Which test rows the first confirm seed classifies correctly, packed bits."""
    test_rows: int | None = None
    seconds_per_round: tuple[float, ...] = ()
    """For every confirm run, its share of the pack's time, divided by its rounds."""

    @property
    def dataset(self) -> str:
        return self.setting.split(" / ")[0]

    @property
    def backbone(self) -> str:
        return " / ".join(self.setting.split(" / ")[1:-1])

    @property
    def partition(self) -> str:
        return self.setting.split(" / ")[-1]

    @property
    def method(self) -> str:
        """The label without the suffix in brackets: the paper's name of the method."""
        return self.label.split(" (")[0]

    @property
    def label_suffix(self) -> str:
        """The part of the label in brackets; empty for the method itself."""
        return self.label[len(self.method) :].strip(" ()")

    @property
    def private_as_claimed(self) -> bool:
        """The claimed eps holds, and the method is not run as in its authors' program."""
        return self.claim_holds and not self.as_released

    @property
    def plain(self) -> bool:
        """The method itself, without a suffix, at the eps it claims."""
        return self.private_as_claimed and not self.label_suffix

    @property
    def paper_search(self) -> bool:
        """The study searches as the papers did: one seed and the papers' grids."""
        return self.study.startswith(PAPER_STUDY_PREFIX)

    @property
    def finished(self) -> bool:
        return self.last_round in self.curve

    def mean(self, t: int | None = None) -> float:
        """Mean test score after a round, by default the last; nan if a seed did not reach it."""
        score = self.curve.get(self.last_round if t is None else t)
        return score.mean if score else math.nan

    def std(self, t: int | None = None) -> float:
        score = self.curve.get(self.last_round if t is None else t)
        return score.std if score else math.nan

    def first_round_at(self, target: float) -> int | None:
        """The first evaluated round whose mean test score reaches the target."""
        return next((t for t, score in self.curve.items() if score.mean >= target), None)


@dataclass(frozen=True)
class OurResults:
    results: tuple[OurResult, ...]
    studies: tuple[str, ...] = ()
    partitions: Mapping[str, list[list[int]]] | None = None
    """By setting, for the first partition seed: the number of rows by class and client."""

    def select(self, **properties: object) -> list[OurResult]:
        """The results with these property values."""
        return [r for r in self.results if all(getattr(r, name) == value for name, value in properties.items())]


def read_results(folders: Sequence[Path]) -> OurResults:
    """Read results folders, and all results folders directly inside the given folders."""
    with_ledger = list(dict.fromkeys(each for folder in folders for each in _results_folders(folder)))
    if not with_ledger:
        raise UserError(f"there is no results folder in {', '.join(str(folder) for folder in folders)}")
    results: list[OurResult] = []
    partitions: dict[str, list[list[int]]] = {}
    studies: dict[str, Path] = {}
    for folder in with_ledger:
        with Ledger.read(folder) as ledger:
            ledger_results = Results.read(ledger)
            for (setting, _), counts in ledger.partitions().items():
                if setting in ledger_results.study.settings:
                    partitions.setdefault(ledger_results.study.settings[setting], counts)
        name = ledger_results.study.name
        if name in studies:
            raise UserError(f"study {name} is in two results folders, {studies[name]} and {folder}")
        studies[name] = folder
        results += [_our_result(ledger_results, cell) for cell in ledger_results.cells]
    return OurResults(tuple(results), tuple(studies), partitions)


def _results_folders(folder: Path) -> Iterable[Path]:
    if (folder / "ledger.sqlite").is_file():
        return [folder]
    return sorted(path.parent for path in folder.glob("*/ledger.sqlite") if not path.parent.is_symlink())


def _our_result(results: Results, cell: CellResult) -> OurResult:
    first_seed = cell.seeds[0]
    row = cell.confirm.get(first_seed)
    return OurResult(
        study=results.study.name,
        clients=results.study.clients,
        setting=cell.setting,
        label=cell.method.shown,
        epsilon=cell.epsilon,
        strategy=cell.variant.name,
        as_released=cell.method.as_released,
        claim_holds=cell.keeps_its_claim,
        actual_epsilon=max((actual_epsilon(row) for row in cell.confirm.values()), default=math.nan),
        last_round=cell.last,
        curve={t: score for t, score in cell.curve.items() if cell.complete(t)},
        chosen=cell.search.chosen or {},
        validation_score=cell.search.choice.score if cell.search.choice else math.nan,
        first_seed_score=cell.scores_at(cell.last).get(first_seed, math.nan),
        first_seed_correct=row.correct if row is not None and row.state == "done" and row.correct else None,
        test_rows=cell.facts.test_rows if cell.facts else None,
        seconds_per_round=tuple(row.seconds / row.rounds for row in cell.confirm.values() if row.rounds),
    )

"""Our side: every confirmed cell of some result folders, named in the papers' words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import CellResult, Results, actual_epsilon
from trainables.errors import UserError

PAPERS_WAY = "paper-"
"""What the names of studies begin with that search as the papers did."""


@dataclass(frozen=True)
class Entry:
    """One method at one budget in one setting of one study."""

    study: str
    clients: int | str
    cell: CellResult

    @cached_property
    def _parts(self) -> list[str]:
        return self.cell.setting.split(" / ")

    @property
    def dataset(self) -> str:
        return self._parts[0]

    @property
    def backbone(self) -> str:
        return self._parts[1] if len(self._parts) > 2 else ""

    @property
    def partition(self) -> str:
        return self._parts[-1]

    @property
    def setting(self) -> str:
        return self.cell.setting

    @property
    def epsilon(self) -> float:
        return self.cell.epsilon

    @property
    def label(self) -> str:
        return self.cell.method.shown

    @property
    def method(self) -> str:
        """The paper's name for it: what stands before the bracket that tells variants apart."""
        return self.label.split(" (")[0]

    @property
    def variant(self) -> str:
        return self.label[len(self.method) :].strip(" ()")

    @property
    def strategy(self) -> str:
        return str(self.cell.strategy)

    @property
    def honest(self) -> bool:
        return self.cell.keeps_its_claim and not self.cell.method.as_released

    @property
    def plain(self) -> bool:
        """The method itself, at the eps it claims: what a paper's entry is held against first."""
        return self.honest and not self.variant

    @property
    def papers_way(self) -> bool:
        return self.study.startswith(PAPERS_WAY)

    @property
    def actual_epsilon(self) -> float:
        """The worst over the seeds, as the study's release is seen."""
        return max((actual_epsilon(row) for row in self.cell.confirm.values()), default=float("nan"))

    def mean(self, t: int | None = None) -> float | None:
        """Test score after a round (the last one), if every seed got there."""
        t = self.cell.last if t is None else t
        return self.cell.curve[t].mean if self.cell.complete(t) else None

    def std(self, t: int | None = None) -> float:
        return self.cell.curve[self.cell.last if t is None else t].std


@dataclass(frozen=True)
class Ours:
    results: tuple[Results, ...]
    partitions: dict[str, list[list[int]]]
    """Rows of every class at every client, by setting, of the first partition seed."""

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(
            Entry(results.study.name, results.study.clients, cell) for results in self.results for cell in results.cells
        )

    def of(self, **wanted: object) -> list[Entry]:
        """The entries that have these properties."""
        return [e for e in self.entries if all(getattr(e, name) == value for name, value in wanted.items())]

    @property
    def settings(self) -> list[tuple[str, str]]:
        """Studies with their settings, in order."""
        return list(dict.fromkeys((entry.study, entry.setting) for entry in self.entries))


def read(folders: Sequence[Path]) -> Ours:
    """From result folders, and from all result folders within the given ones."""
    found = list(dict.fromkeys(each for folder in folders for each in _with_ledger(folder)))
    if not found:
        raise UserError(f"no result folder is in {', '.join(str(folder) for folder in folders)}")
    results: list[Results] = []
    partitions: dict[str, list[list[int]]] = {}
    names: dict[str, Path] = {}
    for folder in found:
        with Ledger.read(folder) as ledger:
            results.append(Results.read(ledger))
            for (setting, _), counts in ledger.partitions().items():
                partitions.setdefault(setting, counts)
        name = results[-1].study.name
        if name in names:
            raise UserError(f"study {name} is in two result folders, {names[name]} and {folder}")
        names[name] = folder
    return Ours(tuple(results), partitions)


def _with_ledger(folder: Path) -> Iterable[Path]:
    if (folder / "ledger.sqlite").is_file():
        return [folder]
    return sorted(path.parent for path in folder.glob("*/ledger.sqlite"))

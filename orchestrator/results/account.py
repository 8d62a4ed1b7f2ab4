"""The total eps of everything that results folders and saved models publish, for each set of records."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from orchestrator.results.ledger import Ledger
from orchestrator.results.locations import LEDGER, results_location
from orchestrator.results.publications import publication_of
from orchestrator.results.records import same_records
from orchestrator.results.winners import Results
from trainables.choices import ADJACENCIES, LEVELS, Level
from trainables.data.feature_file import READ_ERRORS
from trainables.errors import UserError, in_range, one_of
from trainables.files import open_plain
from trainables.models.network_settings import ACCOUNT, SUFFIX
from trainables.privacy.publication import Publication, total_epsilon
from trainables.privacy.sampled import Sampled

SEARCH_FILES = "tables/, figures/, timing/, report.html, best.yaml"
MOST_RELEASES = 10**12
LARGEST_MULTIPLIER = 1e9
SMALLEST_MULTIPLIER = 1e-9
"""Of the noise, unless it is 0."""


@dataclass(frozen=True)
class Item:
    """A private search, a saved model, or something that is not published."""

    place: str
    what: str
    data: str
    tags: frozenset[str]
    """Names and hashes of its records: items that share one are about the same records."""
    name: str = ""
    """The name that the user gave to the records."""
    published: Publication | None = None
    """None: for the analyst, not for publication."""
    delta: float = 1.0
    identity: str = ""
    """Copies of the same search or model have the same identity and are counted once."""


@dataclass(frozen=True)
class RecordsAccount:
    """Everything published about the same records."""

    items: tuple[Item, ...]
    delta: float

    @property
    def name(self) -> str:
        return next((item.name for item in self.items if item.name), ", ".join(self.data))

    @property
    def data(self) -> list[str]:
        return sorted({item.data for item in self.items})

    @cached_property
    def _distinct_items(self) -> list[Item]:
        """Copies are counted once."""
        return list({item.identity: item for item in self.items}.values())

    def total(self, level: Level = "record") -> float:
        """eps of everything together for one record, or for one user."""
        return total_epsilon([item.published for item in self._distinct_items if item.published], level, self.delta)

    @property
    def by_place(self) -> dict[tuple[str, str], float]:
        """eps, for one record, of everything that a folder or model publishes; by place and description."""
        places: dict[tuple[str, str], list[Item]] = {}
        for item in self.items:
            places.setdefault((item.place, item.what), []).append(item)
        return {place: RecordsAccount(tuple(items), self.delta).total() for place, items in places.items()}


@dataclass(frozen=True)
class Account:
    records: tuple[RecordsAccount, ...]
    for_analyst: tuple[Item, ...]


def account_of(places: Sequence[str], delta: float | None = None) -> Account:
    """The account of everything at these places. `delta`: that of the totals; by default, the smallest delta
    among the publications about the same records."""
    if delta is not None:
        in_range(0, 1, "()", delta=delta)
    items = [item for place in places for item in _items(place)]
    published = [item for item in items if item.published is not None]
    groups: dict[int, list[Item]] = {}
    for group, item in zip(same_records([item.tags for item in published]), published, strict=True):
        groups.setdefault(group, []).append(item)
    return Account(
        tuple(
            RecordsAccount(tuple(group), min(item.delta for item in group) if delta is None else delta)
            for group in groups.values()
        ),
        tuple(item for item in items if item.published is None),
    )


def _items(place: str) -> Iterator[Item]:
    """What is at a place: a URL or folder with results, a saved model, or a folder with any number of both."""
    path = Path(place)
    if "://" in place:
        yield from _results(place)
    elif path.is_file():
        yield _model(path)
    elif path.is_dir():
        ledgers = sorted(path.rglob(LEDGER))
        files = [*path.rglob("*.npz"), *path.rglob(f"*{SUFFIX}")]
        models = sorted(file for file in files if _is_model(file))
        if not ledgers and not models:
            raise UserError(f"{place} holds neither results nor a saved model")
        for ledger in ledgers:
            yield from _results(str(ledger.parent))
        yield from map(_model, models)
    else:
        raise UserError(f"there is no folder or file {place}")


def _results(place: str) -> Iterator[Item]:
    with results_location(place).open_for_reading() as folder, Ledger.read(folder) as ledger:
        results, secrets, fingerprints = Results.read(ledger), ledger.secrets(), ledger.fingerprints()
    study = results.study
    begun = [(cell, one) for cell in results.cells if (one := publication_of(cell, study)) is not None]
    for data in study.data:
        searches = [(cell, one) for cell, one in begun if cell.cell_id.data == data.id]
        tags = frozenset(filter(None, (data.records or data.id, fingerprints.get(data.id))))
        if not study.private:
            yield Item(place, "an ordinary study: its tables and report are for the analyst", data.id, tags)
        count = f"{len(searches)} private {'search' if len(searches) == 1 else 'searches'}"
        what = f"{count}: {SEARCH_FILES}"
        for cell, one in searches:
            identity = hashlib.sha256(f"{cell.cell_id} {secrets.get(cell.cell_id)!r}".encode()).hexdigest()
            yield Item(place, what, data.id, tags, data.records, one, study.privacy.delta, identity)


def _is_model(file: Path) -> bool:
    try:
        if file.suffix == SUFFIX:
            from trainables.models import safetensors  # imports torch

            return ACCOUNT in safetensors.metadata(file)
        with open_plain(file, follow=True) as content, zipfile.ZipFile(content) as archive:
            return {"weights.npy", "about.npy"} <= set(archive.namelist())
    except (*READ_ERRORS, ValueError, UserError):  # UserError: a pipe or a device
        return False


def _model(file: Path) -> Item:
    about, identity = _provenance(file)
    try:
        data, records, delta = str(about["data"]), str(about["records"]), float(about["delta"])
        privacy, method = about["trial"]["privacy"], about["trial"]["method"]
        what, tags = f"a model of {method}", frozenset({records or data})
        if not isinstance(about["secret_noise"], bool):
            raise ValueError(f"secret_noise = {about['secret_noise']!r} is neither true nor false")
        if not about["secret_noise"]:
            return Item(str(file), f"{what}, whose noise anyone can compute from its seed", data, tags, records)
        releases = tuple(map(_release, about["releases"]))
        if not releases:
            raise ValueError("it has no releases")
        published = Publication(privacy["level"], privacy["adjacency"], releases)
        one_of(LEVELS, level=str(published.level))
        one_of(ADJACENCIES, adjacency=str(published.adjacency))
        in_range(0, 1, "()", delta=delta)
    except (KeyError, TypeError, ValueError, OverflowError, UserError) as error:
        reason = str(error) if isinstance(error, UserError | ValueError) else repr(error)
        raise UserError(f"{file} has no complete account: {reason}") from None
    return Item(str(file), f"{what} with secret noise", data, tags, records, published, delta, identity)


def _provenance(file: Path) -> tuple[dict[str, Any], str]:
    """The trial and the account of a saved model, and a hash of its weights."""
    from trainables.federation.saved_model import SavedModel
    from trainables.models import safetensors  # imports torch

    if file.suffix != SUFFIX:
        saved = SavedModel.load(file)
        return saved.provenance, hashlib.sha256(saved.weights.tobytes()).hexdigest()
    try:
        about = json.loads(safetensors.metadata(file)[ACCOUNT])["provenance"]
    except (KeyError, TypeError, ValueError, RecursionError):
        about = None
    if not isinstance(about, dict):
        raise UserError(f"{file} has no account of fedsweep in its metadata")
    return about, hashlib.sha256(file.read_bytes()).hexdigest()


def _release(stated: Mapping[str, Any]) -> Sampled:
    """A checked release: a negative count would reduce the total of other publications."""
    if type(stated["count"]) is not int:
        raise ValueError(f"count = {stated['count']!r} is not a whole number")
    release = Sampled(stated["count"], float(stated["multiplier"]), float(stated["rate"]))
    in_range(1, MOST_RELEASES, count=release.count)
    if release.multiplier:
        in_range(SMALLEST_MULTIPLIER, LARGEST_MULTIPLIER, multiplier=release.multiplier)
    in_range(0, 1, "(]", rate=release.rate)
    return release

"""The ledger: the durable record of a study.

One SQLite file in the results folder. A trial has a row once it has ended, keyed by the hash of everything that can
change its result. A row is final, except that a failed trial may run again. One process writes, holding the folder's
lock; any number of processes may read at the same time. A write is a transaction that is on disk when the call returns,
or when the `transaction` around it ends, so a process that is killed loses at most what it had not written yet.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import itertools
import json
import math
import os
import secrets
import shutil
import socket
import sqlite3
import struct
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from pydantic import ValidationError

from orchestrator.results import checks, counts
from orchestrator.results.counts import EVERYWHERE, KEYS_PER_QUERY
from orchestrator.results.trial_columns import CHUNK, TrialColumns
from orchestrator.study.cell_id import CellId, SettingId
from trainables import files, plugins
from trainables.errors import UserError
from trainables.federation.checkpoint_key import user_key
from trainables.federation.trial_spec import TrialSpec

if TYPE_CHECKING:
    from orchestrator.search.candidates import Outcome
    from trainables.federation.pack import PackGroup

SCHEMA_VERSION = "9"  # increase it with every change of a definition, comments included
JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
"""The last bytes of an SQLite rollback journal that names a super-journal. Only a transaction over several databases
has one, so a ledger never does."""
SQLITE_FILES = tuple(f"ledger.sqlite{ending}" for ending in ("", "-wal", "-shm", "-journal"))
PAGE_CACHE_MB = 32
LOG_PAGES = 8000  # SQLite merges its write-ahead log into the ledger when it has this many pages: 32 MB
READER_BYTES = 1 << 16  # free disk space for a reader's index of a small write-ahead log (-shm)
SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS studies (number INTEGER PRIMARY KEY, study TEXT NOT NULL, source TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS data (data TEXT PRIMARY KEY, fingerprint TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS settings (      -- a data set with a partition
    data TEXT NOT NULL, partition TEXT NOT NULL,
    validation_rows INTEGER NOT NULL, test_rows INTEGER NOT NULL,
    protected INTEGER NOT NULL,            -- records, or users, that the budget protects
    PRIMARY KEY (data, partition)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS partitions (    -- JSON: rows of each class at each client, for a seed of the partition
    data TEXT NOT NULL, partition TEXT NOT NULL, seed INTEGER NOT NULL, counts TEXT NOT NULL,
    PRIMARY KEY (data, partition, seed)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS test_clients (  -- JSON: the client of every test row, and the names of the clients
    data TEXT PRIMARY KEY, clients TEXT NOT NULL, names TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS cells (
    number INTEGER PRIMARY KEY,
    data TEXT NOT NULL, partition TEXT NOT NULL, method TEXT NOT NULL, epsilon REAL NOT NULL,
    UNIQUE (data, partition, method, epsilon)
);
CREATE TABLE IF NOT EXISTS stages (        -- the trials of a stage of a cell's search, in the order proposed
    cell INTEGER NOT NULL, strategy TEXT NOT NULL, stage TEXT NOT NULL, position INTEGER NOT NULL,
    trial INTEGER NOT NULL, PRIMARY KEY (cell, strategy, stage, position)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS trial_keys (    -- trials by number, in the order of their stages; a key is a hash
    number INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE
);
CREATE TABLE IF NOT EXISTS secrets (       -- the secret of a cell's private search; never shown
    cell INTEGER PRIMARY KEY, secret BLOB NOT NULL,
    mark BLOB NOT NULL                     -- a digest with the key of the user who drew it
);
CREATE TABLE IF NOT EXISTS trials (
    number INTEGER PRIMARY KEY,
    origin INTEGER,                        -- where it was computed; none if it failed
    state TEXT NOT NULL CHECK (state IN ('done', 'diverged', 'failed')),
    reason TEXT NOT NULL,
    rounds INTEGER NOT NULL,
    accuracy REAL, loss REAL,              -- after the last round, on the rows that evaluate the trial
    epsilon_claimed REAL NOT NULL, epsilon_local REAL NOT NULL, epsilon_secure REAL NOT NULL,
    epsilon_unsampled REAL NOT NULL,       -- actual eps in the claimed release model, without credit for sampled rows
    seconds REAL NOT NULL,
    checksum INTEGER NOT NULL,             -- of the key and all columns but the first two
    spec TEXT NOT NULL,                    -- JSON
    metrics TEXT NOT NULL,                 -- JSON: name -> round -> value
    correct BLOB NOT NULL                  -- confirm: correctness of every test row, packed bits
);
CREATE TABLE IF NOT EXISTS failures (      -- packs that had to run again
    number INTEGER PRIMARY KEY, trials INTEGER NOT NULL, first_key TEXT NOT NULL, reason TEXT NOT NULL, at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS sessions (      -- one for each time that a driver ran what was missing
    number INTEGER PRIMARY KEY, began REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS environments (  -- what a session ran on
    session INTEGER NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (session, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batches (       -- trials that were recorded together; only used for the rate of progress
    number INTEGER PRIMARY KEY, session INTEGER NOT NULL, at REAL NOT NULL, trials INTEGER NOT NULL,
    rounds INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS stalls (        -- packs in flight that make no progress at the moment
    number INTEGER PRIMARY KEY, node TEXT NOT NULL, trials INTEGER NOT NULL, since REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS winners (       -- JSON: who wins a search, as long as its counts are these
    cell INTEGER NOT NULL, strategy TEXT NOT NULL, counts TEXT NOT NULL, winner TEXT NOT NULL,
    PRIMARY KEY (cell, strategy)
) WITHOUT ROWID;
"""
COLUMNS = ", ".join(TrialColumns._fields[:-1])
"""The fields of `Row`."""
VERIFIED_COLUMNS = f"{COLUMNS}, checksum"
WRITTEN = ("origin", "checksum", *TrialColumns._fields[1:-1])
ADD_TRIAL = f"""
INSERT INTO trials (number, {", ".join(WRITTEN)}) VALUES (?{", ?" * len(WRITTEN)})
ON CONFLICT (number) DO UPDATE SET {", ".join(f"{name} = excluded.{name}" for name in WRITTEN)}
WHERE trials.state = 'failed'
"""
TRIALS = "trials LEFT JOIN trial_keys USING (number)"
SHORT_COLUMNS = COLUMNS.replace("metrics", "'{}'").replace("correct", "x''")
NUMBERS = struct.Struct("<q7d")
"""The numbers of a row, for its checksum."""
NO_CHECKSUM = -1  # for a row with values of wrong types: it differs from every CRC
NUMBER_OF_CELL = "SELECT number FROM cells WHERE data = ? AND partition = ? AND method = ? AND epsilon = ?"
as_json = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` would build an encoder for every trial
Digest = hashlib.blake2b
StageKey = tuple[CellId, str, str]
"""Cell, name of the search variant, stage."""


@dataclass(frozen=True)
class Row:
    """A trial that has ended."""

    key: str
    spec: str
    """The trial specification as JSON."""
    state: str
    reason: str
    rounds: int
    accuracy: float | None
    loss: float | None
    metrics: dict[str, dict[int, float]]
    epsilon_claimed: float
    epsilon_local: float
    epsilon_secure: float
    epsilon_unsampled: float
    seconds: float
    correct: bytes = b""

    @cached_property
    def trial(self) -> TrialSpec:
        try:
            return TrialSpec.model_validate_json(self.spec)
        except ValidationError as error:  # handled here, because the ledger may be closed by now
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise UserError(f"the specification of trial {self.key} is damaged: {where}: {first['msg']}") from None

    @cached_property
    def content(self) -> dict[str, Any]:
        """The specification, read from JSON."""
        return json.loads(self.spec)

    def score(self, metric: str) -> float | None:
        """A metric after the last round, if the trial finished."""
        if metric in ("accuracy", "loss"):
            return self.accuracy if metric == "accuracy" else self.loss
        score = self.metrics.get(metric, {}).get(self.rounds) if self.state == "done" else None
        return None if score is None or math.isnan(score) else score

    def values(self) -> tuple[Any, ...]:
        """The values of the fields, in the order of COLUMNS."""
        values = {**vars(self), "metrics": as_json(self.metrics)}
        return tuple(values[name] for name in TrialColumns._fields[:-1])

    @classmethod
    def from_columns(cls, columns: TrialColumns) -> Iterator[Row]:
        for values in zip(*columns, strict=True):
            row = cls.__new__(cls)  # the constructor of a frozen class is slow
            vars(row).update(zip(TrialColumns._fields, values, strict=True))
            yield row


@dataclass(frozen=True)
class Session:
    """One run of a driver: when it began, and the batches of trials that it recorded. Never part of a table."""

    began: float
    batches: list[tuple[float, int, int]]
    """Time, number of trials, number of trial-rounds."""
    environment: dict[str, str] = field(default_factory=dict)
    computed: int = 0
    """Trials in the ledger that this session computed."""

    @property
    def last(self) -> float:
        """The time of the last batch; without batches, of the beginning."""
        return self.batches[-1][0] if self.batches else self.began


class Origin(NamedTuple):
    """Where a trial was computed."""

    session: int
    """Index in `Ledger.sessions()`."""
    nodes: list[str]
    code: str
    """Digest of code, kernel, libraries and kind of device, as reported by the processes that computed the trial."""


@dataclass(frozen=True)
class Stall:
    """A pack in flight that makes no progress."""

    node: str
    trials: int
    since: float
    """The time of its last progress."""


@dataclass(frozen=True)
class SettingFacts:
    """Numbers about a setting that tables need."""

    validation_rows: int
    test_rows: int
    protected: int
    """Number of records, or of users, that the budget protects."""


class TestClients(NamedTuple):
    """The clients of a data set's test rows."""

    of_rows: Sequence[int]
    """The client of every test row."""
    names: Sequence[str]
    """The name of every client; empty if clients have numbers only."""


class DataNames(NamedTuple):
    """The names that a data set gives its classes and clients; empty if it only numbers them."""

    classes: Sequence[str]
    clients: Sequence[str]


def _definitions(db: sqlite3.Connection) -> set[tuple[str, ...]]:
    return set(db.execute("SELECT type, name, tbl_name, coalesce(sql, '') FROM sqlite_master"))


@cache
def _own_definitions() -> set[tuple[str, ...]]:
    """The definitions that a ledger must have. A ledger of unknown origin could, for example, define a default that
    sets the secret of the next private search."""
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.executescript(f"{SCHEMA} {counts.SCHEMA}")
        return _definitions(db)


class Secret(NamedTuple):
    """The secret of a private search."""

    value: bytes
    is_own: bool
    """Whether this user drew it on this machine, for this search. Otherwise someone else may know it."""


def _mark(cell: CellId, purpose: str, secret: bytes) -> bytes:
    """Proves that this user drew the secret of a private search. A results folder may come from anyone, and a person
    who knows the secret can subtract the noise of the search."""
    parts = json.dumps(["secret of a private search", *cell, purpose, secret.hex()])
    return hmac.digest(user_key(), parts.encode(), "sha256")


class Ledger:
    """Open with `Ledger.write(folder)`, which takes the lock, or with `Ledger.read(folder)`."""

    def __init__(self, connection: sqlite3.Connection, folder: Path) -> None:
        self._db, self._folder = connection, folder

    @classmethod
    @contextlib.contextmanager
    def write(
        cls, folder: Path, *, private: bool = False, keeps_log: bool = False, page_cache_mb: int = PAGE_CACHE_MB
    ) -> Iterator[Ledger]:
        """For the one process that writes, such as the driver. `private`: only this user can read the folder.
        `keeps_log`: this connection does not merge SQLite's write-ahead log into the ledger; `RemoteLedger` does."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=files.PRIVATE_FOLDER if private else 0o777)
        except OSError as error:
            raise UserError(f"results folder {folder} cannot be made: {error.strerror}") from None
        _refuse_links(folder)
        if private:
            _make_private(folder)
        lock = _take_lock(folder)
        try:
            connection = _connect(f"file:{_quoted(folder / 'ledger.sqlite')}", folder, page_cache_mb)
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=FULL")
                connection.execute(f"PRAGMA wal_autocheckpoint={0 if keeps_log else LOG_PAGES}")
                ledger = cls(connection, folder)
                if ledger._is_empty():
                    version = f"INSERT INTO meta VALUES ('schema', '{SCHEMA_VERSION}');"
                    connection.executescript(f"BEGIN; {SCHEMA} {counts.SCHEMA} {version} COMMIT;")
                ledger._check_version(folder)
                if private:
                    _make_private(folder)  # files that were created since
                yield ledger
            except sqlite3.DataError as error:
                raise UserError(f"the ledger in {folder} is damaged: {error}") from None
            finally:
                connection.close()
        finally:
            os.close(lock)  # also releases it

    @classmethod
    @contextlib.contextmanager
    def read(cls, folder: Path) -> Iterator[Ledger]:
        """For any number of readers, also while the study runs."""
        file = folder / "ledger.sqlite"
        if not file.is_file():
            raise UserError(f"results folder {folder} holds no ledger.sqlite")
        _refuse_links(folder)
        # a reader writes a small index next to the ledger; if it cannot, a ledger without a log is opened as immutable
        immutable = not (folder / "ledger.sqlite-wal").exists() and not _can_write(folder)
        connection = _connect(f"file:{_quoted(file)}?mode=ro{'&immutable=1' if immutable else ''}", folder)
        try:
            ledger = cls(connection, folder)
            if ledger._is_empty():
                raise UserError(f"the ledger in {folder} is empty: nothing was recorded; run the study again")
            ledger._check_version(folder)
            yield ledger
        except (sqlite3.DatabaseError, ValidationError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"the ledger in {folder} is damaged: {str(error).splitlines()[0]}") from None
        finally:
            connection.close()

    def _is_empty(self) -> bool:
        return self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0

    def _check_version(self, folder: Path) -> None:
        others = "lower(type) NOT IN ('table', 'index') OR lower(sql) LIKE '%virtual%'"
        if self._db.execute(f"SELECT 1 FROM sqlite_master WHERE {others}").fetchone():
            raise UserError(f"the ledger in {folder} is damaged: it has views, triggers or virtual tables")
        computed = "SELECT 1 FROM sqlite_master, pragma_table_xinfo(sqlite_master.name) AS columns WHERE columns.hidden"
        if self._db.execute(computed).fetchone():
            raise UserError(f"the ledger in {folder} is damaged: it has computed columns")
        version = self._meta("schema")
        if version != SCHEMA_VERSION:
            raise UserError(
                f"the ledger in {folder} has version {version!s:.50}, this program reads {SCHEMA_VERSION}; "
                "run the study in a new folder"
            )
        if _definitions(self._db) != _own_definitions():
            raise UserError(f"the ledger in {folder} is damaged: its tables have other definitions than this program's")

    def _meta(self, name: str) -> str | None:
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    # ---- the study

    def add_study(self, study: str, source: str) -> None:
        self._db.execute("INSERT INTO studies (study, source) VALUES (?, ?)", (study, source))

    def study(self) -> tuple[str, str] | None:
        """The study that ran last, as JSON, and the text of its file."""
        return self._db.execute("SELECT study, source FROM studies ORDER BY number DESC LIMIT 1").fetchone()

    def add_plugins(self, names: Iterable[str], code: Mapping[str, str]) -> None:
        """Plug-ins that the study was run with, as `--import` names them, and the hash of each one's code, by module.
        Reading a ledger never loads them."""
        merged = list(dict.fromkeys([*self.plugins(), *names]))
        for name, value in (("plugins", merged), ("plugin_code", {**self.plugin_code(), **code})):
            if value:
                self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, json.dumps(value)))

    def plugins(self) -> list[str]:
        return checks.names(self._meta("plugins") or "[]")

    def plugin_code(self) -> dict[str, str]:
        return checks.hashes(self._meta("plugin_code") or "{}")

    def add_data(self, fingerprints: Mapping[str, str]) -> None:
        """Content hashes of the data sets, by id. A data set never changes its content within a folder."""
        known = self.fingerprints()
        for data, fingerprint in fingerprints.items():
            if known.get(data, fingerprint) != fingerprint:
                raise UserError(
                    f"data {data!r} has other content than when this folder's study was run; choose another folder"
                )
        with self.transaction():
            self._db.executemany("INSERT OR IGNORE INTO data VALUES (?, ?)", fingerprints.items())

    def fingerprints(self) -> dict[str, str]:
        return dict(self._db.execute("SELECT data, fingerprint FROM data ORDER BY data"))

    def add_settings(self, settings: Mapping[SettingId, SettingFacts]) -> None:
        with self.transaction():
            self._db.executemany(
                "INSERT OR IGNORE INTO settings VALUES (?, ?, ?, ?, ?)",
                ((*setting, *astuple(facts)) for setting, facts in settings.items()),
            )

    def settings(self) -> dict[SettingId, SettingFacts]:
        rows = self._db.execute("SELECT data, partition, validation_rows, test_rows, protected FROM settings")
        return {
            SettingId(data, partition): SettingFacts(*map(checks.count, facts, (0, 0, 1)))
            for data, partition, *facts in rows
        }

    def add_partitions(self, counts: Mapping[tuple[SettingId, int], list[list[int]]]) -> None:
        """Rows of each class at each client, by setting and seed of the partition."""
        with self.transaction():
            self._db.executemany(
                "INSERT OR IGNORE INTO partitions VALUES (?, ?, ?, ?)",
                (
                    (*setting, seed, json.dumps(clients, separators=(",", ":")))
                    for (setting, seed), clients in counts.items()
                ),
            )

    def partitions(self) -> dict[tuple[SettingId, int], list[list[int]]]:
        rows = self._db.execute("SELECT data, partition, seed, counts FROM partitions ORDER BY data, partition, seed")
        return {(SettingId(data, partition), seed): checks.counts(counts) for data, partition, seed, counts in rows}

    def add_test_clients(self, clients: Mapping[str, TestClients]) -> None:
        """By data set."""
        rows = ((data, as_json(list(one.of_rows)), as_json(list(one.names))) for data, one in clients.items())
        with self.transaction():
            self._db.executemany("INSERT OR IGNORE INTO test_clients VALUES (?, ?, ?)", rows)

    def test_clients(self) -> dict[str, TestClients]:
        rows = self._db.execute("SELECT data, clients, names FROM test_clients ORDER BY data")
        return {data: TestClients(checks.clients(of_rows), checks.names(names)) for data, of_rows, names in rows}

    def add_names(self, names: Mapping[str, DataNames]) -> None:
        """By data set."""
        merged = {**names, **self.names()}
        if merged:
            self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", ("names", as_json(merged)))

    def names(self) -> dict[str, DataNames]:
        found = checks.names_by_data(self._meta("names") or "{}")
        return {data: DataNames(*names) for data, names in found.items()}

    # ---- trials

    def add(self, rows: Iterable[Row], places: Mapping[str, tuple[Sequence[str], str]] = MappingProxyType({})) -> None:
        """Add all rows or none. An existing row is replaced only if its trial had failed.

        `places`: the names of the nodes that computed a trial, and the digest of their code, by the trial's key."""
        new = list(rows)
        with self.transaction():
            numbers = counts.numbers(self._db, [row.key for row in new])
            before = counts.states(self._db, numbers.values())
            new = [row for row in new if before.get(numbers[row.key], "failed") == "failed"]
            if not new:
                return
            as_text = cache(lambda names: json.dumps(list(names)))
            computed = {
                row.key: (as_text(tuple(nodes)), code)
                for row in new
                if row.state != "failed"
                for nodes, code in [places.get(row.key, ((), ""))]
            }
            numbered = counts.computed(self._db, computed.values())
            origins = {key: numbered[place] for key, place in computed.items()}
            self._add((numbers[row.key], origins.get(row.key), row.values()) for row in new)
            counts.ended(self._db, before, {numbers[row.key]: row.state for row in new})
            self._db.execute(
                "INSERT INTO batches (session, at, trials, rounds) "
                "VALUES ((SELECT coalesce(max(number), 0) FROM sessions), ?, ?, ?)",
                (time.time(), len(new), sum(row.rounds for row in new)),
            )

    def _add(self, rows: Iterable[tuple[int, int | None, tuple[Any, ...]]]) -> None:
        """`rows`: number, origin, and the values in the order of COLUMNS."""
        self._db.executemany(
            ADD_TRIAL, ((number, origin, _checksum(values), *values[1:]) for number, origin, values in rows)
        )

    def copy_rows(self, other: Ledger) -> None:
        """Add all trials of another ledger, with the sessions that computed them. Call `recount` afterwards."""
        with self.transaction():
            sessions = {number: self._copy_session(session) for number, session in other._sessions().items()}
            origins = {
                number: counts.origin(self._db, sessions[session], json.dumps(checks.names(nodes)), checks.line(code))
                for number, session, nodes, code in other._db.execute(
                    "SELECT number, session, nodes, code FROM origins"
                )
                if session in sessions
            }
            for rows in other._sound_rows():
                numbers = counts.numbers(self._db, [values[0] for _, values in rows])
                self._add((numbers[values[0]], origins.get(origin), values) for origin, values in rows)

    def copy_stage(self, cell: CellId, strategy: str, stage: str, keys: Sequence[str], start: int) -> None:
        """Add `keys[start:]` to a stage, from the free position `start` on. Call `recount` afterwards."""
        number, numbers = self._cell_number(cell), counts.numbers(self._db, keys[start:])
        members = ((number, strategy, stage, place, numbers[key]) for place, key in enumerate(keys[start:], start))
        self._db.executemany("INSERT OR IGNORE INTO stages VALUES (?, ?, ?, ?, ?)", members)

    def recount(self) -> None:
        with self.transaction():
            counts.recount(self._db)

    def _sound_rows(self) -> Iterator[list[tuple[Any, tuple[Any, ...]]]]:
        """All trials, in chunks, with verified checksums and checked values. For each: its origin, and its values in
        the order of COLUMNS."""
        rows = self._db.execute(f"SELECT origin, {COLUMNS}, checksum FROM {TRIALS} ORDER BY number")
        while chunk := rows.fetchmany(CHUNK):
            values = _verified([row[1:] for row in chunk])
            checks.columns(values)
            yield list(zip((row[0] for row in chunk), values, strict=True))

    def _copy_session(self, session: Session) -> int:
        """Copy a session of another ledger; returns its number here. An earlier copy of the same session is replaced,
        because the session may have continued since."""
        known = self._db.execute("SELECT number FROM sessions WHERE began = ?", (session.began,)).fetchone()
        if known is None:
            self._db.execute("INSERT INTO sessions (began) VALUES (?)", (session.began,))
            known = self._db.execute("SELECT max(number) FROM sessions").fetchone()
        (number,) = known
        self._db.execute("DELETE FROM batches WHERE session = ?", (number,))
        environment = ((number, *item) for item in session.environment.items())
        self._db.executemany("INSERT OR REPLACE INTO environments VALUES (?, ?, ?)", environment)
        batches = ((number, *batch) for batch in session.batches)
        self._db.executemany("INSERT INTO batches (session, at, trials, rounds) VALUES (?, ?, ?, ?)", batches)
        return number

    def origins(self) -> dict[str, Origin]:
        """Where every trial was computed, by its key."""
        indices = {number: index for index, (number,) in enumerate(self._db.execute("SELECT number FROM sessions"))}
        origins = {
            number: Origin(indices[session], checks.names(nodes), checks.line(code))
            for number, session, nodes, code in self._db.execute("SELECT number, session, nodes, code FROM origins")
            if session in indices
        }
        rows = self._db.execute(f"SELECT key, origin FROM {TRIALS}")
        return {checks.key(key): origins[origin] for key, origin in rows if origin in origins}

    def trials_by_node(self) -> dict[str, int]:
        """The number of trials that each node computed, as a whole or in part."""
        found: Counter[str] = Counter()
        for nodes, count in self._db.execute("SELECT nodes, sum(trials) FROM origins GROUP BY nodes"):
            for node in checks.names(nodes):
                found[node] += checks.number(count)
        return dict(sorted(found.items()))

    def trials_by_code(self) -> dict[str, int]:
        """The number of trials by the digest of the code that computed them, oldest digest first."""
        rows = self._db.execute("SELECT code, sum(trials) FROM origins GROUP BY code ORDER BY min(number)")
        return {checks.line(code): checks.number(count) for code, count in rows if code}

    def forget(self, keys: Iterable[str], stages: Mapping[StageKey, int]) -> None:
        """Remove the rows of trials, so that they run again. `stages`: by stage, the position from which on its trials
        are removed."""
        forgotten = [(key,) for key in keys]
        with self.transaction():
            number = "(SELECT number FROM trial_keys WHERE key = ?)"
            searches = f"SELECT cell FROM stages WHERE trial = {number}"
            self._db.executemany(f"DELETE FROM winners WHERE cell IN ({searches})", forgotten)
            self._db.executemany(f"DELETE FROM trials WHERE number = {number}", forgotten)
            for (cell, strategy, stage), position in stages.items():
                counts.closed(self._db, (self._cell_number(cell), strategy, stage), position)
            if forgotten:
                # damaged rows, which have no key
                self._db.execute("DELETE FROM trials WHERE number NOT IN (SELECT number FROM trial_keys)")
                counts.recount(self._db)

    def damaged_rows(self) -> list[str]:
        """The keys of all trials whose row does not match its checksum."""
        rows = self._db.execute(f"SELECT {COLUMNS}, checksum FROM {TRIALS} ORDER BY number")
        return sorted(str(values[0]) for *values, checksum in rows if _checksum(values) != checksum)

    def counts_are_right(self) -> bool:
        return counts.are_right(self._db)

    def correct_counts(self) -> None:
        """Count again if the counts are wrong, for example because another program changed rows."""
        if not self.counts_are_right():
            self.recount()

    def check_rows(self, where: Any) -> None:
        """Raise if rows do not match their checksums. `where`: the results folder, for the error message."""
        if damaged := self.damaged_rows():
            others = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
            raise UserError(
                f"the ledger in {where} is damaged: the row of trial {damaged[0]!r:.50}{others} does not match its "
                f"checksum; '{plugins.command('check', str(where), '--repair')}' forgets it, and resume runs it again"
            )

    def outcomes(self, metric: str = "accuracy", search: tuple[CellId, str] | None = None) -> dict[str, Outcome]:
        """State, score by this metric and loss of every trial that has ended, or of those of one search (cell, name of
        the variant). Cheap if the metric has a column."""
        where, values = "", list[Any]()
        if search is not None:
            numbers = f"SELECT trial FROM stages WHERE cell = ({NUMBER_OF_CELL}) AND strategy = ?"
            where, values = f"WHERE number IN ({numbers})", [*search[0], search[1]]
        if metric in ("accuracy", "loss"):
            outcomes = self._db.execute(f"SELECT key, state, {metric}, loss FROM {TRIALS} {where}", values)
            checked = checks.accuracy if metric == "accuracy" else lambda score: score
            return {checks.key(key): (state, checked(score), loss) for key, state, score, loss in outcomes}
        found = self._db.execute(f"SELECT {COLUMNS} FROM {TRIALS} {where}", values)
        rows = (row for columns in _columns(found) for row in Row.from_columns(columns))
        return {row.key: (row.state, row.score(metric), row.loss) for row in rows}

    def rows(self, keys: Iterable[str], *, whole: bool = True) -> dict[str, Row]:
        """The rows of the trials that have ended, in the order of the keys. `whole=False` leaves out metrics and
        correctness, which are most of a row."""
        unique_keys = list(dict.fromkeys(keys))
        columns = COLUMNS if whole else SHORT_COLUMNS
        rows: dict[str, Row] = {}
        for start in range(0, len(unique_keys), KEYS_PER_QUERY):
            chunk = unique_keys[start : start + KEYS_PER_QUERY]
            marks = ", ".join("?" * len(chunk))
            found = self._db.execute(
                f"SELECT {columns} FROM trial_keys JOIN trials USING (number) WHERE key IN ({marks})", chunk
            )
            rows |= {row.key: row for columns_ in _columns(found) for row in Row.from_columns(columns_)}
        return {key: rows[key] for key in unique_keys if key in rows}

    # ---- cells and stages

    def _cell_number(self, cell: CellId) -> int:
        self._db.execute(
            "INSERT OR IGNORE INTO cells (data, partition, method, epsilon) VALUES (?, ?, ?, ?)", tuple(cell)
        )
        (number,) = self._db.execute(NUMBER_OF_CELL, tuple(cell)).fetchone()
        return number

    def _cells(self) -> dict[int, CellId]:
        rows = self._db.execute("SELECT number, data, partition, method, epsilon FROM cells")
        return {
            number: CellId(data, part, method, checks.number(epsilon)) for number, data, part, method, epsilon in rows
        }

    def add_stage(self, cell: CellId, strategy: str, stage: str, keys: Sequence[str], start: int = 0) -> None:
        """Open a stage, or add trials to it, from position `start` on."""
        with self.transaction():
            counts.opened(self._db, (self._cell_number(cell), strategy, stage), list(enumerate(keys, start)))

    def stages(self) -> dict[StageKey, list[str]]:
        """The keys of the trials of every open stage, in the order proposed."""
        cells = self._cells()
        stages: dict[StageKey, list[str]] = {}
        rows = self._db.execute(
            "SELECT cell, strategy, stage, key FROM stages LEFT JOIN trial_keys ON number = trial "
            "ORDER BY cell, strategy, stage, position"
        )
        for (number, strategy, stage), members in itertools.groupby(rows, key=lambda row: row[:3]):
            if number not in cells:
                raise sqlite3.DataError(f"a stage names cell {number!r:.50}, which does not exist")
            keys = checks.keys([row[3] for row in members])
            stages.setdefault((cells[number], checks.name(strategy), checks.name(stage)), []).extend(keys)
        return stages

    def stages_of(self, cell: CellId, strategy: str) -> dict[str, list[str]]:
        """The keys of the trials of every open stage of one search."""
        stages: dict[str, list[str]] = {}
        for stage, key in self._db.execute(
            f"SELECT stage, key FROM stages LEFT JOIN trial_keys ON number = trial "
            f"WHERE cell = ({NUMBER_OF_CELL}) AND strategy = ? ORDER BY stage, position",
            (*cell, strategy),
        ):
            stages.setdefault(checks.name(stage), []).append(checks.key(key))
        return stages

    def stage(self, cell: CellId, strategy: str, stage: str, start: int = 0, count: int = -1) -> list[str]:
        """The keys of `count` trials of a stage from position `start` on; by default all. Empty if it is not open."""
        where = f"cell = ({NUMBER_OF_CELL}) AND strategy = ? AND stage = ? AND position >= ?"
        query = f"SELECT key FROM stages LEFT JOIN trial_keys ON number = trial WHERE {where} ORDER BY position LIMIT ?"
        return [checks.key(key) for (key,) in self._db.execute(query, (*cell, strategy, stage, start, count))]

    def stage_names(self, cell: CellId, strategy: str) -> set[str]:
        """The open stages of a search."""
        where = f"cell = ({NUMBER_OF_CELL}) AND strategy = ?"
        return {
            checks.name(stage)
            for (stage,) in self._db.execute(f"SELECT DISTINCT stage FROM stages WHERE {where}", (*cell, strategy))
        }

    def stage_trials(
        self, cell: CellId, strategy: str, stage: str, *, whole: bool, digest: Digest | None = None
    ) -> Iterator[tuple[list[str], TrialColumns | None]]:
        """In chunks: the keys of the trials of a stage, in the order proposed, and the columns of those that have
        ended. `whole`: with metrics and correctness, which are most of a row. `digest`: as in `verify_stage`."""
        columns = COLUMNS if whole else SHORT_COLUMNS
        for chunk in self._stage_rows(cell, strategy, stage, columns if digest is None else VERIFIED_COLUMNS):
            ended = [row[1:] for row in chunk if row[0]]
            if digest is not None:
                ended = _verified(ended)
                digest.update(_summary(chunk))
            trials = TrialColumns(*checks.columns(ended, whole=whole)) if ended else None
            yield checks.keys([row[1] for row in chunk]), trials

    def verify_stage(self, cell: CellId, strategy: str, stage: str, digest: Digest) -> list[str]:
        """The keys of the trials of a stage. Their rows must match their checksums, which are added to `digest`."""
        opened: list[str] = []
        for chunk in self._stage_rows(cell, strategy, stage, VERIFIED_COLUMNS):
            _verified([row[1:] for row in chunk if row[0]])
            digest.update(_summary(chunk))
            opened += checks.keys([row[1] for row in chunk])
        return opened

    def _stage_rows(self, cell: CellId, strategy: str, stage: str, columns: str) -> Iterator[list[tuple[Any, ...]]]:
        """For each trial of a stage, whether it has ended, and these columns; in chunks."""
        found = self._db.execute(
            f"SELECT state IS NOT NULL, {columns} FROM stages LEFT JOIN trial_keys ON trial_keys.number = trial "
            "LEFT JOIN trials ON trials.number = trial "
            f"WHERE cell = ({NUMBER_OF_CELL}) AND strategy = ? AND stage = ? ORDER BY position",
            (*cell, strategy, stage),
        )
        while chunk := found.fetchmany(CHUNK):
            yield chunk

    def counts(self) -> dict[tuple[CellId, str], dict[str, Counter[str]]]:
        """The number of trials of every search, by stage and state; under "opened" the number of all trials."""
        cells = self._cells()
        found: dict[tuple[CellId, str], dict[str, Counter[str]]] = {}
        rows = self._db.execute("SELECT cell, strategy, stage, state, trials FROM counts WHERE cell != 0")
        for number, strategy, stage, state, trials in rows:
            if number not in cells:
                raise sqlite3.DataError(f"a count names cell {number!r:.50}, which does not exist")
            search = found.setdefault((cells[number], checks.name(strategy)), {})
            search.setdefault(checks.name(stage), Counter())[checks.line(state)] += checks.count(trials)
        return found

    def totals(self) -> Counter[str]:
        """The number of trials of all stages by state, each counted once; under "opened" the number of all trials."""
        query = "SELECT state, trials FROM counts WHERE cell = ? AND strategy = ? AND stage = ? AND trials > 0"
        rows = self._db.execute(query, EVERYWHERE)
        return Counter({checks.line(state): checks.count(trials) for state, trials in rows})

    def states(self) -> Counter[str]:
        """The number of ended trials of all stages by state, counted from the rows themselves."""
        query = "SELECT state, count(*) FROM trials WHERE number IN (SELECT trial FROM stages) GROUP BY state"
        return Counter(dict(self._db.execute(query).fetchall()))

    def failed(self) -> dict[str, str]:
        """The reason of every failed trial: a sentence, and the traceback of a plug-in's error in further lines."""
        indexed = TRIALS.replace("trials", "trials INDEXED BY failed_trials", 1)
        rows = self._db.execute(f"SELECT key, reason FROM {indexed} WHERE state = 'failed' ORDER BY number")
        return {checks.key(key): checks.lines(reason) for key, reason in rows}

    # ---- winners

    def set_winner(self, cell: CellId, strategy: str, winner: Any) -> None:
        """Record the winner of a search, a JSON value. It is valid until a trial of the search is added or ends;
        confirm runs do not count."""
        with self.transaction():
            number = self._cell_number(cell)
            values = number, strategy, self._search_counts(number, strategy), json.dumps(winner)
            self._db.execute("INSERT OR REPLACE INTO winners VALUES (?, ?, ?, ?)", values)

    def winners(self) -> dict[tuple[CellId, str], Any]:
        """The winners that are still valid, by cell and search variant."""
        cells = self._cells()
        return {
            (cells[number], checks.name(strategy)): checks.content(winner)
            for number, strategy, known, winner in self._db.execute("SELECT * FROM winners").fetchall()
            if number in cells and known == self._search_counts(number, strategy)
        }

    def _search_counts(self, number: int, strategy: str) -> str:
        """The counts that a winner was determined from, without confirm runs, which do not change it."""
        query = "SELECT stage, state, trials FROM counts WHERE cell = ? AND strategy = ? AND stage != 'confirm'"
        return json.dumps([row for row in self._db.execute(f"{query} ORDER BY 1, 2", (number, strategy)) if row[2]])

    def secret(self, cell: CellId, purpose: str) -> Secret:
        """The secret of a cell's private search: drawn from the operating system at the first call, then kept.
        `purpose`: a digest of everything that the search may compute."""
        query = f"SELECT secret, mark FROM secrets WHERE cell = ({NUMBER_OF_CELL})"
        if (known := self._db.execute(query, cell).fetchone()) is None:
            self.add_secrets({cell: secrets.token_bytes(checks.SECRET_BYTES)}, purpose)
            known = self._db.execute(query, cell).fetchone()
        value, mark = checks.secret(known[0]), known[1]
        # in a manipulated file, an index may return the secret of another cell
        is_own = isinstance(mark, bytes) and hmac.compare_digest(mark, _mark(cell, purpose, value))
        return Secret(value, is_own)

    def add_secrets(self, new: Mapping[CellId, bytes], purpose: str | None) -> None:
        """Add secrets of cells that have none yet. `purpose`: None for searches that began in another folder."""
        if new:
            _make_private(self._folder)
        with self.transaction():
            (last,) = self._db.execute("SELECT coalesce(max(number), 0) FROM cells").fetchone()
            self._refuse_secrets_of(self._db.execute("SELECT cell FROM secrets WHERE cell > ?", (last,)))
            numbered = [
                (self._cell_number(cell), secret, b"" if purpose is None else _mark(cell, purpose, secret))
                for cell, secret in new.items()
            ]
            self._db.executemany("INSERT OR IGNORE INTO secrets VALUES (?, ?, ?)", numbered)

    def secrets(self) -> dict[CellId, bytes]:
        cells, found = self._cells(), dict(self._db.execute("SELECT cell, secret FROM secrets"))
        self._refuse_secrets_of((number,) for number in found.keys() - cells)
        return {cells[number]: checks.secret(secret) for number, secret in found.items()}

    def _refuse_secrets_of(self, unknown: Iterable[tuple[int]]) -> None:
        """Secrets of cells that do not exist would become those of later cells."""
        for (number,) in unknown:
            raise sqlite3.DataError(f"a secret names cell {number}, which does not exist")

    # ---- sessions

    def begin_session(self, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        with self.transaction():
            number = self._db.execute("INSERT INTO sessions (began) VALUES (?)", (time.time(),)).lastrowid
            self._db.executemany(
                "INSERT INTO environments VALUES (?, ?, ?)", ((number, *item) for item in environment.items())
            )

    def sessions(self) -> list[Session]:
        """Oldest first."""
        return list(self._sessions().values())

    def _sessions(self) -> dict[int, Session]:
        environments: dict[int, dict[str, str]] = defaultdict(dict)
        for number, name, value in self._db.execute("SELECT session, name, value FROM environments"):
            environments[number][checks.line(name)] = checks.line(value)
        computed = dict(self._db.execute("SELECT session, sum(trials) FROM origins GROUP BY session"))
        sessions = {
            number: Session(checks.number(began), [], environments[number], computed.get(number, 0))
            for number, began in self._db.execute("SELECT number, began FROM sessions")
        }
        for number, *batch in self._db.execute("SELECT session, at, trials, rounds FROM batches ORDER BY number"):
            if number in sessions:
                at, trials, rounds = map(checks.number, batch)
                sessions[number].batches.append((at, trials, rounds))
        return sessions

    # ---- failures

    def add_failure(self, keys: Sequence[str], reason: str) -> None:
        self._db.execute(
            "INSERT INTO failures (trials, first_key, reason, at) VALUES (?, ?, ?, ?)",
            (len(keys), keys[0], reason, time.time()),
        )

    def failures(self) -> list[tuple[int, str, str]]:
        """Packs that failed, oldest first: number of trials, key of the first one, reason."""
        rows = self._db.execute("SELECT trials, first_key, reason FROM failures ORDER BY number")
        return [(checks.number(trials), checks.line(key), checks.line(reason)) for trials, key, reason in rows]

    def set_memory_limits(self, device: str, limits: Mapping[PackGroup, int]) -> None:
        """Lanes that fit into the memory of a kind of device, by pack group."""
        text = json.dumps([device, [[list(group), lanes] for group, lanes in limits.items()]])
        self._db.execute("INSERT OR REPLACE INTO meta VALUES ('memory limits', ?)", (text,))

    def memory_limits(self, device: str) -> dict[PackGroup, int]:
        """The recorded limits; empty if they are for another kind of device."""
        of, limits = checks.memory_limits(self._meta("memory limits") or '["", []]')
        return limits if of == device else {}

    def set_stalls(self, stalls: Iterable[Stall]) -> None:
        with self.transaction():
            self._db.execute("DELETE FROM stalls")
            self._db.executemany("INSERT INTO stalls (node, trials, since) VALUES (?, ?, ?)", map(astuple, stalls))

    def stalls(self) -> list[Stall]:
        rows = self._db.execute("SELECT node, trials, since FROM stalls ORDER BY number")
        return [Stall(checks.line(node), checks.number(trials), checks.number(since)) for node, trials, since in rows]

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all writes of the block, or none if it raises. A nested transaction is part of the outer one."""
        if self._db.in_transaction:
            yield
            return
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:  # if the disk is full, SQLite has rolled back already
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def _columns(rows: sqlite3.Cursor) -> Iterator[TrialColumns]:
    while chunk := rows.fetchmany(CHUNK):
        yield TrialColumns(*checks.columns(chunk))


def _verified(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Verify rows that end with their checksum, and return them without it."""
    values = [row[:-1] for row in rows]
    for row, of_row in zip(rows, values, strict=True):
        if _checksum(of_row) != row[-1]:
            raise sqlite3.DataError(f"the row of trial {row[0]!r:.50} does not match its checksum")
    return values


def _summary(rows: Sequence[tuple[Any, ...]]) -> bytes:
    """The keys and checksums of these trials of a stage: they change with the rows."""
    return repr([(row[1], row[-1]) for row in rows]).encode()


def _checksum(values: Sequence[Any]) -> int:
    """Checksum of a row: the same for the values that were written and for those that SQLite returns. SQLite turns
    integers in REAL columns into floats, NaN into NULL, and -0.0 into 0.0."""
    key, spec, state, reason, rounds, share, loss, metrics, claimed, local, secure, unsampled, seconds, correct = values
    try:
        numbers = NUMBERS.pack(
            *(rounds, _or_nan(share), _or_nan(loss), claimed + 0.0, local + 0.0, secure + 0.0, unsampled + 0.0),
            seconds + 0.0,
        )
        texts = "\0".join((key, spec, state, reason, metrics)).encode(errors="surrogatepass")
        return zlib.crc32(correct, zlib.crc32(numbers, zlib.crc32(texts)))
    except (TypeError, struct.error):
        return NO_CHECKSUM


def _or_nan(value: float | None) -> float:
    return math.nan if value is None or value != value else value + 0.0


def _connect(uri: str, folder: Path, page_cache_mb: int = PAGE_CACHE_MB) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30)
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute(f"PRAGMA cache_size = -{1000 * page_cache_mb}")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the latter: a message quotes damaged text
        reason = error if shutil.disk_usage(folder).free else "no space left on the disk"
        raise UserError(f"the ledger in {folder} cannot be opened: {reason}") from None
    return connection


def _refuse_links(folder: Path) -> None:
    """SQLite would follow links, and would delete a file that a journal names."""
    for name in SQLITE_FILES:
        files.refuse_other_names(folder / name)
    journal = folder / "ledger.sqlite-journal"
    if journal.is_file():
        with files.open_plain(journal) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - len(JOURNAL_MAGIC)))  # it may be huge and sparse
            if file.read() == JOURNAL_MAGIC:
                raise UserError(f"the ledger in {folder} is damaged: {journal.name} names another file")


def _make_private(folder: Path) -> None:
    """Deny other users access to the folder and its files. SQLite gives later files the ledger's permissions."""
    files.make_private(folder, *SQLITE_FILES, "ledger.lock", "fedsweep.log")


def _can_write(folder: Path) -> bool:
    return os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > READER_BYTES


def _quoted(path: Path) -> str:
    return quote(os.fsencode(path.absolute()))  # a name need not be UTF-8


def _take_lock(folder: Path) -> int:
    """Lock the folder; returns the descriptor that holds the lock. The operating system releases it when the process
    ends, even after a crash: a dead driver never blocks the next."""
    descriptor = files.open_in_place(folder / "ledger.lock", os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(descriptor, 200).decode(errors="replace").strip()
        os.close(descriptor)
        raise UserError(f"results folder {folder} is in use by {holder or 'another process'}") from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return descriptor

"""The ledger: the durable truth about what has been done.

One SQLite file in the result folder. A trial has a row once it has ended, keyed by the hash of all that can change its
result; a row is final, except that a trial that failed may be tried again. One process writes (it holds the folder's
lock), any number may read meanwhile. A write is a transaction that is on the disk when the call returns: a process
killed at any moment loses at most what it had not yet handed in.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from trainables.errors import UserError
from trainables.federation.trial_spec import TrialSpec

SCHEMA_VERSION = 2
KEYS_AT_A_TIME = 500  # in one question, fewer than SQLite allows
SECRET_BYTES = 32
INDEX_BYTES = 1 << 16  # more than SQLite's index of a small write-ahead log
SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS data (label TEXT PRIMARY KEY, fingerprint TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS studies (number INTEGER PRIMARY KEY, study TEXT NOT NULL, source TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS trials (
    key TEXT PRIMARY KEY,
    spec TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('done', 'diverged', 'stopped', 'failed')),
    reason TEXT NOT NULL,
    rounds INTEGER NOT NULL,
    accuracy REAL, loss REAL,              -- after the last round, on the rows the trial is judged on
    metrics TEXT NOT NULL,                 -- JSON: name -> round -> value
    epsilon_claimed REAL NOT NULL, epsilon_local REAL NOT NULL, epsilon_secure REAL NOT NULL,
    epsilon_unsampled REAL NOT NULL,       -- actual eps in the claim's release model, with no credit for sampled rows
    seconds REAL NOT NULL,
    correct BLOB NOT NULL                  -- confirm: per-example correctness on the test set, packed bits
);
CREATE TABLE IF NOT EXISTS stages (        -- which trials make up a stage of a cell, in grid order
    cell TEXT NOT NULL, way TEXT NOT NULL, stage TEXT NOT NULL, position INTEGER NOT NULL, key TEXT NOT NULL,
    PRIMARY KEY (cell, way, stage, position)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS failures (      -- packs that had to be tried again
    number INTEGER PRIMARY KEY, trials INTEGER NOT NULL, first_key TEXT NOT NULL, reason TEXT NOT NULL, at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS sessions (      -- when a driver set out to run what was missing
    number INTEGER PRIMARY KEY, began REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (       -- trials that were handed in together: how fast the sweep went, no more
    number INTEGER PRIMARY KEY, session INTEGER NOT NULL, at REAL NOT NULL, trials INTEGER NOT NULL,
    rounds INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS surroundings (  -- what a driver ran on
    session INTEGER NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (session, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS origins (       -- which driver's workers computed a trial
    key TEXT PRIMARY KEY, session INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS partitions (    -- how many rows of which class each client holds
    setting TEXT NOT NULL, seed INTEGER NOT NULL, counts TEXT NOT NULL, PRIMARY KEY (setting, seed)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS secrets (       -- what a cell's private search follows from; never shown
    cell TEXT PRIMARY KEY, secret BLOB NOT NULL
) WITHOUT ROWID;
"""
# a row is final, but for one that failed: its cause may have passed
REPLACE_FAILED = """ON CONFLICT (key) DO UPDATE SET state = excluded.state, reason = excluded.reason,
    rounds = excluded.rounds, accuracy = excluded.accuracy, loss = excluded.loss, metrics = excluded.metrics,
    epsilon_local = excluded.epsilon_local, epsilon_secure = excluded.epsilon_secure,
    epsilon_unsampled = excluded.epsilon_unsampled, seconds = excluded.seconds,
    correct = excluded.correct WHERE trials.state = 'failed'"""
COLUMNS = (
    "key, spec, state, reason, rounds, accuracy, loss, metrics, "
    "epsilon_claimed, epsilon_local, epsilon_secure, epsilon_unsampled, seconds, correct"
)


@dataclass(frozen=True)
class Row:
    """A trial that has ended."""

    key: str
    spec: str
    """The trial as JSON."""
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

    @property
    def trial(self) -> TrialSpec:
        return TrialSpec.model_validate_json(self.spec)

    def score(self, metric: str) -> float | None:
        """A metric after the last round of a trial that ran to its end."""
        if metric in ("accuracy", "loss"):
            return self.accuracy if metric == "accuracy" else self.loss
        return self.metrics.get(metric, {}).get(self.rounds) if self.state == "done" else None

    def values(self) -> tuple[Any, ...]:
        metrics = json.dumps(self.metrics, separators=(",", ":"))
        epsilons = (self.epsilon_claimed, self.epsilon_local, self.epsilon_secure, self.epsilon_unsampled)
        return (
            *(self.key, self.spec, self.state, self.reason, self.rounds, self.accuracy, self.loss, metrics),
            *epsilons,
            self.seconds,
            self.correct,
        )

    @classmethod
    def read(cls, values: Sequence[Any]) -> Row:
        metrics = {
            name: {int(t): value for t, value in by_round.items()} for name, by_round in json.loads(values[7]).items()
        }
        head, tail = values[:7], values[8:]
        return cls(*head, metrics, *tail)  # type: ignore[call-arg]


@dataclass(frozen=True)
class Session:
    """A driver's stretch of work: when it began, and what it handed in when. It never enters a table."""

    began: float
    batches: list[tuple[float, int, int]]
    """When, how many trials, how many rounds of single trials."""
    surroundings: dict[str, str] = field(default_factory=dict)
    """What it ran on."""
    computed: int = 0
    """Trials in the ledger that are its."""

    @property
    def last(self) -> float:
        return self.batches[-1][0] if self.batches else self.began


class Ledger:
    """Open with `Ledger.write(folder)` (takes the lock) or `Ledger.read(folder)`."""

    def __init__(self, connection: sqlite3.Connection, lock: int | None) -> None:
        self._db = connection
        self._lock = lock

    @classmethod
    @contextlib.contextmanager
    def write(cls, folder: Path) -> Iterator[Ledger]:
        """For the one process that runs the study."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"result folder {folder} cannot be made: {error.strerror}") from None
        lock = _take_lock(folder)
        try:
            connection = _connect(f"file:{_quoted(folder / 'ledger.sqlite')}", folder)
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=FULL")
                connection.executescript(SCHEMA)
                ledger = cls(connection, lock)
                ledger._check_version(folder)
                yield ledger
            finally:
                connection.close()
        finally:
            os.close(lock)  # which also lets go of it

    @classmethod
    @contextlib.contextmanager
    def read(cls, folder: Path) -> Iterator[Ledger]:
        """For anyone who looks, also while the study runs."""
        file = folder / "ledger.sqlite"
        if not file.is_file():
            raise UserError(f"result folder {folder} holds no ledger.sqlite")
        # a reader makes a small index beside the ledger; where it cannot, a ledger that nobody writes is read as it is
        alone = not (folder / "ledger.sqlite-wal").exists() and not _can_write(folder)
        connection = _connect(f"file:{_quoted(file)}?mode=ro{'&immutable=1' if alone else ''}", folder)
        try:
            ledger = cls(connection, None)
            if not ledger._has("failures"):
                raise UserError(f"the ledger in {folder} is empty: its driver ended before it had begun")
            ledger._check_version(folder)
            yield ledger
        except (sqlite3.DatabaseError, ValidationError, json.JSONDecodeError, UnicodeDecodeError) as error:
            # of several lines the first says what, the others say where in a structure that nobody wrote by hand
            raise UserError(f"the ledger in {folder} is damaged: {str(error).splitlines()[0]}") from None
        finally:
            connection.close()

    def _check_version(self, folder: Path) -> None:
        found = self._meta("schema")
        if found is None and self._lock is not None:
            self._db.execute("INSERT INTO meta VALUES ('schema', ?)", (str(SCHEMA_VERSION),))
        elif found != str(SCHEMA_VERSION):
            raise UserError(f"the ledger in {folder} is of version {found}, this program reads {SCHEMA_VERSION}")

    def _meta(self, name: str) -> str | None:
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def copy_to(self, file: Path) -> None:
        """A whole ledger as of now, in one file; also while another process writes."""
        self._db.execute("VACUUM INTO ?", (str(file),))

    # ---- the study

    def add_study(self, study: str, source: str) -> None:
        self._db.execute("INSERT INTO studies (study, source) VALUES (?, ?)", (study, source))

    def study(self) -> tuple[str, str] | None:
        """The study as last run (JSON) and its text."""
        return self._db.execute("SELECT study, source FROM studies ORDER BY number DESC LIMIT 1").fetchone()

    def add_plugins(self, names: Iterable[str]) -> None:
        """What the study was run with, as `--import` names it. A reader is told; nothing of it is loaded unasked."""
        kept = list(dict.fromkeys([*self.plugins(), *names]))
        if kept != self.plugins():
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('plugins', ?)", (json.dumps(kept),))

    def plugins(self) -> list[str]:
        return json.loads(self._meta("plugins") or "[]")

    def add_facts(self, facts: Mapping[str, int]) -> None:
        """Numbers about the data that tables need, such as how many rows there are to judge on."""
        with self._transaction():
            self._db.executemany("INSERT OR IGNORE INTO facts VALUES (?, ?)", facts.items())

    def facts(self) -> dict[str, int]:
        return dict(self._db.execute("SELECT name, value FROM facts"))

    def add_data(self, fingerprints: Mapping[str, str]) -> None:
        """What each data label stands for; a label never changes its meaning in a folder."""
        known = self.fingerprints()
        for label, fingerprint in fingerprints.items():
            if known.get(label, fingerprint) != fingerprint:
                raise UserError(
                    f"data {label!r} has other content than when this folder's study was run; choose another folder"
                )
        with self._transaction():
            self._db.executemany("INSERT OR IGNORE INTO data VALUES (?, ?)", fingerprints.items())

    def fingerprints(self) -> dict[str, str]:
        return dict(self._db.execute("SELECT label, fingerprint FROM data ORDER BY label"))

    # ---- trials

    def add(self, rows: Iterable[Row]) -> None:
        """All or none of them; a row that is there already stays as it is, unless it had failed."""
        handed_in = list(rows)
        with self._transaction():
            if written := self._add(handed_in):
                self._db.executemany(
                    "INSERT OR IGNORE INTO origins VALUES (?, (SELECT coalesce(max(number), 0) FROM sessions))",
                    ((row.key,) for row in handed_in if row.state != "failed"),
                )
                self._db.execute(
                    "INSERT INTO batches (session, at, trials, rounds) "
                    "VALUES ((SELECT coalesce(max(number), 0) FROM sessions), ?, ?, ?)",
                    (time.time(), written, sum(row.rounds for row in handed_in)),
                )

    def _add(self, rows: Iterable[Row]) -> int:
        """How many were new."""
        marks, before = ", ".join("?" * (COLUMNS.count(",") + 1)), self._db.total_changes
        self._db.executemany(
            f"INSERT INTO trials ({COLUMNS}) VALUES ({marks}) {REPLACE_FAILED}", (row.values() for row in rows)
        )
        return self._db.total_changes - before

    def take_rows(self, other: Ledger) -> None:
        """All that another ledger has, with who computed it, when and on what."""
        origins = other.origins()
        with self._transaction():
            self._add(other.rows(other.outcomes()).values())
            for number, session in enumerate(other.sessions()):
                self._take_session(session, [key for key, origin in origins.items() if origin == number])

    def _take_session(self, session: Session, keys: Iterable[str]) -> None:
        """Anew, if it is there: it may have gone on since."""
        known = self._db.execute("SELECT number FROM sessions WHERE began = ?", (session.began,)).fetchone()
        if known is None:
            number = self._db.execute("INSERT INTO sessions (began) VALUES (?)", (session.began,)).lastrowid
        else:
            (number,) = known
            self._db.execute("DELETE FROM batches WHERE session = ?", (number,))
        around = ((number, *said) for said in session.surroundings.items())
        self._db.executemany("INSERT OR REPLACE INTO surroundings VALUES (?, ?, ?)", around)
        batches = ((number, *batch) for batch in session.batches)
        self._db.executemany("INSERT INTO batches (session, at, trials, rounds) VALUES (?, ?, ?, ?)", batches)
        self._db.executemany("INSERT OR IGNORE INTO origins VALUES (?, ?)", ((key, number) for key in keys))

    def origins(self) -> dict[str, int]:
        """By trial, which of `sessions` computed it."""
        if not self._has("origins"):
            return {}
        places = {number: place for place, (number,) in enumerate(self._db.execute("SELECT number FROM sessions"))}
        found = self._db.execute("SELECT key, session FROM origins")
        return {key: places[session] for key, session in found if session in places}

    def outcomes(self, metric: str = "accuracy") -> dict[str, tuple[str, float | None, float | None]]:
        """State, score by this metric and loss of every trial that has ended: what selection needs, and cheap for many
        where the metric has a column."""
        if metric in ("accuracy", "loss"):
            found = self._db.execute(f"SELECT key, state, {metric}, loss FROM trials")
            return {key: (state, score, loss) for key, state, score, loss in found}
        rows = (Row.read(values) for values in self._db.execute(f"SELECT {COLUMNS} FROM trials"))
        return {row.key: (row.state, row.score(metric), row.loss) for row in rows}

    def rows(self, keys: Iterable[str], *, whole: bool = True) -> dict[str, Row]:
        """The rows of these trials, as far as they have ended, in the order of the keys. Not `whole`: without metrics
        and correctness, which are most of a row."""
        wanted = list(dict.fromkeys(keys))
        columns = COLUMNS if whole else COLUMNS.replace("metrics", "'{}'").replace("correct", "x''")
        found = {}
        for start in range(0, len(wanted), KEYS_AT_A_TIME):
            some = wanted[start : start + KEYS_AT_A_TIME]
            marks = ", ".join("?" * len(some))
            for values in self._db.execute(f"SELECT {columns} FROM trials WHERE key IN ({marks})", some):
                found[values[0]] = Row.read(values)
        return {key: found[key] for key in wanted if key in found}

    # ---- stages

    def add_stage(self, cell: str, strategy: str, stage: str, keys: Sequence[str], start: int = 0) -> None:
        with self._transaction():
            self._db.executemany(
                "INSERT OR IGNORE INTO stages VALUES (?, ?, ?, ?, ?)",
                ((cell, strategy, stage, start + position, key) for position, key in enumerate(keys)),
            )

    def stages(self) -> dict[tuple[str, str, str], list[str]]:
        """(cell, way, stage) -> the keys of its trials in grid order."""
        found: dict[tuple[str, str, str], list[str]] = {}
        rows = self._db.execute("SELECT cell, way, stage, key FROM stages ORDER BY cell, way, stage, position")
        for cell, strategy, stage, key in rows:
            found.setdefault((cell, strategy, stage), []).append(key)
        return found

    # ---- private searches

    def secret(self, cell: str) -> bytes:
        """Drawn from the operating system when it is first asked for; from then on the same."""
        self.add_secrets({cell: secrets.token_bytes(SECRET_BYTES)})
        return self.secrets()[cell]

    def add_secrets(self, found: Mapping[str, bytes]) -> None:
        """Those that are there already stay."""
        with self._transaction():
            self._db.executemany("INSERT OR IGNORE INTO secrets VALUES (?, ?)", found.items())

    def secrets(self) -> dict[str, bytes]:
        """By cell; none in a ledger from before they were kept."""
        return dict(self._db.execute("SELECT cell, secret FROM secrets")) if self._has("secrets") else {}

    # ---- how fast it went

    def begin_session(self, surroundings: Mapping[str, str] = MappingProxyType({})) -> None:
        """A driver sets out, on what it says."""
        with self._transaction():
            number = self._db.execute("INSERT INTO sessions (began) VALUES (?)", (time.time(),)).lastrowid
            self._db.executemany(
                "INSERT INTO surroundings VALUES (?, ?, ?)", ((number, *said) for said in surroundings.items())
            )

    def sessions(self) -> list[Session]:
        """Oldest first; none in a ledger from before they were kept."""
        if not self._has("batches"):
            return []
        around: dict[int, dict[str, str]] = defaultdict(dict)
        computed: dict[int, int] = {}
        if self._has("origins"):
            for number, name, value in self._db.execute("SELECT session, name, value FROM surroundings"):
                around[number][name] = value
            computed = dict(self._db.execute("SELECT session, count(*) FROM origins GROUP BY session"))
        found = {
            number: Session(_number(began), [], around[number], computed.get(number, 0))
            for number, began in self._db.execute("SELECT number, began FROM sessions")
        }
        for number, *batch in self._db.execute("SELECT session, at, trials, rounds FROM batches ORDER BY number"):
            if number in found:
                at, trials, rounds = map(_number, batch)
                found[number].batches.append((at, trials, rounds))
        return list(found.values())

    # ---- who holds what

    def add_partitions(self, counts: Mapping[tuple[str, int], list[list[int]]]) -> None:
        """By setting and seed of the partition: a list per client, of its rows by class."""
        with self._transaction():
            self._db.executemany(
                "INSERT OR IGNORE INTO partitions VALUES (?, ?, ?)",
                (
                    (setting, seed, json.dumps(clients, separators=(",", ":")))
                    for (setting, seed), clients in counts.items()
                ),
            )

    def partitions(self) -> dict[tuple[str, int], list[list[int]]]:
        if not self._has("partitions"):
            return {}
        found = self._db.execute("SELECT setting, seed, counts FROM partitions ORDER BY setting, seed")
        return {(setting, seed): json.loads(counts) for setting, seed, counts in found}

    def _has(self, table: str) -> bool:
        return self._db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone() is not None

    # ---- failures

    def add_failure(self, keys: Sequence[str], reason: str) -> None:
        self._db.execute(
            "INSERT INTO failures (trials, first_key, reason, at) VALUES (?, ?, ?, ?)",
            (len(keys), keys[0], reason, time.time()),
        )

    def failures(self) -> list[tuple[int, str, str]]:
        """Packs that failed, oldest first: how many trials, the first one's key, why."""
        return self._db.execute("SELECT trials, first_key, reason FROM failures ORDER BY number").fetchall()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:  # a full disk has rolled it back already
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def _number(value: Any) -> Any:
    """SQLite keeps whatever bytes say, in whatever column."""
    if not isinstance(value, int | float):
        raise sqlite3.DataError(f"{value!r:.50} stands where a number should")
    return value


def _connect(uri: str, folder: Path) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30)
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the second: of a message that quotes what is damaged
        reason = error if shutil.disk_usage(folder).free else "no space left on the disk"
        raise UserError(f"the ledger in {folder} cannot be opened: {reason}") from None
    return connection


def _can_write(folder: Path) -> bool:
    return os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > INDEX_BYTES


def _quoted(path: Path) -> str:
    """A path as SQLite's URI wants it."""
    from urllib.parse import quote

    return quote(str(path.absolute()))


def _take_lock(folder: Path) -> int:
    """The kernel lets go of the lock when its holder ends, however it ends: a dead driver never blocks the next."""
    descriptor = os.open(folder / "ledger.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(descriptor, 200).decode(errors="replace").strip()
        os.close(descriptor)
        raise UserError(f"result folder {folder} is in use by {holder or 'another process'}") from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return descriptor

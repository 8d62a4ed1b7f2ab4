"""Counts of trials that the ledger keeps next to them, so that `fedsweep status` need not read a million rows.

Functions that write are called inside the transaction that changes the trials or the stages. `recount` computes all
counts from the trials and stages themselves; the others only update what has changed.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from orchestrator.results import checks

KEYS_PER_QUERY = 500  # SQLite limits the number of parameters
OPENED = "opened"
"""In place of a state: all trials of the stage."""
EVERYWHERE = (0, "", "")
"""In place of a stage: the trials of all stages, each counted once."""
SCHEMA = """
CREATE INDEX IF NOT EXISTS stages_of_trial ON stages (trial);
CREATE INDEX IF NOT EXISTS failed_trials ON trials (state) WHERE state = 'failed';
CREATE TABLE IF NOT EXISTS counts (        -- trials of a stage, by state
    cell INTEGER NOT NULL, strategy TEXT NOT NULL, stage TEXT NOT NULL, state TEXT NOT NULL, trials INTEGER NOT NULL,
    PRIMARY KEY (cell, strategy, stage, state)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS origins (       -- trials by session, nodes (JSON) and digest of the code that computed them
    number INTEGER PRIMARY KEY, session INTEGER NOT NULL, nodes TEXT NOT NULL, code TEXT NOT NULL,
    trials INTEGER NOT NULL, UNIQUE (session, nodes, code)
);
"""
COUNTED = """
SELECT cell, strategy, stage, 'opened', count(*) FROM stages GROUP BY cell, strategy, stage
UNION ALL SELECT s.cell, s.strategy, s.stage, t.state, count(*) FROM stages s JOIN trials t ON t.number = s.trial
    GROUP BY s.cell, s.strategy, s.stage, t.state
UNION ALL SELECT 0, '', '', 'opened', count(DISTINCT trial) FROM stages HAVING count(*) > 0
UNION ALL SELECT 0, '', '', state, count(*) FROM trials WHERE number IN (SELECT trial FROM stages) GROUP BY state
"""

Place = tuple[int, str, str]
"""Number of a cell, name of the search variant, stage."""


def recount(db: sqlite3.Connection) -> None:
    db.execute("DELETE FROM counts")
    db.execute(f"INSERT INTO counts {COUNTED}")
    computed = db.execute("SELECT count(*), origin FROM trials WHERE origin IS NOT NULL GROUP BY origin").fetchall()
    db.execute("UPDATE origins SET trials = 0")
    db.executemany("UPDATE origins SET trials = ? WHERE number = ?", computed)
    db.execute("DELETE FROM origins WHERE trials = 0")


def are_right(db: sqlite3.Connection) -> bool:
    """Whether the counts by stage and state are those of the trials and stages. `origins` is not checked."""
    counted = db.execute(f"SELECT * FROM ({COUNTED}) ORDER BY 1, 2, 3, 4").fetchall()
    return counted == db.execute("SELECT * FROM counts WHERE trials != 0 ORDER BY 1, 2, 3, 4").fetchall()


def numbers(db: sqlite3.Connection, keys: Sequence[str]) -> dict[str, int]:
    """The numbers of these trials; new trials get the next numbers."""
    found = dict(_select_in(db, "SELECT key, number FROM trial_keys WHERE key IN", keys))
    new = [key for key in dict.fromkeys(keys) if key not in found]
    (last,) = db.execute("SELECT coalesce(max(number), 0) FROM trial_keys").fetchone()
    numbered = {key: number for number, key in enumerate(new, checks.count(last) + 1)}
    db.executemany("INSERT INTO trial_keys (key, number) VALUES (?, ?)", numbered.items())
    return found | numbered


def states(db: sqlite3.Connection, trials: Iterable[int]) -> dict[int, str]:
    """The state of every one of these trials that has ended."""
    return dict(_select_in(db, "SELECT number, state FROM trials WHERE number IN", list(trials)))


def opened(db: sqlite3.Connection, place: Place, members: Sequence[tuple[int, str]]) -> None:
    """Add trials to a stage, by position; positions that are taken stay as they are."""
    taken = {
        position
        for (position,) in db.execute(
            "SELECT position FROM stages WHERE cell = ? AND strategy = ? AND stage = ? AND position >= ?",
            (*place, min((position for position, _ in members), default=0)),
        )
    }
    free = [(position, key) for position, key in members if position not in taken]
    by_key = numbers(db, [key for _, key in free])
    new, trials = [(position, by_key[key]) for position, key in free], list(by_key.values())
    known = {trial for (trial,) in _select_in(db, "SELECT trial FROM stages WHERE trial IN", trials)}
    ended = states(db, trials)
    db.executemany("INSERT INTO stages VALUES (?, ?, ?, ?, ?)", ((*place, *member) for member in new))
    changes = Counter({(*place, OPENED): len(new), (*EVERYWHERE, OPENED): len(trials) - len(known)})
    changes.update((*place, ended[trial]) for _, trial in new if trial in ended)
    changes.update((*EVERYWHERE, ended[trial]) for trial in trials if trial in ended and trial not in known)
    _change(db, changes)


def closed(db: sqlite3.Connection, place: Place, start: int) -> None:
    """Remove the trials of a stage from a position on."""
    where = "WHERE cell = ? AND strategy = ? AND stage = ? AND position >= ?"
    trials = [trial for (trial,) in db.execute(f"SELECT trial FROM stages {where}", (*place, start))]
    db.execute(f"DELETE FROM stages {where}", (*place, start))
    left = {trial for (trial,) in _select_in(db, "SELECT trial FROM stages WHERE trial IN", trials)}
    ended, gone = states(db, trials), set(trials) - left
    removed = Counter({(*place, OPENED): len(trials), (*EVERYWHERE, OPENED): len(gone)})
    removed.update((*place, ended[trial]) for trial in trials if trial in ended)
    removed.update((*EVERYWHERE, ended[trial]) for trial in gone if trial in ended)
    _change(db, {counted: -count for counted, count in removed.items()})


def ended(db: sqlite3.Connection, before: Mapping[int, str], after: Mapping[int, str]) -> None:
    """Count trials under their new states. `before`: the old states of the trials that had already ended."""
    changed = [trial for trial, state in after.items() if before.get(trial) != state]
    changes: Counter[tuple[int, str, str, str]] = Counter()
    seen = set()
    for *place, trial in _select_in(db, "SELECT cell, strategy, stage, trial FROM stages WHERE trial IN", changed):
        everywhere = [] if trial in seen else [EVERYWHERE]
        seen.add(trial)
        for cell, strategy, stage in (place, *everywhere):
            changes[cell, strategy, stage, after[trial]] += 1
            if trial in before:
                changes[cell, strategy, stage, before[trial]] -= 1
    _change(db, changes)


def computed(db: sqlite3.Connection, places: Iterable[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Count one trial of the last session for each of these places: the nodes, as a JSON list, and the digest of their
    code. Returns the number of every place's origin."""
    (session,) = db.execute("SELECT coalesce(max(number), 0) FROM sessions").fetchone()
    counted = Counter(places)
    origins = {place: origin(db, session, *place) for place in counted}
    changes = ((count, origins[place]) for place, count in counted.items())
    db.executemany("UPDATE origins SET trials = trials + ? WHERE number = ?", changes)
    return origins


def origin(db: sqlite3.Connection, session: int, nodes: str, code: str) -> int:
    """The number of an origin, which is added if it is not known."""
    known = (session, nodes, code)
    db.execute("INSERT OR IGNORE INTO origins (session, nodes, code, trials) VALUES (?, ?, ?, 0)", known)
    return db.execute("SELECT number FROM origins WHERE session = ? AND nodes = ? AND code = ?", known).fetchone()[0]


def _change(db: sqlite3.Connection, changes: Mapping[tuple[int, str, str, str], int]) -> None:
    db.executemany(
        "INSERT INTO counts VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET trials = trials + excluded.trials",
        ((*place, count) for place, count in changes.items() if count),
    )


def _select_in(db: sqlite3.Connection, query: str, trials: Sequence[str | int]) -> Iterator[tuple]:
    """The rows of a query that ends with IN, for these keys or numbers of trials."""
    for start in range(0, len(trials), KEYS_PER_QUERY):
        chunk = trials[start : start + KEYS_PER_QUERY]
        yield from db.execute(f"{query} ({', '.join('?' * len(chunk))})", chunk)

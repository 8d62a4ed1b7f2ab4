"""Counts of trials that the ledger keeps next to them, so that `fedsweep status` need not read a million rows.

Every function is a part of the transaction that changes the trials or the stages. `recount` computes all counts from
the trials and stages themselves; the others only what has changed.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

KEYS_PER_QUERY = 500  # SQLite limits the number of parameters
OPENED = "opened"
"""In place of a state: all trials of the stage."""
EVERYWHERE = (0, "", "")
"""In place of a stage: the trials of all stages, each counted once."""
SCHEMA = """
CREATE INDEX IF NOT EXISTS stages_of_trial ON stages (key);
CREATE INDEX IF NOT EXISTS failed_trials ON trials (key) WHERE state = 'failed';
CREATE TABLE IF NOT EXISTS counts (        -- trials of a stage, by state
    cell INTEGER NOT NULL, strategy TEXT NOT NULL, stage TEXT NOT NULL, state TEXT NOT NULL, trials INTEGER NOT NULL,
    PRIMARY KEY (cell, strategy, stage, state)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS computed (      -- trials by the session and the nodes that computed them
    session INTEGER NOT NULL, nodes TEXT NOT NULL, trials INTEGER NOT NULL, PRIMARY KEY (session, nodes)
) WITHOUT ROWID;
"""
COUNTED = """
SELECT cell, strategy, stage, 'opened', count(*) FROM stages GROUP BY cell, strategy, stage
UNION ALL SELECT s.cell, s.strategy, s.stage, t.state, count(*) FROM stages s JOIN trials t ON t.key = s.key
    GROUP BY s.cell, s.strategy, s.stage, t.state
UNION ALL SELECT 0, '', '', 'opened', count(DISTINCT key) FROM stages HAVING count(*) > 0
UNION ALL SELECT 0, '', '', state, count(*) FROM trials WHERE key IN (SELECT key FROM stages) GROUP BY state
"""

Place = tuple[int, str, str]
"""Number of a cell, name of the search variant, stage."""


def recount(db: sqlite3.Connection) -> None:
    db.execute("DELETE FROM counts")
    db.execute(f"INSERT INTO counts {COUNTED}")
    db.execute("DELETE FROM computed")
    db.execute("INSERT INTO computed SELECT session, nodes, count(*) FROM origins GROUP BY session, nodes")


def are_right(db: sqlite3.Connection) -> bool:
    """Whether the counts are those of the trials and stages."""
    counted = db.execute(f"SELECT * FROM ({COUNTED}) ORDER BY 1, 2, 3, 4").fetchall()
    return counted == db.execute("SELECT * FROM counts WHERE trials != 0 ORDER BY 1, 2, 3, 4").fetchall()


def states(db: sqlite3.Connection, keys: Iterable[str]) -> dict[str, str]:
    """The states of those of these trials that have ended."""
    return dict(_by_key(db, "SELECT key, state FROM trials WHERE key IN", list(keys)))


def opened(db: sqlite3.Connection, place: Place, members: Sequence[tuple[int, str]]) -> None:
    """Add trials to a stage, by position; positions that are taken stay as they are."""
    taken = {
        position
        for (position,) in db.execute(
            "SELECT position FROM stages WHERE cell = ? AND strategy = ? AND stage = ? AND position >= ?",
            (*place, min((position for position, _ in members), default=0)),
        )
    }
    new = [(position, key) for position, key in members if position not in taken]
    keys = list(dict.fromkeys(key for _, key in new))
    known = {key for (key,) in _by_key(db, "SELECT key FROM stages WHERE key IN", keys)}
    ended = states(db, keys)
    db.executemany("INSERT INTO stages VALUES (?, ?, ?, ?, ?)", ((*place, *member) for member in new))
    changes = Counter({(*place, OPENED): len(new), (*EVERYWHERE, OPENED): len(keys) - len(known)})
    changes.update((*place, ended[key]) for _, key in new if key in ended)
    changes.update((*EVERYWHERE, ended[key]) for key in keys if key in ended and key not in known)
    _change(db, changes)


def ended(db: sqlite3.Connection, before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Trials have these states now. `before`: the states of those that had ended before."""
    changed = [key for key, state in after.items() if before.get(key) != state]
    changes: Counter[tuple[int, str, str, str]] = Counter()
    seen = set()
    for *place, key in _by_key(db, "SELECT cell, strategy, stage, key FROM stages WHERE key IN", changed):
        everywhere = [] if key in seen else [EVERYWHERE]
        seen.add(key)
        for cell, strategy, stage in (place, *everywhere):
            changes[cell, strategy, stage, after[key]] += 1
            if key in before:
                changes[cell, strategy, stage, before[key]] -= 1
    _change(db, changes)


def computed(db: sqlite3.Connection, nodes: Iterable[str]) -> None:
    """The last session has computed one trial on each of these lists of nodes, as JSON."""
    for names, count in Counter(nodes).items():
        db.execute(
            "INSERT INTO computed VALUES ((SELECT coalesce(max(number), 0) FROM sessions), ?, ?) "
            "ON CONFLICT DO UPDATE SET trials = trials + excluded.trials",
            (names, count),
        )


def _change(db: sqlite3.Connection, changes: Mapping[tuple[int, str, str, str], int]) -> None:
    db.executemany(
        "INSERT INTO counts VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET trials = trials + excluded.trials",
        ((*place, count) for place, count in changes.items() if count),
    )


def _by_key(db: sqlite3.Connection, query: str, keys: Sequence[str]) -> Iterator[tuple]:
    for start in range(0, len(keys), KEYS_PER_QUERY):
        chunk = keys[start : start + KEYS_PER_QUERY]
        yield from db.execute(f"{query} ({', '.join('?' * len(chunk))})", chunk)

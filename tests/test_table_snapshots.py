"""Every table file equals its snapshot in tests/snapshots/, for the hand-written ledgers of table_snapshots.py.

`make goldens` renews the snapshots and lists the files that changed.
"""

from difflib import unified_diff

import pytest
from table_snapshots import CASES, SNAPSHOTS, halving, kept, renew, written


@pytest.mark.parametrize("name", CASES)
def test_tables_match_their_snapshots(tmp_path, name):
    """After an intended change run `make goldens` and read the diff."""
    found, expected = written(name, tmp_path), kept(name)
    assert list(found) == list(expected)
    changed = [
        line
        for place in found
        if found[place] != expected[place]
        for line in unified_diff(
            expected[place].splitlines(), found[place].splitlines(), place, place, lineterm="", n=0
        )
    ]
    if changed:  # pytest's own way to set long texts side by side takes minutes
        pytest.fail("\n".join(changed), pytrace=False)


def test_renewed_snapshots_are_listed(tmp_path, monkeypatch):
    """Changed, removed and new files; nothing the second time."""
    monkeypatch.setattr("table_snapshots.SNAPSHOTS", tmp_path / "snapshots")
    monkeypatch.setattr("table_snapshots.CASES", {"halving": halving})
    assert all(line.endswith(": is new") for line in renew(tmp_path / "1"))
    (tmp_path / "snapshots" / "halving" / "tables" / "seeds.csv").write_text("other")
    (tmp_path / "snapshots" / "halving" / "more.md").write_text("more")
    assert renew(tmp_path / "2") == [
        "snapshots/halving/more.md: is gone",
        "snapshots/halving/tables/seeds.csv: has changed",
    ]
    assert renew(tmp_path / "3") == []


def test_every_snapshot_has_a_case():
    """A snapshot without a case would never be compared."""
    assert sorted(path.name for path in SNAPSHOTS.iterdir()) == sorted(CASES)

"""Every file that tables are written to, as it was when somebody last looked at it: tests/snapshots/.

The ledgers are filled by hand. Together they visit what the tables can have to say; `make goldens` writes down what
they say now, and which files are not what they were.
"""

from difflib import unified_diff

import pytest
from table_snapshots import CASES, SNAPSHOTS, halving, kept, renew, written


@pytest.mark.parametrize("name", CASES)
def test_tables_say_what_they_said(tmp_path, name):
    """If this is meant to be: `make goldens`, and read what it changed."""
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


def test_what_is_written_down_anew_is_named(tmp_path, monkeypatch):
    """A file that changed, one that is gone and those that are new; the second time nothing is."""
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
    """One that lost its case would be compared with nothing."""
    assert sorted(path.name for path in SNAPSHOTS.iterdir()) == sorted(CASES)

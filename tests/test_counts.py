"""The counts that the ledger keeps are those of its trials, whatever was done to them."""

import random

import reported
from handmade_rows import row

from orchestrator.results import counts
from orchestrator.results.ledger import Ledger
from orchestrator.study.cell_id import CellId

CELLS = [CellId("toy", "iid", "dp-fedgd", epsilon) for epsilon in (1.0, 8.0)]


def key(number: int) -> str:
    return row(number).key


def test_counts_follow_every_change(tmp_path):
    """Stages share trials, failed trials run again, trials end before their stage opens, trials are forgotten."""
    chance, folder = random.Random(7), tmp_path / "r"
    with Ledger.write(folder) as ledger:
        ledger.begin_session()
        for _ in range(60):
            numbers = [chance.randrange(40) for _ in range(chance.randrange(1, 6))]
            cell, stage = chance.choice(CELLS), chance.choice(["coarse", "fine", "confirm"])
            what = chance.randrange(8)
            if what < 3:
                ledger.add_stage(cell, "grid", stage, list(map(key, numbers)), chance.randrange(5))
            elif what < 7:
                rows = [row(number, chance.choice(["done", "diverged", "failed"])) for number in set(numbers)]
                ledger.add(rows, {each.key: ([chance.choice("ab")], chance.choice(["", "code"])) for each in rows})
            else:
                ledger.forget(map(key, numbers), {(cell, "grid", stage): chance.randrange(3)})
            assert counts.are_right(ledger._db)
        by_node, computed = ledger.trials_by_node(), ledger.sessions()[0].computed
        counts.recount(ledger._db)
        assert (ledger.trials_by_node(), ledger.sessions()[0].computed) == (by_node, computed)


def test_a_merged_ledger_has_the_counts_of_its_trials(tmp_path):
    with Ledger.write(tmp_path / "a") as ours, Ledger.write(tmp_path / "b") as theirs:
        for ledger, numbers in ((ours, range(5)), (theirs, range(3, 9))):
            ledger.begin_session()
            ledger.add_stage(CELLS[0], "grid", "coarse", [key(number) for number in range(10)])
            ledger.add(
                (row(number) for number in numbers), {key(number): ((), str(len(numbers))) for number in numbers}
            )
        ours.copy_rows(theirs)
        ours.recount()
        assert counts.are_right(ours._db)
        assert ours.totals() == {"opened": 10, "done": 9}
        assert sorted(session.computed for session in ours.sessions()) == [4, 5]
        assert ours.trials_by_code() == {"5": 5, "6": 4}


def test_a_winner_is_forgotten_when_another_trial_ends(tmp_path):
    """Confirm runs do not change it."""
    with Ledger.write(tmp_path) as ledger:
        ledger.add_stage(CELLS[0], "grid", "coarse", [key(0), key(1)])
        ledger.add_stage(CELLS[0], "grid", "confirm", [key(2)])
        ledger.add([row(0)])
        ledger.set_winner(CELLS[0], "grid", [[key(0)], 50.0, 0.0, 0, 1])
        ledger.add([row(2)])
        assert list(ledger.winners()) == [(CELLS[0], "grid")]
        ledger.add([row(1)])
        assert ledger.winners() == {}


def test_check_finds_wrong_counts_and_repairs_them(tmp_path, fedsweep):
    reported.write(tmp_path)
    assert fedsweep("check", str(tmp_path))[0] == 0
    with Ledger.write(tmp_path) as ledger:
        ledger._db.execute("UPDATE counts SET trials = trials + 1 WHERE cell = 1 AND state = 'done'")
    code, out, _ = fedsweep("check", str(tmp_path))
    assert (code, out.strip()) == (1, "damaged: the counts of trials that status shows")
    assert fedsweep("check", str(tmp_path), "--repair")[0] == 0
    assert fedsweep("check", str(tmp_path))[0] == 0

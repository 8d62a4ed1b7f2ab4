"""How many rounds a slot asks its federation for in one call."""

from types import SimpleNamespace

import pytest

from trainables.federation import pack_runner
from trainables.federation.messages import Order
from trainables.federation.pack_runner import MOST_ROUNDS, PackRunner


class Federation:
    """Its rounds take as long as `seconds` says, on a clock of its own. The lanes end after round `until`."""

    def __init__(self, seconds, until=1000):
        self.seconds, self.until, self.now, self.t, self.calls = seconds, until, 0.0, 0, []

    def lanes_that_fit(self, trials, data):
        return None

    def open(self, *_):
        pass

    def checkpoint(self):
        raise AssertionError("the writer asks for none")

    def progress(self, until):
        first, self.t = self.t, min(until, self.until)
        self.calls.append(self.t - first)
        self.now += sum(self.seconds(t) for t in range(first, self.t))
        return SimpleNamespace(running=int(self.t < self.until), round=self.t, computing_s=self.now, results=())


@pytest.fixture
def run(monkeypatch):
    def run(federation, every=10, rounds=1000):
        monkeypatch.setattr(pack_runner, "time", SimpleNamespace(monotonic=lambda: federation.now))
        runner = PackRunner("slot", federation, SimpleNamespace())
        runner._writer = SimpleNamespace(
            start_pack=lambda keys: None,
            save_if_due=lambda *_: None,
            end_pack=lambda: None,
            notes=[],
            saved="",
            saved_round=0,
        )
        trial = SimpleNamespace(key="a", evaluate_every=every, last_round=rounds, stop_after=None)
        runner.start(Order(1, [trial]))
        reports = []
        while not reports or reports[-1].kind != "ended":
            reports += filter(None, [runner.advance()])
        return reports

    return run


def test_a_call_takes_about_half_a_second_whatever_is_evaluated(run):
    federation = Federation(lambda t: 1 / 64, until=106)
    run(federation)
    assert federation.calls == [10, 32, 32, 32]


def test_slow_rounds_are_asked_for_one_by_one(run):
    federation = Federation(lambda t: 2.0, until=13)
    reports = run(federation)
    assert federation.calls == [10, 1, 1, 1]
    assert [report.round for report in reports] == [10, 11, 12, 13], "progress is reported after every call"


def test_rounds_that_become_slow_delay_one_call_only(run):
    """A call cannot be interrupted, so it never has many rounds."""
    federation = Federation(lambda t: 0.001 if t < 150 else 1.0, until=220)
    run(federation)
    assert max(federation.calls) == MOST_ROUNDS
    assert federation.calls[:3] == [10, MOST_ROUNDS, MOST_ROUNDS]
    assert federation.calls[3] <= 1


def test_the_report_has_the_last_round_that_was_computed(run):
    """All lanes may diverge within a call."""
    federation = Federation(lambda t: 0.001, until=37)
    assert run(federation)[-1].round == 37


def test_the_first_call_is_not_longer_if_few_rounds_are_evaluated(run):
    federation = Federation(lambda t: 1.0, until=MOST_ROUNDS + 1)
    run(federation, every=1000)
    assert federation.calls == [MOST_ROUNDS, 1]

"""Searches replayed on a dense table (benchmarks/replay.py)."""

from __future__ import annotations

import handmade_ledgers
import numpy as np
import pytest

from benchmarks import search_time
from benchmarks.replay import ROUNDS, RUNGS, Dense
from benchmarks.searches import Plan, Task, measure, read

AXES = {"learning_rate": tuple(10.0**k for k in np.linspace(-2, 1, 8)), "rho": tuple(10.0**k for k in range(-2, 3))}
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)


@pytest.fixture
def table(monkeypatch):
    """The best learning rate rises with eps; scores of seeds differ by 0.3 points."""
    random = np.random.default_rng(5)
    rate, rho = (np.log10(values).ravel() for values in np.meshgrid(*AXES.values(), indexing="ij"))
    best = -1 + np.log10(EPSILONS)[:, None]
    means = 60 + 8 * np.log10(EPSILONS)[:, None] - 6 * (rate - best) ** 2 - (rho - 1) ** 2
    scores = means[:, None] + 0.3 * random.normal(size=(len(EPSILONS), 10, rate.size))
    made = Dense("made-cifar10", "dp-fedsofim", EPSILONS, AXES, {ROUNDS: scores, **dict.fromkeys(RUNGS, scores - 5)})
    monkeypatch.setattr("benchmarks.searches.read", lambda folders, name: made)
    return made


@pytest.mark.parametrize("strategy", ["surface", "grid", "random", "halving", "optuna"])
def test_every_strategy_can_be_replayed(table, strategy):
    trials, settings = {
        "surface": (12, {"values": 1, "extend": False}),
        "grid": (None, {}),
        "optuna": (8, {"batch": 4, "sampler": "tpe"}),
    }.get(strategy, (8, {}))
    line = measure(Task((), "made", Plan(strategy, strategy, trials, settings), 0))
    assert [len(line["regrets"][kind]) for kind in ("searched", "contest only", "no trial")] == [3, 2, 2]
    assert all(0 <= value < 30 for values in line["regrets"].values() for value in values)
    if strategy in ("surface", "grid"):
        assert max(line["regrets"]["searched"]) < 1
    assert max(line["search_rounds"]) <= ROUNDS * 200


def test_a_table_that_does_not_exist(tmp_path):
    assert read((tmp_path,), "fedsofim3-crc5") is None


def test_the_time_of_a_search_is_measured_again_with_the_same_trials(tmp_path):
    """Grid: 3 coarse and 4 fine configurations (0.1 is in both), two confirm seeds; 2 rounds of each are timed."""
    axes = {"coarse": {"learning_rate": [0.01, 0.1, 1]}, "fine": {"learning_rate": [0.05, 0.1, 0.2, 0.5]}}
    tiny = handmade_ledgers.study(
        methods=[{"name": "dp-fedgd", **axes}],
        epsilons=[1],
        seeds={"search": [1], "contest": [], "confirm": [2, 3]},
        search={"refine": "table"},
    )
    first = search_time.measure(search_time.searched_by("grid", tiny), tmp_path / "grid", "here")
    again = search_time.repeat(tmp_path / "grid", rounds=2, name="here")
    assert first["trials"] == again["trials"] == 8
    assert again["trial_rounds"] == 16
    assert first["rounds_s"] > 0
    assert again["rounds_s"] > 0

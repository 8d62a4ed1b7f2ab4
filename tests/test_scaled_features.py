"""Features scaled by a declared length or a private one: as if the data were scaled; accounted, on any hosts."""

import math
from dataclasses import replace

import numpy as np
import pytest
import small

from trainables import methods
from trainables.audit import shift_checks
from trainables.data import features
from trainables.errors import UserError
from trainables.federation import pack
from trainables.federation.pack import LENGTHS, check, plan_of
from trainables.federation.problem import Problem
from trainables.federation.trial_spec import Preprocess
from trainables.privacy import lengths
from trainables.privacy.gaussian import mu_of

GD = methods.get("dp-fedgd").check({})
METHODS = {
    "dp-fedgd": {},
    "dp-scaffold": {"local_steps": 2},
    "dp-fedfc": {},
    "dp-fedadamw": {"local_steps": 2, "sampling_rate": 0.2},
}


def scaled_problem(factor):
    """The small problem with all features multiplied by a factor."""
    of = small.problem()
    arrays = {name: getattr(of.data, name) for name in ("x_train", "y_train", "x_test", "y_test")}
    arrays |= {name: arrays[name] * np.float32(factor) for name in ("x_train", "x_test")}
    data = features.from_arrays(arrays)
    content = of.spec.data.model_copy(update={"fingerprint": data.fingerprint})
    return Problem.prepare(data, of.spec.model_copy(update={"data": content}))


def preprocessed(of, name="dp-fedgd", hypers=None, seed=42, **options):
    trial = small.trial(of, name, METHODS.get(name) if hypers is None else hypers, seed=seed)
    return trial.model_copy(update={"preprocess": Preprocess(**options)})


@pytest.mark.parametrize("center", [0.0, 0.1])
@pytest.mark.parametrize("name", METHODS)
def test_a_declared_length_has_the_effect_of_scaled_data(name, center):
    long, plain = scaled_problem(64.0), scaled_problem(0.5)
    declared = preprocessed(long, name, center=center, bound=6.0, length=1024.0)
    expected, of_plain = small.weights_after(11, [preprocessed(plain, name, center=center, bound=6.0)], plain)
    weights, of_long = small.weights_after(11, [declared], long)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    raw, expected_raw = (server.weights().numpy().reshape(13, -1) for server in (of_long, of_plain))
    raw[:-1] *= 128
    np.testing.assert_allclose(raw, expected_raw, rtol=0, atol=1e-5 * np.abs(expected_raw).max())


@pytest.mark.parametrize("level", ["record", "user"])
def test_the_private_length_is_the_typical_one(level):
    of = scaled_problem(64.0)
    typical = np.median(np.linalg.norm(of.data.x_train, axis=1))
    trial = preprocessed(of, scale=0.1, center=0.1, bound=10.0)
    trial = trial.model_copy(update={"privacy": trial.privacy.model_copy(update={"level": level, "epsilon": 1000.0})})
    _, server = small.weights_after(1, [trial], of)
    (factor,) = server._work.factor
    assert 0.8 <= typical / server._work.length[0] <= 1.25
    assert 4 <= typical * factor <= 16
    assert math.log2(factor).is_integer()


def test_hidden_by_noise_the_length_is_that_of_standardised_features():
    shares, std = np.zeros((2, lengths.BINS)), np.array([1.0, 200.0])
    shares[:, 20] = 0.9  # lengths from 2^12 to 2^13
    found = lengths.typical(shares, std, [500, 500], False, 64)
    assert found.tolist() == pytest.approx([2**12.5, 8.0])


def test_the_typical_length_is_where_most_rows_are():
    """In the middle of a bin that has all rows, whichever of its neighbours noise favours; else between bins."""
    shares, std = np.zeros((4, lengths.BINS)), np.full(4, 0.1)
    shares[:, 12] = 1.0, 1.0, 0.6, 0.5
    shares[0, 11] = shares[1, 13] = 0.02
    shares[2, 13], shares[3, 11] = 0.4, 0.5
    found = np.log2(lengths.typical(shares, std, [500, 500], False, 64))
    assert found.tolist() == [4.5, 4.5, 5.0, 4.0]


@pytest.mark.parametrize("adjacency", ["replace-one", "zero-out"])
def test_the_budget_is_shared(adjacency):
    of = small.problem()
    trial = preprocessed(of, scale=0.05, center=0.15)
    trial = trial.model_copy(update={"privacy": trial.privacy.model_copy(update={"adjacency": adjacency})})
    plan = plan_of(trial, of.partition.sizes)
    by_purpose = {event.purpose: plan.mu_of(event, "local") ** 2 for event in plan.events}
    total = mu_of(8.0, 1e-5) ** 2
    assert by_purpose[LENGTHS] == pytest.approx(0.05 * total, rel=1e-5)
    assert by_purpose["centre"] == pytest.approx(0.15 * total, rel=1e-5)
    assert sum(by_purpose.values()) <= total
    moved = math.sqrt(2) if adjacency == "replace-one" else 1.0
    assert plan.noise_std[LENGTHS] == pytest.approx(moved / math.sqrt(by_purpose[LENGTHS]), rel=1e-5)


def test_the_result_depends_neither_on_hosts_nor_on_restarts_nor_on_other_lanes():
    of = scaled_problem(30.0)
    trials = [preprocessed(of, seed=seed, scale=0.1, center=0.1, bound=10.0, shrink=True) for seed in range(7)]
    small.assert_same_bits(trials, of)


def test_a_length_is_declared_or_estimated():
    of = small.problem()
    with pytest.raises(UserError, match=r"length = 3 and scale = 0.1: give only one of them"):
        check(preprocessed(of, scale=0.1, length=3.0), of)
    with pytest.raises(UserError, match=r"center \+ scale"):
        check(preprocessed(of, scale=0.6, center=0.6), of)


def scaled_cases(level):
    return [case for case in shift_checks.cases(methods.get("dp-fedgd"), GD, level) if case.name == "scaled features"]


@pytest.mark.parametrize("level", ["record", "user"])
def test_no_record_is_more_visible_than_the_account_says(level, monkeypatch):
    """The shift of the noise that hides a record costs at most what the account says, for every release."""
    only = scaled_cases(level)
    assert len(only) == 2
    monkeypatch.setattr(shift_checks, "cases", lambda *_: only)
    assert shift_checks.failure(methods.get("dp-fedgd"), GD, level) == ""


def test_too_little_noise_in_the_lengths_is_found(monkeypatch):
    plain, only = pack.with_preprocessing, scaled_cases("record")

    def cheating(events, trial):
        return tuple(
            replace(event, sensitivity=event.sensitivity / 2) if event.purpose == LENGTHS else event
            for event in plain(events, trial)
        )

    monkeypatch.setattr(shift_checks, "cases", lambda *_: only)
    monkeypatch.setattr(pack, "with_preprocessing", cheating)
    assert "lengths" in shift_checks.failure(methods.get("dp-fedgd"), GD, "record")


# ---- the typical length from the shares of rows by bin; bin b holds lengths from 2^(b - 8) to 2^(b - 7)

CLIENTS = [50, 50]


def typical(by_bin, std=0.0, sizes=CLIENTS, users=False):
    shares = np.zeros((1, 24))
    for number, share in by_bin.items():
        shares[0, number] = share
    return float(lengths.typical(shares, np.array([std]), sizes, users, features=9)[0])


@pytest.mark.parametrize(
    ("by_bin", "exponent"),
    [
        ({9: 0.1, 10: 0.5, 11: 0.3, 12: 0.1}, 2.75),  # bins 9 to 11: the mean is 10.72
        ({9: 0.1, 10: 0.3, 11: 0.5, 12: 0.1}, 3.25),  # bins 10 to 12: 11.28
        ({9: 0.1, 10: 0.4, 11: 0.4, 12: 0.1}, 2.75),  # the first of two equal bins
        ({3: 0.45, 15: 0.3, 16: 0.25}, 8.0),  # no bin has as many rows as 3, but two neighbours have more
        ({0: 0.9, 1: 0.1}, -7.5),
        ({22: 0.1, 23: 0.9}, 15.5),
        ({9: -0.3, 10: 0.6, 11: 0.4}, 3.0),  # noise made a share negative
        ({8: 0.2, 9: 0.1, 10: 0.4, 11: 0.2, 13: 0.1}, 2.75),  # only neighbours of the bin with most rows count
    ],
)
def test_the_typical_length_is_a_mean_around_the_fullest_bin(by_bin, exponent):
    assert typical(by_bin) == np.float32(2.0**exponent)


@pytest.mark.parametrize(
    ("std", "users", "found"), [(9.9, False, True), (10.1, False, False), (0.19, True, True), (0.21, True, False)]
)
def test_bins_that_may_be_noise_alone_are_not_believed(std, users, found):
    """0.6 against three standard deviations: of two bins, two clients' noise each, over 100 rows, or over two users."""
    assert typical({10: 0.6, 2: 0.4}, std, users=users) == (np.float32(2.0**2.5) if found else 3.0)


def test_shares_that_are_noise_alone(recwarn):
    """With a tiny budget, every bin may have a negative share."""
    assert typical(dict.fromkeys(range(24), -0.1), std=1000.0) == 3.0
    assert not recwarn.list

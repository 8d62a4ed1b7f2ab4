"""`fedsweep check-method` catches every method of tests/cheats.py, and no honest one."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cheats
import pytest
from nodes import wait_for

from trainables import methods
from trainables.audit import contract, noise_shift, shift_checks
from trainables.audit.neighbouring_data import pairs, problem_for
from trainables.audit.paired import from_zero, most_visible
from trainables.federation.problem import ProblemData
from trainables.federation.trial_spec import Preprocess, TrialSpec
from trainables.methods import METHODS
from trainables.privacy.plan import ADJACENCIES, RELEASES, PrivacySettings


@pytest.fixture
def registered(monkeypatch):
    def register(method):
        monkeypatch.setitem(methods.METHODS, method.name, method)
        return method

    return register


def test_a_step_is_compared_with_all_that_a_method_may_read():
    """Such as the clip, which is no hyperparameter of the method."""

    class InUnitsOfTheClip(type(METHODS["dp-fedgd"])):
        name = "in-units-of-the-clip"

        def step(self, t, theta, G, state, hypers):
            return super().step(t, theta, G * hypers["clip"], state, hypers)

    clip = PrivacySettings(epsilon=2.0).clip

    def twin(theta, G, t, state, *, learning_rate):
        return theta - learning_rate * clip * G

    method = InUnitsOfTheClip()
    assert not contract._check_twin(method, method.check({}), twin)
    assert contract._check_twin(method, method.check({}), lambda *values, **named: 1.01 * twin(*values, **named))


@pytest.mark.parametrize("name", cheats.CHEATS)
def test_a_cheat_is_caught(registered, name):
    cheat = registered(cheats.CHEATS[name]())
    levels = reversed(cheat.levels)  # a cheat at user level is honest at record level
    assert any(shift_checks.failure(cheat, cheat.check({}), level) for level in levels)


def test_the_honest_method_passes(registered):
    assert shift_checks.failure(registered(cheats.Honest()), {"learning_rate": 0.5}, "record") == ""


def test_the_command_catches_a_cheat(registered):
    cheat = registered(cheats.CHEATS["noise reused in pairs of rounds"]())
    check = "noise hides every record as accounted"
    (found,) = [found for found in contract.run_checks(cheat, {}, repetitions=100) if found.check == check]
    assert "round 2: 100 of 100 coordinates of a release have no new noise" in found.failure


def test_processes_end_with_the_command():
    """A check takes minutes; a command that was killed leaves none running."""
    command = subprocess.Popen(
        [sys.executable, "-c", "from orchestrator.cli import main; main()", "check-method", "dp-fedgd"],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children")
    found = wait_for(lambda: children.read_text().split()[1:], "processes")  # the first one tracks shared resources
    command.kill()
    command.wait()
    wait_for(lambda: not any(Path("/proc", child).exists() for child in found), "the end of the processes")


def shift_of(name, level, adjacency, release, number=0, **hypers):
    """For the most visible record."""
    method = METHODS[name]
    problem = problem_for(method)
    pair = list(pairs(problem, level, adjacency))[number]
    trial = TrialSpec(
        problem=problem.spec,
        method=name,
        hyperparameters=method.check({**most_visible(name, level), **hypers}),
        privacy=PrivacySettings(epsilon=2.0, clip=1.0, level=level, adjacency=adjacency, release=release),
        rounds=13,
        evaluate_every=13,
    )
    data = [part and shift_checks.replace(part, model=from_zero(problem.model)) for part in (pair.data, pair.other)]
    return noise_shift.find_shift(trial, *data, pair.client)


@pytest.mark.parametrize(("adjacency", "release"), itertools.product(ADJACENCIES, RELEASES))
@pytest.mark.parametrize("name", ["dp-fedgd", "dp-ftrl", "dp-bandmf", "dp-scaffold"])
def test_the_shift_is_as_long_as_the_account_says(name, adjacency, release):
    """The account of these methods is exact: independent noise, trees, bands and control variates."""
    shift = shift_of(name, "record", adjacency, release)
    assert shift.mu == pytest.approx(shift.plan.mu(release), rel=2e-3)


def test_local_steps_are_followed_one_by_one():
    shift = shift_of("dp-fedavg", "record", "replace-one", "local", local_steps=3)
    assert shift.mu == pytest.approx(shift.plan.mu("local"), rel=1e-2)


def test_a_first_step_of_adam_has_noise():
    """With one local step only the sign of a noisy gradient is released."""
    assert shift_of("dp-localadamw", "record", "replace-one", "local").mu > 0


def test_hessians_are_followed():
    assert shift_of("dp-fednewton", "record", "zero-out", "local").cost["hessian"] > 0


def test_samples_of_centred_features_are_followed():
    problem = problem_for(METHODS["dp-fedsam"])
    pair = next(pairs(problem, "record", "replace-one"))
    trial = TrialSpec(
        problem=problem.spec,
        method="dp-fedsam",
        hyperparameters=METHODS["dp-fedsam"].check({"local_steps": 2, "sampling_rate": 0.5, "participation": 1.0}),
        privacy=PrivacySettings(epsilon=2.0, clip=1.0),
        rounds=2,
        evaluate_every=2,
        preprocess=Preprocess(center=0.2, bound=1.0),
    )
    shift = noise_shift.find_shift(trial, pair.data, pair.other, pair.client)
    assert shift.cost["centre"] > 0
    assert shift.cost["gradient"] > 0


def test_a_user_is_hidden():
    shift = shift_of("dp-fedavg", "user", "zero-out", "secure-aggregation")
    assert shift.mu == pytest.approx(shift.plan.mu("secure-aggregation"), rel=1e-3)


def test_the_user_who_is_left_out_is_the_one_that_is_measured(registered):
    """Hosts are not numbered like their clients."""

    class SilentUser(cheats.UserLevel):
        user = cheats.released(
            lambda client, theta: client.zeros() + (client._clients[0] != 0) + client.noise("gradient")
        )

    method = registered(SilentUser())
    problem = problem_for(method)
    trial = TrialSpec(
        problem=problem.spec,
        method=method.name,
        hyperparameters=method.check({}),
        privacy=PrivacySettings(epsilon=2.0, level="user", adjacency="zero-out"),
        rounds=2,
        evaluate_every=2,
    )
    costs = [noise_shift.find_shift(trial, ProblemData.of(problem), None, client).mu for client in range(3)]
    assert costs[0] == pytest.approx(0, abs=1e-4)
    assert costs[1] == pytest.approx(costs[2])
    assert costs[1] > 0.1


STRUCTURE = {
    "local_steps": 2,
    "sampling_rate": 0.3,
    "participation": 0.6,
    "duals": False,
    "restart_every": 5,
    "noise": "independent",
    "fedavg_rounds": 2,
    "every": 1,
    "bands": 1,
}
"""Options that change what is released, each with a value other than the default."""


def options():
    """Every method and level: its defaults, and every structural option."""
    for method in METHODS.values():
        names = [h.name for h in method.hyperparameters]
        for level in method.levels:
            for changed in ({}, *({name: value} for name, value in STRUCTURE.items() if name in names)):
                words = [method.name, level, *(f"{name}={value}" for name, value in changed.items())]
                yield pytest.param(method.name, level, changed, id="-".join(words))


@pytest.mark.audits
@pytest.mark.parametrize(("name", "level", "changed"), options())
def test_no_false_alarm(name, level, changed):
    assert shift_checks.failure(METHODS[name], METHODS[name].check(changed), level) == ""


@pytest.fixture
def only_amplified_rounding(monkeypatch):
    """As if rounding differed on every processor: no two releases are equal, so that the rounding that a release
    amplifies is measured everywhere."""
    monkeypatch.setattr(noise_shift, "_equal", lambda *numbers: False)


def test_amplified_rounding_is_no_false_alarm(only_amplified_rounding):
    """Two steps with the inverse of a noisy Hessian."""
    assert shift_of("dp-fednewton", "record", "replace-one", "local", local_steps=2).mu > 0


def test_a_record_is_not_taken_for_amplified_rounding(only_amplified_rounding, monkeypatch):
    """A release that differs by a ten-thousandth from what the shift explains."""
    follow = noise_shift._Pair.play

    def other(self, shifts=None, extra_shifts=None, reference=None):
        played = follow(self, shifts, extra_shifts, reference)
        return replace(played, release=played.release * 1.0001) if reference is not None else played

    monkeypatch.setattr(noise_shift._Pair, "play", other)
    with pytest.raises(noise_shift.ShiftError, match="no shift of the noise hides a record"):
        shift_of("dp-fednewton", "record", "replace-one", "local", local_steps=2)


@pytest.mark.audits
def test_other_processes_find_the_same_in_the_same_order(monkeypatch):
    method, hypers = METHODS["dp-ftrl"], {"as_released": True}
    checks = contract._checks(method, method.check(hypers), repetitions=100)
    few = {name: parts[:2] for name, parts in checks.items() if "eps is" in name or "noise hides" in name}
    monkeypatch.setattr(contract, "_checks", lambda *_: few)
    here, elsewhere = (list(contract.run_checks(method, hypers, processes=count)) for count in (1, 2))
    assert here == elsewhere
    assert [found.check for found in here] == list(few)
    assert here[0].failure.startswith("eps 1 is claimed")

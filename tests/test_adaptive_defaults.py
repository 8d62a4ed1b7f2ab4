"""What a study that says nothing else uses, how explicit keys turn it off, and the rule of the shares."""

import math

import pytest

from orchestrator.execution import training
from orchestrator.execution.training_options import TrainingOptions
from orchestrator.study.cells import PreparedStudy
from orchestrator.study.study import Study
from trainables.privacy.plan import PrivacySettings
from trainables.privacy.shares import shares

PLAIN = {"name": "a", "data": [{"source": "synthetic-frozen:600,100,12,4"}], "methods": ["dp-fedgd"], "epsilons": [8]}


def study(**changes):
    return Study.model_validate({**PLAIN, **changes})


def test_a_plain_study_is_scaled_centred_and_size_weighted_and_tunes_the_clip():
    (method,) = study().methods
    assert method.shown == "DP-FedGD, adaptive"
    assert method.space().coarse["clip"] == (1.0, 3.0, 10.0)
    (cell,) = PreparedStudy.prepare(study()).cells
    (trial,) = cell.trials({"learning_rate": 0.1, "clip": 3.0}, [1], 5)
    assert (trial.aggregate, trial.preprocess.scale, trial.preprocess.bound) == ("size", 0.005, 10.0)
    assert (trial.preprocess.center, trial.preprocess.shrink) == (0.05, True)


@pytest.mark.parametrize(
    ("changes", "label", "clip_tuned"),
    [
        ({"defaults": "paper"}, "DP-FedGD", False),
        ({"privacy": {"clip": 5}}, "DP-FedGD, adaptive", False),
        ({"preprocess": {"center": 0}}, "DP-FedGD, size-weighted", True),
        ({"model": {"network": "resnet20"}}, "DP-FedGD, size-weighted", True),
        ({"aggregate": "uniform"}, "DP-FedGD, scaled, auto-centred", True),
        ({"privacy": {"level": "user"}}, "DP-FedGD, scaled, auto-centred", True),
        (
            {"methods": [{"dp-fedgd": {"preprocess": {"length": 3}, "clip": 2}}]},
            "DP-FedGD, scaled, size-weighted",
            False,
        ),
    ],
)
def test_explicit_keys_turn_a_default_off(changes, label, clip_tuned):
    (method,) = study(**changes).methods
    assert method.shown == label
    assert ("clip" in method.space().coarse) == clip_tuned


def test_released_programs_are_left_alone():
    (method,) = study(methods=[{"dp-ftrl": {"fixed": {"as_released": True}}}]).methods
    assert (method.preprocess, method.aggregate, method.clip) == (None, None, None)


def test_spaces_with_many_axes_have_a_fixed_clip():
    (method,) = study(methods=["dp-fedadam"]).methods
    assert method.clip == 3.0


def test_a_recorded_study_is_the_same():
    for one in (study(), study(defaults="paper")):
        again = Study.recorded(one.model_dump_json())
        assert again.model_dump() == one.model_dump()
        assert [m.id for m in again.methods] == [m.id for m in one.methods]


def test_the_papers_choices_are_those_of_studies_before():
    assert study(defaults="paper").methods[0].id == "dp-fedgd"


def test_shares_follow_from_rows_clients_features_and_budget():
    """Replace-one, local release: noise = sqrt(n) / (mu N), lengths (6 * 2 * noise)^2, mean (6 sqrt(p) noise)^2."""
    digits = [65] * 20
    # mu = 0.2681: noise = 4.4721 / (0.2681 * 1300) = 0.012831; 0.02371 and 0.3793, which is above 0.25
    assert shares(PrivacySettings(epsilon=1), digits, 64) == (0.024, 0.25)
    # mu = 1.6677: noise = 0.0020628; 0.000613 and 0.0098, which is below 0.05
    assert shares(PrivacySettings(epsilon=8), digits, 64) == (0.005, 0.05)
    # 30 features, 12 clients, 410 rows: noise = 0.031515; 0.1431, rounded up, and 1.07
    assert shares(PrivacySettings(epsilon=1), [34] * 11 + [36], 30) == (0.144, 0.25)
    assert shares(PrivacySettings(epsilon=1, release="secure-aggregation"), digits, 64) == (0.005, 0.05)
    # mu = 0.1396: noise = 1 / (0.1396 * 1300) = 0.00551; 0.0044, which is below 0.005, and 0.06996, rounded up
    assert shares(PrivacySettings(epsilon=0.49, release="secure-aggregation"), digits, 64) == (0.005, 0.07)
    assert shares(PrivacySettings(epsilon=math.inf), digits, 64) == (0.005, 0.05), "the smallest: there is no noise"


def trained_with(**options):
    return training.set_up("synthetic-frozen:600,100,12,4", TrainingOptions(method="dp-fedgd", epsilon=8, **options))


def test_one_training_run_has_the_defaults_of_a_study():
    """With the shares of the study's cells, priced: three releases."""
    trial = trained_with(train_on="train", evaluate_on="validation").trial
    (cell,) = PreparedStudy.prepare(study()).cells
    (expected,) = cell.trials({"learning_rate": 0.1, "clip": 3.0}, [1], 5)
    assert trial.preprocess == expected.preprocess
    assert (trial.aggregate, trial.privacy.clip) == ("size", 3.0)
    assert {event.purpose for event in trained_with().plan.events} == {"gradient", "centre", "lengths"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"defaults": "paper"}, ("uniform", 10.0, 0.0, 0.0)),
        ({"aggregate": "uniform", "clip": 5.0}, ("uniform", 5.0, 0.05, 0.005)),
        ({"center": 0.0}, ("size", 3.0, 0.0, 0.0)),
        ({"center": 0.02, "defaults": "paper"}, ("uniform", 10.0, 0.02, 0.0)),
        ({"length": 4.0}, ("size", 3.0, 0.0, 0.0)),
        ({"level": "user"}, ("uniform", 3.0, 0.25, 0.15)),
    ],
)
def test_options_of_one_training_run_turn_a_default_off(options, expected):
    trial = trained_with(**options).trial
    assert (trial.aggregate, trial.privacy.clip, trial.preprocess.center, trial.preprocess.scale) == expected
    assert trial.preprocess.length == options.get("length", 0.0)

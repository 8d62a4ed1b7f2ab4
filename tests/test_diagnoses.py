"""The report and the end of a run name cause and remedy where scores are low or uncertain."""

from types import SimpleNamespace

import pytest
from handmade_ledgers import SETTING, setting_id, study, writing

from orchestrator.report.html.diagnosis_text import _at_chance, diagnoses
from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import Results, Score

GOOD = {"signal_norm": 1.0, "noise_norm": 1.0, "clipped_share": 40.0}
EVEN = [[40, 40], [40, 40]]


def found(folder, counts=EVEN, score=90.0, measured=None, curve=None, **changes):
    of = study(**{"methods": ["dp-fedgd"], "epsilons": [8], **changes})
    with writing(folder, of) as writer:
        writer.search("dp-fedgd", 8, {"coarse": [({"learning_rate": 0.1}, 96.0)]})
        curves = {seed: curve or {20: score} for seed in (42, 7)}
        writer.confirm("dp-fedgd", 8, {"learning_rate": 0.1}, curves, measured={**GOOD, **(measured or {})})
        writer.ledger.add_partitions({(setting_id(of, SETTING), 42): counts})
    with Ledger.read(folder) as ledger:
        return diagnoses(Results.read(ledger))


def test_nothing_to_say(tmp_path):
    assert found(tmp_path) == []


def test_at_chance(tmp_path):
    (sentence,) = found(tmp_path, score=52.0)
    assert sentence.startswith(
        "At ε = 8 no method is clearly better than always answering the largest class (50.0% of the train rows): the "
        "best has a test accuracy of 52.0%. A larger ε"
    )


@pytest.mark.parametrize("release", ["local", "secure-aggregation"])
@pytest.mark.parametrize(("mean", "at_chance"), [(52.0, True), (53.0, False)])
def test_at_chance_by_another_metric(mean, at_chance, release):
    """The standard error over five seeds is 2.8 / sqrt(5) = 1.25."""
    cell = SimpleNamespace(last=20, curve={20: Score(mean, 2.8, 5)}, cell_id=SimpleNamespace(setting="here"))
    results = SimpleNamespace(
        study=SimpleNamespace(
            objective="balanced_accuracy", epsilons=[8], defaults="adaptive", privacy=SimpleNamespace(release=release)
        ),
        settings=[SETTING],
        of=lambda *_: [cell],
        class_counts={"here": EVEN},
    )
    sentences = list(_at_chance(results))
    assert bool(sentences) == at_chance
    wanted = "no method is clearly better than guessing (50.0%): the best has a test balanced accuracy of 52.0%."
    assert all(wanted in sentence for sentence in sentences)
    advised = ["`release: secure-aggregation`" in sentence for sentence in sentences]
    assert all(advised) if release == "local" else not any(advised), "not if the study has it"


def test_one_method_is_worse_than_the_largest_class(tmp_path):
    of = study(methods=["dp-fedgd", "dp-fedyogi", "dp-fedsofim"], epsilons=[8])
    with writing(tmp_path, of) as writer:
        for method, score in (("dp-fedgd", 20.0), ("dp-fedyogi", 49.9), ("dp-fedsofim", 90.0)):
            writer.search(method, 8, {"coarse": [({"learning_rate": 0.1}, 96.0)]})
            curves = {seed: {20: score} for seed in (42, 7)}
            writer.confirm(method, 8, {"learning_rate": 0.1}, curves, measured=GOOD)
        writer.ledger.add_partitions({(setting_id(of, SETTING), 42): EVEN})
    with Ledger.read(tmp_path) as ledger:
        (sentence,) = diagnoses(Results.read(ledger))
    assert sentence.startswith(
        "Worse than always answering the largest class: DP-FedGD at ε = 8 (20.0%, largest class 50.0%). "
    )


@pytest.mark.parametrize(
    ("metric", "late", "swings"),
    [
        ("accuracy", (80.0, 86.0, 81.0), True),
        ("accuracy", (80.0, 84.0, 81.0), False),
        ("accuracy", (60.0, 70.0, 80.0), False),
        ("calibration_error", (60.0, 70.0, 80.0), True),
        ("calibration_error", (80.0, 70.0, 60.0), False),
    ],
)
def test_scores_that_swing_late_in_a_run(tmp_path, metric, late, swings):
    """80, 86, 81: a rise and a fall by 5 points, 2.5 on average over both. The first half of a run does not count. A
    steady rise is no swing, unless lower scores are better."""
    of = study(methods=["dp-fedgd"], epsilons=[8], objective=metric)
    with writing(tmp_path, of) as writer:
        writer.search("dp-fedgd", 8, {"coarse": [({"learning_rate": 0.1}, 96.0)]})
        curve = dict(zip((5, 10, 15, 20), (10.0, *late), strict=True))
        curves = {seed: {20: 90.0} for seed in (42, 7)}
        writer.confirm("dp-fedgd", 8, {"learning_rate": 0.1}, curves, measured={**GOOD, metric: curve})
        writer.ledger.add_partitions({(setting_id(of, SETTING), 42): EVEN})
    with Ledger.read(tmp_path) as ledger:
        sentences = diagnoses(Results.read(ledger))
    found = [each for each in sentences if "the score often gets worse from one evaluation to the next" in each]
    assert bool(found) == swings
    steps = "5.0 points on average, in 2 of 4" if metric == "accuracy" else "10.0 points on average, in 4 of 4"
    assert all(f": DP-FedGD at ε = 8 (by {steps} steps)." in each for each in found)


def test_one_late_fall_is_not_often(tmp_path):
    assert not any("gets worse" in each for each in found(tmp_path, curve={10: 90.0, 20: 80.0}))


def test_noise_exceeds_signal(tmp_path):
    """Over 20 rounds noise adds up to sqrt(20) * 9 = 40.2, the signal to 20."""
    (sentence,) = found(tmp_path, measured={"noise_norm": 9.0})
    assert "Noise exceeds signal, summed over all rounds: DP-FedGD at ε = 8 (2.0 times)." in sentence


def test_nothing_or_everything_is_clipped(tmp_path):
    (never,) = found(tmp_path / "never", measured={"clipped_share": 0.2})
    (always,) = found(tmp_path / "always", measured={"clipped_share": 99.9})
    assert never.startswith("Almost no gradient is clipped, so the clip is larger than needed")
    assert "(clip 10)" in never
    assert always.startswith("Almost every gradient is clipped")
    assert always.endswith("Tune it: give an axis `coarse: {clip: [...]}`.")
    assert "leave `privacy.clip` out" not in never, "the paper's defaults do not tune it"


def test_a_clip_that_the_study_sets_can_be_left_to_the_defaults(tmp_path):
    given = {"defaults": "adaptive", "privacy": {"clip": 10}, "aggregate": "uniform", "preprocess": {}}
    (never,) = found(tmp_path, measured={"clipped_share": 0.2}, **given)
    assert never.endswith("Tune it: leave `privacy.clip` out, or give an axis `coarse: {clip: [...]}`.")
    given |= {"privacy": {}, "methods": [{"dp-fedgd": {"fixed": {"clip": 1000}}}]}
    (never,) = found(tmp_path / "fixed", measured={"clipped_share": 0.2}, **given)
    assert never.endswith("Tune it: give an axis `coarse: {clip: [...]}`."), "it is left out already"


def test_small_clients_set_the_noise(tmp_path):
    """Sizes 1, 79: sqrt((1 + 1 / 79^2) / 2) * 40 = 28.3."""
    (sentence,) = found(tmp_path, counts=[[1, 0], [40, 39]])
    assert "(the smallest has 1 of 80 rows): with equal weights it is 28.3 times" in sentence
    assert "`aggregate: size` avoids this" in sentence


def test_winner_on_an_edge(tmp_path):
    """The best of 0.1, 1 and 10 is 10; nothing is said of the middle."""
    tried = {0.1: 90.0, 1.0: 93.0, 10.0: 96.0}
    with writing(tmp_path, study(methods=["dp-fedgd"], epsilons=[8])) as writer:
        writer.search("dp-fedgd", 8, {"coarse": [({"learning_rate": rate}, score) for rate, score in tried.items()]})
        writer.confirm("dp-fedgd", 8, {"learning_rate": 10.0}, {42: {20: 90.0}, 7: {20: 90.0}}, measured=GOOD)
    with Ledger.read(tmp_path) as ledger:
        (sentence,) = diagnoses(Results.read(ledger))
    assert sentence == (
        "In 1 of 1 cells the winner lies on an edge of the search space, so a better value may lie beyond: DP-FedGD at "
        "ε = 8 (learning_rate ↑). Extend these axes under `coarse` of the method."
    )


def test_few_validation_rows(tmp_path):
    """100 rows at 60%: sqrt(0.24 / 100) = 4.9 points."""
    of = study(methods=["dp-fedgd"], epsilons=[8])
    with writing(tmp_path, of) as writer:
        writer.search("dp-fedgd", 8, {"coarse": [({"learning_rate": 0.1}, 60.0)]})
        writer.confirm("dp-fedgd", 8, {"learning_rate": 0.1}, {42: {20: 90.0}, 7: {20: 90.0}}, measured=GOOD)
    with Ledger.read(tmp_path) as ledger:
        (sentence,) = diagnoses(Results.read(ledger))
    assert "100 validation rows are few: a score on them has a standard error of 4.9 points" in sentence


def test_few_validation_rows_of_the_rarest_class(tmp_path):
    """6 of 160 train rows: 3.75 of 100 validation rows."""
    sentence = found(tmp_path, counts=[[77, 3], [77, 3]])[-1]
    assert sentence.startswith("100 validation rows are few: the rarest class has about 4 of them, so the search may")


def test_the_rarest_class_may_have_no_validation_row(tmp_path):
    """1 of 400 train rows: 0.25 of 100 validation rows."""
    sentence = found(tmp_path, counts=[[199, 1], [200, 0]])[-1]
    assert sentence.startswith("100 validation rows are few: the rarest class may have none of them, so")

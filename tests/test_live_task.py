"""`LiveTask`: the value of any configuration, computed in lanes."""

from statistics import fmean

import pytest
from repository_files import DOCS, blocks
from simulated_search import GD, SOFIM, study

from fedsweep.benchmark import LiveTask
from orchestrator.study.cells import PreparedStudy
from orchestrator.study.reading import load
from trainables.errors import UserError
from trainables.federation.problem import ProblemData
from trainables.federation.server import run_pack

RATES = [{"learning_rate": 0.3}, {"learning_rate": 2.0}]


@pytest.mark.parametrize("split", ["test", "validation"])
def test_a_value_is_the_mean_of_trials_that_run_alone(split):
    of = study(methods=[GD])
    task = LiveTask(of, seeds=(5, 6), split=split)
    expected = []
    in_seeds = study(methods=[GD], seeds={"search": [5, 6], "confirm": [5, 6]})
    prepared = PreparedStudy.prepare(in_seeds)
    for configuration in RATES:
        scores = []
        for trial in prepared.cells[0].trials(configuration, [5, 6], 6, confirm=split == "test"):
            (lane,) = run_pack([trial], ProblemData.of(prepared.problems[trial.problem.key])).values()
            scores.append(lane.metrics["accuracy"][6])
        expected.append(fmean(scores))
    assert task.values(RATES) == expected
    assert task.value(RATES[1]) == expected[1]
    assert task.trial_count == 4, "each trial runs once"


def test_trials_of_one_call_share_a_pack(monkeypatch):
    from orchestrator.bench import regret

    packs = []
    monkeypatch.setattr(
        regret, "run_pack", lambda pack, *given, **named: packs.append(pack) or run_pack(pack, *given, **named)
    )
    LiveTask(study(methods=[GD]), seeds=(5, 6)).values(RATES)
    assert [len(pack) for pack in packs] == [4]


def test_a_diverged_trial_counts_as_random_guessing():
    task = LiveTask(study(methods=[GD]), seeds=(5, 6))
    trials = task.cell.trials(RATES[0], [5, 6], 6, confirm=True)
    outcomes = [("diverged", None, None), ("done", 60.0, 1.0)]
    task._runner.outcomes.update(zip((trial.key for trial in trials), outcomes, strict=True))
    assert task.value(RATES[0]) == pytest.approx((100 / 3 + 60) / 2)


def test_the_page_runs():
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    (program,) = [block for block in blocks(DOCS / "benchmark.md", "python") if "LiveTask(" in block]
    of, _ = load("quickstart")
    assert "dp-fedgd" in [method.name for method in of.methods]
    assert 10 in of.epsilons
    small = study(methods=[{"name": "dp-fedgd"}], epsilons=[10])
    names = {"optuna": optuna, "small": small}
    exec(compile(program.replace('"quickstart"', "small"), "benchmark.md", "exec"), names)
    assert 0 < names["study"].best_value <= 100


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "matches 2 cells of the study; choose method = 'DP-FedGD' or 'DP-FedSOFIM'; epsilon = 8; "),
        ({"method": "dp-fedavg"}, "method = 'dp-fedavg', .*matches no cell of the study; choose method = "),
        ({"method": "dp-fedgd", "epsilon": 3}, "epsilon = 3, .*matches no cell"),
        ({"seeds": ()}, "seeds = .*at least one seed"),
        ({"split": "train"}, "split = 'train' is unknown"),
    ],
)
def test_a_wrong_choice_is_named(options, sentence):
    with pytest.raises(UserError, match=sentence):
        LiveTask(study(methods=[GD, SOFIM]), **options)


def test_a_wrong_configuration_is_named():
    task = LiveTask(study(methods=[GD]), seeds=(5,))
    with pytest.raises(UserError, match="no hyperparameter 'rho'"):
        task.value({"learning_rate": 1.0, "rho": 1.0})
    with pytest.raises(UserError, match="'learning_rate' is missing"):
        task.value({})

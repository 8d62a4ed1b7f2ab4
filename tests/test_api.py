"""The package `fedsweep`: studies, results as data frames, and training from Python."""

import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pandas as pd
import pytest
import small

import fedsweep
from orchestrator.commands.doctor import REQUIRED
from orchestrator.commands.train import train as train_command
from orchestrator.report.optuna_export import distributions
from orchestrator.report.tracked_runs import TrackedRun, tracked_runs
from orchestrator.report.trackers import _short
from orchestrator.results import frames
from orchestrator.study.reading import parse
from trainables.data import features

STUDY = {
    "name": "from-python",
    "data": [small.SMALL],
    "partitions": ["iid"],
    "clients": 5,
    "methods": [{"dp-fedgd": {"coarse": {"learning_rate": [0.5, 1, 2]}, "fine": {"learning_rate": [2, 4]}}}],
    "defaults": "paper",
    "epsilons": [8],
    "rounds": {"coarse": 4, "fine": 4, "confirm": 6},
    "evaluate_every": 2,
    "seeds": {"search": [1, 2], "contest": [11, 12], "confirm": [42, 7]},
    "search": {"refine": "table"},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return fedsweep.run_study(STUDY, tmp_path_factory.mktemp("api") / "results", backend="local")


def test_a_study_from_a_dict(results):
    assert results.finished
    assert results.study.name == "from-python"
    assert "finished" in repr(results)
    found = fedsweep.load_results(results.folder)
    pd.testing.assert_frame_equal(found.trials, results.trials)


def test_trials(results):
    trials = results.trials
    confirm = trials[trials["stage"] == "confirm"]
    assert sorted(confirm["seed"]) == [7, 42]
    assert set(trials["state"]) == {"done"}
    assert set(trials["method"]) == {"DP-FedGD"}
    assert {0.5, 1, 2, 4} == set(trials["learning_rate"])
    assert (trials["epsilon_local"] <= trials["epsilon_claimed"] * (1 + 1e-6)).all()


def test_configurations_group_trials_over_seeds(results):
    trials, found = results.trials, results.configurations
    assert len(found) < len(trials)
    assert found["seeds"].sum() == len(trials)
    coarse = found[found["stage"] == "coarse"].set_index("learning_rate")
    for rate, line in coarse.iterrows():
        own = trials[(trials["stage"] == "coarse") & (trials["learning_rate"] == rate)]
        assert (line["seeds"], line["done"]) == (2, 2)
        assert line["accuracy"] == pytest.approx(own["accuracy"].mean())
        assert line["accuracy_std"] == pytest.approx(own["accuracy"].std())


def test_scores_follow_from_the_rounds(results):
    """The last round of a trial has its accuracy, and the score of a cell is the mean over its seeds."""
    rounds, trials = results.rounds, results.trials
    last = rounds.sort_values("round").groupby(["stage", "key"])["accuracy"].last()
    assert last.loc[list(zip(trials["stage"], trials["key"], strict=True))].tolist() == trials["accuracy"].tolist()
    (cell,) = results.cells.to_dict("records")
    confirm = trials[trials["stage"] == "confirm"]["accuracy"]
    assert cell["test_accuracy"] == pytest.approx(confirm.mean())
    assert cell["std"] == pytest.approx(confirm.std())
    assert cell["seeds"] == 2
    assert cell["missing"] == 0


def test_winners_are_the_confirmed_configurations(results):
    (winner,) = results.winners.to_dict("records")
    confirm = results.trials[results.trials["stage"] == "confirm"]
    assert set(confirm["learning_rate"]) == {winner["learning_rate"]}


def test_csv_files_equal_the_data_frames(results):
    """Except for the column of seconds."""
    trials = pd.read_csv(f"{results.folder}/tables/trials.csv")
    assert trials["key"].tolist() == results.trials["key"].tolist()
    assert trials["accuracy"].tolist() == pytest.approx(results.trials["accuracy"].tolist())
    assert "seconds" not in trials
    seeds = pd.read_csv(f"{results.folder}/tables/seeds.csv")
    assert sorted(set(seeds["seed"])) == [7, 42]
    assert sorted(set(seeds["round"])) == [2, 4, 6]


def test_a_finished_study_is_not_run_again(results, monkeypatch):
    monkeypatch.setattr("orchestrator.execution.backends.ray.RayBackend.run", lambda *a: pytest.fail("a pack ran"))
    again = fedsweep.run_study(STUDY, results.folder)
    pd.testing.assert_frame_equal(again.trials, results.trials)


@pytest.mark.parametrize("more", [{"defaults": "paper"}, {"center": 0.1, "aggregate": "size", "secret_noise": True}])
def test_weights_are_those_that_were_evaluated(more, tmp_path):
    """Scoring the test rows with the weights gives the reported accuracy, and so does the saved file."""
    data = features.load(small.SMALL)
    arrays = {name: getattr(data, name) for name in ("x_train", "y_train", "x_test", "y_test")}
    model = fedsweep.train(
        arrays,
        method="dp-fedgd",
        epsilon=8,
        hyperparameters={"learning_rate": 1},
        partition="iid",
        clients=5,
        rounds=4,
        evaluate_every=4,
        hosts=1,
        **more,
    )
    assert model.state == "done"
    assert model.weights.shape == (13, 4)
    scores = np.hstack([data.x_test, np.ones((len(data.x_test), 1))]) @ model.weights
    assert 100 * (scores.argmax(1) == data.y_test).mean() == pytest.approx(model.accuracy)
    assert model.account.claimed == 8
    assert model.account.actual["local"] <= 8
    assert model.account.noise_multiplier > 0
    assert (model.key is None) == ("secret_noise" in more), "the key would reveal a secret seed"
    model.save(tmp_path / "model.npz")
    saved = fedsweep.load_model(tmp_path / "model.npz")
    assert saved.predict(data.x_test).tolist() == model.predict(data.x_test).tolist() == scores.argmax(1).tolist()
    assert saved.scores(data.x_test).argmax(1).tolist() == scores.argmax(1).tolist()
    assert saved.provenance["trial"]["preprocess"]["center"] == more.get("center", 0)
    assert saved.provenance["trial"]["aggregate"] == more.get("aggregate", "uniform")
    assert "noise_key" not in saved.provenance["trial"]


def test_the_function_and_the_command_take_the_same_options():
    """By the same names and with the same defaults: both derive from `TrainingOptions`."""
    of_command = {name: p.default for name, p in inspect.signature(train_command).parameters.items()}
    of_function = {name: p.default for name, p in inspect.signature(fedsweep.train).parameters.items()}
    assert set(of_command) - set(of_function) == {"context", "from_file", "cell", "save", "json"}
    assert set(of_function) - set(of_command) == {"on_round"}
    assert {name for name in set(of_command) & set(of_function) if of_command[name] != of_function[name]} == {
        "data",  # required in Python
        "hyperparameters",  # --set KEY=VALUE
        "metrics",  # --metric NAME, repeatable
    }


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"release": "trusted"}, "release = 'trusted': Input should be 'local' or 'secure-aggregation'"),
        ({"rounds": "many"}, "rounds = 'many': "),
        ({"hyperparameters": {"learning_rate": [1]}}, r"hyperparameters.learning_rate = \[1\]: "),
    ],
)
def test_a_value_of_the_wrong_type_is_a_user_error(wrong, message):
    with pytest.raises(fedsweep.UserError, match=message):
        fedsweep.train(small.SMALL, method="dp-fedgd", epsilon=1, **wrong)


def test_an_unknown_argument_is_a_user_error():
    with pytest.raises(fedsweep.UserError, match=r"fedsweep\.train got an unexpected keyword argument 'budget'"):
        fedsweep.train(small.SMALL, budget=3)


def test_a_budget_is_stated_once():
    with pytest.raises(fedsweep.UserError, match="the budget is missing"):
        fedsweep.train(small.SMALL, method="dp-fedgd")
    with pytest.raises(fedsweep.UserError, match="epsilon = 1 and mu = 2 state the budget twice"):
        fedsweep.train(small.SMALL, method="dp-fedgd", epsilon=1, mu=2)


def test_all_forms_of_a_study_are_equivalent(tmp_path):
    from fedsweep.studies import read_study

    study, text = read_study(STUDY)
    assert parse(text, "again.yaml", tmp_path) == study
    file = tmp_path / "study.yaml"
    file.write_text(text)
    assert read_study(file)[0] == read_study(study)[0] == study
    assert fedsweep.plan_study(STUDY).cells == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 3}, "the study: epsilon: there is no such setting; did you mean epsilons?"),
        ({"methods": ["dp-nope"]}, "methods.0.name: method 'dp-nope' is unknown"),
        ({"clients": 0}, "clients: 0 is less than 1"),
    ],
)
def test_a_bad_study_is_reported_in_one_sentence(changes, message):
    with pytest.raises(fedsweep.UserError) as caught:
        fedsweep.run_study({**STUDY, **changes})
    assert message in str(caught.value)


def test_bad_arrays_are_named():
    with pytest.raises(fedsweep.UserError, match="lacks the array 'y_train'"):
        fedsweep.train({"x_train": np.ones((4, 2))}, method="dp-fedgd", epsilon=1)


def test_a_folder_without_results(tmp_path):
    with pytest.raises(fedsweep.UserError, match=r"ledger\.sqlite"):
        fedsweep.load_results(tmp_path)


def test_every_public_name_exists_and_is_documented():
    for name in fedsweep.__all__:
        value = getattr(fedsweep, name)
        assert name == "__version__" or value.__doc__, name


# ---- exports to other tools


def test_export_to_files(results, fedsweep, tmp_path):
    code, out, err = fedsweep("export", results.folder, "--to", "csv", "--out", tmp_path)
    assert code == 0, err
    written = {Path(line).name for line in out.splitlines()}
    assert written == {"README.md", "trials.csv", "rounds.csv", "cells.csv", "winners.csv"}
    trials = pd.read_csv(tmp_path / "trials.csv")
    assert trials["key"].tolist() == results.trials["key"].tolist()
    assert trials["accuracy"].tolist() == pytest.approx(results.trials["accuracy"].tolist())
    assert len(pd.read_csv(tmp_path / "rounds.csv")) == len(results.rounds)
    assert fedsweep("export", results.folder, "--to", "parquet", "--out", tmp_path / "parquet")[0] == 0
    assert list((tmp_path / "parquet").glob("*.parquet"))


def test_export_to_tensorboard(results, fedsweep, tmp_path):
    """One log per trial, with one event per round."""
    for _ in range(2):  # the second export replaces the first
        code, _, err = fedsweep("export", results.folder, "--to", "tensorboard", "--out", tmp_path)
        assert code == 0, err
    logs = sorted(tmp_path.rglob("events.out.tfevents*"))
    assert len(logs) == len(results.trials)
    assert {log.parent.name for log in logs} == {f"{t.stage}-{t.key[:10]}" for t in results.trials.itertuples()}
    assert all(b"accuracy" in log.read_bytes() for log in logs)


def test_export_to_optuna(results, fedsweep, tmp_path):
    import optuna

    code, out, err = fedsweep("export", results.folder, "--to", "optuna", "--out", tmp_path)
    assert code == 0, err
    storage = f"sqlite:///{out.strip()}"
    names = optuna.get_all_study_names(storage)
    cell = f"{small.SMALL} / iid / DP-FedGD / eps 8"
    assert names == [cell, f"{cell} / contest"]
    for name in names:
        study = optuna.load_study(study_name=name, storage=storage)
        stages = ["contest"] if "contest" in name else ["coarse", "fine"]
        means = (
            results.trials[results.trials["stage"].isin(stages)]
            .drop_duplicates("key")
            .groupby("learning_rate")["accuracy"]
            .mean()
        )
        assert {t.params["learning_rate"]: pytest.approx(t.value) for t in study.trials} == means.to_dict()
        assert study.best_value == pytest.approx(means.max()), "a mean over seeds, not the luckiest seed"
        (chosen,) = results.winners["learning_rate"]
        assert [t.params["learning_rate"] for t in study.trials if t.user_attrs["winner"]] == (
            [chosen] if "contest" in name else []
        )


def test_axes_become_optuna_distributions():
    """The range of the tried values, on the scale of the axis; strings and booleans become categories."""
    found = distributions(
        [
            {"rate": 0.1, "steps": 1, "duals": True, "warmup": "auto"},
            {"rate": 10.0, "steps": 4, "duals": False, "warmup": 3},
        ],
        {"rate": "log", "steps": "linear"},
    )
    assert (found["rate"].low, found["rate"].high, found["rate"].log) == (0.1, 10.0, True)
    assert (found["steps"].low, found["steps"].high, found["steps"].log) == (1, 4, False)
    assert found["duals"].choices == (True, False)
    assert found["warmup"].choices == ("auto", 3)
    assert distributions([{"rate": 0.0}], {"rate": "log"})["rate"].log is False, "zero has no logarithm"


@pytest.mark.parametrize("form", ["mlflow", "wandb"])
def test_a_missing_tool_is_named(results, fedsweep, form, monkeypatch):
    monkeypatch.setitem(sys.modules, form, None)
    code, _, err = fedsweep("export", results.folder, "--to", form)
    assert code == 2
    assert f"{form} is not installed; pip install 'fedsweep[{form}]'" in err


def test_calls_of_mlflow(results, fedsweep, monkeypatch):
    mlflow = MagicMock()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    assert fedsweep("export", results.folder, "--to", "mlflow")[0] == 0
    mlflow.set_experiment.assert_called_once_with("from-python")
    runs = [call.kwargs["tags"] for call in mlflow.start_run.call_args_list]
    assert [tags["key"] for tags in runs] == results.trials["key"].tolist()
    params = [call.args[0] for call in mlflow.log_params.call_args_list]
    assert [p["learning_rate"] for p in params] == results.trials["learning_rate"].tolist()
    steps = [call.kwargs["step"] for call in mlflow.log_metrics.call_args_list if "step" in call.kwargs]
    assert steps == results.rounds["round"].tolist()


def test_calls_of_wandb(results, fedsweep, monkeypatch):
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert fedsweep("export", results.folder, "--to", "wandb")[0] == 0
    started = [call.kwargs for call in wandb.init.call_args_list]
    assert [run["config"]["seed"] for run in started] == results.trials["seed"].tolist()
    confirm = {run["group"] for run in started if run["job_type"] == "confirm"}
    assert len(confirm) == 1, "seeds of one configuration are one group"
    logged = wandb.init.return_value.__enter__.return_value.log.call_args_list
    assert len(logged) == len(results.rounds)


def test_export_to_mlflow(results, fedsweep, tmp_path, monkeypatch):
    """If it is installed: every trial becomes a run with its curve, and a second export adds nothing."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    for added in (len(results.trials), 0):
        code, out, err = fedsweep("export", results.folder, "--to", "mlflow")
        assert code == 0, err
        assert out == f"{added} runs added to the MLflow experiment from-python\n"
    runs = {
        (run.data.tags["stage"], run.data.tags["key"]): run
        for run in mlflow.search_runs(experiment_names=["from-python"], output_format="list")
    }
    for trial in results.trials.to_dict("records"):
        run = runs[trial["stage"], trial["key"]]
        assert float(run.data.params["learning_rate"]) == trial["learning_rate"]
        assert run.data.metrics["epsilon_local"] == trial["epsilon_local"]
        curve = mlflow.MlflowClient().get_metric_history(run.info.run_id, "accuracy")
        assert curve[-1].value == trial["accuracy"]
        assert [point.step for point in curve] == list(range(2, trial["rounds"] + 1, 2))


def test_export_to_wandb(results, fedsweep, tmp_path, monkeypatch):
    """If it is installed: without a server, every trial becomes a run that `wandb sync` would upload."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    code, out, err = fedsweep("export", results.folder, "--to", "wandb")
    assert code == 0, err
    assert f"{len(results.trials)} runs in the W&B project from-python; W&B's files are in {tmp_path}" in out
    kept = {file.stem.removeprefix("run-"): file.read_bytes() for file in tmp_path.rglob("run-*.wandb")}
    assert {name.rpartition("-")[0] for name in kept} == {f"{t.stage}-{t.key}" for t in results.trials.itertuples()}
    assert len(kept) == len(results.trials)
    assert all(b"learning_rate" in content and b"accuracy" in content for content in kept.values())


def test_a_trial_that_two_searches_share_is_two_runs(results):
    line = results.trials.to_dict("records")[0]
    places = [{}, {"search": "other"}, {"setting": "other"}, {"epsilon": 99.0}]
    runs = [TrackedRun(MagicMock(), {**line, **place}, pd.DataFrame(columns=["round"])) for place in places]
    assert len({run.id for run in runs}) == 4


def test_a_trial_that_two_cells_share_has_its_curve_once_in_each(results, monkeypatch):
    points = len(results.rounds)
    for name in ("trials", "rounds"):
        found = getattr(results, name)
        shared = pd.concat([found, found.assign(method="the same by another label")])
        monkeypatch.setattr(frames, name, lambda ledger, results, shared=shared: shared)
    assert sum(len(run.curve) for run in tracked_runs(None, MagicMock())) == 2 * points


def test_group_names_fit_the_limit_of_wandb():
    long = 200 * "x"
    assert len(_short(long)) == 128
    assert _short(long) != _short(long + "y")
    assert _short("short") == "short"


def test_doctor(fedsweep):
    code, out, _ = fedsweep("doctor", "--json")
    found = {line["check"]: line for line in json.loads(out)}
    assert code == 0
    assert {"fedsweep", "Python", "ray", "torch", "memory", "cores", "compiler", "plug-ins"} <= set(found)
    assert found["torch"]["value"].startswith("2.")


def test_doctor_and_the_install_page_name_every_dependency():
    root = Path(__file__).parent.parent
    declared = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[\[<>=]", line)[0] for line in declared}
    assert set(REQUIRED) == names
    page = (root / "docs" / "install.md").read_text().partition("## Dependencies")[2]
    assert {name.partition("[")[0] for name in re.findall(r"`([\w\[\]-]+)`", page)} >= names


def test_doctor_reports_what_is_missing(fedsweep, monkeypatch):
    monkeypatch.setattr("orchestrator.commands.doctor.REQUIRED_MEMORY", 1 << 60)
    code, out, _ = fedsweep("doctor")
    assert code == 1
    assert "PROBLEM: memory" in out


@pytest.mark.parametrize("more", [[], ["status", "somewhere"]])
def test_the_version(fedsweep, more):
    code, out, err = fedsweep("--version", *more)
    assert (code, out, err) == (0, f"fedsweep {fedsweep_version()}\n", "")


def fedsweep_version() -> str:
    return fedsweep.__version__


def test_the_shell_completes_commands():
    environment = {
        **os.environ,
        "_FEDSWEEP_COMPLETE": "complete_bash",
        "COMP_WORDS": "fedsweep chec",
        "COMP_CWORD": "1",
    }
    program = "import sys; sys.argv = ['fedsweep']; from orchestrator.cli import main; main()"
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert found.stdout.split() == ["check", "check-method", "check-model"], found.stderr


def test_the_package_runs_as_a_module():
    found = subprocess.run([sys.executable, "-m", "fedsweep", "--version"], capture_output=True, text=True)
    assert found.stdout == f"fedsweep {fedsweep.__version__}\n", found.stderr


def test_plugins_are_imported_with_the_package():
    """As in docs/python.md, without another import."""
    program = "import fedsweep; fedsweep.plugins.use"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0

"""The tabular benchmark: every trial by round, and tuners that look results up instead of training."""

import json
import math

import optuna
import pandas as pd
import pyarrow.parquet
import pytest
from handmade_ledgers import cell_id, setting_id

from orchestrator.report.benchmark.columns import COLUMNS
from orchestrator.report.benchmark.lookup import Task
from orchestrator.results.ledger import Ledger, Row, SettingFacts
from orchestrator.study.study import Study
from trainables import methods
from trainables.data import partition
from trainables.errors import UserError
from trainables.federation.trial_spec import DataSpec, ProblemSpec, TrialSpec
from trainables.privacy.plan import PrivacySettings

SETTING = "toy / iid"
RATES, RHOS = (0.1, 1.0, 5.0), (0.5, 10.0)


def accuracy(rate, rho, seed, t):
    """Best at rate 1 and rho 10; seeds differ by a point."""
    return t * (1 - abs(math.log10(rate)) / 2) + (5 if rho == 10 else 0) + seed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("swept")
    study = Study.model_validate(
        {
            "name": "by-hand",
            "data": [{"source": "toy.npz", "label": "toy"}],
            "partitions": ["iid"],
            "clients": 4,
            "methods": ["dp-fedgd", "dp-fedsofim"],
            "defaults": "paper",
            "epsilons": [1],
            "seeds": {"search": [1, 2], "contest": [], "confirm": [7]},
        }
    )
    with Ledger.write(place) as ledger:
        ledger.add_study(study.model_dump_json(), "by hand")
        ledger.add_data({"toy": "sha256:abc"})
        ledger.add_settings({setting_id(study, SETTING): SettingFacts(50, 20, 10)})
        for method in ("dp-fedgd", "dp-fedsofim"):
            rhos = RHOS if method == "dp-fedsofim" else (0.5,)
            keys = [add(ledger, method, rate, rho, seed) for rate in RATES for rho in rhos for seed in (1, 2)]
            ledger.add_stage(cell_id(study, methods.get(method).title, 1, SETTING), "grid", "coarse", keys)
    return place


def add(ledger, method, rate, rho, seed):
    hypers = {"learning_rate": rate, **({"rho": rho} if method == "dp-fedsofim" else {})}
    trial = TrialSpec(
        problem=ProblemSpec(
            data=DataSpec(fingerprint="sha256:abc"),
            partition=partition.parse("iid", clients=4, seed=42),
            train_on="train",
            evaluate_on="validation",
        ),
        method=method,
        hyperparameters=methods.get(method).check(hypers),
        privacy=PrivacySettings(epsilon=1),
        rounds=20,
        seed=seed,
    )
    lost = method == "dp-fedgd" and rate == 5
    curve = {10: accuracy(rate, rho, seed, 10)} if lost else {t: accuracy(rate, rho, seed, t) for t in (10, 20)}
    state, rounds, last = ("diverged", 15, None) if lost else ("done", 20, curve[20])
    metrics = {"accuracy": curve, "loss": dict.fromkeys(curve, 1.0)}
    ledger.add(
        [Row(trial.key, trial.model_dump_json(), state, "", rounds, last, last, metrics, 1.0, 1.0, 0.5, 1.0, 4.0)]
    )
    return trial.key


@pytest.fixture(scope="module")
def file(folder, tmp_path_factory):
    from orchestrator.report.benchmark.export import write_export

    table, card = write_export(folder, tmp_path_factory.mktemp("export"))
    assert "18 training runs, 34 rows" in card.read_text(encoding="utf-8")
    return table


def test_every_trial_by_round_is_a_row(file):
    found = pd.read_parquet(file)
    assert list(found.columns)[: len(COLUMNS)] == list(COLUMNS)
    assert len(found) == 16 * 2 + 2  # methods x configurations x seeds x rounds; what diverged has one round
    one = found[(found["method"] == "dp-fedsofim") & (found["hp_rho"] == 10) & (found["hp_learning_rate"] == 1)]
    assert one[["seed", "round", "accuracy"]].values.tolist() == [[1, 10, 16], [1, 20, 26], [2, 10, 17], [2, 20, 27]]
    assert set(found["state"]) == {"done", "diverged"}
    assert set(found["hp_direction"].dropna()) == {"momentum"}
    assert found["key"].nunique() == 18


def test_the_export_is_reproducible(folder, file, tmp_path, fedsweep):
    code, out, _ = fedsweep("export", folder, "--out", tmp_path)
    assert code == 0
    assert out.split() == [str(tmp_path / "trials.parquet"), str(tmp_path / "README.md")]
    assert (tmp_path / "trials.parquet").read_bytes() == file.read_bytes()


def test_a_configuration_is_looked_up_as_the_mean_over_seeds(file):
    task = Task.load(file, "dp-fedsofim", 1)
    assert task.axes == {"learning_rate": [0.1, 1.0, 5.0], "rho": [0.5, 10.0]}
    assert task.curve({"learning_rate": 1.0, "rho": 10.0}) == {10: 16.5, 20: 26.5}
    assert Task.load(file, "DP-FedSOFIM", 1, seeds=[2]).curve({"learning_rate": 1.0, "rho": 10.0}) == {10: 17, 20: 27}
    assert task.curve({"learning_rate": 2.0, "rho": 10.0}) is None
    with pytest.raises(UserError, match="hyperparameter 'beeta' is not in the table"):
        task.curve({"beeta": 1})


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"method": "dp-fedadam"}, "method = 'dp-fedadam' is not in the table; it has: DP-FedGD, DP-FedSOFIM"),
        ({"epsilon": 3.0}, r"epsilon = 3\.0 is not in the table; it has: 1"),
        ({"split": "test"}, "split = 'test' is not in the table; it has: validation"),
        ({"metric": "f1"}, "metric = 'f1' is unknown"),
    ],
)
def test_missing_entries_are_errors(file, asked, message):
    with pytest.raises(UserError, match=message):
        Task.load(file, **{"method": "dp-fedgd", "epsilon": 1.0, **asked})


def test_optuna_tunes_on_it(file):
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=1))
    study.optimize(Task.load(file, "dp-fedsofim", 1).optuna_objective(), n_trials=30)
    assert study.best_params == {"learning_rate": 1.0, "rho": 10.0}
    assert study.best_value == 26.5
    assert study.best_trial.intermediate_values == {10: 16.5, 20: 26.5}


def test_tune_gets_reports_by_round(file, monkeypatch):
    """As Tune does: send the function to a worker, call it, collect its reports."""
    from ray import cloudpickle, tune

    heard = []
    monkeypatch.setattr(tune, "report", heard.append)
    task = Task.load(file, "dp-fedsofim", 1)
    best = next(each for each in task.configurations if (each["learning_rate"], each["rho"]) == (1, 10))
    cloudpickle.loads(cloudpickle.dumps(task.tune_trainable()))({"configuration": best})
    assert heard == [{"accuracy": 16.5, "round": 10}, {"accuracy": 26.5, "round": 20}]


def test_the_command_shows_the_best_first(file, fedsweep):
    code, out, _ = fedsweep("lookup", file, "--method", "dp-fedsofim", "--epsilon", 1, "--set", "rho=0.5", "--json")
    assert code == 0
    runs = json.loads(out)["runs"]
    assert [run["configuration"]["learning_rate"] for run in runs] == [1.0, 5.0, 0.1]
    code, _, err = fedsweep("lookup", file, "--method", "dp-fedsofim", "--epsilon", 1, "--set", "beta=0.5")
    assert code == 2
    assert "--set beta is not searched over" in err
    code, _, err = fedsweep("lookup", file, "--method", "dp-fedsofim", "--epsilon", 1, "--seed", 9)
    assert (code, "no run of dp-fedsofim has seed = [9]" in err) == (2, True)


def test_a_configuration_of_which_a_seed_diverged_has_no_result(file):
    """Even if its score was the best before; the other seeds do not stand for it."""
    task = Task.load(file, "dp-fedgd", 1)
    assert str(task.curve({"learning_rate": 5.0})) == str({10: task.curve({"learning_rate": 5.0})[10], 15: math.nan})
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler(task.axes))
    study.optimize(task.optuna_objective())
    pruned = [trial.params for trial in study.trials if trial.state == optuna.trial.TrialState.PRUNED]
    assert pruned == [{"learning_rate": 5.0}]


def test_other_files_are_refused(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        Task.load(tmp_path / "x.parquet", "dp-fedgd", 1)
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "y.parquet")
    with pytest.raises(UserError, match="has no column 'study'"):
        Task.load(tmp_path / "y.parquet", "dp-fedgd", 1)


def test_configurations_stopped_by_halving_are_not_results(file):
    """Their curves may be the highest where they end; tuners see them as pruned, and lookups list them last."""
    whole = pd.read_parquet(file)
    first = whole["configuration"] == json.dumps({"learning_rate": 1.0}, sort_keys=True)
    assert first.any()
    cut = whole[~(first & (whole["round"] == 20))].copy()
    cut.loc[first, "rounds"] = 10
    task = Task(cut[cut["method"] == "dp-fedgd"])
    assert [task.was_cut({"learning_rate": rate}) for rate in RATES] == [False, True, False]
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler(task.axes))
    study.optimize(task.optuna_objective(), n_trials=3)
    assert study.best_params == {"learning_rate": 0.1}
    again = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler(task.axes))
    again.optimize(task.optuna_objective(rounds=10), n_trials=3)
    assert again.best_params == {"learning_rate": 1.0}, "up to there it is known"


@pytest.mark.parametrize(
    ("column", "name", "values"), [("clip", "clip", (10.0, 3.0)), ("of_rounds", "rounds", (20, 40))]
)
def test_runs_with_another_clip_or_number_of_rounds_are_not_averaged(file, tmp_path, column, name, values):
    """A study that tunes them has runs that differ in nothing else."""
    whole = pyarrow.parquet.read_table(file)
    other = whole.to_pandas()
    other = other.assign(**{column: values[1], "accuracy": other["accuracy"] + 30, "key": other["key"] + "x"})
    both = pyarrow.concat_tables([whole, pyarrow.Table.from_pandas(other, whole.schema, preserve_index=False)])
    pyarrow.parquet.write_table(both, tmp_path / "both.parquet")
    one, both = Task.load(file, "dp-fedgd", 1), Task.load(tmp_path / "both.parquet", "dp-fedgd", 1)
    assert name not in one.axes
    assert set(both.axes) == {"learning_rate", name}
    plain = one.curve({"learning_rate": 1.0})
    assert both.curve({"learning_rate": 1.0, name: values[0]}) == plain
    assert both.curve({"learning_rate": 1.0, name: values[1]}) == {t: score + 30 for t, score in plain.items()}
    assert one.curve({"learning_rate": 1.0, name: values[0]}) == plain, "the only value may be given"

"""Studies of estimation problems: squared error as the metric, new data for every seed, budgets given as mu."""

import json
import math
from pathlib import Path

import pytest
import whole_study
import yaml
from simulated_search import trial_of

from orchestrator import cli
from orchestrator.execution.cell_search import CellSearch
from orchestrator.execution.training import from_best
from orchestrator.results.ledger import Ledger
from orchestrator.results.status import as_text, read
from orchestrator.search.candidates import candidates_of
from orchestrator.search.objective import ACCURACY, objective_of
from orchestrator.search.selection import choose, ranked
from orchestrator.study import reading
from orchestrator.study.cells import PreparedStudy
from trainables.errors import UserError
from trainables.federation.problem import ProblemData
from trainables.federation.server import run_pack
from trainables.privacy.gaussian import epsilon_of

TEXT = """
name: estimates
data:
  - source: simulated:logistic,2,40,equal,2
  - source: simulated:logistic,3,40,equal,2
partitions: [explicit]
clients: auto
model: auto
objective: squared_error
methods:
  - dp-fedsgd: {coarse: {learning_rate: [0.1, 1]}, fine: {learning_rate: [0.1, 0.5]}}
  - dp-fednewton:
      rounds: 2
      fixed: {local_steps: 3, fedavg_share: 0.5, hessian_share: 0.5, hessian_clip: 1}
      coarse: {client_learning_rate: [0.5]}
      fine: {client_learning_rate: [0.5]}
epsilons: ["mu=4"]
defaults: paper
privacy: {clip: 1.8}
rounds: {coarse: 6, fine: 6, confirm: 8}
seeds: {search: 9, contest: [], confirm: [1, 2, 3]}
search: {refine: table}
evaluate_every: 2
"""


LOGISTIC, FROZEN = "simulated:logistic,2,40,equal,2", "synthetic-frozen:90,30,3,3"


def study(text: str = TEXT):
    return reading.parse(text, "study.yaml", Path())


def changed(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("estimates")
    whole_study.run(TEXT, folder)
    return folder


# ---- the study


def test_a_budget_may_be_stated_as_mu():
    assert study().epsilons == [epsilon_of(4.0, 1e-5)]
    other = study(changed("{clip: 1.8}", "{clip: 1.8, delta: 1.0e-3}"))
    assert other.epsilons == [epsilon_of(4.0, 1e-3)]
    as_text = study(changed("{clip: 1.8}", "{clip: 1.8, delta: 1e-3}"))
    assert as_text.epsilons == other.epsilons, "YAML reads 1e-3 as text"
    mixed = study(changed('["mu=4"]', '[1, "mu=0.5"]'))
    assert mixed.epsilons == [1.0, epsilon_of(0.5, 1e-5)]


@pytest.mark.parametrize("budget", ["mu=", "mu=-1", "mu=many", "mu=nan", "nu=1"])
def test_a_bad_budget_is_named(budget):
    with pytest.raises(UserError, match=r"study.yaml:\d+: ") as caught:
        study(changed("mu=4", budget))
    assert repr(budget) in str(caught.value)


def test_clients_and_model_follow_the_data():
    prepared = PreparedStudy.prepare(study())
    problems = [trial_of(cell, "coarse", {}).problem for cell in prepared.cells]
    assert [problem.partition.clients for problem in problems] == [2, 2, 3, 3]
    assert {problem.model for problem in problems} == {"logistic"}
    assert prepared.most_clients == 3
    plain = PreparedStudy.prepare(study(changed("partitions: [explicit]", "partitions: [iid]")))
    assert trial_of(plain.cells[2], "coarse", {}).problem.partition.clients == 3


def test_every_seed_draws_data_of_its_own():
    cell = PreparedStudy.prepare(study()).cells[0]
    trials = [trial_of(cell, "confirm", {}, seed) for seed in (1, 2, 3)]
    fingerprints = [trial.problem.data.fingerprint for trial in [trial_of(cell, "coarse", {}), *trials]]
    assert fingerprints == [f"simulated:1:logistic,2,40,equal,2,{seed}" for seed in (9, 1, 2, 3)]
    fixed = PreparedStudy.prepare(study(changed("logistic,2,40,equal,2", "logistic,2,40,equal,2,5"))).cells[0]
    assert len({trial_of(fixed, "confirm", {}, seed).problem.key for seed in (1, 2, 3)}) == 1
    assert trial_of(fixed, "confirm", {}).problem.data.fingerprint.endswith(",5")


def test_a_method_may_have_rounds_of_its_own():
    prepared = PreparedStudy.prepare(study())
    rounds = {(c.method.name, s): trial_of(c, s, {}).rounds for c in prepared.cells[:2] for s in ("coarse", "confirm")}
    assert list(rounds.values()) == [6, 8, 2, 2]
    assert study().last_round == 8


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            changed("model: auto", "model: softmax"),
            "objective = 'squared_error': data simulated:logistic,2,40,equal,2 ",
        ),
        (changed("simulated:logistic,2", "simulated:poisson,2").replace("squared_error", "accuracy"), "are counts"),
        (
            changed("explicit", "iid").replace("auto", "2", 1).replace(LOGISTIC, FROZEN),
            "synthetic-frozen:90,30,3,3 has no",
        ),
        (changed("rounds: 2", "rounds: 1"), "fedavg_rounds = 1 leaves none of 1 rounds"),
        (changed("objective: squared_error", "objective: error"), "objective: "),
        (changed("clients: auto", "clients: 0"), "clients: "),
        (changed("clients: auto", "clients: some"), "clients: "),
    ],
)
def test_what_makes_no_sense_is_said(text, sentence):
    with pytest.raises(UserError, match=sentence):
        PreparedStudy.prepare(study(text))


# ---- the objective


def test_which_way_is_better():
    low, high = candidates_of(["low", "high"], 1)
    outcomes = {"low": ("done", 1.0, 9.0), "high": ("done", 2.0, 8.0)}
    assert ranked([low, high], outcomes) == [high, low]
    for objective in (objective_of("loss"), objective_of("squared_error")):
        assert ranked([high, low], outcomes, objective) == [low, high]


def test_the_smallest_error_is_chosen():
    outcomes = {
        "a": ("done", 0.5, 1.0),
        "b": ("done", 0.2, 3.0),
        "c": ("diverged", None, None),
        "d": ("done", 0.2, 2.0),
    }
    found = choose(candidates_of("abcd", 1), outcomes, 100, objective_of("squared_error"))
    assert (found.key, found.score, found.within_standard_error) == ("d", 0.2, None)
    assert choose(candidates_of("abcd", 1), outcomes, 100, ACCURACY).key == "a"


def test_halving_keeps_the_smallest_error():
    text = changed("refine: table", "strategies: [halving], trials: 4, halving: {rungs: 2, keep: 0.5}")
    cell = PreparedStudy.prepare(study(text)).cells[0]
    outcomes = {}
    search = CellSearch(cell, cell.study.variants[0], outcomes, 10)
    stage, trials = search.next_stage()
    search.open(stage, trials)
    errors = {trial.key: float(-number % 3) for number, trial in enumerate(trials)}
    outcomes.update({key: ("done", error, 1.0) for key, error in errors.items()})
    stage, kept = search.next_stage()
    assert stage == "rung-2"
    best = sorted(trials, key=lambda trial: errors[trial.key])[: len(kept)]
    assert (
        [t.hyperparameters for t in kept]
        == [t.hyperparameters for t in best]
        != [t.hyperparameters for t in trials[: len(kept)]]
    )


# ---- from the ledger


def test_winners_are_chosen_by_their_error(finished):
    with Ledger.read(finished) as ledger:
        outcomes, stages = ledger.outcomes("squared_error"), ledger.stages()
        for (cell, strategy, stage), keys in stages.items():
            if stage != "coarse" or "FedSGD" not in cell:
                continue
            searched = ledger.rows([*keys, *stages[cell, strategy, "fine"]])
            best = min(searched, key=lambda key: searched[key].metrics["squared_error"][6])
            confirmed = ledger.rows(stages[cell, strategy, "confirm"]).values()
            assert {row.trial.hyperparameters["learning_rate"] for row in confirmed} == {
                searched[best].trial.hyperparameters["learning_rate"]
            }
            assert outcomes[best] == ("done", searched[best].metrics["squared_error"][6], searched[best].loss)
            assert searched[best].score("squared_error") == outcomes[best][1]


def test_tables_show_the_error(finished):
    text = (finished / "tables" / "README.md").read_text()
    assert "Squared error ‖θ − θ" in text
    assert "accuracy" not in text.split("## Words")[0].lower()
    names = {path.name for path in (finished / "tables").iterdir()}
    assert "squared-error-simulated-logistic-2-40-equal-2-explicit.md" in names
    assert not any(name.startswith(("accuracy", "mcnemar", "rounds-to-95")) for name in names)
    privacy = (finished / "tables" / "privacy-simulated-logistic-2-40-equal-2-explicit.md").read_text()
    assert "(μ = 4)" in privacy
    csv = (finished / "tables" / "squared-error-simulated-logistic-2-40-equal-2-explicit.csv").read_text().splitlines()
    with Ledger.read(finished) as ledger:
        keys = next(
            keys for (cell, _, s), keys in ledger.stages().items() if s == "confirm" and "newton" in cell.method
        )
        errors = [row.metrics["squared_error"][2] for row in ledger.rows(keys).values()]
    (newton,) = [line.split(",") for line in csv if "DP-FedNewton" in line]
    assert float(newton[-3]) == pytest.approx(sum(errors) / 3)


def test_best_and_status_name_the_objective(finished):
    best = yaml.safe_load((finished / "best.yaml").read_text())["cells"]
    entry = next(iter(best.values()))
    assert set(entry["test_squared_error"]) == {1, 2, 3}
    assert entry["validation_squared_error"] > 0
    found = read(finished)
    assert found["finished"]
    assert all(cell["best_validation_squared_error"] > 0 for cell in found["cells"])
    assert "best validation squared error" in as_text(found)


def test_a_winner_is_trained_again_on_its_own_draw(finished):
    best = yaml.safe_load((finished / "best.yaml").read_text())["cells"]
    cell = next(iter(best))
    for seed in (1, 3):
        training = from_best(finished / "best.yaml", cell, seed, None)
        (result,) = run_pack([training.trial], ProblemData.of(training.problem)).values()
        assert result.metrics["squared_error"][8] == best[cell]["test_squared_error"][seed]


# ---- figures


def test_figures_are_the_same_again(finished):
    pytest.importorskip("matplotlib")
    from orchestrator.report.figures import write_figures

    written = write_figures(finished)
    assert [path.name for path in written] == [
        f"score-by-{x}.{ending}" for x in ("round", "clients") for ending in ("png", "svg")
    ]
    before = [path.read_bytes() for path in written]
    assert [path.read_bytes() for path in write_figures(finished)] == before
    drawn = before[3].decode()
    for text in ("DP-FedSGD", "DP-FedNewton", "clients", "logistic, equal sizes around 40"):
        assert text in drawn


def test_a_study_that_does_not_vary_the_clients_has_one_figure(tmp_path):
    pytest.importorskip("matplotlib")
    from orchestrator.report.figures import write_figures

    whole_study.run(changed("  - source: simulated:logistic,3,40,equal,2\n", ""), tmp_path)
    assert [path.stem for path in write_figures(tmp_path)] == ["score-by-round"] * 2


# ---- the command line


def test_calibrate_takes_mu():
    from typer.testing import CliRunner

    found = CliRunner().invoke(cli.app, ["calibrate", "--mu", "1", "--json"])
    report = json.loads(found.stdout)
    assert report["mu"] == pytest.approx(1, rel=1e-6)
    assert report["epsilon"]["claimed"] == pytest.approx(epsilon_of(1.0, 1e-5))
    assert report["epsilon"]["actual"]["local"] <= report["epsilon"]["claimed"]
    assert math.isfinite(report["noise_multiplier"])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("calibrate --mu 0", "mu = 0 is not in"),
        ("calibrate --mu 1 --epsilon 2", "epsilon = 2 and mu = 1 state the budget twice"),
        ("calibrate", "--epsilon or --mu"),
        ("train --mu nan", "mu = nan"),
        ("train --data simulated:probit,2,40,equal,2 --mu 1", "TASK = 'probit' is unknown"),
    ],
)
def test_a_mistake_is_one_sentence(flags, sentence, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fedsweep", *flags.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert sentence in said
    assert said.count("\n") == 1

"""Metrics: each against its definition, in a trial, and as a plug-in."""

import json
import re
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from plugin_registry import temporary_plugins
from repository_files import DOCS, blocks

from orchestrator.execution import study_run
from orchestrator.execution.progress import View
from orchestrator.report.figures import write_figures
from orchestrator.report.html.data import gather
from orchestrator.results import frames
from orchestrator.results.clients import worst_tenth
from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import Results
from orchestrator.study.reading import load
from trainables.data.partition import PartitionSpec
from trainables.errors import UserError
from trainables.federation.trial_spec import DataSpec, ProblemSpec, TrialSpec
from trainables.metrics import METRICS, get
from trainables.metrics.base import BuiltIn, Predictions
from trainables.plugins import FOLDERS, VARIABLE, use
from trainables.privacy.plan import PrivacySettings

ROWS, CLIENTS = 120, 13


def predictions(classes: int, seed: int = 0) -> Predictions:
    """Scores with ties, labels and clients at random."""
    random = np.random.default_rng(seed)
    scores = np.round(random.normal(size=(ROWS, classes)) * 8) / 8
    labels = random.permutation(np.arange(ROWS) % classes)
    scores[np.arange(ROWS), labels] += random.random(ROWS) > 0.5
    clients = random.integers(0, CLIENTS, ROWS)
    return Predictions(*(torch.from_numpy(values) for values in (scores, labels, clients)))


def probabilities(given: Predictions) -> np.ndarray:
    return given.scores.softmax(1).numpy()


def is_first(given: Predictions, places: int = 1) -> np.ndarray:
    """Whether the true class beats all but `places` - 1 others strictly."""
    pairs = zip(given.scores.numpy(), given.labels.numpy(), strict=True)
    return np.array([sum(other >= row[label] for other in row) - 1 < places for row, label in pairs])


def accuracies(given: Predictions) -> list[float]:
    right, clients = is_first(given), given.clients.numpy()
    return sorted(100 * right[clients == client].mean() for client in set(clients))


def one_against_others(given: Predictions, area) -> float:
    p, labels = probabilities(given), given.labels.numpy()
    classes = [1] if given.classes == 2 else range(given.classes)
    return 100 * np.mean([area(p[:, c], labels == c) for c in classes])


def auroc(scores, positive):
    """Every positive row against every negative one."""
    pairs = [(a > b) + (a == b) / 2 for a in scores[positive] for b in scores[~positive]]
    return np.mean(pairs)


def average_precision(scores, positive):
    """At every distinct threshold: the gain in recall times the precision."""
    total, recall = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        chosen = scores >= threshold
        reached = (chosen & positive).sum() / positive.sum()
        total += (reached - recall) * (chosen & positive).sum() / chosen.sum()
        recall = reached
    return total


def macro_f1(given: Predictions) -> float:
    predicted, labels = given.scores.numpy().argmax(1), given.labels.numpy()
    scores = []
    for c in set(predicted) | set(labels):
        both = ((predicted == c) & (labels == c)).sum()
        precision, recall = both / max(1, (predicted == c).sum()), both / max(1, (labels == c).sum())
        scores.append(2 * precision * recall / (precision + recall) if both else 0.0)
    return 100 * np.mean(scores)


def calibration_error(given: Predictions) -> float:
    p, labels = probabilities(given), given.labels.numpy()
    confidence, right, total = p.max(1), given.scores.numpy().argmax(1) == labels, 0.0
    for low in np.arange(15) / 15:
        inside = (confidence > low) & (confidence <= low + 1 / 15)
        if inside.any():
            total += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
    return 100 * total


def balanced(given: Predictions) -> float:
    right, labels = is_first(given), given.labels.numpy()
    return 100 * np.mean([right[labels == c].mean() for c in set(labels)])


DEFINITIONS = {
    "auroc": lambda given: one_against_others(given, auroc),
    "average_precision": lambda given: one_against_others(given, average_precision),
    "balanced_accuracy": balanced,
    "calibration_error": calibration_error,
    "macro_f1": macro_f1,
    "top_5": lambda given: 100 * is_first(given, 5).mean(),
    "worst_client_accuracy": lambda given: accuracies(given)[0],
    "worst_decile_accuracy": lambda given: np.mean(accuracies(given)[:2]),
}


def test_every_metric_has_a_definition_here():
    assert set(DEFINITIONS) == {name for name, metric in METRICS.items() if not isinstance(metric, BuiltIn)}


@pytest.mark.parametrize("classes", [2, 7])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_metric_equals_its_definition(name, classes):
    for seed in range(3):
        given = predictions(classes, seed=seed)
        assert float(get(name).compute(given)) == pytest.approx(DEFINITIONS[name](given), rel=1e-12)


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if metric.row_influence])
def test_one_row_changes_a_metric_by_at_most_its_declared_influence(name):
    """A private search calibrates its noise to this."""
    if isinstance(get(name), BuiltIn):
        return  # accuracy: a count divided by the number of rows
    random = np.random.default_rng(1)
    for seed in range(20):
        given = predictions(9, seed=seed)
        scores, labels = given.scores.clone(), given.labels.clone()
        row = int(random.integers(ROWS))
        scores[row], labels[row] = torch.from_numpy(random.normal(size=9) * 10), int(random.integers(9))
        after = float(get(name).compute(Predictions(scores, labels, None)))
        change = abs(after - float(get(name).compute(given)))
        assert change <= get(name).row_influence / ROWS + 1e-9


def test_weights_of_zero_get_no_credit():
    given = predictions(3)._replace(scores=torch.zeros(ROWS, 3))
    assert float(get("balanced_accuracy").compute(given)) == 0
    assert float(get("auroc").compute(given)) == 50


def test_classes_without_rows_are_left_out():
    given = predictions(4)
    given = given._replace(labels=given.labels.clamp(max=1))
    for name in ("auroc", "average_precision", "balanced_accuracy", "macro_f1"):
        assert np.isfinite(float(get(name).compute(given)))


def test_an_unknown_metric_is_refused():
    with pytest.raises(UserError, match="metric = 'auc'"):
        get("auc")


STUDY = """\
name: several
data: [{source: users.npz}]
partitions: [explicit]
clients: auto
methods: [{dp-fedgd: {coarse: {learning_rate: [0.1, 1, 10]}, fine: {learning_rate: [1]}}}]
epsilons: [40]
privacy: {clip: 2}
rounds: {coarse: 4, fine: 4, confirm: 6}
seeds: {search: 42, contest: [], confirm: [42, 7]}
search: {refine: table}
evaluate_every: 2
objective: macro_f1
metrics: [accuracy, auroc, worst_decile_accuracy, calibration_error]
defaults: paper
"""


def users(folder, **changes) -> None:
    random = np.random.default_rng(3)
    centres = random.normal(size=(3, 5)) * 2
    arrays = {}
    for part, rows in (("train", 600), ("test", 240)):
        labels = random.permutation(np.arange(rows) % 3)
        arrays |= {f"y_{part}": labels, f"x_{part}": centres[labels] + random.normal(size=(rows, 5))}
        arrays[f"client_{part}"] = random.permutation(np.arange(rows) % 12)
    np.savez(folder / "users.npz", **{name: array for name, array in (arrays | changes).items() if array is not None})


def run(folder, text=STUDY):
    (folder / "study.yaml").write_text(text)
    study, text = load(str(folder / "study.yaml"))
    study_run.run(study, text, folder / "results", View(), backend="local")
    return folder / "results"


def test_a_study_with_several_metrics(tmp_path):
    users(tmp_path)
    results = run(tmp_path)
    tables = {file.stem for file in (results / "tables").glob("*.md")}
    others = {"accuracy", "auroc", "worst-decile-accuracy", "calibration-error"}
    assert {"macro-f1", *others} <= tables
    with Ledger.read(results) as ledger:
        read = Results.read(ledger)
        (cell,) = read.cells
        row = next(iter(cell.confirm.values()))
        scores = {key: score for key, (_, score, _) in ledger.outcomes("macro_f1").items()}
        searched = {key: scores[key] for stage in ("coarse", "fine") for key in cell.stages[stage]}
        assert cell.search.choice.score == max(searched.values()), "the objective ranks"
        assert {"macro_f1", "accuracy", "loss", "auroc", "worst_decile_accuracy"} <= set(row.metrics)
        assert cell.curve[6].mean == pytest.approx(np.mean([r.metrics["macro_f1"][6] for r in cell.confirm.values()]))
        accuracy = read.by_metric("accuracy").cells[0].curve[6].mean
        assert accuracy == np.mean([r.accuracy for r in cell.confirm.values()])
        page = json.dumps(gather(ledger, "results"))
        trials = frames.trials(ledger, read)
    assert "macro-F1 (%)" in page
    assert trials["auroc"].between(0, 100).all()


def test_a_retrained_winner_and_its_predictions_show_the_metrics_of_the_study(tmp_path, fedsweep):
    users(tmp_path)
    best, model = run(tmp_path) / "best.yaml", tmp_path / "model.npz"
    code, out, err = fedsweep("train", "--from", best, "--save", model, "--json")
    assert code == 0, err
    report = json.loads(out)
    last = {name: values["6"] for name, values in report["metrics"].items() if values}
    assert re.search(rf"│ +6 │ +{last['macro_f1']:.3f} │ +{last['auroc']:.3f} │", err), "the objective comes first"
    code, out, err = fedsweep("predict", model, tmp_path / "users.npz", "--output", tmp_path / "classes.csv")
    assert code == 0, err
    shown = [line for line in out.splitlines() if line.endswith("%")]
    assert shown == [
        f"macro-F1: {last['macro_f1']:.2f}%",
        f"AUROC: {last['auroc']:.2f}%",
        f"expected calibration error: {last['calibration_error']:.2f}%",
        f"accuracy: {last['accuracy']:.2f}%",
        "always answering the largest class: 33.33%",
    ], "worst-decile accuracy needs the clients of the rows"


@pytest.mark.parametrize("named", [False, True])
def test_results_by_client(tmp_path, named):
    """A table with every client in its CSV file, and a figure; both say that they are not for publication."""
    users(tmp_path)
    if named:
        with np.load(tmp_path / "users.npz") as file:
            arrays = dict(file)
        arrays |= {name: np.array([f"user {n:02}" for n in arrays[name]]) for name in ("client_train", "client_test")}
        np.savez(tmp_path / "users.npz", **arrays)
    results = run(tmp_path)
    with Ledger.read(results) as ledger:
        read = Results.read(ledger)
        (partition,) = gather(ledger, "results")["partitions"]
    assert partition["clients"] == ([f"user {n:02}" for n in range(12)] if named else []), "names in the report"
    assert partition["classes"] == [], "this file only numbers its classes"
    (cell,) = read.cells
    clients = np.load(tmp_path / "users.npz")["client_test"]
    right = np.mean(
        [np.unpackbits(np.frombuffer(row.correct, np.uint8))[:240] for row in cell.confirm.values()], axis=0
    )
    expected = {client: 100 * right[clients == client].mean() for client in np.unique(clients).tolist()}
    assert len(expected) == 12
    table = pd.read_csv(results / "tables" / "clients.csv").set_index("client")
    assert table["accuracy"].to_dict() == pytest.approx(expected)
    assert (table["train_rows"].sum(), table["test_rows"].sum()) == (600, 240)
    page = (results / "tables" / "clients.md").read_text()
    assert f"{min(expected.values()):.2f}" in page
    assert "not for publication" in page
    files = {file.name: file for file in write_figures(results)}
    assert "mathdefault" not in files["accuracy-by-client.svg"].read_text(), "numbers of a logarithmic axis are plain"
    worst = np.mean([row.metrics["worst_decile_accuracy"][6] for row in cell.confirm.values()])
    assert worst <= np.mean([one.accuracy for one in worst_tenth(read.by_client(cell))]) + 1e-9


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            ("objective: macro_f1", "objective: f1"),
            r"study.yaml:12: objective: 'f1' is unknown; did you mean macro_f1\? Choose one of: accuracy",
        ),
        (("[accuracy, auroc,", "[auroc, auroc,"), r"study.yaml:13: metrics: a metric is named twice"),
        (("search: {refine: table}", "search: {strategies: [private]}"), "metric macro_f1: the influence of"),
    ],
)
def test_unusable_metrics_are_refused(tmp_path, change, sentence):
    users(tmp_path)
    with pytest.raises(UserError, match=sentence):
        run(tmp_path, STUDY.replace(*change))


def test_the_page_lists_every_metric_and_its_example_runs(tmp_path, monkeypatch):
    page = (DOCS / "metrics.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)) == set(METRICS)
    (program,) = blocks(DOCS / "metrics.md", "python")
    (tmp_path / "geometric_mean.py").write_text(program)
    users(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for variable in (VARIABLE, FOLDERS):
        monkeypatch.setenv(variable, "")
    with temporary_plugins():
        use(str(tmp_path / "geometric_mean.py"))
        results = run(tmp_path, STUDY.replace("objective: macro_f1", "objective: geometric_mean"))
    assert "geometric mean of recalls (%)" in (results / "tables" / "geometric-mean.md").read_text()


def test_metrics_by_client_need_the_clients_of_the_test_rows(tmp_path):
    users(tmp_path, client_test=None)
    with pytest.raises(UserError, match="metric worst_decile_accuracy needs the client of every test row"):
        run(tmp_path)


def test_further_metrics_change_no_key_and_no_result_of_others():
    """Keys of trials without further metrics are those of earlier versions: tests/goldens.json."""
    spec = TrialSpec(
        problem=ProblemSpec(
            data=DataSpec(fingerprint="x"),
            partition=PartitionSpec(kind="iid", clients=2, seed=1),
            train_on="train",
            evaluate_on="validation",
        ),
        method="dp-fedgd",
        hyperparameters={},
        privacy=PrivacySettings(epsilon=1.0),
        rounds=1,
    )
    assert spec.key != spec.model_copy(update={"metrics": ("auroc",)}).key

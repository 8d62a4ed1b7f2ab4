"""What may be published holds no function of the data that was not priced, and states the price of everything."""

import itertools
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import private_study
import pytest
import small
import yaml
from handmade_rows import HAS_KEY

from orchestrator.execution import study_run
from orchestrator.execution.progress import View
from orchestrator.execution.training import Trained, Training, saved_model, with_secret_noise
from orchestrator.report.export import export
from orchestrator.report.html import read as read_page
from orchestrator.report.html import write_report
from orchestrator.report.tables import write_tables
from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import Results
from orchestrator.study.reading import parse
from trainables.data import features
from trainables.federation.hosts import Hosts
from trainables.federation.pack import check
from trainables.federation.problem import ProblemData
from trainables.federation.saved_model import SavedModel
from trainables.federation.server import Server
from trainables.privacy.gaussian import mu_of
from trainables.privacy.private_selection import Search, private_searches

DELTA = 1e-5
LEDGER_FILES = ("ledger", "fedsweep.log", "study.yaml")
"""What a results folder keeps to itself; study.yaml is what the user wrote."""


@pytest.fixture(scope="module")
def private(tmp_path_factory) -> tuple[Path, Path]:
    """A private search of two partitions of a data file, and the file."""
    home = tmp_path_factory.mktemp("published")
    drawn = features.load("synthetic-frozen:300,60,6,3")
    arrays = {name: getattr(drawn, name) for name in ("x_train", "y_train", "x_test", "y_test")}
    np.savez(home / "patients.npz", **arrays)
    text = private_study.TEXT.replace('"synthetic-frozen:400,100,6,3"', "patients.npz").replace(
        "[iid]", '[iid, "dirichlet:5"]'
    )
    finished = study_run.run(parse(text, "tiny.yaml", home), text, home / "results", View(), backend="local")
    assert finished.complete
    study_run.draw_figures(home / "results")
    write_report([str(home / "results")], home / "results" / "report.html")
    return home / "results", home / "patients.npz"


def published_files(folder: Path) -> dict[str, bytes]:
    """Everything in the folder that is not to be kept secret, the page, and what commands export."""
    found = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(LEDGER_FILES)
    }
    with Ledger.read(folder) as ledger:
        export(ledger, "csv", folder.parent / "export")
    found |= {f"export/{path.name}": path.read_bytes() for path in (folder.parent / "export").iterdir()}
    found["report"] = json.dumps(read_page([str(folder)])).encode()
    return found


def derived_values(ledger: Ledger) -> dict[str, str]:
    """Values in the ledger that follow from the data without noise, and the secrets."""
    rows = ledger.rows(ledger.outcomes())
    hashes = [value.removeprefix("sha256:") for value in ledger.fingerprints().values()]
    keys = {key for row in rows.values() for key in (row.key, row.trial.problem.key)}
    noise = {row.trial.noise_key for row in rows.values()}
    assert len(hashes[0]) == 64
    assert all(len(key) == 32 for key in noise)
    secrets = [secret.hex() for secret in ledger.secrets().values()]
    return dict.fromkeys([*hashes, *keys, *noise, *secrets, *(str(row.trial.seed) for row in rows.values())], "")


def test_no_published_file_of_a_private_search_has_a_hash_of_the_data_or_a_secret(private):
    """Someone who knows all records but one can compare it with the hashes of all candidates; a prefix is enough."""
    with Ledger.read(private[0]) as ledger:
        values = derived_values(ledger)
        counts = [client for clients in ledger.partitions().values() for client in clients]
    assert len(values) > 10
    for name, content in published_files(private[0]).items():
        text = content.decode("latin-1")
        found = [value for value in values if value[:8] in text]
        assert not found, f"{name} holds {found}"
        for rows in counts:
            assert json.dumps(rows) not in text, f"{name} holds the class counts of a client"


def test_labels_do_not_decide_which_rows_validate_in_a_private_search(private):
    """A stratified split would: then one label moves many rows, and the number of validation rows reveals it."""
    data = features.load(str(private[1]))
    with Ledger.read(private[0]) as ledger:
        rows = ledger.rows(ledger.outcomes())
        facts = ledger.settings()
    assert {row.trial.problem.data.stratified for row in rows.values()} == {False}
    assert {fact.validation_rows for fact in facts.values()} == {30}
    kept = data.validation_rows(0.1, 42, stratified=False)
    changed = features.from_arrays(
        {"x_train": data.x_train, "y_train": (data.y_train + 1) % 3, "x_test": data.x_test, "y_test": data.y_test}
    )
    assert kept.tolist() == changed.validation_rows(0.1, 42, stratified=False).tolist()
    assert kept.tolist() != data.validation_rows(0.1, 42).tolist()


# ---- a model with secret noise


def trained(evaluate_on: str = "test", train_on: str = "all", **settings) -> tuple[Training, Trained]:
    of = small.problem(evaluate_on=evaluate_on, train_on=train_on)
    trial = small.trial(of, "dp-fedgd", epsilon=0.1).model_copy(update=settings)
    training = with_secret_noise(Training(trial, of, check(trial, of), data_id="patients"))
    server = Server(Hosts(1))
    server.open([training.trial], ProblemData.of(of))
    (result,) = server.advance(trial.rounds)
    return training, Trained(result, 0.0, server.final_weights())


def test_a_model_with_secret_noise_has_no_hash_of_the_data_and_no_key(tmp_path):
    training, came = trained()
    saved_model(training, came, secret=True).save(tmp_path / "m.npz")
    text = json.dumps(SavedModel.load(tmp_path / "m.npz").provenance)
    problem = training.trial.problem
    for value in (problem.data.fingerprint, training.trial.noise_key, training.trial.key, problem.key):
        assert value
        assert value[:12] not in text
    assert "fingerprint" not in text
    assert "noise_key" not in text


@pytest.mark.parametrize(("evaluate_on", "train_on"), [("validation", "train"), ("test", "all")])
def test_a_model_has_only_metrics_of_test_rows(evaluate_on, train_on):
    training, came = trained(evaluate_on, train_on)
    assert came.result.metrics["accuracy"]
    for secret in (True, False):
        metrics = saved_model(training, came, secret=secret).provenance["metrics"]
        assert set(metrics) == ({"accuracy", "loss"} if evaluate_on == "test" else set())


def test_secret_noise_has_128_bits_and_shares_nothing_with_what_is_public():
    of = small.problem()
    trial = small.trial(of, "dp-fedgd")
    plain = Training(trial, of, check(trial, of))
    secrets = [with_secret_noise(plain).trial for _ in range(3)]
    assert len({one.noise_key for one in secrets}) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", one.noise_key) for one in secrets)
    assert {one.seed for one in secrets} == {trial.seed}, "the seed of the initial weights is public"
    start = [small.weights_after(0, [one], of)[0] for one in (trial, *secrets)]
    assert all(np.array_equal(start[0], weights) for weights in start)
    later = [small.weights_after(1, [one], of)[0] for one in (trial, *secrets)]
    assert not any(np.array_equal(one, other) for one, other in itertools.combinations(later, 2))
    assert trial.noise_key not in trial.model_dump()
    assert secrets[0].noise_key not in repr(secrets[0])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dp-fedsgd", {}),
        ("dp-fedsam", {}),
        ("dp-fedavg", {"level": "user", "release": "secure-aggregation", "secret_participation": 0.5}),
    ],
)
def test_secret_samples_and_coins_depend_on_the_key(name, settings):
    """Without noise, only the samples and the coins differ between two keys."""
    of = small.problem()
    trial = small.trial(of, name, epsilon=math.inf, **settings)
    keys = [trial.model_copy(update={"noise_key": key * 32}) for key in "ab"]
    one, other, again = (small.weights_after(2, [t], of)[0] for t in (*keys, keys[0]))
    assert np.array_equal(one, again)
    sampled = name == "dp-fedsam" or settings
    assert np.array_equal(one, other) == (not sampled)


# ---- the price


def test_every_caption_has_the_price_of_all_searches_of_the_records(private):
    """Two partitions of the same records: two searches, whose prices compose."""
    one = Search(mu_of(40, DELTA), 6.0)
    total, alone = private_searches([one, one], DELTA), private_searches([one], DELTA)
    assert total > alone * 1.2
    texts = {path: path.read_text() for path in (private[0] / "tables").glob("*.md")}
    assert len(texts) > 5
    for path, text in texts.items():
        (price,) = {float(found) for found in re.findall(r"costs ε = ([0-9.]+) at δ", text)}
        assert total <= price < total * 1.001, path.name
        assert "2 private searches together" in text
    page = read_page([str(private[0])])[0]
    assert all("2 private searches together" in table["caption"][0] for table in page["tables"])
    assert "dirichlet:5 is simulated from the labels" in texts[private[0] / "tables" / "README.md"]


def test_a_search_without_a_winner_is_counted(private, tmp_path):
    """All its runs diverged: that is a result too."""
    folder = Path(shutil.copytree(private[0], tmp_path / "lost"))
    with Ledger.write(folder) as ledger:
        stages = ledger.stages()
        cell = next(cell for cell, _, stage in stages if stage == "private")
        keys = stages[cell, "private", "private"]
        diverged = f"UPDATE trials SET state = 'diverged', accuracy = NULL WHERE {HAS_KEY}"
        ledger._db.executemany(diverged, ((key,) for key in keys))
        ledger._db.execute("DELETE FROM stages WHERE stage = 'confirm' AND cell = (SELECT min(number) FROM cells)")
        ledger.correct_counts()
        write_tables(ledger, folder)
        assert sum(cell.search.choice is None for cell in Results.read(ledger).cells) == 1
    before, after = ((place / "tables" / "README.md").read_text() for place in (private[0], folder))
    prices = [re.findall(r"costs ε = [0-9.]+ at δ = 1e-05: 2 private searches", text)[0] for text in (before, after)]
    assert prices[0] == prices[1]


def test_a_published_winner_can_be_trained_again(private):
    cells = yaml.safe_load((private[0] / "best.yaml").read_text())["cells"]
    assert all("fingerprint" not in entry for entry in cells.values())
    assert "may be published" in (private[0] / "best.yaml").read_text()
    from orchestrator.execution.training import from_best

    again = from_best(private[0] / "best.yaml", next(iter(cells)), 42, str(private[1]), secret_noise=True)
    assert again.trial.noise_key
    assert not again.trial.problem.data.stratified
    assert again.data_id == "patients"


# ---- what is for the analyst


def test_every_file_of_an_ordinary_study_says_that_it_is_for_the_analyst(tmp_path):
    text = private_study.TEXT.replace("strategies: [private], trials: 6", "strategies: [random], trials: 2")
    study_run.run(private_study.study(text), text, tmp_path / "results", View(), backend="local")
    sentence = "for the analyst and not for publication"
    folder = tmp_path / "results"
    files = [*folder.glob("tables/*.md"), *folder.glob("tables/*.tex"), *folder.glob("timing/*.md")]
    assert len(files) > 5
    study_run.draw_figures(folder)
    write_report([str(folder)], folder / "report.html")
    figures = [*folder.glob("figures/*")]
    assert {path.suffix for path in figures} == {".png", ".svg"}
    for path in (*files, *figures, folder / "best.yaml", folder / "report.html", folder / "fedsweep.log"):
        assert sentence in path.read_text("latin-1"), path.name
    with Ledger.read(folder) as ledger:
        export(ledger, "csv", tmp_path / "export")
    assert sentence in (tmp_path / "export" / "README.md").read_text()
    training, came = trained()
    assert saved_model(training, came, secret=False).provenance["note"].count(sentence) == 1
    assert "may be published" in saved_model(training, came, secret=True).provenance["note"]

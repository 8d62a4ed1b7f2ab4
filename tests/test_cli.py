"""The command line: JSON on standard output; bad input gives one sentence and exit code 2 before anything starts."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import ray
import small
from command_line import assert_one_sentence, last_json

from trainables.federation.problem import ProblemData
from trainables.federation.server import run_pack

TINY = "synthetic-frozen:300,60,6,3"


@pytest.fixture
def no_actors(monkeypatch):
    """Fail if Ray or an actor is started."""

    def forbidden(*arguments, **options):
        pytest.fail("Ray or an actor was started")

    monkeypatch.setattr(ray, "init", forbidden)
    monkeypatch.setattr("trainables.ray_actors.federation.RayFederation.__init__", forbidden)


# ---- bad input


def npz(folder: Path, **replaced) -> Path:
    """A small feature file with some arrays replaced."""
    arrays = {
        "x_train": np.ones((40, 3), dtype=np.float32),
        "y_train": np.arange(40) % 2,
        "x_test": np.ones((10, 3), dtype=np.float32),
        "y_test": np.arange(10) % 2,
    }
    path = folder / "bad.npz"
    np.savez(path, **{**arrays, **replaced})
    return path


def truncated(folder: Path) -> Path:
    path = npz(folder)
    path.write_bytes(path.read_bytes()[:-300])
    return path


BAD_FILES = {
    "missing": (lambda folder: folder / "absent.npz", "absent.npz"),
    "truncated": (truncated, "bad.npz"),
    "object array": (lambda folder: npz(folder, x_train=np.array([[{}]] * 40, dtype=object)), "Python objects"),
    "nan features": (lambda folder: npz(folder, x_train=np.full((40, 3), np.nan)), "x_train"),
    "labels out of range": (lambda folder: npz(folder, y_test=np.full(10, 7)), "label 7"),
    "negative labels": (lambda folder: npz(folder, y_train=np.arange(40) % 2 - 1), "label -1"),
}

BAD_FLAGS = {
    "unknown method": ("--method dp-fedbgd", "method = 'dp-fedbgd'"),
    "unknown key": ("--method dp-fedgd --set rho=1", "'rho'"),
    "key without value": ("--set rho", "'rho'"),
    "key given twice": ("--set rho=1 --set rho=2", "'rho'"),
    "value that is no number": ("--set rho=big", "rho = 'big'"),
    "epsilon zero": ("--epsilon 0", "epsilon = 0"),
    "epsilon negative": ("--epsilon -1", "epsilon = -1"),
    "epsilon nan": ("--epsilon nan", "epsilon = nan"),
    "epsilon no number": ("--epsilon small", "--epsilon"),
    "delta zero": ("--delta 0", "delta = 0"),
    "delta one": ("--delta 1", "delta = 1"),
    "delta above one": ("--delta 1.5", "delta = 1.5"),
    "delta negative": ("--delta=-1e-5", "delta = -1e-05"),
    "beta one": ("--method dp-fedsofim --set beta=1", "beta = 1"),
    "beta2 one": ("--method dp-fedadam --set beta2=1", "beta2 = 1"),
    "learning rate zero": ("--set learning_rate=0", "learning_rate = 0"),
    "clip zero": ("--clip 0", "clip = 0"),
    "more clients than rows": ("--clients 301 --partition iid", "clients = 301"),
    "no clients": ("--clients 0", "clients = 0"),
    "alpha that leaves empty clients": ("--partition dirichlet:0.001", "dirichlet:0.001"),
    "alpha zero": ("--partition dirichlet:0", "alpha = 0"),
    "unknown partition": ("--partition zipf", "'zipf'"),
    "too many classes a client": ("--partition classes:4", "classes:4"),
    "explicit without a column": ("--partition explicit", "client_train"),
    "no rounds": ("--rounds 0", "rounds = 0"),
    "never evaluated": ("--evaluate-every 0", "evaluate_every = 0"),
    "negative seed": ("--seed=-1", "seed = -1"),
    "negative partition seed": ("--partition-seed=-1", "partition_seed = -1"),
    "unknown release": ("--release trusted", "'trusted'"),
    "unknown adjacency": ("--adjacency near", "'near'"),
    "unknown train-on": ("--train-on test", "'test'"),
    "validation fraction": ("--validation-fraction 1", "validation_fraction = 1"),
    "trained on what judges": ("--train-on all --evaluate-on validation", "validation"),
    "unknown data": ("--data synthetic-thawed", "'synthetic-thawed'"),
    "sizes that are none": ("--data synthetic-frozen:1,2", "synthetic-frozen:1,2"),
    "unknown flag": ("--epsilom 1", "--epsilom"),
    "no hosts": ("--hosts 0", "hosts = 0"),
    "users of a method without": ("--method dp-ftrl --level user", "level = 'user': dp-ftrl"),
    "unknown level": ("--level household", "'household'"),
    "unknown model": ("--model tree", "model = 'tree'"),
    "no hidden units": ("--model mlp:0", "model = 'mlp:0'"),
    "model that a method cannot use": ("--method dp-fedfc --model mlp:4", "model = 'mlp:4': dp-fedfc"),
}


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_bad_flags(fedsweep, no_actors, name):
    flags, culprit = BAD_FLAGS[name]
    data = [] if "--data" in flags else ["--data", TINY]
    budget = [] if "--epsilon" in flags else ["--epsilon", 1]
    assert_one_sentence(fedsweep("train", *data, *budget, "--rounds", 2, *flags.split()), culprit)


def test_a_budget_is_never_assumed(fedsweep, no_actors):
    assert_one_sentence(fedsweep("train", "--data", TINY), "the budget is missing; state it with --epsilon or --mu")


@pytest.mark.parametrize("flag", ["--epsilon 3", "--rounds 5", "--set rho=1", "--method dp-fedgd", "--mu 1"])
def test_an_option_that_a_winner_would_ignore_is_refused(fedsweep, no_actors, flag):
    """Before the file is read."""
    result = fedsweep("train", "--from", "best.yaml", *flag.split())
    assert_one_sentence(result, f"{flag.split()[0]} cannot be combined with --from")


@pytest.mark.parametrize("address", ["127.0.0.1:9", "localhost:9"])
def test_an_unreachable_cluster_is_reported_immediately(fedsweep, address, monkeypatch):
    """Without `ray.init`, which would retry for ten minutes."""
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("ray.init was called"))
    result = fedsweep("train", "--data", TINY, "--partition", "iid", "--epsilon", 1, "--address", address)
    assert_one_sentence(result, f"no Ray cluster answers at address = '{address}'")


BAD_STUDIES = {
    "users of a method without": ("privacy: {level: user}", "level = 'user': dp-ftrl"),
    "unknown level": ("privacy: {level: household}", "level"),
    "no hidden units": ("model: mlp:0", "model = 'mlp:0'"),
    "unknown model": ("model: tree", "model = 'tree'"),
    "model that a method cannot use": ("model: mlp:4", "model = 'mlp:4': dp-fedfc"),
}


@pytest.mark.parametrize("name", BAD_STUDIES)
@pytest.mark.parametrize("command", ["run", "plan"])
def test_bad_studies(fedsweep, no_actors, tmp_path, command, name):
    line, culprit = BAD_STUDIES[name]
    study = tmp_path / "bad.yaml"
    study.write_text(
        f'name: bad\ndata: [{{source: "{TINY}"}}]\npartitions: [iid]\nclients: 5\n'
        f"methods: [dp-fedgd, dp-ftrl, dp-fedfc]\nepsilons: [1]\ndefaults: paper\n{line}\n"
    )
    folder = tmp_path / "results"
    where = ["--results", folder] if command == "run" else []
    assert_one_sentence(fedsweep(command, study, *where), culprit)
    assert not folder.exists(), "nothing was started"


@pytest.mark.parametrize("name", BAD_FILES)
@pytest.mark.parametrize("command", ["train", "partition"])
def test_bad_files(fedsweep, no_actors, tmp_path, command, name):
    make, culprit = BAD_FILES[name]
    budget = ["--epsilon", 1] if command == "train" else []
    assert_one_sentence(fedsweep(command, "--data", make(tmp_path), "--partition", "iid", *budget), culprit)


@pytest.mark.parametrize(
    ("flags", "culprit"),
    [
        ("--epsilon 0", "epsilon = 0"),
        ("--epsilon 1 --delta 1", "delta = 1"),
        ("--epsilon 1 --rounds 0", "rounds = 0"),
        ("--epsilon 1 --clients 0", "clients = 0"),
        ("", "--epsilon"),
    ],
)
def test_bad_calibrations(fedsweep, no_actors, flags, culprit):
    assert_one_sentence(fedsweep("calibrate", *flags.split()), culprit)


def test_unknown_command(fedsweep):
    assert_one_sentence(fedsweep("trian"), "trian")


def test_bad_input_in_a_new_process():
    """As a user sees it: no traceback."""
    found = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", "train", "--epsilon", "-3"],
        capture_output=True,
        text=True,
    )
    assert_one_sentence((found.returncode, found.stdout, found.stderr), "epsilon = -3")


def test_help_exits_with_0(fedsweep):
    for arguments in ([], ["--help"], ["train", "--help"]):
        code, out, _ = fedsweep(*arguments)
        assert code == 0
        assert "Usage" in out


def test_the_list_of_commands_has_whole_sentences(fedsweep):
    """A summary that does not fit into the line ends with three dots."""
    _, out, _ = fedsweep("--help")
    commands = out.partition("Commands:")[2].strip().splitlines()
    assert len(commands) > 20
    assert all(line.endswith(".") and not line.endswith("...") for line in commands), out


# ---- calibrate, partition, methods


@pytest.mark.parametrize(
    ("release", "sigma", "released"), [("local", 279.17, "local"), ("secure-aggregation", 62.43, "secure-aggregation")]
)
def test_calibrate(fedsweep, release, sigma, released):
    """Known values. The noise of the sum has standard deviation clip x sigma_g."""
    flags = f"--epsilon 1 --delta 1e-5 --rounds 70 --clients 20 --release {release} --adjacency replace-one --json"
    code, out, _ = fedsweep("calibrate", *flags.split())
    found = last_json(out)
    assert code == 0
    assert len(out.splitlines()) == 1
    assert found["noise_multiplier"] == pytest.approx(sigma, abs=0.005)
    assert found["noise_std_sum"] == pytest.approx(10 * found["noise_multiplier"])
    assert found["mu"] == pytest.approx(0.2681, abs=5e-5)
    assert found["epsilon"]["claimed"] == 1
    assert found["epsilon"]["actual"][released] == pytest.approx(1, rel=1e-6)
    assert found["epsilon"]["actual"][released] <= 1


def test_calibrate_as_text(fedsweep):
    code, out, _ = fedsweep("calibrate", "--epsilon", 1)
    assert code == 0
    assert "279.17" in out


def test_calibrate_without_privacy(fedsweep):
    """JSON has no infinity: it is written as a string."""
    code, out, _ = fedsweep("calibrate", "--epsilon", "inf", "--json")
    assert code == 0
    assert last_json(out)["noise_multiplier"] == 0
    assert last_json(out)["epsilon"] == {"claimed": "inf", "actual": {"local": "inf", "secure-aggregation": "inf"}}


def test_partition(fedsweep):
    code, out, err = fedsweep("partition", "--data", TINY, "--partition", "dirichlet:0.5", "--clients", 8, "--json")
    found = last_json(out)
    assert code == 0
    assert len(out.splitlines()) == 1
    counts = np.array(found["counts"])
    assert counts.shape == (8, 3)
    assert counts.sum(axis=1).tolist() == found["sizes"]
    assert counts.sum(axis=0).tolist() == [100, 100, 100]
    assert found["absent_classes"] == (counts == 0).sum(axis=1).tolist()
    p = counts / counts.sum(axis=1, keepdims=True)
    kl = [sum(v * np.log(3 * v) for v in row if v > 0) for row in p]
    assert found["kl_from_uniform"] == pytest.approx(kl, abs=1e-12)
    assert found["kl_mean"] == pytest.approx(np.mean(kl))
    assert all(note in err for note in found["notes"])


def test_partition_notes_topped_up_clients(fedsweep):
    code, out, err = fedsweep("partition", "--data", TINY, "--partition", "dirichlet:0.1", "--clients", 6, "--json")
    assert code == 0
    notes = last_json(out)["notes"]
    assert len(notes) > 0
    assert all(f"note: {note}" in err for note in notes)


@pytest.mark.data
def test_partition_of_the_paper(fedsweep, shared_data):
    """Table 14, client 0, from the command line."""
    code, out, _ = fedsweep("partition", "--data", shared_data("cifar10-resnet20.npz"), "--json")
    found = last_json(out)
    assert code == 0
    assert found["counts"][0] == [14, 122, 240, 126, 630, 74, 193, 71, 230, 6]
    assert (min(found["sizes"]), max(found["sizes"])) == (891, 3498)


def test_partition_as_text(fedsweep):
    code, out, _ = fedsweep("partition", "--data", TINY, "--clients", 4)
    assert code == 0
    assert "absent classes" in out


def test_methods(fedsweep):
    code, out, _ = fedsweep("methods", "--json")
    assert code == 0
    assert len(out.splitlines()) == 1
    found = {entry["name"]: entry for entry in last_json(out)}
    assert {"dp-fedgd", "dp-fedsofim", "dp-fedadam", "dp-fedyogi"} <= set(found)
    sofim = {h["name"]: h for h in found["dp-fedsofim"]["hyperparameters"]}
    assert sofim["rho"]["default"] == 0.5
    assert sofim["direction"]["choices"] == ["momentum", "gradient"]
    assert "2601.09166" in found["dp-fedsofim"]["paper"]
    for entry in found.values():
        assert entry["paper"]
        assert all(h["description"] and h["default"] is not None for h in entry["hyperparameters"])


def test_methods_as_text(fedsweep):
    _, out, _ = fedsweep("methods")
    assert "learning_rate = " in out
    assert "dp-fedyogi" in out


def test_the_diverging_direction_is_documented(fedsweep, repository):
    """A paragraph of the README or docs/, or a line of `fedsweep methods`, says that `direction` = `gradient` diverges
    with the tuned values."""
    _, out, _ = fedsweep("methods")
    pages = [repository / "README.md", *(repository / "docs").glob("*.md")]
    places = [*out.splitlines(), *(part for page in pages for part in page.read_text().split("\n\n"))]
    assert [text for text in places if "direction" in text and "gradient" in text and "diverge" in text]


# ---- train


@pytest.mark.ray
def test_train_in_a_new_process():
    """The installed command with Ray actors: standard output is JSON only, and the numbers equal those of the trial
    in this process."""
    script = Path(sys.executable).with_name("fedsweep")
    flags = (
        "--method dp-fedsofim --epsilon 8 --clip 5 --rounds 20 --clients 5 --partition dirichlet:1 --seed 42"
        " --release local --set learning_rate=0.5 --set rho=1 --hosts 2 --defaults paper --json"
    )
    found = subprocess.run([script, "train", "--data", small.SMALL, *flags.split()], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert len(found.stdout.splitlines()) == 1
    report = json.loads(found.stdout)
    assert list(report["accuracy"]) == ["10", "20"]
    assert report["state"] == "done"
    assert report["epsilon"]["claimed"] == 8
    assert report["epsilon"]["actual"]["local"] == pytest.approx(8, rel=1e-5)
    assert report["epsilon"]["actual"]["local"] <= 8
    assert report["epsilon"]["actual"]["secure-aggregation"] < 8
    assert report["seconds_per_round"] > 0
    for name in ("train_loss", "clipped_share", "signal_norm", "noise_norm"):
        assert list(report["metrics"][name]) == ["10", "20"]
    assert "Traceback" not in found.stderr
    assert "accuracy" in found.stderr
    assert "actual epsilon" in found.stderr

    of = small.problem()
    trial = small.trial(of, "dp-fedsofim", {"learning_rate": 0.5, "rho": 1.0}, rounds=20, every=10)
    expected = run_pack([trial], ProblemData.of(of))[trial.key]
    assert report["key"] == trial.key
    assert report["metrics"] == json.loads(json.dumps(expected.metrics))


@pytest.mark.parametrize(("epsilon", "doubtful"), [(0.05, True), (100, False)])
def test_train_says_when_the_model_is_of_little_use(fedsweep, no_ray, epsilon, doubtful):
    data = ("--data", "synthetic-frozen:400,80,6,3", "--clients", 5, "--rounds", 10)
    code, _, err = fedsweep("train", *data, "--epsilon", epsilon)
    assert code == 0
    for sentence in ("noise exceeds signal", "always answering the largest class (33.5% of the train rows)"):
        assert (sentence in err) == doubtful


def test_train_on_the_validation_split(fedsweep, no_ray):
    flags = (
        f"--data {TINY} --method dp-fedgd --epsilon inf --rounds 7 --evaluate-every 3 --clients 3 --hosts 1"
        " --train-on train --evaluate-on validation --json"
    )
    code, out, _ = fedsweep("train", *flags.split())
    report = last_json(out)
    assert code == 0
    assert list(report["accuracy"]) == ["3", "6", "7"]
    assert report["epsilon"]["claimed"] == "inf"
    assert set(report["metrics"]["noise_norm"].values()) == {0}
    # 30 rows are held out, so accuracy is a multiple of 100/30
    assert all((value * 30 / 100) == pytest.approx(round(value * 30 / 100)) for value in report["accuracy"].values())


def test_train_prints_its_results_to_standard_output(fedsweep, no_ray):
    """`fedsweep train … > file` writes the table and the privacy account."""
    flags = f"--data {TINY} --method dp-fedgd --epsilon 1 --rounds 2 --evaluate-every 1 --clients 3 --hosts 1"
    code, out, err = fedsweep("train", *flags.split())
    assert code == 0
    assert "dp-fedgd, evaluated on the test set" in out
    assert "claimed epsilon 1 (record level" in out
    assert "actual epsilon" not in err


def test_a_diverged_run_is_reported(fedsweep, no_ray):
    """A huge learning rate with weight decay: no traceback, valid JSON."""
    flags = (
        f"--data {TINY} --method dp-fedsofim --epsilon 8 --rounds 40 --evaluate-every 5 --clients 3 --hosts 1"
        " --set learning_rate=1e20 --set weight_decay=1e6 --json"
    )
    code, out, err = fedsweep("train", *flags.split())
    assert code == 0
    assert last_json(out)["state"] == "diverged"
    assert "diverged" in err

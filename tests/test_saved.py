"""Saved models predict like the server did, from features without preprocessing, and carry their privacy account."""

import zipfile

import numpy as np
import pandas as pd
import pytest
import small
from command_line import assert_one_sentence

from orchestrator.execution.training import Trained, Training, saved_model
from trainables.errors import UserError
from trainables.federation.hosts import Hosts
from trainables.federation.pack import check
from trainables.federation.problem import ProblemData
from trainables.federation.saved_model import SavedModel
from trainables.federation.server import Server
from trainables.federation.trial_spec import Preprocess

BETTER = {"preprocess": Preprocess(center=0.1, bound=3.0), "aggregate": "size"}


def trained(model="softmax", epsilon=8.0, **update):
    of = small.problem(model=model)
    trial = small.trial(of, "dp-fedgd", epsilon=epsilon).model_copy(update=update)
    server = Server(Hosts(1))
    server.open([trial], ProblemData.of(of))
    (result,) = server.advance(trial.rounds)
    return Training(trial, of, check(trial, of)), Trained(result, 0.0, server.final_weights())


@pytest.mark.parametrize("model", ["softmax", "mlp:3", "multinomial"])
@pytest.mark.parametrize("update", [{}, BETTER], ids=["plain", "centred"])
def test_it_predicts_as_it_was_evaluated(model, update, tmp_path):
    run, came = trained(model, **update)
    saved_model(run, came, secret=False).save(tmp_path / "m.npz")
    saved = SavedModel.load(tmp_path / "m.npz")
    of = run.problem
    accuracy = 100 * (saved.scores(of.x_eval).argmax(1) == of.y_eval).mean()
    assert accuracy == pytest.approx(came.result.metrics["accuracy"][run.trial.rounds], abs=1.0), (
        "one row on the border"
    )
    assert saved.provenance["epsilon"]["actual"]["local"] == pytest.approx(8.0, rel=1e-5)
    assert saved.provenance["trial"]["seed"] == 42


def test_nothing_is_overwritten_and_no_other_file_is_taken_for_a_model(tmp_path):
    run, came = trained()
    model = saved_model(run, came, secret=False)
    model.save(tmp_path / "m.npz")
    with pytest.raises(UserError, match="exists already"):
        model.save(tmp_path / "m.npz")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    (tmp_path / "text.npz").write_text("no archive")
    for name in ("other.npz", "text.npz", "nowhere.npz"):
        with pytest.raises(UserError, match=name):
            SavedModel.load(tmp_path / name)
    with pytest.raises(UserError, match="features of shape"):
        model.scores(np.zeros((2, 5), dtype=np.float32))


def test_files_have_an_ending_that_account_finds(tmp_path):
    run, came = trained()
    for name in ("m.pt", "m", "m.safetensors"):
        with pytest.raises(UserError, match=r"must end in \.npz"):
            saved_model(run, came, secret=False).save(tmp_path / name)


def test_only_the_command_converts_tables(tmp_path):
    run, came = trained()
    with pytest.raises(UserError, match="x is not an array of features"):
        saved_model(run, came, secret=False).predict([["N719EV", "1"]])


def test_the_command(fedsweep, tmp_path):
    run, came = trained()
    saved_model(run, came, secret=False).save(tmp_path / "m.npz")
    data = run.problem.data
    np.savez(tmp_path / "d.npz", x_train=data.x_train, y_train=data.y_train, x_test=data.x_test, y_test=data.y_test)
    code, out, _ = fedsweep("predict", tmp_path / "m.npz", tmp_path / "d.npz", "--output", tmp_path / "p.csv")
    assert code == 0
    assert "100 predictions written to" in out
    assert "epsilon 8" in out
    assert len((tmp_path / "p.csv").read_text().split()) == 101
    np.savez(tmp_path / "new.npz", x_test=data.x_test)
    code, out, _ = fedsweep("predict", tmp_path / "m.npz", tmp_path / "new.npz", "--output", tmp_path / "q.csv")
    assert (code, "accuracy" in out) == (0, False)
    assert (tmp_path / "q.csv").read_text() == (tmp_path / "p.csv").read_text()
    options = ("--output", tmp_path / "with.csv", "--probabilities")
    assert fedsweep("predict", tmp_path / "m.npz", tmp_path / "new.npz", *options)[0] == 0
    table = pd.read_csv(tmp_path / "with.csv")
    by_class = table.drop(columns="class").to_numpy()
    assert list(table.columns[1:]) == [f"probability of {k}" for k in range(by_class.shape[1])]
    assert by_class.sum(1) == pytest.approx(1)
    assert by_class.argmax(1).tolist() == table["class"].tolist()
    np.savez(tmp_path / "none.npz", x_train=data.x_train)
    with zipfile.ZipFile(tmp_path / "odd.npz", "w") as archive:
        archive.writestr("x_test", b"no array")
    odd = fedsweep("predict", tmp_path / "m.npz", tmp_path / "odd.npz", "--output", tmp_path / "r.csv")
    assert_one_sentence(odd, "x_test is not an array")
    lacking = fedsweep("predict", tmp_path / "m.npz", tmp_path / "none.npz", "--output", tmp_path / "r.csv")
    assert_one_sentence(lacking, "none.npz lacks the array 'x_test'; it needs x_test")
    no_model = fedsweep("predict", tmp_path / "no.npz", tmp_path / "d.npz", "--output", tmp_path / "r.csv")
    assert_one_sentence(no_model, "no.npz does not exist")
    again = fedsweep("predict", tmp_path / "m.npz", tmp_path / "d.npz", "--output", tmp_path / "p.csv")
    assert_one_sentence(again, "p.csv")
    assert_one_sentence(fedsweep("train", "--epsilon", 1, "--save", tmp_path / "m.npz"), "--save")


def test_a_table_is_not_a_model(tmp_path, fedsweep):
    table = tmp_path / "visits.csv"
    table.write_text("age,outcome\n49,ill\n")
    code, _, err = fedsweep("predict", table, table, "--output", tmp_path / "classes.csv")
    assert code == 2
    assert "visits.csv is not a model that fedsweep saved: it is not an archive of arrays" in err
    network = tmp_path / "net.safetensors"
    code, _, err = fedsweep("predict", network, table, "--output", tmp_path / "classes.csv")
    assert code == 2
    assert "net.safetensors does not exist" in err
    network.touch()
    code, _, err = fedsweep("predict", network, table, "--output", tmp_path / "classes.csv")
    assert code == 2
    assert "net.safetensors holds the arrays of a network, which fedsweep does not read" in err

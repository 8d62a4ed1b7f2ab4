"""Users' own data: names of classes and clients, small clients, `clients: auto`."""

import numpy as np
import own_data
import pytest
import small

import fedsweep as face
from orchestrator.execution import planning, training
from orchestrator.execution.training_options import TrainingOptions
from orchestrator.study.cells import PreparedStudy
from orchestrator.study.reading import from_mapping
from orchestrator.study.study import Study
from trainables.data import features, partition
from trainables.data.validation import hold_out
from trainables.errors import UserError

SMALL_STUDY = {
    "name": "small-users",
    "partitions": ["explicit"],
    "clients": "auto",
    "methods": [{"dp-fedgd": {"coarse": {"learning_rate": [1]}, "fine": {"learning_rate": [1]}}}],
    "defaults": "paper",
    "epsilons": [5],
    "rounds": {"coarse": 3, "fine": 3, "confirm": 3},
    "seeds": {"search": [1], "contest": [], "confirm": [42]},
}


@pytest.fixture
def users(tmp_path):
    path = tmp_path / "users.npz"
    np.savez(path, **own_data.small_users())
    return path


# ---- names


def test_text_labels_and_ids_are_numbered_and_remembered(users):
    given, loaded = own_data.small_users(), features.load(str(users))
    assert loaded.class_names == own_data.SPECIES
    assert (np.array(loaded.class_names)[loaded.y_train] == given["y_train"]).all()
    assert (np.array(loaded.class_names)[loaded.y_test] == given["y_test"]).all()
    assert loaded.clients == 187
    assert (np.array(loaded.client_names)[loaded.client_train] == given["client_train"]).all()


def test_text_from_pandas_is_accepted_from_memory():
    given = own_data.small_users()
    as_objects = {key: value.astype(object) if value.dtype.kind == "U" else value for key, value in given.items()}
    loaded = features.from_arrays(as_objects)
    assert loaded.class_names == own_data.SPECIES
    with pytest.raises(UserError, match="y_train holds object labels"):
        features.from_arrays({**given, "y_train": np.array([object()] * len(given["y_train"]))})


def test_declared_class_names_set_the_number_of_classes(tmp_path):
    """A class without a train row is a class: whether it has rows is not public, its name is."""
    arrays = small_arrays(class_names=np.array(["a", "b", "c", "never seen"]))
    loaded = features.from_arrays(arrays)
    assert loaded.classes == 4
    assert loaded.class_names[3] == "never seen"
    labels = np.array(["b", "a"] * 15)
    assert features.from_arrays({**arrays, "y_train": labels, "y_test": labels[:9]}).y_train[:2].tolist() == [1, 0]


def small_arrays(**more):
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.random((30, 4)),
        "y_train": np.arange(30) % 3,
        "x_test": rng.random((9, 4)),
        "y_test": np.arange(9) % 3,
    }
    return {**arrays, **more}


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"class_names": np.array(["a", "b"])}, "label 2 in y_train is out of range: there are 2 names"),
        ({"class_names": np.array(["a", "a", "b"])}, "class_names has a name twice"),
        ({"class_names": np.array([1, 2, 3])}, "class_names must be a list of texts, but is int64"),
        ({"y_train": np.array(["a", "b", "c"] * 10)}, "y_test holds int64 labels, the other set has text"),
        (
            {"y_train": np.array(["a"] * 30), "y_test": np.array(["z"] * 9), "class_names": np.array(["a", "b"])},
            "label 'z' in y_test is not one of its class names",
        ),
        ({"client_train": np.arange(30), "client_names": np.array(["x"])}, "client 29 in client_train has no entry"),
        ({"client_train": np.arange(30) - 1}, "client -1 in client_train is negative"),
    ],
)
def test_bad_names_are_reported(more, sentence):
    with pytest.raises(UserError, match=sentence):
        features.from_arrays(small_arrays(**more))


def test_an_object_array_is_named(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, **small_arrays(client_train=np.array(["a"] * 30, dtype=object)))
    with pytest.raises(UserError, match=r"mine\.npz: client_train holds Python objects.*dtype=str"):
        features.load(str(path))


def test_ids_with_gaps_are_numbered(fedsweep, tmp_path):
    ids = np.array([7, 19007, 7] * 10)
    loaded = features.from_arrays(small_arrays(client_train=ids))
    assert loaded.clients == 2
    assert loaded.client_names == ("7", "19007")
    np.savez(tmp_path / "gaps.npz", **small_arrays(client_train=ids))
    code, out, err = fedsweep("partition", "--data", tmp_path / "gaps.npz", "--partition", "explicit", "--clients", 3)
    assert (code, out) == (2, "")
    assert "clients = 3, but data gaps names 2 clients" in err


# ---- clients: auto


def test_auto_takes_the_clients_of_the_data(fedsweep, users, no_ray):
    code, out, err = fedsweep("partition", "--data", users, "--partition", "explicit", "--clients", "auto")
    assert code == 0, err
    assert len(out.splitlines()) == 187 + 4
    model = face.train(str(users), method="dp-fedgd", epsilon=8, rounds=2, clients="auto", partition="explicit")
    assert model.state == "done"
    code, out, err = fedsweep(
        *("train", "--data", users, "--clients", "auto", "--partition", "explicit"),
        *("--method", "dp-fedgd", "--epsilon", 8, "--rounds", 2),
    )
    assert code == 0, err


def test_auto_without_clients_is_a_user_error(fedsweep, no_ray):
    with pytest.raises(face.UserError, match=r"clients = 'auto': data .* has no client_train column; give a number"):
        face.train(small.SMALL, method="dp-fedgd", epsilon=1, clients="auto")
    with pytest.raises(face.UserError, match="clients = 'some': "):
        face.train(small.SMALL, method="dp-fedgd", epsilon=1, clients="some")
    for words, sentence in (
        (("partition", "--data", small.SMALL, "--clients", "auto"), "has no client_train column"),
        (
            ("partition", "--data", small.SMALL, "--clients", "some"),
            "clients = 'some' is neither a whole number nor auto",
        ),
        (("calibrate", "--epsilon", 1, "--clients", "auto"), "clients = 'auto' needs a data set"),
    ):
        code, _, err = fedsweep(*words)
        assert (code, err.count("\n")) == (2, 1)
        assert sentence in err


# ---- small clients


def test_every_client_keeps_a_row(users):
    data = features.load(str(users))
    clients = partition.partition(data, partition.parse("explicit", clients=187, seed=42))
    train, validation = hold_out(data, clients, "row", 0.1, 42)
    assert min(train.sizes) == 1
    assert len(train.sizes) == 187
    everything = np.concatenate([*train.rows, validation.rows])
    assert sorted(everything) == list(range(len(data.y_train))), "no row both trains and validates"
    assert (validation.y == data.y_train[validation.rows]).all()
    assert (validation.x == data.x_train[validation.rows]).all()


def test_whole_clients_are_drawn_without_looking_at_values(users):
    """Other features, labels and sizes: the same clients validate."""
    data = features.load(str(users))
    spec = partition.parse("explicit", clients=187, seed=42)
    train, validation = hold_out(data, partition.partition(data, spec), "client", 0.1, 42)
    assert len(train.sizes) == 187 - 19
    held_out = set(data.client_train[validation.rows])
    assert len(held_out) == 19
    assert not held_out & set(data.client_train[np.concatenate(train.rows)])
    other = own_data.small_users(seed=1)
    changed = features.from_arrays(other)
    _, again = hold_out(changed, partition.partition(changed, spec), "client", 0.1, 42)
    assert set(changed.client_train[again.rows]) == held_out


def test_a_split_that_leaves_nothing_to_validate_is_reported():
    data = features.from_arrays(small_arrays(client_train=np.arange(30)))
    clients = partition.partition(data, partition.parse("explicit", clients=30, seed=1))
    with pytest.raises(UserError, match="every validation row is the only row of its client; validation by client"):
        hold_out(data, clients, "row", 0.1, 42)
    assert len(hold_out(data, clients, "client", 0.1, 42)[1].rows) == 3
    one = partition.partition(data, partition.parse("iid", clients=1, seed=1))
    with pytest.raises(UserError, match="validation by client needs at least 2 clients"):
        hold_out(data, one, "client", 0.1, 42)


def test_keys_of_the_default_split_do_not_mention_it(users):
    study = from_mapping({**SMALL_STUDY, "data": [str(users)]}, "the study")
    by_row, by_client = (
        PreparedStudy.prepare(study.model_copy(update={"validation": study.validation.model_copy(update={"by": by})}))
        for by in ("row", "client")
    )
    assert set(by_row.problems) & set(by_client.problems) == set(), "another split is another problem"


@pytest.mark.parametrize("by", ["row", "client"])
def test_187_users_run_end_to_end(users, tmp_path, by):
    study = {**SMALL_STUDY, "data": [str(users)], "validation": {"by": by}}
    results = face.run_study(study, tmp_path / "results", backend="local")
    assert results.finished
    assert set(results.trials["state"]) == {"done"}
    winner = next(iter(results.cells.to_dict("records")))
    assert winner["test_accuracy"] > 40
    assert ("validation_by: client" in (tmp_path / "results" / "best.yaml").read_text()) == (by == "client")


def test_clients_of_the_file_are_used_by_default(users):
    plain = {"name": "own", "data": [str(users)], "methods": ["dp-fedgd"], "epsilons": [8]}
    prepared = PreparedStudy.prepare(Study.model_validate(plain))
    assert (prepared.study.partitions, prepared.study.clients) == (["explicit"], "auto")
    (line,) = prepared.clients()
    assert "/ explicit: 187 clients of the data set, 1 to " in line
    assert "187 clients of the data set" in planning.plan(Study.model_validate(plain)).as_text()
    counted = PreparedStudy.prepare(Study.model_validate({**plain, "partitions": ["explicit"]}))
    assert counted.cells[0].setting == prepared.cells[0].setting
    simulated = PreparedStudy.prepare(Study.model_validate({**plain, "clients": 5}))
    assert "/ dirichlet:0.5: 5 simulated clients" in simulated.clients()[0]
    mixed = {**plain, "data": [str(users), small.SMALL]}
    with pytest.raises(UserError, match=r"names clients and data .* does not; set partitions and clients"):
        PreparedStudy.prepare(Study.model_validate(mixed))
    trained = training.set_up(str(users), TrainingOptions(epsilon=8))
    assert len(trained.problem.partition.sizes) == 187


def test_a_folder_is_not_a_data_set_yet(tmp_path):
    with pytest.raises(UserError, match=r"is a folder; make a feature file: fedsweep data import .* \(arrays\)"):
        features.load(str(tmp_path))

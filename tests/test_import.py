"""`fedsweep data import`: every kind of table, the schema, and predictions with the original names."""

import contextlib
import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import own_data
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedsweep as face
from trainables.data import features
from trainables.data.importing import conversion, csv_table, reading
from trainables.data.importing.draft import _column
from trainables.data.importing.schema import Schema, read_schema
from trainables.errors import UserError

SCHEMA = """\
label: outcome
classes: [healthy, ill]
client: site
columns:
  age: {range: [0, 120]}
  sex: {categories: [f, m]}
  marker: {missing: 1}
"""


@pytest.fixture
def visits(tmp_path, monkeypatch):
    """A CSV in the current folder, and its schema."""
    monkeypatch.chdir(tmp_path)
    own_data.write_table(tmp_path / "visits.csv")
    (tmp_path / "visits.schema.yaml").write_text(SCHEMA)
    return tmp_path / "visits.csv"


def converted(text: str, name: str, folder, **schema) -> conversion.Converted:
    path = folder / name
    path.write_text(text)
    return conversion.convert_file(str(path), Schema.model_validate({"label": "y", **schema}))


# ---- from a table to predictions


def test_from_a_csv_to_predictions(fedsweep, visits, no_ray):
    code, out, err = fedsweep("data", "import", visits.name)
    assert code == 0, err
    assert "rows      240 train, 60 test" in out
    assert "clients   5 with" in out
    assert "not used  patient" in out
    assert "'marker': 18 missing, replaced by 1" in out
    data = features.load("visits.npz")
    assert data.class_names == ("healthy", "ill")
    assert data.client_names == tuple(f"clinic {letter}" for letter in "ABCDE")
    assert data.features == 4

    options = ("--partition", "explicit", "--clients", "auto", "--method", "dp-fedgd", "--epsilon", "inf")
    options = (*options, "--set", "learning_rate=1", "--rounds", 60)
    code, _, err = fedsweep("train", "--data", "visits.npz", *options, "--save", "model.npz")
    assert code == 0, err
    code, out, err = fedsweep("predict", "model.npz", "visits.csv", "--output", "classes.csv")
    assert code == 0, err
    with open("visits.csv") as table, open("classes.csv") as classes:
        truth = [row["outcome"] for row in csv.DictReader(table)]
        predicted = [row["class"] for row in csv.DictReader(classes)]
    accuracy = 100 * np.mean([a == b for a, b in zip(truth, predicted, strict=True)])
    assert f"accuracy: {accuracy:.2f}%" in out
    assert accuracy > 75
    largest = 100 * max(truth.count(name) for name in set(truth)) / len(truth)
    assert f"always answering the largest class: {largest:.2f}%" in out
    assert "does not know" not in out
    Path("new.csv").write_text(Path("visits.csv").read_text().replace(",ill", ",unwell", 1))
    code, out, err = fedsweep("predict", "model.npz", "new.csv", "--output", "of-new.csv")
    assert code == 0, err
    assert "rows with a label that the model does not know ('unwell'): 1; they count as wrong" in out
    assert fedsweep("predict", "model.npz", "visits.npz", "--output", "of-test-rows.csv")[0] == 0
    Path("new.csv").write_text(Path("visits.csv").read_text().replace(",ill", ","))
    code, out, err = fedsweep("predict", "model.npz", "new.csv", "--output", "of-some.csv")
    healthy = truth.count("healthy")
    right = sum(a == b == "healthy" for a, b in zip(truth, predicted, strict=True))
    assert f"accuracy: {100 * right / healthy:.2f}%" in out, "rows without a label do not count"
    assert f"rows without a label, which do not count: {len(truth) - healthy}\n" in out
    assert "always answering the largest class: 100.00%" in out
    assert "note: column 'marker': 18 missing, replaced by 1" in err
    Path("new.csv").write_text(Path("visits.csv").read_text().replace(",ill", ",1").replace(",healthy", ",0"))
    code, out, err = fedsweep("predict", "model.npz", "new.csv", "--output", "of-none.csv")
    unknown = "rows with a label that the model does not know ('0', '1'): 300"
    assert f"{unknown}\n" in out
    assert "accuracy" not in out
    code, out, err = fedsweep("predict", "model.npz", "new.csv", "--output", "of-none-again.csv", "--json")
    assert json.loads(out)["metrics"] == {}
    assert json.loads(out)["notes"] == ["column 'marker': 18 missing, replaced by 1", unknown]
    with np.load("model.npz") as saved:
        assert "healthy" in str(saved["about"])
        assert "clinic" not in str(saved["about"]), "names of clients stay in the feature file"
    model = face.load_model("model.npz")
    assert set(model.predict(data.x_test)) == {"healthy", "ill"}


def test_features_of_another_schema_are_not_predicted(fedsweep, visits):
    """Their columns may be in another order or on another scale."""
    assert fedsweep("data", "import", visits.name)[0] == 0
    options = ("--method", "dp-fedgd", "--epsilon", 3, "--set", "learning_rate=1", "--rounds", 2)
    assert fedsweep("train", "--data", "visits.npz", *options, "--save", "model.npz")[0] == 0
    base, _, columns = SCHEMA.partition("columns:\n")
    reverse = "\n".join(reversed(columns.strip("\n").split("\n")))
    for name, text, reason in (
        ("order", f"{base}columns:\n{reverse}\n", "the columns differ in number or order"),
        ("range", SCHEMA.replace("120", "100"), "column 'age' differs"),
        ("same", SCHEMA, ""),
    ):
        Path("other.yaml").write_text(text)
        assert fedsweep("data", "import", visits.name, "--schema", "other.yaml", "--to", f"{name}.npz")[0] == 0
        code, _, err = fedsweep("predict", "model.npz", f"{name}.npz", "--output", f"{name}.csv")
        assert code == (2 if reason else 0), err
        assert reason in err


def test_notes_on_a_table_are_shown_wherever_it_is_used(fedsweep, visits):
    Path("s.yaml").write_text(
        "{name: s, data: [visits.csv], methods: [dp-fedgd], epsilons: [1], defaults: paper, "
        "rounds: {coarse: 1, fine: 1, confirm: 1}, seeds: {search: 1, contest: [], confirm: [2]}, "
        "search: {refine: table, select: single}}"
    )
    for command in (
        ("train", "--data", "visits.csv", "--epsilon", 1, "--rounds", 1),
        ("plan", "s.yaml"),
        ("run", "s.yaml", "--backend", "local"),
    ):
        code, out, err = fedsweep(*command)
        assert code == 0, err
        assert re.search("note: (visits: )?column 'marker': 18 missing, replaced by 1", out + err), command


def test_a_study_names_the_table_itself(visits, tmp_path):
    study = {
        "name": "visits",
        "data": ["visits.csv"],
        "partitions": ["explicit"],
        "clients": "auto",
        "methods": [{"dp-fedgd": {"coarse": {"learning_rate": [1]}, "fine": {"learning_rate": [1]}}}],
        "defaults": "paper",
        "epsilons": [5],
        "rounds": {"coarse": 2, "fine": 2, "confirm": 2},
        "seeds": {"search": [1], "contest": [], "confirm": [42]},
    }
    results = face.run_study(study, "results", backend="local")
    assert results.finished
    assert results.cells["setting"].tolist() == ["visits / explicit"]
    again = face.run_study(study, "results", backend="local")
    assert again.trials["key"].tolist() == results.trials["key"].tolist()
    visits.write_text(visits.read_text().replace("p0000,43", "p0000,44"))
    with pytest.raises(UserError, match="data 'visits' has other content than when this folder's study was run"):
        face.run_study(study, "results", backend="local")


def test_a_table_without_a_schema_says_how_to_get_one(fedsweep, visits):
    (visits.parent / "visits.schema.yaml").unlink()
    code, _, err = fedsweep("partition", "--data", "visits.csv", "--clients", 5)
    assert (code, err.count("\n")) == (2, 1)
    assert "fedsweep data import visits.csv --label COLUMN --draft-schema" in err


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        (",x,y\n0,1,a\n1,2,b\n", ["x"]),
        ("x,y,,\n1,a,,\n2,b,,\n", ["x"]),
        ('"x, in m";"z";y\r\n1;2;a\r\n3;4;b\r\n', ["x, in m", "z"]),
        ("a, b, c;z;y\n1;2;a\n3;4;b\n", ["a, b, c", "z"]),
        ("\ufeffx|y\n1|a\n\n2|b\n", ["x"]),
        ("\n\nx,y\n1,a\n  \n2,b\n", ["x"]),
        ("a, b, c;z;y\n\n1;2;a\n3;4;b\n", ["a, b, c", "z"]),
        ("Unnamed: 0,x,days without a name,y\n0,1,1,a\n2,2,2,b\n", ["x", "days without a name"]),
        ('x,z,y\n1,"2\n",a\n3,4,"b"\n', ["x", "z"]),
    ],
)
def test_csv_files_as_programs_write_them(tmp_path, text, columns):
    """Columns without a name are no features: an index, or empty columns of a spreadsheet."""
    found = converted(text, "t.csv", tmp_path, test_fraction=0.5)
    assert list(found.schema.columns) == columns
    assert sorted(found.arrays["class_names"].tolist()) == ["a", "b"]
    assert len(found.arrays["x_train"]) + len(found.arrays["x_test"]) == 2


def test_a_csv_file_is_read_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_table, "CHUNK", 3)
    rows = [f"{row},{'long ' * (row == 7)}{'ab'[row % 2]}" for row in range(10)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["x,y", *rows]) + "\n")
    table = reading.read_table(str(path))
    assert table["x"].tolist() == [str(row) for row in range(10)]
    assert table["y"].tolist() == [row.split(",")[1] for row in rows]


def test_long_lines_and_values(tmp_path):
    """The standard library's limit for a value is 131,072 characters."""
    path = tmp_path / "t.csv"
    names = [f"gene{number}" for number in range(20_000)]
    path.write_text(f"{','.join(names)}\n{','.join('1' for _ in names)}\n")
    assert list(reading.read_table(str(path))) == names
    path.write_text(f"x,text\n1,{'long ' * 40_000}\n")
    assert reading.read_table(str(path))["x"].tolist() == ["1"]


def test_missing_values_of_a_file_with_one_column_are_rows(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('x\n1.0\n""\n\n-1.0\n')
    assert reading.read_table(str(path))["x"].tolist() == ["1.0", "", "-1.0"]


def test_a_schema_can_name_the_index_that_pandas_wrote(tmp_path):
    found = converted(",x,y\n5,1,a\n6,2,b\n", "t.csv", tmp_path, columns={"Unnamed: 0": {}}, test_fraction=0.5)
    assert sorted([*found.arrays["x_train"].ravel(), *found.arrays["x_test"].ravel()]) == [5, 6]


def test_an_index_that_pandas_wrote_to_parquet_is_no_feature(tmp_path):
    frame = pd.DataFrame({"x": [1.0, 2.0, 3.0, 4.0], "y": list("abab")})[lambda f: f["x"] != 2]
    frame.to_parquet(tmp_path / "t.parquet")
    found = conversion.convert_file(str(tmp_path / "t.parquet"), Schema(label="y", test_fraction=0.4))
    assert list(found.schema.columns) == ["x"]
    assert found.unused == ["__index_level_0__"]


def test_a_draft_says_where_numbers_are_written_in_another_way(fedsweep, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"{row},5;{row % 3},5;{'ab'[row % 2]}" for row in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["size;grade;kind", *rows]) + "\n")
    assert fedsweep("data", "import", "t.csv", "--label", "kind", "--draft-schema")[0] == 0
    draft = (tmp_path / "t.schema.yaml").read_text()
    assert "# size: left out, 60 different texts; if they are numbers, write them like 1234.5" in draft
    assert "# numbers? then write them like 1234.5 in the table" in draft


def test_a_draft_leaves_a_running_number_out(fedsweep, tmp_path, monkeypatch):
    """It is no feature. Other numbers that differ in all rows are."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{row + 100},{row * 1.5},{'ab'[row % 2]}" for row in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["number,size,kind", *rows]) + "\n")
    assert fedsweep("data", "import", "t.csv", "--label", "kind", "--draft-schema")[0] == 0
    assert list(read_schema("t.schema.yaml").columns) == ["size"]
    draft = (tmp_path / "t.schema.yaml").read_text()
    assert "# number: {range: [100, 140]}  # left out: it identifies the row" in draft


def test_a_draft_leaves_numbers_with_gaps_out_if_their_name_says_so(fedsweep, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"{3 * row},{5 * row},{row * 1.5},{'ab'[row % 2]}" for row in range(40)]
    (tmp_path / "t.csv").write_text("\n".join([",income,size,kind", *rows]) + "\n")
    assert fedsweep("data", "import", "t.csv", "--label", "kind", "--draft-schema")[0] == 0
    assert list(read_schema("t.schema.yaml").columns) == ["income", "size"]


def test_a_draft_is_checked_by_its_user(fedsweep, visits):
    schema = visits.parent / "visits.schema.yaml"
    schema.unlink()
    code, out, err = fedsweep(
        "data", "import", "visits.csv", "--label", "outcome", "--client", "site", "--draft-schema"
    )
    assert (code, out) == (0, "visits.schema.yaml\n")
    assert "must be public knowledge" in err
    text = schema.read_text()
    assert "public knowledge" in text
    columns = read_schema(str(schema)).columns
    assert list(columns) == ["age", "sex", "marker"]
    assert columns["sex"].categories == ("f", "m")
    assert "# patient: left out, 300 different texts" in text
    assert "18 values of marker are missing" in text
    code, _, err = fedsweep("data", "import", "visits.csv")
    assert code == 2, "the draft decides nothing about missing values"
    assert "column 'marker' has no value in row 4" in err
    code, _, err = fedsweep("data", "import", "visits.csv", "--label", "outcome", "--draft-schema")
    assert code == 2
    assert "visits.schema.yaml already exists" in err


def test_nothing_is_written_before_the_summary_and_nothing_is_overwritten(fedsweep, visits):
    code, out, _ = fedsweep("data", "import", "visits.csv", "--dry-run")
    assert code == 0
    assert "classes   2" in out
    assert not (visits.parent / "visits.npz").exists()
    assert fedsweep("data", "import", "visits.csv", "--json")[0] == 0
    code, _, err = fedsweep("data", "import", "visits.csv")
    assert code == 2
    assert "visits.npz already exists" in err
    assert list(visits.parent.glob("*.part")) == []


# ---- kinds of files


def as_csv(frame, path):
    frame.to_csv(path, index=False)


def as_semicolons(frame, path):
    frame.to_csv(path, index=False, sep=";", encoding="utf-8-sig")


def as_json(frame, path):
    frame.to_json(path, orient="records", lines=True)


def as_parquet(frame, path):
    frame.to_parquet(path)


@pytest.mark.parametrize(
    ("write", "name"),
    [(as_csv, "t.csv"), (as_semicolons, "t.csv"), (as_parquet, "t.parquet"), (as_json, "t.jsonl")],
)
def test_all_kinds_of_tables_give_the_same_arrays(tmp_path, write, name):
    frame = pd.DataFrame(
        {"id": ["007", "a b", "é"] * 4, "n": np.arange(12), "x": np.linspace(-1, 1, 12), "y": ["no", "yes"] * 6}
    )
    write(frame, tmp_path / name)
    schema = Schema(label="y", client="id", columns={"n": {"range": [0, 11]}, "x": {}})
    arrays = conversion.convert_file(str(tmp_path / name), schema).arrays
    assert arrays["class_names"].tolist() == ["no", "yes"]
    assert arrays["client_names"].tolist() == ["007", "a b", "é"]
    x = np.concatenate([arrays["x_train"], arrays["x_test"]])
    assert sorted(x[:, 0]) == pytest.approx(np.linspace(-1, 1, 12))
    assert x[:, 0] == pytest.approx(x[:, 1], abs=1e-6)


def test_lists_are_several_features(tmp_path):
    rows = "".join(json.dumps({"x": [i, i + 1], "y": i % 2}) + "\n" for i in range(10))
    found = converted(rows, "t.jsonl", tmp_path)
    assert found.arrays["x_train"].shape == (8, 2)
    assert found.schema.columns["x"].width == 2
    with pytest.raises(UserError, match="in column 'x', lists are missing or differ in length"):
        converted(rows + '{"x": [1], "y": 0}\n', "t.jsonl", tmp_path)


def test_svmlight(tmp_path):
    text = "+1 1:0.5 3:2 # comment\n-1 2:1\n\n" * 5
    found = converted(text, "t.svm", tmp_path, label="")
    assert found.arrays["class_names"].tolist() == ["-1", "1"]
    rows = np.concatenate([found.arrays["x_train"], found.arrays["x_test"]])
    assert {tuple(row) for row in rows.tolist()} == {(0.5, 0.0, 2.0), (0.0, 1.0, 0.0)}
    wide = converted(text, "t.svm", tmp_path, label="", columns={"features": {"width": 7}})
    assert wide.arrays["x_train"].shape[1] == 7
    (tmp_path / "new.svm").write_text("1 1:1\n")
    assert conversion.convert_new_rows(str(tmp_path / "new.svm"), found.schema)[0].tolist() == [[1, 0, 0]]
    with pytest.raises(UserError, match="an index for feature 3, its schema declares a width of 2"):
        converted(text, "t.svm", tmp_path, label="", columns={"features": {"width": 2}})
    with pytest.raises(UserError, match=r"'x:1' in line 2 is not INDEX:VALUE"):
        converted("1 1:1\n1 x:1\n", "t.svm", tmp_path, label="")
    with pytest.raises(UserError, match="take 37 GiB with their zeros"):
        converted("1 1:1\n1 5000000000:1\n", "t.svm", tmp_path, label="")
    groups = converted("1 qid:a 1:1\n0 qid:b 1:2\n" * 5, "t.svm", tmp_path, label="", client="qid")
    assert groups.arrays["client_names"].tolist() == ["a", "b"]


def test_rows_to_predict_have_the_first_index_of_the_imported_file(tmp_path):
    """They need not use the first feature."""
    new = tmp_path / "new.svm"
    new.write_text("1 1:5\n")
    from_zero = converted("1 0:1 2:1\n0 1:2\n" * 5, "zero.svm", tmp_path, label="").schema.for_prediction
    assert conversion.convert_new_rows(str(new), from_zero)[0].tolist() == [[0, 5, 0]]
    from_one = converted("1 1:1 3:1\n0 2:2 # 0:1\n" * 5, "one.svm", tmp_path, label="").schema.for_prediction
    assert conversion.convert_new_rows(str(new), from_one)[0].tolist() == [[5, 0, 0]]
    new.write_text("1 0:5\n")
    with pytest.raises(UserError, match=r"has index 0, but in its schema the first feature has index 1"):
        conversion.convert_new_rows(str(new), from_one)
    assert converted("1 00:1 2:1\n0 1:2\n" * 5, "zeros.svm", tmp_path, label="").schema.first_index == 0
    stated = converted("1 1:1\n0 2:2\n" * 5, "stated.svm", tmp_path, label="", first_index=0)
    assert stated.arrays["x_train"].shape[1] == 3
    with pytest.raises(UserError, match="first_index = 1 in the schema of"):
        converted("y,a\n" + "0,1\n1,2\n" * 5, "t.csv", tmp_path, label="y", first_index=1)


def test_features_with_another_first_index_are_not_predicted(tmp_path):
    """The features of a file whose rows never use index 0 are shifted by one."""
    columns = {"columns": {"features": {"width": 4}}, "label": ""}
    zero, one = (converted(f"1 {first}:1 3:1\n0 2:2\n" * 5, f"{first}.svm", tmp_path, **columns) for first in (0, 1))
    np.savez(tmp_path / "one.npz", **one.arrays)
    with pytest.raises(UserError, match="the index of the first feature differs"):
        features.rows_to_predict(str(tmp_path / "one.npz"), zero.schema.for_prediction.to_json())
    assert len(features.rows_to_predict(str(tmp_path / "one.npz"), one.schema.for_prediction.to_json()).x) == 2


def test_numpy_arrays(tmp_path):
    x, y = np.arange(40).reshape(20, 2), np.array(["a", "b"] * 10)
    np.savez(tmp_path / "t.npz", x=x, y=y, who=np.arange(20) // 5 * 100)
    found = conversion.convert_file(str(tmp_path / "t.npz"), Schema(label="y", client="who"))
    assert found.arrays["client_names"].tolist() == ["0", "100", "200", "300"]
    folder = tmp_path / "arrays"
    folder.mkdir()
    for name, array in {"x": x, "y": y, "who": np.arange(20) // 5 * 100}.items():
        np.save(folder / f"{name}.npy", array)
    again = conversion.convert_file(str(folder), Schema(label="y", client="who"))
    assert all((again.arrays[name] == array).all() for name, array in found.arrays.items())
    np.save(tmp_path / "bare.npy", np.column_stack([x, np.arange(20) % 3]))
    bare = conversion.convert_file(str(tmp_path / "bare.npy"), Schema(label="-1"))
    assert bare.arrays["class_names"].tolist() == ["0", "1", "2"]
    assert bare.arrays["x_train"].shape == (16, 2)
    with pytest.raises(UserError, match="has the columns 0 to 2, not '3'"):
        conversion.convert_file(str(tmp_path / "bare.npy"), Schema(label="3"))


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("y_train", 7, "x_train has 8 rows, but y_train has 7"),
        ("client_train", 9, "x_train has 8 rows, but client_train"),
    ],
)
def test_arrays_of_different_lengths_are_named(tmp_path, fedsweep, name, rows, message):
    lengths = {"x_train": 8, "y_train": 8, "x_test": 4, "y_test": 4, "client_train": 8, name: rows}
    for array, length in lengths.items():
        np.save(tmp_path / f"{array}.npy", np.ones((length, 3)) if array[0] == "x" else np.arange(length) % 2)
    code, _, err = fedsweep("data", "import", tmp_path, "--to", tmp_path / "out.npz")
    assert code == 2
    assert message in err


def test_a_folder_of_train_and_test_arrays(tmp_path, monkeypatch, fedsweep):
    monkeypatch.chdir(tmp_path)
    arrays = own_data.small_users(users=20, single=4)
    (tmp_path / "users").mkdir()
    for name, array in arrays.items():
        np.save(tmp_path / "users" / f"{name}.npy", array)
    code, out, err = fedsweep("data", "import", "users/")
    assert code == 0, err
    assert "4 with a single row" in out
    code, dry, _ = fedsweep("data", "import", "users/", "--label", "y", "--dry-run")
    assert code == 0, "the other roles are known"
    assert out.startswith(dry)
    loaded = features.load("users.npz")
    assert (np.array(loaded.class_names)[loaded.y_test] == arrays["y_test"]).all()
    assert (np.array(loaded.client_names)[loaded.client_train] == arrays["client_train"]).all()
    np.save(tmp_path / "users" / "client_train.npy", np.array([object()] * 20), allow_pickle=True)
    code, _, err = fedsweep("data", "import", "users", "--to", "again.npz")
    assert code == 2
    assert "client_train holds Python objects, which are never loaded" in err


@given(st.sampled_from([*reading.SUFFIXES, ".npz"]), st.binary(max_size=200))
def test_any_content_is_read_or_refused(tmp_path_factory, suffix, content):
    path = tmp_path_factory.getbasetemp() / f"any{suffix}"
    path.write_bytes(content)
    with contextlib.suppress(UserError):
        reading.read_table(str(path), ["y"])


# ---- values


def test_a_missing_category_may_be_a_number():
    assert Schema(label="y", columns={"grade": {"categories": [1, 2], "missing": 1}}).columns["grade"].missing == 1


def test_ranges_categories_and_constants_are_applied_row_by_row(tmp_path):
    """A row's features do not depend on the other rows."""
    columns = {"a": {"range": [0, 10], "missing": 5}, "c": {"categories": ["u", "v"], "missing": "v"}, "z": {}}
    text = "a,c,z,y\n" + "0,u,3,p\n10,v,4,q\n15,u,5,p\nNA,,6,q\n?,v,7,p\n"
    found = converted(text, "t.csv", tmp_path, columns=columns)
    rows = np.concatenate([found.arrays["x_train"], found.arrays["x_test"]])
    expected = [[-1, 1, 0, 3], [1, 0, 1, 4], [1, 1, 0, 5], [0, 0, 1, 6], [0, 0, 1, 7]]
    assert sorted(rows.tolist()) == sorted(expected)
    assert found.notes == [
        "column 'a': 2 missing, replaced by 5",
        "column 'a': 1 value outside 0 to 10 was moved to the nearer end",
        "column 'c': 1 missing, replaced by 'v'",
    ]


def test_test_rows_are_drawn_by_position_and_leave_every_client_a_row(tmp_path):
    text = "x,who,y\n" + "".join(f"{i},{i if i < 30 else 99},{'ab'[i % 2]}\n" for i in range(60))
    found = converted(text, "t.csv", tmp_path, client="who")
    assert len(found.arrays["x_test"]) == 12
    assert found.arrays["x_test"].min() >= 30, "a single row is a train row"
    other = converted(text.replace(",a\n", ",b\n", 3).replace("59,", "1000,"), "t.csv", tmp_path, client="who")
    assert len(found.arrays["client_test"]) == 12
    drawn = {value for value in found.arrays["x_test"].ravel() if value < 59}
    assert drawn == {value for value in other.arrays["x_test"].ravel() if value < 59}, "whatever the values are"


def test_a_declared_split(tmp_path):
    text = "x,part,y\n1,train,a\n2,TEST,b\n3,train,b\n"
    found = converted(text, "t.csv", tmp_path, split="part")
    assert found.arrays["x_test"].tolist() == [[2]]
    with pytest.raises(UserError, match="'dev' in column 'part', row 2, is neither train nor test"):
        converted(text.replace("TEST", "dev"), "t.csv", tmp_path, split="part")


def test_declared_classes_may_have_no_row(tmp_path):
    found = converted("x,y\n1,a\n2,b\n3,a\n4,b\n5,a\n", "t.csv", tmp_path, classes=["b", "a", "c"])
    assert features.from_arrays(found.arrays).classes == 3


BAD_TABLES = {
    "no label": ("x,y\n1,a\n", {"label": "z"}, r"has no column 'z'; it has: 'x', 'y'"),
    "no columns": (
        "x,y\n1,a\n",
        {"columns": {"u": {}, "x": {}, "v": {}}},
        "has no columns 'u', 'v'; it has: 'x', 'y'",
    ),
    "missing label": ("x,y\n1,a\n2,\n", {}, "the label 'y' is missing in row 2"),
    "undeclared class": ("x,y\n1,a\n2,d\n", {"classes": ["a", "b"]}, "label 'd' in row 2 is not a declared class"),
    "text": ("x,c,y\n1,u,a\n", {}, r"column 'c' holds text, 'u' in row 1, not a number; declare its categories"),
    "missing number": ("x,y\n1,a\n,b\n", {}, r"column 'x' has no value in row 2; .*x: \{missing: NUMBER\}"),
    "infinite": ("x,y\n1,a\ninf,b\n", {}, "column 'x' has an infinite value in row 2"),
    "undeclared category": (
        "x,y\nu,a\nw,b\n",
        {"columns": {"x": {"categories": ["u", "v"]}}},
        "'w' in row 2 is not a declared category of column 'x'",
    ),
    "missing category": (
        "x,z,y\nu,1,a\n,1,b\n",
        {"columns": {"x": {"categories": ["u", "v"]}}},
        "column 'x' has no value in row 2",
    ),
    "several columns with missing values": (
        "x,z,v,y\nu,1,2,a\n,,2,b\n,1,,a\nu,1,1,b\n",
        {"columns": {"x": {"categories": ["u", "v"]}, "z": {"missing": 0}, "v": {}}},
        r"2 columns have missing values: 'x' \(2\), 'v' \(1\); declare .* \(x: \{missing: CATEGORY\}\)",
    ),
    "missing client": ("x,who,y\n1,,a\n" * 1 + "2,,b\n", {"client": "who"}, "column 'who' names no client in row"),
    "column twice": ("x,x,y\n1,2,a\n", {}, "has the column 'x' twice"),
    "too many values": ("x,y\n1,a\n1,2,3,4\n", {}, "row 2 has 4 values, and the header has 2 columns"),
    "too many values in the first row": ("x,y\n1,a,b\n1,2\n", {}, "row 1 has 3 values, and the header has 2 columns"),
    "too few values": ("x,z,y\n1,2,a\n1,b\n", {}, "row 2 has 2 values, and the header has 3 columns"),
    "a stray quotation mark": ('x,y\n1,a\n2,"b\n3,b\n4,"a\n', {}, "row 2 cannot be read: .* quotation mark must end"),
    "an open quotation mark": ('x,y\n1,a\n2,"b\n3,b\n', {}, "row 2 cannot be read: unexpected end of data"),
    "one class": ("x,y\n1,a\n2,a\n", {}, "every row has the label 'a'; if there are other classes, name them"),
    "a quotation mark in the header": ('x,"y\n1,a\n', {}, "the header cannot be read: unexpected end of data"),
    "a separator at the end": ("x,y\n1,a,\n", {}, "row 1 has 3 values.*; leave out the separator at the end of rows"),
    "huge": ("x,y\n1,a\n1e35,b\n", {}, "column 'x' has a value beyond ±1e\\+09 in row 2; declare its range"),
    "no rows": ("x,y\n", {}, "has no rows"),
    "only a label": ("y\na\nb\n", {}, "has no column that could be a feature"),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_bad_tables_are_refused(tmp_path, name):
    text, schema, sentence = BAD_TABLES[name]
    with pytest.raises(UserError, match=sentence) as caught:
        converted(text, "t.csv", tmp_path, **schema)
    assert "\n" not in str(caught.value)


BAD_SCHEMAS = {
    "unknown key": ("labels: y\n", r":1: labels: there is no such setting"),
    "boolean": ("label: y\nclasses: [yes, no]\n", r":2: classes: true is read as true or false; write it in quotes"),
    "two kinds": ("columns:\n  a: {range: [0, 1], categories: [x]}\n", "a column has a range or categories, not both"),
    "huge range": ("columns:\n  a: {range: [-1.0e+308, 1.0e+308]}\n", ":2: columns.a: .*is too large"),
    "empty range": ("columns:\n  a: {range: [1, 1]}\n", ":2: columns.a: .*the first number must be less"),
    "constant": ("columns:\n  a: {missing: none}\n", "missing = 'none' is not a number"),
    "category": ("columns:\n  a: {categories: [x], missing: y}\n", "missing = 'y' is none of the categories"),
    "label as feature": ("label: a\ncolumns: {a: {}}\n", "column 'a' is the label and cannot be a feature"),
    "class twice": ("classes: [a, a]\n", "a class is named twice"),
    "not a mapping": ("- a\n", "a schema is a mapping, this is list"),
}


@pytest.mark.parametrize("name", BAD_SCHEMAS)
def test_bad_schemas_name_the_line(tmp_path, name):
    text, sentence = BAD_SCHEMAS[name]
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(UserError, match=sentence) as caught:
        read_schema(str(tmp_path / "s.yaml"))
    assert "\n" not in str(caught.value)


def test_options_must_agree_with_the_schema(fedsweep, visits):
    Path("stated.yaml").write_text(f"test_fraction: 0.25\n{SCHEMA}")
    for options, sentence in (
        (("--label", "sex"), "--label sex: the schema visits.schema.yaml says label: outcome"),
        (("--split", "site", "--test-fraction", 0.3), "the column 'site' names the test rows"),
        (("--test-fraction", 2), "test_fraction = 2"),
        (("--test-fraction", 0.3, "--schema", "stated.yaml"), "the schema stated.yaml says test_fraction: 0.25"),
        (("--to", "x.csv"), "the name of a feature file must end in .npz"),
        (("--to", "nowhere/x.npz"), "there is no folder"),
    ):
        code, _, err = fedsweep("data", "import", "visits.csv", *options)
        assert (code, err.count("\n")) == (2, 1), options
        assert sentence in err
    code, _, err = fedsweep("data", "import", "absent.csv", "--label", "y")
    assert code == 2
    assert "absent.csv does not exist" in err
    code, _, err = fedsweep("data", "import", __file__, "--label", "y")
    assert code == 2
    assert "unknown kind" in err


def test_a_table_for_a_model_without_a_schema(fedsweep, visits, no_ray, tmp_path):
    shutil.copy(visits, "other.csv")
    arguments = ("--method", "dp-fedgd", "--epsilon", 8, "--rounds", 2, "--save", "plain.npz")
    assert fedsweep("train", "--data", "synthetic-frozen:600,100,12,4", *arguments)[0] == 0
    code, _, err = fedsweep("predict", "plain.npz", "other.csv", "--output", "classes.csv")
    assert code == 2
    assert "is a table or folder, and the model was trained on a feature file" in err


def test_the_draft_names_missing_values_of_a_matrix():
    values = np.array([[1.0, np.nan], [2.0, 3.0]])
    assert _column("labs", values) == [
        "labs: {range: [1, 3], width: 2}  # which range is possible?",
        "# 1 values of labs are missing, and are refused unless a constant replaces them:",
        "# labs: {range: [1, 3], width: 2, missing: NUMBER}",
    ]


@pytest.mark.parametrize(("factor", "schema"), [(1, False), (50, False), (50, True)])
def test_a_column_in_another_unit_is_named(tmp_path, fedsweep, factor, schema):
    """Rows are scaled as a whole, so it would outweigh the others."""
    random = np.random.default_rng(1)
    rows = [f"{random.normal():.3f},{random.normal():.3f},{factor * random.normal():.3f},{n % 2}" for n in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,load,y", *rows]))
    if schema:
        columns = "columns: {a: {}, b: {}, load: {range: [-100, 100]}}"
        (tmp_path / "t.schema.yaml").write_text(f"label: y\n{columns}\n")
    code, out, err = fedsweep("data", "import", tmp_path / "t.csv", "--label", "y", "--to", tmp_path / "t.npz")
    assert code == 0, err
    assert ("values of column 'load' vary" in out + err) == (factor == 50 and not schema)

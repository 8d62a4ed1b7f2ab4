"""Attacks with files of weights, images and tables: pipes, files that expand, code, and odd names."""

import io
import json
import os
import zipfile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from trainables.data import backbones, feature_file, features
from trainables.data.backbones import extraction, own_rows
from trainables.data.importing.reading import read_table
from trainables.errors import UserError
from trainables.federation.saved_model import SavedModel
from trainables.models import network_settings, networks

# ---- weights


def compressed(path):
    torch.save({"a": torch.zeros(10_000)}, path.with_suffix(".plain"))
    with zipfile.ZipFile(path.with_suffix(".plain")) as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name in plain.namelist():
            made.writestr(name, plain.read(name))


def repeated(path):
    """The last array has the number of classes: a network of that size would be built."""
    torch.save({"a": torch.zeros(1).expand(10**12)}, path)


def sparse(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


def code(path):
    class Code:
        def __reduce__(self):
            return os.mkdir, (str(path.with_name("planted")),)

    torch.save({"a": Code()}, path)


HOSTILE_WEIGHTS = {compressed: "is compressed", repeated: "larger than the file", sparse: "larger than 1024 MiB",
                   os.mkfifo: "not a plain file", code: "Weights only load failed"}  # fmt: skip


@pytest.mark.parametrize("make", HOSTILE_WEIGHTS)
def test_hostile_weights_are_refused(make, tmp_path):
    make(tmp_path / "w.pt")
    with pytest.raises(UserError, match=HOSTILE_WEIGHTS[make]):
        backbones.load("resnet20", tmp_path / "w.pt")
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("make", [os.mkfifo, sparse])
def test_weights_of_a_network_are_hashed_from_a_plain_file(make, tmp_path, monkeypatch):
    make(tmp_path / "w.pt")
    monkeypatch.setattr(networks, "_weights_file", lambda _: tmp_path / "w.pt")
    settings = network_settings.NetworkSettings.parse(f"network:resnet20,cut=layer3,weights={tmp_path / 'w.pt'}")
    for use in (networks.file_hash, lambda settings: networks.load(settings, 3072, 10)):
        with pytest.raises(UserError, match=r"plain file|larger than"):
            use(settings)


# ---- images


def image(path, size=(8, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("1", size).save(path, "PNG")
    return path


def test_an_image_that_expands_is_refused(tmp_path):
    """Pillow only warns from 89 million pixels on; these take 11 kB on disk, and gigabytes in a network."""
    with pytest.raises(UserError, match="could be decompression bomb"):
        own_rows.read_image(image(tmp_path / "a.png", (9500, 9500)))


def test_names_of_images_are_text(tmp_path):
    for name in (b"\xff.png", b"\xff/a.png"):
        folder = tmp_path / str(len(name))
        image(folder / os.fsdecode(name))
        with pytest.raises(UserError, match=r"'\\udcff.*' is not text"):
            own_rows.images_in(folder)


def test_files_that_are_no_images_are_not_shown(tmp_path):
    (tmp_path / "secret").write_text("password")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").symlink_to(tmp_path / "secret")
    (path,) = own_rows.images_in(tmp_path)
    with pytest.raises(UserError, match="it is none of JPEG, PNG") as caught:
        own_rows.read_image(path)
    assert "password" not in str(caught.value)


class Flat(torch.nn.Module):
    def forward(self, x):
        return x.flatten(1)


def extracted(folder):
    return extraction.extract(
        *(np.ones((3, 2, 2, 1), np.uint8), Flat(), lambda rows, _: torch.as_tensor(rows)),
        folder=folder,
        identity="x",
        device="cpu",
    )


def test_planted_pieces_are_not_believed(tmp_path):
    expected, (piece,) = extracted(tmp_path / "x.partial"), (tmp_path / "x.partial").iterdir()
    np.save(tmp_path / "secret.npy", np.full((3, 4), 7, np.float16))
    for plant in (
        lambda: piece.symlink_to(tmp_path / "secret.npy"),
        lambda: np.save(piece, np.zeros(3, np.float16)),
        lambda: np.save(piece, np.zeros((10**6, 4), np.float16)),
        lambda: np.save(piece, np.array([{}], dtype=object)),
        lambda: piece.write_bytes(b"x"),
    ):
        piece.unlink()
        plant()
        np.testing.assert_array_equal(extracted(tmp_path / "x.partial"), expected)


def test_only_pieces_are_removed(tmp_path):
    """The folder may have been there before, with files of the user."""
    folder = tmp_path / "x.partial"
    extracted(folder)
    (folder / "mine.npy").write_text("keep")
    (folder / "below").mkdir()
    extraction.remove_pieces(folder)
    assert sorted(os.listdir(folder)) == ["below", "mine.npy"]
    (tmp_path / "y.partial").symlink_to(folder)
    (folder / f"{'a' * 32}.npy").write_text("keep")
    extraction.remove_pieces(tmp_path / "y.partial")
    assert len(os.listdir(folder)) == 3
    extracted(tmp_path / "z.partial")
    extraction.remove_pieces(tmp_path / "z.partial")
    assert not (tmp_path / "z.partial").exists()


# ---- tables

HALF = "\ud800"  # half a character


def parquet(column):
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"a": column}), buffer)
    return buffer.getvalue()


EXPANDING = {
    "long.csv": b"a\n" + b"x\n" * 20_000 + b"x" * 5_000,
    "sparse.jsonl": b"".join(b'{"c%d":1}\n' % number for number in range(1000)),
    "long.jsonl": b'{"a":"x"}\n' * 20_000 + json.dumps({"a": "x" * 5_000}).encode(),
    "index.svm": b"0 1:1\n1 9999999:1\n",
    "missing.parquet": parquet(pyarrow.nulls(1_000_000)),
    "true.parquet": parquet(pyarrow.array(np.ones(1_000_000, bool))),
    "long.parquet": parquet(pyarrow.array(["x"] * 20_000 + ["x" * 5_000])),
    "lists.parquet": parquet(pyarrow.array([[0] * 100_000] * 2, pyarrow.list_(pyarrow.int8()))),
}


@pytest.mark.parametrize("name", EXPANDING)
def test_a_table_that_expands_in_memory_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.setattr(feature_file, "EXPANDS_FROM_BYTES", 1 << 20)
    monkeypatch.setattr(feature_file, "MOST_EXPANSION", 20)
    (tmp_path / name).write_bytes(EXPANDING[name])
    with pytest.raises(UserError, match="its table expands to"):
        read_table(str(tmp_path / name))


def test_members_of_an_archive_expand_together(tmp_path, monkeypatch):
    zeros = {name: np.zeros((1000, 100), np.float32) for name in feature_file.ARRAYS}
    np.savez_compressed(tmp_path / "a.npz", **zeros)
    monkeypatch.setattr(feature_file, "EXPANDS_FROM_BYTES", 1 << 20)
    for read in (read_table, feature_file.read_npz):
        with pytest.raises(UserError, match="expands to 1,2"):
            read(str(tmp_path / "a.npz"))


def test_a_schema_does_not_expand_a_table(tmp_path, monkeypatch, fedsweep):
    """Every category is a feature of every row."""
    monkeypatch.setattr(feature_file, "EXPANDS_FROM_BYTES", 1 << 20)
    (tmp_path / "a.csv").write_text("a,y\n" + "0,0\n0,1\n" * 1000)
    categories = ", ".join(f"'{number}'" for number in range(9000))
    (tmp_path / "a.schema.yaml").write_text(f"label: y\ncolumns: {{a: {{categories: [{categories}]}}}}")
    code, _, err = fedsweep("data", "import", tmp_path / "a.csv", "--to", tmp_path / "a.npz")
    assert code == 2
    assert "the table of its features expands to 72,000,000 bytes" in err


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.svm", "a.npy", "a.npz", "a.parquet"])
def test_holes_of_a_file_are_not_read(name, tmp_path):
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="most are holes"):
        read_table(str(tmp_path / name))


def test_arrays_of_nothing_state_no_rows(tmp_path):
    header = b"{'descr': '<U0', 'fortran_order': False, 'shape': (99999999999999,), }"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00v\x00" + header.ljust(117) + b"\n")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for name in feature_file.ARRAYS:
            archive.write(tmp_path / "a.npy", f"{name}.npy")
    for read, name in ((read_table, "a.npy"), (read_table, "a.npz"), (feature_file.read_npz, "a.npz")):
        with pytest.raises(UserError, match=r"must hold numbers or text|holds nothing"):
            read(str(tmp_path / name))


def test_half_characters_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"a": HALF}))
    (tmp_path / "b.jsonl").write_text(json.dumps({HALF: 1}))
    for name in ("a.jsonl", "b.jsonl"):
        with pytest.raises(UserError, match=r"'\\ud800' is not text"):
            read_table(str(tmp_path / name))
    rows = {"x_train": np.eye(2), "x_test": np.eye(2), "y_train": np.array(["a", HALF]), "y_test": np.array(["a", "a"])}
    numbered = {**rows, "y_train": np.array([0, 1]), "y_test": np.array([0, 1])}
    for arrays in (rows, {**numbered, "class_names": rows["y_train"]}, {**numbered, "client_train": rows["y_train"]}):
        with pytest.raises(UserError, match=r"'\\ud800' is not text"):
            features.from_arrays(arrays)
    model = SavedModel(np.zeros(10, np.float32), "softmax", 4, 2, {}, class_names=("a", HALF))
    model.save(tmp_path / "m.npz")
    with pytest.raises(UserError, match=r"'\\ud800' is not text"):
        SavedModel.load(tmp_path / "m.npz")


@pytest.mark.parametrize("stated", [[], 5, {}, {"source": 5}])
def test_a_hostile_provenance_is_one_sentence(stated, tmp_path, fedsweep):
    arrays = {"x_train": np.eye(2), "x_test": np.eye(2), "y_train": np.arange(2), "y_test": np.arange(2)}
    np.savez(tmp_path / "a.npz", **arrays, provenance=json.dumps(stated))
    code, out, _ = fedsweep("data", "verify", tmp_path / "a.npz")
    assert code == 1
    assert "its provenance names no source" in out


RELEASE = {"count": 3, "multiplier": 5.0, "rate": 1.0}
ACCOUNT = {
    "epsilon": {"claimed": 3.0},
    **{"delta": 1e-5, "data": "d", "records": "r", "secret_noise": True, "releases": [RELEASE]},
    "trial": {"method": "dp-fedgd", "privacy": {"level": "record", "adjacency": "replace-one"}},
}
INFINITE = float("inf")
HOSTILE_ACCOUNTS = (
    *({"releases": [{**RELEASE, "count": count}]} for count in (-1000, INFINITE, 10**18, "x")),
    *({"releases": [{**RELEASE, "multiplier": value}]} for value in (-1, INFINITE, float("nan"))),
    *({"releases": [{**RELEASE, "rate": rate}]} for rate in (0, -1, 2, INFINITE, float("nan"))),
    *({"trial": {"method": "m", "privacy": {"level": level, "adjacency": "zero-out"}}} for level in ("x", None, [])),
    *({"trial": {"method": "m", "privacy": {"level": "user", "adjacency": name}}} for name in ("x", None, {})),
    *({"delta": delta} for delta in (0, 2, INFINITE, "x")),
)


@pytest.mark.parametrize("changed", HOSTILE_ACCOUNTS)
def test_the_account_of_a_model_cannot_reduce_that_of_others(changed, tmp_path, fedsweep):
    """A negative count, or an unknown adjacency, would make the total too small."""
    for name, provenance in (("good", ACCOUNT), ("bad", {**ACCOUNT, **changed})):
        SavedModel(np.zeros(10, np.float32), "softmax", 4, 2, provenance).save(tmp_path / f"{name}.npz")
    assert fedsweep("account", tmp_path / "good.npz")[0] == 0
    code, _, err = fedsweep("account", tmp_path)
    assert code == 2
    assert "bad.npz has no complete account" in err
    assert err.count("\n") == 1

"""Data that stay in their file: read a part at a time, they are the same rows, and the same trials come of them."""

import zipfile

import numpy as np
import pytest
import small

from trainables.data import features, stored
from trainables.data.stored import StoredRows
from trainables.errors import UserError
from trainables.federation.problem import Problem

ROWS, FEATURES = 300, 7


@pytest.fixture(autouse=True)
def tiny_blocks(monkeypatch):
    """Everything is left where it is, and read ten rows at a time."""
    monkeypatch.setattr(stored, "STREAM_FROM_BYTES", 0)
    monkeypatch.setattr(stored, "BLOCK", 10 * FEATURES * 4)


def arrays(kind: str = "float32") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(ROWS + 50, FEATURES)) * 3).astype(kind)
    y = rng.integers(0, 3, ROWS + 50)
    return {"x_train": x[:ROWS], "y_train": y[:ROWS], "x_test": x[ROWS:], "y_test": y[ROWS:]}


def written(path, kind: str = "float32", **changes):
    np.savez(path, **{**arrays(kind), **changes})
    return path


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "int8"])
def test_rows_are_those_of_the_array(tmp_path, kind):
    x = features.load(str(written(tmp_path / "x.npz", kind))).x_train
    assert isinstance(x, StoredRows)
    whole = arrays(kind)["x_train"].astype(np.float32)
    assert (len(x), x.shape, x.nbytes) == (ROWS, whole.shape, whole.nbytes)
    rng = np.random.default_rng(2)
    mixed = [rng.integers(0, ROWS, 40), np.array([], dtype=np.int64), np.array([ROWS - 1, 0, 0])]
    for found, rows in zip(x.parts(mixed), mixed, strict=True):
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, whole[rows])


def test_only_what_is_wanted_is_read(tmp_path, monkeypatch):
    x = features.load(str(written(tmp_path / "x.npz"))).x_train
    read, real = [], StoredRows._read

    def watched(self, file, low, high):
        read.append((low, high))
        return real(self, file, low, high)

    monkeypatch.setattr(StoredRows, "_read", watched)
    x.parts([np.array([23, 25]), np.array([27, 101])])
    assert read == [(23, 28), (101, 102)]


@pytest.mark.parametrize("url", [False, True])
def test_a_study_knows_no_difference(tmp_path, monkeypatch, url):
    """The same name for the content, the same clients, the same rows to judge by, the same weights to the bit."""
    path = written(tmp_path / "x.npz")
    lying = features.load(f"file://{path}" if url else str(path))
    monkeypatch.setattr(stored, "STREAM_FROM_BYTES", 1 << 30)
    whole = features.load(str(path))
    assert isinstance(whole.x_train, np.ndarray)
    assert isinstance(lying.x_train, StoredRows)
    assert lying.fingerprint == whole.fingerprint
    of = small.problem()
    spec = of.spec.model_copy(
        update={"data": of.spec.data.model_copy(update={"fingerprint": whole.fingerprint}), "model": "softmax"}
    )
    one, other = Problem.prepare(lying, spec), Problem.prepare(whole, spec)
    np.testing.assert_array_equal(one.x_eval, other.x_eval)
    for hosts in (1, 2):
        trials = [small.trial(one, "dp-fedgd", seed=seed) for seed in (1, 2)]
        np.testing.assert_array_equal(
            small.weights_after(3, trials, one, hosts)[0], small.weights_after(3, trials, other, hosts)[0]
        )


def test_what_cannot_be_read_in_parts_is_read_whole(tmp_path):
    """Compressed, or stored column by column."""
    np.savez_compressed(tmp_path / "compressed.npz", **arrays())
    written(tmp_path / "columns.npz", x_train=np.asfortranarray(arrays()["x_train"]))
    for name in ("compressed", "columns"):
        x = features.load(str(tmp_path / f"{name}.npz")).x_train
        np.testing.assert_array_equal(x, arrays()["x_train"])


def test_small_tables_are_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "STREAM_FROM_BYTES", ROWS * FEATURES * 4 + 1000)
    assert isinstance(features.load(str(written(tmp_path / "x.npz"))).x_train, np.ndarray)


def test_what_is_wrong_is_said_with_its_row(tmp_path):
    bad = arrays()["x_train"].copy()
    bad[123, 4] = np.nan
    with pytest.raises(UserError, match="x_train has a value that is nan or infinite in row 123"):
        features.load(str(written(tmp_path / "x.npz", x_train=bad)))


def test_a_file_that_changes_meanwhile(tmp_path):
    path = written(tmp_path / "x.npz")
    x = features.load(str(path)).x_train
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(UserError, match=r"x\.npz has changed since the study began"):
        x[np.array([0])]
    path.unlink()
    with pytest.raises(UserError, match=r"data .*x\.npz cannot be read: .*No such file"):
        x[np.array([0])]


def test_an_archive_that_is_cut_off(tmp_path):
    path = written(tmp_path / "x.npz")
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(UserError, match="is not a whole npz archive"):
        features.load(str(path))


def test_a_table_that_claims_to_be_longer_than_its_file(tmp_path):
    """The header of the array is a lie."""
    path = written(tmp_path / "x.npz")
    told, lie = (f"'shape': ({rows}, {FEATURES}), }}".encode() for rows in (ROWS, 10 * ROWS))
    content = {name: zipfile.ZipFile(path).read(name) for name in zipfile.ZipFile(path).namelist()}
    content["x_train.npy"] = content["x_train.npy"].replace(told + b" ", lie)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    with pytest.raises(UserError, match="npz"):
        features.load(str(path))


@pytest.mark.parametrize("url", ["s3://nowhere-at-all/x.npz", "file:///not/there.npz", "nonsense://x/y.npz"])
def test_urls_that_give_nothing(url, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(UserError, match=url.rpartition("/")[2] if "nonsense" not in url else "nonsense"):
        features.load(url)

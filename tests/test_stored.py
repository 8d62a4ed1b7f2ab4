"""Features that stay on disk: reading them in blocks gives the same rows and the same trials."""

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
    """Nothing is loaded whole; a block has ten rows."""
    monkeypatch.setattr(stored, "STREAM_FROM_BYTES", 0)
    monkeypatch.setattr(stored, "BLOCK_BYTES", 10 * FEATURES * 4)


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
    requested = [rng.integers(0, ROWS, 40), np.array([], dtype=np.int64), np.array([ROWS - 1, 0, 0])]
    for part, rows in zip(x.parts(requested), requested, strict=True):
        assert part.dtype == np.float32
        np.testing.assert_array_equal(part, whole[rows])


def test_only_requested_rows_are_read(tmp_path, monkeypatch):
    x = features.load(str(written(tmp_path / "x.npz"))).x_train
    reads, read = [], StoredRows._read

    def recording(self, file, low, high):
        reads.append((low, high))
        return read(self, file, low, high)

    monkeypatch.setattr(StoredRows, "_read", recording)
    x.parts([np.array([23, 25]), np.array([27, 101])])
    assert reads == [(23, 28), (101, 102)]


@pytest.mark.parametrize("url", [False, True])
def test_streamed_data_gives_identical_results(tmp_path, monkeypatch, url):
    """The same fingerprint, clients, validation rows and, bit for bit, weights."""
    path = written(tmp_path / "x.npz")
    streamed = features.load(f"file://{path}" if url else str(path))
    monkeypatch.setattr(stored, "STREAM_FROM_BYTES", 1 << 30)
    whole = features.load(str(path))
    assert isinstance(whole.x_train, np.ndarray)
    assert isinstance(streamed.x_train, StoredRows)
    assert streamed.fingerprint == whole.fingerprint
    of = small.problem()
    spec = of.spec.model_copy(
        update={"data": of.spec.data.model_copy(update={"fingerprint": whole.fingerprint}), "model": "softmax"}
    )
    first, second = Problem.prepare(streamed, spec), Problem.prepare(whole, spec)
    np.testing.assert_array_equal(first.x_eval, second.x_eval)
    for hosts in (1, 2):
        trials = [small.trial(first, "dp-fedgd", seed=seed) for seed in (1, 2)]
        np.testing.assert_array_equal(
            small.weights_after(3, trials, first, hosts)[0], small.weights_after(3, trials, second, hosts)[0]
        )


def test_compressed_and_column_major_tables_are_read_whole(tmp_path):
    np.savez_compressed(tmp_path / "compressed.npz", **arrays())
    written(tmp_path / "columns.npz", x_train=np.asfortranarray(arrays()["x_train"]))
    for name in ("compressed", "columns"):
        x = features.load(str(tmp_path / f"{name}.npz")).x_train
        np.testing.assert_array_equal(x, arrays()["x_train"])


def test_small_tables_are_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "STREAM_FROM_BYTES", ROWS * FEATURES * 4 + 1000)
    assert isinstance(features.load(str(written(tmp_path / "x.npz"))).x_train, np.ndarray)


def test_the_row_of_a_bad_value_is_named(tmp_path):
    bad = arrays()["x_train"].copy()
    bad[123, 4] = np.nan
    with pytest.raises(UserError, match="x_train has a value that is nan or infinite in row 123"):
        features.load(str(written(tmp_path / "x.npz", x_train=bad)))


def test_a_file_that_changes_while_in_use(tmp_path):
    path = written(tmp_path / "x.npz")
    x = features.load(str(path)).x_train
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(UserError, match=r"x\.npz has changed since the study began"):
        x[np.array([0])]
    path.unlink()
    with pytest.raises(UserError, match=r"data .*x\.npz cannot be read: .*No such file"):
        x[np.array([0])]


def test_a_file_that_shrinks_while_it_is_validated(tmp_path, monkeypatch):
    path = written(tmp_path / "x.npz")
    read_npz = features.read_npz

    def truncate_after_opening(*arguments):
        arrays = read_npz(*arguments)
        path.write_bytes(b"")
        return arrays

    monkeypatch.setattr(features, "read_npz", truncate_after_opening)
    with pytest.raises(UserError, match=r"data .*x\.npz cannot be read: "):
        features.load(str(path))


def test_a_truncated_archive(tmp_path):
    path = written(tmp_path / "x.npz")
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(UserError, match="is not a complete npz archive"):
        features.load(str(path))


def test_a_table_that_claims_to_be_longer_than_its_file(tmp_path):
    path = written(tmp_path / "x.npz")
    true, false = (f"'shape': ({rows}, {FEATURES}), }}".encode() for rows in (ROWS, 10 * ROWS))
    content = {name: zipfile.ZipFile(path).read(name) for name in zipfile.ZipFile(path).namelist()}
    content["x_train.npy"] = content["x_train.npy"].replace(true + b" ", false)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    with pytest.raises(UserError, match="npz"):
        features.load(str(path))


@pytest.mark.parametrize("url", ["s3://nowhere-at-all/x.npz", "file:///not/there.npz", "nonsense://x/y.npz"])
def test_urls_that_cannot_be_read(url, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # no server
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "none")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(UserError, match=url.rpartition("/")[2] if "nonsense" not in url else "nonsense"):
        features.load(url)

"""Feature files and built-in sets: input is validated, and errors are one sentence."""

import io
import os
import zipfile

import numpy as np
import pytest

from trainables.data import features
from trainables.errors import UserError


def good_arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.random((30, 4)).astype(np.float16),
        "y_train": (np.arange(30) % 3).astype(np.uint8),
        "x_test": rng.random((9, 4)).astype(np.float16),
        "y_test": (np.arange(9) % 3).astype(np.uint8),
    }


@pytest.fixture
def write(tmp_path):
    """Write an npz of good arrays, some of them replaced (or left out, where None)."""

    def writer(**replaced):
        path = tmp_path / "features.npz"
        arrays = {**good_arrays(), **replaced}
        np.savez_compressed(path, **{name: value for name, value in arrays.items() if value is not None})
        return path

    return writer


def error_for(path) -> str:
    """The error for a file: one sentence that names the file."""
    with pytest.raises(UserError) as caught:
        features.load(str(path))
    sentence = str(caught.value)
    assert "features" in sentence
    assert "\n" not in sentence
    return sentence


def changed(name: str, where, value, dtype=None) -> dict[str, np.ndarray]:
    array = good_arrays()[name]
    array = array.astype(dtype or array.dtype)
    array[where] = value
    return {name: array}


# ---- npz files


def test_a_good_file(write):
    arrays = good_arrays()
    loaded = features.load(str(write()))
    assert (loaded.features, loaded.classes, loaded.name) == (4, 3, "features")
    assert loaded.x_train.dtype == np.float32
    assert loaded.y_train.dtype == np.int64
    for name, array in arrays.items():
        assert (getattr(loaded, name) == array).all()
    assert loaded.client_train is None


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float16, np.float32, np.float64])
def test_number_types(write, dtype):
    x = np.arange(120).reshape(30, 4).astype(dtype)
    assert (features.load(str(write(x_train=x))).x_train == x).all()


def test_the_fingerprint_is_the_content(write, tmp_path):
    first = features.load(str(write()))
    moved = tmp_path / "elsewhere.npz"
    moved.write_bytes((tmp_path / "features.npz").read_bytes())
    assert features.load(str(moved)).fingerprint == first.fingerprint
    assert features.load(str(write(**changed("x_train", (0, 0), 5)))).fingerprint != first.fingerprint


def test_missing_file(tmp_path):
    assert "features.npz" in error_for(tmp_path / "features.npz")


def test_a_folder_is_not_a_file(tmp_path):
    folder = tmp_path / "features"
    folder.mkdir()
    error_for(folder)


def test_truncated_anywhere(write):
    """Truncated at any length, the file gives a UserError and no other exception."""
    path = write()
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        error_for(path)


def test_a_flipped_byte_never_ends_in_a_traceback(write):
    """Either an error or harmless: checksums catch most changes, validation the others."""
    path = write()
    whole = path.read_bytes()
    refusals = 0
    for position in range(0, len(whole), 5):
        broken = bytearray(whole)
        broken[position] ^= 0xFF
        path.write_bytes(bytes(broken))
        try:
            features.load(str(path))
        except UserError:
            refusals += 1
    assert refusals > 20


@pytest.mark.filterwarnings("ignore:Reading")
def test_an_unreadable_header_never_ends_in_a_traceback(write, tmp_path):
    """The checksum is right, but the array's header is malformed."""
    path = tmp_path / "features.npz"
    for header in (
        b"{'descr': (",
        b"\x00\x01\x02",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 3)}",
        b"1L",
    ):
        with zipfile.ZipFile(path, "w") as archive:
            for name in features.ARRAYS:
                padded = header + b" " * (118 - len(header) - 1) + b"\n"
                archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded)
        error_for(path)


def test_empty_files_text_and_bare_arrays_are_not_archives(tmp_path):
    path = tmp_path / "features.npz"
    for content in (b"", b"a,b,c\n1,2,3\n", b"PK\x03\x04 but no more"):
        path.write_bytes(content)
        error_for(path)
    buffer = io.BytesIO()
    np.save(buffer, np.ones((3, 3)))
    path.write_bytes(buffer.getvalue())
    assert "npz" in error_for(path)


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    """A failing disk or missing permission; simulated, because root may read every file."""
    path = tmp_path / "features.npz"
    path.write_bytes(b"PK")
    plain_open = os.open

    def failing(file, *rest, **options):
        if os.fspath(file) == str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return plain_open(file, *rest, **options)

    monkeypatch.setattr(os, "open", failing)
    error_for(path)


class Payload:
    """Unpickling it creates a file."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self):
        return os.mkdir, (self.target,)


@pytest.mark.parametrize("name", ["x_train", "y_train", "client_train"])
def test_object_arrays_are_refused_and_never_loaded(write, tmp_path, name):
    trap = tmp_path / "created"
    array = np.empty(30, dtype=object)
    array[:] = [Payload(str(trap))] * 30
    assert "Python objects" in error_for(write(**{name: array}))
    assert not trap.exists()


def test_a_bare_pickle_is_never_loaded(tmp_path):
    import pickle

    trap = tmp_path / "created"
    path = tmp_path / "features.npz"
    path.write_bytes(pickle.dumps(Payload(str(trap))))
    error_for(path)
    assert not trap.exists()


def test_no_code_asks_for_pickles(repository):
    """No code lets NumPy, torch, YAML or pickle build objects from a file. (Messages between driver and slots go
    through Ray, which pickles them; so does Tune with the error of a trial, in a file of the same run.)"""
    through_ray = (
        "pickle.loads(report.lanes)",
        "pickle.loads(order.trials)",
        "cloudpickle.loads(Path(trial.pickled_error_file)",
    )
    forbidden = ("allow_pickle=True", "weights_only=False", "yaml.load(", "pickle.load", "joblib", "read_pickle")
    sources = [
        path for part in ("orchestrator", "trainables", "search_spaces") for path in (repository / part).rglob("*.py")
    ]
    assert len(sources) > 10
    for path in sources:
        text = path.read_text()
        for message in through_ray:
            text = text.replace(message, "")
        assert not [word for word in forbidden if word in text], path
        assert text.count("torch.load(") == text.count("weights_only=True"), path
        assert text.count("np.load(") == text.count("allow_pickle=False"), path


@pytest.mark.parametrize("name", features.ARRAYS)
def test_a_missing_array_is_named(write, name):
    assert repr(name) in error_for(write(**{name: None}))


@pytest.mark.parametrize(
    ("replaced", "culprit"),
    [
        (changed("x_train", (3, 1), np.nan), "x_train .* row 3"),
        (changed("x_train", (7, 0), np.inf), "x_train .* row 7"),
        (changed("x_test", (2, 2), -np.inf), "x_test .* row 2"),
        ({"x_train": np.ones(30)}, r"x_train .*\(30,\)"),
        ({"x_train": np.ones((30, 2, 2))}, r"x_train .*\(30, 2, 2\)"),
        ({"x_train": np.ones((30, 0))}, "x_train"),
        ({"x_test": np.ones((0, 4))}, "x_test"),
        ({"x_train": np.ones((30, 4), dtype=complex)}, "x_train .*complex"),
        ({"x_train": np.full((30, 4), "a")}, "x_train .*U1"),
        ({"x_test": np.ones((9, 5))}, "4 features.* 5"),
        ({"y_train": np.zeros(29, dtype=int)}, r"y_train .*30.*\(29,\)"),
        ({"y_test": np.zeros((9, 1), dtype=int)}, r"y_test .*\(9, 1\)"),
        ({"y_train": np.arange(30) % 3 * 1.0}, "y_train .*float64"),
        ({"y_train": np.arange(30) % 2 == 0}, "y_train .*bool"),
        (changed("y_train", 4, -1, np.int64), "-1 in y_train"),
        (changed("y_test", 4, -2, np.int64), "-2 in y_test"),
        (changed("y_test", 4, 3), "label 3 in y_test"),
        (changed("y_train", 4, 10**7, np.int64), "10000000 in y_train"),
        (changed("y_train", 4, 2**64 - 1, np.uint64), "in y_train is out of range"),
        ({"y_train": np.arange(30) % 3 * 2}, "label 4 but not the label 1"),
        ({"y_train": np.zeros(30, dtype=int)}, "single class"),
        ({"client_train": np.zeros(29, dtype=int)}, "client_train"),
        ({"client_train": np.full(30, -1)}, "client_train"),
        ({"client_train": np.full(30, 0.5)}, "client_train"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arrays_are_named(write, replaced, culprit):
    path = write(**replaced)
    with pytest.raises(UserError, match=culprit):
        features.load(str(path))
    error_for(path)


@pytest.mark.filterwarnings("error")
def test_numbers_too_large_for_float32_are_refused_without_a_warning(write):
    assert "row 2" in error_for(write(x_train=np.where(np.arange(120).reshape(30, 4) == 8, 1e300, 1.0)))


# ---- synthetic-frozen


def test_frozen_is_like_real_features():
    """Non-negative, norm about 16, ill-conditioned, classes of equal size."""
    data = features.load("synthetic-frozen:4000,1000,64,10")
    assert data.x_train.shape == (4000, 64)
    assert data.x_test.shape == (1000, 64)
    assert data.classes == 10
    assert data.x_train.min() >= 0
    norms = np.linalg.norm(data.x_train, axis=1)
    assert norms.mean() == pytest.approx(16, rel=0.02)
    assert norms.std() < 5
    eigenvalues = np.linalg.eigvalsh(np.cov(data.x_train.T))
    assert eigenvalues[-1] / eigenvalues[0] > 50
    assert np.bincount(data.y_train).tolist() == [400] * 10


def test_frozen_default_sizes_and_its_best_linear_probe():
    """50,000 / 10,000 x 64, 10 classes; a linear probe reaches about 72%. The probe here is least squares on the
    labels: within two points of the softmax fit, and solved directly."""
    data = features.load("synthetic-frozen")
    assert data.x_train.shape == (50_000, 64)
    assert data.x_test.shape == (10_000, 64)
    assert data.classes == 10
    train, test = (np.hstack([x, np.ones((len(x), 1))]) for x in (data.x_train, data.x_test))
    W = np.linalg.lstsq(train, np.eye(10)[data.y_train], rcond=None)[0]
    assert 100 * np.mean((test @ W).argmax(axis=1) == data.y_test) == pytest.approx(72, abs=2.5)


def test_frozen_is_deterministic():
    first, second = (features.load("synthetic-frozen:200,50,8,3") for _ in range(2))
    assert (first.x_train == second.x_train).all()
    assert (first.y_test == second.y_test).all()
    assert first.fingerprint == second.fingerprint
    assert first.fingerprint != features.load("synthetic-frozen:201,50,8,3").fingerprint


@pytest.mark.parametrize(
    "name",
    [
        "synthetic-frozen:100",
        "synthetic-frozen:100,50,8",
        "synthetic-frozen:100,50,8,x",
        "synthetic-frozen:100,50,8,1",
        "synthetic-frozen:100,50,0,3",
        "synthetic-frozen:2,50,8,3",
        "synthetic-frozen:100,0,8,3",
        "synthetic-frozen:100.5,50,8,3",
        "synthetic-frozen:-100,50,8,3",
        "synthetic-frozen:nan,50,8,3",
        "synthetic-frozen:inf,50,8,3",
        "synthetic",
        "synthetic:1",
        "synthetic:1,2,3,4",
        "synthetic:-1,1",
        "synthetic:1,nan",
        "synthetic:1,1,0",
        "synthetic:1,1,nan",
        "synthetic:1,1,inf",
        "synthetic-unheard-of",
        "no/such/file.npz",
        "x" * 300,
        "",
    ],
    ids=lambda name: name[:40],
)
def test_bad_names(name):
    with pytest.raises(UserError) as caught:
        features.load(name)
    assert name in str(caught.value)


# ---- synthetic(alpha, beta)


def test_heterogeneous_defines_its_clients():
    data = features.load("synthetic:0.5,0.5")
    assert (data.features, data.classes) == (60, 10)
    assert set(data.client_train) == set(range(30))
    assert np.bincount(data.client_train).min() >= 45, "at least 50 rows each, a tenth of them for testing"
    test_share = len(data.y_test) / (len(data.y_test) + len(data.y_train))
    assert test_share == pytest.approx(0.1, abs=0.01)


def test_heterogeneous_is_deterministic_and_depends_on_its_settings():
    same = [features.load("synthetic:0.5,0.5") for _ in range(2)]
    assert (same[0].x_train == same[1].x_train).all()
    other = features.load("synthetic:1,0.5")
    assert other.fingerprint != same[0].fingerprint
    assert other.x_train.shape != same[0].x_train.shape or (other.x_train != same[0].x_train).any()


def test_beta_sets_the_spread_of_heterogeneous_inputs():
    """The centre of a client's inputs is B_k + N(0, 1) with B_k ~ N(0, beta): a client's mean over 60 features varies
    between clients with variance about beta + 1/60."""

    def spread(beta: str) -> float:
        data = features.load(f"synthetic:0,{beta},200")
        return np.var([data.x_train[data.client_train == client].mean() for client in range(200)])

    assert spread("0") == pytest.approx(1 / 60, rel=0.5)
    assert spread("1") == pytest.approx(1 + 1 / 60, rel=0.4)


# ---- the validation split


def test_validation_split_is_stratified_seeded_and_disjoint():
    data = features.load("synthetic-frozen:1000,100,6,4")
    validation_rows = data.validation_rows(0.1, seed=42)
    assert len(validation_rows) == len(set(validation_rows)) == 100
    assert (np.diff(validation_rows) > 0).all()
    assert np.bincount(data.y_train[validation_rows]).tolist() == [25] * 4
    assert (validation_rows == data.validation_rows(0.1, seed=42)).all()
    assert set(validation_rows) != set(data.validation_rows(0.1, seed=43))


def test_validation_split_of_unequal_classes():
    """A tenth of every class, rounded: 300, 40 and 20 rows give 30, 4 and 2."""
    labels = np.repeat([0, 1, 2], [300, 40, 20])
    data = features.FeatureSet(
        "d", "f", np.zeros((360, 1), np.float32), labels, np.zeros((1, 1), np.float32), labels[:1]
    )
    assert np.bincount(labels[data.validation_rows(0.1, 1)]).tolist() == [30, 4, 2]


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_bad_fractions_are_named(fraction):
    with pytest.raises(UserError, match="validation_fraction"):
        features.load("synthetic-frozen:1000,100,6,4").validation_rows(fraction, 1)


def test_a_fraction_without_validation_rows_is_refused():
    with pytest.raises(UserError, match=r"validation_fraction = 0\.001"):
        features.load("synthetic-frozen:100,100,6,4").validation_rows(0.001, 1)


# ---- the real files


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "train", "test", "width", "classes"),
    [
        ("cifar10-resnet20.npz", 50_000, 10_000, 64, 10),
        ("crc5-resnet20.npz", 12_881, 3_619, 64, 5),
        ("adult-a9a.npz", 32_561, 16_281, 123, 2),
    ],
)
def test_the_shared_files(shared_data, name, train, test, width, classes):
    data = features.load(str(shared_data(name)))
    assert (len(data.y_train), len(data.y_test), data.features, data.classes) == (train, test, width, classes)


@pytest.mark.data
def test_images_are_not_features(shared_data):
    """The sample of raw images lacks the arrays of a feature file."""
    with pytest.raises(UserError):
        features.load(str(shared_data("cifar10-images-sample.npz")))

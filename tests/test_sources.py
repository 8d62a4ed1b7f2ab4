"""Published data: small files of the real formats, over HTTP and from disk; complete, truncated, wrong and hostile."""

import gzip
import hashlib
import http.server
import io
import json
import pickle
import struct
import tarfile
import threading
import zipfile

import numpy as np
import pytest
import torch

from trainables.data import backbones, features
from trainables.data.backbones import pretraining
from trainables.data.backbones.extraction import extract, normalised
from trainables.data.sources import catalogue, fetching, formats, preparing
from trainables.data.sources.catalogue import File, Source
from trainables.errors import UserError

RNG = np.random.default_rng(0)


# ---- small files of the real formats


def tar_of(members, path):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def cifar10(path, rows=12):
    members = {}
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        pixels = RNG.integers(0, 256, (rows, 3072), dtype=np.uint8)
        labels = [i % 10 for i in range(rows)]
        batch = {b"batch_label": b"x", b"labels": labels, b"data": pixels, b"filenames": [b"a.png"] * rows}
        members[f"cifar-10-batches-py/{name}"] = pickle.dumps(batch, protocol=2)
    return tar_of(members, path), members


def idx_bytes(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def idx_folder(folder, name="mnist", rows=20):
    folder.mkdir(exist_ok=True)
    arrays = []
    for file in catalogue.SOURCES[name].files:
        shape = (rows, 28, 28) if "images" in file.name else (rows,)
        array = np.arange(rows, dtype=np.uint8) % 10 if len(shape) == 1 else RNG.integers(0, 256, shape, dtype=np.uint8)
        (folder / file.name).write_bytes(gzip.compress(idx_bytes(array)))
        arrays.append(array)
    return arrays


HEART = """\
63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0
67.0,1.0,4.0,160.0,286.0,0.0,2.0,108.0,1.0,1.5,2.0,3.0,3.0,2
41.0,0.0,2.0,130.0,204.0,0.0,2.0,172.0,0.0,1.4,1.0,0.0,3.0,0
28,1,2,130,?,0,2,185,0,0,?,?,?,0
49,0,3,160,180,0,0,156,0,1,2,?,?,1
37,1,3,130,283,0,1,98,0,0,?,?,?,0
"""


def without_checksums(monkeypatch, name):
    """The files of a test do not have the published checksums."""
    source = catalogue.SOURCES[name]
    bare = tuple(File(file.name, file.url) for file in source.files)
    monkeypatch.setitem(catalogue.SOURCES, name, Source(name, source.format, bare, source.about))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSWEEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDSWEEP_DATA", raising=False)
    return tmp_path / "cache"


# ---- a server that can interrupt downloads


class Server:
    """Serves one file. `cut`: where the next responses end. `ranges`: whether it supports range requests."""

    def __init__(self):
        self.content, self.cut, self.ranges, self.requests = b"", [], True, []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                requested = self.headers.get("Range")
                outer.requests.append(requested)
                start = int(requested.removeprefix("bytes=").rstrip("-")) if requested and outer.ranges else 0
                body = outer.content[start:]
                self.send_response(206 if start else 200)
                if start:
                    self.send_header("Content-Range", f"bytes {start}-{len(outer.content) - 1}/{len(outer.content)}")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: outer.cut.pop(0)] if outer.cut else body)

            def log_message(self, *arguments):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/file.bin"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def file(self, checksum=None):
        return File(
            "file.bin", self.url, f"md5:{hashlib.md5(self.content).hexdigest()}" if checksum is None else checksum
        )


@pytest.fixture
def server():
    served = Server()
    served.content = RNG.bytes(3_000_000)
    yield served
    served.http.shutdown()
    served.http.server_close()


def test_a_download_is_verified_and_cached(cache, server):
    steps = []
    path = fetching.fetch(server.file(), progress=lambda *step: steps.append(step))
    assert path.read_bytes() == server.content
    assert steps[-1] == ("file.bin", len(server.content), len(server.content))
    assert fetching.fetch(server.file()) == path
    assert len(server.requests) == 1


def test_an_interrupted_download_resumes(cache, server):
    server.cut = [1_000_000, 500_000]
    assert fetching.fetch(server.file()).read_bytes() == server.content
    starts = [int(requested.removeprefix("bytes=").rstrip("-")) for requested in server.requests if requested]
    assert len(starts) == 2
    assert 0 < starts[0] < starts[1]


def test_without_range_requests_the_download_starts_again(cache, server):
    server.cut, server.ranges = [1_000_000], False
    assert fetching.fetch(server.file()).read_bytes() == server.content


def test_repeated_interruptions_are_reported_and_the_next_call_resumes(cache, server):
    server.cut = [100_000, 100_000, 100_000]
    with pytest.raises(UserError, match=r"was interrupted after .* bytes; the same command resumes"):
        fetching.fetch(server.file())
    assert not fetching.cached_path(server.file()).exists()
    assert fetching.fetch(server.file()).read_bytes() == server.content
    assert server.requests[-1] is not None


@pytest.mark.parametrize("checksum", ["md5:" + "0" * 32, "sha256:" + "0" * 64, "sha256-prefix:00000000"])
def test_a_wrong_checksum_leaves_nothing_behind(cache, server, checksum):
    with pytest.raises(UserError, match=r"is not the published file\.bin"):
        fetching.fetch(server.file(checksum))
    assert not [path for path in (cache / "sources").rglob("*") if path.is_file()]


def test_no_download_takes_the_place_of_another(cache):
    """MNIST and Fashion-MNIST have files of the same names."""
    files = {file for source in catalogue.SOURCES.values() for file in source.files} | {*catalogue.WEIGHTS.values()}
    assert len({fetching.cached_path(file) for file in files}) == len(files)


def test_without_a_network_the_error_says_which_file_to_get(cache):
    file = File("file.bin", "http://127.0.0.1:9/file.bin", "md5:abc")
    with pytest.raises(UserError, match=r"file\.bin cannot be downloaded .*\(md5:abc\) .* --from$"):
        fetching.fetch(file)


def test_a_local_file_is_verified_and_not_copied(cache, tmp_path):
    (tmp_path / "here").mkdir()
    path = tmp_path / "here" / "file.bin"
    path.write_bytes(b"content")
    right = File("file.bin", "http://127.0.0.1:9/", f"sha256:{hashlib.sha256(b'content').hexdigest()}")
    assert fetching.fetch(right, [tmp_path / "here"]) == path
    assert fetching.fetch(right, [path]) == path
    with pytest.raises(UserError, match="is not the published"):
        fetching.fetch(File("file.bin", "http://127.0.0.1:9/", "md5:abc"), [path])


# ---- formats


def source_of(format):
    """The first source of a format."""
    return next(source for source in catalogue.SOURCES.values() if source.format == format)


def test_cifar(tmp_path):
    path, members = cifar10(tmp_path / "cifar-10-python.tar.gz")
    raw = formats.read(source_of("cifar"), {path.name: path}).arrays
    assert raw["x_train"].shape == (60, 32, 32, 3)
    assert raw["x_test"].shape == (12, 32, 32, 3)
    first = pickle.loads(members["cifar-10-batches-py/data_batch_1"], encoding="bytes")[b"data"][0]
    assert (raw["x_train"][0, :, :, 0].ravel() == first[:1024]).all()  # red first, row by row
    assert raw["y_train"][:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


class Malicious:
    def __reduce__(self):
        return (eval, ("__import__('pathlib').Path('pwned').touch()",))


def test_a_pickle_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, members = cifar10(tmp_path / "cifar-10-python.tar.gz", rows=1)
    members["cifar-10-batches-py/data_batch_3"] = pickle.dumps({b"data": Malicious()})
    tar_of(members, path)
    with pytest.raises(UserError, match=r"asks for builtins\.eval, which is not allowed"):
        formats.read(source_of("cifar"), {path.name: path})
    assert not (tmp_path / "pwned").exists()


def test_a_hostile_archive_writes_nothing_and_follows_no_link(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    path = tmp_path / "in" / "hostile.tar.gz"
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as archive:
        outside = tarfile.TarInfo("../escaped")
        outside.size = 4
        archive.addfile(outside, io.BytesIO(b"evil"))
        link = tarfile.TarInfo("wanted")
        link.type, link.linkname = tarfile.SYMTYPE, str(secret)
        archive.addfile(link)
    with pytest.raises(ValueError, match="holds no file wanted"):
        formats.tar_members(path, ["wanted"])
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["hostile.tar.gz", "in", "secret"]


def test_a_member_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "LARGEST_MEMBER", 1000)
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("wanted", b"0" * 100_000)
    with pytest.raises(ValueError, match="claims 100,000 bytes"):
        formats.zip_members(path, ["wanted"])
    with pytest.raises(ValueError, match="larger than any file"):
        formats.gunzip(gzip.compress(b"0" * 100_000), "bomb.gz")


def test_idx_and_emnist(tmp_path):
    x_train, y_train, *_ = idx_folder(tmp_path / "mnist")
    paths = {file.name: tmp_path / "mnist" / file.name for file in catalogue.SOURCES["mnist"].files}
    raw = formats.read(source_of("idx"), paths).arrays
    assert (raw["x_train"][..., 0] == x_train).all()
    assert (raw["y_train"] == y_train).all()
    with zipfile.ZipFile(tmp_path / "gzip.zip", "w") as archive:
        for part, rows in (("train", 6), ("test", 4)):
            images = RNG.integers(0, 256, (rows, 28, 28), dtype=np.uint8)
            archive.writestr(f"gzip/emnist-digits-{part}-images-idx3-ubyte.gz", gzip.compress(idx_bytes(images)))
            labels = np.arange(rows, dtype=np.uint8)
            archive.writestr(f"gzip/emnist-digits-{part}-labels-idx1-ubyte.gz", gzip.compress(idx_bytes(labels)))
    emnist = formats.read(source_of("emnist"), {"gzip.zip": tmp_path / "gzip.zip"}).arrays
    assert (emnist["x_test"][..., 0] == images.transpose(0, 2, 1)).all()


@pytest.mark.parametrize("content", [b"", b"\0\0\x0d\x01" + b"\0" * 8, idx_bytes(np.zeros((3, 4), np.uint8))[:-1]])
def test_other_content_than_idx_is_refused(content):
    with pytest.raises((ValueError, struct.error)):
        formats.parse_idx(content)


def test_medmnist(tmp_path):
    parts = {}
    for part, rows in (("train", 18), ("val", 3), ("test", 9)):
        parts[f"{part}_images"] = RNG.integers(0, 256, (rows, 28, 28, 3), dtype=np.uint8)
        parts[f"{part}_labels"] = (np.arange(rows) % 9).astype(np.uint8)[:, None]
    np.savez(tmp_path / "pathmnist.npz", **parts)
    raw = formats.read(source_of("medmnist"), {"pathmnist.npz": tmp_path / "pathmnist.npz"}).arrays
    assert (raw["x_test"] == parts["test_images"]).all()
    assert raw["y_train"].tolist() == [*range(9), *range(9)]


def test_libsvm(tmp_path):
    (tmp_path / "a9a").write_text("-1 3:1 11:1 123:1 \n+1 1:1 \n")
    (tmp_path / "a9a.t").write_text("+1 2:1 \n")
    raw = formats.read(source_of("libsvm"), {name: tmp_path / name for name in ("a9a", "a9a.t")}).arrays
    assert raw["x_train"].shape == (2, 123)
    assert np.flatnonzero(raw["x_train"][0]).tolist() == [2, 10, 122]
    assert raw["y_train"].tolist() == [0, 1]
    (tmp_path / "a9a").write_text("0 3:1\n")
    with pytest.raises(UserError, match="line 1 of a9a is not a row"):
        formats.read(source_of("libsvm"), {name: tmp_path / name for name in ("a9a", "a9a.t")})


def heart_paths(tmp_path):
    names = [file.name for file in catalogue.SOURCES["heart-disease"].files]
    for name in names:
        (tmp_path / name).write_text(HEART * 2)
    return {name: tmp_path / name for name in names}


def test_heart_disease_has_a_client_for_every_hospital(tmp_path):
    raw = formats.read(source_of("heart"), heart_paths(tmp_path)).arrays
    assert raw["x_train"].shape[1] == 13
    assert len(raw["y_train"]) + len(raw["y_test"]) == 4 * 10  # the row with a missing value is dropped
    assert np.bincount(raw["client_train"]).tolist() == [7] * 4  # 66% of 6 healthy and of 4 ill rows
    rows = np.concatenate([raw["x_train"], raw["x_test"]])
    sixty_three = rows[np.isclose(rows[:, 0], 0.63)][0]
    # age sex trestbps chol fbs thalach exang oldpeak, cp 2 3 4, restecg 1 2
    expected = [0.63, 1, 145 / 200, 233 / 600, 1, 150 / 220, 0, 2.3 / 6, 0, 0, 0, 0, 1]
    assert sixty_three == pytest.approx(expected)


def test_tcga_brca_has_a_client_for_every_region(tmp_path):
    header = ["pid", *(f"c{i}" for i in range(39)), "E", "T"]
    lines, folds = [",".join(header)], ["pid,fold,fold2"]
    for i in range(24):
        values = [str(v) for v in RNG.random(39).round(3)]
        lines.append(",".join([f"TCGA-{i}", *values, f"{i % 2}.0", "100"]))
        part = "test" if i % 4 == 3 else "train"
        folds.append(f"TCGA-{i},{part},{part}_{i % 6}")
    (tmp_path / "brca.csv").write_text("\n".join(lines))
    (tmp_path / "train_test_split.csv").write_text("\n".join(folds))
    paths = {name: tmp_path / name for name in ("brca.csv", "train_test_split.csv")}
    raw = formats.read(source_of("tcga"), paths).arrays
    assert raw["x_train"].shape == (18, 39)
    assert np.bincount(raw["client_train"]).tolist() == [4, 2, 4, 2, 4, 2]  # i % 4 == 3 is odd: regions 1, 3 and 5
    assert set(raw["y_train"]) == {0, 1}
    (tmp_path / "train_test_split.csv").write_text("\n".join(folds[:-1]))
    with pytest.raises(UserError, match=r"1 patients of brca\.csv are in no fold"):
        formats.read(source_of("tcga"), paths)


# ---- feature files


def test_a_feature_file_holds_its_provenance(cache, tmp_path, monkeypatch, fedsweep):
    without_checksums(monkeypatch, "mnist")
    idx_folder(tmp_path / "mnist")
    code, out, _ = fedsweep("data", "prepare", "mnist", "--from", tmp_path / "mnist")
    path = cache / "data" / "mnist.npz"
    assert (code, out.split()) == (0, [str(path)])
    loaded = features.load(str(path))
    assert loaded.x_train.shape == (20, 784)
    assert loaded.x_train.max() <= 1
    stated = preparing.provenance_of(path)
    assert stated["source"] == "mnist"
    assert len(stated["files"]) == 4
    first = path.read_bytes()
    path.unlink()
    fedsweep("data", "prepare", "mnist", "--from", tmp_path / "mnist")
    assert path.read_bytes() == first
    code, out, _ = fedsweep("data", "verify", "--json")
    assert code == 0
    assert json.loads(out)[0]["valid"] is True


def test_a_changed_feature_file_is_detected(cache, tmp_path, monkeypatch, fedsweep):
    without_checksums(monkeypatch, "heart-disease")
    heart_paths(tmp_path)
    code, out, _ = fedsweep("data", "prepare", "heart-disease", "--from", tmp_path, "--to", tmp_path)
    assert code == 0
    path = tmp_path / "heart-disease.npz"
    with np.load(path) as file:
        arrays = dict(file)
    arrays["x_train"][0, 0] += 1
    np.savez(path, **arrays)
    code, out, _ = fedsweep("data", "verify", path)
    assert code == 1
    assert "WRONG" in out
    assert "has been changed" in out


def test_unknown_data_is_refused_before_any_download(cache, fedsweep):
    code, _, err = fedsweep("data", "prepare", "mnist", "imagenet")
    assert code == 2
    assert "data 'imagenet' has no recipe" in err


def test_a_study_whose_data_is_missing_says_how_to_make_it(cache, tmp_path, monkeypatch, fedsweep):
    monkeypatch.chdir(tmp_path)
    code, _, err = fedsweep("plan", "paper-cifar10-resnet20")
    assert code == 2
    assert "make it with: fedsweep data prepare cifar10-resnet20." in err


def test_a_study_finds_prepared_data(cache, tmp_path, monkeypatch):
    from orchestrator.study import reading

    (cache / "data").mkdir(parents=True)
    (cache / "data" / "cifar10-resnet20.npz").touch()
    monkeypatch.chdir(tmp_path)
    study, _ = reading.load("paper-cifar10-resnet20")
    assert study.data[0].source == str((cache / "data" / "cifar10-resnet20.npz").resolve())


def test_the_error_for_an_unpublished_file_says_what_to_do(cache, tmp_path, monkeypatch, fedsweep):
    monkeypatch.chdir(tmp_path)
    code, _, err = fedsweep("plan", "paper-crc5-resnet20")
    assert code == 2
    assert "data 'crc5-resnet20.npz' does not exist, and no published source has it (colorectal histology" in err
    assert err.strip().endswith("or use PathMNIST: fedsweep data prepare pathmnist-resnet20.")


def test_the_list_has_the_weights_too(cache, fedsweep):
    """They are needed to download everything for a machine without a network."""
    code, out, _ = fedsweep("data", "list", "--json")
    assert code == 0
    weights = {each["backbone"]: each for each in json.loads(out)["weights"]}
    assert set(weights) == set(catalogue.WEIGHTS)
    assert weights["resnet20"]["url"].endswith("cifar100_resnet20-23dac2f1.pt")
    assert weights["resnet20"]["checksum"] == "sha256-prefix:23dac2f1"


def test_every_recipe_names_a_known_source_and_backbone():
    for each in catalogue.recipes():
        assert each.source in catalogue.SOURCES
        assert each.backbone in ("", "pca100", catalogue.EFFICIENTNET, *backbones.BACKBONES)
        assert all(file.checksum for file in catalogue.SOURCES[each.source].files) or each.source in (
            "adult",  # its content is checked
            "tcga-brca",  # its URL names a commit
        )


# ---- backbones


@pytest.mark.parametrize(("name", "width"), [("resnet20", 64), ("resnet56", 64), ("vgg16", 512)])
def test_backbones_load_only_their_own_weights(tmp_path, name, width):
    network = backbones.BACKBONES[name](100)
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    again = backbones.load(name, tmp_path / "weights.pt")
    assert again.penultimate(torch.zeros(1, 3, 32, 32)).shape == (1, width)
    other = "vgg16" if name != "vgg16" else "resnet20"
    with pytest.raises(UserError, match=f"are not those of a {other}"):
        backbones.load(other, tmp_path / "weights.pt")


def test_state_dicts_have_the_published_names():
    names = list(backbones.BACKBONES["resnet20"](100).state_dict())
    assert len(names) == 128
    assert {"conv1.weight", "bn1.running_var", "layer2.0.downsample.1.bias", "fc.bias"} <= set(names)
    vgg = set(backbones.BACKBONES["vgg16"](100).state_dict())
    assert {"features.0.weight", "features.41.running_mean", "classifier.0.weight", "classifier.6.bias"} <= vgg


def cifar10_input(rows, device):
    return normalised(torch.from_numpy(rows), backbones.CIFAR10_MEAN, backbones.CIFAR10_STD)


def test_an_interrupted_extraction_resumes(tmp_path, monkeypatch):
    from trainables.data.backbones import extraction

    monkeypatch.setattr(extraction, "PIECE", 4)
    torch.manual_seed(0)
    network = backbones.BACKBONES["resnet20"](10)
    images = RNG.integers(0, 256, (10, 32, 32, 3), dtype=np.uint8)

    whole = extract(images, network, cifar10_input, folder=tmp_path / "a", identity="x")

    class PowerCutError(Exception):
        pass

    def fails(done, total):
        if done == 8:
            raise PowerCutError

    with pytest.raises(PowerCutError):
        extract(images, network, cifar10_input, folder=tmp_path / "b", identity="x", progress=fails)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "b").iterdir()}
    assert len(kept) == 2
    assert (extract(images, network, cifar10_input, folder=tmp_path / "b", identity="x") == whole).all()
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
    extract(images, network, cifar10_input, folder=tmp_path / "b", identity="other weights")
    assert len(list((tmp_path / "b").iterdir())) == 6


@pytest.mark.data
def test_the_paper_s_images_and_weights_give_its_features(shared_data, tmp_path):
    images, given = (np.load(shared_data(f"cifar10-{what}.npz")) for what in ("images-sample", "resnet20"))
    network = backbones.load("resnet20", shared_data("backbones/cifar100_resnet20.pth"))
    for part in ("train", "test"):
        found = extract(
            images[f"x_{part}"],
            network,
            cifar10_input,
            folder=tmp_path,
            identity=part,
            batch=64,
        )
        expected = given[f"x_{part}"][: len(found)].astype(np.float64)
        # float16 rounds to 2^-11 of a value; the order of float32 sums may change the rounding by one step
        assert np.abs(found - expected).max() <= 2**-10 * expected.max()


def test_pretraining_learns_and_resumes_after_an_interruption(tmp_path):
    labels = (np.arange(24) % 2).astype(np.uint8)
    images = np.where(labels[:, None, None, None] == 0, 40, 210).astype(np.uint8) * np.ones((1, 8, 8, 3), np.uint8)
    arrays = {"x_train": images, "y_train": labels, "x_test": images[:20], "y_test": labels[:20]}
    schedule = pretraining.Schedule(epochs=2, batch=8, learning_rate=0.05)
    epochs = []
    pretraining.pretrain("resnet20", arrays, tmp_path / "whole.pt", schedule, "cpu", epochs.append)
    assert epochs[1].loss < epochs[0].loss

    class PowerCutError(Exception):
        pass

    def fails(epoch):
        if epoch.number == 1:
            raise PowerCutError

    with pytest.raises(PowerCutError):
        pretraining.pretrain("resnet20", arrays, tmp_path / "cut.pt", schedule, "cpu", fails)
    pretraining.pretrain("resnet20", arrays, tmp_path / "cut.pt", schedule, "cpu")
    first, second = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "cut"))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not (tmp_path / "cut.pt.training").exists()


@pytest.mark.data
def test_adult_is_verified_by_its_content(shared_data, cache, tmp_path):
    """Its files have no published checksum: the same rows are accepted, changed rows refused."""
    with np.load(shared_data("adult-a9a.npz")) as file:
        for part, name in (("train", "a9a"), ("test", "a9a.t")):
            lines = (
                f"{'+1' if y else '-1'} {' '.join(f'{i + 1}:1' for i in np.flatnonzero(x))} \n"
                for x, y in zip(file[f"x_{part}"], file[f"y_{part}"], strict=True)
            )
            (tmp_path / name).write_text("".join(lines))
    path = preparing.prepare("adult-a9a", preparing.Options(local=(tmp_path,)))
    assert (features.load(str(path)).x_test == features.load(str(shared_data("adult-a9a.npz"))).x_test).all()
    path.unlink()
    text = (tmp_path / "a9a").read_text()
    (tmp_path / "a9a").write_text(text.replace("-1 ", "+1 ", 1))
    with pytest.raises(UserError, match="do not hold the published rows"):
        preparing.prepare("adult-a9a", preparing.Options(local=(tmp_path,)))


def test_principal_components_have_the_largest_variance(cache, tmp_path, monkeypatch):
    without_checksums(monkeypatch, "mnist")
    x_train, *_ = idx_folder(tmp_path / "mnist")
    path = preparing.prepare("mnist-pca3", preparing.Options(local=(tmp_path / "mnist",)))
    found = features.load(str(path)).x_train
    flat = x_train.reshape(len(x_train), -1) / 255
    singular = np.linalg.svd(flat - flat.mean(axis=0), compute_uv=False)[:3]
    assert np.linalg.norm(found, axis=0) == pytest.approx(singular, rel=2e-3)  # stored as float16


def test_small_images_are_enlarged_to_the_input_size(tmp_path, monkeypatch):
    """MedMNIST images have 28 pixels, too few to be halved five times."""
    shapes = []

    class Network(torch.nn.Module):
        def penultimate(self, x: torch.Tensor) -> torch.Tensor:
            shapes.append(tuple(x.shape[1:]))
            return x.flatten(1)[:, :4]

    monkeypatch.setattr(backbones, "load", lambda name, weights: Network())
    weights = tmp_path / "weights.pth"
    weights.write_bytes(b"none")
    images_28 = np.zeros((3, 28, 28, 3), dtype=np.uint8)
    arrays = {
        f"{kind}_{part}": images_28 if kind == "x" else np.zeros(3) for kind in "xy" for part in ("train", "test")
    }
    recipe = catalogue.recipe("pathmnist-vgg16")
    found, how = preparing._features(recipe, arrays, "medmnist", weights, tmp_path / "x.npz", preparing.Options())
    assert set(shapes) == {(3, 32, 32)}
    assert how["input_size"] == 32
    assert found["x_train"].shape == (3, 4)

"""From a folder of images, or a table of paths or texts, to a feature file, a model and predictions."""

import contextlib
import csv
import json
import re
import warnings

import numpy as np
import pytest
import torch
from command_line import assert_one_sentence
from PIL import Image
from repository_files import DOCS, blocks

import fedsweep as face
from trainables.data import backbones, features
from trainables.data.backbones import extraction
from trainables.data.backbones.own_rows import read_image
from trainables.data.sources import own, preparing
from trainables.data.stored import StoredRows
from trainables.errors import UserError
from trainables.federation.saved_model import SavedModel

COLOURS = {"grass": (40, 160, 40), "sand": (200, 170, 90), "sea": (30, 60, 190)}
TINY = """\
import numpy as np
import torch


def tiny():
    network = torch.nn.Sequential(torch.nn.AvgPool2d(4), torch.nn.Flatten())
    return network, lambda image: torch.from_numpy(np.array(image.resize((8, 8)))).permute(2, 0, 1) / 255


def words():
    class Counts(torch.nn.Module):
        def forward(self, texts):
            return torch.tensor([[text.count("good"), text.count("bad"), 1.0] for text in texts])

    return Counts(), str


def wrong():
    return torch.nn.Identity()


def flat():
    return torch.nn.Identity(), lambda image: torch.zeros(3, 2)
"""


def write_images(folder, each=20, seed=0):
    """One subfolder per class with noisy images of one colour, of several sizes."""
    rng = np.random.default_rng(seed)
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for number in range(each):
            shape = (16 + number % 3, 20, 3)
            pixels = np.clip(np.array(colour) + rng.normal(0, 40, shape), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:03}.{'png' if number % 2 else 'jpg'}")
    return folder


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny_backbones.py").write_text(TINY)
    write_images(tmp_path / "photos")
    return tmp_path


class Pooled(torch.nn.Module):
    """Replaces a large network: the mean colour of each quarter."""

    def forward(self, x):
        return torch.nn.functional.adaptive_avg_pool2d(x, 2).flatten(1)


@pytest.fixture
def small_efficientnet(monkeypatch):
    from trainables.data.backbones import backbone

    monkeypatch.setattr(backbones, "from_efficientnet", Pooled)
    monkeypatch.setattr(backbone, "versions", lambda *packages: {})


OPTIONS = ("--clients", 3, "--method", "dp-fedgd", "--epsilon", "inf", "--set", "learning_rate=1", "--rounds", 40)


def test_the_documented_path_from_a_folder_to_predictions(fedsweep, work, small_efficientnet, no_ray, capfd):
    """The five commands of docs/bring-your-data.md, with a small network in place of EfficientNet-Lite0."""
    text = (DOCS / "bring-your-data.md").read_text()
    section = text[text.index("## From a folder of images to predictions") :]
    commands = re.findall(r"^fedsweep (.*)$", section[: section.index("\n## ", 5)], re.M)[:5]
    assert len(commands) == 5
    write_images(work / "new-photos", each=4, seed=1)
    for command in commands:
        code, out, err = fedsweep(*command.split())
        assert code == 0, err
    assert "12 predictions" in out
    assert float(re.search(r"accuracy: ([\d.]+)%", out)[1]) > 60
    with open("classes.csv") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["row"] == "grass/000.jpg"
    assert {row["class"] for row in rows} <= set(COLOURS)
    about = json.loads(features.load("photos.npz").backbone)
    assert about["name"] == "efficientnet-lite0"
    assert about["details"]["input_size"] == 224
    provenance = preparing.provenance_of(work / "photos.npz")
    assert provenance["torch"]
    assert provenance["backbone"] == "efficientnet-lite0"
    (work / "new-photos" / "grass" / "000.jpg").rename(work / "new-photos" / "1.jpg")
    program, *_ = blocks(DOCS / "bring-your-data.md", "python")
    exec(compile(program, "bring-your-data.md", "exec"), {})
    assert capfd.readouterr().out.strip() in COLOURS


def test_images_of_other_kinds(tmp_path):
    """16 bits, transparency in every form, and 32 bits, whose range is unknown."""
    grey = np.arange(0, 65536, 1024, dtype=np.uint16).reshape(8, 8)
    Image.fromarray(grey).save(tmp_path / "sixteen.png")
    Image.fromarray(grey).save(tmp_path / "sixteen.tiff")
    for name in ("sixteen.png", "sixteen.tiff"):
        np.testing.assert_array_equal(read_image(tmp_path / name), np.repeat((grey // 257)[..., None], 3, axis=2))
    clear = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    clear.putpixel((0, 0), (10, 20, 30, 255))
    clear.save(tmp_path / "clear.png")
    palette = clear.quantize(4)
    palette.save(tmp_path / "palette.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("clear.png", "palette.png"):
            assert read_image(tmp_path / name).tolist() == [[[10, 20, 30], [255, 255, 255]]]
    Image.fromarray(np.ones((2, 2), dtype=np.float32)).save(tmp_path / "float.tiff")
    with pytest.raises(UserError, match=r"float.tiff cannot be read: it has 32 bits per pixel"):
        read_image(tmp_path / "float.tiff")


def test_square_roots_of_features(fedsweep, work, small_efficientnet, no_ray):
    for name in ("efficientnet-lite0", "efficientnet-lite0-sqrt"):
        assert fedsweep("data", "prepare", "photos", "--backbone", name, "--to", f"{name}.npz")[0] == 0
    plain, roots = (features.load(f"efficientnet-lite0{end}.npz") for end in ("", "-sqrt"))
    assert (plain.x_train < 0).any()
    np.testing.assert_allclose(np.sign(plain.x_train) * roots.x_train**2, plain.x_train, atol=2e-3)
    assert fedsweep("train", "--data", "efficientnet-lite0-sqrt.npz", *OPTIONS, "--save", "model.npz")[0] == 0
    code, out, err = fedsweep("predict", "model.npz", "photos", "--output", "a.csv")
    assert code == 0, err
    assert float(re.search(r"accuracy: ([\d.]+)%", out)[1]) > 60
    twice = fedsweep("data", "prepare", "photos", "--backbone", "efficientnet-lite0-sqrt-sqrt", "--to", "b.npz")
    assert_one_sentence(twice, "'efficientnet-lite0-sqrt' is unknown")
    assert preparing.find_recipe("cifar10-resnet20-sqrt").backbone == "resnet20-sqrt"


def test_square_roots_are_of_the_input_of_the_last_layer(tmp_path):
    network = backbones.BACKBONES["resnet20"](100).eval()
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    options = preparing.Options(weights=tmp_path / "weights.pt")
    x = torch.rand(2, 3, 32, 32)
    roots = preparing.chosen_backbone("resnet20-sqrt", options).network.eval()(x)
    torch.testing.assert_close(roots**2, network.penultimate(x))


def test_a_model_of_a_user_s_backbone_runs_code_only_when_named(fedsweep, work, no_ray):
    named = ("--backbone", "tiny_backbones.py:tiny")
    assert fedsweep("data", "prepare", "photos", *named)[0] == 0
    data = features.load("photos.npz")
    assert (len(data.y_train), len(data.y_test), data.features) == (48, 12, 12)
    assert data.class_names == tuple(COLOURS)
    assert fedsweep("train", "--data", "photos.npz", *OPTIONS, "--save", "model.npz")[0] == 0
    refused = fedsweep("predict", "model.npz", "photos", "--output", "a.csv")
    assert_one_sentence(refused, "tiny_backbones.py:tiny")
    code, out, err = fedsweep("predict", "model.npz", "photos", "--output", "a.csv", *named)
    assert code == 0, err
    assert "60 predictions" in out

    model = face.load_model("model.npz")
    with pytest.raises(UserError, match="runs only if you name it"):
        model.to_torch()
    network = model.to_torch("tiny_backbones.py:tiny")
    image = Image.open("photos/sea/001.png")
    assert not network.training
    x = network.preprocess([image, image])
    torch.testing.assert_close(network.preprocess(image), x[:1])
    scores = network(x)
    assert scores.shape == (2, 3)
    direct = model.scores(network.backbone(x).detach().numpy())
    assert scores.detach().numpy() == pytest.approx(direct, abs=1e-5)


def test_other_weights_than_the_model_s_are_refused(fedsweep, work, no_ray):
    assert fedsweep("data", "prepare", "photos", "--backbone", "tiny_backbones.py:tiny")[0] == 0
    assert fedsweep("train", "--data", "photos.npz", *OPTIONS, "--save", "model.npz")[0] == 0
    (work / "other_backbones.py").write_text(
        "import torch\ndef tiny():\n    return torch.nn.Linear(2, 12), lambda image: torch.zeros(2)\n"
    )
    named = ("--backbone", "other_backbones.py:tiny")
    assert_one_sentence(
        fedsweep("predict", "model.npz", "photos", "--output", "a.csv", *named), "does not have the weights"
    )


def test_splits_of_a_folder(fedsweep, work):
    write_images(work / "split/train", each=5)
    write_images(work / "split/test", each=2)
    (work / "split/train/sea/notes.txt").write_text("no image")
    assert fedsweep("data", "prepare", "split", "--backbone", "tiny_backbones.py:tiny")[0] == 0
    data = features.load("split.npz")
    assert (len(data.y_train), len(data.y_test)) == (15, 6)


def test_a_table_of_images_with_clients(fedsweep, work):
    rows = [
        (f"photos/{name}/{i:03}.{'png' if i % 2 else 'jpg'}", name, f"c{i % 4}") for name in COLOURS for i in range(8)
    ]
    with open("list.csv", "w") as file:
        csv.writer(file).writerows([("path", "kind", "owner"), *rows])
    named = ("--backbone", "tiny_backbones.py:tiny", "--image", "path", "--label", "kind", "--client", "owner")
    code, _, err = fedsweep("data", "prepare", "list.csv", *named)
    assert code == 0, err
    assert "fedsweep train --data list.npz" in err
    data = features.load("list.npz")
    assert data.clients == 4
    assert data.client_names == ("c0", "c1", "c2", "c3")


def test_a_column_of_texts(fedsweep, work, no_ray):
    with open("reviews.csv", "w") as file:
        rows = [(f"a {'good good' if i % 2 else 'bad'} film {i}", "up" if i % 2 else "down") for i in range(40)]
        csv.writer(file).writerows([("text", "mood"), *rows])
    named = ("--backbone", "tiny_backbones.py:words")
    assert fedsweep("data", "prepare", "reviews.csv", *named, "--text", "text", "--label", "mood")[0] == 0
    assert fedsweep("train", "--data", "reviews.npz", *OPTIONS, "--save", "model.npz")[0] == 0
    code, out, err = fedsweep("predict", "model.npz", "reviews.csv", "--output", "a.csv", *named)
    assert code == 0, err
    assert "accuracy: 100.00%" in out
    with open("new.csv", "w") as file:
        csv.writer(file).writerows([("text", "mood"), *rows[:10], ("a film", ""), ("no film", "sideways")])
    code, out, err = fedsweep("predict", "model.npz", "new.csv", "--output", "b.csv", *named)
    assert code == 0, err
    assert "accuracy: 90.91%" in out, "10 of 11 rows with a label"
    assert "rows without a label, which do not count: 1" in out
    assert "does not know ('sideways'): 1" in out
    wrong = fedsweep(
        "data", "prepare", "reviews.csv", "--backbone", "efficientnet-lite0", "--image", "text", "--to", "b.npz"
    )
    assert_one_sentence(wrong, "--label")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"name": "tiny2"}, "come from 'tiny2', those of the model from 'tiny'"),
        ({"details": {"weights": "2"}}, "come from other weights or preprocessing, those of the model from 'tiny'"),
        ({"column": "other"}, ""),
    ],
)
def test_features_of_another_backbone_are_not_predicted(tmp_path, change, sentence):
    of_model = {"name": "tiny", "rows": "images", "details": {"weights": "1"}, "column": "", "label": ""}
    np.savez(tmp_path / "f.npz", x_test=np.zeros((2, 3)), backbone=json.dumps({**of_model, **change}))
    with pytest.raises(UserError, match=sentence) if sentence else contextlib.nullcontext():
        features.rows_to_predict(str(tmp_path / "f.npz"), backbone=json.dumps(of_model))


def test_all_broken_images_are_named_at_once(fedsweep, work, monkeypatch):
    monkeypatch.setattr(own.own_rows, "MOST_NAMED", 2)
    images = sorted((work / "photos").rglob("*.png"))
    broken = [images[index] for index in (1, 5, 9, 12)]
    for image in broken[1:]:
        image.write_bytes(image.read_bytes()[:60])
    broken[0].write_bytes(b"no image")
    code, _, err = fedsweep(
        "data", "prepare", "photos", "--backbone", "tiny_backbones.py:tiny", "--test-fraction", "0.01"
    )
    assert_one_sentence((code, "", err), str(broken[0].relative_to(work)))
    assert f"3 more images cannot be read: {broken[1].relative_to(work)}, {broken[2].relative_to(work)}, ..." in err


def test_an_interrupted_preparation_resumes(fedsweep, work, monkeypatch):
    monkeypatch.setattr(extraction, "PIECE", 10)
    named = ("--backbone", "tiny_backbones.py:tiny")
    assert fedsweep("data", "prepare", "photos", *named, "--to", "whole.npz")[0] == 0
    (work / "photos/sea/019.png").rename(work / "away.png")
    (work / "photos/sea/019.png").write_bytes(b"no image")
    assert_one_sentence(fedsweep("data", "prepare", "photos", *named), "019.png")
    done = set((work / "photos.partial").iterdir())
    assert done
    (work / "away.png").rename(work / "photos/sea/019.png")
    read = []
    original = own.own_rows.read_image
    monkeypatch.setattr(own.own_rows, "read_image", lambda path: read.append(path) or original(path))
    assert fedsweep("data", "prepare", "photos", *named)[0] == 0
    assert len(read) <= 60 - 10 * len(done)
    a, b = features.load("whole.npz"), features.load("photos.npz")
    assert (a.x_train == b.x_train).all()
    assert (a.x_test == b.x_test).all()
    assert not (work / "photos.partial").exists()


def test_large_files_are_read_in_place(fedsweep, work, monkeypatch):
    assert fedsweep("data", "prepare", "photos", "--backbone", "tiny_backbones.py:tiny")[0] == 0
    whole = features.load("photos.npz")
    monkeypatch.setattr("trainables.data.stored.STREAM_FROM_BYTES", 100)
    streamed = features.load("photos.npz").x_train
    assert isinstance(streamed, StoredRows)
    assert (streamed[np.arange(48)] == whole.x_train).all()
    content = bytearray((work / "photos.npz").read_bytes())
    place = content.index(whole.x_train.astype(np.float16).tobytes())
    content[place] ^= 1
    (work / "changed.npz").write_bytes(content)
    with pytest.raises(UserError, match=r"changed\.npz"):
        preparing.provenance_of(work / "changed.npz")


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (("photos",), "needs a backbone"),
        (("photos", "--backbone", "resnet21"), "resnet21"),
        (("photos", "--backbone", "tiny_backbones.py:nothing"), "nothing"),
        (("photos", "--backbone", "tiny_backbones.py:wrong"), "must return"),
        (("photos", "--backbone", "tiny_backbones.py:flat"), "(48, 3, 2)"),
        (("photos", "--backbone", "tiny_backbones.py:tiny", "--label", "x"), "--label"),
        (("photos", "--backbone", "tiny_backbones.py:tiny", "--to", "a/b.npz"), "a/b.npz"),
        (("empty", "--backbone", "tiny_backbones.py:tiny"), "empty"),
    ],
)
def test_wrong_preparations_are_one_sentence(fedsweep, work, arguments, culprit):
    (work / "empty").mkdir()
    assert_one_sentence(fedsweep("data", "prepare", *arguments), culprit)


def test_published_images_take_any_backbone():
    chosen = preparing.find_recipe("mnist", "tiny_backbones.py:tiny")
    assert (chosen.name, chosen.source, chosen.backbone) == ("mnist-tiny", "mnist", "tiny_backbones.py:tiny")
    assert preparing.find_recipe("cifar10", "efficientnet-lite0").name == "cifar10-efficientnet-lite0"
    with pytest.raises(UserError, match="adult"):
        preparing.find_recipe("adult", "resnet20")


@pytest.mark.parametrize("text", ["{", "[]", '{"name": 1, "details": {}}', '{"name": "a"}'])
def test_damaged_descriptions_of_a_backbone_are_refused(tmp_path, text):
    y = np.arange(4) % 2
    x = np.zeros((4, 3), dtype=np.float32)
    with pytest.raises(UserError, match="damaged"):
        features.from_arrays({"x_train": x, "y_train": y, "x_test": x, "y_test": y, "backbone": np.array(text)})
    model = SavedModel(np.arange(8, dtype=np.float32), "softmax", 3, 2, {}, backbone=text)
    model.save(tmp_path / "m.npz")
    with pytest.raises(UserError, match="not a model that fedsweep saved"):
        SavedModel.load(tmp_path / "m.npz")


def test_a_head_without_a_backbone_takes_features():
    weights = np.arange(8, dtype=np.float32)
    model = SavedModel(weights, "softmax", 3, 2, {})
    x = np.array([[1, 2, 3], [0, -1, 2]], dtype=np.float32)
    assert model.to_torch()(torch.from_numpy(x)).detach().numpy() == pytest.approx(model.scores(x))
    with pytest.raises(UserError, match="records no backbone"):
        model.to_torch().preprocess([])

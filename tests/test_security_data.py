"""Attacks with files of weights, images and tables: pipes, files that expand, code, and odd names."""

import os
import zipfile

import pytest
import torch

from trainables.data import backbones
from trainables.errors import UserError
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
    for use in (networks.weights_hash, lambda settings: networks.load(settings, 3072, 10)):
        with pytest.raises(UserError, match=r"plain file|larger than"):
            use(settings)

"""Attacks with the current folder as home folder, with linked working folders, pipes among models, and odd names."""

import os
import shlex

import numpy as np
import pytest

from orchestrator.results import account
from trainables import files
from trainables.data.backbones import extraction
from trainables.data.importing.conversion import load_table
from trainables.data.sources import fetching
from trainables.errors import UserError
from trainables.federation import checkpoint_key, torch_model
from trainables.models import kernels


def test_a_folder_of_the_user_is_absolute(tmp_path, monkeypatch):
    """A planted kernel would be executed, and a planted key would make checkpoints trusted."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("FEDSWEEP_CACHE", raising=False)
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, "planted")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert kernels._cache_folder() == fetching.cache_folder() == tmp_path / "home" / ".cache" / "fedsweep"
    key = checkpoint_key.user_key.__wrapped__()
    assert (tmp_path / "home" / ".local" / "state" / "fedsweep" / "checkpoint.key").read_bytes() == key
    monkeypatch.setenv("HOME", "planted")
    assert checkpoint_key.user_key.__wrapped__() != checkpoint_key.user_key.__wrapped__(), "it is not kept"
    assert kernels._cache_folder().name.startswith("fedsweep-kernels-")
    assert os.listdir(tmp_path / "here") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a folder of another user")
def test_nothing_is_executed_or_believed_in_the_home_of_another_user(tmp_path, monkeypatch):
    """As with an inherited HOME: the owner of the folder can replace what is in it."""
    home = tmp_path / "home"
    (home / ".cache" / "fedsweep").mkdir(parents=True)
    os.chown(home, 65534, 65534)
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    assert kernels._cache_folder().name.startswith("fedsweep-kernels-")
    assert checkpoint_key.user_key.__wrapped__() != checkpoint_key.user_key.__wrapped__(), "it is not kept"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs links and folders of another user")
def test_parts_that_another_user_can_replace(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (tmp_path / "link").symlink_to("mine")
    for path in (mine, tmp_path / "link", mine / "missing", mine / ".." / "link"):
        assert files.replaceable_part(path) is None
    (tmp_path / "theirs").symlink_to(mine)
    os.lchown(tmp_path / "theirs", 65534, 65534)
    (tmp_path / "through").symlink_to("theirs")
    for path in (tmp_path / "theirs", tmp_path / "theirs" / "x", tmp_path / "through"):
        assert files.replaceable_part(path) == tmp_path / "theirs"
    (tmp_path / "loop").symlink_to("loop")
    assert files.replaceable_part(tmp_path / "loop") is not None
    for mode, found in ((0o777, mine), (0o1777, None), (0o775, None)):
        mine.chmod(mode)
        assert files.replaceable_part(mine / "x") == found


def test_features_are_not_written_through_a_linked_folder(tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "x.partial").symlink_to(tmp_path / "victim")
    import torch

    images = np.zeros((2, 2, 2, 1), np.uint8)
    with pytest.raises(UserError, match="symbolic link"):
        extraction.extract(
            *(images, torch.nn.Flatten(), lambda rows, _: torch.as_tensor(rows)),
            folder=tmp_path / "x.partial",
            identity="x",
            device="cpu",
        )
    assert os.listdir(tmp_path / "victim") == []


def test_a_pipe_among_models_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "x.npz")
    assert not account._is_model(tmp_path / "x.npz")


def test_names_in_printed_commands_are_quoted(tmp_path, monkeypatch):
    name = "a b; touch x:f"
    monkeypatch.setattr(torch_model, "read_backbone", lambda _: {"name": name})
    monkeypatch.setattr(torch_model.backbones, "is_function", lambda _: True)
    with pytest.raises(UserError) as caught:
        torch_model.backbone_of("{}")
    assert f"--backbone {shlex.quote(name)}," in str(caught.value)
    with pytest.raises(UserError) as caught:
        load_table("a b; touch x.csv")
    assert "fedsweep data import 'a b; touch x.csv' --label" in str(caught.value)

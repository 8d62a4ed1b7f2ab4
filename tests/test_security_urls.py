"""Attacks with URLs: schemes that execute code, credentials in messages and results, links behind file://."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import reported
import yaml
from handmade_ledgers import Writer, study, writing

from orchestrator.results.locations import read_text, results_location
from orchestrator.study import reading
from trainables.data import features
from trainables.errors import UserError
from trainables.limited_yaml import shown_yaml
from trainables.urls import as_user_error, open_filesystem, shown, shown_url

SECRET = "AKIA7SECRET"
WITH_SECRETS = (
    f"https://user:{SECRET}@host.example/data/x.npz",
    f"https://host.example/data/x.npz?X-Amz-Signature={SECRET}&a=b",
    f"s3://{SECRET}:other@bucket/results",
    f"s3://key:ab/{SECRET}/c@bucket/results",
    f"sftp://{SECRET}@host.example:22/x",
    f"abfs://container@account.example/x?sig={SECRET}",
    f"https://user:it's{SECRET}@host.example/x.npz?sig=a'{SECRET}",
    f"https://user:a?{SECRET}@host.example/x",
    f"http://u1:one@host.example/a.npz,http://u2:{SECRET}@host.example/b.npz",
    f"s3://user:pa 1/2'{SECRET}@bucket/x.npz",
    f"s3://user:12/{SECRET}@bucket/x.npz",
    f's3://user:a"<`{SECRET}@bucket/x.npz',
    f"s3://user:a@{SECRET}/b@bucket/x.npz",
    f"s3://user:a://{SECRET}@bucket/x.npz",
    f"s3://user:a, b://{SECRET}@bucket/x.npz",
    f"https://host.example/my data.npz?sig='{SECRET}",
)


@pytest.mark.parametrize("url", WITH_SECRETS)
def test_a_url_is_shown_without_credentials(url):
    for text in (url, f"data '{url}' cannot be read", f"({url})", f"a {url} and {url}\n{url}"):
        assert SECRET not in shown(text)
        assert "://" in shown(text)


@pytest.mark.parametrize(
    "url",
    ["s3://bucket/user@host/x", "hf://datasets/a/b@main/x", "https://host.example:8443/x.npz", "file:///nfs/run#1"],
)
def test_a_url_without_credentials_is_shown_whole(url):
    assert shown(f"{url} and more? (yes?)") == f"{url} and more? (yes?)"
    assert shown_url(url) == url


@pytest.mark.parametrize("url", WITH_SECRETS)
@pytest.mark.parametrize("style", ["'", '"', ">", None])
def test_a_study_file_is_shown_without_credentials(url, style):
    """Quotes, escapes and lines that are folded: the secret must be in no part of the text."""
    content = {"data": [{"source": url, "label": "a"}], "description": f"see {url}"}
    text = f"{yaml.safe_dump(content, default_style=style, width=10)}# {url}\n"
    assert SECRET not in shown_yaml(text)
    kept = yaml.safe_load(shown_yaml(text))
    assert kept["data"] == [{"source": shown_url(url), "label": "a"}]
    assert SECRET not in shown_yaml(f"source: {url}\n: [")  # no YAML


def test_a_value_that_is_named_twice_is_shown_once():
    text = 'a: &x "s3:\\/\\/user:secret@bucket/x"\nb: [*x, 5]\n'
    assert shown_yaml(text) == 'a: &x "s3://bucket/x"\nb: [*x, 5]\n'


@pytest.mark.parametrize(
    "text", [" a://" * 20_000, " a://b:c" * 20_000 + "@", "://" * 20_000 + "@", "a://?" + "'" * 5000]
)
def test_a_text_of_many_urls_is_shown_at_once(text):
    shown(text)
    shown_url(text)


@pytest.mark.parametrize("url", [f"file://nobody:{SECRET}@/no/such/place?sig={SECRET}", *WITH_SECRETS[:2]])
@pytest.mark.parametrize("command", ["status", "resume", "report", "run", "best", "tables", "cancel"])
def test_no_message_of_a_command_has_credentials(url, command, fedsweep, monkeypatch):
    def unreachable(*_, **__):
        raise OSError(f"cannot connect to {url}")

    import fsspec

    monkeypatch.setattr(fsspec.core, "url_to_fs", unreachable)
    code, out, err = fedsweep(command, url)
    assert code == 2
    assert SECRET not in out + err
    assert "host.example" in err or "/no/such/place" in err


def test_no_message_of_a_running_study_has_credentials(tmp_path, fedsweep, monkeypatch, caplog):
    """The results are at a URL with credentials, and one upload fails."""
    import fsspec

    local = fsspec.filesystem("file", auto_mkdir=True)
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda *_, **__: (local, str(tmp_path / "r")))
    (tmp_path / "study.yaml").write_text(STUDY)
    url = f"https://user:{SECRET}@host.example/r?sig={SECRET}"
    code, out, err = fedsweep("run", tmp_path / "study.yaml", "--results", url, "--backend", "local", "--json")
    assert code == 0, err
    for command in ("status", "best", "tables", "report", "figures"):
        found = fedsweep(command, url)
        assert found[0] == 0, found
        out, err = out + found[1], err + found[2]
    assert SECRET not in out + err
    stored = [path for path in (tmp_path / "r").rglob("*") if path.is_file()]
    assert stored
    assert [path.name for path in stored if SECRET.encode() in path.read_bytes()] == []


STUDY = """\
name: tiny
data: [{source: "synthetic-frozen:60,20,4,2"}]
partitions: [iid]
clients: 2
methods: [{dp-fedgd: {coarse: {learning_rate: [1]}, fine: {learning_rate: [1]}}}]
epsilons: [8]
defaults: paper
rounds: {coarse: 2, fine: 2, confirm: 2}
evaluate_every: 2
seeds: {search: 1, contest: [], confirm: [1]}
resources: {gpus_per_host: 0}
"""


@pytest.mark.parametrize("source", [*WITH_SECRETS[:2], *WITH_SECRETS[9:11]])
def test_nothing_that_is_made_to_be_shown_has_the_credentials_of_data(source, tmp_path, fedsweep):
    """The ledger needs the whole URL, to read the data again; tables, best.yaml, study.yaml and the report do not."""
    of = study(data=[{"source": source}])
    text = f"name: by-hand\ndata: [{{source: {source!r}}}]\n"
    with writing(tmp_path, of, setting=next(iter(of.settings.values()))) as writer:
        writer.ledger.add_study(of.model_dump_json(), text)
        fill(writer)
    for command in (("tables", tmp_path), ("report", tmp_path), ("export", tmp_path), ("best", tmp_path, "--json"),
                    ("status", tmp_path, "--json"), ("export", tmp_path, "--to", "csv")):  # fmt: skip
        code, out, err = fedsweep(*command)
        assert code == 0, err
        assert SECRET not in out + err
    shared = [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith("ledger.")]
    assert {"best.yaml", "report.html", "trials.parquet"} <= {path.name for path in shared}
    assert [path.name for path in shared if SECRET.encode() in path.read_bytes()] == []


def fill(writer: Writer) -> None:
    for method in ("dp-fedgd", "dp-fedadam"):
        for epsilon in (1, 8):
            writer.search(method, epsilon, {"coarse": [({"learning_rate": 1.0}, 50.0)]})
            writer.confirm(method, epsilon, {"learning_rate": 1.0}, {42: {20: 50.0}, 7: {20: 51.0}})


def test_the_log_has_no_credentials(tmp_path):
    from orchestrator.execution.study_run import _log_to

    with _log_to(tmp_path, private=False):
        logging.getLogger("fedsweep").warning("no upload to %s: %s", WITH_SECRETS[0], OSError(WITH_SECRETS[1]))
    text = (tmp_path / "fedsweep.log").read_text()
    assert "host.example" in text
    assert SECRET not in text


def test_reasons_of_a_file_system_have_no_credentials():
    with pytest.raises(UserError) as caught, as_user_error(f"data {WITH_SECRETS[0]} cannot be read"):
        raise OSError(WITH_SECRETS[1])
    assert SECRET not in str(caught.value)


# ---- schemes


@pytest.fixture
def reference(tmp_path):
    """A list of references, which fsspec follows to any other file, and whose names it renders as templates."""
    (tmp_path / "secret.yaml").write_text(f"cells: {{{SECRET}: {{}}}}")
    (tmp_path / "references.json").write_text(json.dumps({"best.yaml": [str(tmp_path / "secret.yaml")]}))
    return f"reference://best.yaml::file://{tmp_path}/references.json"


REFUSED = ("zip://a.npz::https://host.example/a.zip", "simplecache::https://host.example/x", "filecache://x",
           "github://a:b@/x", "dir://x", "jupyter://x", "generic://x", "no-such-scheme://x", "data://x",
           "reference://x/y", "smb://host.example/share/x", "ssh://host.example/x", "sftp://host.example/x", "ftp://x/y",
           "git://x/y", "local://x", "libarchive://x", "blockcache://x", "dask://x", "webhdfs://x/y",
           "FILE:///x", "s3:://bucket/x", " s3://bucket/x")  # fmt: skip


def test_references_are_not_followed(reference, tmp_path, fedsweep):
    readers = (features.load, reading.load, read_text, results_location, open_filesystem)
    for read in readers:
        with pytest.raises(UserError, match="is not a URL that fedsweep opens"):
            read(reference)
    for command in (("status", reference), ("run", reference), ("train", "--from", reference)):
        code, out, err = fedsweep(*command)
        assert code == 2
        assert SECRET not in out + err
    (tmp_path / "study.yaml").write_text(STUDY.replace("synthetic-frozen:60,20,4,2", reference))
    code, _, err = fedsweep("run", tmp_path / "study.yaml", "--backend", "local", "--results", tmp_path / "r")
    assert code == 2
    assert "is not a URL that fedsweep opens" in err


@pytest.mark.parametrize("url", REFUSED)
def test_only_plain_storage_is_opened(url):
    for read in (features.load, reading.load, results_location):
        with pytest.raises(UserError, match="is not a URL that fedsweep opens"):
            read(url)


# ---- a folder behind file://


@pytest.mark.parametrize("name", ["study.yaml", "best.yaml", "report.html"])
def test_no_file_is_written_into_a_folder_that_a_link_names(name, tmp_path):
    results, victim, source = tmp_path / "results", tmp_path / "victim", tmp_path / "source"
    results.mkdir()
    victim.mkdir()
    source.write_text("commands")
    location = results_location(f"file://{results}")
    (results / name).symlink_to(victim)  # after the check
    location._upload(source, name)
    assert list(victim.iterdir()) == []
    assert not (results / name).is_symlink()
    assert (results / name).read_text() == "commands"
    (results / name).unlink()
    (results / name).symlink_to(victim)
    with pytest.raises(UserError, match="symbolic link"):
        results_location(f"file://{results}")


def test_no_link_behind_a_url_is_followed(tmp_path, fedsweep):
    results, victim = tmp_path / "results", tmp_path / "victim"
    reported.write(results)
    victim.write_text("mine")
    names = (
        "remote.lock",
        "cancel.requested",
        "cancel.now",
        "ledger.sqlite",
        "fedsweep.log",
        ".packs/here",
        "ledger.log/current",
    )
    for name in names:
        place = results / name
        place.parent.mkdir(exist_ok=True)
        kept = place.read_bytes() if place.exists() else None
        place.unlink(missing_ok=True)
        place.symlink_to(victim)
        for command in (("status",), ("resume", "--backend", "local"), ("tables",), ("cancel",)):
            code, _, err = fedsweep(command[0], f"file://{results}", *command[1:])
            assert "Traceback" not in err
        assert code == 2
        assert victim.read_text() == "mine"
        place.unlink()
        if kept is not None:
            place.write_bytes(kept)
    (results / "tables").symlink_to(tmp_path / "home")
    (tmp_path / "home").mkdir()
    code, _, err = fedsweep("tables", f"file://{results}")
    assert code == 2
    assert os.listdir(tmp_path / "home") == []


# ---- trackers


@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_trackers_are_not_run_in_a_results_folder(tracker, tmp_path, fedsweep, monkeypatch):
    """They read and write files in the current folder."""
    reported.write(tmp_path / "results")
    used = MagicMock()
    monkeypatch.setitem(sys.modules, tracker, used)
    for current in (tmp_path / "results", tmp_path / "results" / "tables"):
        current.mkdir(exist_ok=True)
        monkeypatch.chdir(current)
        code, _, err = fedsweep("export", tmp_path / "results", "--to", tracker)
        assert code == 2
        assert "run it in another folder" in err
    assert not used.mock_calls


class FakeWandb:
    """What W&B does with the current folder: it reads settings there, and runs git."""

    def __init__(self):
        self.folders, self.settings = [], []

    def Settings(self, **values):  # noqa: N802
        return values

    def init(self, *, settings, **values):
        self.settings.append(settings)
        self.folders.append((os.getcwd(), os.listdir()))
        if not settings.get("disable_git"):
            subprocess.run(["git", "status"], check=False, capture_output=True)
        return MagicMock()


def test_wandb_runs_no_git_and_reads_no_settings(tmp_path, fedsweep, monkeypatch):
    """Git executes commands that the configuration of a repository names."""
    reported.write(tmp_path / "results")
    executed = tmp_path / "executed"
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    with (tmp_path / ".git" / "config").open("a") as config:
        config.write(f'[core]\n\tfsmonitor = "touch {executed}; false"\n')
    for place in ("wandb", ".wandb"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "settings").write_text("[default]\nbase_url = http://attacker.example\n")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", used := FakeWandb())
    monkeypatch.chdir(tmp_path)
    code, _, err = fedsweep("export", "results", "--to", "wandb")
    assert code == 0, err
    assert used.settings
    assert not executed.exists()
    for settings, (current, files) in zip(used.settings, used.folders, strict=True):
        assert (settings["disable_code"], settings["save_code"]) == (True, False)
        assert not files
        assert not Path(current).is_relative_to(tmp_path)
        root = Path(settings["root_dir"])
        assert root.parent == tmp_path / "results" / "export" / "wandb"
        assert not os.listdir(root)
    assert Path.cwd() == tmp_path


def test_the_store_of_mlflow_is_named_by_the_user(tmp_path, fedsweep, monkeypatch):
    """Its default is a database or a folder in the current folder, which may be a stranger's."""
    reported.write(tmp_path / "results")
    used = MagicMock()
    used.is_tracking_uri_set.return_value = False
    monkeypatch.setitem(sys.modules, "mlflow", used)
    monkeypatch.chdir(tmp_path)
    code, _, err = fedsweep("export", "results", "--to", "mlflow")
    assert code == 2
    assert "MLFLOW_TRACKING_URI is not set" in err
    assert [call[0] for call in used.mock_calls] == ["is_tracking_uri_set"]


@pytest.mark.parametrize("name", ["a%2Fb", "a?b", "a{b}", "file:a?mode=memory", "a#b%3F"])
def test_the_name_of_a_folder_does_not_redirect_the_optuna_export(name, tmp_path, fedsweep):
    reported.write(tmp_path / name)
    code, _, err = fedsweep("export", tmp_path / name, "--to", "optuna")
    assert code == 0, err
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*.db*")] == [Path(f"{name}/export/optuna/optuna.db")]
    assert (tmp_path / name / "export" / "optuna" / "optuna.db").read_bytes().startswith(b"SQLite format 3")

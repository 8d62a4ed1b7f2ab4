"""The cluster files under examples/ and the commands in docs/clusters.md fit this version of Ray and of fedsweep."""

import importlib.metadata
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import check_fedsweep
from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.dashboard.modules.job.cli import submit
from ray.scripts.scripts import start
from repository_files import REPOSITORY

FOLDER = REPOSITORY / "examples" / "cluster"
FILES = sorted(FOLDER.iterdir())
LAUNCHER = [file for file in FILES if file.name.startswith("launcher-")]
KUBERAY = [file for file in FILES if file.name.startswith("kuberay-")]
RAY = importlib.metadata.version("ray")


def named(files: list[Path]) -> Any:
    return pytest.mark.parametrize("file", files, ids=lambda file: file.name)


def flags(command: Any) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts}


def commands(text: str, program: str) -> Iterator[str]:
    """The commands of a program in a text."""
    for line in text.splitlines():
        for command in re.findall(rf"(?<![\w/.-]){program} [a-z]+[^'`#|]*", line):
            yield command.strip()


def test_there_are_files_for_the_launcher_and_for_kuberay():
    assert (len(LAUNCHER), len(KUBERAY)) == (2, 3)
    assert FOLDER / "Dockerfile" in FILES


@named(LAUNCHER)
def test_launcher(file):
    """Valid by Ray's own schema, after Ray has added its defaults."""
    content = yaml.safe_load(file.read_text())
    validate_config(prepare_config(content))
    starts = content["head_start_ray_commands"] + content["worker_start_ray_commands"]
    starts = [command for command in starts if "ray start" in command]
    assert len(starts) == 2
    for command in starts:
        assert command.startswith("RAY_AUTH_MODE=token ray start ")
        options = {word.partition("=")[0] for word in shlex.split(command)[3:]}
        assert options <= flags(start)
    assert "~/.ray/auth_token" in content["file_mounts"]
    with pytest.raises(ValidationError, match="no_such_setting"):
        validate_config(prepare_config({**content, "no_such_setting": 1}))


@named(KUBERAY)
def test_kuberay(file):
    content = yaml.safe_load(file.read_text())
    assert content["apiVersion"] == "ray.io/v1"
    kind, spec = content["kind"], content["spec"]
    assert kind in ("RayCluster", "RayJob")
    if kind == "RayJob":
        check_fedsweep(spec["entrypoint"])
        assert "--results s3://" in spec["entrypoint"], "the cluster and its disks end with the job"
    cluster = spec["rayClusterSpec"] if kind == "RayJob" else spec
    assert cluster["rayVersion"] == RAY
    assert cluster["authOptions"] == {"mode": "token"}
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert len(groups) == 2
    for group in groups:
        assert {f"--{name}" for name in group["rayStartParams"]} <= flags(start)
        (container,) = group["template"]["spec"]["containers"]
        assert {"name", "image", "resources"} <= set(container)
    for worker in groups[1:]:
        assert worker["groupName"]
        assert 0 <= worker["minReplicas"] <= worker["replicas"] <= worker["maxReplicas"] > 0
        elastic = worker["minReplicas"] < worker["maxReplicas"]
        assert cluster.get("enableInTreeAutoscaling", False) == elastic


@named([*FILES, REPOSITORY / "docs" / "clusters.md"])
def test_commands_in_the_text(file):
    """Every command and every flag in the comments and on the page exists."""
    text = file.read_text()
    for command in commands(text, "fedsweep"):
        if command.split()[1] in ("run", "resume", "status", "cancel", "merge"):
            check_fedsweep(command)
    for command in commands(text, "ray job"):
        assert {word for word in shlex.split(command.partition(" -- ")[0]) if word.startswith("--")} <= flags(submit)
    for reference in re.findall(r"(?:rayproject/ray:|ray\[default\]==)([0-9.]+)", text):
        assert reference == RAY


def test_the_page_is_linked_and_links_to_files_that_exist():
    page = REPOSITORY / "docs" / "clusters.md"
    assert "docs/clusters.md" in (REPOSITORY / "README.md").read_text()
    links = re.findall(r"\]\(([^)#]+)", page.read_text())
    assert {(page.parent / link).resolve().exists() for link in links if "://" not in link} == {True}
    assert {file.name for file in FILES} <= {Path(link).name for link in links}

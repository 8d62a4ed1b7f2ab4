"""Checks on what the command line accepts and prints."""

import json
import shlex
from typing import Any

import typer

from orchestrator.cli import app
from orchestrator.study.reading import packaged


def last_json(out: str) -> Any:
    return json.loads(out.splitlines()[-1])


def assert_one_sentence(result: tuple[int, str, str], culprit: str) -> None:
    """Exit code 2, nothing on standard output, one sentence on standard error that names the value at fault."""
    code, out, err = result
    assert code == 2, err
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("fedsweep: ")
    assert err.endswith(".\n")
    assert culprit in err
    assert "Traceback" not in err


def check_fedsweep(text: str) -> None:
    """The command line accepts this command; nothing is run."""
    program, name, *arguments = shlex.split(text)
    assert program == "fedsweep"
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    given = command.make_context(name, arguments).params
    if "study" in given:
        assert given["study"] in (*packaged(), "STUDY")

"""Output of the commands. Results (text or JSON) go to standard output, messages to standard error."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from trainables.urls import shown


def printable(text: str) -> str:
    """Control characters become spaces: names may be untrusted, and a terminal would interpret them."""
    return "".join(character if character.isprintable() or character in "\n\t" else " " for character in text)


def echo(text: object, **options: Any) -> None:
    """Print to standard output."""
    typer.echo(printable(shown(str(text))), **options)


class _Messages(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(printable(shown(each)) if isinstance(each, str) else each for each in objects), **options)


# printed commands can be copied: lines are not wrapped, and brackets in paths are not markup
stderr = _Messages(stderr=True, highlight=False, markup=False, soft_wrap=True)


def emit_json(value: Any) -> None:
    """Print one line of JSON. Numbers that are not finite become strings (inf, -inf, nan)."""
    sys.stdout.write(json.dumps(_plain(value), allow_nan=False) + "\n")
    sys.stdout.flush()


def show(data: Any, json: bool, lines: Iterable[str]) -> None:
    """Print the data as JSON if `json` is set, otherwise the lines."""
    if json:
        emit_json(data)
    else:
        for line in lines:
            echo(line)


def _plain(value: Any) -> Any:
    """The value with JSON types only, and without the credentials of URLs."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return shown(value) if isinstance(value, str) else value


def number(value: float) -> str:
    """Format a number with four significant digits."""
    return f"{value:.4g}"

"""What people and programs read: JSON on standard output, everything else on standard error."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

# a command that is told may be copied: no line is broken, and brackets in a path are brackets
stderr = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def emit_json(value: Any) -> None:
    """One line of JSON, which is the last line of standard output. What is infinite is the string "inf"."""
    sys.stdout.write(json.dumps(_plain(value), allow_nan=False) + "\n")
    sys.stdout.flush()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def number(value: float) -> str:
    """For people: short, and `inf` where it is."""
    return f"{value:.4g}"

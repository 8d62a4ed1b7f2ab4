"""Reads best.yaml, the chosen configurations of a study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.results.locations import read_text
from trainables.errors import UserError
from trainables.limited_yaml import read_yaml


def read_best(file: Path | str) -> dict[str, dict[str, Any]]:
    """The chosen configurations by cell name."""
    try:
        content, _ = read_yaml(read_text(file), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}".replace("\n", " ")) from None
    if not isinstance(content, dict) or not isinstance(content.get("cells"), dict):
        raise UserError(f"{file} is not a best.yaml: it has no mapping of cells")
    return content["cells"]

"""The report as one HTML file with its style, script and data, which loads nothing else.

The content security policy allows only this style and script, by their hashes, so names in a study cannot inject code.
The data are in an element that is never executed, and the script inserts them as text, never as markup.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from orchestrator.report import palette
from orchestrator.report.html.data import as_json
from orchestrator.report.tables import render
from orchestrator.version import version

SCRIPTS = (
    *("dom.js", "chart.js", "table.js", "results.js", "frontier.js", "comparison.js", "search.js", "details.js"),
    "page.js",
)
LIVE_EVERY_MS = 2000  # between two polls for updates


def content(studies: Sequence[dict[str, Any]], live: dict[str, Any] | None = None) -> dict[str, Any]:
    """Everything that the script reads. `live`: how to poll a server for updates."""
    return {
        "studies": list(studies),
        "latex": render.LATEX,
        "palette": {"markers": palette.MARKERS, "dashes": palette.DASHES},
        "version": version(),
        "live": live,
    }


def page(data: dict[str, Any]) -> str:
    """The HTML file."""
    script = f'"use strict";\n(() => {{\n{"".join(_asset(name) for name in SCRIPTS)}}})();\n'
    style = _series_colours() + _asset("style.css")
    names = " and ".join(dict.fromkeys(study["study"] for study in data["studies"]))
    parts = {
        "SCRIPT_HASH": _hash(script),
        "STYLE_HASH": _hash(style),
        "CONNECT": "'self'" if data["live"] else "'none'",
        "TITLE": escape(f"{names} · fedsweep"),
        "STYLE": style,
        "DATA": as_json(data),
        "SCRIPT": script,
    }
    pieces = _asset("page.html").split("@")  # the template has no other @
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def _series_colours() -> str:
    """The colours of the palette as CSS variables, for light and dark themes."""

    def variables(colours: Sequence[str]) -> str:
        return "".join(f"--series-{number}:{colour};" for number, colour in enumerate(colours))

    light, dark = variables(palette.ON_LIGHT), variables(palette.ON_DARK)
    return (
        f":root{{{light}}}:root[data-theme=dark]{{{dark}}}"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
        f"@media print{{:root,:root[data-theme=dark],:root:not([data-theme=light]){{{light}}}}}\n"
    )


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

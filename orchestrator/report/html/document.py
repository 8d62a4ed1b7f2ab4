"""The page as one file: template, style, script and data, with nothing to fetch from anywhere.

The content security policy names the hashes of this very style and script, so a browser runs nothing else, whatever a
study's names say; the data stand in an element that is never run, and the script makes text of them, not markup.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib import metadata, resources
from typing import Any

from orchestrator.report import palette
from orchestrator.report.html.data import as_json
from orchestrator.report.tables import render

SCRIPTS = ("dom.js", "chart.js", "table.js", "results.js", "search.js", "rest.js", "page.js")
LIVE_EVERY_MS = 2000


def content(studies: Sequence[dict[str, Any]], live: dict[str, Any] | None = None) -> dict[str, Any]:
    """All that the script reads. `live`: what it needs to know of a server that has more."""
    return {
        "studies": list(studies),
        "latex": render.LATEX,
        "palette": {"markers": palette.MARKERS, "dashes": palette.DASHES},
        "version": metadata.version("fedsweep"),
        "live": live,
    }


def page(found: dict[str, Any]) -> str:
    script = f'"use strict";\n(() => {{\n{"".join(_asset(name) for name in SCRIPTS)}}})();\n'
    style = _series() + _asset("style.css")
    names = " and ".join(dict.fromkeys(study["study"] for study in found["studies"]))
    parts = {
        "SCRIPT_HASH": _hash(script),
        "STYLE_HASH": _hash(style),
        "CONNECT": "'self'" if found["live"] else "'none'",
        "TITLE": escape(f"{names} · fedsweep"),
        "STYLE": style,
        "DATA": as_json(found),
        "SCRIPT": script,
    }
    pieces = _asset("page.html").split("@")  # the template's own text has no other @
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def _series() -> str:
    """The colours of the palette, for light and dark."""

    def listed(colours: Sequence[str]) -> str:
        return "".join(f"--series-{number}:{colour};" for number, colour in enumerate(colours))

    light, dark = listed(palette.ON_LIGHT), listed(palette.ON_DARK)
    return (
        f":root{{{light}}}:root[data-theme=dark]{{{dark}}}"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
        f"@media print{{:root,:root[data-theme=dark],:root:not([data-theme=light]){{{light}}}}}\n"
    )


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

"""A table and its three forms: Markdown to read, CSV to compute with, LaTeX to print.

The contents of a table are plain text, which each form escapes. A name from a study file appears unchanged; it cannot
end a cell, become markup, or become a formula when a spreadsheet opens the CSV.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from pathlib import Path

import pandas as pd

from trainables.files import replacing

NOTHING = "–"
"""Shown where there is no result."""
_UP = Context(prec=4, rounding=ROUND_CEILING)


class Bold(str):
    """Text of a cell that is printed bold."""

    __slots__ = ()


@dataclass(frozen=True)
class Group:
    """Rows under a common heading; an empty heading is not shown."""

    heading: str
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Table:
    title: str
    summary: str
    """One sentence for the index."""
    caption: str
    columns: Sequence[str]
    align: str
    """One letter per column: l, r, or p for longer text that LaTeX may wrap."""
    groups: Sequence[Group]
    data: pd.DataFrame
    """The same numbers, unrounded, one observation per row: what the CSV file holds."""
    note: str = ""
    """Printed at the end of the Markdown file; a comment at the top of the LaTeX file."""


def rounded_up(epsilon: float) -> str:
    """Rounded up to four significant digits, so never below the true value."""
    return "∞" if math.isinf(epsilon) else f"{_UP.create_decimal(Decimal(repr(epsilon))).normalize():f}"


# ---- Markdown

_MARKDOWN = re.compile(
    r"[\\`*\[\]|~$]"
    r"|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"  # an underscore within a word is not markup
    r"|<(?=[A-Za-z/!?])|&(?=#?\w+;)|(?<=[A-Za-z]:)/(?=/)"
)


def markdown_text(text: str) -> str:
    return _MARKDOWN.sub(lambda found: f"\\{found[0]}", one_line(text))


def to_markdown(table: Table) -> str:
    note = f"\n{markdown_text(table.note)}\n" if table.note else ""
    return f"# {markdown_text(table.title)}\n\n{markdown_text(table.caption)}\n\n{markdown_rows(table)}{note}"


def markdown_rows(table: Table) -> str:
    """The table without title and caption, aligned for reading as plain text."""
    blank = [""] * (len(table.columns) - 1)
    lines = [[markdown_text(column) for column in table.columns]]
    for group in table.groups:
        if group.heading:
            lines.append([f"**{markdown_text(group.heading)}**", *blank])
        lines += [[_markdown_cell(text) for text in row] for row in group.rows]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(table.columns))]
    rule = ["-" * (width - 1) + ":" if a == "r" else "-" * width for width, a in zip(widths, table.align, strict=True)]

    def shown(line: list[str]) -> str:
        cells = zip(line, widths, table.align, strict=True)
        padded = (text.rjust(width) if a == "r" else text.ljust(width) for text, width, a in cells)
        return f"| {' | '.join(padded)} |\n"

    return "".join(shown(line) for line in [lines[0], rule, *lines[1:]])


def _markdown_cell(text: str) -> str:
    return f"**{markdown_text(text)}**" if isinstance(text, Bold) else markdown_text(text)


# ---- LaTeX

LATEX = {
    **{character: f"\\{character}" for character in "{}$&#_%"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"},
    **{character: f"{{{character}}}" for character in "[]*"},  # these are syntax after a line break
    **{"±": r"$\pm$", "–": "--", "ε": r"$\varepsilon$", "μ": r"$\mu$", "δ": r"$\delta$", "χ": r"$\chi$", "²": "$^2$"},
    **{"θ": r"$\theta$", "‖": r"$\Vert$", "−": "$-$"},
    **{"∞": r"$\infty$", "†": r"$\dagger$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "≤": r"$\leq$"},
}


def latex_text(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in one_line(text))


def to_latex(table: Table, label: str) -> str:
    """A fragment for \\input in a document that uses booktabs."""
    columns = "".join("p{3.5cm}" if a == "p" else a for a in table.align)
    lines = [
        "% needs \\usepackage{booktabs}",
        *([f"% {one_line(table.note)}"] if table.note else []),
        "\\begin{table}[htbp]",
        "\\centering",
        "\\footnotesize",
        "\\setlength{\\tabcolsep}{4pt}",
        f"\\caption{{{latex_text(table.title)}. {latex_text(table.caption)}}}",
        f"\\label{{tab:{label}}}",
        f"\\begin{{tabular}}{{{columns}}}",
        "\\toprule",
        _latex_row([latex_text(column) for column in table.columns]),
    ]
    for group in table.groups:
        lines.append("\\midrule")
        if group.heading:
            lines.append(f"\\multicolumn{{{len(table.columns)}}}{{l}}{{{latex_text(group.heading)}}} \\\\")
        lines += [_latex_row([_latex_cell(text) for text in row]) for row in group.rows]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", "\\end{table}", ""])


def _latex_cell(text: str) -> str:
    return f"\\textbf{{{latex_text(text)}}}" if isinstance(text, Bold) else latex_text(text)


def _latex_row(cells: Sequence[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


# ---- files


def to_csv(table: Table) -> str:
    return frame_to_csv(table.data)


def frame_to_csv(data: pd.DataFrame) -> str:
    return data.map(_csv_cell).rename(columns=_csv_cell).to_csv(index=False, lineterminator="\n", float_format="%.10g")


def _csv_cell(value: object) -> object:
    """Text is put on one line, with a leading apostrophe if a spreadsheet would read it as a formula."""
    if not isinstance(value, str):
        return value
    text = one_line(value)
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def one_line(text: str) -> str:
    """Replace line breaks, control characters and direction marks by spaces."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def slug(text: str) -> str:
    """A file name of a-z, 0-9 and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:80].strip("-") or "setting"


def endings(settings: Sequence[str]) -> dict[str, str]:
    """File name suffixes that distinguish several settings; empty for one setting."""
    if len(settings) == 1:
        return {settings[0]: ""}
    suffixes: dict[str, str] = {}
    for setting in settings:
        ending, number = f"-{slug(setting)}", 2
        while ending in suffixes.values():
            ending, number = f"-{slug(setting)}-{number}", number + 1
        suffixes[setting] = ending
    return suffixes


def write_table(table: Table, folder: Path, stem: str) -> list[Path]:
    forms = {"md": to_markdown(table), "csv": to_csv(table), "tex": to_latex(table, stem)}
    return [write_text(folder / f"{stem}.{ending}", text) for ending, text in forms.items()]


def write_text(path: Path, text: str) -> Path:
    """Write atomically, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(text.encode("utf-8", errors="replace"))
    return path

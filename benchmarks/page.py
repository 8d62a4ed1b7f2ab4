"""The part of a page of the documentation that a program writes, between two marks."""

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def write(part: str, lines: list[str], page: Path = DOCS / "performance.md") -> None:
    text = page.read_text(encoding="utf-8")
    before, first, rest = text.partition(f"<!-- {part}: ")
    mark, second, rest = rest.partition(" -->\n")
    _, last, after = rest.partition(f"<!-- end of {part} -->")
    if not (first and second and last):
        sys.exit(f"{page} has no part between the marks of {part!r}")
    body = "\n".join(lines)
    page.write_text(f"{before}{first}{mark}{second}{body}\n{last}{after}", encoding="utf-8")

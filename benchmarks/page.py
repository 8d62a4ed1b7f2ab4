"""The part of docs/performance.md that a program writes, between two marks."""

import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"


def write(part: str, lines: list[str]) -> None:
    """`part`: peers or bench."""
    text = PAGE.read_text(encoding="utf-8")
    before, first, rest = text.partition(f"<!-- {part}: ")
    mark, second, rest = rest.partition(" -->\n")
    _, last, after = rest.partition(f"<!-- end of {part} -->")
    if not (first and second and last):
        sys.exit(f"{PAGE} has no part between the marks of {part!r}")
    body = "\n".join(lines)
    PAGE.write_text(f"{before}{first}{mark}{second}{body}\n{last}{after}", encoding="utf-8")

"""Write the generated part of a documentation page, between its two marks."""

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def write(part: str, lines: list[str], page: Path = DOCS / "performance.md") -> None:
    before, start, rest = page.read_text(encoding="utf-8").partition(f"<!-- {part}: ")
    note, start_end, rest = rest.partition(" -->\n")
    _, end, after = rest.partition(f"<!-- end of {part} -->")
    if not (start and start_end and end):
        sys.exit(f"{page} has no part between the marks of {part!r}")
    body = "\n".join(lines)
    page.write_text(f"{before}{start}{note}{start_end}{body}\n{end}{after}", encoding="utf-8")

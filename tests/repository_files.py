"""Where this repository's files are, and the code blocks of its pages."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
DOCS = REPOSITORY / "docs"


def blocks(page: Path, language: str = "") -> list[str]:
    """The code blocks of a page in one language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [code for of, code in found if of == language]

"""Puts what `python -m orchestrator.measuring.regret --json FILE` wrote into docs/studies.md:
`python -m benchmarks.regret FILE...`."""

import json
import sys
from pathlib import Path

from benchmarks import page
from orchestrator.measuring.regret import table

REPORT = Path(__file__).resolve().parent / "reports" / "regret.json"


def main(files: list[str]) -> None:
    found = [cell for file in files for cell in json.loads(Path(file).read_text(encoding="utf-8"))]
    REPORT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    page.write("regret", table(found), page.DOCS / "studies.md")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Run the papers' studies, set them beside the papers, and collect what is kept in the repository.

    python -m benchmarks.reproduce                    run all studies whose data are there, compare, collect
    python -m benchmarks.reproduce run --only NAME --pack DIR    run some, on another machine say; pack what is needed
    python -m benchmarks.reproduce collect DIR/*.tar.gz          take packed studies in, compare, collect

Needs no network: data files are found as studies find them (`fedsweep data prepare`, $FEDSWEEP_DATA). What has run is
not run again. Collected are tables, figures, chosen values and the comparison, never ledgers or data, together with
the commands, the commit and the device that made them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STUDIES = {
    "paper-cifar10-resnet20": "tables 3, 7, 14 and 15",
    "paper-cifar10-as-released": "tables 3 and 8, as released and as published",
    "cifar10-resnet20": "table 3, searched our way",
    "beyond-cifar10": "at the same budgets: features centred in private, clients weighted by size, a smaller clip",
    "paper-cifar10-iid": "table 8",
    "cifar10-iid": "table 8, searched our way",
    "paper-cifar10-ablation": "tables 10 and 12",
    "paper-crc5-resnet20": "in place of table 4",
    "crc5-resnet20": "in place of table 4, searched our way",
    "paper-adult": "table 8 of the DP-FedNew paper, 100 clients",
    "adult": "table 8 of the DP-FedNew paper, searched our way",
    "paper-cifar10-test-tuned": "what tuning on the test rows is worth",
    "paper-cifar10-per-seed": "table 3 with a partition of its own for every seed",
    "paper-cifar10-partition-123": "another draw of the partition",
    "paper-cifar10-partition-7": "another draw of the partition",
    "paper-cifar10-vgg16": "tables 5 and 15",
    "paper-fednew-cifar10-resnet20": "in place of figure 4 of the DP-FedNew paper",
    "paper-adult-10": "table 8 of the DP-FedNew paper, 10 clients",
    "paper-adult-250": "table 8 of the DP-FedNew paper, 250 clients",
    "paper-adult-500": "table 8 of the DP-FedNew paper, 500 clients",
    "cifar10-vgg16": "table 5, searched our way",
    "m-estimation": "error curves of the M-estimation paper",
    "sampled-cifar10-resnet20": "methods that sample rows",
    "paper-heart-disease": "heart disease, four hospitals",
    "paper-pathmnist-resnet20": "tables 4, 13 and 16",
    "paper-pathmnist-iid": "table 9",
    "paper-pathmnist-ablation": "tables 11 and 12",
    "paper-pathmnist-vgg16": "tables 6 and 16",
    "paper-fednew-femnist": "table 5 of the DP-FedNew paper",
    "paper-fednew-fashion-mnist": "table 10 of the DP-FedNew paper",
    "paper-fednew-emnist-digits": "table 11 of the DP-FedNew paper",
    "paper-fednew-cifar10": "figure 4 of the DP-FedNew paper",
}
"""The most wanted first: with --seconds the last ones may have to wait."""
MISSING = ("is not there", "is neither a file nor a built-in set")
"""How a study says that its data are missing."""
KEPT = ("tables/*.md", "tables/*.csv", "figures/*.png", "best.yaml", "study.yaml")
NOT_KEPT = ("trials.csv",)  # every trial of a search is many megabytes, and what a ledger is for
BEYOND = ("beyond-cifar10",)
"""What no paper has: kept, but not set beside one."""
SECONDS = "Seconds are those of the commands, from their start to the last table, added up where a study was resumed."
PACKED = ("ledger.sqlite", "study.yaml", "made.json")
DATA_PATH = re.compile(r"/[^\s'\"`]*/([\w.-]+\.npz)")
"""Where a data file lay on the machine is nobody's business."""


def main() -> int:
    options = _options()
    failed = False
    if options.what in ("all", "run"):
        failed = _run_all(options)
    if options.what in ("all", "collect"):
        for file in options.packed:
            with tarfile.open(file) as archive:
                archive.extractall(options.work, filter="data")
        _collect(options.work, options.keep, options.page)
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the papers' studies and set them beside the papers.")
    parser.add_argument("what", nargs="?", choices=("all", "run", "collect"), default="all")
    parser.add_argument("packed", nargs="*", type=Path, help="collect: packed studies to take in first")
    parser.add_argument("--only", action="append", choices=STUDIES, help="a study; may be repeated")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further study after so many")
    parser.add_argument("--pack", type=Path, help="put every finished study into a .tar.gz of this folder")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "reproduction", help="where ledgers go")
    parser.add_argument("--keep", type=Path, default=ROOT / "results" / "reproduction", help="what is to be committed")
    parser.add_argument("--page", type=Path, help="also write the page of the documentation here")
    parser.add_argument("--commit", default="", help="where there is no git: the commit that runs")
    return parser.parse_args()


# ---- running


def _run_all(options: argparse.Namespace) -> bool:
    """Whether any study failed."""
    made = {"commit": options.commit or _commit(), "device": _device(), "versions": _versions()}
    start, failed = time.monotonic(), False
    for name in options.only or STUDIES:
        if time.monotonic() - start > options.seconds:
            _say(f"{name}: not begun, {options.seconds:g} s are over")
            continue
        came_to = _run(name, options.work / name, made)
        failed |= came_to == "failed"
        _say(f"{name}: {came_to} ({time.monotonic() - start:.0f} s so far)")
        if options.pack and came_to == "done":
            options.pack.mkdir(parents=True, exist_ok=True)
            with tarfile.open(options.pack / f"{name}.tar.gz", "w:gz") as archive:
                for each in PACKED:
                    archive.add(options.work / name / each, arcname=f"{name}/{each}")
    return failed


def _run(name: str, folder: Path, made: dict[str, Any]) -> str:
    """Run a study to its end, unless its data are not there. What made it is written beside its ledger, once."""
    start = time.monotonic()
    done = _fedsweep("run", name, "--results", folder, "--json", check=False)
    sentence = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode == 2 and any(words in sentence for words in MISSING):  # said before anything starts
        return f"left out, {sentence}"
    if done.returncode != 0:
        _say(done.stderr[-3000:])
        return "failed"
    record = {"command": f"fedsweep run {name}", "seconds": round(time.monotonic() - start, 1), **made}
    if not (folder / "made.json").is_file():
        (folder / "made.json").write_text(json.dumps(record, indent=1) + "\n")
    return "done"


def _fedsweep(*arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    program = "from orchestrator.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, env=environment
    )
    if check and done.returncode != 0:
        raise SystemExit(f"fedsweep {' '.join(map(str, arguments))} failed:\n{done.stderr}")
    return done


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = " with changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return f"{git('rev-parse', 'HEAD')[:12] or 'unknown'}{changed}"


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return f"{'one' if count == 1 else count} {torch.cuda.get_device_name(0)}"
    return f"{os.cpu_count()} cores, {platform.machine()}"


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"python": platform.python_version(), **{name: version(name) for name in ("torch", "ray", "numpy")}}


# ---- collecting


def _collect(work: Path, keep: Path, page: Path | None) -> None:
    """All of it is rebuilt from the ledgers."""
    record: dict[str, Any] = {"command": "python -m benchmarks.reproduce collect", "commit": _commit()}
    there = [name for name in STUDIES if (work / name / "ledger.sqlite").is_file()]
    if not there:
        raise SystemExit(f"no study has been run in {work}")
    for name in there:
        _fedsweep("tables", work / name)
        _fedsweep("figures", work / name)
    made = {name: _made(work / name) for name in there}
    left = {name: _why_left(name) for name in STUDIES if name not in there}
    beside = [work / name for name in there if name not in BEYOND]
    compared = (*beside, "--to", work / "compare", "--made", _sentence(made, left))
    _fedsweep("compare", *compared, *(("--page", page) if page else ()))
    for name in (*there, "compare"):  # what others made of data that are not here stays
        shutil.rmtree(keep / name, ignore_errors=True)
    for folder in [work / name for name in there]:
        for pattern in KEPT:
            for path in sorted(path for path in folder.glob(pattern) if path.name not in NOT_KEPT):
                _copy(path, keep / folder.name / path.relative_to(folder))
        _without_dead_links(keep / folder.name / "tables" / "README.md")
        (keep / folder.name / "made.json").write_text(json.dumps(made[folder.name], indent=1) + "\n")
    for path in sorted((work / "compare").iterdir()):
        _copy(path, keep / "compare" / path.name)
    (keep / "compare" / "made.json").write_text(json.dumps({**record, "studies": there}, indent=1) + "\n")
    (keep / "README.md").write_text(_readme(made, left), encoding="utf-8")


def _without_dead_links(page: Path) -> None:
    """Not all that a study's page points to is kept."""

    def link(found: re.Match[str]) -> str:
        return found[0] if (page.parent / found[2]).exists() else found[1]

    page.write_text(re.sub(r"\[([^]]+)\]\(([^)]+)\)", link, page.read_text(encoding="utf-8")), encoding="utf-8")


def _made(folder: Path) -> dict[str, Any]:
    """What made a study. One that was resumed took as long as all its sessions."""
    from orchestrator.results.ledger import Ledger

    made = json.loads((folder / "made.json").read_text())
    with Ledger.read(folder) as ledger:
        sessions = sum(session.last - session.began for session in ledger.sessions())
    return {**made, "seconds": round(max(made["seconds"], sessions), 1)}


def _copy(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        shutil.copyfile(path, target)
    else:
        target.write_text(DATA_PATH.sub(r"\1", path.read_text(encoding="utf-8")), encoding="utf-8")


def _why_left(name: str) -> str:
    from orchestrator.study import reading
    from trainables.data.sources.catalogue import recipe

    study, _ = reading.load(name)
    wanted = [data.source for data in study.data if data.source.endswith(".npz") and not Path(data.source).is_file()]
    known = [file for file in wanted if recipe(Path(file).stem) is not None]
    if known:
        return f"needs {known[0]}, which `fedsweep data prepare {Path(known[0]).stem}` makes where there is a network"
    return f"needs {wanted[0]}, which no command makes" if wanted else "its data are there, and it was not asked for"


def _sentence(made: dict[str, dict[str, Any]], left: dict[str, str]) -> str:
    devices = " and ".join(dict.fromkeys(f"{each['device']} at commit {each['commit']}" for each in made.values()))
    seconds = sum(each["seconds"] for each in made.values())
    count = "One study" if len(made) == 1 else f"{len(made)} studies"
    text = f"{count} ran in {seconds:.0f} s on {devices}. {SECONDS}"
    return "\n".join([text, "\nNot run here:\n", *(f"- {name}: {why}" for name, why in left.items())]) if left else text


def _readme(made: dict[str, dict[str, Any]], left: dict[str, str]) -> str:
    lines = [
        "# What the papers' studies come to here\n",
        "Made by `python -m benchmarks.reproduce run` and `collect`; no number in the tables is typed.",
        f"[Beside the papers](compare/README.md), [findings](compare/findings.md), and by study. {SECONDS}\n",
        "| study | for | made by | seconds | on | commit |\n|---|---|---|---|---|---|",
    ]
    for name, what in STUDIES.items():
        if name in made:
            each = made[name]
            how = f"`{each['command']}` | {each['seconds']:.0f} | {each['device']} | {each['commit']}"
            lines.append(f"| [{name}]({name}/tables/README.md) | {what} | {how} |")
        else:
            lines.append(f"| {name} | {what} | not run here: {left[name]} | | | |")
    return "\n".join(lines) + "\n"


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())

"""Run the papers' studies, set them beside the papers, and collect what is kept in the repository.

    python -m benchmarks.reproduce                 all studies whose data are there, into build/reproduction
    python -m benchmarks.reproduce --only NAME     one of them; the rest of the comparison is from what is there

Needs no network: data files are found as studies find them (`fedsweep data prepare`, $FEDSWEEP_DATA). What has run is
not run again. Collected are tables, figures, chosen values and the comparison, never ledgers or data, together with
the commands, the commit and the device that made them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
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
    "paper-cifar10-as-released": "table 3, as released and as published",
    "cifar10-resnet20": "table 3, searched our way",
    "paper-cifar10-iid": "table 8",
    "paper-cifar10-ablation": "tables 10 and 12",
    "paper-cifar10-vgg16": "tables 5 and 15",
    "paper-crc5-resnet20": "in place of table 4",
    "paper-pathmnist-resnet20": "tables 4, 13 and 16",
    "paper-pathmnist-iid": "table 9",
    "paper-pathmnist-ablation": "tables 11 and 12",
    "paper-pathmnist-vgg16": "tables 6 and 16",
    "paper-cifar10-partition-123": "another draw of the partition",
    "paper-cifar10-partition-7": "another draw of the partition",
    "paper-adult": "table 8 of the DP-FedNew paper",
    "paper-fednew-femnist": "table 5 of the DP-FedNew paper",
    "paper-fednew-fashion-mnist": "table 10 of the DP-FedNew paper",
    "paper-fednew-emnist-digits": "table 11 of the DP-FedNew paper",
    "paper-fednew-cifar10": "figure 4 of the DP-FedNew paper",
    "sampled-cifar10-resnet20": "methods that sample rows",
    "m-estimation": "error curves of the M-estimation paper",
    "paper-heart-disease": "heart disease, four hospitals",
}
MISSING = ("is not there; make it with", "is neither a file nor a built-in set")
"""How a study says that its data are missing."""
KEPT = ("tables/*.md", "tables/*.csv", "figures/*.png", "best.yaml", "study.yaml")


def main() -> int:
    options = _options()
    work, keep = options.work.resolve(), options.keep.resolve()
    log: list[dict[str, Any]] = []
    for name in options.only or STUDIES:
        log.append(_run(name, work))
        _say(f"{name}: {log[-1]['came_to']}, {log[-1]['seconds']:.0f} s")
    made = {"commit": options.commit or _commit(), "device": _device(), "versions": _versions(), "studies": log}
    _merge_log(work / "made.json", made)
    _fedsweep("compare", work, "--to", work / "compare", "--page", work / "reproduction.md", "--made", _sentence(made))
    _collect(work, keep)
    if options.page:
        shutil.copyfile(work / "reproduction.md", options.page)
    if options.archive:
        with tarfile.open(options.archive, "w:gz") as archive:
            archive.add(keep, arcname="reproduction")
            archive.add(work / "reproduction.md", arcname="reproduction.md")
    return 1 if any(entry["came_to"] == "failed" for entry in log) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the papers' studies and set them beside the papers.")
    parser.add_argument("--only", action="append", choices=STUDIES, help="a study; may be repeated")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "reproduction", help="where ledgers go")
    parser.add_argument("--keep", type=Path, default=ROOT / "results" / "reproduction", help="what is to be committed")
    parser.add_argument("--page", type=Path, help="also write the page of the documentation here")
    parser.add_argument("--archive", type=Path, help="also put all that is kept into one .tar.gz")
    parser.add_argument("--commit", default="", help="where there is no git: the commit that runs")
    return parser.parse_args()


def _run(name: str, work: Path) -> dict[str, Any]:
    """Run a study to its end, unless its data are not there; then draw its figures."""
    start = time.monotonic()
    command = ["run", name, "--results", str(work / name)]
    done = _fedsweep(*command, "--json", check=False)
    reason = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode == 2 and any(words in reason for words in MISSING):  # said before anything starts
        return {"study": name, "came_to": "left out", "reason": reason, "seconds": time.monotonic() - start}
    came_to = "done" if done.returncode == 0 else "failed"
    if came_to == "done":
        _fedsweep("figures", work / name, check=False)
    else:
        _say(done.stderr[-2000:])
    shown = f"fedsweep {' '.join(command[:2])}"
    return {"study": name, "command": shown, "came_to": came_to, "seconds": time.monotonic() - start}


def _fedsweep(*arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    program = "from orchestrator.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, env=environment
    )
    if check and done.returncode != 0:
        raise SystemExit(f"fedsweep {' '.join(map(str, arguments))} failed:\n{done.stderr}")
    return done


def _merge_log(path: Path, made: dict[str, Any]) -> None:
    """What earlier calls ran stays on record, with what they ran on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if path.is_file() else []
    again = {entry["study"] for entry in made["studies"]}
    kept = [{**run, "studies": [e for e in run["studies"] if e["study"] not in again]} for run in before]
    path.write_text(json.dumps([*(run for run in kept if run["studies"]), made], indent=1) + "\n")


def _collect(work: Path, keep: Path) -> None:
    if keep.exists():
        shutil.rmtree(keep)
    for folder in sorted(path.parent for path in work.glob("*/ledger.sqlite")):
        for pattern in KEPT:
            for path in sorted(folder.glob(pattern)):
                target = keep / folder.name / path.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                text = path.read_text(encoding="utf-8") if path.suffix in (".yaml", ".md") else None
                if text is None:
                    shutil.copyfile(path, target)
                else:  # where a data file lay on the machine is nobody's business
                    target.write_text(text.replace(os.environ.get("FEDSWEEP_DATA", "\0"), "."), encoding="utf-8")
    shutil.copytree(work / "compare", keep / "compare", dirs_exist_ok=True)
    shutil.copyfile(work / "made.json", keep / "made.json")
    (keep / "README.md").write_text(_readme(json.loads((work / "made.json").read_text())), encoding="utf-8")


def _readme(runs: list[dict[str, Any]]) -> str:
    lines = ["# What the papers' studies come to here\n"]
    lines.append("Made by `make reproduce`; nothing in this folder is typed. [Beside the papers](compare/README.md),")
    lines.append("[findings](compare/findings.md), and by study:\n")
    lines.append("| study | for | command | seconds | on | commit |\n|---|---|---|---|---|---|")
    for run in runs:
        for entry in run["studies"]:
            name, what = entry["study"], STUDIES.get(entry["study"], "")
            shown = f"[{name}]({name}/tables/README.md)" if entry["came_to"] == "done" else name
            how = (
                f"`{entry['command']}`"
                if entry["came_to"] == "done"
                else f"{entry['came_to']}: {entry.get('reason', '')}"
            )
            seconds, device = f"{entry['seconds']:.0f}", run["device"]
            lines.append(f"| {shown} | {what} | {how} | {seconds} | {device} | {run['commit'][:12]} |")
    return "\n".join(lines) + "\n"


def _sentence(made: dict[str, Any]) -> str:
    done = [entry for entry in made["studies"] if entry["came_to"] == "done"]
    left = [entry["study"] for entry in made["studies"] if entry["came_to"] == "left out"]
    seconds = sum(entry["seconds"] for entry in done)
    text = f"{len(done)} studies ran in {seconds:.0f} s on {made['device']}, at commit {made['commit'][:12]}."
    return f"{text} Left out, since their data are not there: {', '.join(left)}." if left else text


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"], cwd=ROOT, capture_output=True, text=True
    )
    return (
        f"{done.stdout.strip()}{' with changes' if changed.stdout.strip() else ''}"
        if done.returncode == 0
        else "unknown"
    )


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return f"{'one' if count == 1 else count} {torch.cuda.get_device_name(0)}"
    return f"{os.cpu_count()} cores, {platform.machine()}"


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"python": platform.python_version(), **{name: version(name) for name in ("torch", "ray", "numpy")}}


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())

"""Run the papers' studies, compare them with the papers, and collect the files that the repository keeps.

    python -m benchmarks.reproduce                               run all studies that have data, compare, collect
    python -m benchmarks.reproduce run --only NAME --pack DIR    run some, for example elsewhere, and pack them
    python -m benchmarks.reproduce run --seconds S --pack DIR    stop after this time and pack what there is
    python -m benchmarks.reproduce run DIR/*.tar.gz              unpack studies and continue
    python -m benchmarks.reproduce collect DIR/*.tar.gz          unpack studies, compare, collect

Needs no network. Data files are located as studies locate them (`fedsweep data prepare`, $FEDSWEEP_DATA). Finished
trials are not run again. `--jobs N` runs N studies at the same time, which share the device. The repository keeps
tables, figures, chosen values and the comparison, with the command, commit and device that made them; it keeps no
ledgers and no data. `--resource` is passed on to `fedsweep run`: with `gpus_per_host=0.14`, seven packs share a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STUDIES = {
    "paper-cifar10-resnet20": "tables 3, 7, 14 and 15",
    "paper-cifar10-as-released": "tables 3 and 8, as released and as published",
    "cifar10-resnet20": "table 3, our search",
    "beyond-cifar10": "beyond the paper: features centred privately, size-weighted clients, a smaller clip",
    "cifar10-efficientnet-lite0": "beyond the paper: a backbone trained on ImageNet",
    "tail-cifar10-resnet20-budgets": "beyond the paper: norm layers trained next to the head",
    "tail-cifar10-resnet20": "beyond the paper: methods with and without trained norm layers",
    "paper-cifar10-iid": "table 8",
    "cifar10-iid": "table 8, our search",
    "paper-cifar10-ablation": "tables 10 and 12",
    "paper-crc5-resnet20": "CRC-5 in place of table 4",
    "crc5-resnet20": "CRC-5 in place of table 4, our search",
    "paper-adult": "table 8 of the DP-FedNew paper, 100 clients",
    "adult": "table 8 of the DP-FedNew paper, our search",
    "paper-cifar10-test-tuned": "the effect of tuning on the test rows",
    "paper-cifar10-per-seed": "table 3 with a new partition for every seed",
    "paper-cifar10-partition-123": "another draw of the partition",
    "paper-cifar10-partition-7": "another draw of the partition",
    "paper-cifar10-vgg16": "tables 5 and 15",
    "paper-fednew-cifar10-resnet20": "ResNet-20 in place of figure 4 of the DP-FedNew paper",
    "paper-adult-10": "table 8 of the DP-FedNew paper, 10 clients",
    "paper-adult-250": "table 8 of the DP-FedNew paper, 250 clients",
    "paper-adult-500": "table 8 of the DP-FedNew paper, 500 clients",
    "cifar10-vgg16": "table 5, our search",
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
"""By importance: --seconds may leave out the last ones."""
NOT_COMPARED = (
    "beyond-cifar10",
    "cifar10-efficientnet-lite0",
    "tail-cifar10-resnet20-budgets",
    "tail-cifar10-resnet20",
)
"""Studies without a counterpart in a paper."""
KEPT = ("tables/*.md", "tables/*.csv", "figures/*.png", "best.yaml", "study.yaml")
NOT_KEPT = ("trials.csv",)  # many megabytes
STOPPED = 130
"""Exit status of a study that was stopped."""
PACKED = ("ledger.sqlite", "study.yaml", "made.json")
SECONDS = (
    "Seconds are the wall-clock time of the commands, including the tables, summed over resumed runs; studies that "
    "ran at the same time overlap."
)
DATA_PATH = re.compile(r"/[^\s'\"`]*/([\w.-]+\.npz)")
"""Where a data file was on the machine; only its name is kept."""


def main() -> int:
    options = _options()
    for file in options.packed:
        with tarfile.open(file) as archive:
            if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and later: no files outside the folder
                archive.extraction_filter = tarfile.data_filter
            archive.extractall(options.work)
    failed = options.what in ("all", "run") and _run_all(options)
    if options.what in ("all", "collect"):
        _collect(options.work, options.keep, options.page)
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the papers' studies and compare them with the papers.")
    parser.add_argument("what", nargs="?", choices=("all", "run", "collect"), default="all")
    parser.add_argument("packed", nargs="*", type=Path, help="packed studies to unpack first")
    parser.add_argument("--only", action="append", choices=STUDIES, help="a study; may be repeated")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop after this time; a later call continues"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of studies that run at the same time")
    parser.add_argument("--pack", type=Path, help="folder for a .tar.gz of every study that ran")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "reproduction", help="folder for ledgers")
    parser.add_argument("--keep", type=Path, default=ROOT / "results" / "reproduction", help="folder to commit")
    parser.add_argument("--page", type=Path, help="where to write the summary for the documentation")
    parser.add_argument("--backend", choices=("ray", "local"), default="ray", help="local: without Ray")
    parser.add_argument(
        "--resource", action="append", default=[], metavar="KEY=VALUE", help="as of fedsweep run; may be repeated"
    )
    parser.add_argument("--commit", default="", help="the commit that runs, where there is no git")
    return parser.parse_intermixed_args()


# ---- running


def _run_all(options: argparse.Namespace) -> bool:
    """Run the chosen studies; return whether any failed."""
    made = {"commit": options.commit or _commit(), "device": _device(), "versions": _versions()}
    _log(_expected_time(options.only or STUDIES, options.keep))
    how = [] if options.backend == "ray" else ["--backend", options.backend]
    how += [word for resource in options.resource for word in ("--resource", resource)]
    start = time.monotonic()

    def run(name: str) -> str:
        left = options.seconds - (time.monotonic() - start)
        if left <= 0:
            outcome = f"not started, {options.seconds:g} s have passed"
        elif missing := _missing_data(name):
            outcome = f"skipped, {missing}"
        else:
            outcome = _run(name, options.work / name, made, how, left)
            if options.pack:
                _pack(options.work / name, options.pack)
        _log(f"{name}: {outcome} ({time.monotonic() - start:.0f} s so far)")
        return outcome

    with ThreadPoolExecutor(options.jobs) as pool:
        return "failed" in list(pool.map(run, options.only or STUDIES))


def _pack(folder: Path, packed: Path) -> None:
    packed.mkdir(parents=True, exist_ok=True)
    with tarfile.open(packed / f"{folder.name}.tar.gz", "w:gz") as archive:
        for file in (folder / name for name in PACKED):
            if file.is_file():
                archive.add(file, arcname=f"{folder.name}/{file.name}")


def _expected_time(names: Iterable[str], keep: Path) -> str:
    """How long the studies took when the kept results were made."""
    made = [json.loads(file.read_text()) for name in names if (file := keep / name / "made.json").is_file()]
    if not made:
        return "none of these studies has kept results, so their time is unknown"
    seconds, devices = sum(each["seconds"] for each in made), dict.fromkeys(each["device"] for each in made)
    return (
        f"{len(made)} of these studies have kept results, which took {seconds / 60:.0f} min on {' and '.join(devices)}"
    )


def _run(name: str, folder: Path, made: dict[str, Any], how: list[str], seconds: float) -> str:
    """Run a study for at most this time; return the outcome. `how`: options of `fedsweep run`. The first call writes
    made.json: command, seconds, commit, device and versions. Calls that continue it add their seconds, and their commit
    and device if they are others."""
    if _finished(folder):
        return "done before"
    start, file = time.monotonic(), folder / "made.json"
    limit = [] if math.isinf(seconds) else ["--stop-after", f"{max(0.1, seconds):.1f}s"]
    process = _fedsweep("run", name, "--results", folder, "--json", *how, *limit, check=False)
    if folder.is_dir():
        record = {"command": " ".join(["fedsweep run", name, *how]), "seconds": 0.0, **made}
        if file.is_file():
            record = json.loads(file.read_text())
            for key in ("commit", "device"):
                record[key] = " and ".join(dict.fromkeys([*record[key].split(" and "), made[key]]))
        record["seconds"] = round(record["seconds"] + time.monotonic() - start, 1)
        file.write_text(json.dumps(record, indent=1) + "\n")
    if process.returncode == STOPPED:
        return "stopped; another call continues"
    if process.returncode != 0:
        _log(process.stderr[-3000:])
        return "failed"
    return "done"


def _finished(folder: Path) -> bool:
    from orchestrator.results import status

    return (folder / "ledger.sqlite").is_file() and status.read(str(folder))["finished"]


def _missing_data(name: str) -> str:
    """Which data file a study lacks and how to make it; empty if it has all."""
    from orchestrator.study import reading
    from trainables.data.sources.catalogue import recipe

    study, _ = reading.load(name)
    missing = [data.source for data in study.data if data.source.endswith(".npz") and not Path(data.source).is_file()]
    for file in missing:
        if recipe(Path(file).stem) is not None:
            return f"needs {file}, which `fedsweep data prepare {Path(file).stem}` downloads and computes"
    return f"needs {missing[0]}, which no command makes" if missing else ""


def _fedsweep(*arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    program = "from orchestrator.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    process = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, env=environment
    )
    if check and process.returncode != 0:
        raise SystemExit(f"fedsweep {' '.join(map(str, arguments))} failed:\n{process.stderr}")
    return process


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
    from importlib.util import find_spec

    used = [name for name in ("torch", "ray", "numpy") if find_spec(name)]  # the local backend needs no Ray
    return {"python": platform.python_version(), **{name: version(name) for name in used}}


# ---- collecting


def _collect(work: Path, keep: Path, page: Path | None) -> None:
    """Rebuild everything from the ledgers. Kept studies that are not finished here stay as they are."""
    names = [name for name in STUDIES if _finished(work / name)]
    if not names:
        raise SystemExit(f"no study is finished in {work}")
    made = {name: _made(work / name) for name in names}
    for name in names:
        _fedsweep("tables", work / name)
        _fedsweep("figures", work / name)
        shutil.rmtree(keep / name, ignore_errors=True)
        for path in (path for pattern in KEPT for path in sorted((work / name).glob(pattern))):
            if path.name not in NOT_KEPT:
                _copy(path, keep / name / path.relative_to(work / name))
        _remove_dead_links(keep / name / "tables" / "README.md")
        (keep / name / "made.json").write_text(json.dumps(made[name], indent=1) + "\n")
    kept = {name: keep / name / "made.json" for name in STUDIES}
    made = {name: json.loads(file.read_text()) for name, file in kept.items() if file.is_file()}
    if compared := [work / name for name in names if name not in NOT_COMPARED]:
        shutil.rmtree(keep / "compare", ignore_errors=True)
        summary = ("--page", page, "--made", _made_text(made, os.path.relpath(keep, page.parent))) if page else ()
        _fedsweep("compare", *compared, "--to", keep / "compare", *summary)
        record = {"command": "python -m benchmarks.reproduce collect", "commit": _commit(), "studies": names}
        (keep / "compare" / "made.json").write_text(json.dumps(record, indent=1) + "\n")
    (keep / "README.md").write_text(_readme(made), encoding="utf-8")


def _remove_dead_links(page: Path) -> None:
    """Turn links to files that are not kept into text."""

    def link(match: re.Match[str]) -> str:
        return match[0] if (page.parent / match[2]).exists() else match[1]

    page.write_text(re.sub(r"\[([^]]+)\]\(([^)]+)\)", link, page.read_text(encoding="utf-8")), encoding="utf-8")


def _made(folder: Path) -> dict[str, Any]:
    """The content of made.json, with the time of all sessions if the study was resumed."""
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


def _made_text(made: dict[str, dict[str, Any]], keep: str) -> str:
    devices = " and ".join(dict.fromkeys(each["device"] for each in made.values()))
    seconds = sum(each["seconds"] for each in made.values())
    count = "One study" if len(made) == 1 else f"{len(made)} studies"
    skipped = f" {len(STUDIES) - len(made)} more were not run." if len(made) < len(STUDIES) else ""
    overlap = ", counting those that ran at the same time one by one" if len(made) > 1 else ""
    return (
        f"{count} took {seconds:.0f} s in total on {devices}{overlap}.{skipped} "
        f"[The list of studies]({keep}/README.md) has the command, time, device and commit of each, and the reason why "
        "a study was not run."
    )


def _readme(made: dict[str, dict[str, Any]]) -> str:
    lines = [
        "# Results of the papers' studies\n",
        "Made by `python -m benchmarks.reproduce run` and `collect`; no number is typed by hand. See also",
        "[the comparison with the papers](compare/README.md) and [the findings](compare/findings.md).",
        f"{SECONDS}\n",
        "| study | content | command | seconds | device | commit |\n|---|---|---|---|---|---|",
    ]
    for name, content in STUDIES.items():
        if name in made:
            each = made[name]
            row = f"`{each['command']}` | {each['seconds']:.0f} | {each['device']} | {each['commit']}"
            lines.append(f"| [{name}]({name}/tables/README.md) | {content} | {row} |")
        else:
            lines.append(f"| {name} | {content} | not run: {_missing_data(name) or 'not requested'} | | | |")
    return "\n".join(lines) + "\n"


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

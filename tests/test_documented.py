"""Run every command that the documentation and the README show, in one folder and in reading order."""

import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from repository_files import DOCS, REPOSITORY, blocks

PLACEHOLDERS = {  # placeholder in the documentation: value in this test
    "STUDY": "mine.yaml",
    "quickstart": "mine.yaml",  # `make run` runs it
    "URL": "results/url",
    "DIR2": "results/b",
    "[DIR2]": "results/b",
    "DIR...": "results/a",
    "DIR": "results/quickstart",
    "METHOD": "dp-fedgd",
    "FORM": "csv",
    "FILE": "results/cifar10-resnet20/export/trials.parquet",
    "MODULE:CLASS": "examples/plugin/heavy_ball.py:DPHeavyBall",
    "NAME": "synthetic-frozen:300,60,6,3 / dirichlet:0.5 / DP-FedGD, adaptive / eps 1",
    "features.npz": "mine.npz",
}
TESTED_ELSEWHERE = {  # a word of the command: where it is tested, and why
    "compare": "tests/test_compare.py: needs a study of the papers",
    "cancel": "tests/test_locations.py: needs a running sweep",
    "forget": "tests/test_forgetting.py: needs a node of a cluster",
    "prepare": "tests/test_sources.py: downloads",
    "import": "tests/test_import.py: needs the tables of the page",
    "bench": "tests/test_bench.py and test_search.py: parts of it; takes minutes",
    "--address": "tests/test_nodes.py: needs a cluster",
    "gpus_per_host=0.5": "`make reproduce`: needs a GPU",
    "as_released=true": "tests/test_audit.py: slow",
    "--program": "tests/test_program_audit.py: slow",
    "beyond-cifar10": "`make reproduce`: needs the paper's features",
    "precision-cifar10-resnet20": "tests/test_precision.py reads it: takes minutes and needs the paper's features",
}
PAGES = (
    *(
        "first-study",
        "bring-your-data",
        "report",
        "write-a-method",
        "benchmark",
        "privacy",
        "audit",
        "private-search",
        "gpu",
        "data",
        "clusters",
    ),
    *("install", "studies", "methods", "faults"),
)
SMALL = "synthetic-frozen:300,60,6,3"


def commands_in(text: str) -> list[str]:
    """The commands in the code of a text, without comments (after # or two blanks)."""
    fenced = [code for language, code in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if not language]
    within = [" ".join(code.split()) for code in re.findall(r"`(fedsweep \w+ [^`]+)`", text)]
    code = "\n".join([*fenced, *re.findall(r"^    (fedsweep .*)$", text, re.M), *within])
    lines = [re.split(r" #|  +|(?<=DIR) put ", line)[0].strip() for line in code.splitlines()]
    return [line for line in lines if line.startswith("fedsweep ")]


def every_command() -> list[str]:
    """The commands of all pages in reading order, then those of the README."""
    pages = [(DOCS / f"{page}.md").read_text() for page in PAGES]
    readme = [
        command
        for line in commands_in((REPOSITORY / "README.md").read_text())
        for command in ([f"fedsweep {name}" for name in line[9:].split(" | ")] if " | " in line else [line])
    ]
    everything = [*(command for page in pages for command in commands_in(page)), *readme]
    elsewhere = ("visits", "photos")  # tests/test_docs.py and test_own_images.py run those
    return [command for command in everything if not any(word in command for word in elsewhere)]


def completed(command: str) -> list[str]:
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(command)[1:]]
    if words[0] == "merge":
        words[words.index("--results") + 1] = "results/merged"
    if words == ["calibrate"]:
        words += ["--epsilon", "1"]
    if words[0] == "train" and "--data" not in words and "--from" not in words:
        words += ["--data", "mine.npz", "--epsilon", "1", "--rounds", "2"]
    if words == ["partition"]:
        words += ["--data", "mine.npz"]
    if words[0] == "check-method" or (words[0] == "audit" and not words[1].startswith("results")):
        words += ["--repetitions", "2000"]
    if words[0] == "serve":
        words += ["--port", "0"]
    if words[:2] == ["data", "pretrain"]:
        words += ["--epochs", "1"]
    if "hosts=8" in words:
        words[words.index("hosts=8")] = "hosts=2"
    if words[0] == "lookup":
        words = [*words[:2], "--method", "dp-fedgd", "--epsilon", "10"]
    return words


def test_the_documentation_shows_commands():
    found = every_command()
    assert len(found) > 40
    assert {"fedsweep best DIR", "fedsweep doctor", "fedsweep plan mine.yaml"} <= set(found)


def test_files_named_on_the_privacy_page_exist():
    named = set(re.findall(r"`?((?:tests|trainables|results)/[\w/.-]+)`", (DOCS / "privacy.md").read_text()))
    assert len(named) > 15
    assert [name for name in named if not (REPOSITORY / name).exists()] == []


def test_tests_named_in_the_documentation_exist():
    tests = "".join(file.read_text() for file in (REPOSITORY / "tests").glob("*.py"))
    named = {name for page in DOCS.glob("*.md") for name in re.findall(r"(?:`|::)(test_\w+)`", page.read_text())}
    assert len(named) > 30
    assert [name for name in sorted(named) if name != "test_fraction" and f"def {name}(" not in tests] == []


def test_tests_named_on_the_privacy_page_exist():
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", (DOCS / "privacy.md").read_text())
    assert len(named) > 15
    for file, name in named:
        assert re.search(rf"^def {name}\(", (REPOSITORY / file).read_text(), re.M), f"{file} has no {name}"


def shorten_slow_commands(monkeypatch):
    """`serve` is interrupted at once; `pretrain` gets a few images."""

    def interrupted(server):
        raise KeyboardInterrupt

    images = np.random.default_rng(0).integers(0, 255, (4, 32, 32, 3)).astype(np.uint8)
    labels = np.arange(4, dtype=np.uint8)
    few = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}
    monkeypatch.setattr("orchestrator.report.html.serving.ThreadingHTTPServer.serve_forever", interrupted)
    monkeypatch.setattr("trainables.data.sources.fetching.fetch", lambda file, given: file.name)
    monkeypatch.setattr("trainables.data.sources.formats.read", lambda *_: SimpleNamespace(arrays=few))


def test_every_documented_command_runs(fedsweep, no_ray, tmp_path, monkeypatch):
    """Sweeps and trainings run in this process without Ray; everything else is unchanged."""
    shorten_slow_commands(monkeypatch)
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("FEDSWEEP_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(REPOSITORY / "examples", "examples")
    (study,) = blocks(DOCS / "first-study.md", "yaml")
    quicker = study.replace(
        "{coarse: 20, fine: 20, confirm: 30}", "{coarse: 2, fine: 2, confirm: 2}\nsearch: {finalists: 2}"
    )
    (tmp_path / "mine.yaml").write_text(quicker.replace("synthetic-frozen:2000,500,16,4", SMALL))
    _, program = blocks(DOCS / "bring-your-data.md", "python")
    exec(compile(program, "bring-your-data.md", "exec"), {})
    assert fedsweep("run", "mine.yaml", "--results", "results/quickstart")[0] == 0
    for copy in ("a", "b", "cifar10-resnet20", "url"):
        shutil.copytree("results/quickstart", f"results/{copy}")
    ran = 0
    for command in dict.fromkeys(every_command()):
        words = completed(command)
        if any(word in TESTED_ELSEWHERE for word in (*words, *shlex.split(command))):
            continue
        code, out, err = fedsweep(*words)
        caught = "--noise-factor" in words
        assert code == int(caught), f"{command}: {out[-300:]} {err}"
        ran += 1
    assert ran > 35
    Path("model.npz").unlink()  # which the Python of a page saves once more
    run_the_python_blocks()


def run_the_python_blocks():
    """Run the Python blocks of two pages on the results of the commands."""
    names: dict = {}
    for program in blocks(DOCS / "python.md", "python"):
        exec(compile(program.replace('"quickstart"', '"mine.yaml"'), "python.md", "exec"), names)
    assert names["results"].finished
    assert names["model"].account.claimed == 1
    program, *_ = blocks(DOCS / "benchmark.md", "python")
    found = names["results"].trials
    program = program.replace("trials.parquet", PLACEHOLDERS["FILE"])
    program = program.replace("CIFAR-10 / ResNet-20 / dirichlet:0.5", found["setting"].iloc[0])
    by_optuna, _, _ = program.partition("from ray import tune")  # what Tune calls is in tests/test_benchmark_table.py
    exec(compile(by_optuna, "benchmark.md", "exec"), names)
    assert 0 < names["study"].best_value <= 100

"""The documentation: links, commands and examples are run or compared with the code."""

import ast
import csv
import inspect
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from abc import ABC

import own_data
import pytest
import typer
import yaml
from command_line import check_fedsweep
from repository_files import DOCS, REPOSITORY, blocks

from benchmarks import scaling
from orchestrator.cli import app
from orchestrator.study.cells import PreparedStudy
from orchestrator.study.reading import load, parse, setting_paths
from orchestrator.study.study import Study
from trainables.methods import METHODS

PAGES = sorted(DOCS.glob("*.md"))
PAGES_WITH_COMMANDS = ("first-study", "install", "bring-your-data", "gpu", "python", "write-a-method", "integrations")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built strictly: a broken link fails."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    build = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert build.returncode == 0, build.stdout + build.stderr
    return folder


def test_the_site_has_every_page_and_fetches_nothing(site):
    for page in PAGES:
        html = (site / f"{page.stem}.html").read_text()
        fetched = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', html)
        assert not [url for url in fetched if "rel" not in url and "canonical" not in url], page.name


def test_formulas_and_the_diagram_are_part_of_the_pages(site):
    privacy, architecture = ((site / f"{name}.html").read_text() for name in ("privacy", "architecture"))
    assert privacy.count("<math") > 20
    assert "$$" not in privacy
    assert "\\(" not in privacy
    assert '<svg xmlns="http://www.w3.org/2000/svg" class="fs-diagram"' in architecture
    assert (site / "search" / "search_index.js").exists(), "search on pages opened from disk"


def test_search_works_on_pages_opened_from_disk(site, tmp_path):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if not shutil.which("chromedriver"):
        pytest.skip("chromedriver is missing: apt-get install chromium chromium-driver")
    from selenium.webdriver.support.wait import WebDriverWait

    options = webdriver.ChromeOptions()
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path}",
    ):
        options.add_argument(flag)
    service = webdriver.chrome.service.Service(shutil.which("chromedriver"))
    with webdriver.Chrome(options=options, service=service) as browser:
        browser.get((site / "index.html").as_uri())
        browser.find_element("css selector", "label[for=__search]").click()
        browser.find_element("css selector", ".md-search__input").send_keys("secure aggregation")
        wait = WebDriverWait(browser, 30)
        titles = wait.until(lambda b: [e.text for e in b.find_elements("css selector", ".md-search-result__item h1")])
        assert "Privacy" in titles


def test_the_committed_reference_matches_the_code():
    """It is also read without the site. `make docs` writes it."""
    made = runpy.run_path(str(DOCS / "reference.py"))["pages"]()
    assert {name: (DOCS / "reference" / name).read_text() for name in made} == made


def test_the_reference_names_everything(site):
    """All commands, study keys and hyperparameters of the code, each with a description."""
    commands = (DOCS / "reference" / "commands.md").read_text()
    for name in typer.main.get_command(app).commands:
        assert f"## fedsweep {name}" in commands
    keys = (DOCS / "reference" / "study.md").read_text()
    for path in setting_paths(Study):
        section, _, name = path.rpartition(".")
        assert f"| `{name}` |" in keys, path
        assert not section or f"## {section}\n" in keys, path
    python = (DOCS / "reference" / "python.md").read_text()
    assert re.findall(r"^\| `.*?` \|  \|", keys + python, flags=re.MULTILINE) == [], "a key without a text"
    assert inspect.getdoc(ABC) not in python, "a class without a docstring"
    methods = (DOCS / "reference" / "methods.md").read_text()
    for method in METHODS.values():
        for h in method.hyperparameters:
            assert f"| `{h.name}` |" in methods


@pytest.mark.parametrize("name", PAGES_WITH_COMMANDS)
def test_commands_on_pages_exist(name):
    """Every command and every flag exists."""
    for block in blocks(DOCS / f"{name}.md"):
        for line in block.splitlines():
            words = line.partition("#")[0].strip()
            words = re.sub(r"--import \S+ ", "", words)
            if not words.startswith("fedsweep ") or words in ("fedsweep doctor",):
                continue
            if words.split()[1] in ("run", "plan") and words.split()[2].endswith(".yaml"):
                words = words.replace(words.split()[2], "STUDY")
            check_fedsweep(words)


def test_every_promise_on_the_privacy_page_names_a_test():
    """And every test, file and make target that the page names exists."""
    page = (REPOSITORY / "docs" / "privacy.md").read_text().partition("## Check it yourself")[2]
    promises = [line.rstrip(" |").rpartition(" | ")[2] for line in page.splitlines() if line.startswith("| ")]
    named = re.findall(r"`(tests/\w+\.py)(?:::(\w+))?`", page)
    makefile = (REPOSITORY / "Makefile").read_text()
    assert len(named) > 50
    assert all("`tests/" in cell or cell in ("test", "file") for cell in promises), promises
    for file, test in named:
        tree = ast.parse((REPOSITORY / file).read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert not test or test in names, f"{file}::{test}"
    assert all(f"\n{target}:" in makefile for target in re.findall(r"`make ([\w-]+)`", page))


def test_the_first_study_is_valid():
    """The study on the page is valid and has the cells it should have."""
    (text,) = blocks(DOCS / "first-study.md", "yaml")
    prepared = PreparedStudy.prepare(parse(text, "mine.yaml", REPOSITORY))
    assert len(prepared.cells) == 4


def test_the_study_page_shows_the_defaults():
    (text,) = blocks(DOCS / "studies.md", "yaml")
    required, _, _ = text.partition("# everything below shows the defaults with `defaults: paper`")
    shown, defaults = (parse(part, "shown.yaml", REPOSITORY).model_dump() for part in (text, required))
    assert {**shown, "compare_to": None} == {**defaults, "compare_to": None}
    missing = [name for name in Study.model_fields if not re.search(rf"^{name}:", text, flags=re.MULTILINE)]
    assert missing == [], "the page claims to show every key"
    for section in ("privacy", "preprocess", "rounds", "seeds", "validation", "search", "resources"):
        assert set(yaml.safe_load(text)[section]) == set(shown[section]), section


def test_the_tables_of_the_defaults_are_those_of_the_reports():
    from benchmarks.defaults import PARTS, REPORTS

    page, found = (DOCS / "defaults.md").read_text(), 0
    for part, lines in PARTS.values():
        report = REPORTS / f"{part}.json"
        if report.exists():
            found += 1
            table = "\n".join(lines(json.loads(report.read_text())))
            assert f" -->\n{table}\n<!-- end of {part} -->" in page
    assert found


def test_the_page_on_methods_shows_the_example_itself():
    """The code on the page is the code that the tests run."""
    sources = [(REPOSITORY / "examples" / "plugin" / name).read_text() for name in ("heavy_ball.py", "look_ahead.py")]
    source = "\n".join(sources)
    shown = blocks(DOCS / "write-a-method.md", "python")
    assert len(shown) == 6
    for block in shown:
        assert block in source
    (space,) = blocks(DOCS / "write-a-method.md", "yaml")
    assert yaml.safe_load(space) == yaml.safe_load((REPOSITORY / "examples/plugin/dp_heavy_ball.yaml").read_text())


def test_from_a_table_to_predictions(tmp_path, monkeypatch, fedsweep, no_ray):
    """The commands on the page, in order, with its schema and its study (a smaller search)."""
    monkeypatch.chdir(tmp_path)
    own_data.write_table(tmp_path / "visits.csv")
    own_data.write_table(tmp_path / "new-visits.csv", rows=20, seed=1)
    schema, study = blocks(DOCS / "bring-your-data.md", "yaml")
    smaller = "rounds: {coarse: 2, fine: 2, confirm: 2}\nseeds: {search: [1], contest: [], confirm: [42]}\n"
    (tmp_path / "visits.yaml").write_text(study + smaller)
    shown = blocks(DOCS / "bring-your-data.md")
    first = next(number for number, block in enumerate(shown) if block.startswith("patient,"))
    table, *commands = shown[first : first + 6]
    assert table.splitlines()[0] == (tmp_path / "visits.csv").read_text().splitlines()[0]
    for line in "".join(commands).splitlines()[:-2]:  # without the last section's train
        if "new-visits" in line:
            assert "accuracy" in json.loads(fedsweep(*shlex.split(line)[1:], "--json")[1])
            continue
        code, _, err = fedsweep(*shlex.split(line)[1:])
        assert code == 0, f"{line}: {err}"
        if "--draft-schema" in line:
            (tmp_path / "visits.schema.yaml").write_text(schema)
    assert set((tmp_path / "classes.csv").read_text().split()) <= {"class", "healthy", "ill"}


def test_own_data(tmp_path, monkeypatch, fedsweep):
    """The program on the page writes a file that the commands and the example study accept."""
    monkeypatch.chdir(tmp_path)
    _, program = blocks(DOCS / "bring-your-data.md", "python")
    exec(compile(program, "bring-your-data.md", "exec"), {})
    code, out, _ = fedsweep("partition", "--data", "mine.npz", "--clients", 10)
    assert code == 0
    assert "total" in out
    study, _ = load(str(REPOSITORY / "examples" / "studies" / "own-data.yaml"))
    assert len(PreparedStudy.prepare(study).cells) == 2 * 3 * 3


@pytest.mark.parametrize("file", sorted((REPOSITORY / "examples" / "studies").glob("*.yaml")), ids=lambda f: f.stem)
def test_example_studies_can_be_run(file):
    study, _ = load(str(file))
    if study.name != "own-data":  # whose data are the user's own
        assert PreparedStudy.prepare(study).cells


def test_the_notebook_runs(tmp_path, monkeypatch, no_ray):
    """Run all cells in order."""
    notebook = json.loads((REPOSITORY / "examples" / "notebooks" / "first-study.ipynb").read_text())
    assert notebook["nbformat"] == 4
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert names["results"].finished
    assert names["model"].weights.shape == (9, 3)
    assert names["model"].state == "done"


def test_the_readmes_table_of_backbones_comes_from_the_kept_results():
    results, text = REPOSITORY / "results" / "reproduction", (REPOSITORY / "README.md").read_text()
    page = (DOCS / "bring-your-data.md").read_text()
    kept = {
        "DP-FedSOFIM, paper's settings, ResNet-20": ("beyond-cifar10", "DP-FedSOFIM"),
        "DP-FedGD, centred, size-weighted, ResNet-20": ("beyond-cifar10", "DP-FedGD, centred, size-weighted"),
        "the same, [norm layers trained](docs/train-layers.md), rounds and clip searched": (
            "tail-cifar10-resnet20-budgets",
            "DP-FedGD, norm layers, bf16",
        ),
        "DP-FedGD, centred, size-weighted, EfficientNet-Lite0": (
            "cifar10-efficientnet-lite0",
            "DP-FedGD, centred, size-weighted",
        ),
        "the same with automatic clipping": (
            "cifar10-efficientnet-lite0",
            "DP-FedGD, centred, size-weighted, automatic clipping",
        ),
    }
    for title, (study, method) in kept.items():
        with (results / study / "tables" / "accuracy.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["method"] == method]
        last = {float(row["epsilon"]): float(row["mean"]) for row in rows}
        cells = " | ".join(f"{last[epsilon]:.2f}" for epsilon in (0.5, 1, 10))
        assert (f"| {title} | {cells} |" in text) == (title != "the same with automatic clipping")
        if "DP-FedSOFIM" not in title:
            cells = " | ".join(f"{last[epsilon]:.2f}" if epsilon in last else "–" for epsilon in (0.5, 1, 5, 10))
            assert f"| {cells} |" in page


def test_the_table_of_trained_layers_comes_from_the_kept_results():
    kept = {
        "head alone": ("beyond-cifar10", "DP-FedGD, centred, size-weighted"),
        "all norm layers and the head": ("tail-cifar10-resnet20-budgets", "DP-FedGD, norm layers, bf16"),
    }
    for title, (study, method) in kept.items():
        with (REPOSITORY / "results" / "reproduction" / study / "tables" / "accuracy.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["method"] == method]
        last = {float(row["epsilon"]): f"{float(row['mean']):.2f} ± {float(row['std']):.2f}" for row in rows}
        assert len(last) >= 3
        cells = " | ".join(last.get(epsilon, "–") for epsilon in (0.5, 1, 5, 10))
        assert f"| DP-FedGD, {title} | {cells} |" in (DOCS / "train-layers.md").read_text()


def test_the_table_of_methods_with_trained_layers_comes_from_the_kept_results():
    page = (DOCS / "train-layers.md").read_text()
    table = REPOSITORY / "results" / "reproduction" / "tail-cifar10-resnet20" / "tables" / "accuracy.csv"
    with table.open() as file:
        last = {(row["method"], float(row["epsilon"])): row for row in csv.DictReader(file)}
    methods = {method for method, _ in last}
    assert len(methods) == 8
    for method in methods:
        cells = [f"{float(last[method, eps]['mean']):.2f} ± {float(last[method, eps]['std']):.2f}" for eps in (1, 10)]
        title = method.removesuffix(", bf16").replace("norm layers", "norm layers and the head")
        assert f"| {title} | {' | '.join(cells)} |" in page


def test_the_readme_is_short_and_links_the_terms_it_uses():
    text = (REPOSITORY / "README.md").read_text()
    assert len(text.split()) <= 700
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    glossary = (DOCS / "glossary.md").read_text()
    for word, term in {
        "lanes?": "Lane",
        "packs?": "Pack",
        "cells?": "Cell",
        "strategy": "Strategy",
        "actual eps": "Actual eps",
    }.items():
        first = re.search(rf"\b{word}\b", prose)
        assert prose[first.start() - 1] == "[", (
            f"{word} is used before it is linked: {prose[first.start() - 60 :][:90]}"
        )
        assert prose[first.end() :].startswith("](docs/glossary.md)"), word
        assert f"**{term}.**" in glossary
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert links
    for link in links:
        assert (REPOSITORY / link).exists(), link


def test_the_workflows_run_what_the_readme_promises():
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "test.yml").read_text())
    machines = workflow["jobs"]["test"]["strategy"]["matrix"]["machine"]
    assert any(machine.endswith("-arm") for machine in machines)
    assert any(not machine.endswith("-arm") for machine in machines)
    steps = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    targets = set(re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE))
    for step in steps:
        program, *words = shlex.split(step)
        assert set(words) <= targets if program == "make" else (REPOSITORY / program).exists()


def test_the_comparison_with_other_simulators_loads():
    """Running it needs separate environments; this test only imports it."""
    imported = subprocess.run(
        [sys.executable, "-c", "import benchmarks.peers"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert imported.returncode == 0, imported.stderr


def test_versions_agree():
    import tomllib

    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"] == version
    assert f"## {version}" in (REPOSITORY / "CHANGELOG.md").read_text()
    assert f"fedsweep-{version}-py3" in (DOCS / "install.md").read_text()


def test_the_tables_of_the_scaling_page_are_those_of_its_benchmark():
    page = (DOCS / "scaling.md").read_text()
    assert scaling.table() in page
    assert scaling.desk_table() in page
    assert scaling.slots_table() in page

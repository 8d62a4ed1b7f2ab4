"""Methods, data, partitions and heads from outside, and the contract that shows a broken method for what it is."""

import json
import os
import subprocess
import sys
import types
from importlib.metadata import EntryPoint

import numpy as np
import pytest
from plugin_registry import temporary_plugins
from repository_files import REPOSITORY
from simulated_search import trial_of

import fedsweep as face
from fedsweep.plugins import use
from orchestrator.study.cells import PreparedStudy
from orchestrator.study.reading import load, parse
from trainables import methods, plugins
from trainables.audit import contract
from trainables.data import features, partition
from trainables.errors import UserError
from trainables.methods.base import Method, learning_rate
from trainables.privacy.plan import Event

EXAMPLE = REPOSITORY / "examples" / "plugin" / "heavy_ball.py"
STUDY = EXAMPLE.with_name("study.yaml")


@pytest.fixture
def example():
    plugins.use(str(EXAMPLE))


def module(folder, name, text):
    file = folder / f"{name}.py"
    file.write_text(text)
    return str(file)


# ---- the example


def test_the_example_method_keeps_the_contract(fedsweep):
    where = f"{EXAMPLE}:DPHeavyBall"
    code, out, err = fedsweep("check-method", where, "--twin", f"{EXAMPLE}:twin", "--repetitions", 800, "--json")
    assert code == 0, err
    findings = json.loads(out)["checks"]
    assert len(findings) == 11
    assert err.splitlines() == [f"{finding['check']}: passed" for finding in findings]
    assert not any(finding["failure"] for finding in findings)


def test_the_example_study_takes_everything_from_the_plug_in(example):
    study, _ = load(str(STUDY))
    space = study.methods[1].space()
    assert space.coarse == {"learning_rate": (0.1, 1.0, 10.0), "momentum": (0.0, 0.5, 0.9)}
    assert space.scale == {"learning_rate": "log", "momentum": "complement"}
    prepared = PreparedStudy.prepare(study)
    assert {cell.setting.id for cell in prepared.cells} == {("two-moons:600", "by-first-feature")}
    again = type(study).model_validate_json(study.model_dump_json())
    assert again.methods[1].space() == space, "a result folder needs no file beside the study"


@pytest.mark.ray
def test_the_example_runs_with_workers_that_know_it(tmp_path):
    """As a user runs it: in another process, with its own Ray."""
    folder = tmp_path / "results"
    text = STUDY.read_text().replace("epsilons: [1, 8]", "epsilons: [8]").replace("[42, 7]", "[42]")
    (tmp_path / "study.yaml").write_text(text)
    (tmp_path / "dp_heavy_ball.yaml").write_text("coarse: {learning_rate: [1, 2]}\nfine: {learning_rate: [1]}\n")
    command = [sys.executable, "-m", "orchestrator.cli", "--import", EXAMPLE, "run", "study.yaml", "--results", folder]
    found = subprocess.run([*map(str, command), "--json"], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout.splitlines()[-1])["failed"] == 0
    assert "DP-HeavyBall" in (folder / "tables" / "accuracy.md").read_text()


def test_a_folder_says_which_plug_ins_it_needs(fedsweep, tmp_path, monkeypatch):
    """Nothing is imported because a folder names it: it may be anybody's. What to say is said."""
    folder = tmp_path / "results"
    with temporary_plugins():
        code, _, err = fedsweep("run", STUDY, "--results", folder, "--backend", "local", "--import", EXAMPLE)
    monkeypatch.setenv(plugins.VARIABLE, "")
    assert code == 0, err
    assert f'--cell "NAME" --seed SEED --import {EXAMPLE}' in (folder / "best.yaml").read_text()
    assert f"fedsweep report {folder} --import {EXAMPLE}" in err

    for command in ("status", "resume"):
        code, _, err = fedsweep(command, folder)
        assert code == 2
        assert f"add --import {EXAMPLE}" in err
        assert err.count("\n") == 1
    with temporary_plugins():
        _, out, err = fedsweep("status", folder, "--import", EXAMPLE)
    monkeypatch.setenv(plugins.VARIABLE, "")
    assert "study heavy-ball: finished" in out, err
    with pytest.raises(UserError, match=rf"from Python call fedsweep\.plugins\.use\('{EXAMPLE}'\)"):
        face.load_results(folder).winners  # noqa: B018
    use(str(EXAMPLE))
    assert set(face.load_results(folder).winners["method"]) == {"DP-FedGD", "DP-HeavyBall"}


# ---- how they are found


def test_by_entry_point(tmp_path, monkeypatch):
    module(tmp_path, "installed_plugin", "from fedsweep.plugins import *\n\nclass M(Method):\n"
           "    name = 'dp-installed'\n    title = 'Installed'\n    paper = 'none'\n"
           "    hyperparameters = (learning_rate(1),)\n"
           "    def step(self, t, theta, G, state, hypers):\n        return theta\n")  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("mine", "installed_plugin", plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == plugins.GROUP else [])
    assert methods.get("dp-installed").title == "Installed"


def test_a_worker_hears_of_them_through_its_environment():
    text = "from trainables import methods; print(methods.get('dp-heavy-ball').title)"
    plugins.use(str(EXAMPLE))
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=os.environ)
    assert found.stdout == "DP-HeavyBall\n", found.stderr


BROKEN = {
    "not there": (lambda folder: "no_such_plugin", "plug-in no_such_plugin cannot be imported: ModuleNotFoundError"),
    "no such file": (lambda folder: "nowhere.py", "plug-in nowhere.py: there is no such file"),
    "raises": (lambda folder: module(folder, "raising", "1 / 0\n"), "ZeroDivisionError"),
    "takes a name": (
        lambda folder: module(
            folder,
            "thief",
            "from trainables.methods.dp_fedgd import DPFedGD\nclass Mine(DPFedGD):\n    pass\n",
        ),
        "a method 'dp-fedgd' is there already, in trainables.methods.dp_fedgd",
    ),
    "takes a head": (
        lambda folder: module(folder, "head", "from fedsweep.plugins import head\nhead('mlp')(print)\n"),
        "a head cannot be called 'mlp'",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_plug_in_that_cannot_be_loaded_is_one_sentence(fedsweep, tmp_path, name):
    make, said = BROKEN[name]
    code, out, err = fedsweep("methods", "--import", make(tmp_path))
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


# ---- what they may do


def test_a_study_may_give_the_grid_of_a_method_that_has_none(example, tmp_path):
    grids = "{coarse: {learning_rate: [1, 2]}, fine: {learning_rate: [3]}}"
    text = "name: own\ndata: ['two-moons:200']\npartitions: [iid]\nclients: 4\n"
    text += "epsilons: [1]\ndefaults: paper\nmethods:\n  - "
    study = parse(f"{text}dp-heavy-ball: {grids}\n", "own.yaml", tmp_path)
    assert study.methods[0].space().coarse == {"learning_rate": (1.0, 2.0)}
    alone = parse(f"{text}dp-heavy-ball: {{coarse: {{learning_rate: [1, 2]}}}}\n", "own.yaml", tmp_path)
    assert alone.methods[0].space().fine == {"learning_rate": (1.0, 2.0)}, "where there is no fine grid, the coarse one"
    inside = parse(f"{text}dp-heavy-ball: {{search_space: {{coarse: {{momentum: [0.5]}}}}}}\n", "own.yaml", tmp_path)
    assert inside.methods[0].space().fine == {"momentum": (0.5,)}
    inline = parse(f"{text}dp-heavy-ball: {{search_space: {grids}}}\n", "own.yaml", tmp_path)
    assert inline.methods[0].space().coarse == study.methods[0].space().coarse
    with pytest.raises(
        UserError, match=r"own\.yaml:8: methods\.0: method 'dp-heavy-ball' has no search space; .*dp_heavy_ball\.yaml"
    ):
        parse(f"{text}dp-heavy-ball\n", "own.yaml", tmp_path)


@pytest.mark.parametrize("methods", ["[dp-fedgd]", "all"])
def test_a_file_beside_the_study_replaces_the_packaged_space(tmp_path, methods):
    (tmp_path / "dp_fedgd.yaml").write_text("coarse: {learning_rate: [7]}\nfine: {learning_rate: [8]}\n")
    (tmp_path / "study.yaml").write_text(
        f"name: beside\ndata: ['synthetic-frozen:300,60,6,3']\nepsilons: [1]\ndefaults: paper\nmethods: {methods}\n"
    )
    study, _ = load(str(tmp_path / "study.yaml"))
    (gd,) = [method for method in study.methods if method.name == "dp-fedgd"]
    assert gd.space().coarse == {"learning_rate": (7.0,)}


@pytest.mark.parametrize(
    ("content", "line", "sentence"),
    [
        ("coarse: {learning_rate: [1]}\nfine: {learning_rat: [2]}\n", 1, "'learning_rat' is in only one of"),
        ("coarse: {learning_rate: [1]}\nfine: {learning_rate: [-8]}\n", 1, "learning_rate = -8 is not in (0, inf)"),
        ("coarse: {learning_rate: [1]}\nfin: {learning_rate: [2]}\n", 2, "fin: there is no such setting"),
        ("coarse: {learning_rate: [1]\nfine: {learning_rate: [2]}\n", 2, "not valid YAML"),
    ],
)
def test_a_fault_in_a_file_beside_the_study_names_that_file(tmp_path, content, line, sentence):
    file = tmp_path / "dp_fedgd.yaml"
    file.write_text(content)
    text = "name: beside\ndata: ['synthetic-frozen:300,60,6,3']\nmethods: [dp-fedgd]\nepsilons: [1]\ndefaults: paper\n"
    with pytest.raises(UserError) as caught:
        parse(text, "study.yaml", tmp_path)
    assert str(caught.value).startswith(f"{file}:{line}: ")
    assert sentence in str(caught.value)


def test_a_changed_plug_in_is_another_method(tmp_path):
    """Its old results do not count as those of the new code; a packaged method's key knows of none."""
    text = EXAMPLE.read_text()
    keys = []
    for factor in ("", "2 * "):
        file = module(tmp_path, f"changing{len(keys)}", text.replace("return theta +", f"return theta + {factor}"))
        with temporary_plugins():
            plugins.use(file)
            study, _ = load(str(STUDY))
            _, own = (cell for cell in PreparedStudy.prepare(study).cells if cell.epsilon == 1)
            keys.append(trial_of(own, "coarse", {}).key)
            assert trial_of(own, "coarse", {}).code
    assert keys[0] != keys[1]


@pytest.mark.parametrize("fault", ["rows[:-1]", "rows + rows[:1]", "[np.concatenate(rows)]"])
def test_a_partition_that_loses_or_doubles_rows_is_refused(tmp_path, fault):
    """Privacy is accounted by record: a row that two clients have would be accounted once."""
    text = EXAMPLE.read_text().replace(
        "return list(np.array_split(order, spec.clients))",
        "rows = list(np.array_split(order, spec.clients))\n    return " + fault,
    )
    plugins.use(module(tmp_path, "careless", text))
    spec = partition.parse("by-first-feature", clients=5, seed=1)
    with pytest.raises(UserError, match="must assign each of the 480 train rows to exactly one of 5 clients"):
        partition.partition(features.load("two-moons:600"), spec)


# ---- the contract can fail


class Faulty(Method):
    name = "dp-faulty"
    title = "Faulty"
    paper = "none"
    hyperparameters = (learning_rate(0.5),)

    def step(self, t, theta, G, state, hypers):
        return theta - hypers["learning_rate"] * G


class Mixing(Faulty):
    def step(self, t, theta, G, state, hypers):
        return theta - hypers["learning_rate"] * G.mean(0, keepdim=True)


class Forgetful(Faulty):
    """Keeps its state where no checkpoint includes it."""

    def step(self, t, theta, G, state, hypers):
        self.last = G if t == 1 else self.last[: len(G)]
        return theta - hypers["learning_rate"] * self.last


class Leaky(Faulty):
    """Releases a gradient every round and owns up to one."""

    def releases(self, run):
        return (Event("gradient", 1, run.privacy.sensitivity),)


class Wild(Faulty):
    def step(self, t, theta, G, state, hypers):
        return theta + float("inf") * G


FAULTS = {
    "a lane alone": Mixing,
    "a restart from a checkpoint": Forgetful,
    "noise hides every record": Leaky,
    "runs to the last round": Wild,
}


@pytest.mark.parametrize("check", FAULTS)
def test_a_broken_method_is_found_out(monkeypatch, check):
    made = FAULTS[check]()
    monkeypatch.setitem(methods.METHODS, made.name, made)
    found = contract.run_checks(made, {}, repetitions=800)  # one check after the other, up to the one that is broken
    assert any(finding.failure and finding.check.startswith(check) for finding in found)


def test_a_step_unlike_its_twin_is_found_out(monkeypatch):
    made = Faulty()
    monkeypatch.setitem(methods.METHODS, made.name, made)
    monkeypatch.setattr(contract, "_checks", lambda *_: {})  # this one only
    twins = {
        "": lambda W, G, t, state, *, learning_rate: W - learning_rate * G,
        "differ by": lambda W, G, t, state, *, learning_rate: W - 1.001 * learning_rate * G,
    }
    for said, twin in twins.items():
        (last,) = [f for f in contract.run_checks(made, {}, twin, 200) if f.check == "steps like its reference"]
        assert (said in last.failure) if said else last.failure == ""


@pytest.mark.audits
def test_the_example_with_clients_of_its_own_keeps_the_contract():
    plugins.use(str(EXAMPLE.with_name("look_ahead.py")))
    assert [f.check for f in contract.run_checks(methods.get("dp-look-ahead"), {}, repetitions=800) if f.failure] == []


@pytest.mark.audits
def test_packaged_methods_keep_the_contract_too():
    """A quick one; tests/test_methods.py and `make audits` ask more of all of them."""
    broken = [f for f in contract.run_checks(methods.get("dp-ftrl"), {}, repetitions=800) if f.failure]
    assert broken == []


def test_a_check_is_named_before_it_runs():
    begun = []
    found = contract.run_checks(methods.get("dp-fedgd"), {}, on_start=begun.append)
    assert [next(found).check, next(found).check] == begun


def test_not_a_method(fedsweep):
    code, _, err = fedsweep("check-method", f"{EXAMPLE}:two_moons")
    assert code == 2
    assert "two_moons is not a class derived from Method" in err
    assert np.isfinite(features.load("two-moons:200").x_train).all()


def test_a_file_that_python_would_take_for_another_is_refused(tmp_path):
    """Of the standard library, or one of two with the same name: the other would be loaded, without a word."""
    with pytest.raises(UserError, match=r"queue.py: there is a module 'queue' already, .*give the file another name"):
        use(module(tmp_path, "queue", ""))
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    use(module(tmp_path / "a", "same_name", ""))
    with pytest.raises(UserError, match=r"there is a module 'same_name' already, .*/a/same_name.py"):
        use(module(tmp_path / "b", "same_name", ""))


OF_A_PACKAGE = """
from fedsweep.plugins import Event, Method, learning_rate
from trainables.methods.dp_fedgd import DPFedGD

class Mine(DPFedGD):
    name = "dp-of-a-package"
"""


def test_a_package_is_hashed_whole(tmp_path, monkeypatch):
    """Its methods may stand in its modules, and what they compute in others of them."""
    folder = tmp_path / "a_package"
    folder.mkdir()
    (folder / "inner.py").write_text(OF_A_PACKAGE)
    (folder / "helper.py").write_text("RATE = 1")
    (folder / "__init__.py").write_text("from a_package.inner import Mine")
    monkeypatch.chdir(tmp_path)
    use("a_package")
    assert type(methods.get("dp-of-a-package")).__module__ == "a_package.inner"
    before = plugins.code_hash("a_package.inner")
    assert before
    assert before == plugins.code_hash("a_package")
    (folder / "helper.py").write_text("RATE = 2")
    plugins.code_hash.cache_clear()
    assert plugins.code_hash("a_package.inner") != before
    assert plugins.code_hash("a_packages_neighbour") == ""
    for name in ("a_package.inner", "a_package"):
        sys.modules.pop(name)


HEAD = """
from fedsweep.plugins import head
from trainables.models.mlp import MLPHead

@head("one-layer")
def one_layer(argument, features, classes):
    return MLPHead(features, int(argument), classes)
"""


def test_a_head_of_ones_own_is_trained_and_is_what_it_says(no_ray, tmp_path):
    """By its name with what stands behind the colon; the same weights as the packaged head that it is made of."""
    use(module(tmp_path, "own_head", HEAD))
    same = {"method": "dp-fedgd", "epsilon": 8, "hyperparameters": {"learning_rate": 1}, "clients": 4, "rounds": 2}
    own, packaged = (
        face.train("synthetic-frozen:400,100,6,3", model=model, evaluate_every=2, hosts=1, **same)
        for model in ("one-layer:5", "mlp:5")
    )
    assert own.state == "done"
    assert np.array_equal(own.weights, packaged.weights)
    assert own.key != packaged.key


def test_a_packaged_study_takes_no_grid_from_where_somebody_stands(tmp_path, monkeypatch):
    before, _ = load("quickstart")
    (tmp_path / "dp_fedgd.yaml").write_text("coarse: {learning_rate: [7]}\nfine: {learning_rate: [7]}\n")
    monkeypatch.chdir(tmp_path)
    assert load("quickstart")[0] == before


# ---- which methods a module has


def module_with(name: str, **content) -> types.ModuleType:
    """One that defines these classes itself, or has them from elsewhere (`__module__` says where)."""
    made = types.ModuleType(name)
    vars(made).update(content)
    return made


def method_of(module: str, called: str, base=methods.METHODS["dp-fedgd"].__class__) -> type[Method]:
    return type(called, (base,), {"name": called.lower(), "__module__": module})


def test_a_module_s_methods_are_those_it_defines_and_can_be_made():
    """Not what it has imported, not an outline that lacks its half, not a class of another kind; a package has those of
    its own modules, but not those of one whose name only begins like its own."""
    here, within, beside = (method_of(where, word) for where, word in (("a", "One"), ("a.b", "Two"), ("ab", "Three")))
    outline = type("Outline", (Method,), {"name": "outline", "__module__": "a"})
    other = type("Other", (), {"__module__": "a"})
    imported = methods.METHODS["dp-fedadam"].__class__
    content = {c.__name__: c for c in (here, within, beside, outline, other, imported)}
    found = methods.defined_in(module_with("a", **content, number=3))
    assert [type(method) for method in found] == [here, within]


def test_a_name_is_taken_once():
    """Again by the same class it is the same method, as when a module is loaded twice; by another it is refused."""
    first, again = method_of("a", "Mine"), method_of("b", "Mine")
    with temporary_plugins():
        methods.add_all(module_with("a", Mine=first))
        assert type(methods.METHODS["mine"]) is first
        methods.add_all(module_with("a", Mine=first))
        with pytest.raises(UserError, match=r"plug-in b: a method 'mine' is there already, in a$"):
            methods.add_all(module_with("b", Mine=again))
        assert type(methods.METHODS["mine"]) is first
    assert "mine" not in methods.METHODS

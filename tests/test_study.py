"""Study files: what they mean, what is wrong with them (file and line), and how a result folder's study may grow."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from pydantic import BaseModel
from repository_files import REPOSITORY

from orchestrator.study import extension
from orchestrator.study.advice import advice
from orchestrator.study.cells import Blueprint
from orchestrator.study.extension import check_extension, keep_reference
from orchestrator.study.reading import changed_resources, load, packaged, parse, with_located_data
from orchestrator.study.settings.method import MethodSettings
from orchestrator.study.settings.resources import ResourceSettings
from orchestrator.study.settings.seeds import SeedSettings
from orchestrator.study.study import Study
from trainables.errors import UserError
from trainables.methods import METHODS

TEXT = """\
name: tiny
data: ["synthetic-frozen:400,100,6,3"]
partitions: [iid]
clients: 4
methods:
  - dp-fedgd
  - dp-fedsofim:
      fixed:
        beta: 0.9
epsilons:
  - 1
  - 8
seeds:
  confirm: [42, 7]
"""


def read(text: str, file: str = "tiny.yaml") -> Study:
    return parse(text, file, Path("/nowhere"))


def with_data(folder: Path, source: str, text: str = TEXT) -> Study:
    """The study as if its file lay in `folder`, with other data."""
    return parse(text.replace("synthetic-frozen:400,100,6,3", source), "tiny.yaml", folder)


def feature_file(path: Path, rows: int = 60) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(rows)
    arrays = {"x_train": rng.random((rows, 3)), "y_train": np.arange(rows) % 2}
    np.savez(path, **arrays, x_test=rng.random((20, 3)), y_test=np.arange(20) % 2)
    return path


# ---- what a study means


def test_packaged_studies_load():
    assert {"quickstart", "paper-cifar10-resnet20"} <= set(packaged())
    for name in packaged():
        study, text = load(name)
        assert study.name == name
        assert yaml.safe_load(text)["name"] == name


def test_quickstart_is_the_study_that_the_readme_promises():
    study, _ = load("quickstart")
    strategies = ["DP-FedGD", "DP-FedSOFIM", "DP-FedGD, centred, size-weighted", "DP-FedSOFIM, centred, size-weighted"]
    assert [method.shown for method in study.methods] == strategies
    assert study.epsilons == [1, 10]
    assert [data.label for data in study.data] == ["synthetic-frozen"]
    assert study.search.select == ["contest"]
    assert study.seeds == SeedSettings(), "smaller in rows and grids, never in seeds"
    for page in ("README.md", "docs/first-study.md"):
        rows = re.findall(r"^\| (DP-\S.*?) *\|(.*)\|(.*)\|$", (REPOSITORY / page).read_text(), re.M)
        assert [name for name, _, _ in rows] == strategies, page
        for name, *cells in rows:
            less, more = (float(cell.strip(" *").split(" ± ")[0]) for cell in cells)
            assert less < more, f"{page}: {name} does worse with more privacy budget"


def test_the_paper_s_study_is_the_paper_s_search():
    """9 methods, 4 budgets, about 7,600 trials: 4 x (1063 coarse + 850 fine) = 7652."""
    study, _ = load("paper-cifar10-resnet20")
    names = "fedgd fedavg fedfc scaffold fedadam fedyogi ftrl adafedprox fedsofim"
    assert [method.name for method in study.methods] == [f"dp-{name}" for name in names.split()]
    assert study.epsilons == [0.5, 1, 5, 10]
    spaces = [method.space() for method in study.methods]
    coarse, fine = (sum(len(s.grid(axes(s))) for s in spaces) for axes in (lambda s: s.coarse, lambda s: s.fine))
    assert (coarse, fine) == (1063, 850)


def test_defaults_are_those_of_the_paper():
    study = read("name: x\ndata: [synthetic-frozen]\nmethods: all\nepsilons: [1]\n")
    assert len(study.methods) == len(METHODS)
    assert (study.rounds.coarse, study.rounds.fine, study.rounds.confirm) == (50, 50, 70)
    assert (study.clients, study.partitions) == (20, ["dirichlet:0.5"])
    assert (study.privacy.delta, study.privacy.clip) == (1e-5, 10)
    assert (study.privacy.release, study.privacy.adjacency) == ("local", "replace-one")
    assert study.search.strategies == ["grid"]
    assert study.resources.lanes_per_pack == "auto"


def test_a_winner_is_chosen_on_other_seeds_than_those_that_confirm_it():
    """By default; the studies that reproduce papers say that they do as those do."""
    study = read("name: x\ndata: [synthetic-frozen]\nmethods: all\nepsilons: [1]\n")
    seeds = [*study.seeds.search, *study.seeds.contest, *study.seeds.confirm]
    assert (len(study.seeds.search), len(study.seeds.contest), len(study.seeds.confirm)) == (3, 5, 5)
    assert len(set(seeds)) == len(seeds)
    assert (study.search.select, study.search.refine, study.search.finalists) == (["contest"], "zoom", 8)
    for name in packaged():
        if name.startswith("paper") or name == "m-estimation":
            paper, _ = load(name)
            assert (paper.search.select, paper.search.refine, len(paper.seeds.search)) == (["single"], "table", 1)


def test_one_search_seed_may_stand_without_brackets():
    assert read(TEXT.replace("seeds:", "seeds:\n  search: 5")).seeds.search == [5]


def test_a_method_may_be_a_name_or_a_name_with_changes():
    study = read(TEXT)
    assert [method.shown for method in study.methods] == ["DP-FedGD", "DP-FedSOFIM"]
    assert study.methods[1].fixed == {"beta": 0.9}
    assert "beta" not in study.methods[1].space().coarse
    assert read(TEXT.replace("- dp-fedgd", "- dp-fedgd:")).methods == study.methods


def test_two_variants_of_a_method_are_told_apart_by_a_label():
    study = read(TEXT.replace("  - dp-fedgd\n", "  - dp-fedsofim: {label: published, fixed: {direction: gradient}}\n"))
    assert [method.shown for method in study.methods] == ["published", "DP-FedSOFIM"]


def test_who_is_compared_to():
    assert read(TEXT).reference.name == "dp-fedsofim", "the last one, unless the study says otherwise"
    assert read(TEXT + "compare_to: dp-fedgd\n").reference.name == "dp-fedgd"
    assert read(TEXT + "compare_to: DP-FedGD\n").reference.name == "dp-fedgd"


def test_the_non_private_arm_survives_the_ledger():
    study = read(TEXT.replace("- 8", "- .inf"))
    again = Study.model_validate_json(study.model_dump_json())
    assert again == study
    assert again.epsilons[1] == math.inf


# ---- what is wrong with it


def changed(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new)


WRONG = {
    "unknown key": (TEXT + "epsilon: 3\n", 15, "epsilon", "no such setting; did you mean epsilons?"),
    "unknown key, deeper": (
        TEXT + "rounds:\n  coarse: 5\n  middle: 5\n",
        17,
        "rounds.middle",
        "there is no such setting",
    ),
    "key of another section": (TEXT + "delta: 1.0e-6\n", 15, "delta", "did you mean privacy.delta?"),
    "unknown method": (
        changed("- dp-fedgd", "- dp-nope"),
        6,
        "methods.0",
        "'dp-nope' is unknown; --import MODULE loads a plug-in's, else choose one of: dp-ada",
    ),
    "method of a wrong kind": (
        changed("- dp-fedgd", "- 5"),
        6,
        "methods.0",
        "it should be the name of a method, or one name with its changes (found 5)",
    ),
    "two methods in one": (
        changed("- dp-fedgd", "- {dp-fedgd: {}, dp-fedavg: {}}"),
        6,
        "methods.0",
        "or one name with its changes",
    ),
    "data of a wrong kind": (
        changed('["synthetic-frozen', '[5, "synthetic-frozen'),
        2,
        "data.0",
        "it should be a feature file or a generated set, or a mapping with its source (found 5)",
    ),
    "changes of a wrong kind": (changed("- dp-fedgd", "- dp-fedgd: 5"), 6, "methods.0", "5"),
    "unknown hyperparameter": (changed("beta", "gamma"), 7, "methods.1", "has no hyperparameter 'gamma'"),
    "hyperparameter out of range": (changed("0.9", "1.5"), 7, "methods.1", "beta = 1.5 is not in [0, 1)"),
    "hyperparameter of a wrong kind": (changed("0.9", "[0.9]"), 9, "methods.1.fixed.beta", "should be a number"),
    "axis that is no list": (changed("fixed:", "coarse:"), 9, "methods.1.coarse.beta", "list (found 0.9)"),
    "method named twice": (
        changed("- dp-fedgd", "- dp-fedsofim"),
        7,
        "methods.1",
        "DP-FedSOFIM is named twice",
    ),
    "epsilon is no number": (changed("- 8", "- much"), 12, "epsilons.1", "(found 'much')"),
    "epsilon 0": (changed("- 8", "- 0"), 10, "epsilons", "epsilon 0 is not above 0"),
    "epsilon nan": (changed("- 8", "- .nan"), 10, "epsilons", "epsilon nan is not above 0"),
    "epsilon twice": (changed("- 8", "- 1.0"), 10, "epsilons", "named twice"),
    "no epsilons": (changed("epsilons:\n  - 1\n  - 8\n", ""), 1, "epsilons", "it is missing"),
    "a key that must be there, misspelt": (changed("epsilons:", "epsilon:"), 10, "epsilon: ", "did you mean epsilons?"),
    "the same, cut short": (changed("epsilons:", "eps:"), 10, "eps: ", "did you mean epsilons?"),
    "the same, deeper": (
        changed('["synth', '[{sorce: "synth').replace('6,3"]', '6,3"}]'),
        2,
        "data.0.sorce",
        "data.source?",
    ),
    "clients is no number": (
        changed("clients: 4", "clients: four"),
        4,
        "clients",
        "a whole number or 'auto' (found 'four')",
    ),
    "no clients": (changed("clients: 4", "clients: 0"), 4, "clients", "(found 0)"),
    "seed in search and contest": (
        changed("seeds:", "seeds:\n  search: [1, 11]"),
        13,
        "seeds",
        "seed 11 is both a search and a contest seed",
    ),
    "seeds twice": (changed("[42, 7]", "[42, 42]"), 14, "seeds.confirm", "[42, 42] must be distinct"),
    "delta": (TEXT + "privacy:\n  delta: 1\n", 16, "privacy.delta", "less than 1 (found 1)"),
    "release": (TEXT + "privacy:\n  release: central\n", 16, "privacy.release", "'local' or 'secure-aggregation'"),
    "strategy": (
        TEXT + "search:\n  strategies: [grid, luck]\n",
        16,
        "search.strategies",
        "strategy 'luck' is unknown",
    ),
    "lanes": (TEXT + "resources:\n  lanes_per_pack: 0\n", 16, "resources.lanes_per_pack", "0 is less than 1"),
    "lanes in words": (TEXT + "resources:\n  lanes_per_pack: many\n", 16, "resources.lanes_per_pack", "found 'many'"),
    "rounds": (TEXT + "rounds: 50\n", 15, "rounds", "(found 50)"),
    "comparison": (TEXT + "compare_to: dp-ftrl\n", 15, "compare_to", "'dp-ftrl' is none of the methods: DP-FedGD"),
    "partition": (changed("[iid]", "\n  - iid\n  - idd"), 5, "partitions.1", "'idd' is unknown"),
    "budget in mu": (changed("- 8", "- mu=much"), 12, "epsilons.1", "budget 'mu=much'"),
    "rungs": (TEXT + "search:\n  halving:\n    rungs: 9\n", 17, "search.halving.rungs", "found 9"),
    "YAML: bracket": (changed("[42, 7]", "[42, 7"), 15, "", "not valid YAML: "),
    "YAML: tab": (changed("  - 8", "\t- 8"), 12, "", "not valid YAML: "),
    "YAML: alias": (changed("- 8", "- *eight"), 12, "", "undefined alias 'eight'"),
    "YAML: code": (changed("- 8", "- !!python/object/apply:os.getcwd []"), 12, "", "not valid YAML"),
    "YAML: an alias of itself": (changed("- 8", "- &own [*own]"), 12, "", "an alias stands for what it is part of"),
    "YAML: two documents": (TEXT + "---\nname: more\n", 15, "", "another document"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_are_refused_with_file_and_line(name):
    text, line, key, sentence = WRONG[name]
    with pytest.raises(UserError) as caught:
        read(text)
    message = str(caught.value)
    assert message.startswith(f"tiny.yaml:{line}: {key}"), message
    assert sentence in message
    assert "\n" not in message


FOUND_LATER = {
    "data that are not there": (
        changed('["synthetic-frozen:400,100,6,3"]', "\n  - gone.npz"),
        3,
        "data 'gone.npz' was found neither",
    ),
    "more clients than rows": (changed("clients: 4", "clients: 500").replace("iid", "\n  iid"), 4, "clients = 500"),
    "more classes than there are": (changed("[iid]", "\n  - iid\n  - classes:9"), 5, "the data has only 3 classes"),
    "clients that the data do not name": (changed("[iid]", "[explicit]"), 3, "has no client_train column"),
    "head": (TEXT + "model: logistic\n", 15, "model = 'logistic' is for two classes"),
    "validation": (TEXT + "validation:\n  fraction: 1.0e-9\n", 16, "leaves no validation row"),
    "objective": (TEXT + "objective: squared_error\n", 15, "has no truth"),
    "method": (changed("- dp-fedgd", "- dp-ftrl") + "privacy: {level: user}\n", 6, "dp-ftrl protects record level"),
}


@pytest.mark.parametrize("name", FOUND_LATER)
@pytest.mark.parametrize("command", ["run", "plan"])
def test_what_is_found_once_data_are_there_has_file_and_line_too(name, command, tmp_path, fedsweep):
    text, line, sentence = FOUND_LATER[name]
    (tmp_path / "tiny.yaml").write_text(text)
    results = ["--results", tmp_path / "results"] if command == "run" else []
    code, out, err = fedsweep(command, tmp_path / "tiny.yaml", *results)
    assert (code, out) == (2, "")
    assert err.startswith(f"fedsweep: {tmp_path}/tiny.yaml:{line}: "), err
    assert sentence in err
    assert err.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_what_has_no_effect_is_said(tmp_path, fedsweep):
    fine = "- dp-fedgd: {fine: {learning_rate: [1, 2]}}"
    (tmp_path / "tiny.yaml").write_text(changed("- dp-fedgd", fine) + "evaluate_every: 60\n")
    code, out, _ = fedsweep("plan", tmp_path / "tiny.yaml")
    assert code == 0
    assert "note: the fine grid of DP-FedGD is not used: search.refine = 'zoom'" in out
    assert (
        "note: evaluate_every = 60 is more than the rounds of DP-FedGD, DP-FedSOFIM: only the last round is evaluated"
        in out
    )
    assert advice(read(TEXT)) == []
    assert advice(read(changed("- dp-fedgd", fine) + "search: {refine: table}\n")) == []
    assert advice(read(changed("- dp-fedgd", fine) + "search: {strategies: [grid, random]}\n")) == [], (
        "ranges come of both"
    )


@pytest.mark.parametrize("name", ["a[b", "float", "["])
def test_a_setting_is_called_by_its_name_whatever_that_looks_like(name):
    """Also where it looks like what the checker calls a part of its own."""
    with pytest.raises(UserError, match=f"{re.escape(name)}: there is no such setting"):
        read(TEXT + f"{json.dumps(name)}: 3\n")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "a study is a mapping of settings, this is NoneType"),
        ("- a\n- b\n", "a study is a mapping of settings, this is list"),
        ("name: \x00\n", "not valid YAML"),  # the reader of characters, which knows no lines
        ("name: 2026-13-41\n", "not valid YAML: month must be in 1..12"),
        ("clients: 1" + 5000 * "0" + "\n", "not valid YAML: Exceeds the limit"),
        (5000 * "[", "not valid YAML: it is nested without end"),
    ],
)
def test_what_is_no_study_at_all(text, sentence):
    with pytest.raises(UserError, match=rf"^tiny\.yaml: {sentence}") as caught:
        read(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("item", ["[{}]", "{{<<: [{}]}}"], ids=["lists", "merged mappings"])
def test_a_few_aliases_cannot_stand_for_billions_of_values(item):
    """Written out, level 12 has 9^12 values: it is refused by counting, not by trying."""
    levels = ["a0: &a0 {x: 1}"]
    levels += [f"a{n}: &a{n} " + item.format(", ".join([f"*a{n - 1}"] * 9)) for n in range(1, 13)]
    with pytest.raises(UserError, match=r"^tiny\.yaml: with its aliases written out it holds more than 200000 values$"):
        read("\n".join(levels))


def test_aliases_are_welcome():
    text = changed("  - dp-fedgd\n", "  - dp-fedgd: &fine {fine: {learning_rate: [1, 2]}}\n  - dp-fedyogi: *fine\n")
    assert [method.fine for method in read(text).methods[:2]] == [{"learning_rate": [1, 2]}] * 2


def test_a_grid_that_nobody_can_run_is_refused_by_its_size():
    axis = str([round(0.01 + k / 1000, 3) for k in range(990)])
    text = changed("- dp-fedgd", f"- dp-fedadam: {{coarse: {{learning_rate: {axis}, beta1: {axis}, tau: {axis}}}}}")
    with pytest.raises(UserError, match=r"^tiny\.yaml:6: methods\.0: the coarse grid of dp-fedadam has \d{9,} conf"):
        read(text)


def test_the_reference_of_comparisons_stays_when_methods_join():
    old, more = read(TEXT), read(changed("epsilons:", "  - dp-ftrl\nepsilons:"))
    assert (old.reference.shown, more.reference.shown) == ("DP-FedSOFIM", "DP-FTRL")
    kept = keep_reference(old, more)
    assert kept.reference.shown == "DP-FedSOFIM"
    assert keep_reference(kept, more) == kept, "the same file again changes nothing"
    said = read(changed("epsilons:", "  - dp-ftrl\ncompare_to: dp-ftrl\nepsilons:"))
    assert keep_reference(old, said) == said, "a study that says it decides"
    assert keep_reference(old, old) == old


MEANINGLESS = {
    "unknown partition": (changed("[iid]", "[idd]"), "idd"),
    "partition twice": (changed("[iid]", '["dirichlet:0.5", "dirichlet:.5"]'), "dirichlet"),
    "key twice": (TEXT + "clients: 5\n", "clients"),
    "seed that no generator takes": (TEXT.replace("seeds:", f"seeds:\n  search: {2**64}"), "search"),
    "clip without end": (TEXT + "privacy: {clip: .inf}\n", "clip"),
    "a ladder of one rung": (TEXT + "search: {halving: {rungs: 1}}\n", "1"),
    "a rung of which all go on": (TEXT + "search: {halving: {keep: 1}}\n", "1"),
}


@pytest.mark.parametrize("name", MEANINGLESS)
def test_settings_that_cannot_be_meant_are_refused_before_anything_runs(name):
    text, culprit = MEANINGLESS[name]
    with pytest.raises(UserError, match=re.escape(culprit)):
        Blueprint.draw(read(text))


def test_two_data_sets_of_one_name_are_refused(tmp_path):
    """Their cells would have the same names, and the second one's trials would be lost."""
    feature_file(tmp_path / "one" / "features.npz", rows=60)
    feature_file(tmp_path / "two" / "features.npz", rows=80)
    with pytest.raises(UserError, match="two data sets are called 'features'; give one of them a label"):
        with_data(tmp_path, 'one/features.npz", "two/features.npz')


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/x", "a/b", "..", ".hidden", "", "a\\b", "x" * 65, "a b", "a\n", "-x"]
)
def test_names_cannot_leave_the_result_folder(name):
    """The default result folder is results/NAME."""
    with pytest.raises(UserError, match=r"^tiny\.yaml:1: name: "):
        read(TEXT.replace("name: tiny", f"name: {json.dumps(name)}"))


def test_files_that_cannot_be_read(tmp_path):
    missing = tmp_path / "missing.yaml"
    with pytest.raises(UserError, match=r"^study file .*missing\.yaml cannot be read: No such file or directory$"):
        load(str(missing))
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("name: \xfcbung\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.yaml cannot be read: it is not UTF-8 text$"):
        load(str(latin))
    with pytest.raises(UserError, match=r"^study 'quickstrat' is neither a file nor a packaged study \(.*quickstart"):
        load("quickstrat")


# ---- where the data is


def test_data_lies_beside_the_study_file(tmp_path, monkeypatch):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    feature_file(here / "data" / "features.npz")
    (here / "tiny.yaml").write_text(TEXT.replace("synthetic-frozen:400,100,6,3", "data/features.npz"))
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    study, _ = load(str(here / "tiny.yaml"))
    assert study.data[0].source == str(here / "data" / "features.npz"), "whole, so that it can be resumed from anywhere"
    assert Blueprint.draw(study).cells[0].setting.name == "features / iid"


def test_data_is_looked_for_in_order(tmp_path, monkeypatch):
    """Beside the study file, then in the current folder, then in $FEDSWEEP_DATA."""
    places = [tmp_path / name for name in ("beside", "current", "environment")]
    for place in places:
        feature_file(place / "features.npz")
    monkeypatch.chdir(places[1])
    monkeypatch.setenv("FEDSWEEP_DATA", str(places[2]))
    for place in places:
        study = with_data(places[0], "features.npz")
        assert study.data[0].source == str(place / "features.npz")
        (place / "features.npz").unlink()
    study = with_data(places[0], "features.npz")
    sentence = r"data 'features\.npz' was found neither next to the study, nor in the current folder, nor in "
    with pytest.raises(UserError, match=sentence):
        Blueprint.draw(study)


def test_a_study_that_was_run_elsewhere_finds_its_data_again(tmp_path, monkeypatch):
    """The ledger has the path that the file had on the other machine."""
    feature_file(tmp_path / "there" / "features.npz")
    study = with_data(tmp_path / "there", "features.npz")
    assert with_located_data(study) == study
    (tmp_path / "here").mkdir()
    (tmp_path / "there" / "features.npz").rename(tmp_path / "here" / "features.npz")
    assert with_located_data(study) == study, "nowhere: the sentence names the path that it had"
    monkeypatch.setenv("FEDSWEEP_DATA", str(tmp_path / "here"))
    again = with_located_data(study)
    assert again.data[0].source == str(tmp_path / "here" / "features.npz")
    check_extension(study, again)


def test_a_study_file_may_be_a_url(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TEXT)
    study, text = load(f"file://{tmp_path}/tiny.yaml")
    assert (study.name, text) == ("tiny", TEXT)
    with pytest.raises(UserError, match=r"^study file file:///nowhere/x\.yaml cannot be read: .*No such file"):
        load("file:///nowhere/x.yaml")
    with pytest.raises(UserError, match=r"^study file nonsense://x\.yaml cannot be read: .*nonsense"):
        load("nonsense://x.yaml")


def test_a_packaged_study_finds_its_data(tmp_path, monkeypatch):
    feature_file(tmp_path / "cifar10-resnet20.npz")
    monkeypatch.setenv("FEDSWEEP_DATA", str(tmp_path))
    study, _ = load("paper-cifar10-resnet20")
    assert study.data[0].source == str(tmp_path / "cifar10-resnet20.npz")


# ---- how a folder's study may grow


EXTENSIONS = {
    "the same again": TEXT,
    "an epsilon": changed("- 8", "- 8\n  - 0.5"),
    "epsilons in another order": changed("  - 1\n  - 8\n", "  - 8\n  - 1\n  - 3\n"),
    "a method": changed("- dp-fedgd", "- dp-fedgd\n  - dp-ftrl"),
    "a partition": changed("[iid]", "[iid, 'dirichlet:0.5']"),
    "data": changed("6,3", '6,3", "synthetic-frozen:500,100,6,3'),
    "a confirm seed": changed("[42, 7]", "[42, 7, 1]"),
    "a way of searching": TEXT + "search: {strategies: [grid, optuna]}\n",
    "resources": TEXT + "resources: {hosts: 1, lanes_per_pack: 7}\n",
    "who is compared to": TEXT + "compare_to: dp-fedgd\n",
    "its description": TEXT + "description: The same, in other words.\n",
}


@pytest.mark.parametrize("name", EXTENSIONS)
def test_what_extends_a_study(name):
    check_extension(read(TEXT), read(EXTENSIONS[name]))


LOST = {
    "an epsilon": (changed("  - 1\n", ""), "epsilons 1.0"),
    "a method": (changed("  - dp-fedgd\n", ""), "methods 'dp-fedgd'"),
    "a method's search space": (
        changed("0.9", "0.8"),
        "the study has methods 'dp-fedsofim'.fixed.beta = 0.8, the folder was made with 0.9",
    ),
    "a partition": (changed("[iid]", "['dirichlet:0.5']"), "partitions 'iid'"),
    "a confirm seed": (changed("[42, 7]", "[42]"), "seeds.confirm 7"),
    "the order of confirm seeds": (changed("[42, 7]", "[1, 42, 7]"), "confirm must come after the old ones, [42, 7]"),
    "the data": (changed("400", "500"), "data"),
}
HELD = {  # setting: how it is changed, and what the refusal says of before and after
    "name": (changed("name: tiny", "name: other"), "'other'", "'tiny'"),
    "clients": (changed("clients: 4", "clients: 5"), 5, 4),
    "privacy.delta": (TEXT + "privacy: {delta: 0.001}\n", 0.001, 1e-05),
    "privacy.clip": (TEXT + "privacy: {clip: 1}\n", 1.0, 10.0),
    "privacy.clipping": (TEXT + "privacy: {clipping: automatic}\n", "'automatic'", "'plain'"),
    "privacy.secret_participation": (TEXT + "privacy: {secret_participation: 0.5}\n", 0.5, 1.0),
    "privacy.release": (TEXT + "privacy: {release: secure-aggregation}\n", "'secure-aggregation'", "'local'"),
    "privacy.adjacency": (TEXT + "privacy: {adjacency: zero-out}\n", "'zero-out'", "'replace-one'"),
    "privacy.level": (TEXT + "privacy: {level: user}\n", "'user'", "'record'"),
    "preprocess.center": (TEXT + "preprocess: {center: 0.02}\n", 0.02, 0.0),
    "preprocess.bound": (TEXT + "preprocess: {bound: 3}\n", 3.0, 16.0),
    "aggregate": (TEXT + "aggregate: size\n", "'size'", "'uniform'"),
    "precision": (TEXT + "precision: bf16\n", "'bf16'", "'float32'"),
    "model": (TEXT + "model: mlp:8\n", "'mlp:8'", "'softmax'"),
    "objective": (TEXT + "objective: loss\n", "'loss'", "'accuracy'"),
    "rounds.coarse": (TEXT + "rounds: {coarse: 60}\n", 60, 50),
    "rounds.fine": (TEXT + "rounds: {fine: 60}\n", 60, 50),
    "rounds.confirm": (TEXT + "rounds: {confirm: 80}\n", 80, 70),
    "seeds.search": (TEXT.replace("seeds:", "seeds:\n  search: 1"), [1], [1, 2, 3]),
    "seeds.contest": (TEXT.replace("seeds:", "seeds:\n  contest: [8]"), [8], [11, 12, 13, 14, 15]),
    "search.finalists": (TEXT + "search: {finalists: 4}\n", 4, 8),
    "search.warm_start": (TEXT + "search: {warm_start: true}\n", True, False),
    "seeds.partition": (TEXT.replace("seeds:", "seeds:\n  partition: 1"), 1, 42),
    "evaluate_every": (TEXT + "evaluate_every: 5\n", 5, 10),
    "validation.fraction": (TEXT + "validation: {fraction: 0.2}\n", 0.2, 0.1),
    "validation.seed": (TEXT + "validation: {seed: 1}\n", 1, 42),
    "confirm_train_on": (TEXT + "confirm_train_on: train\n", "'train'", "'all'"),
    "search.refine": (TEXT + "search: {refine: table}\n", "'table'", "'zoom'"),
    "search.trials": (TEXT + "search: {trials: 9}\n", 9, None),
    "search.random.seed": (TEXT + "search: {random: {seed: 1}}\n", 1, 42),
    "search.private.runs": (TEXT + "search: {private: {runs: logarithmic}}\n", "'logarithmic'", "'geometric'"),
    "search.private.score": (TEXT + "search: {private: {score: 0.5}}\n", 0.5, 1.0),
    "search.optuna.batch": (TEXT + "search: {optuna: {batch: 8}}\n", 8, 16),
    "search.optuna.seed": (TEXT + "search: {optuna: {seed: 1}}\n", 1, 42),
    "search.halving.rungs": (TEXT + "search: {halving: {rungs: 4}}\n", 4, 3),
    "search.halving.keep": (TEXT + "search: {halving: {keep: 0.5}}\n", 0.5, 1 / 3),
    "search.halving.seed": (TEXT + "search: {halving: {seed: 1}}\n", 1, 42),
}


@pytest.mark.parametrize("name", LOST)
def test_a_study_that_loses_something_is_refused(name):
    text, reason = LOST[name]
    with pytest.raises(UserError, match=re.escape(reason)) as caught:
        check_extension(read(TEXT), read(text))
    assert str(caught.value).endswith("choose another folder")


@pytest.mark.parametrize("name", HELD)
def test_a_changed_setting_is_refused_with_what_it_was(name):
    text, after, before = HELD[name]
    with pytest.raises(UserError) as caught:
        check_extension(read(TEXT), read(text))
    assert str(caught.value) == (
        f"the study has {name} = {after}, the folder was made with {before}; choose another folder"
    )


def test_there_is_a_case_for_every_setting():
    """Whoever adds a setting says here whether it is held; what it is not is written down in the program."""
    free = {"description", "compare_to", "resources"}
    assert set(_settings("", Study)) - free == set(HELD) | set(extension.GROWING)


def _settings(path: str, model: type) -> Iterator[str]:
    for name, field in model.model_fields.items():
        parts = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        if parts and name != "resources":
            yield from _settings(f"{path}{name}.", field.annotation)
        else:
            yield f"{path}{name}"


def test_a_method_that_gets_a_grid_of_its_own_is_named_with_it():
    """The packaged one had it; it is not that the method has gone."""
    own = TEXT.replace("- dp-fedgd\n", "- dp-fedgd: {coarse: {learning_rate: [1, 2]}}\n")
    assert own != TEXT
    with pytest.raises(
        UserError, match=r"methods 'dp-fedgd'\.coarse\.learning_rate = \[1\.?0?, 2\.?0?\], the folder was"
    ):
        check_extension(read(TEXT), read(own))


def test_a_data_file_may_move(tmp_path):
    """That its content is the same is for the ledger to check, by its hash."""
    old = with_data(tmp_path, str(feature_file(tmp_path / "old" / "features.npz")))
    new = with_data(tmp_path, str(feature_file(tmp_path / "new" / "features.npz")))
    check_extension(old, new)


def test_what_runs_as_released_is_marked_whatever_its_label():
    released = MethodSettings.model_validate({"dp-ftrl": {"label": "Tree", "fixed": {"as_released": True}}})
    assert released.shown == "Tree (as released)"
    assert MethodSettings.model_validate("dp-ftrl").shown == "DP-FTRL"


def test_a_long_value_is_shortened_in_the_refusal():
    axis = ", ".join(f"0.{number}" for number in range(1, 61))
    long = read(TEXT.replace("- dp-fedgd\n", f"- dp-fedgd: {{coarse: {{learning_rate: [{axis}]}}}}\n"))
    with pytest.raises(UserError) as caught:
        check_extension(read(TEXT), long)
    assert len(str(caught.value)) < 250


# ---- resources for one run


def test_resources_of_a_run_replace_those_of_the_study():
    given = ResourceSettings(hosts=2, lanes_per_pack=7)
    assert changed_resources(given, []) == given
    changed = changed_resources(given, ["hosts=auto", "placement=spread", "gpus_per_host=0.5"])
    assert changed == ResourceSettings(hosts="auto", lanes_per_pack=7, placement="spread", gpus_per_host=0.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hosts", "it should be a whole number"),
        ("hosts=none", "it should be a whole number"),
        ("hosts=0", "0 is less than 1"),
        ("placement=far", "it should be 'pack' or 'spread'"),
        ("rounds=5", "is not KEY=VALUE with a key of: hosts, gpus_per_host, lanes_per_pack"),
    ],
)
def test_bad_resources_are_named(text, said):
    with pytest.raises(UserError, match=rf"^resource '{text}'.*{re.escape(said)}"):
        changed_resources(ResourceSettings(), [text])


FTRL = "name: x\ndata: [synthetic-frozen]\nepsilons: [1]\nmethods:\n  - dp-ftrl: "


@pytest.mark.parametrize("given", ["true", '"true"'])
def test_what_runs_as_released_is_always_marked(given):
    study = read(f"{FTRL}{{fixed: {{as_released: {given}}}}}\n")
    assert study.methods[0].shown == "DP-FTRL (as released)"


def test_as_released_is_not_searched_over():
    with pytest.raises(UserError, match="as_released"):
        read(f"{FTRL}{{coarse: {{as_released: [true, false]}}}}\n")


def test_a_study_whose_plug_in_is_not_loaded_is_not_called_damaged():
    text = "name: away\ndata: [synthetic-frozen]\nmethods: [dp-fedgd]\nepsilons: [1]\n"
    kept = parse(text, "away.yaml", Path()).model_dump_json()
    assert Study.recorded(kept).methods[0].name == "dp-fedgd"
    with pytest.raises(UserError, match=r"cannot be read without its plug-ins: method 'dp-away' is unknown.*--import"):
        Study.recorded(kept.replace("dp-fedgd", "dp-away"))

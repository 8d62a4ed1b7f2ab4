"""Study files: their meaning, errors with file and line, and how the study of a results folder can be extended."""

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
from orchestrator.study.cells import PreparedStudy
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
      fixed: {beta: 0.9}
defaults: paper
epsilons:
  - 1
  - 8
seeds:
  confirm: [42, 7]
"""


def read(text: str, file: str = "tiny.yaml") -> Study:
    return parse(text, file, Path("/nowhere"))


def with_data(folder: Path, source: str, text: str = TEXT) -> Study:
    """The study as if its file were in `folder`, with other data."""
    return parse(text.replace("synthetic-frozen:400,100,6,3", source), "tiny.yaml", folder)


def feature_file(path: Path, rows: int = 60) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(rows)
    arrays = {"x_train": rng.random((rows, 3)), "y_train": np.arange(rows) % 2}
    np.savez(path, **arrays, x_test=rng.random((20, 3)), y_test=np.arange(20) % 2)
    return path


# ---- valid studies


def test_packaged_studies_load():
    assert {"quickstart", "paper-cifar10-resnet20"} <= set(packaged())
    for name in packaged():
        study, text = load(name)
        assert study.name == name
        assert yaml.safe_load(text)["name"] == name


def test_quickstart_matches_the_documentation():
    study, _ = load("quickstart")
    methods = ["DP-FedGD", "DP-FedSOFIM", "DP-FedGD, centred, size-weighted", "DP-FedSOFIM, centred, size-weighted"]
    assert [method.shown for method in study.methods] == methods
    assert study.epsilons == [1, 10]
    assert [data.label for data in study.data] == ["synthetic-frozen"]
    assert study.search.select == ["contest"]
    assert study.seeds == SeedSettings(), "quickstart reduces rows and grids, not seeds"
    for page in ("README.md", "docs/first-study.md"):
        rows = re.findall(r"^\| (DP-\S.*?) *\|(.*±.*)\|(.*±.*)\|$", (REPOSITORY / page).read_text(), re.M)
        assert [name for name, _, _ in rows] == methods, page
        for name, *cells in rows:
            small_budget, large_budget = (float(cell.strip(" *").split(" ± ")[0]) for cell in cells)
            assert small_budget < large_budget, f"{page}: {name} is less accurate with a larger privacy budget"


def test_the_paper_s_study_has_the_paper_s_search_space():
    """9 methods, 4 budgets, about 7,600 trials: 4 x (1063 coarse + 850 fine) = 7652."""
    study, _ = load("paper-cifar10-resnet20")
    names = "fedgd fedavg fedfc scaffold fedadam fedyogi ftrl adafedprox fedsofim"
    assert [method.name for method in study.methods] == [f"dp-{name}" for name in names.split()]
    assert study.epsilons == [0.5, 1, 5, 10]
    spaces = [method.space() for method in study.methods]
    coarse, fine = (sum(len(s.grid(axes(s))) for s in spaces) for axes in (lambda s: s.coarse, lambda s: s.fine))
    assert (coarse, fine) == (1063, 850)


def test_defaults_match_the_paper():
    study = read("name: x\ndata: [synthetic-frozen]\nmethods: all\nepsilons: [1]\ndefaults: paper\n")
    assert len(study.methods) == len(METHODS)
    assert (study.rounds.coarse, study.rounds.fine, study.rounds.confirm) == (50, 50, 70)
    assert (study.clients, study.partitions) == (20, ["dirichlet:0.5"])
    assert (study.privacy.delta, study.privacy.clip) == (1e-5, 10)
    assert (study.privacy.release, study.privacy.adjacency) == ("local", "replace-one")
    assert study.search.strategies == ["grid"]
    assert study.resources.lanes_per_pack == "auto"


def test_search_contest_and_confirm_seeds_are_disjoint():
    """This is the default. Studies that reproduce papers set the papers' own selection."""
    study = read("name: x\ndata: [synthetic-frozen]\nmethods: all\nepsilons: [1]\ndefaults: paper\n")
    seeds = [*study.seeds.search, *study.seeds.contest, *study.seeds.confirm]
    assert (len(study.seeds.search), len(study.seeds.contest), len(study.seeds.confirm)) == (3, 5, 5)
    assert len(set(seeds)) == len(seeds)
    assert (study.search.select, study.search.refine, study.search.finalists) == (["contest"], "zoom", 8)
    for name in packaged():
        if name.startswith("paper") or name == "m-estimation":
            paper, _ = load(name)
            assert (paper.search.select, paper.search.refine, len(paper.seeds.search)) == (["single"], "table", 1)


def test_a_single_search_seed_needs_no_brackets():
    assert read(TEXT.replace("seeds:", "seeds:\n  search: 5")).seeds.search == [5]


def test_a_method_is_a_name_or_a_name_with_changes():
    study = read(TEXT)
    assert [method.shown for method in study.methods] == ["DP-FedGD", "DP-FedSOFIM"]
    assert study.methods[1].fixed == {"beta": 0.9}
    assert "beta" not in study.methods[1].space().coarse
    assert read(TEXT.replace("- dp-fedgd", "- dp-fedgd:")).methods == study.methods


def test_a_label_distinguishes_two_variants_of_a_method():
    study = read(TEXT.replace("  - dp-fedgd\n", "  - dp-fedsofim: {label: published, fixed: {direction: gradient}}\n"))
    assert [method.shown for method in study.methods] == ["published", "DP-FedSOFIM"]


def test_the_reference_of_comparisons():
    assert read(TEXT).reference.name == "dp-fedsofim", "the last method is the default"
    assert read(TEXT + "compare_to: dp-fedgd\n").reference.name == "dp-fedgd"
    assert read(TEXT + "compare_to: DP-FedGD\n").reference.name == "dp-fedgd"


def test_an_infinite_epsilon_survives_serialization():
    study = read(TEXT.replace("- 8", "- .inf"))
    restored = Study.model_validate_json(study.model_dump_json())
    assert restored == study
    assert restored.epsilons[1] == math.inf


# ---- invalid studies


def changed(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new)


INVALID = {
    "unknown key": (TEXT + "epsilon: 3\n", 15, "epsilon", "no such setting; did you mean epsilons?"),
    "unknown key of a section": (
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
        "'dp-nope' is unknown; choose one of: dp-ada",
    ),
    "misspelt method": (
        changed("- dp-fedgd", "- dp_fedgd"),
        6,
        "methods.0",
        "'dp_fedgd' is unknown; did you mean dp-fedgd? Choose one of: dp-ada",
    ),
    "abbreviated method": (changed("- dp-fedgd", "- newton"), 6, "methods.0", "did you mean dp-fednewton?"),
    "several objectives": (
        TEXT + "objective: [accuracy, auroc]\n",
        15,
        "objective",
        "it is the one metric that ranks configurations; list further ones under metrics",
    ),
    "method of a wrong type": (
        changed("- dp-fedgd", "- 5"),
        6,
        "methods.0",
        "it should be the name of a method, or one name with its changes (found 5)",
    ),
    "two methods in one entry": (
        changed("- dp-fedgd", "- {dp-fedgd: {}, dp-fedavg: {}}"),
        6,
        "methods.0",
        "or one name with its changes",
    ),
    "data of a wrong type": (
        changed('["synthetic-frozen', '[5, "synthetic-frozen'),
        2,
        "data.0",
        "it should be a feature file or a generated set, or a mapping with its source (found 5)",
    ),
    "changes of a wrong type": (changed("- dp-fedgd", "- dp-fedgd: 5"), 6, "methods.0", "5"),
    "unknown hyperparameter": (changed("beta", "gamma"), 7, "methods.1", "has no hyperparameter 'gamma'"),
    "hyperparameter out of range": (changed("0.9", "1.5"), 7, "methods.1", "beta = 1.5 is not in [0, 1)"),
    "hyperparameter of a wrong type": (changed("0.9", "[0.9]"), 8, "methods.1.fixed.beta", "should be a number"),
    "axis that is not a list": (changed("fixed:", "coarse:"), 8, "methods.1.coarse.beta", "such as [0.9] (found 0.9)"),
    "text that is not a list": (changed("[iid]", "iid"), 3, "partitions", "it should be a list, such as [iid]"),
    "text that needs quotation marks in YAML": (
        changed("[iid]", "'iid: [a'"),
        3,
        "partitions",
        "a list (found 'iid: [a')",
    ),
    "infinity that is not a list": (
        TEXT.replace("epsilons:\n  - 1\n  - 8", "epsilons: .inf"),
        10,
        "epsilons",
        "a list, such as [.inf] (found inf)",
    ),
    "mapping that is not a list": (
        "data: {source: synthetic-frozen}\n" + "".join(TEXT.splitlines(keepends=True)[:1]),
        1,
        "data",
        "it should be a list (each item begins with '- ')",
    ),
    "number for a section": (
        TEXT + "rounds: 20\n",
        15,
        "rounds",
        "it should be a mapping with keys such as coarse, fine, confirm (found 20)",
    ),
    "method named twice": (
        changed("- dp-fedgd", "- dp-fedsofim"),
        7,
        "methods.1",
        "DP-FedSOFIM is named twice",
    ),
    "epsilon is not a number": (changed("- 8", "- much"), 12, "epsilons.1", "(found 'much')"),
    "epsilon 0": (changed("- 8", "- 0"), 10, "epsilons", "epsilon 0 is not above 0"),
    "epsilon nan": (changed("- 8", "- .nan"), 10, "epsilons", "epsilon nan is not above 0"),
    "epsilon twice": (changed("- 8", "- 1.0"), 10, "epsilons", "named twice"),
    "no epsilons": (changed("epsilons:\n  - 1\n  - 8\n", ""), 1, "epsilons", "it is missing"),
    "required key, misspelt": (changed("epsilons:", "epsilon:"), 10, "epsilon: ", "did you mean epsilons?"),
    "required key, abbreviated": (changed("epsilons:", "eps:"), 10, "eps: ", "did you mean epsilons?"),
    "required key of a section, misspelt": (
        changed('["synth', '[{sorce: "synth').replace('6,3"]', '6,3"}]'),
        2,
        "data.0.sorce",
        "data.source?",
    ),
    "clients is not a number": (
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
    "lanes is not a number": (
        TEXT + "resources:\n  lanes_per_pack: many\n",
        16,
        "resources.lanes_per_pack",
        "found 'many'",
    ),
    "rounds": (TEXT + "rounds: 50\n", 15, "rounds", "(found 50)"),
    "comparison": (TEXT + "compare_to: dp-ftrl\n", 15, "compare_to", "'dp-ftrl' is none of the methods: DP-FedGD"),
    "partition": (changed("[iid]", "\n  - iid\n  - idd"), 5, "partitions.1", "'idd' is unknown"),
    "budget in mu": (changed("- 8", "- mu=much"), 12, "epsilons.1", "budget 'mu=much'"),
    "rungs": (TEXT + "search:\n  halving:\n    rungs: 9\n", 17, "search.halving.rungs", "found 9"),
    "YAML: bracket": (changed("[42, 7]", "[42, 7"), 15, "", "not valid YAML: "),
    "YAML: tab": (changed("  - 8", "\t- 8"), 12, "", "not valid YAML: "),
    "YAML: alias": (changed("- 8", "- *eight"), 12, "", "undefined alias 'eight'"),
    "YAML: code": (changed("- 8", "- !!python/object/apply:os.getcwd []"), 12, "", "not valid YAML"),
    "YAML: recursive alias": (changed("- 8", "- &own [*own]"), 12, "", "an alias contains itself"),
    "YAML: two documents": (TEXT + "---\nname: more\n", 15, "", "another document"),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_studies_are_refused_with_file_and_line(name):
    text, line, key, sentence = INVALID[name]
    with pytest.raises(UserError) as caught:
        read(text)
    message = str(caught.value)
    assert message.startswith(f"tiny.yaml:{line}: {key}"), message
    assert sentence in message
    assert "\n" not in message


INVALID_WITH_DATA = {
    "missing data": (
        changed('["synthetic-frozen:400,100,6,3"]', "\n  - gone.npz"),
        3,
        "data 'gone.npz' was found neither",
    ),
    "more clients than rows": (changed("clients: 4", "clients: 500").replace("iid", "\n  iid"), 4, "clients = 500"),
    "more classes than the data has": (changed("[iid]", "\n  - iid\n  - classes:9"), 5, "the data has only 3 classes"),
    "data without client names": (changed("[iid]", "[explicit]"), 3, "has no client_train column"),
    "head": (TEXT + "model: logistic\n", 15, "model = 'logistic' is for two classes"),
    "validation": (TEXT + "validation:\n  fraction: 1.0e-9\n", 16, "validation_fraction = 1e-09 of"),
    "objective": (TEXT + "objective: squared_error\n", 15, "has no truth"),
    "method": (changed("- dp-fedgd", "- dp-ftrl") + "privacy: {level: user}\n", 6, "dp-ftrl protects record level"),
}


@pytest.mark.parametrize("name", INVALID_WITH_DATA)
@pytest.mark.parametrize("command", ["run", "plan"])
def test_errors_found_with_the_data_have_file_and_line(name, command, tmp_path, fedsweep):
    text, line, sentence = INVALID_WITH_DATA[name]
    (tmp_path / "tiny.yaml").write_text(text)
    results = ["--results", tmp_path / "results"] if command == "run" else []
    code, out, err = fedsweep(command, tmp_path / "tiny.yaml", *results)
    assert (code, out) == (2, "")
    assert err.startswith(f"fedsweep: {tmp_path}/tiny.yaml:{line}: "), err
    assert sentence in err
    assert err.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_settings_without_effect_are_reported(tmp_path, fedsweep):
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
        "random search draws from the ranges of both grids"
    )


@pytest.mark.parametrize("name", ["a[b", "float", "["])
def test_errors_name_a_setting_exactly(name):
    """Also if the name resembles a location in the validator's own errors."""
    with pytest.raises(UserError, match=f"{re.escape(name)}: there is no such setting"):
        read(TEXT + f"{json.dumps(name)}: 3\n")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "a study is a mapping of settings, this is NoneType"),
        ("- a\n- b\n", "a study is a mapping of settings, this is list"),
        ("name: \x00\n", "not valid YAML"),  # the error of YAML's character reader has no line
        ("name: 2026-13-41\n", "not valid YAML: month must be in 1..12"),
        ("clients: 1" + 5000 * "0" + "\n", "not valid YAML: Exceeds the limit"),
        (5000 * "[", "not valid YAML: it is nested without end"),
    ],
)
def test_files_that_are_not_studies_are_refused(text, sentence):
    with pytest.raises(UserError, match=rf"^tiny\.yaml: {sentence}") as caught:
        read(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("item", ["[{}]", "{{<<: [{}]}}"], ids=["lists", "merged mappings"])
def test_aliases_that_expand_to_billions_of_values_are_refused(item):
    """Level 12 would expand to 9^12 values: they are counted, not expanded."""
    levels = ["a0: &a0 {x: 1}"]
    levels += [f"a{n}: &a{n} " + item.format(", ".join([f"*a{n - 1}"] * 9)) for n in range(1, 13)]
    with pytest.raises(UserError, match=r"^tiny\.yaml: with its aliases expanded it holds more than 200000 values$"):
        read("\n".join(levels))


def test_aliases_are_supported():
    text = changed("  - dp-fedgd\n", "  - dp-fedgd: &fine {fine: {learning_rate: [1, 2]}}\n  - dp-fedyogi: *fine\n")
    assert [method.fine for method in read(text).methods[:2]] == [{"learning_rate": [1, 2]}] * 2


def test_a_grid_that_is_too_large_is_refused():
    axis = str([round(0.01 + k / 1000, 3) for k in range(990)])
    text = changed("- dp-fedgd", f"- dp-fedadam: {{coarse: {{learning_rate: {axis}, beta1: {axis}, tau: {axis}}}}}")
    with pytest.raises(UserError, match=r"^tiny\.yaml:6: methods\.0: the coarse grid of dp-fedadam has \d{9,} conf"):
        read(text)


def test_the_reference_of_comparisons_stays_when_methods_are_added():
    old, more = read(TEXT), read(changed("defaults:", "  - dp-ftrl\ndefaults:"))
    assert (old.reference.shown, more.reference.shown) == ("DP-FedSOFIM", "DP-FTRL")
    extended = keep_reference(old, more)
    assert extended.reference.shown == "DP-FedSOFIM"
    assert keep_reference(extended, more) == extended, "the same file changes nothing"
    explicit = read(changed("defaults:", "  - dp-ftrl\ncompare_to: dp-ftrl\ndefaults:"))
    assert keep_reference(old, explicit) == explicit, "an explicit compare_to takes precedence"
    assert keep_reference(old, old) == old


REFUSED_SETTINGS = {
    "unknown partition": (changed("[iid]", "[idd]"), "idd"),
    "partition twice": (changed("[iid]", '["dirichlet:0.5", "dirichlet:.5"]'), "dirichlet"),
    "key twice": (TEXT + "clients: 5\n", "clients"),
    "seed out of range": (TEXT.replace("seeds:", f"seeds:\n  search: {2**64}"), "search"),
    "infinite clip": (TEXT + "privacy: {clip: .inf}\n", "clip"),
    "halving with one rung": (TEXT + "search: {halving: {rungs: 1}}\n", "1"),
    "a rung that keeps all": (TEXT + "search: {halving: {keep: 1}}\n", "1"),
}


@pytest.mark.parametrize("name", REFUSED_SETTINGS)
def test_meaningless_settings_are_refused_before_anything_runs(name):
    text, name_or_value = REFUSED_SETTINGS[name]
    with pytest.raises(UserError, match=re.escape(name_or_value)):
        PreparedStudy.prepare(read(text))


def test_two_data_sets_with_one_name_are_refused(tmp_path):
    """Their cells would have the same names, and the trials of the second would be lost."""
    feature_file(tmp_path / "one" / "features.npz", rows=60)
    feature_file(tmp_path / "two" / "features.npz", rows=80)
    with pytest.raises(UserError, match="two data sets are called 'features'; give one of them a label"):
        with_data(tmp_path, 'one/features.npz", "two/features.npz')


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/x", "a/b", "..", ".hidden", "", "a\\b", "x" * 65, "a b", "a\n", "-x"]
)
def test_names_cannot_escape_the_results_folder(name):
    """The default results folder is results/NAME."""
    with pytest.raises(UserError, match=r"^tiny\.yaml:1: name: "):
        read(TEXT.replace("name: tiny", f"name: {json.dumps(name)}"))


def test_unreadable_files_are_refused(tmp_path):
    missing = tmp_path / "missing.yaml"
    with pytest.raises(UserError, match=r"^study file .*missing\.yaml cannot be read: No such file or directory$"):
        load(str(missing))
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("name: \xfcbung\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.yaml cannot be read: it is not UTF-8 text$"):
        load(str(latin))
    with pytest.raises(UserError, match=r"^study 'quickstrat' is neither a file nor a packaged study \(.*quickstart"):
        load("quickstrat")


# ---- locating data


@pytest.mark.parametrize("name", ["mine.npz", "MINE.CSV", "mine.libsvm", "mine.ndjson"])
def test_a_data_file_is_no_study(name):
    stated = f"{name} is a data file, not a study; a study names it: data: [{name}]"
    with pytest.raises(UserError, match=f"^{re.escape(stated)}"):
        load(name)


def test_data_is_found_next_to_the_study_file(tmp_path, monkeypatch):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    feature_file(here / "data" / "features.npz")
    (here / "tiny.yaml").write_text(TEXT.replace("synthetic-frozen:400,100,6,3", "data/features.npz"))
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    study, _ = load(str(here / "tiny.yaml"))
    assert study.data[0].source == str(here / "data" / "features.npz"), (
        "an absolute path, so that the study can be resumed from any folder"
    )
    assert PreparedStudy.prepare(study).cells[0].setting.name == "features / iid"


def test_order_in_which_folders_are_searched_for_data(tmp_path, monkeypatch):
    """Next to the study file, then in the current folder, then in $FEDSWEEP_DATA."""
    folders = [tmp_path / name for name in ("study", "current", "environment")]
    for folder in folders:
        feature_file(folder / "features.npz")
    monkeypatch.chdir(folders[1])
    monkeypatch.setenv("FEDSWEEP_DATA", str(folders[2]))
    for folder in folders:
        study = with_data(folders[0], "features.npz")
        assert study.data[0].source == str(folder / "features.npz")
        (folder / "features.npz").unlink()
    study = with_data(folders[0], "features.npz")
    sentence = r"data 'features\.npz' was found neither next to the study, nor in the current folder, nor in "
    with pytest.raises(UserError, match=sentence):
        PreparedStudy.prepare(study)


def test_a_study_from_another_machine_finds_its_data(tmp_path, monkeypatch):
    """The ledger holds the file's path on the other machine."""
    feature_file(tmp_path / "there" / "features.npz")
    study = with_data(tmp_path / "there", "features.npz")
    assert with_located_data(study) == study
    (tmp_path / "here").mkdir()
    (tmp_path / "there" / "features.npz").rename(tmp_path / "here" / "features.npz")
    assert with_located_data(study) == study, "not found: the error will name the original path"
    monkeypatch.setenv("FEDSWEEP_DATA", str(tmp_path / "here"))
    located = with_located_data(study)
    assert located.data[0].source == str(tmp_path / "here" / "features.npz")
    check_extension(study, located)


def test_a_study_file_can_be_a_url(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TEXT)
    study, text = load(f"file://{tmp_path}/tiny.yaml")
    assert (study.name, text) == ("tiny", TEXT)
    with pytest.raises(UserError, match=r"^study file file:///nowhere/x\.yaml cannot be read: .*No such file"):
        load("file:///nowhere/x.yaml")
    with pytest.raises(UserError, match=r"^nonsense://x\.yaml is not a URL that fedsweep opens"):
        load("nonsense://x.yaml")


def test_a_packaged_study_finds_its_data(tmp_path, monkeypatch):
    feature_file(tmp_path / "cifar10-resnet20.npz")
    monkeypatch.setenv("FEDSWEEP_DATA", str(tmp_path))
    study, _ = load("paper-cifar10-resnet20")
    assert study.data[0].source == str(tmp_path / "cifar10-resnet20.npz")


# ---- extending a study


EXTENSIONS = {
    "no change": TEXT,
    "an epsilon": changed("- 8", "- 8\n  - 0.5"),
    "epsilons in another order": changed("  - 1\n  - 8\n", "  - 8\n  - 1\n  - 3\n"),
    "a method": changed("- dp-fedgd", "- dp-fedgd\n  - dp-ftrl"),
    "a partition": changed("[iid]", "[iid, 'dirichlet:0.5']"),
    "data": changed("6,3", '6,3", "synthetic-frozen:500,100,6,3'),
    "a confirm seed": changed("[42, 7]", "[42, 7, 1]"),
    "a strategy": TEXT + "search: {strategies: [grid, optuna]}\n",
    "resources": TEXT + "resources: {hosts: 1, lanes_per_pack: 7}\n",
    "the reference": TEXT + "compare_to: dp-fedgd\n",
    "its description": TEXT + "description: The same, in other words.\n",
}


@pytest.mark.parametrize("name", EXTENSIONS)
def test_allowed_extensions(name):
    check_extension(read(TEXT), read(EXTENSIONS[name]))


INCOMPATIBLE = {
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
FIXED_SETTINGS = {  # setting: the changed study, and the new and the old value in the error
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
    "preprocess.shrink": (TEXT + "preprocess: {shrink: true}\n", True, False),
    "preprocess.scale": (TEXT + "preprocess: {scale: 0.1}\n", 0.1, 0.0),
    "preprocess.length": (TEXT + "preprocess: {length: 4}\n", 4.0, 0.0),
    "aggregate": (TEXT + "aggregate: size\n", "'size'", "'uniform'"),
    "precision": (TEXT + "precision: bf16\n", "'bf16'", "'float32'"),
    "model": (TEXT + "model: mlp:8\n", "'mlp:8'", "'softmax'"),
    "objective": (TEXT + "objective: loss\n", "'loss'", "'accuracy'"),
    "metrics": (TEXT + "metrics: [loss]\n", "['loss']", "[]"),
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
    "validation.by": (TEXT + "validation: {by: client}\n", "'client'", "'row'"),
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
    "search.optuna.sampler": (TEXT + "search: {optuna: {sampler: gp}}\n", "'gp'", "'tpe'"),
    "search.optuna.options": (TEXT + "search: {optuna: {options: {seed: 1}}}\n", 1, None),
    "search.surface.batch": (TEXT + "search: {surface: {batch: 8}}\n", 8, None),
    "search.surface.values": (TEXT + "search: {surface: {values: 9}}\n", 9, None),
    "search.surface.extend": (TEXT + "search: {surface: {extend: false}}\n", False, True),
    "search.surface.seed": (TEXT + "search: {surface: {seed: 1}}\n", 1, 42),
    "search.halving.seed": (TEXT + "search: {halving: {seed: 1}}\n", 1, 42),
}


@pytest.mark.parametrize("name", INCOMPATIBLE)
def test_incompatible_changes_are_refused(name):
    text, reason = INCOMPATIBLE[name]
    with pytest.raises(UserError, match=re.escape(reason)) as caught:
        check_extension(read(TEXT), read(text))
    assert str(caught.value).endswith("choose another folder")


@pytest.mark.parametrize("name", FIXED_SETTINGS)
def test_a_changed_setting_is_refused_with_its_old_value(name):
    text, after, before = FIXED_SETTINGS[name]
    with pytest.raises(UserError) as caught:
        check_extension(read(TEXT), read(text))
    place = f"{name}.seed" if name == "search.optuna.options" else name
    assert str(caught.value) == (
        f"the study has {place} = {after}, the folder was made with {before}; choose another folder"
    )


def test_there_is_a_case_for_every_setting():
    """A new setting must be listed here as fixed unless the program lists it as one that can grow."""
    free = {"description", "compare_to", "resources", "defaults"}  # a recorded study has all keys that defaults set
    assert set(_settings("", Study)) - free == set(FIXED_SETTINGS) | set(extension.GROWING)


def _settings(path: str, model: type) -> Iterator[str]:
    for name, field in model.model_fields.items():
        has_fields = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        if has_fields and name != "resources":
            yield from _settings(f"{path}{name}.", field.annotation)
        else:
            yield f"{path}{name}"


def test_a_changed_grid_is_named_with_its_method():
    """The error names the changed grid and does not report the method as removed."""
    custom_grid = TEXT.replace("- dp-fedgd\n", "- dp-fedgd: {coarse: {learning_rate: [1, 2]}}\n")
    assert custom_grid != TEXT
    with pytest.raises(
        UserError, match=r"methods 'dp-fedgd'\.coarse\.learning_rate = \[1\.?0?, 2\.?0?\], the folder was"
    ):
        check_extension(read(TEXT), read(custom_grid))


def test_a_data_file_can_move(tmp_path):
    """The ledger checks by hash that its content is unchanged."""
    old = with_data(tmp_path, str(feature_file(tmp_path / "old" / "features.npz")))
    new = with_data(tmp_path, str(feature_file(tmp_path / "new" / "features.npz")))
    check_extension(old, new)


def test_a_label_keeps_the_as_released_mark():
    released = MethodSettings.model_validate({"dp-ftrl": {"label": "Tree", "fixed": {"as_released": True}}})
    assert released.shown == "Tree (as released)"
    assert MethodSettings.model_validate("dp-ftrl").shown == "DP-FTRL"


def test_a_long_value_is_shortened_in_the_error():
    axis = ", ".join(f"0.{number}" for number in range(1, 61))
    long_axis = read(TEXT.replace("- dp-fedgd\n", f"- dp-fedgd: {{coarse: {{learning_rate: [{axis}]}}}}\n"))
    with pytest.raises(UserError) as caught:
        check_extension(read(TEXT), long_axis)
    assert len(str(caught.value)) < 250


# ---- resources of one run


def test_resources_of_a_run_replace_those_of_the_study():
    of_study = ResourceSettings(hosts=2, lanes_per_pack=7)
    assert changed_resources(of_study, []) == of_study
    of_run = changed_resources(of_study, ["hosts=auto", "placement=spread", "gpus_per_host=0.5"])
    assert of_run == ResourceSettings(hosts="auto", lanes_per_pack=7, placement="spread", gpus_per_host=0.5)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("hosts", "it should be a whole number"),
        ("hosts=none", "it should be a whole number"),
        ("hosts=0", "0 is less than 1"),
        ("placement=far", "it should be 'pack' or 'spread'"),
        ("rounds=5", "is not KEY=VALUE with a key of: hosts, gpus_per_host, lanes_per_pack"),
    ],
)
def test_invalid_resources_are_named_in_the_error(text, sentence):
    with pytest.raises(UserError, match=rf"^resource '{text}'.*{re.escape(sentence)}"):
        changed_resources(ResourceSettings(), [text])


FTRL = "name: x\ndata: [synthetic-frozen]\nepsilons: [1]\ndefaults: paper\nmethods:\n  - dp-ftrl: "


@pytest.mark.parametrize("given", ["true", '"true"'])
def test_as_released_methods_are_marked(given):
    study = read(f"{FTRL}{{fixed: {{as_released: {given}}}}}\n")
    assert study.methods[0].shown == "DP-FTRL (as released)"


def test_as_released_cannot_be_searched():
    with pytest.raises(UserError, match="as_released"):
        read(f"{FTRL}{{coarse: {{as_released: [true, false]}}}}\n")


def test_a_study_with_a_missing_plug_in_is_not_reported_as_damaged():
    text = "name: away\ndata: [synthetic-frozen]\nmethods: [dp-fedgd]\nepsilons: [1]\ndefaults: paper\n"
    recorded = parse(text, "away.yaml", Path()).model_dump_json()
    assert Study.recorded(recorded).methods[0].name == "dp-fedgd"
    with pytest.raises(UserError, match=r"cannot be read without its plug-ins: method 'dp-away' is unknown.*--import"):
        Study.recorded(recorded.replace("dp-fedgd", "dp-away"))

"""Mistakes in a plug-in strategy: each ends with a sentence that names the strategy, and no folder is spoiled."""

import re
import sys

import pytest
from plugin_registry import temporary_plugins

STUDY = """name: broken
data: ["synthetic-frozen:60,20,3,2"]
partitions: [iid]
clients: 2
methods: [dp-fedgd]
epsilons: [8]
rounds: {coarse: 1, fine: 1, confirm: 1}
seeds: {search: [1], contest: [], confirm: [42]}
resources: {gpus_per_host: 0}
search: {strategies: [mine], trials: 4}
defaults: paper
"""
PLUGIN = """from fedsweep.plugins import Proposal, Section, Strategy

RATES = [{"learning_rate": rate} for rate in (0.1, 1.0, 10.0)]

class Mine(Strategy):
    name = "mine"
    stages = ("mine",)

    def propose(self, task, history):
        return None if history.stages else Proposal("mine", RATES)

    def expected(self, task):
        return {"mine": 3}
"""
PROPOSE = 'None if history.stages else Proposal("mine", RATES)'


class Sweeps:
    """Runs the study with a plug-in in which some text is replaced."""

    def __init__(self, folder, fedsweep, monkeypatch):
        self.folder, self.fedsweep, self.monkeypatch = folder, fedsweep, monkeypatch
        self.results, self.study, self.plugin = folder / "results", folder / "broken.yaml", folder / "my_search.py"
        self.study.write_text(STUDY)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would outlive a change in the same second

    def run(self, *changes, command="run", study=STUDY):
        self.study.write_text(study)
        text = PLUGIN
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        self.plugin.write_text(text)
        target = {
            "run": (self.study, "--results", self.results, "--backend", "local"),
            "resume": (self.results, "--backend", "local"),
            "plan": (self.study,),
        }[command]
        self.monkeypatch.setenv("FEDSWEEP_IMPORT", "")
        with temporary_plugins():
            return self.fedsweep("--import", self.plugin, command, *target)


@pytest.fixture
def sweeps(tmp_path, fedsweep, monkeypatch):
    return Sweeps(tmp_path, fedsweep, monkeypatch)


def said(err):
    return [line for line in err.splitlines() if line.startswith("fedsweep: ")]


def test_the_plug_in_without_a_mistake_runs(sweeps):
    code, _, err = sweeps.run()
    assert code == 0, err


WRONG_CLASSES = {
    "no name": (('    name = "mine"\n', ""), "strategy Mine has no `name`"),
    "no stages": (('    stages = ("mine",)\n', ""), "strategy Mine has no `stages`"),
    "a stage that is no tuple": (('("mine",)', '"mine"'), "`stages` = 'mine' is not a tuple of names"),
    "no expected": (("def expected", "def expects"), "strategy Mine does not define `expected`"),
    "settings that are no section": (("    def propose", "    Settings = dict\n\n    def propose"), "`Settings`"),
}


@pytest.mark.parametrize("name", WRONG_CLASSES)
def test_an_incomplete_class_is_refused_with_its_line(sweeps, name):
    change, sentence = WRONG_CLASSES[name]
    code, out, err = sweeps.run(change)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"plug-in {sweeps.plugin}:5: " in err
    assert sentence in err
    assert not sweeps.results.exists()


@pytest.mark.parametrize(("stage", "owner"), [("coarse", "strategy grid"), ("contest", "fedsweep")])
def test_a_stage_name_of_another_strategy_is_refused(sweeps, stage, owner):
    code, out, err = sweeps.run(('stages = ("mine",)', f'stages = ("mine", "{stage}")'))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"stage name '{stage}' of strategy mine is taken by {owner}; choose another" in err


def test_a_plug_in_cannot_claim_the_price_of_a_private_search(sweeps):
    code, _, err = sweeps.run(('    name = "mine"', '    name = "mine"\n    publishes_only_winner = True'))
    assert (code, err.count("\n")) == (2, 1)
    assert "known only for the strategy 'private'" in err


WRONG_PROPOSALS = {
    "nothing": ("None", "strategy mine proposed no configurations"),
    "an empty list": ('Proposal("mine", [])', "strategy mine proposed no configurations"),
    "a list": ("RATES", "strategy mine proposed a list instead of a Proposal or None"),
    "an unknown hyperparameter": ('Proposal("mine", [{"rate": 1}])', "strategy mine proposed {'rate': 1}: .*'rate'"),
    "a list as a value": (
        'Proposal("mine", [{"learning_rate": [1]}])',
        r"strategy mine proposed {'learning_rate': \[1\]}: .*is not a number",
    ),
    "no mapping": ('Proposal("mine", [1.0])', r"strategy mine proposed 1\.0, which is not a dictionary"),
    "seeds": (
        'Proposal("mine", RATES, seeds=[1, 2, 3])',
        "strategy mine proposed seeds; a strategy",
    ),
    "text as a number": (
        'Proposal("mine", [{"learning_rate": "0.1"}])',
        "strategy mine proposed {'learning_rate': '0.1'}: learning_rate = '0.1' is text instead of a float",
    ),
    "text as rounds": (
        'Proposal("mine", [{"learning_rate": 0.1, "rounds": "many"}])',
        "strategy mine proposed {.*}: rounds = 'many' is not a number",
    ),
    "no values": ('Proposal("mine", [{}])', "strategy mine proposed {}: 'learning_rate' is missing"),
    "a generator": (
        'Proposal("mine", (rate for rate in RATES))',
        r"plug-in .*my_search\.py:9: strategy mine proposed a generator instead of a list of configurations",
    ),
}


@pytest.mark.parametrize("name", WRONG_PROPOSALS)
def test_a_wrong_first_proposal_is_one_sentence_before_anything_starts(sweeps, name):
    proposal, sentence = WRONG_PROPOSALS[name]
    code, out, err = sweeps.run((PROPOSE, proposal))
    assert (code, out) == (2, "")
    assert len(said(err)) == 1, err
    assert re.search(sentence, err), err
    assert "Traceback" not in err
    code, _, err = sweeps.run()
    assert code == 0, f"the folder can still be used: {err}"


HOOK = "    def expected"
WRONG_VALUES = {
    "expected: a number": (('{"mine": 3}', "3"), 12, "`expected` returned 3, which is not"),
    "expected: text": (('{"mine": 3}', '{"mine": "3"}'), 12, "`expected` returned {'mine': '3'}, which is not"),
    "expected: nothing": (('{"mine": 3}', "{}"), 12, "`expected` returned {}, which is not"),
    "expected: another stage": (
        ('{"mine": 3}', '{"yours": 3}'),
        12,
        "`expected` returned stage 'yours', which is not in its `stages`",
    ),
    "planned_rounds": (
        (HOOK, f"    def planned_rounds(self, stage, rounds):\n        pass\n\n{HOOK}"),
        12,
        "`planned_rounds` returned None, which is not a number of rounds",
    ),
    "last_round": (
        (HOOK, f"    def last_round(self, stage, planned, settings):\n        return planned + 1\n\n{HOOK}"),
        12,
        "`last_round` returned 2, which is not a number of rounds from 1 to 1",
    ),
    "competing": (
        (HOOK, f"    def competing(self, stages):\n        return 'mine'\n\n{HOOK}"),
        12,
        "`competing` returned 'mine', which is not a tuple of stages",
    ),
    "competing: another stage": (
        (HOOK, f"    def competing(self, stages):\n        return ('yours',)\n\n{HOOK}"),
        12,
        "`competing` returned stage 'yours', which is not among",
    ),
    "check_space": (
        (HOOK, f"    def check_space(self, space):\n        return 1\n\n{HOOK}"),
        12,
        "`check_space` returned 1, which is not text",
    ),
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_a_wrong_value_of_a_method_is_one_sentence_with_its_line(sweeps, name):
    change, line, sentence = WRONG_VALUES[name]
    contest = STUDY.replace("contest: []", "contest: [2]")
    code, out, err = sweeps.run(change, study=contest)
    assert (code, out, len(said(err))) == (2, "", 1), err
    assert f"plug-in {sweeps.plugin}:{line}: strategy mine: {sentence}" in err
    assert "Traceback" not in err


WRONG_FIXED_CONFIGURATIONS = {
    "a list": (
        "RATES",
        "[{'learning_rate': 0.1}, {'learning_rate': 1.0}, {'learning_rate': 10.0}], which is not a dict",
    ),
    "no list": ('{"mine": 3}', "{'mine': 3}, which is not a dictionary from stages to lists of configurations"),
    "no configurations": ('{"mine": [0.1]}', "{'mine': [0.1]}, which is not a dictionary from stages to lists of"),
    "another stage": ('{"yours": RATES}', "stage 'yours', which is not in its `stages`"),
}


@pytest.mark.parametrize("name", WRONG_FIXED_CONFIGURATIONS)
def test_wrong_fixed_configurations_are_one_sentence_of_plan(sweeps, name):
    value, problem = WRONG_FIXED_CONFIGURATIONS[name]
    hook = f"    def fixed_configurations(self, task):\n        return {value}\n\n{HOOK}"
    code, out, err = sweeps.run((HOOK, hook), command="plan")
    assert (code, out, len(said(err))) == (2, "", 1), err
    assert f"plug-in {sweeps.plugin}:12: strategy mine: `fixed_configurations` returned {problem}" in err


def test_fixed_configurations_are_planned(sweeps):
    hook = f'    def fixed_configurations(self, task):\n        return {{"mine": RATES}}\n\n{HOOK}'
    code, _, err = sweeps.run((HOOK, hook), command="plan")
    assert code == 0, err


WRONG_SIGNATURES = {
    "propose": (("(self, task, history)", "(self, task)"), 9, "`propose(self, task)` must take (self, task, history)"),
    "last_round": (
        (HOOK, f"    def last_round(self, stage, planned):\n        return planned\n\n{HOOK}"),
        12,
        "`last_round(self, stage, planned)` must take (self, stage, planned, settings)",
    ),
    "no method": ((HOOK, f"    competing = ()\n\n{HOOK}"), 5, "`competing` is not a method"),
    "__init__": (
        (HOOK, f"    def __init__(self, rate):\n        pass\n\n{HOOK}"),
        12,
        "`__init__(self, rate)` must take (self)",
    ),
}


@pytest.mark.parametrize("name", WRONG_SIGNATURES)
def test_a_wrong_signature_is_refused_when_the_plug_in_is_loaded(sweeps, name):
    change, line, sentence = WRONG_SIGNATURES[name]
    code, out, err = sweeps.run(change)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert f"plug-in {sweeps.plugin}:{line}: strategy Mine: {sentence}" in err


def test_no_answer_about_a_search_space_means_no_problem(sweeps):
    code, _, err = sweeps.run((HOOK, f"    def check_space(self, space):\n        pass\n\n{HOOK}"))
    assert code == 0, err


def test_a_stage_that_is_proposed_again_must_be_declared(sweeps):
    code, _, err = sweeps.run((PROPOSE, 'Proposal("mine", RATES)'))
    assert code == 2
    assert "strategy mine proposed stage 'mine' again" in said(err)[-1]
    assert "extends_stages = True" in err


def test_a_strategy_that_repeats_itself_ends_with_an_error_and_can_be_repaired(sweeps):
    extending = ('stages = ("mine",)', 'stages = ("mine",)\n    extends_stages = True')
    code, _, err = sweeps.run(extending, (PROPOSE, 'Proposal("mine", RATES)'))
    assert code == 2
    assert "strategy mine proposed only configurations that have run, 5 times in a row" in said(err)[-1]
    code, _, err = sweeps.run(extending, command="resume")
    assert code == 0, err


def test_a_batch_of_repeated_configurations_is_allowed(sweeps):
    extending = ('stages = ("mine",)', 'stages = ("mine",)\n    extends_stages = True')
    three = 'None if len(history.candidates("mine", unique=False)) > 6 else Proposal("mine", RATES)'
    code, _, err = sweeps.run(extending, (PROPOSE, three))
    assert code == 0, err


def test_an_earlier_stage_cannot_be_extended(sweeps):
    stages = ('stages = ("mine",)', 'stages = ("mine", "more")\n    extends_stages = True')
    propose = 'Proposal("more" if len(history.stages) == 1 else "mine", [{"learning_rate": 0.5 + len(history.stages)}])'
    code, _, err = sweeps.run(stages, (PROPOSE, propose))
    assert code == 2
    assert "strategy mine adds to stage 'mine' after stage 'more' was opened" in said(err)[-1]


HOOKS = {
    "propose, at the start": ((PROPOSE, "1 / 0"), 10, "propose"),
    "propose, after results": ((PROPOSE, 'Proposal("mine", RATES) if not history.stages else 1 / 0'), 10, "propose"),
    "expected": (('{"mine": 3}', "1 / 0"), 13, "expected"),
    "competing": (("    def expected", "    def competing(self, stages):\n        1 / 0\n\n    def expected"), 13,
                  "competing"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOOKS)
def test_an_exception_names_the_plug_in_and_shows_its_own_lines_only(sweeps, name):
    change, line, hook = HOOKS[name]
    code, out, err = sweeps.run(change)
    assert (code, out) == (2, "")
    assert said(err) == [f"fedsweep: plug-in {sweeps.plugin}:{line}: ZeroDivisionError: division by zero."]
    trace = err[err.index("Traceback") :]
    assert f'File "{sweeps.plugin}", line {line}, in {hook}' in trace
    assert "orchestrator" not in trace


def test_an_import_that_fails_names_file_and_line(sweeps):
    code, _, err = sweeps.run(("RATES = ", "rates = oops\nRATES = "))
    assert (code, err.count("\n")) == (2, 1)
    assert f"plug-in my_search cannot be imported: {sweeps.plugin}:3: NameError" in err


# ---- changed code


def test_a_changed_strategy_with_the_same_proposals_resumes_with_a_note(sweeps):
    assert sweeps.run()[0] == 0
    code, _, err = sweeps.run(("RATES =", "# the same\nRATES ="), command="resume")
    assert code == 0, err
    assert "note: plug-in my_search has changed since this folder was run" in err
    code, _, err = sweeps.run(("RATES =", "# the same\nRATES ="), command="resume")
    assert "has changed" not in err


def test_other_proposals_of_a_changed_strategy_are_refused_and_the_folder_stays_as_it_was(sweeps):
    assert sweeps.run()[0] == 0
    longer = STUDY.replace("confirm: [42]", "confirm: [42, 7]")
    for _ in range(2):
        code, _, err = sweeps.run(("0.1, 1.0", "0.2, 1.0"), study=longer)
        assert code == 2
        assert said(err)[-1] == (
            "fedsweep: strategy mine proposes other trials for stage mine of "
            "'synthetic-frozen:60,20,3,2 / iid / DP-FedGD / eps 8' than this folder holds: plug-in my_search has "
            "changed; restore it or choose another folder."
        )
    assert (sweeps.results / "study.yaml").read_text() == STUDY
    code, _, err = sweeps.run(command="resume")
    assert code == 0, err
    assert "has changed" not in err


def test_proposals_that_change_by_themselves_are_called_so(sweeps):
    random = ("RATES = ", "import time\nRATES = "), ("(0.1, 1.0, 10.0)", "(1 + time.time() % 1, 1.0, 10.0)")
    assert sweeps.run(*random)[0] == 0
    code, _, err = sweeps.run(*random, command="resume")
    assert code == 2
    assert "proposals may depend only on the task and the history" in said(err)[-1]


# ---- the section of a study file


def test_an_unknown_key_of_its_section_is_our_sentence(sweeps):
    settings = (
        ("class Mine", "class Keys(Section):\n    batch: int = 1\n\n\nclass Mine"),
        (
            '    name = "mine"',
            '    name = "mine"\n    Settings = Keys',
        ),
    )
    text = STUDY.replace("trials: 4", "trials: 4, mine: {bach: 2}")
    code, _, err = sweeps.run(*settings, study=text)
    assert code == 2
    assert err == f"fedsweep: {sweeps.study}:10: search.mine.bach: there is no such setting; mine has: batch.\n"
    text = STUDY.replace("trials: 4", "trials: 4, mine: {batch: many}")
    code, _, err = sweeps.run(*settings, study=text)
    sentence = "search.mine.batch: it should be a whole number (found 'many')"
    assert err == f"fedsweep: {sweeps.study}:10: {sentence}.\n"
    text = STUDY.replace("trials: 4", "trials: 4, mine: 3")
    code, _, err = sweeps.run(*settings, study=text)
    assert (
        err == f"fedsweep: {sweeps.study}:10: search.mine: it should be a mapping with keys such as batch (found 3).\n"
    )


def test_the_section_of_a_strategy_that_is_not_loaded_says_how_to_load_it(sweeps):
    code, _, err = sweeps.run(study=STUDY.replace("trials: 4", "trials: 4, yours: {batch: 2}"))
    assert code == 2
    assert err == (
        f"fedsweep: {sweeps.study}:10: search.yours: there is no such setting, and no strategy of this name; "
        "--import MODULE loads a plug-in's.\n"
    )
    code, _, err = sweeps.run(study=STUDY.replace("trials: 4", "trials: 4, finalist: 2"))
    assert "search.finalist: there is no such setting; did you mean search.finalists?" in err

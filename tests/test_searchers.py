"""Strategies that ask a searcher and tell it results: ask/tell plug-ins and Optuna's samplers."""

import dataclasses
import importlib.util
import sys

import pytest
from interrupting import tables_whole_and_interrupted
from plugin_registry import temporary_plugins
from repository_files import REPOSITORY
from simulated_search import GD, SOFIM, drive, near, study

from orchestrator.execution.cell_search import CellSearch
from orchestrator.search import optuna_samplers
from orchestrator.study.cells import PreparedStudy
from trainables import plugins
from trainables.errors import UserError

TUNE = "orchestrator.execution.tune_searcher"
CLIMB = REPOSITORY / "examples" / "plugin" / "climb.py"
SEARCHES = {
    "climb": {"climb": {"batch": 4}},
    "random": {"optuna": {"sampler": "random", "batch": 4}},
    "qmc": {"optuna": {"sampler": "qmc", "batch": 4, "options": {"scramble": True}}},
    "gp": {"optuna": {"sampler": "gp", "batch": 4, "options": {"n_startup_trials": 8}}},
    "nsgaii": {"optuna": {"sampler": "nsgaii", "batch": 4, "options": {"population_size": 4}}},
    "nsgaiii": {"optuna": {"sampler": "nsgaiii", "batch": 4, "options": {"population_size": 4}}},
    "ray": {"tune": {"searcher": "optuna", "batch": 4}},
    "ray, own": {"tune": {"searcher": "nearby_searcher.Nearby", "batch": 4, "options": {"step": 0.3}}},
    "cmaes": {"optuna": {"sampler": "cmaes", "batch": 4, "options": {"popsize": 4}}},
}


NEARBY = """
import random
from ray.tune.search import Searcher

class Nearby(Searcher):
    def __init__(self, step, seed=None):
        super().__init__()
        self.step, self.random, self.best, self.proposed = step, random.Random(seed), None, {}

    def set_search_properties(self, metric, mode, config, **spec):
        self.domains, self._metric, self._mode = config, metric, mode
        return self.step > 0

    def suggest(self, trial_id):
        draw = lambda domain: domain.sample(random_state=self.random.randrange(2**31))
        sampled = {name: draw(domain) for name, domain in self.domains.items()}
        if self.best is not None and self.random.random() > self.step:
            sampled["learning_rate"] = self.best[1]["learning_rate"]
        self.proposed[trial_id] = sampled
        return sampled

    def on_trial_complete(self, trial_id, result=None, error=False):
        if not error and (self.best is None or result[self.metric] > self.best[0]):
            self.best = result[self.metric], self.proposed[trial_id]
"""


@pytest.fixture(autouse=True)
def loaded(monkeypatch, tmp_path):
    (tmp_path / "nearby_searcher.py").write_text(NEARBY)
    monkeypatch.setenv("FEDSWEEP_IMPORT", "")
    monkeypatch.setenv("FEDSWEEP_IMPORT_FOLDERS", "")
    monkeypatch.setattr("sys.path", list(sys.path))
    with temporary_plugins():
        for plugin in (CLIMB, TUNE, tmp_path / "nearby_searcher.py"):
            plugins.use(str(plugin))
        yield


def searched_by(name: str, **changes):
    if name == "cmaes" and importlib.util.find_spec("cmaes") is None:
        pytest.skip("the optional package cmaes is not installed")
    (strategy,) = SEARCHES[name]
    return study(methods=[SOFIM], search={"strategies": [strategy], "trials": 14, **SEARCHES[name]}, **changes)


def sometimes_diverging(trial):
    return ("diverged", None, None) if trial.hyperparameters["rho"] > 4 else near(0.3)(trial)


def test_every_sampler_of_optuna_is_tested():
    others = {"climb", "ray", "ray, own"}
    assert {*optuna_samplers._classes()} == {*SEARCHES, "tpe"} - others, "tpe, the default, is in test_search.py"


@pytest.mark.parametrize("name", SEARCHES)
def test_an_interrupted_search_resumes_with_the_same_trials(tmp_path, name):
    of = searched_by(name, seeds={"search": [1, 2], "contest": [11]})
    whole = drive(tmp_path / "whole", of, sometimes_diverging)
    assert whole.finished
    (strategy,) = SEARCHES[name]
    assert len(whole.of("DP-FedSOFIM", strategy, strategy)) == 14 * 2
    for stop in (9, 27):
        drive(tmp_path / str(stop), of, sometimes_diverging, stop_after=stop)
        resumed = drive(tmp_path / str(stop), of, sometimes_diverging)
        assert (resumed.stages, resumed.choices) == (whole.stages, whole.choices)


@pytest.mark.parametrize("name", SEARCHES)
def test_proposals_are_a_function_of_the_results(name):
    """Not of the order in which they arrived, nor of what the searcher was asked before."""
    prepared = PreparedStudy.prepare(of := searched_by(name))
    outcomes = {}
    search = CellSearch(prepared.cells[0], of.variants[0], outcomes, 10)
    for _ in range(2):
        stage, trials = search.next_stage()
        search.open(stage, trials)
        outcomes.update({trial.key: sometimes_diverging(trial) for trial in trials[::-1]})
    proposed = search.variant.strategy.propose(search.task, search.history)
    assert proposed == search.variant.strategy.propose(search.task, search.history), "asked twice"
    in_order = dict(sorted(outcomes.items()))
    assert proposed == search.variant.strategy.propose(
        search.task, dataclasses.replace(search.history, outcomes=in_order, memo={})
    )


@pytest.mark.parametrize("name", ["climb", "gp", "ray"])
def test_tables_of_an_interrupted_run_are_the_same_bytes(tmp_path, name):
    (strategy,) = SEARCHES[name]
    of = study(methods=[GD], search={"strategies": [strategy], "trials": 10, **SEARCHES[name]})
    whole, part = tables_whole_and_interrupted(of, tmp_path)
    assert whole == part


# ---- mistakes


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sampler": "bayes"}, "sampler = 'bayes' is unknown; choose one of: .*gp"),
        (
            {"sampler": "gp", "options": {"startup": 3}},
            "'startup' is no option of sampler 'gp'; it has: n_startup_trials",
        ),
        ({"sampler": "gp", "options": {"n_startup_trials": "few"}}, "n_startup_trials = 'few' is not of the type int"),
        ({"options": {"seed": 1}}, "'seed' is no option of sampler 'tpe'"),
        ({"sampler": "qmc", "options": {"qmc_type": "magic"}}, "options of sampler 'qmc': .*magic"),
    ],
)
def test_a_wrong_sampler_or_option_is_one_sentence_before_anything_starts(settings, sentence):
    of = study(search={"strategies": ["optuna"], "optuna": settings})
    with pytest.raises(UserError, match=sentence):
        PreparedStudy.prepare(of)


def test_a_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "cmaes", None)
    of = study(search={"strategies": ["optuna"], "optuna": {"sampler": "cmaes"}})
    with pytest.raises(UserError, match="sampler = 'cmaes' needs the package 'cmaes', which is not installed"):
        PreparedStudy.prepare(of)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"searcher": "subprocess.Popen"}, "searcher = 'subprocess.Popen' is no searcher of Ray Tune"),
        ({"searcher": "nearby_searcher.random"}, "is no searcher of Ray Tune"),
        ({"searcher": "random"}, r"is no searcher of Ray Tune \(ax, .*optuna"),
        ({"searcher": "optuna", "options": {"samples": 3}}, "cannot be used: .*unexpected keyword argument 'samples'"),
        ({"searcher": "hyperopt"}, "searcher = 'hyperopt' cannot be used: .*must be installed"),
    ],
)
def test_a_wrong_searcher_of_ray_is_one_sentence_before_anything_starts(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        PreparedStudy.prepare(study(search={"strategies": ["tune"], "tune": settings}))


def test_a_searcher_of_ray_must_take_the_search_space():
    search = {"searcher": "nearby_searcher.Nearby", "options": {"step": 0}}
    of = study(search={"strategies": ["tune"], "tune": search})
    with pytest.raises(UserError, match="searcher Nearby takes no search space: its set_search_properties returned"):
        CellSearch(PreparedStudy.prepare(of).cells[0], of.variants[0], {}, 10).next_stage()


def test_a_searcher_that_returns_too_much_is_named(monkeypatch):
    of = searched_by("climb")
    search = CellSearch(PreparedStudy.prepare(of).cells[0], of.variants[0], {}, 10)
    climber = type(search.variant.strategy.searcher(search.task))
    monkeypatch.setattr(climber, "ask", lambda self, count: [{}] * (count + 1))
    with pytest.raises(UserError, match=r"climb\.py:\d+: strategy climb: `ask\(4\)` returned 5 configurations"):
        search.next_stage()


def test_a_searcher_that_returns_nothing_ends_the_search(monkeypatch, tmp_path):
    of = searched_by("climb")
    strategy = of.variants[0].strategy
    climber = type(strategy.searcher(of.search_task(of.methods[0], 8, of.variants[0], 10)))
    ask = climber.ask
    monkeypatch.setattr(climber, "ask", lambda self, count: ask(self, count) if self.best is None else [])
    ran = drive(tmp_path, of, near(0.3))
    assert ran.finished
    assert len(ran.of("DP-FedSOFIM", "climb", "climb")) == 4

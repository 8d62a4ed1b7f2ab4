"""The strategy `surface`: one model for all budgets of a method."""

import csv
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from interrupting import tables_whole_and_interrupted
from simulated_search import DATA, drive, study

import search_spaces
from orchestrator.execution.planning import plan
from orchestrator.execution.sweep import Sweep
from orchestrator.report.html import findings_text
from orchestrator.results.forgetting import dependent_stages
from orchestrator.results.ledger import Ledger
from orchestrator.search.strategies.surface import SurfaceSearch, trials_of
from orchestrator.search.surface.gaussian_process import Data, Prior, _loss
from orchestrator.search.surface.lattice import Lattice
from orchestrator.search.surface.model import Surface, Trial, log_noise
from orchestrator.study import reading
from orchestrator.study.cells import PreparedStudy
from orchestrator.study.settings.method import MethodSettings
from trainables.errors import UserError

GD = {"name": "dp-fedgd", "coarse": {"learning_rate": [0.001, 0.1, 10]}, "fine": {"learning_rate": [0.1]}}
BEST = {1.0: 0.1, 2.0: 0.2, 8.0: 0.8}
"""The best learning rate by budget."""


def surface_study(**changes):
    return study(
        methods=changes.pop("methods", [GD]),
        epsilons=changes.pop("epsilons", list(BEST)),
        seeds=changes.pop("seeds", {"search": [1, 2, 3], "contest": [11, 12], "confirm": [42]}),
        **{**changes, "search": {"strategies": ["surface"], "trials": 14, **changes.get("search", {})}},
    )


def evaluate(trial):
    """A parabola around the best learning rate, with a deviation of each seed; large steps diverge."""
    rate = trial.hyperparameters["learning_rate"]
    if rate > 8:
        return "diverged", None, None
    decades = math.log10(rate / BEST[trial.privacy.epsilon])
    deviation = random.Random(f"{trial.seed} {rate}").gauss(0, 0.2)
    return "done", 60 + 3 * math.log(trial.privacy.epsilon) - 9 * decades**2 + deviation, 1.0


def test_finds_the_best_value_of_every_budget_with_one_seed_a_trial(tmp_path):
    ran = drive(tmp_path, surface_study(), evaluate)
    assert ran.finished
    for epsilon, best in BEST.items():
        searched = ran.of("DP-FedGD", "surface", "surface", epsilon)
        assert len(searched) == 14
        assert {trial.seed for trial in searched} == {1, 2, 3}
        (confirmed,) = ran.of("DP-FedGD", "confirm", "surface", epsilon)
        assert abs(math.log10(confirmed.hyperparameters["learning_rate"] / best)) < 0.25


def test_the_report_does_not_say_that_all_trials_had_the_same_seed():
    one, three = ({"search": seeds, "contest": [11], "confirm": [42]} for seeds in ([1], [1, 2, 3]))
    caveats = [findings_text._few_seeds(SimpleNamespace(study=surface_study(seeds=seeds))) for seeds in (one, three)]
    assert ["single seed (1)" in " ".join(sentences) for sentences in caveats] == [True, False]


def test_trials_do_not_depend_on_the_order_of_results_or_on_interruptions(tmp_path):
    reference = drive(tmp_path / "whole", surface_study(), evaluate, batch=1000).stages
    drive(tmp_path / "other", surface_study(), evaluate, batch=3, stop_after=20)
    assert drive(tmp_path / "other", surface_study(), evaluate, batch=7).stages == reference


def test_tables_of_an_interrupted_run_are_the_same_bytes(tmp_path):
    """Real trials, with the tables `frontier` and `selection`, which show the surface. The first stops come before the
    contest, whose runs have more rounds than those of the search."""
    of = surface_study(
        epsilons=[2, 8], search={"trials": 8}, seeds={"search": [1, 2], "contest": [11], "confirm": [42]}
    )

    whole, part = tables_whole_and_interrupted(of, tmp_path)
    assert any(name.startswith("frontier") for name in whole)
    assert whole == part


@pytest.mark.parametrize(("budgets", "per_axis"), [(1, 64), (2, 32), (3, 22), (4, 16), (7, 16)])
def test_trials_per_axis_with_few_budgets(budgets, per_axis):
    of = surface_study(epsilons=[*range(1, budgets + 1)], search={"trials": None})
    of = of.model_copy(update={"methods": [MethodSettings(name=name) for name in ("dp-fedgd", "dp-fedsofim")]})
    tasks = [of.search_task(method, 1.0, of.variants[0], 100) for method in of.methods]
    assert [trials_of(task) for task in tasks] == [per_axis, 3 * per_axis]


@pytest.mark.parametrize(("budgets", "seeds"), [(1, [1, 2, 3]), (2, [1])])
def test_a_search_of_few_configurations_runs_each_once_with_every_seed(tmp_path, budgets, seeds):
    steps = {"name": "dp-fedavg", "fixed": {"server_learning_rate": 1}, "coarse": {"local_steps": [1, 5, 10]}}
    of = study(
        methods=[{**steps, "fine": {"local_steps": [5]}}],
        epsilons=[1, 2][:budgets],
        seeds={"search": seeds, "contest": [11, 12], "confirm": [42]},
        search={"strategies": ["surface"]},
    )
    task = of.search_task(of.methods[0], 1.0, of.variants[0], 100)
    assert SurfaceSearch().expected(task) == {"surface": 3 * len(seeds)}
    ran = drive(tmp_path, of, lambda trial: ("done", 60 - abs(trial.hyperparameters["local_steps"] - 5), 1.0))
    for epsilon in of.epsilons:
        tried = [(t.hyperparameters["local_steps"], t.seed) for t in ran.of("DP-FedAvg", "surface", "surface", epsilon)]
        assert sorted(tried) == [(steps, seed) for steps in (1, 5, 10) for seed in seeds]


@pytest.mark.parametrize(("budgets", "setting", "count"), [(1, None, 16), (3, None, 6), (4, None, 4), (2, 3, 3)])
def test_trials_per_batch(tmp_path, budgets, setting, count):
    """At least 16 over all budgets, because small packs cost more per trial."""
    of = surface_study(epsilons=[1, 2, 8, 4][:budgets], search={"trials": 64, "surface": {"batch": setting}})
    with Ledger.write(tmp_path) as ledger:
        sweep = Sweep(PreparedStudy.prepare(of), ledger)
        first = list(sweep.waiting.values())
        second = sweep.ended({trial.key: ("done", 50.0, 1.0) for trial in first})
        assert len(second) == budgets * count


def test_the_trials_of_a_batch_share_a_pack(tmp_path):
    """All lanes of a pack have the same number of local steps. The best number is 5."""
    axes = {"server_learning_rate": [0.01, 0.03, 0.1, 0.3, 1], "local_steps": [1, 2, 5, 10]}
    method = {"name": "dp-fedavg", "coarse": axes, "fine": axes}
    of = surface_study(methods=[method], epsilons=[1, 2], search={"trials": 64})

    def score(trial):
        rate, steps = (trial.hyperparameters[name] for name in axes)
        return 60 - 9 * math.log10(rate / 0.1) ** 2 - 20 * math.log10(steps / 5) ** 2

    with Ledger.write(tmp_path) as ledger:
        sweep = Sweep(PreparedStudy.prepare(of), ledger)
        waiting = list(sweep.waiting.values())
        steps = []
        for _ in range(4):
            waiting = sweep.ended({trial.key: ("done", score(trial), 1.0) for trial in waiting})
            steps.append({trial.hyperparameters["local_steps"] for trial in waiting})
    assert [len(values) for values in steps] == [1, 1, 1, 1]
    assert {5} in steps


def test_an_axis_does_not_continue_to_values_that_are_1_in_single_precision():
    """Trials compute in single precision: with beta2 = 1 all of them would diverge."""
    space = search_spaces.load("dp-fedadam")
    lattice = Lattice(space, beyond={"beta2": (0, 9)})
    values = {configuration["beta2"] for configuration in lattice.configurations}
    assert 0.999999 < max(values) < 1
    assert float(np.float32(max(values))) < 1


def test_choices_do_not_separate_batches():
    """Lanes with different words share a pack."""
    axes = {"learning_rate": [0.1, 1.0], "direction": ["momentum", "gradient"]}
    method = MethodSettings.model_validate({"name": "dp-fedsofim", "coarse": axes, "fine": axes})
    assert set(Lattice(method.space()).groups) == {0}


def test_a_plan_has_a_pack_for_every_batch():
    """Two budgets: batches of 8 trials of each."""
    of = surface_study(epsilons=[1, 2], search={"trials": 40})
    nodes = [{"CPU": 2.0, "memory": 4.0 * 2**30}]
    assert plan(of, nodes).packs == {"surface": 5, "contest": 1, "confirm": 1}
    optuna = {"strategies": ["optuna"], "trials": 20, "optuna": {"batch": 8}}
    assert plan(study(methods=[GD], search=optuna), nodes).packs["optuna"] == 3


def test_a_batch_opens_when_the_trials_of_all_budgets_have_ended(tmp_path):
    with Ledger.write(tmp_path) as ledger:
        sweep = Sweep(PreparedStudy.prepare(surface_study()), ledger)
        first = list(sweep.waiting.values())
        assert len({trial.privacy.epsilon for trial in first}) == 3
        assert sweep.ended({trial.key: evaluate(trial) for trial in first[:-1]}) == []
        second = sweep.ended({first[-1].key: evaluate(first[-1])})
        assert len({trial.privacy.epsilon for trial in second}) == 3


def test_a_search_whose_trials_all_fail_or_diverge_ends_without_a_winner(tmp_path):
    failed = drive(tmp_path / "failed", surface_study(), lambda trial: ("failed", None, None))
    assert failed.finished
    assert set(failed.choices.values()) == {None}
    one = drive(
        tmp_path / "one",
        surface_study(),
        lambda trial: ("diverged", None, None) if trial.privacy.epsilon == 1 else evaluate(trial),
    )
    assert [choice is None for choice in one.choices.values()] == [True, False, False]


def test_forgetting_a_trial_forgets_what_depends_on_it_at_every_budget(tmp_path):
    ran = drive(tmp_path, surface_study(), evaluate)
    keys = next(keys for (_, _, stage), keys in ran.stages.items() if stage == "surface")
    stages = dependent_stages(ran.stages, {keys[5]}, ran.study.variants, warm_start=False)
    searches = {key: position for key, position in stages.items() if key[2] == "surface"}
    assert len(searches) == 3
    assert set(searches.values()) == {6}
    assert {stage for _, _, stage in stages} == {"surface", "contest", "confirm"}


def test_what_a_surface_search_cannot_do_is_an_error(tmp_path):
    for rule, contest in (("single", [11]), ("contest", [])):
        with pytest.raises(ValueError, match="surface runs one seed of a configuration; its winner needs a contest"):
            study(search={"strategies": ["surface"], "select": rule}, seeds={"contest": contest})
    drive(tmp_path, surface_study(), evaluate, stop_after=3)
    with pytest.raises(UserError, match="a strategy that searches all budgets together"):
        drive(tmp_path, surface_study(epsilons=[1, 2, 4, 8]), evaluate)


def test_axes_of_every_kind():
    space = search_spaces.load("dp-fedsofim").with_overrides(
        fixed={},
        coarse={"direction": ["momentum", "gradient"], "rounds": [10, 13], "clip": [1, 10], "beta": [0, 0.9]},
        fine={"direction": ["momentum"], "rounds": [10], "clip": [1], "beta": [0]},
    )
    lattice = Lattice(space, values=6)
    assert lattice.axes["rounds"] == (10, 13), "all lanes of a pack share it"
    assert lattice.axes["direction"] == ("momentum", "gradient")
    assert len(lattice.axes["clip"]) == 6
    assert lattice.points.shape == (len(lattice.configurations), len(lattice.axes) + 1)
    assert lattice.points.min() == 0
    assert lattice.points.max() == 1
    assert len(lattice.design(16, seed=1)) == 16


def far_below(trial):
    """The best learning rates lie one to two decades below the axis."""
    rate = trial.hyperparameters["learning_rate"]
    decades = math.log10(rate / BEST[trial.privacy.epsilon] * 2e4)
    return "done", 60 / (1 + decades**2 / 4) + random.Random(f"{trial.seed} {rate}").gauss(0, 0.2), 1.0


def test_an_axis_continues_beyond_its_end_while_the_best_configuration_lies_there(tmp_path):
    for extend in (True, False):
        of = surface_study(search={"trials": 24, "surface": {"extend": extend}})
        ran = drive(tmp_path / str(extend), of, far_below)
        for epsilon, best in BEST.items():
            (confirmed,) = ran.of("DP-FedGD", "confirm", "surface", epsilon)
            off = math.log10(confirmed.hyperparameters["learning_rate"] / (best / 2e4))
            assert abs(off) < 0.3 if extend else confirmed.hyperparameters["learning_rate"] == 0.001
    whole = drive(tmp_path / "whole", surface_study(), far_below, batch=1000).stages
    drive(tmp_path / "parts", surface_study(), far_below, batch=3, stop_after=25)
    assert drive(tmp_path / "parts", surface_study(), far_below, batch=7).stages == whole


def test_values_beyond_the_ends_are_as_close_as_those_within_and_allowed():
    space = search_spaces.load("dp-fedsofim")
    base = Lattice(space)
    wider = Lattice(space, beyond={"beta": (1, 1), "rho": (0, 1)})
    assert wider.configurations[: len(base.configurations)] == base.configurations
    assert (wider.points[: len(base.points)] == base.points).all()
    betas = sorted({c["beta"] for c in wider.configurations})
    assert betas[0] == 0.6
    assert 0.99 < betas[-1] < 1
    beyond = [c for c in wider.configurations if c["beta"] < 0.8 and c["rho"] > 20]
    assert len({tuple(c.values()) for c in wider.configurations}) == len(wider.configurations)
    assert len({c["learning_rate"] for c in beyond}) == len(base.axes["learning_rate"])
    assert base.steps_beyond(beyond) == {"beta": (1, 0), "rho": (0, 1)}
    assert base.steps_beyond(base.configurations) == {}
    lowest = Lattice(space, beyond={"beta": (9, 0)})
    assert min(c["beta"] for c in lowest.configurations) >= 0


def test_shared_hyperparameters_have_values_between_the_grids_only_where_packs_save_no_time():
    """Lanes of a network are computed one after the other, so a pack of one trial costs no more."""
    space = search_spaces.load("dp-fedavg")
    grids = {*space.coarse["local_steps"], *space.fine["local_steps"]}
    assert set(Lattice(space).axes["local_steps"]) == grids
    assert set(Lattice(space, packs_save_time=False).axes["local_steps"]) > grids


def test_a_shared_hyperparameter_continues_in_steps_of_the_coarse_grid():
    """Not as closely as the fine grid ends: each value would be a pack of its own."""
    method = MethodSettings(name="dp-fedavg", coarse={"local_steps": [1, 5, 20]}, fine={"local_steps": [18, 19, 21]})
    lattice = Lattice(method.space(), beyond={"local_steps": (0, 1)})
    assert {c["local_steps"] for c in lattice.configurations} - set(lattice.axes["local_steps"]) == {84}


def test_a_packaged_study_of_a_network_can_propose_the_winners_of_its_kept_results():
    name = "tail-cifar10-resnet20-budgets"
    study = reading.load(name)[0]
    (method,) = study.methods
    lattice = Lattice(method.space(), packs_save_time=study.packs_save_time(method))
    file = Path(__file__).parents[1] / "results" / "reproduction" / name / "tables" / "hyperparameters.csv"
    with file.open(encoding="utf-8", newline="") as lines:
        winners = [json.loads(row["hyperparameters"]) for row in csv.DictReader(lines)]
    assert len(winners) == 4
    assert all(winner[name] in values for winner in winners for name, values in lattice.axes.items())


@pytest.mark.parametrize("method", ["dp-fedgd", "dp-fedsofim"])
def test_values_lie_close_everywhere_between_the_grids(method):
    """Not only where the grids had the widest gaps: no step is longer than a 32nd of the range of one axis."""
    lattice = Lattice(search_spaces.load(method))
    assert len(lattice.configurations) == math.prod(map(len, lattice.axes.values())), "all of them, not a sample"
    for name, least in {"dp-fedgd": {"learning_rate": 33}, "dp-fedsofim": {"learning_rate": 14, "rho": 14}}[
        method
    ].items():
        logs = [math.log(value) for value in lattice.axes[name]]
        assert len(logs) >= least
        assert max(np.diff(logs)) <= (logs[-1] - logs[0]) / (least - 1) * 1.02


def test_the_gradient_of_the_fit_is_that_of_its_loss():
    random = np.random.default_rng(1)
    data = Data(
        random.random((9, 3)), random.normal(size=9), random.random(9), random.random(9),
        random.integers(0, 2, 9), random.integers(0, 3, 9),
    )  # fmt: skip
    prior = Prior.of([1.0, 0.5, 0.5], [True, True, False])
    at = prior.mean + 0.1 * random.normal(size=len(prior.mean))
    _, gradient = _loss(at, data, prior)
    for i in range(len(at)):
        step = np.eye(len(at))[i] * 1e-6
        slope = (_loss(at + step, data, prior)[0] - _loss(at - step, data, prior)[0]) / 2e-6
        assert gradient[i] == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_predictions_between_budgets_and_the_noise_of_a_budget():
    """At noise 10^u the best coordinate is 0.5 - 0.2 u and the score there 60 - 10 u."""
    random = np.random.default_rng(1)
    trials = [
        Trial([x], u, seed, budget, 60 - 10 * u - 40 * (x - 0.5 + 0.2 * u) ** 2 + 0.1 * random.normal())
        for budget, u in enumerate((-0.5, 0.0, 0.5))
        for seed, x in enumerate(np.linspace(0, 1, 9))
    ]
    surface, grid = Surface(trials, [True], unit=1.0), np.linspace(0, 1, 41)[:, None]
    mean, deviation = surface.scores(grid, 0.25)
    assert grid[mean.argmax(), 0] == pytest.approx(0.45, abs=0.06)
    assert mean.max() == pytest.approx(57.5, abs=0.7)
    assert 0 < deviation[mean.argmax()] < 2
    assert log_noise(0) < log_noise(0.1) < log_noise(1)


def test_a_configuration_of_which_little_is_known_is_not_chosen_between_budgets():
    """Two configurations have about the same score, and the first has many more trials."""
    trials = [Trial([0.0], u, seed, budget, 60 - 10 * u) for budget, u in enumerate((0.0, 0.5)) for seed in range(6)]
    trials += [Trial([1.0], u, 0, budget, 60.1 - 10 * u) for budget, u in enumerate((0.0, 0.5))]
    surface = Surface(trials, [True], unit=1.0, deviation=3.0)
    expected = surface.between(np.array([[0.0], [1.0]]), {0: 0.0, 1: 0.5}).at(0.25)
    assert expected.deviation[1] > expected.deviation[0]
    assert expected.cautious[0] > expected.cautious[1]


def test_close_to_a_budget_the_score_there_counts_most():
    """The first configuration is far better at the lower noise, and worse at the higher one. It differs by more than 20
    points, so its lower score counts between them; the second differs by 5, so a quarter of its decline is subtracted
    from the line."""
    scores = {0.0: (70.0, 30.0), 1.0: (50.0, 45.0)}  # by coordinate, at noise 0 and 1
    trials = [Trial([x], float(u), s, u, scores[x][u]) for x in scores for u in (0, 1) for s in range(4)]
    surface, searched = Surface(trials, [True], unit=1.0), {0: 0.0, 1: 1.0}
    between = [surface.between(np.array([[0.0], [1.0]]), searched).at(noise) for noise in (0.05, 0.5, 0.95)]
    assert [int(expected.cautious.argmax()) for expected in between] == [0, 1, 1]
    assert between[1].cautious == pytest.approx([30, 47.5 - 2.5 / 4], abs=1)


def test_the_task_knows_the_noise_of_a_budget():
    """Local release: a round's noise multiplier is sqrt(rounds) / mu."""
    prepared = PreparedStudy.prepare(study(data=[DATA], methods=[GD], epsilons=[1, 8, math.inf]))
    small, large, none = (prepared.noise(cell) for cell in prepared.cells)
    assert small(4) > large(4) > 0
    assert small(16) == pytest.approx(2 * small(4), rel=1e-6)
    assert none(4) == 0

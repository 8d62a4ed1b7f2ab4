"""Every method agrees with its slow twin, and its results do not depend on lanes, hosts or restarts."""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
import small
import torch
import twin
import twin_glm
import twin_sampled
from small import shared_values, varied_trials
from twin_agreement import ROUNDS, assert_agrees

from trainables import methods
from trainables.errors import UserError
from trainables.federation import pack
from trainables.federation.pack import pack_group
from trainables.methods import METHODS
from trainables.methods.base import Hyperparameter
from trainables.models import kernels
from trainables.privacy.plan import PrivacySettings

CALM = {"learning_rate": 0.2}  # steps of the default size would multiply rounding errors, too

# A few settings per method; what is not named stays at the method's default.
SETTINGS = {
    "dp-fedgd": [{}, {"learning_rate": 0.01}, {"learning_rate": 0.3}],
    "dp-fedsgd": [CALM],
    "dp-fedhybrid": [
        {"local_steps": 3, "client_learning_rate": 0.1, "learning_rate": 0.2},
        {"local_steps": 2, "client_learning_rate": 0.05, "learning_rate": 0.1, "fedavg_rounds": 9, "fedavg_share": 0.2},
    ],
    "dp-fedadam": [
        {},
        {"learning_rate": 0.1, "beta1": 0.0, "beta2": 0.8, "tau": 0.1},
        {"learning_rate": 0.05, "beta1": 0.8, "beta2": 0.9999, "tau": 1e-5},
    ],
    "dp-fedyogi": [
        {},
        {"learning_rate": 0.1, "beta1": 0.0, "beta2": 0.5, "tau": 0.1},
        {"learning_rate": 0.2, "beta1": 0.95, "beta2": 0.9, "tau": 1e-3},
    ],
    "dp-fedavg": [{}, {"local_steps": 3, "client_learning_rate": 0.05, "server_learning_rate": 0.5}],
    "dp-adafedprox": [{}, {"local_steps": 3, "client_learning_rate": 0.05, "server_learning_rate": 0.5, "mu0": 1.0}],
    "dp-scaffold": [
        {},
        {"local_steps": 3, "client_learning_rate": 0.05, "server_learning_rate": 0.5},
        {"local_steps": 2, "client_learning_rate": 0.02, "as_released": True},
    ],
    "dp-ftrl": [
        CALM,
        {"learning_rate": 0.2, "restart_every": 6},
        {"learning_rate": 0.2, "as_released": True},
        {"learning_rate": 0.2, "noise": "independent"},
    ],
    "dp-bandmf": [{}, {"every": 2, "bands": 7}, {"every": 1, "bands": 1}],
    "dp-fedfc": [
        {},
        {"learning_rate": 0.1, "gamma": 5.0, "feature_clip": 2.0, "covariance_share": 0.5},
        {"learning_rate": 0.1, "gamma": 5.0, "as_released": True},
    ],
    "dp-ls": [
        {"learning_rate": 0.3, "gamma": 5.0},
        {"learning_rate": 0.1, "gamma": 10.0, "feature_clip": 2.0, "covariance_share": 0.5},
    ],
    "dp-fedsofim": [
        {},
        {"learning_rate": 3.0, "rho": 10.0, "beta": 0.8, "weight_decay": 0.0},
        {"direction": "gradient", "learning_rate": 0.05, "rho": 1.0},
        {"direction": "gradient", "learning_rate": 0.5, "rho": 5.0, "beta": 0.0, "bias_correction": True},
        {"bias_correction": True, "weight_decay": 0.1},
        {"bias_correction": False, "beta": 0.99},
        {"warmup_rounds": 7},
        {"warmup_rounds": 100},
        {"blend_rounds": 15},
        {"blend_rounds": 40, "direction": "gradient", "learning_rate": 0.1},
        {"warmup_rounds": 5, "blend_rounds": 12, "bias_correction": True},
        {"variant": "ema_only", "learning_rate": 0.1},
        {"variant": "grad_only", "learning_rate": 0.1},
    ],
    "dp-fedavg-ls": [
        {"sampling_rate": 0.3, "participation": 0.6, "local_steps": 3},
        {"sampling_rate": 1.0, "participation": 1.0, "local_steps": 1, "smoothing": 5.0},
    ],
    "dp-fedsam": [{"sampling_rate": 0.3, "participation": 0.6, "local_steps": 2, "rho": 0.5}],
    "dp-localadamw": [
        {"sampling_rate": 0.3, "participation": 0.6, "local_steps": 3},
        {"sampling_rate": 0.5, "local_steps": 2, "client_learning_rate": 0.05, "beta1": 0.0, "tau": 0.1},
    ],
    "dp-fedadamw": [
        {"sampling_rate": 0.3, "participation": 0.6, "local_steps": 3},
        {"sampling_rate": 0.5, "local_steps": 2, "client_learning_rate": 0.05, "beta2": 0.9, "gamma": 0.9},
    ],
}

SETTINGS["dp-fednew"] = SETTINGS["dp-fednew-fc"] = [
    {"learning_rate": 0.5},
    {"duals": False, "learning_rate": 0.3, "alpha": 0.01, "rho": 0.1},
    {"hessian_clip": 30.0, "sum_clip": 10.0, "alpha": 1.0, "rho": 0.1, "learning_rate": 0.5},
    {"as_released": True, "sum_clip": 5.0, "rho": 3.0},
]

CASES = [(name, hypers) for name, settings in SETTINGS.items() for hypers in settings]
ROWS = "synthetic-frozen:300,100,12,4"  # a twin visits every row in every round
FEW = "synthetic-frozen:300,100,5,3"  # features, since a Hessian grows with their square
GLM = "multinomial"  # for methods that are not for softmax heads; test_glm.py holds those against their twins
every_method = pytest.mark.parametrize("name", METHODS)
every_method_of_softmax = pytest.mark.parametrize("name", SETTINGS)
without_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=without_cuda)])


def test_every_method_has_a_twin_and_settings():
    assert set(METHODS) - set(twin_glm.METHODS) == set(twin.METHODS) | set(twin_sampled.METHODS) == set(SETTINGS)


@pytest.fixture
def small_problem(request):
    """The small problem with a model that the test's method accepts."""
    return home(getattr(request.node, "callspec", None) and request.node.callspec.params.get("name"))


def home(name, **problem):
    softmax = small.problem(ROWS, **problem)
    return softmax if name is None or METHODS[name].accepts(softmax.model) else small.problem(FEW, model=GLM, **problem)


# ---- agreement with the twin


@pytest.mark.parametrize(("name", "hypers"), CASES, ids=[f"{n}-{h}" for n, h in CASES])
def test_agrees_with_the_twin(name, hypers, small_problem):
    """20 rounds with noise on; the run is planned for 25, since the server drops lanes that are done."""
    trial = small.trial(small_problem, name, hypers, rounds=25, every=10)
    assert_agrees(trial, small_problem)


@every_method_of_softmax
@pytest.mark.parametrize(
    "privacy",
    [
        {"epsilon": 0.5},
        {"epsilon": 1.0, "release": "secure-aggregation", "adjacency": "zero-out"},
        {"epsilon": math.inf},
        {"epsilon": 8.0, "clip": 0.5},
    ],
    ids=str,
)
def test_agrees_with_the_twin_under_other_privacy(name, privacy, small_problem):
    trial = small.trial(small_problem, name, SETTINGS[name][0], rounds=25, every=10, seed=7, **privacy)
    assert_agrees(trial, small_problem)


@every_method_of_softmax
def test_these_settings_are_far_from_the_edge_of_stability(name, small_problem, monkeypatch):
    """Agreement with a twin is a test only if rounding errors do not grow much: without noise, weights that start
    one part in ten thousand apart end no more than five times as far apart. (DP-FedNew with a step size of 1: 208.)"""
    trial = small.trial(small_problem, name, SETTINGS[name][0], rounds=25, every=10, seed=7, epsilon=math.inf)
    ended, _ = small.weights_after(ROUNDS, [trial], small_problem)
    head = type(small_problem.model)
    start = head.initial(small_problem.model, trial.seed)
    apart = 1e-4 * start * torch.from_numpy(np.random.default_rng(1).choice([-1.0, 1.0], len(start))).float()
    monkeypatch.setattr(head, "initial", lambda self, seed: start + apart)
    moved, _ = small.weights_after(ROUNDS, [trial], small_problem)
    assert np.abs(moved - ended).max() < 5 * apart.abs().max().item()


@every_method_of_softmax
@without_cuda
def test_agrees_with_the_twin_on_cuda(name, small_problem):
    trial = small.trial(small_problem, name, SETTINGS[name][0], rounds=25, every=10)
    assert_agrees(trial, small_problem, device="cuda")


def test_auto_follows_the_budget():
    """Bias correction where eps <= 1, ten warm-up rounds where eps <= 0.5."""
    sofim = METHODS["dp-fedsofim"]
    expected = {0.5: (True, 10), 1.0: (True, 0), 5.0: (False, 0), math.inf: (False, 0)}
    for epsilon, (corrected, warmup) in expected.items():
        trial = small.trial(small.problem(), "dp-fedsofim", epsilon=epsilon)
        resolved = sofim.resolve(dict(trial.hyperparameters), trial.privacy)
        assert (resolved["bias_correction"], resolved["warmup_rounds"]) == (corrected, warmup)


def test_what_is_given_beats_auto():
    trial = small.trial(small.problem(), "dp-fedsofim", {"bias_correction": False, "warmup_rounds": 3}, epsilon=0.5)
    resolved = METHODS["dp-fedsofim"].resolve(dict(trial.hyperparameters), trial.privacy)
    assert (resolved["bias_correction"], resolved["warmup_rounds"]) == (False, 3)


# ---- the contract


@functools.cache
def reference(name: str, lanes: int, device: str = "cpu") -> dict[str, small.Outcome]:
    """The outcome of `varied_trials` in one pack, which several tests compare with."""
    of = home(name)
    return small.run(varied_trials(name, of, lanes), of, device=device)


@every_method
@every_device
def test_one_lane_is_many_lanes(name, device, small_problem):
    """Alone or among 44 others, a trial has the same bits. 45 lanes are full vectors of any width, and a remainder."""
    trials = varied_trials(name, small_problem, 45)
    together = reference(name, 45, device)
    for trial in trials[::9]:
        assert small.run([trial], small_problem, device=device) == {trial.key: together[trial.key]}, (
            trial.hyperparameters
        )


@every_method
@every_device
def test_lane_order_does_not_matter(name, device, small_problem):
    trials = varied_trials(name, small_problem, 45)
    shuffled = [trials[i] for i in np.random.default_rng(2).permutation(len(trials))]
    assert reference(name, 45, device) == small.run(shuffled, small_problem, device=device)


@every_method
def test_one_host_is_many_hosts(name):
    """On a CPU. A GPU computes a host's clients together, and how many they are may change the last bits."""
    of = home(name, clients=20, partition="dirichlet:5")
    trials = varied_trials(name, of, 5)
    one, five, twenty = (small.run(trials, of, hosts=hosts) for hosts in (1, 5, 20))
    assert all(outcome.state == "done" for outcome in one.values())
    assert one == five == twenty


@every_method
@pytest.mark.parametrize("restart_at", [3, 8, 11], ids="after round {}".format)
def test_restart_from_a_snapshot(name, restart_at, small_problem):
    trials = varied_trials(name, small_problem, 5)
    assert small.run(trials, small_problem, restart_at=restart_at) == reference(name, 5)


@every_method
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_lane_that_diverges_is_retired_alone(name, place, small_problem, monkeypatch):
    """One lane's noise is made infinite: its weights are nan after the first round."""
    healthy = varied_trials(name, small_problem, 6)
    absurd = small.trial(small_problem, name, shared_values(name), clip=3.25)

    honest = pack.plan_of

    def with_infinite_noise(trial, sizes):
        plan = honest(trial, sizes)
        infinite = dict.fromkeys(plan.noise_std, math.inf)
        return dataclasses.replace(plan, noise_std=infinite) if trial.key == absurd.key else plan

    monkeypatch.setattr(pack, "plan_of", with_infinite_noise)
    outcomes = small.run([*healthy[:place], absurd, *healthy[place:]], small_problem)
    gone = outcomes.pop(absurd.key)
    assert (gone.state, gone.rounds) == ("diverged", 4)
    assert outcomes == reference(name, 6)
    assert all(outcome.state == "done" for outcome in outcomes.values())


@pytest.mark.filterwarnings("ignore:overflow")
def test_restart_after_a_lane_diverged(small_problem):
    """The checkpoint records which lanes are retired and which are left."""
    trials = [
        *varied_trials("dp-fedsofim", small_problem, 4),
        small.trial(small_problem, "dp-fedsofim", {"learning_rate": 1e30, "weight_decay": 1e6}),
        *varied_trials("dp-fedgd", small_problem, 2),
    ]
    whole = small.run(trials, small_problem)
    assert [outcome.state for outcome in whole.values()].count("diverged") == 1
    assert whole == small.run(trials, small_problem, restart_at=6)


def test_methods_share_a_pack(small_problem):
    """All methods whose clients release the same thing as DP-FedGD's, in one pack: each as if alone."""
    group = pack_group(small.trial(small_problem, "dp-fedgd"))
    trials = [t for name in METHODS for t in varied_trials(name, small_problem, 2) if pack_group(t) == group]
    names = {trial.method for trial in trials}
    assert names >= {"dp-fedgd", "dp-fedadam", "dp-fedyogi", "dp-fedsofim"}
    together = small.run(trials, small_problem)
    for name in names:
        mine = [trial for trial in trials if trial.method == name]
        assert small.run(mine, small_problem) == {trial.key: together[trial.key] for trial in mine}


def test_finite_weights_with_an_infinite_loss_have_diverged(small_problem, monkeypatch):
    """Weights of about 1e36 are still numbers in float32, but the loss over a hundred rows is not, summed as torch's
    kernel does."""
    monkeypatch.setitem(kernels._chosen, "cpu", "torch")
    trial = small.trial(small_problem, "dp-fedgd", {"learning_rate": 1e30}, clip=1e7)
    weights, server = small.weights_after(3, [trial], small_problem)
    assert np.isfinite(weights).all()
    (result,) = server.advance(4)
    assert (result.state, result.metrics["loss"][4]) == ("diverged", math.inf)


def test_trials_differ(small_problem):
    """Guards the tests above: results are not equal merely because nothing changes."""
    outcomes = small.run(varied_trials("dp-fedgd", small_problem, 5), small_problem).values()
    assert len({outcome.weights for outcome in outcomes}) == 5


# ---- hyperparameters

NAMED = [(name, h) for name, method in METHODS.items() for h in method.hyperparameters]
every_hyperparameter = pytest.mark.parametrize(("name", "h"), NAMED, ids=[f"{n}-{h.name}" for n, h in NAMED])


@every_method
def test_describes_itself(name):
    method = METHODS[name]
    assert method.name == name == name.lower()
    assert method.title.startswith("DP-")
    assert any(character.isdigit() for character in method.paper), "a paper has a year"
    names = [h.name for h in method.hyperparameters]
    assert len(names) == len(set(names))
    assert any(name.endswith("learning_rate") for name in names)
    assert all(len(h.description) > 5 for h in method.hyperparameters)


@every_method
def test_defaults_pass_their_own_check(name):
    method = METHODS[name]
    checked = method.check({})
    assert checked == {h.name: h.default for h in method.hyperparameters}
    assert method.check({key: str(value) for key, value in checked.items()}) == checked, "as text, from --set"


def bad_values(h: Hyperparameter) -> list:
    if h.choices:
        return ["sideways"]
    if isinstance(h.default, bool) or (h.auto and math.isinf(h.low)):
        return ["perhaps", 3]
    bad: list = ["many", math.nan, math.inf, True]
    if math.isfinite(h.low):
        bad.append(h.low if h.open_low else h.low - 1)
    if math.isfinite(h.high):
        bad.append(h.high if h.open_high else h.high + 1)
    if h.integer:
        bad.append(1.5)
    return bad


@every_hyperparameter
def test_a_bad_value_is_named(name, h):
    for value in bad_values(h):
        with pytest.raises(UserError, match=rf"^{h.name} = ") as caught:
            METHODS[name].check({h.name: value})
        if not isinstance(value, bool):
            assert (f"{value:g}" if isinstance(value, float | int) else value) in str(caught.value)


@every_method
def test_an_unknown_key_is_named_and_the_known_ones_listed(name):
    with pytest.raises(UserError, match="learning_rat'") as caught:
        METHODS[name].check({"learning_rat": 0.1})
    assert all(h.name in str(caught.value) for h in METHODS[name].hyperparameters)


def test_an_unknown_method_is_named():
    with pytest.raises(UserError, match="dp-fedgdd") as caught:
        methods.get("dp-fedgdd")
    assert "dp-fedsofim" in str(caught.value)


def test_least_squares_in_one_round_is_least_squares(small_problem):
    """Without noise or clipping, with no ridge to speak of and clients weighted by size: NumPy's fit of the labels
    less 1/c, times c; and each further step of length 1 lowers the training loss."""
    x, y = small_problem.data.x_train, small_problem.data.y_train
    hypers = {"gamma": 1e-9, "feature_clip": 1e4}
    trial = small.trial(small_problem, "dp-ls", hypers, rounds=9, every=1, epsilon=math.inf, clip=1e4)
    trial = trial.model_copy(update={"aggregate": "size"})
    weights, _ = small.weights_after(1, [trial], small_problem)
    design = np.concatenate([x, np.ones((len(x), 1))], axis=1).astype(np.float64)
    classes = small_problem.data.classes
    fit = np.linalg.lstsq(design, np.eye(classes)[y] - 1 / classes, rcond=None)[0]
    np.testing.assert_allclose(weights[0], classes * fit, rtol=0, atol=1e-3 * np.abs(classes * fit).max())
    _, server = small.weights_after(8, [trial], small_problem)
    losses = [loss for t, loss in sorted(server.results[trial.key].metrics["train_loss"].items()) if t > 1]
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))


@pytest.mark.parametrize(("epsilon", "corrected"), [(0.5, True), (1.0, True), (1.5, False), (10.0, False)])
def test_sofim_corrects_its_bias_where_the_budget_is_small(epsilon, corrected):
    method = METHODS["dp-fedsofim"]
    found = method.resolve(method.check({}), PrivacySettings(epsilon=epsilon))
    assert found["bias_correction"] == corrected

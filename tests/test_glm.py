"""Generalised linear models and the methods that estimate them: kernels in float64 against autograd and the slow twin,
the four methods of the comparison against their twins, and what their releases cost."""

import dataclasses
import math

import numpy as np
import pytest
import small
import torch
import twin_glm
from torch.func import grad, hessian, vmap

from trainables import models
from trainables.data import features
from trainables.data import partition as partitions
from trainables.data.simulated import Simulation
from trainables.errors import UserError
from trainables.federation.pack import plan_of
from trainables.federation.problem import Problem
from trainables.federation.trial_spec import DataSpec, ProblemSpec
from trainables.methods import METHODS
from trainables.methods.base import Run
from trainables.methods.dp_fednewton import solve
from trainables.models.shard import Shard
from trainables.privacy.gaussian import mu_of
from trainables.privacy.plan import PrivacySettings

TASKS = ("logistic", "multinomial", "poisson")
every_task = pytest.mark.parametrize("task", TASKS)


def simulated(task, clients=4, seed=3, sizes="lognormal", train_on="all", evaluate_on="test") -> Problem:
    data = features.load(f"simulated:{task},{clients},40,{sizes},3,{seed}")
    spec = ProblemSpec(
        data=DataSpec(fingerprint=data.fingerprint),
        partition=partitions.parse("explicit", clients=clients, seed=0),
        train_on=train_on,
        evaluate_on=evaluate_on,
        model=task,
    )
    return Problem.prepare(data, spec)


def rows_of(problem, client):
    rows = problem.partition.rows[client]
    return problem.data.x_train[rows], problem.data.y_train[rows]


def loss_of(task, columns):
    """The loss of one example by torch's own functions: weights (d,), features with the constant (q,), label ()."""

    def loss(weights, x, y):
        eta = x @ weights.view(-1, columns)
        if task == "poisson":
            rate = eta.squeeze()
            return torch.nn.functional.poisson_nll_loss(rate, y.to(rate), log_input=True)
        return torch.nn.functional.cross_entropy(torch.cat([eta.new_zeros(1), eta]), y)

    return loss


def kernel_inputs(task, lanes, seed=0):
    """Two clients of different size together, different weights per lane, in float64."""
    problem = simulated(task)
    model = problem.model
    shard = Shard.build([rows_of(problem, 0), rows_of(problem, 1)], dtype=torch.float64)
    rng = torch.Generator().manual_seed(seed)
    theta = torch.randn(lanes, model.dimension, generator=rng, dtype=torch.float64)
    bounds = torch.rand(lanes, generator=rng, dtype=torch.float64) + 0.2
    return problem, model, shard, theta, bounds


# ---- the kernels


@every_task
@pytest.mark.parametrize("per_client", [False, True])
def test_gradients_agree_with_autograd(task, per_client):
    problem, model, shard, theta, clip = kernel_inputs(task, lanes=19)
    given = torch.stack([theta, theta / 2]) if per_client else theta
    found, diagnostics = model.clipped_gradient_sum(shard, given, clip, diagnose=True)
    loss = loss_of(task, model.columns)
    for client in range(2):
        x, y = rows_of(problem, client)
        x = torch.from_numpy(np.column_stack([x, np.ones(len(x))])).double()
        y = torch.from_numpy(y)
        for lane in range(19):
            W = given[client, lane] if per_client else given[lane]
            each = vmap(grad(loss), in_dims=(None, 0, 0))(W, x, y)
            norm = each.norm(dim=1, keepdim=True)
            expected = (each * (clip[lane] / norm).clamp(max=1)).sum(0)
            torch.testing.assert_close(found[client, lane], expected, rtol=1e-10, atol=1e-10)
            assert diagnostics.clipped[client, lane] == (norm > clip[lane]).sum()
            constant = torch.lgamma(y.double() + 1).sum() if task == "poisson" else 0.0
            losses = vmap(loss, in_dims=(None, 0, 0))(W, x, y).sum() + constant
            torch.testing.assert_close(diagnostics.loss[client, lane], losses, rtol=1e-10, atol=1e-10)


@every_task
def test_hessians_agree_with_autograd(task):
    problem, model, shard, theta, bound = kernel_inputs(task, lanes=19)
    found = model.clipped_hessian_sum(shard, theta, bound)
    loss = loss_of(task, model.columns)
    cut = 0
    for client in range(2):
        x, y = rows_of(problem, client)
        x = torch.from_numpy(np.column_stack([x, np.ones(len(x))])).double()
        y = torch.from_numpy(y)
        for lane in range(19):
            each = vmap(hessian(loss), in_dims=(None, 0, 0))(theta[lane], x, y)
            norm = each.flatten(1).norm(dim=1)
            cut += int((norm > bound[lane]).sum())
            expected = (each * (bound[lane] / norm).clamp(max=1)[:, None, None]).sum(0)
            torch.testing.assert_close(found[client, lane], expected, rtol=1e-10, atol=1e-10)
    assert cut > 20, "some were clipped"


@every_task
def test_hessians_agree_with_the_twin(task):
    problem, model, _, theta, bound = kernel_inputs(task, lanes=2)
    x, y = rows_of(problem, 0)
    found = model.clipped_hessian_sum(Shard.build([(x, y)], dtype=torch.float64), theta, bound)
    client = twin_glm.Client(0, x, y, {}, 1.0, 0)
    client.task = task
    for lane in range(2):
        W = theta[lane].numpy().reshape(model.rows, model.columns)
        np.testing.assert_allclose(found[0, lane].numpy(), client.clipped_hessian_sum(W, bound[lane].item()), rtol=1e-9)


@every_task
def test_evaluation_agrees_with_the_twin(task):
    problem, model, _, theta, _ = kernel_inputs(task, lanes=18)
    shard = Shard.build([(problem.x_eval[:50], problem.y_eval[:50])], dtype=torch.float64)
    losses, correct = model.evaluate(shard, theta)
    for lane in range(18):
        W = theta[lane].numpy().reshape(model.rows, model.columns)
        rows = [twin_glm.with_constant(x) for x in problem.x_eval[:50]]
        each = [twin_glm.loss(task, W, x, y) for x, y in zip(rows, problem.y_eval[:50], strict=True)]
        assert losses[lane].item() == pytest.approx(np.mean(each), rel=1e-10)
        if task != "poisson":
            best = [int(np.argmax(np.append(0.0, W.T @ x))) for x in rows]
            assert correct[lane].tolist() == [a == b for a, b in zip(best, problem.y_eval[:50], strict=True)]
    assert (correct is None) == (task == "poisson"), "counts are not classified"


@every_task
def test_a_lane_does_not_depend_on_its_company(task):
    """In float32, to the last bit: alone, or among 36 others."""
    problem, model, _, theta, bound = kernel_inputs(task, lanes=37)
    shard = Shard.build([rows_of(problem, 2)])
    theta, bound = theta.float(), bound.float()
    gradients = model.clipped_gradient_sum(shard, theta, bound)[0]
    hessians = model.clipped_hessian_sum(shard, theta, bound)
    for lane in (0, 15, 16, 36):
        alone = theta[lane : lane + 1], bound[lane : lane + 1]
        assert torch.equal(model.clipped_gradient_sum(shard, *alone)[0][0, 0], gradients[0, lane])
        assert torch.equal(model.clipped_hessian_sum(shard, *alone)[0, 0], hessians[0, lane])


def test_a_filling_row_adds_nothing_however_sure_the_model_is():
    """Whatever stands in a filling row, its residual may be zero, and zero times infinity is not."""
    model = models.parse("logistic", features=1, classes=2)
    shard = Shard.build([(np.array([[1.0]], np.float32), np.array([1]))])
    filling = dataclasses.replace(shard, norm=torch.full_like(shard.norm, math.inf))
    theta = torch.full((1, 2), 200.0)
    total, diagnostics = model.clipped_gradient_sum(filling, theta, torch.ones(1), diagnose=True)
    assert total.tolist() == [[[0, 0]]]
    assert diagnostics.clipped.tolist() == [[0]]
    assert diagnostics.loss.tolist() == [[0]]
    assert model.clipped_hessian_sum(filling, theta, torch.ones(1)).abs().sum() == 0


def test_poisson_gradients_do_not_overflow():
    """exp(200) is no float32, but its gradient is clipped all the same; the loss says that the lane has diverged."""
    model = models.parse("poisson", features=1, classes=9)
    shard = Shard.build([(np.array([[1.0], [-1.0]], np.float32), np.array([3, 0]))])
    theta = torch.tensor([[0.0, 200.0]])
    total, _ = model.clipped_gradient_sum(shard, theta, torch.tensor([2.0]))
    np.testing.assert_allclose(total[0, 0], [0.0, 2 * math.sqrt(2)], rtol=1e-5, atol=1e-5)
    assert torch.isfinite(model.clipped_hessian_sum(shard, theta, torch.tensor([2.0]))).all()
    losses, _ = model.evaluate(shard, theta)
    assert losses.tolist() == [math.inf]


def test_logistic_is_for_two_classes():
    with pytest.raises(UserError, match="'logistic' is for two classes, the data has 3"):
        models.parse("logistic", features=2, classes=3)
    with pytest.raises(UserError, match=r"'probit' is unknown; choose one of: .*logistic, multinomial, poisson"):
        models.parse("probit", features=2, classes=2)


# ---- the methods

CASES = [
    ("dp-fedsgd", {"learning_rate": 0.5}),
    ("dp-fedavg", {"local_steps": 3, "client_learning_rate": 0.3}),
    ("dp-fedhybrid", {"local_steps": 3, "client_learning_rate": 0.3, "learning_rate": 0.5, "fedavg_rounds": 2}),
    ("dp-fednewton", {"local_steps": 3, "client_learning_rate": 0.3}),
    (
        "dp-fednewton",
        {
            "local_steps": 2,
            "fedavg_rounds": 3,
            "fedavg_share": 0.2,
            "hessian_share": 0.7,
            "hessian_clip": 0.4,
            "smallest_eigenvalue": 0.1,
        },
    ),
]


@pytest.mark.parametrize(("name", "hypers"), CASES, ids=[f"{n}-{h}" for n, h in CASES])
@every_task
@pytest.mark.parametrize("privacy", [{"epsilon": 8.0}, {"epsilon": 30.0, "adjacency": "zero-out"}], ids=str)
def test_agrees_with_the_twin(task, name, hypers, privacy):
    of = simulated(task)
    trial = small.trial(of, name, hypers, rounds=6, every=1, clip=1.5, **privacy)
    plan = plan_of(trial, of.partition.sizes)
    clients = [twin_glm.Client(i, *rows_of(of, i), plan.noise_std, 1.5, trial.seed) for i in range(4)]
    for client in clients:
        client.task = task
    expected = twin_glm.train(clients, of.model.columns, name, trial.hyperparameters, rounds=6)
    _, server = small.weights_after(5, [trial], of)
    scale = max(1.0, np.abs(expected[4]).max())
    np.testing.assert_allclose(server.theta[0], expected[4].flatten(), atol=2e-4 * scale)
    (result,) = server.advance(6)
    assert (result.state, result.rounds) == ("done", 6)
    for t, W in enumerate(expected, start=1):
        error = ((W - of.data.truth) ** 2).sum()
        assert result.metrics["squared_error"][t] == pytest.approx(error, rel=2e-3), t


def test_accuracy_is_told_only_of_classes():
    for task in TASKS:
        of = simulated(task)
        (outcome,) = small.run([small.trial(of, "dp-fedsgd", rounds=2)], of).values()
        assert (outcome.correct == b"") == (task == "poisson")
        assert ("'accuracy': {}" in outcome.metrics) == (task == "poisson")


def test_squared_error_is_told_only_of_the_model_that_was_simulated():
    of = simulated("logistic")
    assert of.truth is not None
    other = Problem.prepare(of.data, of.spec.model_copy(update={"model": "softmax"}))
    (outcome,) = small.run([small.trial(other, "dp-fedsgd", rounds=2)], other).values()
    assert "squared_error" not in outcome.metrics


def run_of(**changes) -> Run:
    hypers = METHODS[changes.pop("name")].check(changes.pop("hypers", {}))
    privacy = PrivacySettings(epsilon=4.0, clip=2.0, **{k: changes.pop(k) for k in list(changes) if k == "adjacency"})
    return Run(privacy, changes.pop("rounds"), hypers, (100, 100), 1)


def test_what_hybrid_releases():
    """Two rounds of 50 steps, then 18 gradients: 100 and 18 releases."""
    events = METHODS["dp-fedhybrid"].releases(run_of(name="dp-fedhybrid", hypers={"fedavg_rounds": 2}, rounds=20))
    assert [(e.purpose, e.count, e.sensitivity, e.share, e.aggregated) for e in events] == [
        ("start", 100, 4.0, 0.5, False),
        ("gradient", 18, 4.0, 0.5, True),
    ]


def test_what_newton_releases():
    """50 steps, then one gradient and one Hessian: half the budget for the start; the rest 3 to 1."""
    newton, hypers = METHODS["dp-fednewton"], {"hessian_share": 0.25, "hessian_clip": 3.0}
    events = newton.releases(run_of(name="dp-fednewton", hypers=hypers, rounds=2))
    assert [(e.purpose, e.count, e.sensitivity, e.share, e.aggregated) for e in events] == [
        ("start", 50, 4.0, 0.5, False),
        ("gradient", 1, 4.0, 0.375, False),
        ("hessian", 1, pytest.approx(3 * math.sqrt(2)), 0.125, False),
    ]
    events = newton.releases(run_of(name="dp-fednewton", hypers=hypers, rounds=2, adjacency="zero-out"))
    assert [e.sensitivity for e in events] == [2.0, 2.0, 3.0]


def test_the_noise_of_the_paper():
    """2 B sqrt(2 K) / (mu n) a step where a stage of K steps has half the budget; the sum's noise is n times that."""
    of = simulated("logistic", sizes="equal")
    trial = small.trial(of, "dp-fedhybrid", {"local_steps": 50}, rounds=31, clip=2.0)
    plan, mu = plan_of(trial, of.partition.sizes), mu_of(8.0, 1e-5)
    assert plan.noise_std["start"] == pytest.approx(2 * 2.0 * math.sqrt(2 * 50) / mu, rel=1e-6)
    assert plan.noise_std["gradient"] == pytest.approx(2 * 2.0 * math.sqrt(2 * 30) / mu, rel=1e-6)
    assert plan.mu("local") == pytest.approx(mu, rel=1e-6)


@pytest.mark.parametrize("name", ["dp-fedhybrid", "dp-fednewton"])
def test_a_second_stage_needs_rounds(name):
    of = simulated("logistic")
    with pytest.raises(UserError, match="fedavg_rounds = 3 leaves none of 3 rounds"):
        plan_of(small.trial(of, name, {"fedavg_rounds": 3}, rounds=3), of.partition.sizes)


def test_newton_is_not_for_a_softmax_head():
    softmax, glm = small.problem().model, simulated("poisson").model
    assert not METHODS["dp-fednewton"].accepts(softmax)
    assert METHODS["dp-fednewton"].accepts(glm)


def test_solving_mends_the_hessian():
    """Symmetric, eigenvalues -1 and 3 raised to 0.5 and 3: (1, 1) is the eigenvector of 3, (1, -1) that of -1."""
    H = torch.tensor([[1.0, 3.0], [1.0, 1.0]])
    smallest = torch.tensor([0.5])
    torch.testing.assert_close(solve(H, torch.tensor([3.0, 3.0]), smallest), torch.tensor([1.0, 1.0]))
    torch.testing.assert_close(solve(H, torch.tensor([1.0, -1.0]), smallest), torch.tensor([2.0, -2.0]))
    assert solve(H / 0, torch.tensor([1.0, 1.0]), smallest).isnan().all()


def test_without_noise_newton_finds_the_maximum():
    """Newton's iterations on one client's rows end where the gradient is zero."""
    of = simulated("logistic", clients=1)
    hypers = {"local_steps": 1, "hessian_clip": 100.0, "smallest_eigenvalue": 1e-6}
    trial = small.trial(of, "dp-fednewton", hypers, rounds=8, every=8, epsilon=math.inf, clip=100.0)
    _, server = small.weights_after(7, [trial], of)
    shard = Shard.build([rows_of(of, 0)])
    gradient, _ = of.model.clipped_gradient_sum(shard, server.theta, torch.tensor([100.0]))
    assert gradient.abs().max() < 1e-4


# ---- simulated data


@every_task
def test_a_simulation_is_the_same_again(task):
    name = f"simulated:{task},3,50,uniform,4"
    once, again, other = features.load(name, 1), features.load(f"{name},1"), features.load(name, 2)
    assert once.fingerprint == again.fingerprint != other.fingerprint
    for array in ("x_train", "y_train", "x_test", "y_test", "client_train", "truth"):
        assert np.array_equal(getattr(once, array), getattr(again, array))
    assert not np.array_equal(once.x_test, other.x_test)
    assert np.array_equal(once.truth, other.truth), "all draws estimate the same"
    assert once.task == task
    assert once.clients == 3


def test_a_client_is_the_same_in_any_company():
    few, many = (features.load(f"simulated:poisson,{m},50,lognormal,4,9") for m in (2, 5))
    rows = len(few.y_train)
    assert np.array_equal(few.x_train, many.x_train[:rows])
    assert np.array_equal(few.y_train, many.y_train[:rows])


def test_sizes():
    drawn = {}
    for kind in ("equal", "uniform", "lognormal"):
        data = features.load(f"simulated:logistic,400,100,{kind},1,5")
        drawn[kind] = np.bincount(data.client_train)
    assert set(drawn["equal"]) == {100}
    assert (drawn["uniform"].min(), drawn["uniform"].max()) == (50, 150)
    assert drawn["uniform"].mean() == pytest.approx(100, abs=5)
    assert drawn["lognormal"].min() >= 25
    assert drawn["lognormal"].max() <= 400
    assert drawn["lognormal"].mean() == pytest.approx(100, abs=8)
    # a lognormal's deviation is mean * sqrt(exp(0.5^2) - 1) = 53
    assert drawn["lognormal"].std() == pytest.approx(53, abs=8)
    assert (drawn["lognormal"] > 150).sum() > 20, "its tail is long"


@every_task
def test_labels_follow_the_truth(task):
    """The truth makes the score, the mean of x (mean(eta) - y)^T, vanish."""
    data = features.load(f"simulated:{task},1,20000,equal,3,1")
    W = data.truth
    assert np.linalg.norm(W[:-1, 0]) == pytest.approx(1.5)
    assert np.abs(data.x_train).max() <= 1
    rows = [twin_glm.with_constant(x) for x in data.x_train]
    score = np.mean([twin_glm.gradient(task, W, x, y) for x, y in zip(rows, data.y_train, strict=True)], axis=0)
    assert np.abs(score).max() < 0.015
    wrong = np.mean([twin_glm.gradient(task, -W, x, y) for x, y in zip(rows, data.y_train, strict=True)], axis=0)
    assert np.abs(wrong).max() > 0.15


def test_counts_need_no_classes():
    data = Simulation("poisson", 1, 30, "equal", 5, 1)
    labels = data.draw()["y_train"]
    assert set(range(labels.max() + 1)) - set(labels), "a count in between is missing"
    loaded = features.load("simulated:poisson,1,30,equal,5,1")
    assert np.array_equal(loaded.y_train, labels)
    assert len(loaded.validation_rows(0.1, 42)) > 0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("simulated", "expected simulated:TASK,CLIENTS"),
        ("simulated:logistic,3,50,equal", "expected simulated:TASK,CLIENTS"),
        ("simulated:probit,3,50,equal,4", "TASK = 'probit' is unknown; choose one of: logistic, multinomial, poisson"),
        ("simulated:logistic,3,50,zipf,4", "SIZES = 'zipf' is unknown; choose one of: equal, uniform, lognormal"),
        ("simulated:logistic,three,50,equal,4", "CLIENTS = 'three' is not a whole number"),
        ("simulated:logistic,3,-50,equal,4", "MEAN_SIZE = '-50' is not a whole number"),
        ("simulated:logistic,0,50,equal,4", r"CLIENTS = 0 is not in \[1, "),
        ("simulated:logistic,3,5,equal,4", r"MEAN_SIZE = 5 is not in \[10, "),
        ("simulated:logistic,3,50,equal,0", r"DIMENSION = 0 is not in \[1, 1000\]"),
        ("simulated:logistic,3,50,equal,4,x", "SEED = 'x' is not a whole number"),
        ("simulated:logistic,100000,100000,equal,4", "CLIENTS x MEAN_SIZE"),
    ],
)
def test_a_bad_name_is_named(name, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        features.load(name)
    assert repr(name) in str(caught.value)

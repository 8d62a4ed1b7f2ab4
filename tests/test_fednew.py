"""DP-FedNew: its Hessian, its two levels, and what can and what cannot be said of its privacy."""

import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import small
import torch
import twin
from small import varied_trials
from twin_agreement import ROUNDS, twin_of

from trainables.errors import UserError
from trainables.federation.pack import check, plan_of, program_of
from trainables.methods.base import clip_norm
from trainables.methods.fednew import PrimalUpdate, lemma3, scaled_sum, stretch
from trainables.models.curvature import by_class, by_row, clipped_hessian_sum
from trainables.models.shard import Shard

BOTH = pytest.mark.parametrize("name", ["dp-fednew", "dp-fednew-fc"])
SECURE = {"release": "secure-aggregation", "adjacency": "zero-out"}

# ---- the Hessian


def rows_of(count: int, features: int = 5, classes: int = 4, seed: int = 3):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, features)).astype(np.float32), rng.integers(0, classes, count)


@pytest.mark.parametrize("bound", [0.3, 1.5, math.inf])
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0], ids="weights of about {}".format)
def test_the_hessian_is_the_sum_of_those_of_the_rows(bound, scale):
    """1,100 rows are two chunks and a rest. Weights of about 30 make the model sure of itself: p is 0 or 1."""
    x, y = rows_of(1100)
    W = scale * np.random.default_rng(4).normal(size=(6, 4)).astype(np.float32)
    found = clipped_hessian_sum(Shard.build([(x, y)]), torch.from_numpy(W).flatten(), bound)[0].double().numpy()
    expected = sum(twin.clipped(twin.hessian(W.astype(float), twin.with_constant(row)), bound) for row in x)
    order = by_class(torch.arange(24.0), 4).long().numpy()
    np.testing.assert_allclose(found, expected[np.ix_(order, order)], rtol=0, atol=2e-6 * np.abs(expected).max())
    assert np.linalg.norm(found) <= bound * 1100
    assert np.linalg.eigvalsh(found).min() > -1e-6 * np.abs(found).max()


def test_clients_side_by_side_have_their_own_hessians():
    """The shorter ones are filled up with rows that must count for nothing."""
    parts = [rows_of(count, seed=count) for count in (40, 7, 90)]
    theta = torch.from_numpy(np.random.default_rng(4).normal(size=24).astype(np.float32)) * 20
    together = clipped_hessian_sum(Shard.build(parts), theta, 1.0)
    for found, part in zip(together, parts, strict=True):
        torch.testing.assert_close(found, clipped_hessian_sum(Shard.build([part]), theta, 1.0)[0])


def test_by_row_undoes_by_class():
    values = torch.arange(24.0).view(2, 12)
    assert by_class(values, 3)[0].tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
    assert torch.equal(by_row(by_class(values, 3), 3), values)


MEMORY = """
import resource, numpy as np, torch
from trainables.models.curvature import clipped_hessian_sum
from trainables.models.shard import Shard
torch.set_num_threads(1)
rng = np.random.default_rng(0)
def solve(rows, features, classes):
    shard = Shard.build([(rng.normal(size=(rows, features)).astype(np.float32), rng.integers(0, classes, rows))])
    H = clipped_hessian_sum(shard, torch.randn((features + 1) * classes), 1.0).double()
    H.diagonal(dim1=1, dim2=2).add_(1.0)
    return torch.cholesky_solve(torch.ones(1, H.shape[1], 1).double(), torch.linalg.cholesky_ex(H)[0])
solve(8, 3, 3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert solve(500, 64, 10).isfinite().all()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_no_hessian_of_a_single_row_is_ever_in_memory():
    """500 rows, 64 features, 10 classes: 500 matrices of 650 x 650 float32 would be 806 MiB."""
    # through a shell, since a process begins with its parent's peak
    command = ["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, MEMORY]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 1 < float(done.stdout) < 200


def test_the_covariance_is_factored_once(monkeypatch):
    shard = Shard.build([rows_of(30)])
    values, vectors = shard.spectrum(1.0)
    gram = (vectors * values.unsqueeze(1)) @ vectors.mT
    torch.testing.assert_close(gram[0] * 30, shard.gram(1.0).view(6, 6))
    monkeypatch.setattr(torch.linalg, "eigh", None)
    assert shard.spectrum(1.0)[0] is values
    with pytest.raises(TypeError):
        shard.spectrum(2.0)


# ---- levels and switches

VARIANTS = [
    ({}, {"level": "user"}),
    ({"duals": False}, {"level": "user", **SECURE}),
    ({"as_released": True}, {"level": "user", **SECURE}),
    ({"duals": False}, SECURE),
    ({"as_released": True, "sum_clip": 5.0}, SECURE),
]
every_variant = pytest.mark.parametrize(("hypers", "privacy"), VARIANTS, ids=str)


@BOTH
@every_variant
def test_agrees_with_the_twin(name, hypers, privacy, small_problem):
    """Users' updates are clipped to 0.5, which cuts some of them."""
    clip = {"clip": 0.5} if privacy.get("level") == "user" else {}
    hypers = {"learning_rate": 0.3, "rho": 0.5, **hypers}
    trial = small.trial(small_problem, name, hypers, rounds=25, every=10, **privacy, **clip)
    weights, _ = small.weights_after(ROUNDS, [trial], small_problem)
    slow = twin_of(trial, small_problem).weights[-1]
    np.testing.assert_allclose(weights[0], slow, rtol=0, atol=1e-5 * np.abs(slow).max())


@BOTH
@every_variant
def test_keeps_the_contract(name, hypers, privacy, small_problem):
    """Alone or together, on one host or three, with or without a restart: the same bits."""
    drawn = varied_trials(name, small_problem, 18)
    trials = [
        t.model_copy(
            update={
                "hyperparameters": {**t.hyperparameters, "sum_clip": 10.0, **hypers},
                "privacy": t.privacy.model_copy(update={**privacy, "clip": min(t.privacy.clip, 5.0)}),
            }
        )
        for t in drawn
    ]
    together = small.run(trials, small_problem)
    assert together == small.run(trials, small_problem, hosts=3, restart_at=5)
    for trial in trials[::9]:
        assert small.run([trial], small_problem) == {trial.key: together[trial.key]}


@BOTH
def test_only_duals_are_kept(name, small_problem):
    for hypers, kept in (({}, True), ({"duals": False}, False), ({"duals": False, "as_released": True}, True)):
        assert program_of(small.trial(small_problem, name, hypers, clip=1.0)).stateful is kept


@BOTH
def test_needs_the_linear_head(name):
    of = small.problem()
    mlp = of.spec.model_copy(update={"model": "mlp:4"})
    trial = small.trial(of, name).model_copy(update={"problem": mlp})
    with pytest.raises(UserError, match="cannot train it"):
        check(trial, type(of)(mlp, of.data, of.partition, of.x_eval, of.y_eval))


# ---- the account


def plan(hypers=None, sizes=(300,) * 100, **privacy):
    """Of DP-FedNew with C1 = 1."""
    trial = small.trial(small.problem(), "dp-fednew", hypers, rounds=70, epsilon=1.0, clip=1.0, **privacy)
    return plan_of(trial, sizes)


def test_sensitivity_is_that_of_lemma_3():
    """gamma = 0.1 + 1 and |D_i| = 300: 1/1.1 + 1/(1.1^2 - 1.1/300) = 0.909091 + 0.828958."""
    assert plan(**SECURE).events[0].sensitivity == pytest.approx(1.738049, abs=1e-6)
    assert plan().events[0].sensitivity == pytest.approx(2 * 1.738049, abs=1e-6), "replace-one"
    unequal = plan(sizes=(20, *[300] * 99), **SECURE)
    assert unequal.events[0].sensitivity == pytest.approx(1 / 1.1 + 1 / (1.1**2 - 1.1 / 20)), "the smallest client's"


def test_too_little_damping_is_refused():
    hypers = {"alpha": 0.01, "rho": 0.02}
    assert plan(hypers, sizes=[34]).events
    with pytest.raises(UserError) as caught:
        plan(hypers, sizes=[300, 33])
    assert str(caught.value) == (
        "method dp-fednew: alpha = 0.01 and rho = 0.02 must add up to more than hessian_clip / |D_i| = 0.030303; "
        "the smallest client has 33 rows"
    )
    with pytest.raises(UserError, match=r"the smallest client has 4 rows$"):
        plan({"alpha": 0.125, "rho": 0.125}, sizes=[4])  # just as much is too little
    with pytest.raises(UserError, match=r"^sum_clip = 0.9 is below clip = 1"):
        plan({"as_released": True, "sum_clip": 0.9})


def test_how_far_lemma_4_can_stretch_a_move():
    assert stretch(1.0, 100.0, 10) == pytest.approx(100 / math.sqrt(100**2 - 1.1**2))
    assert stretch(1.0, 1.5, 2) == math.sqrt(7), "no room beside the clip: what holds in any case"


@pytest.mark.parametrize("level", ["record", "user"])
def test_duals_get_no_credit_from_secure_aggregation(level):
    """100 clients: without duals a tenth of the noise is enough."""
    on, off = plan(level=level, **SECURE), plan({"duals": False}, level=level, **SECURE)
    assert on.noise_std["primal"] == pytest.approx(10 * off.noise_std["primal"])
    assert on.actual_epsilon["secure-aggregation"] == pytest.approx(1, rel=1e-5)
    assert off.actual_epsilon["secure-aggregation"] == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("level", ["record", "user"])
def test_as_released_adds_the_published_noise_and_has_the_provable_epsilon(level):
    """The noise is that of the aggregate account, as without duals."""
    honest, published = (
        plan(hypers, level=level, **SECURE) for hypers in ({"duals": False, "sum_clip": 2.0}, AS_RELEASED)
    )
    assert published.noise_std["primal"] == pytest.approx(honest.noise_std["primal"])
    assert published.actual_epsilon["secure-aggregation"] == published.actual_epsilon["local"] > 10
    alone = plan(AS_RELEASED, level=level, adjacency="zero-out")
    assert alone.noise_std["primal"] == pytest.approx(10 * published.noise_std["primal"])
    # C1 = 1, C2 = 2: the gradients' term is wider by 2 / sqrt(4 - 1) = 1.155, or hardly more for one record more
    wider = {"record": (1.16 / 1.1 + 2 / 1.21) / (1 / 1.1 + 2 / 1.21), "user": 1.0}[level]
    assert alone.mu("local") / honest.mu("secure-aggregation") == pytest.approx(wider, rel=5e-3)


AS_RELEASED = {"as_released": True, "sum_clip": 2.0}


# ---- what the account rests on, by brute force


def worst_move(bounded, C1, C2, pulls, *, gamma=0.5, hessian_clip=1.0, size=20, tries=200_000):
    """The largest |D| ||y - y'|| found over mean gradients, Hessians and one more record, in three dimensions."""
    rng = np.random.default_rng(5)

    def vectors(lengths):
        drawn = rng.normal(size=(tries, 3))
        return drawn * np.reshape(lengths / np.linalg.norm(drawn, axis=1), (-1, 1))

    def matrices(norms):
        roots = vectors(np.sqrt(norms))
        return roots[:, :, None] * roots[:, None, :]

    def primal(g, H):
        right = bounded(torch.from_numpy(g), torch.from_numpy(b), torch.full((1, 1), C2).double()).numpy()
        return np.linalg.solve(H + gamma * np.eye(3), right[:, :, None])[:, :, 0]

    def some():
        """Half of them nothing, the others evenly spread up to one."""
        return rng.uniform(size=tries) * rng.integers(0, 2, tries)

    g, more, b = (
        vectors(C1 * (1 - some())),
        vectors(np.full(tries, C1 / size)),
        vectors(pulls * rng.uniform(size=tries)),
    )
    H, H_more = matrices(hessian_clip * some()), matrices(hessian_clip / size * rng.integers(0, 2, tries))
    return size * np.linalg.norm(primal(g, H) - primal(g + more, H + H_more), axis=1).max()


def clipped_sum(g, b, bound):
    return clip_norm(g + b, bound)


@pytest.mark.parametrize(("C1", "C2"), [(1.0, 1.0), (1.0, 0.3), (1.0, 1.5)])
def test_lemma_3_holds_where_the_sum_is_clipped(C1, C2):
    """And it is no idle bound: half of it is reached."""
    bound = lemma3(C1, 1.0, C2, 0.5, 20)
    assert 0.5 * bound < worst_move(clipped_sum, C1, C2, pulls=3) <= bound


def test_lemma_3_does_not_hold_where_lemma_4_scales_the_pull():
    """Its gradient term alone (Hessians of almost nothing) is C1 / gamma = 2."""
    few = {"hessian_clip": 1e-9, "pulls": 3}
    published = lemma3(1.0, 1e-9, 1.0, 0.5, 20)
    assert published == pytest.approx(2)
    assert worst_move(scaled_sum, 1.0, 1.0, **few) > 2 * published
    assert worst_move(clipped_sum, 1.0, 1.0, **few) <= published
    for C2 in (1.0, 1.06, 1.2, 3.0):
        proven = lemma3(stretch(1.0, C2, 20), 1e-9, C2, 0.5, 20)
        assert worst_move(scaled_sum, 1.0, C2, **few) <= proven


def test_lemma_4_makes_the_sum_as_long_as_the_bound():
    g, b = torch.tensor([[0.6, 0.0]]), torch.tensor([[0.0, 2.0]])
    assert scaled_sum(g, b, torch.tensor([[1.0]]))[0].tolist() == pytest.approx([0.6, 0.8])
    assert scaled_sum(g, b, torch.tensor([[9.0]]))[0].tolist() == pytest.approx([0.6, 2.0]), "short enough as it is"
    assert scaled_sum(g, 0 * b, torch.tensor([[0.5]]))[0].tolist() == pytest.approx([0.6, 0.0]), "nothing to scale"


class OneNumber(PrimalUpdate):
    """A model of one weight; every client has a different Hessian."""

    curvature = "a given Hessian"

    def solve(self, client, theta, right, bound):
        return right / (client.hessian + client.hypers["alpha"] + client.hypers["rho"])


def sums_seen(program, noises, gradients, hessians, hypers, clip):
    """What secure aggregation shows of every round, given all noises (rounds, clients)."""
    n, state, y, seen = len(hessians), {}, torch.zeros(1, 1).double(), []

    def column(values):
        return torch.as_tensor(values, dtype=torch.double).view(-1, 1, 1)

    for g, noise in zip(gradients, noises, strict=True):
        client = SimpleNamespace(
            hypers={name: torch.tensor([[value]]).double() for name, value in hypers.items()},
            broadcast={"y": y},
            state=state,
            size=column(np.ones(n)),
            clip=torch.tensor([[clip]]).double(),
            hessian=column(hessians),
            zeros=lambda: column(np.zeros(n)),
            clipped_gradient_sum=lambda theta, g=g: column(g),
            gradient_mean=lambda theta, g=g: column(g),
            noise=lambda purpose, noise=noise: column(noise),
        )
        total = program.round(client, None).sum(0)
        seen.append(float(total))
        y = total / n
    return np.array(seen)


def exact_mu(program, here, there, hessians, hypers, clip=math.inf):
    """mu of all sums together, in units of a client's noise. They are linear in the noises as long as nothing is
    clipped, so a test must distinguish two Gaussians with the same covariance."""
    rounds, n, tiny = *here.shape, 1e-6

    def run(noises, gradients):
        return sums_seen(program, noises, gradients, hessians, hypers, clip)

    silence = np.zeros((rounds, n))
    middle = run(silence, here)
    columns = []
    for t in range(rounds):
        for i in range(n):
            noise = silence.copy()
            noise[t, i] = tiny
            columns.append((run(noise, here) - middle) / tiny)
    J = np.array(columns).T
    shift = run(silence, there) - middle
    return math.sqrt(shift @ np.linalg.solve(J @ J.T, shift))


def turning_record(duals: bool) -> float:
    """mu of six rounds over what the aggregate account says. Client 0 has a flat loss, the others a curved one, and
    one record of client 0 pulls to one side and to the other in turn."""
    n, rounds, step, hypers = 20, 6, 1e-4, {"alpha": 0.001, "rho": 0.099, "sum_clip": 0.01}
    here = np.zeros((rounds, n))
    there = here.copy()
    there[:, 0] = step * (-1.0) ** np.arange(rounds)
    hessians = np.array([0.0, *[1.0] * (n - 1)])
    sensitivity = lemma3(1.0, 1.0, hypers["sum_clip"], 0.1, size=round(1 / step)) * step
    found = exact_mu(OneNumber("record", 1.0, duals, False), here, there, hessians, hypers)
    return found / (math.sqrt(rounds / n) * sensitivity)


def stubborn_user(duals: bool) -> float:
    """The same at user level, replacing client 0: its update is at one end of what is allowed, or at the other."""
    n, rounds, clip, hypers = 60, 6, 1.0, {"alpha": 0.01, "rho": 0.99, "sum_clip": 1.0}
    here, there = (np.full((rounds, n), 0.0) for _ in range(2))
    here[:, 0], there[:, 0] = 1e3, -1e3
    found = exact_mu(OneNumber("user", 1.0, duals, False), here, there, np.zeros(n), hypers, clip)
    return found / (math.sqrt(rounds / (n - 1)) * 2 * clip)


@pytest.mark.parametrize("case", [turning_record, stubborn_user])
def test_with_duals_sums_tell_more_than_the_aggregate_account_says(case):
    """The duals of all clients add up to nothing, so what the others answer shows the dual of client 0: its earlier
    updates once more. Without duals the account holds."""
    assert case(duals=True) > 1.3
    assert case(duals=False) <= 1

"""Lanes with different centres in one pack: they agree with rows from which the centre was subtracted, no lane depends
on the others, and no record contributes more than the clip, however far away the features are."""

import math

import numpy as np
import pytest
import small
import torch
from every_kernel import on_a_gpu
from some_methods import with_marks

from orchestrator.execution.planning import plan
from orchestrator.study.study import Study
from trainables import models
from trainables.federation.hosts import Hosts
from trainables.federation.problem import ProblemData
from trainables.federation.server import Server
from trainables.federation.trial_spec import Preprocess
from trainables.methods import METHODS
from trainables.models import centres as centres_module
from trainables.models import centring
from trainables.models.centres import LONGEST, Centres, sharing_of
from trainables.models.shard import Shard
from trainables.models.softmax import SoftmaxHead

MODELS = ("softmax", "mlp:5", "multinomial", "poisson")
IN_BF16 = {"automatic": True, "precision": "bf16"}
CASES = [*((model, {}) for model in MODELS), ("softmax", {"automatic": True}), ("softmax", IN_BF16)]
CASE_NAMES = [*MODELS, "softmax, automatic", "softmax, automatic, bf16"]


def case(model="softmax", features=6, classes=4, rows=(150, 60, 9), lanes=19, length=4.0, seed=5):
    """A model, the clients' rows, weights, clips and one of five centres for every lane."""
    rng = np.random.default_rng(seed)
    head = models.parse(model, features=features, classes=classes)
    means = length / math.sqrt(features) + 0.3 * rng.standard_normal((5, features))
    parts = [
        ((means[0] + rng.standard_normal((n, features))).astype(np.float32), rng.integers(0, classes, n)) for n in rows
    ]
    theta = 0.2 * torch.from_numpy(rng.standard_normal((lanes, head.dimension)).astype(np.float32))
    clip = torch.from_numpy(rng.choice([0.1, 1.0, 50.0], lanes).astype(np.float32))
    return head, parts, theta, clip, means.astype(np.float32)[rng.integers(0, 5, lanes)]


def sums(head, parts, theta, clip, centre, device="cpu", precision="float32", **options):
    shard = Shard.build(parts, device).with_centres(Centres.of(centre, device), precision)
    found, seen = centring.clipped_gradient_sum(
        head, shard, theta.to(device), clip.to(device), diagnose=True, **options
    )
    one = Shard.build(parts[:1], device).with_centres(Centres.of(centre, device))
    loss, right = centring.evaluate(head, one, theta.to(device) if theta.dim() == 2 else theta[0].to(device))
    parts = [found, seen.loss, seen.clipped, loss.unsqueeze(0), *([] if right is None else [right.unsqueeze(0)])]
    return [part.cpu() for part in parts]


def exact(head, parts, theta, clip, centre, **options):
    """The same in float64, lane by lane, from rows without the centre."""
    lanes = []
    for lane, mean in enumerate(centre):
        rows = [(x.astype(np.float64) - mean, y) for x, y in parts]
        shards = [Shard.build(some, dtype=torch.float64) for some in (rows, rows[:1])]
        weights = theta[..., lane : lane + 1, :].double()
        bound = clip[lane : lane + 1].double()
        found, seen = head.clipped_gradient_sum(shards[0], weights, bound, diagnose=True, **options)
        loss, right = head.evaluate(shards[1], weights if theta.dim() == 2 else weights[0])
        some = [found, seen.loss, seen.clipped, loss.unsqueeze(0), *([] if right is None else [right.unsqueeze(0)])]
        lanes.append(some)
    return [torch.cat(parts, dim=1) for parts in zip(*lanes, strict=True)]


def assert_near(found, expected, parts, clip):
    rows = torch.tensor([len(y) for _, y in parts]).view(-1, 1)
    assert ((found[0] - expected[0]).norm(dim=2) <= 2e-6 * rows * clip.clamp(max=10)).all()
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-4, atol=1e-4)
    assert (found[2] - expected[2]).abs().max() <= 1, "a row may be just as long as the clip"
    torch.testing.assert_close(found[3].double(), expected[3].double(), rtol=1e-4, atol=1e-4)
    if len(expected) > 4:
        assert (found[4] == expected[4]).float().mean() > 0.99, "a row may lie on the border"


@pytest.mark.parametrize("of_client", [False, True])
@pytest.mark.parametrize("length", [4.0, 100.0])
@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_sums_agree_with_rows_without_the_centre(model, automatic, length, of_client, device):
    """Centres that are near, and centres that are subtracted from the rows."""
    head, parts, theta, clip, centre = case(model, length=length)
    if of_client:
        theta = torch.stack([theta, 0.5 * theta, -theta])
    found = sums(head, parts, theta, clip, centre, device, automatic=automatic)
    assert_near(found, exact(head, parts, theta, clip, centre, automatic=automatic), parts, clip)


@pytest.mark.parametrize("shape", [(100, 47), (40, 100), (200, 50)])
def test_sums_of_other_shapes(shape, device, request):
    """A GPU's kernel computes the products itself, except in the last case."""
    if shape == (200, 50) and "interpreted" in request.node.name:
        pytest.skip("Triton's interpreter cannot run the kernel between the products")
    head, parts, theta, clip, centre = case("softmax", *shape, rows=(70, 9), lanes=7)
    assert_near(sums(head, parts, theta, clip, centre, device), exact(head, parts, theta, clip, centre), parts, clip)


@pytest.mark.parametrize(("model", "options"), CASES, ids=CASE_NAMES)
def test_a_lane_does_not_depend_on_the_centres_of_others(model, options, device):
    """Together, in another order, and alone; some of the centres are subtracted from the rows."""
    if device == "cuda" and model.startswith("mlp"):
        pytest.skip("torch's products on a GPU may round differently for other lanes (docs/architecture.md)")
    head, parts, theta, clip, centre = case(model, lanes=38)
    centre[::3] *= 50
    together = sums(head, parts, theta, clip, centre, device, **options)
    order = np.random.default_rng(1).permutation(38)
    shuffled = sums(head, parts, theta[order], clip[order], centre[order], device, **options)
    assert all(torch.equal(a[:, order], b) for a, b in zip(together, shuffled, strict=True))
    for lanes in ([0], [1], [37], [5, 6, 7], list(range(1, 18))):
        some = sums(head, parts, theta[lanes], clip[lanes], centre[lanes], device, **options)
        assert all(torch.equal(a[:, lanes], b) for a, b in zip(together, some, strict=True))


def test_a_lane_of_a_wide_head_does_not_depend_on_the_others(device, request):
    """Features that a GPU's kernel cannot hold: torch computes the products, and lanes still share the rows."""
    if "interpreted" in request.node.name:
        pytest.skip("Triton's interpreter cannot run the kernel between the products")
    head, parts, theta, clip, centre = case("softmax", 200, 10, lanes=70)
    assert sharing_of(head, Shard.build(parts, device), theta.to(device)) == "constant"
    together = sums(head, parts, theta, clip, centre, device)
    for lanes in ([0], [69], [5, 6, 7], list(range(1, 67))):
        some = sums(head, parts, theta[lanes], clip[lanes], centre[lanes], device)
        assert all(torch.equal(a[:, lanes], b) for a, b in zip(together, some, strict=True))


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_lower_precision_rounds_the_centred_rows(precision, automatic, device):
    """As if the rows had come without the centre: a rounded row may lose its distance from the centre."""
    head, parts, theta, clip, centre = case(lanes=6, length=20.0)
    theta, clip = theta.to(device), clip.to(device)
    shard = Shard.build(parts, device).with_centres(Centres.of(centre, device), precision)
    found, _ = centring.clipped_gradient_sum(head, shard, theta, clip, automatic=automatic)
    for lane in range(6):
        rows = Shard.build([(x - centre[lane], y) for x, y in parts], device, precision=precision)
        some = theta[lane : lane + 1], clip[lane : lane + 1]
        alone, _ = head.clipped_gradient_sum(rows, *some, automatic=automatic)
        assert torch.equal(found[:, lane], alone[:, 0])


def test_a_model_that_overrides_the_sum_gets_rows_without_the_centre():
    class Own(SoftmaxHead):
        def clipped_gradient_sum(self, shard, theta, clip, *, diagnose=False, automatic=False):
            assert shard.centres is None
            return super().clipped_gradient_sum(shard, theta, clip, diagnose=diagnose, automatic=automatic)

    head, parts, theta, clip, centre = case()
    own = Own(head.features, head.classes)
    shard = Shard.build(parts)
    assert sharing_of(head, shard, theta) == "constant"
    assert sharing_of(own, shard, theta) == "no"
    near = sums(head, parts, theta, clip, centre)
    assert_near(sums(own, parts, theta, clip, centre), [part.double() for part in near], parts, clip)


def test_a_shard_refuses_another_number_of_lanes(device):
    head, parts, theta, clip, centre = case(lanes=5)
    shard = Shard.build(parts, device).with_centres(Centres.of(centre, device))
    with pytest.raises(ValueError, match="centres for 5 lanes, not for 3"):
        head.clipped_gradient_sum(shard, theta[:3].to(device), clip[:3].to(device))


# ---- the clip, however far away the features are


@pytest.mark.parametrize(("model", "options"), CASES, ids=CASE_NAMES)
@pytest.mark.parametrize("length", [1.0, LONGEST * 0.999, LONGEST * 1.001, 1e9])
@pytest.mark.parametrize("spread", [0.0, 1e3, 1e9])
def test_no_record_counts_more_than_the_clip(model, options, length, spread, device):
    """Every row is a client, so that its contribution is seen: rows as near to the centre as float32 allows, and far
    away. Subtracting m (sum r) from sum x r in float32 would be wrong by 60 times the clip at 1e9."""
    rng = np.random.default_rng(8)
    head = models.parse(model, features=3, classes=3)
    mean = np.array([0.8, -0.6, 0.0]) * length
    x = (mean + spread * rng.standard_normal((40, 3))).clip(-1e9, 1e9).astype(np.float32)
    parts = [(row[None], np.array([label])) for row, label in zip(x, rng.integers(0, 3, 40), strict=True)]
    theta = torch.from_numpy(rng.standard_normal((4, head.dimension)).astype(np.float32))
    clip = torch.tensor([1e-3, 0.1, 1.0, 10.0])
    centre = np.stack([mean, mean, mean * 0.9, mean]).astype(np.float32)
    found = sums(head, parts, theta, clip, centre, device, **options)[0]
    assert torch.isfinite(found).all()
    assert (found.norm(dim=2) <= clip * (1 + 1e-5)).all()


@pytest.mark.parametrize("model", ["softmax", "multinomial", "mlp:2"])
@pytest.mark.parametrize("length", [16.0, LONGEST * 0.999, 1e9])
def test_one_record_moves_a_long_sum_by_its_bound(model, length, device):
    """The worst case: all rows are alike, next to the centre, and their residuals as long as the clip allows."""
    count = 4_000
    head = models.parse(model, features=2, classes=3)
    theta = 0.01 * torch.linspace(-1, 1, head.dimension).unsqueeze(0)
    mean = (np.array([0.6, -0.8]) * length).astype(np.float32)
    x = np.tile((mean + np.array([0.7, -0.7]) * np.spacing(np.float32(length)).clip(1)).astype(np.float32), (count, 1))
    y = np.zeros(count, dtype=np.int64)
    other = y.copy()
    other[321] = 1
    clip = torch.tensor([0.3])
    with_one, with_other = (
        sums(head, [(x, labels)], theta, clip, mean[None], device)[0][0, 0] for labels in (y, other)
    )
    one, another = (
        exact(head, [(x[:1], label)], theta, clip, mean[None])[0][0, 0] for label in (y[:1], other[321:322])
    )
    should = (one - another).norm().item()
    assert should > 0.3
    assert (with_one - with_other).norm().item() == pytest.approx(should, rel=1e-4)


# ---- whole runs


CENTRED = {"preprocess": Preprocess(center=0.1, bound=3.0), "aggregate": "size"}


def problem_for(method):
    return next(of for of in (small.problem(), small.problem(model="multinomial")) if method.accepts(of.model))


def mixed(name, of, count=5, **privacy):
    """Trials with different seeds, budgets and shares of the centre: every one has its own centre."""
    trials = []
    for number in range(count):
        trial = small.trial(
            *(of, name, small.shared_values(name)),
            rounds=6,
            every=3,
            seed=7 + number % 3,
            **{"epsilon": 4.0 + number, "clip": 1.0 + number % 2, **privacy},
        )
        preprocess = Preprocess(center=0.1 + 0.1 * (number == 2), bound=3.0)
        trials.append(trial.model_copy(update=CENTRED | {"preprocess": preprocess}))
    return trials


@pytest.mark.parametrize(("name", "level"), with_marks((m.name, level) for m in METHODS.values() for level in m.levels))
def test_a_pack_of_many_centres(name, level, monkeypatch):
    """Every method and level: the same bits together and alone, on one host and three, with a restart; and nearly the
    same numbers if the centres are subtracted from the rows."""
    of = problem_for(METHODS[name])
    trials = mixed(name, of, level=level)
    together = small.run(trials, of)
    assert len({outcome.weights for outcome in together.values()}) == len(trials)
    assert together == small.run(trials, of, hosts=3, restart_at=3)
    assert {trials[2].key: together[trials[2].key]} == small.run([trials[2]], of)
    monkeypatch.setattr(centres_module, "LONGEST", 0.0)
    for key, other in small.run(trials, of).items():
        weights, apart = (np.frombuffer(outcome.weights, np.float32) for outcome in (together[key], other))
        np.testing.assert_allclose(weights, apart, rtol=0, atol=1e-4 * np.abs(apart).max())


@on_a_gpu
@pytest.mark.parametrize("name", ["dp-fedgd", "dp-fedsofim", "dp-scaffold"])
def test_a_gpu_trains_a_wide_head_as_a_cpu(name):
    """Over many rounds, which are recorded and repeated: every round computes with the weights of that round."""
    of = small.problem(data="synthetic-frozen:900,300,200,4")
    trials = [trial.model_copy(update={"rounds": 20, "evaluate_every": 20}) for trial in mixed(name, of)]
    weights = []
    for device in ("cuda", "cpu"):
        server = Server(Hosts(1, device), device)
        server.open(trials, ProblemData.of(of))
        server.advance(12)
        weights.append(server.theta.cpu().numpy())
    np.testing.assert_allclose(*weights, rtol=0, atol=1e-3 * np.abs(weights[1]).max())


@pytest.mark.parametrize("model", ["softmax", "mlp:3", "multinomial"])
def test_automatic_clipping_in_a_pack_of_many_centres(model, monkeypatch):
    of = small.problem(model=model)
    trials = mixed("dp-fedgd", of, clipping="automatic")
    together = small.run(trials, of)
    assert {trials[4].key: together[trials[4].key]} == small.run([trials[4]], of)
    monkeypatch.setattr(centres_module, "LONGEST", 0.0)
    for key, other in small.run(trials, of).items():
        weights, apart = (np.frombuffer(outcome.weights, np.float32) for outcome in (together[key], other))
        np.testing.assert_allclose(weights, apart, rtol=0, atol=1e-4 * np.abs(apart).max())


def test_part_of_a_pack_resumes_with_its_own_centres():
    of = small.problem()
    trials = mixed("dp-scaffold", of)
    whole, server = small.run(trials, of), Server(Hosts(2))
    server.open(trials, ProblemData.of(of))
    server.advance(3)
    part = Server(Hosts(1))
    part.open(trials[3:0:-1], ProblemData.of(of), server.checkpoint())
    part.advance(6)
    for trial in trials[1:4]:
        found = part.results[trial.key]
        assert (repr(found.metrics), found.correct) == (whole[trial.key].metrics, whole[trial.key].correct)


def test_lanes_that_diverge_leave_the_others_their_centres():
    of = small.problem()
    trials = mixed("dp-fedgd", of)
    wild = trials[1].model_copy(update={"hyperparameters": {"learning_rate": 1e38}})
    found = small.run([trials[0], wild, *trials[2:]], of)
    assert found[wild.key].state == "diverged"
    assert {trials[3].key: found[trials[3].key]} == small.run([trials[3]], of)


def test_rows_are_loaded_once_for_all_centres(monkeypatch):
    """Two packs with other centres, and one without: a host does not load its rows again."""
    built, build = [], Shard.build.__func__
    monkeypatch.setattr(Shard, "build", classmethod(lambda cls, *a, **k: built.append(1) or build(cls, *a, **k)))
    of, server = small.problem(), Server(Hosts(1))
    counts = []
    for trials in ([small.trial(of, "dp-fedgd", rounds=4)], mixed("dp-fedgd", of), mixed("dp-fedgd", of, epsilon=1.0)):
        server.open(trials, ProblemData.of(of))
        server.advance(4)
        counts.append(len(built))
    assert counts[0] == counts[1] == counts[2]


def test_a_host_that_failed_to_load_rows_loads_them_again():
    """The rows of the last pack are gone then: they must not count as loaded."""
    of = small.problem()
    trial, server = small.trial(of, "dp-fedgd", rounds=3), Server(Hosts(1))
    server.open([trial], ProblemData.of(of))
    server.advance(2)
    expected = server.theta.clone()
    host = server.hosts._hosts[0]
    broken = mixed("dp-fedavg-ls", of)  # rows are arranged otherwise for this program
    server.open(broken, ProblemData.of(of))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainables.federation.client_host.Batch.load", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            host.prepare(server._work)
    server.open([trial], ProblemData.of(of))
    server.advance(2)
    assert torch.equal(server.theta, expected)


def test_a_centred_study_has_as_many_packs_as_a_plain_one():
    def packs(**method):
        study = {
            "name": "packs",
            "data": [small.SMALL],
            "clients": 5,
            "methods": [{"name": "dp-fedgd", **method}, {"name": "dp-fedsofim", **method}],
            "defaults": "paper",
            "epsilons": [0.5, 1, 5, 10],
        }
        return plan(Study.model_validate(study), [{"CPU": 2.0, "memory": 2.0**33}]).packs

    assert packs(preprocess={"center": 0.02, "bound": 16.0}, aggregate="size") == packs(aggregate="size")

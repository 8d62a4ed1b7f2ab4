"""Products of less precision on a GPU: how far off they may be, what they never do, and that results are marked."""

import math
from dataclasses import replace

import numpy as np
import pytest
import small
import torch

from orchestrator.execution.training import from_cells
from orchestrator.results.best_file import read_best
from orchestrator.results.ledger import Ledger
from orchestrator.study.reading import load
from orchestrator.study.study import Study
from trainables.choices import PRECISIONS
from trainables.errors import UserError
from trainables.federation.hosts import Hosts
from trainables.federation.pack import check, pack_group
from trainables.federation.problem import ProblemData
from trainables.federation.server import Server
from trainables.models import lanes as lane_shapes
from trainables.models.products import Products
from trainables.models.shard import Shard
from trainables.models.softmax import SoftmaxHead

ROUNDING = {"float32": 2e-6, "tf32": 2**-9, "bf16": 2**-7}  # of what a product's factors are rounded to, some units
SHAPES = {
    "fused": (64, 10),
    "fused, a lane at a time": (100, 47),
    "fused, many classes": (40, 100),
    "products apart": (200, 50),
}


def case(features: int, classes: int, rows: tuple[int, ...], lanes: int, scale: float = 0.3):
    rng = np.random.default_rng(3)
    parts = [(rng.standard_normal((n, features)).astype(np.float32), rng.integers(0, classes, n)) for n in rows]
    theta = scale * torch.from_numpy(rng.standard_normal((lanes, (features + 1) * classes)).astype(np.float32))
    return SoftmaxHead(features, classes), parts, theta, torch.linspace(0.5, 20, lanes)


@pytest.fixture
def interprets(request):
    """Whether Triton's interpreter runs the kernel, which it does for one shape: it is slow, and cannot run the kernel
    between the products."""
    values = request.node.callspec.params
    if values["device"] == "interpreted cpu" and values.get("shape", "fused") != "fused":
        pytest.skip("runs on a GPU")
    return values["device"] == "interpreted cpu"


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_sums_agree_with_double_precision(precision, shape, automatic, device, interprets):
    """Up to what the factors are rounded to, beside the length of all that is summed."""
    head, parts, theta, clip = case(*SHAPES[shape], rows=(300, 130), lanes=5)
    exact, given = Shard.build(parts, dtype=torch.float64), (theta.double(), clip.double())
    expected, counted = head.clipped_gradient_sum(exact, *given, diagnose=True, automatic=automatic)
    shard, given = Shard.build(parts, device, precision=precision), (theta.to(device), clip.to(device))
    found, seen = head.clipped_gradient_sum(shard, *given, diagnose=True, automatic=automatic)
    length = torch.tensor([len(y) for _, y in parts]).view(-1, 1, 1) * clip.view(1, -1, 1)
    off = (found.cpu() - expected).norm(dim=2, keepdim=True) / length
    assert (off <= ROUNDING[precision]).all()
    assert precision == "float32" or (off > 1e-5).any(), "the rounding has an effect"
    assert seen is not None
    torch.testing.assert_close(seen.loss.cpu().double(), counted.loss, rtol=4 * ROUNDING[precision] + 1e-5, atol=0)
    near = 3 if precision == "float32" else 30
    assert (seen.clipped.cpu() - counted.clipped).abs().max() <= near, "a row may be about as long as the clip"


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_kernel_rounds_as_torch_on_a_cpu(precision, shape, automatic, device, interprets):
    """Every row is a client, so that single gradients are compared. In bf16 the last bit of a sum can change what a
    factor is rounded to, but rarely does."""
    head, parts, theta, clip = case(*SHAPES[shape], rows=(1,) * (10 if interprets else 40), lanes=5)
    if not interprets and device == "cpu" and (precision != "float32" or head._kernel(theta) == "torch"):
        pytest.skip("torch computes this case on a CPU, as in the reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SoftmaxHead, "_kernel", lambda *_: "torch")
        rows = Shard.build(parts, precision=precision)
        expected, _ = head.clipped_gradient_sum(rows, theta, clip, automatic=automatic)
    shard, given = Shard.build(parts, device, precision=precision), (theta.to(device), clip.to(device))
    found, _ = head.clipped_gradient_sum(shard, *given, automatic=automatic)
    off = (found.cpu() - expected).abs() / expected.norm(dim=2, keepdim=True)
    assert (off <= 16 * ROUNDING[precision]).all()
    if precision == "bf16":
        by_feature = (off > 1e-5).float().unflatten(2, (-1, head.classes)).mean((0, 1, 3))
        assert by_feature.max() < 0.02, "also the constant's residuals are rounded"


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_extreme_rows_and_lanes(precision, automatic, device):
    """Rows of zeros and of 1e9, each a client padded to three rows. Saturated lanes keep the clip, lanes that diverged
    are nan, and neither changes the others' bits."""
    head, _, theta, _ = case(12, 4, rows=(1,), lanes=18)
    rng, clip = np.random.default_rng(4), torch.full((18,), 0.3, device=device)
    sizes = np.repeat([0, 1e-3, 1, 1e3, 1e9], 2)[:, None]
    x = (sizes * rng.standard_normal((10, 12))).astype(np.float32)
    parts = [(row[None], rng.integers(0, 4, 1)) for row in x]
    shard, exact = Shard.build(parts, device, rows=3, precision=precision), Shard.build(parts, dtype=torch.float64)
    regular, _ = head.clipped_gradient_sum(shard, theta.to(device), clip, automatic=automatic)
    expected, _ = head.clipped_gradient_sum(exact, theta.double(), clip.cpu().double(), automatic=automatic)
    assert (regular.norm(dim=2) <= 0.3 * (1 + 1e-5)).all()
    off = (regular.cpu() - expected).norm(dim=2) / 0.3
    assert (off[:6] <= 10 * ROUNDING[precision]).all(), "in longer rows, rounding can change the class"
    for factor in (1e3, math.inf, math.nan):
        mixed = theta.clone()
        mixed[2::3] *= factor
        found, _ = head.clipped_gradient_sum(shard, mixed.to(device), clip, automatic=automatic)
        others = torch.arange(18) % 3 != 2
        assert torch.equal(found[:, others], regular[:, others])
        if math.isfinite(factor):
            assert (found.norm(dim=2) <= 0.3 * (1 + 1e-5)).all()
        else:
            assert found[:, 2::3].isnan().any(2).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_chunks_of_rows_the_last_of_which_is_short(precision, device, interprets, monkeypatch):
    """Clients side by side, of more rows than a chunk has: what is left over of each fills less than its room."""
    head, parts, theta, clip = case(*SHAPES["products apart"], rows=(1500, 1100, 40), lanes=5)
    monkeypatch.setitem(lane_shapes.SHAPES, "cuda", replace(lane_shapes.SHAPES["cuda"], cells=1024 * 50 * 3 * 64))
    assert lane_shapes.SHAPES["cuda"].chunk(head.width, 3) == (3, 1024)
    expected, _ = head.clipped_gradient_sum(Shard.build(parts, dtype=torch.float64), theta.double(), clip.double())
    shard = Shard.build(parts, device, precision=precision)
    found, _ = head.clipped_gradient_sum(shard, theta.to(device), clip.to(device))
    length = torch.tensor([len(y) for _, y in parts]).view(-1, 1, 1) * clip.view(1, -1, 1)
    assert ((found.cpu() - expected).norm(dim=2, keepdim=True) <= ROUNDING[precision] * length).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_evaluations_agree_with_double_precision(shape, device, interprets):
    head, parts, theta, _ = case(*SHAPES[shape], rows=(1100 if interprets else 2100,), lanes=5)
    loss, right = head.evaluate(Shard.build(parts, device), theta.to(device))
    expected, correct = head.evaluate(Shard.build(parts, dtype=torch.float64), theta.double())
    torch.testing.assert_close(loss.cpu().double(), expected.double(), rtol=1e-5, atol=0)
    assert (right.cpu() == correct).float().mean() > 0.999, "a row may lie on the border"


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_nothing_becomes_longer_than_the_clip(precision, shape, automatic, device, interprets):
    """Every row a client of its own, so that its contribution is seen; all of them are clipped, whose length is then
    the clip, but for rounding: of sums in float32, nothing more."""
    head, parts, theta, _ = case(*SHAPES[shape], rows=(1,) * (20 if interprets else 200), lanes=5)
    clip = torch.full((5,), 0.01, device=device)
    shard = Shard.build(parts, device, precision=precision)
    found, _ = head.clipped_gradient_sum(shard, theta.to(device), clip, automatic=automatic)
    longest = found.norm(dim=2).max().item()
    assert 0.98 * 0.01 < longest < 0.01 * (1 + 1e-5)


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_lane_does_not_depend_on_other_lanes(precision, shape, automatic, device, interprets):
    head, parts, theta, clip = case(*SHAPES[shape], rows=(90, 20) if interprets else (300, 130), lanes=70)
    theta, clip, shard = theta.to(device), clip.to(device), Shard.build(parts, device, precision=precision)
    together, _ = head.clipped_gradient_sum(shard, theta, clip, automatic=automatic)
    for lane in (0, 33, 69):
        some = theta[lane : lane + 1], clip[lane : lane + 1]
        alone, _ = head.clipped_gradient_sum(shard, *some, automatic=automatic)
        assert (alone[:, 0] == together[:, lane]).all()


def test_a_run_ends_near_the_one_in_float32_and_not_on_its_bits(small_problem, device):
    found = {}
    for precision in PRECISIONS:
        trial = small.trial(small_problem, "dp-fedgd").model_copy(update={"precision": precision})
        server = Server(Hosts(1, device), device)
        server.open([trial], ProblemData.of(small_problem))
        server.advance(trial.rounds - 1)
        found[precision] = server.theta[0].cpu()
    for precision in ("tf32", "bf16"):
        assert (found[precision] != found["float32"]).any()
        torch.testing.assert_close(found[precision], found["float32"], rtol=0.05, atol=0.02)


def test_rounding_by_hand():
    """tf32 keeps ten bits behind the point, bf16 seven; a sum of 1 and less than half of the last is 1, and so on."""
    values = torch.tensor([1 + 2**-11, 1 + 2**-11 - 2**-20, 1 + 2**-10, -1 - 2**-11, 0.0, 3.0e-3])
    tf32 = Products("tf32").rounded(values).tolist()
    assert tf32[:5] == [1 + 2**-10, 1, 1 + 2**-10, -1 - 2**-10, 0]
    assert tf32[5] == pytest.approx(3.0e-3, rel=2**-11)
    assert Products("bf16").rounded(torch.tensor([1 + 2**-8 + 2**-12, 1 + 2**-7])).tolist() == [1 + 2**-7, 1 + 2**-7]
    assert Products().rounded(values) is values


# ---- everywhere


def test_chunks_with_few_rows_are_avoided_for_many_weights():
    """With a thousand classes a chunk of all clients would hold 128 rows of each: then clients come one by one."""
    from trainables.models.lanes import MIN_ROWS
    from trainables.models.lanes import SHAPES as DEVICES

    assert DEVICES["cuda"].rows(1000, 20) == 128 < MIN_ROWS
    assert DEVICES["cuda"].chunk(1000, 20) == (1, 4096)
    assert DEVICES["cuda"].chunk(100, 20) == (20, 2048)
    assert DEVICES["cpu"].chunk(1000, 20) == (20, 64)


def test_the_precision_is_part_of_a_trials_key(small_problem):
    trial = small.trial(small_problem, "dp-fedgd")
    others = [trial.model_copy(update={"precision": precision}) for precision in ("tf32", "bf16")]
    assert len({one.key for one in (trial, *others)}) == 3
    assert len({pack_group(one) for one in (trial, *others)}) == 3
    assert "precision" not in trial.model_dump_json(exclude_defaults=True)
    assert trial.model_copy(update={"precision": "float32"}).key == trial.key


def test_other_models_refuse_it(small_problem):
    trial = small.trial(small_problem, "dp-fedgd").model_copy(update={"precision": "bf16"})
    other = trial.model_copy(update={"problem": trial.problem.model_copy(update={"model": "mlp:4"})})
    with pytest.raises(UserError, match="precision = 'bf16' needs the model softmax; 'mlp:4' uses float32"):
        check(other, small_problem)
    with pytest.raises(UserError, match="precision = 'fp8'"):
        check(trial.model_copy(update={"precision": "fp8"}), small_problem)


@pytest.mark.parametrize("name", ["dp-fedavg", "dp-fedfc", "dp-fednew", "dp-fednew-fc", "dp-ls"])
def test_methods_that_use_more_than_gradients_run_in_reduced_precision(name, small_problem):
    trials = [
        small.trial(small_problem, name).model_copy(update={"precision": precision}) for precision in ("tf32", "bf16")
    ]
    for trial in trials:
        found = small.run([trial], small_problem)[trial.key]
        assert found is not None


def test_a_host_reloads_its_rows_for_another_precision(small_problem):
    """Two packs on the same host: the rows of the first are not used for the second."""
    trial = small.trial(small_problem, "dp-fedgd")
    alone, shared = {}, Server(Hosts(1))
    for precision in ("float32", "bf16", "float32"):
        one = trial.model_copy(update={"precision": precision})
        fresh = Server(Hosts(1))
        for server in (fresh, shared):
            server.open([one], ProblemData.of(small_problem))
            server.advance(3)
        assert (shared.theta == fresh.theta).all()
        alone[precision] = fresh.theta
    assert (alone["bf16"] != alone["float32"]).any()


TEXT = """
name: rounded
data: [{source: "synthetic-frozen:200,20,4,3", label: toy}]
partitions: [iid]
clients: 4
methods:
  - dp-fedgd: {coarse: {learning_rate: [0.1, 1]}}
  - dp-fedgd: {label: mine, precision: tf32, coarse: {learning_rate: [0.1, 1]}}
  - dp-fedgd: {precision: float32, label: plain, coarse: {learning_rate: [0.1, 1]}}
epsilons: [8]
defaults: paper
precision: bf16
rounds: {coarse: 4, fine: 4, confirm: 4}
seeds: {search: [42], contest: [], confirm: [42, 7]}
search: {refine: table}
"""


def test_results_are_marked_from_the_trial_to_the_best_and_back(tmp_path, fedsweep):
    """A study in bf16 with one method that says otherwise, and one that says float32."""
    file = tmp_path / "rounded.yaml"
    file.write_text(TEXT)
    code, *_ = fedsweep("run", file, "--results", tmp_path / "r", "--backend", "local")
    assert code == 0
    names = ["DP-FedGD, bf16", "mine, tf32", "plain"]
    for table in ("accuracy.md", "privacy.md", "hyperparameters.md", "accuracy.csv", "trials.csv"):
        text = (tmp_path / "r" / "tables" / table).read_text()
        assert all(name in text for name in names), table
    with Ledger.read(tmp_path / "r") as ledger:
        trials = [row.trial for row in ledger.rows(list(ledger.outcomes())).values()]
    assert {trial.precision for trial in trials} == {"float32", "tf32", "bf16"}
    keys = {trial.key for trial in trials if trial.problem.train_on == "all" and trial.seed == 42}
    cells = read_best(tmp_path / "r" / "best.yaml")
    again = [from_cells(cells, "best.yaml", cell, 42, None).trial for cell in cells]
    assert {trial.precision for trial in again} == {"float32", "tf32", "bf16"}
    assert {trial.key for trial in again} == keys


def test_the_packaged_study_can_be_read():
    study, _ = load("precision-cifar10-resnet20")
    shown = [method.shown for method in study.methods]
    assert shown == [
        f"{name}{strategy}" for name in ("DP-FedGD", "DP-FedSOFIM") for strategy in ("", ", tf32", ", bf16")
    ]


def test_the_precision_is_part_of_the_label():
    methods = ["dp-fedgd", {"dp-fedgd": {"precision": "bf16"}}]
    study = Study.model_validate(
        {
            "name": "a",
            "data": [{"source": "synthetic-frozen:200,20,4,3"}],
            "methods": methods,
            "defaults": "paper",
            "epsilons": [1],
        }
    )
    assert [method.shown for method in study.methods] == ["DP-FedGD", "DP-FedGD, bf16"]

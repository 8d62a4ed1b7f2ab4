"""Rounds of small packs on a GPU, parts of which are recorded as CUDA graphs: the same bits as without recordings.

Without a GPU, torch traces a function into a list of operations and repeats these with other inputs, as a graph does.
"""

import functools
import sys
import types

import numpy as np
import pytest
import small
import torch
from every_kernel import on_a_gpu
from torch.fx.experimental.proxy_tensor import make_fx

from trainables import methods, privacy
from trainables.federation import server as server_module
from trainables.federation.batch_round import Batch, _sum_of, recordings_of
from trainables.federation.hosts import Hosts
from trainables.federation.problem import ProblemData
from trainables.federation.server import Server
from trainables.federation.server_step import ServerStep, may_be_recorded
from trainables.federation.trial_spec import Preprocess
from trainables.methods import METHODS
from trainables.methods.dp_fedadam import DPFedAdam
from trainables.models import recorded
from trainables.models.compiled import LastCall
from trainables.models.recorded import Recordings, _Recording
from trainables.privacy.noise import fill_normals

WARM = {"blend_rounds": 3, "warmup_rounds": 2}


class Traced:
    """Stands in for a CUDA graph: repeats traced operations on its own copies of the inputs."""

    replays = 0

    def __init__(self, function, inputs):
        self._inputs, self._constants = [value.clone() for value in inputs], ()
        function(*self._inputs)
        self._operations = make_fx(lambda *values: function(*values))(*self._inputs)
        self._outputs = [value.clone() for value in self._operations(*self._inputs)]
        self._graph = self

    def replay(self):
        Traced.replays += 1
        for place, value in zip(self._outputs, self._operations(*self._inputs), strict=True):
            place.copy_(value)

    __call__ = _Recording.__call__


# ---- noise with its address in tensors, as on a GPU

PURPOSES: list[str] = []


@functools.cache
def words(purpose, device):
    PURPOSES.append(purpose)
    return torch.tensor([len(PURPOSES) - 1])


@torch.library.custom_op("fedsweep_tests::normals", mutates_args=())
def normals(
    clients: torch.Tensor, seeds: torch.Tensor, t: torch.Tensor, step: torch.Tensor, words: torch.Tensor, size: int
) -> torch.Tensor:
    made = np.empty((len(clients), len(seeds), size), np.float32)
    fill_normals(made, clients.tolist(), seeds.tolist(), int(t), int(step), PURPOSES[int(words)])
    return torch.from_numpy(made)


@normals.register_fake
def _(clients, seeds, t, step, words, size):
    return torch.empty(len(clients), len(seeds), size)


@pytest.fixture
def like_a_gpu(monkeypatch):
    """Servers and hosts on the CPU that record whatever a GPU records."""
    noise = types.ModuleType("trainables.privacy.noise_triton")
    noise.words, noise.normals_at = words, normals
    noise.number = lambda value, device: torch.tensor([value])
    monkeypatch.setitem(sys.modules, noise.__name__, noise)
    monkeypatch.setattr(privacy, "noise_triton", noise, raising=False)
    monkeypatch.setattr(recorded, "_Recording", Traced)
    monkeypatch.setattr(recorded, "_is_low_on_memory", lambda: False)
    monkeypatch.setattr(LastCall, "of", lambda self, theta, *how: self._make(theta, *how))  # as on a GPU

    def load(clients, shard, model):
        sums = {automatic: _sum_of(model, shard, automatic) for automatic in (False, True)}
        return Batch(clients, shard, sums, recordings_of(sums, shard, network=False))

    monkeypatch.setattr(Batch, "load", load)
    monkeypatch.setattr(server_module, "ServerStep", lambda group, device: ServerStep(group, "cuda"))
    Traced.replays = 0


# ---- whole packs


def packs(name, own, further, *, device="cpu", **settings):
    with small.computed_with("torch" if device == "cpu" else "triton", device):  # calls of C cannot be traced
        return results(name, own, further, device=device, **settings)


def results(name, own, further, *, centred, device, model="softmax", restart=0):
    """Results of packs of different sizes on one server, with different data, seeds, budgets, clips and noise keys."""
    server, found = Server(Hosts(1, device), device), []
    for number, (lanes, partition) in enumerate(((4, "dirichlet:1"), (4, "iid"), (1, "iid"))):
        of = small.problem(data="synthetic-frozen:200,50,6,3", partition=partition, clients=2, model=model)
        trials = []
        for lane in range(lanes):
            rates = {"server_learning_rate" if "local_steps" in own else "learning_rate": 0.1 * (lane + 1)}
            if (number, lane) == (1, 1):
                rates = dict.fromkeys(rates, 1e38)  # it diverges
            hypers = {**rates, **own}
            if name == "dp-fedsofim" and lane == 3:
                hypers["variant"] = "ema_only"  # a second group of lanes
            changes = {"epsilon": 1.0 + lane, "clip": 1 + 0.1 * lane, **further}
            one = small.trial(of, name, hypers, seed=40 + number + lane % 2, **changes)
            preprocess = {"preprocess": Preprocess(center=0.1)} if centred else {}
            trials.append(one.model_copy(update={"noise_key": "secret" * (number % 2), **preprocess}))
        server.open(trials, ProblemData.of(of))
        if restart:
            server.advance(restart)
            saved, server = server.checkpoint(), Server(Hosts(1, device), device)
            server.open(trials, ProblemData.of(of), saved)
        server.advance(server.rounds - 1)
        weights = {
            trial.key: row.tobytes() for trial, row in zip(server.trials, server.theta.cpu().numpy(), strict=True)
        }
        server.advance(server.rounds)
        found.append((weights, {key: (repr(lane.metrics), lane.state) for key, lane in server.results.items()}))
    return found


CASES = [
    ("dp-fedgd", {}, {}),
    ("dp-fedgd", {}, {"clipping": "automatic"}),
    ("dp-fedsofim", WARM, {}),
    ("dp-fedadam", {}, {}),
    ("dp-fedyogi", {}, {}),
    ("dp-fedavg", {"local_steps": 3}, {}),
    ("dp-scaffold", {"local_steps": 3}, {}),
    ("dp-fedhybrid", {}, {}),
]


@pytest.mark.parametrize(
    ("name", "own", "settings"),
    [
        ("dp-fedgd", {}, {"centred": True, "further": {"clipping": "automatic"}}),
        ("dp-fedsofim", WARM, {"centred": False, "restart": 5}),
        ("dp-fedsofim", WARM, {"centred": True, "model": "mlp:3"}),
        ("dp-fedyogi", {}, {"centred": True}),
        ("dp-scaffold", {"local_steps": 3}, {"centred": True, "restart": 5}),
        ("dp-fedhybrid", {}, {"centred": False}),
    ],
)
def test_repeated_operations_have_the_same_bits(name, own, settings, request):
    settings = {"further": {}, **settings}
    expected = packs(name, own, **{**settings, "restart": 0})
    request.getfixturevalue("like_a_gpu")
    assert packs(name, own, **settings) == expected
    assert Traced.replays > 3 * 8, "most rounds are recorded"


@on_a_gpu
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(("name", "own", "further"), CASES)
def test_recorded_rounds_have_the_same_bits_cuda(name, own, further, centred, monkeypatch):
    replayed, original = [], _Recording.__call__
    monkeypatch.setattr(_Recording, "__call__", lambda self, *args: (replayed.append(1), original(self, *args))[1])
    found = packs(name, own, further, centred=centred, device="cuda")
    assert len(replayed) > 3 * 8
    monkeypatch.setattr(
        Recordings, "__call__", lambda self, name, *inputs, constants=(): self._functions[name](*inputs, *constants)
    )
    assert packs(name, own, further, centred=centred, device="cuda") == found


# ---- steps


def step_of(name, device="cuda"):
    of = small.problem()
    (group,) = server_module.lane_groups([small.trial(of, name)], of.model)
    theta = torch.zeros(1, of.model.dimension)
    state = group.method.initial_state(theta, group.hypers)
    return lambda: ServerStep(group, device)(3, theta, theta + 1, state)


def test_the_long_steps_are_recorded():
    found = {name for name in METHODS if may_be_recorded(methods.get(name))}
    assert found == {"dp-fedsofim", "dp-fedadam", "dp-fedyogi"}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", ["dp-ftrl", "dp-fedhybrid"])
def test_a_recorded_step_must_not_use_the_round(name, device, like_a_gpu, monkeypatch):
    """Also on a CPU, where nothing is recorded, so that its author notices."""
    kind = next(kind for kind in type(methods.get(name)).__mro__ if "step" in vars(kind))
    monkeypatch.setattr(kind, "records_step", True)
    with pytest.raises(TypeError, match="t was used in a step with records_step = True"):
        step_of(name, device)()


def test_a_recorded_step_must_not_add_to_its_state(like_a_gpu, monkeypatch):
    def step(self, t, theta, G, state, hypers):
        state["new"] = theta
        return theta

    monkeypatch.setattr(DPFedAdam, "step", step)
    with pytest.raises(RuntimeError, match="the step of dp-fedadam is recorded, so it must not add to its state"):
        step_of("dp-fedadam")()


def test_a_subclass_with_its_own_step_is_not_recorded():
    class Own(DPFedAdam):
        def step(self, t, theta, G, state, hypers):
            return theta - G / t

    class Allowed(Own):
        records_step = True

        def step(self, t, theta, G, state, hypers):
            return theta - G

    class Same(DPFedAdam):
        name = "same"

    assert [may_be_recorded(kind()) for kind in (Own, Allowed, Same)] == [False, True, True]


# ---- inputs


def test_constants_are_copied_when_they_change(like_a_gpu):
    product = Recordings({"product": lambda x, factor: (x * factor,)})
    x, two, three = torch.ones(2, 3), torch.tensor(2.0), torch.tensor(3.0)
    found = [product("product", x * n, constants=(factor,))[0] for n, factor in ((1, two), (5, two), (1, three))]
    assert [value[0, 0].item() for value in found] == [2, 10, 3], "and every result is a tensor of its own"


def test_another_type_of_input_has_its_own_recording(like_a_gpu):
    double = Recordings({"double": lambda x: (x * 2,)})
    values = torch.full((2, 3), 0.1), torch.full((2, 3), 0.1, dtype=torch.float64)
    assert all(torch.equal(double("double", value)[0], value * 2) for value in values)


def test_other_lanes_drop_the_recordings(like_a_gpu):
    functions = Recordings({name: lambda x: (x,) for name in "ab"})
    for lanes in (2, 2, 3):
        for name in "ab":
            functions(name, torch.zeros(lanes, 1))
    assert {key[1][0][0] for key in functions._known} == {3}


def test_large_rounds_are_not_recorded():
    lanes, weights = recorded.SMALL_LANES, recorded.SMALL_NUMBERS // recorded.SMALL_LANES
    assert recorded.is_small(1, torch.empty(lanes, weights))
    assert not recorded.is_small(1, torch.empty(lanes + 1, 1))
    assert not recorded.is_small(2, torch.empty(lanes, weights))

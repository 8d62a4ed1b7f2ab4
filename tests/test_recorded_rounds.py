"""Rounds of small packs on a GPU, of which steps are recorded as CUDA graphs: the same bits as without recordings."""

import pytest
import small
import torch
from every_kernel import on_a_gpu

from trainables import methods
from trainables.federation import batch_round, recorded_step
from trainables.federation.hosts import Hosts
from trainables.federation.pack import lane_groups
from trainables.federation.problem import ProblemData
from trainables.federation.recorded_step import RecordedStep
from trainables.federation.server import Server
from trainables.federation.trial_spec import Preprocess
from trainables.methods import METHODS
from trainables.models import recorded
from trainables.models.recorded import _Recording

RECORDED = [name for name in METHODS if methods.get(name).records_step]


class NotAGraph:
    """Like a CUDA graph, computes with its own copies of the inputs and overwrites its outputs."""

    def __init__(self, function, inputs):
        self._function, self._inputs, self._constants = function, [value.clone() for value in inputs], ()
        self._outputs = [value.clone() for value in function(*self._inputs)]

    def replay(self):
        for place, value in zip(self._outputs, self._function(*self._inputs), strict=True):
            place.copy_(value)

    @property
    def _graph(self):
        return self

    __call__ = _Recording.__call__


def test_some_methods_are_recorded():
    assert {"dp-fedsofim", "dp-fedadam", "dp-fedyogi"} <= set(RECORDED)


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_step_does_the_same_in_every_round(name, monkeypatch):
    """It must not depend on t: a recording repeats the operations of the first round."""
    of = small.problem()
    blended = {"blend_rounds": 3, "warmup_rounds": 2} if name == "dp-fedsofim" else {}
    trials = [small.trial(of, name, {"learning_rate": 0.1 * lane, **blended}) for lane in (1, 2, 3)]
    (group,) = lane_groups(trials, of.model)
    monkeypatch.setattr(recorded, "_Recording", NotAGraph)
    results = []
    for is_recorded in (False, True):
        generator = torch.Generator().manual_seed(1)
        theta, step = torch.zeros(3, of.model.dimension), RecordedStep(group, "cuda" if is_recorded else "cpu")
        state = group.method.initial_state(theta, group.hypers)
        for t in range(1, 7):
            theta = step(t, theta, torch.randn(theta.shape, generator=generator), state)
        results.append({"theta": theta, **state})
    plain, repeated = results
    assert plain.keys() == repeated.keys()
    assert all(torch.equal(plain[name], repeated[name]) for name in plain)


def test_a_recorded_step_that_adds_to_its_state_is_refused(monkeypatch):
    of = small.problem()
    (group,) = lane_groups([small.trial(of, "dp-fedadam")], of.model)
    monkeypatch.setattr(recorded, "_Recording", NotAGraph)
    monkeypatch.setattr(
        type(group.method), "step", lambda self, t, theta, G, state, hypers: state.setdefault("new", theta)
    )
    with pytest.raises(RuntimeError, match="the step of dp-fedadam is recorded, so it must not add to its state"):
        RecordedStep(group, "cuda")(1, torch.zeros(1, 3), torch.zeros(1, 3), {})


def test_constants_are_copied_when_they_change(monkeypatch):
    monkeypatch.setattr(recorded, "_Recording", NotAGraph)
    product = recorded.Recordings(lambda x, factor: (x * factor,))
    x, two, three = torch.ones(2, 3), torch.tensor(2.0), torch.tensor(3.0)
    found = [product(x * number, constants=(factor,))[0] for number, factor in ((1, two), (5, two), (1, three))]
    assert [value[0, 0].item() for value in found] == [2, 10, 3], "and every result is a tensor of its own"


@on_a_gpu
@pytest.mark.parametrize(
    ("name", "own", "further"),
    [
        ("dp-fedgd", {}, {}),
        ("dp-fedgd", {}, {"clipping": "automatic"}),
        ("dp-fedgd", {"learning_rate": 1e38}, {}),
        ("dp-fedsofim", {"blend_rounds": 3, "warmup_rounds": 2}, {}),
        ("dp-fedadam", {}, {}),
        ("dp-fedyogi", {}, {}),
        ("dp-fedavg", {"local_steps": 3}, {}),
        ("dp-scaffold", {"local_steps": 3}, {}),
        ("dp-fedhybrid", {}, {}),
    ],
)
@pytest.mark.parametrize("centred", [False, True])
def test_recorded_rounds_have_the_same_bits_cuda(name, own, further, centred, monkeypatch):
    """In packs of different sizes with different seeds, budgets and clips, one after another on the same host."""
    of = small.problem()
    replayed, original = [], _Recording.__call__
    monkeypatch.setattr(_Recording, "__call__", lambda self, *args: (replayed.append(1), original(self, *args))[1])

    def packs():
        server = Server(Hosts(1, "cuda"), "cuda")
        for number, lanes in enumerate((5, 5, 1)):
            trials = [
                small.trial(
                    *(of, name, own if lane == 0 else {k: v for k, v in own.items() if k != "learning_rate"}),
                    **{"seed": 40 + number + lane % 2, "epsilon": 1.0 + lane, "clip": 1.0 + 0.1 * lane, **further},
                )
                for lane in range(lanes)
            ]
            if centred:
                trials = [one.model_copy(update={"preprocess": Preprocess(center=0.1)}) for one in trials]
            server.open(trials, ProblemData.of(of))
            server.advance(server.rounds)
            yield {key: (repr(lane.metrics), lane.correct, lane.state) for key, lane in server.results.items()}

    found = list(packs())
    count = len(replayed)
    monkeypatch.setattr(batch_round, "SMALL", 0)
    monkeypatch.setattr(recorded_step, "SMALL", 0)
    replayed.clear()
    assert list(packs()) == found
    assert len(replayed) < count or name != "dp-fedsofim", "steps are recorded, too"

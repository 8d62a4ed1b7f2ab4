"""Federations: actors compute the same bits as a server in one process, also when hosts die."""

import io
import os
import pickle
import re
import signal
import typing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import small
import torch
from pydantic import BaseModel
from ray.exceptions import GetTimeoutError, RayActorError

from orchestrator.execution.cluster.failures import failure_from
from trainables.code_identity import OtherCodeError, code_identity, digest
from trainables.errors import UserError
from trainables.federation.checkpoints import UnusableCheckpointError
from trainables.federation.client_host import ClientHost, ClientStateLostError
from trainables.federation.federation_size import FederationSize
from trainables.federation.hosts import Hosts
from trainables.federation.pack import assign, client_work, pack_group
from trainables.federation.problem import ProblemData
from trainables.federation.server import Server
from trainables.federation.trial_spec import TrialSpec
from trainables.methods.base import ClientProgram
from trainables.models import kernels
from trainables.models.kernel_build import kernel_build
from trainables.models.lanes import SHAPES, Shape
from trainables.ray_actors import federation as federation_module
from trainables.ray_actors import timeouts
from trainables.ray_actors.errors import ActorLostError, HostFailedError, HungError
from trainables.ray_actors.federation import HostActor, RayFederation, ServerActor
from trainables.ray_actors.object_store import ObjectStoreProblems

ROUNDS = 30


@pytest.fixture(scope="module")
def trials(small_problem):
    """A mixed pack: two methods, three seeds."""
    return [
        small.trial(small_problem, name, {"learning_rate": rate}, rounds=ROUNDS, every=10, seed=seed)
        for name, rate in (("dp-fedsofim", 0.5), ("dp-fedgd", 0.1), ("dp-fedadam", 0.05))
        for seed in (42, 123, 7)
    ]


@pytest.fixture(scope="module")
def expected(trials, small_problem):
    """Results of the same pack in this process, without Ray."""
    server = Server(Hosts(1))
    server.open(trials, ProblemData.of(small_problem))
    return outcomes(server.advance(ROUNDS))


def outcomes(results) -> dict[str, tuple]:
    """Everything except durations."""
    return {r.key: (r.state, r.rounds, r.metrics, r.correct) for r in results}


@pytest.fixture(scope="module")
def federation(local_ray):
    """Two client hosts for five clients, reused by several tests."""
    made = RayFederation(FederationSize(hosts=2, cpus_per_host=0.5))
    yield made
    made.close()


def host_pid(host) -> int:
    return ray.get(host.__ray_call__.remote(lambda self: os.getpid()))


@pytest.mark.ray
def test_actors_compute_the_same_bits_pack_after_pack(federation, trials, expected, small_problem):
    """Also with a pack of another problem in between."""
    problems = ObjectStoreProblems()
    federation.open(trials, problems.data(small_problem))
    pids = [host_pid(host) for host in federation._hosts]
    assert len({*pids, os.getpid()}) == 3, "every host has its own process"
    assert outcomes(federation.advance(ROUNDS)) == expected

    other = small.problem(partition="iid", clients=4)
    trial = small.trial(other, "dp-fedyogi", rounds=5)
    federation.open([trial], problems.data(other))
    here = Server(Hosts(1))
    here.open([trial], ProblemData.of(other))
    assert outcomes(federation.advance(5)) == outcomes(here.advance(5))

    federation.open(trials, problems.data(small_problem))
    assert outcomes(federation.advance(ROUNDS)) == expected
    assert [host_pid(host) for host in federation._hosts] == pids


@pytest.mark.ray
def test_a_host_killed_between_rounds(federation, trials, expected, small_problem):
    """It is restarted, reloads its rows and repeats the call; the other host is not affected."""
    federation.open(trials, ObjectStoreProblems().data(small_problem))
    federation.advance(13)
    before = [host_pid(host) for host in federation._hosts]
    os.kill(before[1], signal.SIGKILL)
    assert outcomes(federation.advance(ROUNDS)) == expected
    after = [host_pid(host) for host in federation._hosts]
    assert after[0] == before[0]
    assert after[1] != before[1]


@pytest.mark.ray
def test_both_hosts_killed_while_rounds_are_running(federation, trials, expected, small_problem):
    """At any point of a round, without an effect on the result."""
    federation.open(trials, ObjectStoreProblems().data(small_problem))
    federation.advance(2)
    before = [host_pid(host) for host in federation._hosts]
    running = federation._server.call.remote("advance", ROUNDS)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert outcomes(ray.get(running)) == expected
    assert not set(before) & {host_pid(host) for host in federation._hosts}


@pytest.mark.ray
def test_a_federation_resumes_from_a_checkpoint_of_another_process(federation, trials, expected, small_problem):
    """The server and the hosts that started the pack are gone."""
    begun = Server(Hosts(3))
    begun.open(trials, ProblemData.of(small_problem))
    begun.advance(17)
    federation.open(trials, ObjectStoreProblems().data(small_problem), begun.checkpoint())
    federation.advance(23)
    resumed = Server(Hosts(1))
    resumed.open(trials, ProblemData.of(small_problem), federation.checkpoint())
    assert outcomes(federation.advance(ROUNDS)) == expected
    assert outcomes(resumed.advance(ROUNDS)) == expected


@pytest.mark.ray
def test_a_host_that_never_starts_is_named(local_ray, trials, small_problem, monkeypatch):
    """Here because no node has enough processors."""
    monkeypatch.setattr(timeouts, "START_S", 0.5)
    made = RayFederation(FederationSize(hosts=1, cpus_per_host=1000))
    try:
        with pytest.raises(HungError, match=r"(client host 0|the server) has not started within 0 s"):
            made.open(trials, ObjectStoreProblems().data(small_problem))
    finally:
        made.close()


@pytest.mark.ray
def test_an_error_of_a_host_names_the_hosts_node(local_ray, trials, small_problem):
    """Which may be another one than the slot's."""

    def fill_disk(self) -> None:
        def fail(*arguments):
            raise OSError(28, "No space left on device")

        self._host.round = fail

    federation = RayFederation(FederationSize(hosts=2, cpus_per_host=0.5))
    try:
        federation.open(trials, ObjectStoreProblems().data(small_problem))
        ray.get(federation._hosts[1].__ray_call__.remote(fill_disk))
        with pytest.raises(HostFailedError) as caught:
            federation.progress(10)
    finally:
        federation.close()
    failure = failure_from(caught.value)
    assert failure.node == ray.get_runtime_context().get_node_id()
    assert re.match(r"client host 1 \(node .*\) failed: .*No space left on device", failure.reason)


def test_a_server_that_hangs_is_named_with_its_node(monkeypatch):
    federation = object.__new__(RayFederation)
    federation.nodes, federation._slowest = ("of the server", "of a host"), 0.0
    monkeypatch.setattr(federation_module.ray, "get", raises(GetTimeoutError()))
    with pytest.raises(HungError) as caught:
        federation._wait("an answer")
    assert failure_from(caught.value).node == "of the server"


def test_an_actor_that_does_not_start_is_named_with_its_node(monkeypatch):
    """The node of its bundle: Ray has no record of where an actor was that never started."""
    federation = object.__new__(RayFederation)
    federation.nodes, federation._group = (), "a placement group"
    federation._server, *federation._hosts = [
        SimpleNamespace(identify=SimpleNamespace(remote=name.upper)) for name in "abc"
    ]
    monkeypatch.setattr(federation_module.ray, "wait", lambda starting, **_: (starting[:2], starting[2:]))
    table = {"bundles_to_node_id": {0: "node 0", 1: "node 1"}}
    monkeypatch.setattr(federation_module, "placement_group_table", lambda _: table)
    with pytest.raises(HungError, match="client host 1 has not started") as caught:
        federation.wait_until_started()
    assert failure_from(caught.value).node == "node 1"
    monkeypatch.setattr(federation_module.ray, "wait", lambda starting, **_: (starting, []))
    monkeypatch.setattr(federation_module.ray, "get", raises(RayActorError(None, "gone")))
    with pytest.raises(ActorLostError) as lost:
        federation.wait_until_started()
    assert failure_from(lost.value).node == "node 0"


def test_all_gpus_of_a_federation_are_of_one_model(monkeypatch):
    federation = object.__new__(RayFederation)
    answers = [("node 0", "NVIDIA H200", "ab"), ("node 0", "NVIDIA H200", "ab"), ("node 1", "NVIDIA A10", "ac")]
    federation._server, *federation._hosts = [
        SimpleNamespace(identify=SimpleNamespace(remote=lambda answer=answer: answer)) for answer in answers
    ]
    monkeypatch.setattr(federation_module.ray, "wait", lambda starting, **_: (starting, []))
    monkeypatch.setattr(federation_module.ray, "get", lambda answer: answer)
    federation.nodes, federation.accelerator = (), ""
    with pytest.raises(OtherCodeError, match="accelerator is NVIDIA A10 instead of NVIDIA H200") as raised:
        federation.wait_until_started()
    assert raised.value.node == "node 1"


@pytest.mark.parametrize("kind", [HostActor, ServerActor])
def test_an_actor_with_other_code_computes_nothing(kind, monkeypatch):
    """It says what differs, and on which node; with the driver's code it tells the digest."""
    here = SimpleNamespace(get_node_id=lambda: "node 7")
    monkeypatch.setattr(federation_module.ray, "get_runtime_context", lambda: here)
    kernel = kernels.chosen()
    expected = code_identity(kernel_build(kernel))
    first = 0 if kind is HostActor else ()
    assert kind(first, "cpu", kernel, expected).identify() == ("node 7", "", digest(expected))
    other = kind(first, "cpu", kernel, {**expected, "plug-in mine": "abc", "scipy": "0.1"})
    calls = [other.identify] + [lambda: other.round([None], 1, {}, False)] * (kind is HostActor)
    for call in calls:
        with pytest.raises(OtherCodeError, match=r"scipy is .* instead of 0\.1, plug-in mine is missing") as raised:
            call()
        assert raised.value.node == "node 7"


def raises(error):
    def function(*_, **__):
        raise error

    return function


def test_an_address_that_does_not_answer(monkeypatch):
    from orchestrator.execution.cluster.connect import connected

    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    def unanswered(address, **options):
        raise ConnectionError("no answer")

    monkeypatch.setattr(ray, "init", unanswered)
    with pytest.raises(UserError, match=r"127\.0\.0\.1:1"), connected("127.0.0.1:1"):
        pass


# ---- exact sums over hosts


class WideReleases(ClientProgram):
    """Releases with numbers of very different magnitude, whose float64 sum depends on the order."""

    name = "wide releases"

    def round(self, client, theta):
        sizes = [torch.linspace(-9, 3, theta.shape[1]).roll(int(size)) for size in client.size.flatten()]
        return (theta + client.noise("gradient")) * 10.0 ** torch.stack(sizes).unsqueeze(1)


def test_the_sum_of_all_releases_is_exact(small_problem):
    """Before the server rounds it to float32: to the last bit of float64, the same from 1, 2, 3 and 5 hosts."""
    trial = small.trial(small_problem, "dp-fedgd", clip=1e-3)
    theta = torch.zeros(1, small_problem.model.dimension)

    def total(hosts: int) -> bytes:
        work = replace(client_work([trial], ProblemData.of(small_problem), hosts), program=WideReleases())
        replies = Hosts(hosts).round(work, 1, {"theta": theta}, False)
        return torch.stack([reply.total for reply in replies]).sum(0).numpy().tobytes()

    assert total(1) == total(2) == total(3) == total(5)


@pytest.mark.parametrize(
    ("method", "classes", "model"),
    [
        ("dp-fedsofim", 4, "softmax"),
        ("dp-fedsofim", 62, "softmax"),  # enough classes that the rows of a client are processed in chunks
        ("dp-fedsofim", 4, "mlp:32"),
        pytest.param("dp-fednewton", 8, "multinomial", marks=pytest.mark.audits),  # 15 s
        ("dp-scaffold", 4, "softmax"),
        ("dp-fedfc", 4, "softmax"),
        ("dp-fednew-fc", 4, "softmax"),
        ("dp-fedadamw", 4, "softmax"),
    ],
)
def test_clients_computed_together_give_the_same_bits_as_alone(method, classes, model, monkeypatch):
    """Sixty clients, from a few rows to more than a batch holds, in the batches of one host and of seven."""
    of = small.problem(f"synthetic-frozen:8000,100,12,{classes}", "dirichlet:0.3", clients=60, model=model)
    trials = [small.trial(of, method, rounds=2, every=2, seed=seed) for seed in (42, 7)]
    together, sizes = SHAPES["cpu"].rows_together, of.partition.sizes
    if classes == 4:
        assert min(sizes) < 32 < together / 2 < max(sizes), "there are batches of many clients, of few and of one"
    else:
        assert len(set(SHAPES["cpu"].batches(range(60), sizes, of.model.dimension, False))) < 60, (
            "some are computed together"
        )
    once = small.run(trials, of)
    assert small.run(trials, of, hosts=7) == once
    monkeypatch.setitem(SHAPES, "cpu", OneClientPerBatch(**vars(SHAPES["cpu"])))
    assert small.run(trials, of) == once


def test_hundreds_of_tiny_clients_together_give_the_same_bits_as_alone(monkeypatch):
    of = small.problem("synthetic-frozen:900,100,12,4", "iid", clients=300)
    trials = [small.trial(of, "dp-fedavg", {"local_steps": 2}, rounds=2, every=2, seed=seed) for seed in (42, 7)]
    assert len(SHAPES["cpu"].batches(range(300), of.partition.sizes, of.model.dimension, False)) == 2
    once = small.run(trials, of)
    assert small.run(trials, of, hosts=3) == once
    monkeypatch.setitem(SHAPES, "cpu", OneClientPerBatch(**vars(SHAPES["cpu"])))
    assert small.run(trials, of) == once


class OneClientPerBatch(Shape):
    def batches(self, *given):
        return [((client,), rows) for clients, rows in super().batches(*given) for client in clients]


# ---- client states, without Ray


@pytest.mark.parametrize("checkpoint_at", [None, 5, 7])
def test_a_host_that_lost_its_clients_states(small_problem, checkpoint_at):
    """DP-SCAFFOLD's clients keep c_i. When a host is restarted, rounds are repeated from the last checkpoint, or from
    the first round; the result does not show it."""
    trials = [small.trial(small_problem, "dp-scaffold", {"local_steps": 2}, seed=seed) for seed in (42, 7)]
    hosts = Hosts(3)
    server = Server(hosts)
    server.open(trials, ProblemData.of(small_problem))
    if checkpoint_at:
        server.advance(checkpoint_at)
        server.checkpoint()
    server.advance(7)
    hosts._hosts[1] = ClientHost(1)
    found = outcomes(server.advance(12))
    undisturbed = Server(Hosts(1))
    undisturbed.open(trials, ProblemData.of(small_problem))
    assert found == outcomes(undisturbed.advance(12))


@pytest.mark.parametrize("died", [0, 1])
@pytest.mark.parametrize("hosts", [1, 3])
def test_a_checkpoint_is_complete_although_a_host_died_before_it(small_problem, hosts, died):
    """The rounds since the last one are repeated first: a checkpoint without some clients' states is useless.
    It is of the round that was reached."""
    trials = [small.trial(small_problem, "dp-scaffold", {"local_steps": 2}, seed=seed) for seed in (42, 7)]
    here, undisturbed = Hosts(hosts), Server(Hosts(1))
    server, after = Server(here), Server(Hosts(2))
    for one in (server, undisturbed):
        one.open(trials, ProblemData.of(small_problem))
        one.advance(4)
        one.checkpoint()
        one.advance(7)
    here._hosts[died % hosts] = ClientHost(died % hosts)
    after.open(trials, ProblemData.of(small_problem), server.checkpoint())
    assert (server.t, after.t) == (7, 7)
    expected = outcomes(undisturbed.advance(12))
    assert outcomes(server.advance(12)) == expected
    assert outcomes(after.advance(12)) == expected


def test_a_host_knows_which_round_its_states_are_from(small_problem):
    """States of another round than the previous one count as lost."""
    trial = small.trial(small_problem, "dp-scaffold")
    work = client_work([trial], ProblemData.of(small_problem), 1)
    sent = {"theta": small_problem.model.initial(1).unsqueeze(0), "c": torch.zeros(1, small_problem.model.dimension)}
    host = ClientHost(0)
    for t in (1, 2):
        host.round(work, t, sent, False)
    for stale in (2, 4):
        with pytest.raises(ClientStateLostError, match=f"after round {stale - 1}"):
            host.round(work, stale, sent, False)
    host.round(work, 3, sent, False)


def test_a_round_that_fails_half_way_does_not_change_the_states(small_problem, monkeypatch):
    trial = small.trial(small_problem, "dp-scaffold")
    work = client_work([trial], ProblemData.of(small_problem), 1)
    sent = {"theta": small_problem.model.initial(1).unsqueeze(0), "c": torch.zeros(1, small_problem.model.dimension)}
    host, undisturbed = ClientHost(0), ClientHost(0)
    for t in (1, 2):
        host.round(work, t, sent, False)
        undisturbed.round(work, t, sent, False)
    plain = type(work.program).round

    def then_dies(self, client, theta):
        plain(self, client, theta)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(work.program), "round", then_dies)
        with pytest.raises(MemoryError):
            host.round(work, 3, sent, False)
    again, expected = host.round(work, 3, sent, False), undisturbed.round(work, 3, sent, False)
    assert torch.equal(again.total, expected.total)


@pytest.mark.parametrize("local_steps", [1, 10])
def test_a_round_is_one_message_per_host(small_problem, monkeypatch, local_steps):
    """And its reply, for any number of local steps."""
    calls = []
    for name in ("prepare", "round", "states", "restore"):
        correct = getattr(ClientHost, name)

        def counted(host, *arguments, name=name, correct=correct):
            calls.append((name, host.index))
            return correct(host, *arguments)

        monkeypatch.setattr(ClientHost, name, counted)
    trial = small.trial(small_problem, "dp-scaffold", {"local_steps": local_steps})
    server = Server(Hosts(2))
    server.open([trial], ProblemData.of(small_problem))
    server.advance(1)
    calls.clear()
    server.advance(3)
    assert calls == [("round", 0), ("round", 1)] * 2


def test_almost_equal_seeds_have_different_noise(small_problem):
    """Beyond 2^53 not every integer is a float."""
    trials = [small.trial(small_problem, "dp-fedfc", rounds=2, every=2, seed=2**60 + n) for n in (0, 1)]
    together = small.run(trials, small_problem)
    assert together[trials[0].key].weights != together[trials[1].key].weights
    for trial in trials:
        assert small.run([trial], small_problem)[trial.key] == together[trial.key]


def test_idle_hosts_contribute_no_client_states(small_problem):
    """Five hosts served five clients; of the next pack's two clients, three hosts have no state or an outdated one."""
    first = small.trial(small_problem, "dp-scaffold")
    two = small.problem(clients=2)
    second = small.trial(two, "dp-scaffold")
    server = Server(Hosts(5))
    server.open([first], ProblemData.of(small_problem))
    server.advance(6)
    server.open([second], ProblemData.of(two))
    server.advance(6)
    saved = server.checkpoint()
    resumed = Server(Hosts(1))
    resumed.open([second], ProblemData.of(two), saved)
    assert outcomes(resumed.advance(12)) == outcomes(server.advance(12))


# ---- checkpoints, without Ray


class Payload:
    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self):
        return os.mkdir, (self.target,)


def test_a_checkpoint_that_contains_code_is_refused(trials, small_problem, tmp_path):
    trap, buffer = tmp_path / "sprung", io.BytesIO()
    torch.save({"t": Payload(str(trap))}, buffer)
    server = Server(Hosts(1))
    with pytest.raises(UnusableCheckpointError) as caught:
        server.open(trials, ProblemData.of(small_problem), buffer.getvalue())
    assert isinstance(caught.value.__cause__, pickle.UnpicklingError)
    assert not trap.exists()


def test_a_checkpoint_of_another_pack_is_refused(trials, small_problem):
    data = ProblemData.of(small_problem)
    server = Server(Hosts(1))
    server.open(trials[:3], data)
    saved = server.checkpoint()
    with pytest.raises(ValueError, match="another pack"):
        server.open(trials[3:6], data, saved)


# ---- trials, packs, assignment


def test_a_key_depends_on_everything_that_can_change_a_result(small_problem):
    base = small.trial(small_problem, "dp-fedgd")
    others = [
        small.trial(small_problem, "dp-fedgd", {"learning_rate": 0.2}),
        small.trial(small_problem, "dp-fedsofim"),
        small.trial(small_problem, "dp-fedgd", seed=7),
        small.trial(small_problem, "dp-fedgd", rounds=13),
        small.trial(small_problem, "dp-fedgd", epsilon=1.0),
        small.trial(small_problem, "dp-fedgd", epsilon=float("inf")),
        small.trial(small_problem, "dp-fedgd", delta=1e-6),
        small.trial(small_problem, "dp-fedgd", clip=1.0),
        small.trial(small_problem, "dp-fedgd", release="secure-aggregation"),
        small.trial(small_problem, "dp-fedgd", adjacency="zero-out"),
        small.trial(small.problem(partition="iid"), "dp-fedgd"),
        small.trial(small.problem(clients=4), "dp-fedgd"),
        small.trial(small.problem(data="synthetic-frozen:601,100,12,4"), "dp-fedgd"),
        small.trial(small.problem(train_on="train"), "dp-fedgd"),
        small.trial(small.problem(train_on="train", evaluate_on="validation"), "dp-fedgd"),
    ]
    assert len({base.key, *(other.key for other in others)}) == 1 + len(others)
    assert small.trial(small_problem, "dp-fedgd", {"learning_rate": "0.1"}).key == base.key, "0.1 is the default"


def other_than(value, annotation):
    """Another value of a field of any type."""
    if typing.get_origin(annotation) is typing.Literal:
        return next(choice for choice in typing.get_args(annotation) if choice != value)
    if isinstance(value, dict):
        return {**value, "another": 1}
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (*value, "another")
    return f"{value}x" if isinstance(value, str) else (value or 0) + 1


def changed_in_one_field(spec):
    """One changed copy for every field, including nested ones."""
    for name, field in type(spec).model_fields.items():
        value = getattr(spec, name)
        inner = changed_in_one_field(value) if isinstance(value, BaseModel) else [other_than(value, field.annotation)]
        for other in inner:
            yield spec.model_copy(update={name: other})


def test_a_key_depends_on_every_field(small_problem):
    """Also on fields that will be added: otherwise one trial would get the ledger row of another."""
    base = small.trial(small_problem, "dp-fedgd")
    others = list(changed_in_one_field(base))
    assert len(others) > 20
    assert len({base.key, *(other.key for other in others)}) == 1 + len(others)
    read_back = [TrialSpec.model_validate_json(other.model_dump_json()).key for other in others]
    assert read_back == [other.key for other in others]


def test_only_similar_trials_share_a_pack(small_problem):
    base = small.trial(small_problem, "dp-fedgd")
    assert pack_group(base) == pack_group(small.trial(small_problem, "dp-fedsofim", seed=7, epsilon=1.0))
    assert pack_group(base) != pack_group(small.trial(small_problem, "dp-fedgd", rounds=13))
    assert pack_group(base) != pack_group(base.model_copy(update={"stop_after": 3}))
    assert pack_group(base) != pack_group(small.trial(small.problem(partition="iid"), "dp-fedgd"))


def test_trials_that_cannot_share_a_pack_are_refused(small_problem):
    """A pack takes rounds and data from its first trial: a trial with others must be refused."""
    base = small.trial(small_problem, "dp-fedgd")
    strangers = [
        small.trial(small_problem, "dp-fedgd", rounds=20),
        small.trial(small_problem, "dp-fedgd", every=6),
        small.trial(small.problem(partition="iid"), "dp-fedgd"),
    ]
    for stranger in strangers:
        with pytest.raises(ValueError, match="pack"):
            Server(Hosts(1)).open([base, stranger], ProblemData.of(small_problem))


def test_a_pack_is_opened_with_its_own_data(small_problem):
    """Noise is calibrated to the data's client sizes: data of another problem must not go unnoticed."""
    trial = small.trial(small_problem, "dp-fedgd")
    with pytest.raises(ValueError, match="problem"):
        Server(Hosts(1)).open([trial], ProblemData.of(small.problem(partition="iid")))


@pytest.mark.parametrize("hosts", [1, 2, 3, 7, 20, 50])
def test_every_client_has_one_host_and_hosts_have_similar_loads(hosts):
    sizes = np.random.default_rng(0).integers(891, 3498, 20).tolist()
    held = assign(sizes, hosts)
    assert sorted(client for clients in held for client in clients) == list(range(20))
    assert len(held) == min(hosts, 20)
    loads = [sum(sizes[client] for client in clients) for clients in held]
    assert max(loads) - min(loads) <= max(sizes)

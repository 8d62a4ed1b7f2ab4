"""Packs and capacity: how much fits where, and which trials may share a pack."""

import re
from collections import Counter

import pytest
import small
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.execution import host_memory, planning
from orchestrator.execution.cluster.connect import local_resources
from orchestrator.execution.packing import AUTO_LANES, Capacity, cluster_capacity, make_packs
from orchestrator.study.reading import parse
from orchestrator.study.settings.resources import ResourceSettings
from trainables.errors import UserError
from trainables.federation import machine_memory
from trainables.federation.federation_size import FederationSize
from trainables.federation.gpu_memory import lanes_that_fit
from trainables.federation.pack import pack_group
from trainables.models.lanes import MAX_CLIENTS, SHAPES
from trainables.models.mlp import MLPHead
from trainables.models.softmax import SoftmaxHead


def fitting(*nodes: dict[str, float], clients: int = 20, **settings) -> tuple[int, int]:
    """Federations, and hosts of each."""
    found = cluster_capacity(nodes, ResourceSettings(**settings), clients)
    return found.federations, found.size.hosts


def cpus(count: float) -> dict[str, float]:
    return {"CPU": float(count), "memory": 1e9, "node:127.0.0.1": 1.0}


# ---- capacity


@pytest.mark.parametrize(
    ("nodes", "settings", "expected"),
    [
        ([2], {}, (1, 2)),  # as many hosts as the node has cores
        ([3, 3], {}, (2, 3)),
        ([8], {}, (2, 4)),  # four hosts at most; the other cores run another federation
        ([8, 8, 2], {}, (4, 4)),  # two on each of the large nodes, none on the small one
        ([6, 6], {}, (4, 3)),  # four hosts would leave two cores of every node idle
        ([6, 6], {"hosts": 4}, (2, 4)),  # twelve cores, but a federation stays on its node: one on each
        ([6, 6], {"placement": "spread"}, (3, 4)),  # unless it is spread
        ([3, 2], {}, (2, 2)),  # three hosts would leave the smaller node idle
        ([5], {}, (1, 4)),  # one core in five
        ([5, 1], {}, (6, 1)),  # what fits both
        ([1, 1, 1], {"placement": "spread"}, (1, 3)),
        ([1, 1, 1, 1], {"hosts": 4, "placement": "spread"}, (1, 4)),
        ([5, 1], {"hosts": 2}, (2, 2)),
        ([0, 4], {"hosts": 1}, (4, 1)),  # a head node that lends no core
    ],
)
def test_how_many_federations_fit(nodes, settings, expected):
    assert fitting(*map(cpus, nodes), **settings) == expected


def test_never_more_hosts_than_clients():
    assert fitting(cpus(8), clients=3) == (2, 3)
    assert fitting(cpus(8), clients=1, hosts=4) == (8, 1)


@pytest.mark.parametrize(
    ("node", "settings", "expected"),
    [
        ({"CPU": 16, "GPU": 1}, {"gpus_per_host": 1}, (1, 1)),  # one host has the whole device
        ({"CPU": 16, "GPU": 4}, {"gpus_per_host": 1}, (4, 1)),
        ({"CPU": 16, "GPU": 1}, {"gpus_per_host": 0.25, "hosts": 2}, (2, 2)),
        ({"CPU": 2, "GPU": 1}, {"gpus_per_host": 0.25}, (2, 1)),  # every host needs a core as well
        ({"CPU": 16, "GPU": 1}, {"gpus_per_host": 0.3}, (3, 1)),  # three thirds, not 3.33
        ({"CPU": 16, "GPU": 0.3}, {"gpus_per_host": 0.1}, (3, 1)),  # though 0.3 / 0.1 rounds to less than 3
        ({"CPU": 16, "GPU": 2}, {}, (2, 1)),  # by itself it takes whole devices, where there are any
        ({"CPU": 16, "GPU": 0.5}, {}, (4, 4)),
        ({"CPU": 16, "GPU": 2}, {"gpus_per_host": 0.4, "hosts": 2}, (2, 2)),  # two hosts on each device
        ({"CPU": 16, "GPU": 4, "accelerator_type:H200": 1}, {"accelerator": "H200"}, (4, 1)),
        ({"CPU": 16, "memory": 17 * 2**30}, {"memory_gib_per_host": 2, "gpus_per_host": 0}, (2, 4)),
        ({"CPU": 16, "GPU": 4}, {"federations": 3}, (3, 1)),  # no more than was said
        ({"CPU": 16, "GPU": 4}, {"federations": 5}, (4, 1)),
        ({"CPU": 16, "GPU": 2}, {"gpus_per_host": 0}, (4, 4)),  # and leaves them alone when told so
    ],
)
def test_how_many_federations_fit_on_gpus(node, settings, expected):
    assert fitting(node, **settings) == expected


@pytest.mark.parametrize(
    ("nodes", "settings", "sentence"),
    [
        ([cpus(2)], {"hosts": 4}, "a federation of 4 hosts needs 4 CPU on one node, which none has"),
        ([cpus(3), cpus(3)], {"hosts": 4}, "needs 4 CPU on one node"),
        ([cpus(1), cpus(2)], {"hosts": 4, "placement": "spread"}, "needs 4 CPU on the cluster, which it does not have"),
        ([cpus(8)], {"gpus_per_host": 1}, "needs 1 CPU and 1 GPU on one node"),
        ([{"CPU": 8, "GPU": 1}], {"gpus_per_host": 0.5, "hosts": 3}, "needs 3 CPU and 1.5 GPU on one node"),
        ([{"CPU": 8, "GPU": 2}], {"gpus_per_host": 0.4, "hosts": 5}, "needs 5 CPU and 2 GPU on one node"),
        ([cpus(8)], {"hosts": 2, "memory_gib_per_host": 4}, "needs 2 CPU and 8 GiB of memory on one node"),
        ([{"CPU": 8, "GPU": 2}], {"accelerator": "H200"}, "needs 1 CPU and 1 GPU and an accelerator H200 on one node"),
        ([], {}, "needs 1 CPU on one node"),
    ],
)
def test_federations_that_do_not_fit_are_refused(nodes, settings, sentence):
    with pytest.raises(UserError, match=f"^resources: .*{re.escape(sentence)}"):
        fitting(*nodes, **settings)


def test_lanes_of_a_pack():
    assert cluster_capacity([cpus(2)], ResourceSettings(), 20).lanes_per_pack == AUTO_LANES["cpu"]
    assert cluster_capacity([cpus(2)], ResourceSettings(lanes_per_pack=7), 20).lanes_per_pack == 7
    gpu = cluster_capacity([{"CPU": 1, "GPU": 1}], ResourceSettings(gpus_per_host=1), 20)
    assert (gpu.size.device, gpu.lanes_per_pack) == ("cuda", AUTO_LANES["cuda"])


def test_lanes_that_fit_a_gpu():
    """Fewer if clients keep state or weights are many, none if nothing fits. Even 2,000 clients leave room for all
    useful lanes, because only some are computed at a time."""
    head, large = SoftmaxHead(64, 10), 139 * 2**30
    fits = lanes_that_fit(head, [2500] * 20, False, large)
    many = lanes_that_fit(head, [25] * 2000, False, large)
    assert AUTO_LANES["cuda"] < many < fits
    assert lanes_that_fit(head, [25] * 2000, True, large) < many
    assert lanes_that_fit(head, [2500] * 20, False, 16 * 2**30) < fits
    assert lanes_that_fit(SoftmaxHead(512, 10), [2500] * 20, False, large) < fits
    assert lanes_that_fit(MLPHead(64, 32, 10), [2500] * 20, False, large) < fits
    assert lanes_that_fit(head, [2500] * 20, False, 2**30) == 0


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=600), st.integers(1, 1 << 20), st.booleans())
def test_every_client_is_in_one_batch(sizes, weights, apart):
    """On a CPU and on a GPU, with room for its rows; on a CPU the padding does not depend on other clients."""
    clients = list(range(len(sizes)))
    for device in ("cpu", "cuda"):
        batches = SHAPES[device].batches(clients, sizes, weights, apart)
        assert sorted(client for some, _ in batches for client in some) == clients
        assert all(sizes[client] <= rows for some, rows in batches for client in some)
        assert max(len(some) for some, _ in batches) <= MAX_CLIENTS
    alone = {client: SHAPES["cpu"].batches([client], sizes, weights, apart)[0][1] for client in clients}
    assert all(
        alone[client] == rows for some, rows in SHAPES["cpu"].batches(clients, sizes, weights, apart) for client in some
    )


# ---- packs


def size(lanes: int, federations: int = 1) -> Capacity:
    return Capacity(FederationSize(), federations, lanes)


def trials(problem, count: int, method: str = "dp-fedgd", rounds: int = 12, **hypers):
    name = "server_learning_rate" if "local_steps" in hypers else "learning_rate"
    return [small.trial(problem, method, {name: 0.01 * (k + 1), **hypers}, rounds=rounds) for k in range(count)]


@pytest.mark.parametrize(
    ("count", "lanes", "federations", "expected"),
    [
        (75, 128, 1, [75]),
        (128, 128, 1, [128]),
        (129, 128, 1, [80, 49]),  # two packs of about equal size, in whole blocks of 16: 65 -> 80
        (300, 128, 1, [112, 112, 76]),  # three packs: 100 -> 112
        (75, 128, 2, [48, 27]),  # one for each federation: 38 -> 48
        (20, 128, 4, [20]),  # less than two blocks are not worth a second federation
        (64, 128, 4, [16, 16, 16, 16]),
        (5, 1, 1, [1, 1, 1, 1, 1]),
        (12, 5, 1, [4, 4, 4]),  # below a block: equal shares
        (40, 16, 1, [16, 16, 8]),
        (40, 20, 1, [20, 20]),  # 32 would be whole blocks, but 20 is the limit
        (0, 128, 1, []),
    ],
)
def test_sizes_of_packs(small_problem, count, lanes, federations, expected):
    assert SHAPES["cpu"].lanes == 16
    members = trials(small_problem, count)
    packs = make_packs(members, size(lanes, federations))
    assert [len(pack) for pack in packs] == expected
    assert [trial for pack in packs for trial in pack] == members, "in the given order"


def test_packs_contain_only_trials_that_can_share_one(small_problem):
    """Trials differ in data, client program, rounds or evaluation, in any order."""
    other = small.problem(partition="iid", clients=4)
    like = [
        trials(small_problem, 3),
        trials(small_problem, 3, rounds=8),
        trials(other, 3),
        trials(small_problem, 3, "dp-fedavg", local_steps=2),
        trials(small_problem, 3, "dp-fedavg", local_steps=3),
        [small.trial(small_problem, "dp-fedgd", every=3)],
    ]
    mixed = [trial for members in zip(*like, strict=False) for trial in members]
    mixed += [trial for members in like for trial in members if trial not in mixed]
    packs = make_packs(mixed, size(128))
    assert sorted(sorted(t.key for t in pack) for pack in packs) == sorted(sorted(t.key for t in m) for m in like)


def test_methods_with_the_same_client_program_share_a_pack(small_problem):
    members = [
        small.trial(small_problem, method, seed=seed, epsilon=epsilon)
        for method in ("dp-fedgd", "dp-fedsofim", "dp-fedadam")
        for seed in (1, 2)
        for epsilon in (1.0, 8.0)
    ]
    (pack,) = make_packs(members, size(128))
    assert pack == members


@given(
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    lanes=st.integers(1, 150),
    federations=st.integers(1, 6),
)
def test_every_trial_is_in_one_pack(counts, lanes, federations):
    problem = small.problem()
    members = [trial for rounds, count in enumerate(counts, 1) for trial in trials(problem, count, rounds=rounds)]
    packs = make_packs(members, size(lanes, federations))
    assert Counter(t.key for pack in packs for t in pack) == Counter(t.key for t in members)
    assert all(0 < len(pack) <= lanes for pack in packs)
    assert all(len({pack_group(t) for t in pack}) == 1 for pack in packs)


def test_lanes_of_a_large_model_fit_into_memory(monkeypatch):
    """At most half of it; a study may set the number of lanes, and a GPU checks its own memory."""
    settings, gib = ResourceSettings(), 2**30
    nodes = [{**cpus(2), "memory": 16.0 * gib}]
    size = cluster_capacity(nodes, settings, 20)
    assert host_memory.within_memory(size, settings, 650, nodes) == size, "a small model is not limited"
    large = host_memory.within_memory(size, settings, 10**7, nodes)
    assert 1 <= large.lanes_per_pack < size.lanes_per_pack
    assert host_memory.lanes_bytes(large, 10**7) <= 8 * gib
    assert host_memory.within_memory(size, settings, 10**12, nodes).lanes_per_pack == 1
    told = ResourceSettings(lanes_per_pack=128)
    assert host_memory.within_memory(cluster_capacity(nodes, told, 20), told, 10**7, nodes).lanes_per_pack == 128
    gpu = cluster_capacity([{"CPU": 1, "GPU": 1}], ResourceSettings(gpus_per_host=1), 20)
    assert host_memory.within_memory(gpu, ResourceSettings(gpus_per_host=1), 10**9, nodes) == gpu
    monkeypatch.setattr(host_memory, "machine_bytes", lambda: 16 * gib)
    assert host_memory.within_memory(size, settings, 10**7) == large, "without nodes, this machine's memory counts"


def test_the_memory_limit_of_a_container_counts(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine_memory, "CGROUP", limit)
    limit.write_text("max\n")
    assert machine_memory.machine_bytes() > 2**30
    limit.write_text(f"{2**30}\n")
    assert machine_memory.machine_bytes() == 2**30
    (node,) = local_resources()
    assert node["memory"] == pytest.approx(0.7 * 2**30, rel=1e-3)


def test_a_plan_warns_if_memory_is_missing(tmp_path, monkeypatch):
    text = "name: wide\ndata: ['synthetic-frozen:400,100,64,10']\nclients: 4\nmethods: [dp-fedgd]\n"
    text += "epsilons: [1]\ndefaults: paper\n"
    text += "model: mlp:99999\nresources: {hosts: 1, lanes_per_pack: LANES}\n"
    monkeypatch.setattr("orchestrator.execution.planning.machine_bytes", lambda: 23 * 2**30)
    monkeypatch.setattr(host_memory, "machine_bytes", lambda: 23 * 2**30)
    monkeypatch.setattr("orchestrator.execution.cluster.connect.local_resources", lambda: [{"CPU": 2.0}])
    greedy = planning.plan(parse(text.replace("LANES", "128"), "wide.yaml", tmp_path))
    assert "GiB of memory, more than the 23.0 it has" in greedy.as_text()
    modest = planning.plan(parse(text.replace("LANES", "auto"), "wide.yaml", tmp_path))
    assert modest.bytes < 23 * 2**30
    assert "more than" not in modest.as_text()


def test_gpus_of_nodes_without_a_free_processor_are_not_used():
    """The study then uses the processors of other nodes."""
    assert fitting({"CPU": 4}, {"GPU": 8}) == (1, 4)
    on_cpus = cluster_capacity([{"CPU": 4}], ResourceSettings(), 20)
    assert on_cpus.prefers_gpus
    assert [
        on_cpus.gpu_federations_on([node]) for node in ({"GPU": 8}, {"CPU": 2, "GPU": 1}, {"CPU": 2, "GPU": 0.5})
    ] == [0, 1, 0]

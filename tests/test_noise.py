"""Addressed noise: what it is statistically, and that its address is all it depends on."""

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import small
import torch
from scipy import stats

from trainables.federation.client_host import ClientHost
from trainables.federation.pack import client_work
from trainables.federation.problem import ProblemData
from trainables.privacy.noise import SERVER, Address, fill_normals

HOME = Address(seed=42, client=3, round=7, step=0, purpose="gradient")
# one neighbour per field
NEIGHBOURS = {
    "seed": Address(43, 3, 7, 0, "gradient"),
    "client": Address(42, 4, 7, 0, "gradient"),
    "round": Address(42, 3, 8, 0, "gradient"),
    "step": Address(42, 3, 7, 1, "gradient"),
    "purpose": Address(42, 3, 7, 0, "covariance"),
}
COUNT = 200_000


def test_standard_normal():
    """Mean within 4 standard errors, variance likewise, and the whole distribution by Kolmogorov and Smirnov."""
    z = HOME.normal(COUNT).astype(np.float64)
    assert abs(z.mean()) < 4 / np.sqrt(COUNT)
    assert abs(z.var() - 1) < 4 * np.sqrt(2 / COUNT)
    assert stats.kstest(z, "norm").pvalue > 0.001
    assert np.isfinite(z).all()


def test_standard_normal_across_addresses():
    """One number from each of many addresses is as normal as many numbers from one address."""
    z = np.array([Address(42, client, t, 0, "gradient").normal(1)[0] for client in range(100) for t in range(200)])
    assert abs(z.mean()) < 4 / np.sqrt(len(z))
    assert abs(z.var() - 1) < 4 * np.sqrt(2 / len(z))
    assert stats.kstest(z, "norm").pvalue > 0.001


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_independent_across_addresses(name):
    """Neighbours in any of the five fields: no correlation, none at a shift of one, and no number in common place."""
    here, there = HOME.normal(COUNT), NEIGHBOURS[name].normal(COUNT)
    for a, b in ((here, there), (here[1:], there[:-1]), (here[:-1], there[1:]), (here**2, there**2)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(COUNT)
    assert np.mean(here == there) < 1e-3


def test_the_server_is_no_client():
    """And what it draws, initial weights for example, stays what it is: results hang on it."""
    assert SERVER == -1


def test_fields_do_not_run_into_each_other():
    """Small numbers in all fields: every address has different noise."""
    addresses = [
        Address(*numbers, purpose)
        for numbers in itertools.product((-1, 0, 1), repeat=4)
        for purpose in ("a", "b", "ab")
    ]
    assert len({address.normal(4).tobytes() for address in addresses}) == len(addresses)


def test_a_pure_function():
    """Whatever is drawn in between and however often one asks; a longer vector begins with the shorter one."""
    first = HOME.normal(1000)
    np.random.default_rng().normal(size=10)
    np.random.seed(0)
    NEIGHBOURS["round"].normal(17)
    assert (HOME.normal(1000) == first).all()
    assert (Address(42, 3, 7, 0, "gradient").normal(100) == first[:100]).all()


def test_many_addresses_at_once():
    found = np.empty((3, 2, 5), np.float32)
    fill_normals(found, (4, 0, 9), (7, 42), 3, 1, "gradient")
    each = [[Address(seed, client, 3, 1, "gradient").normal(5) for seed in (7, 42)] for client in (4, 0, 9)]
    np.testing.assert_array_equal(found, each)


def test_the_same_in_another_process():
    """Nothing of the process goes in: no hash seed, no global generator."""
    code = f"from trainables.privacy.noise import Address; print({HOME!r}.normal(500).tobytes().hex())"
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert found.stdout.strip() == HOME.normal(500).tobytes().hex()


def test_pinned():
    """These numbers are part of every recorded result. If they change, ENGINE_VERSION has to be raised."""
    assert HOME.normal(3).tolist() == [3.25276780128479, -1.0403574705123901, -0.8311306238174438]


def test_addresses_do_not_disturb_one_another():
    """The generator is re-keyed by the next address, whatever was drawn before, in any thread."""
    expected = [Address(1, client, 1, 0, "gradient").normal(50).tolist() for client in range(8)]
    for client in reversed(range(8)):
        HOME.generator().random(client, dtype=np.float32)  # leaves half a word behind
        assert Address(1, client, 1, 0, "gradient").normal(50).tolist() == expected[client]
    with ThreadPoolExecutor(4) as pool:
        drawn = list(pool.map(lambda i: Address(1, i % 8, 1, 0, "gradient").normal(50).tolist(), range(400)))
    assert drawn == [expected[i % 8] for i in range(400)]


# ---- made on a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("purpose", ["gradient", "a purpose that fills more than one word"])
@pytest.mark.parametrize("size", [1, 650, 1024, 70_000])
def test_a_gpu_makes_the_same_numbers_cuda(size, purpose):
    """Bit-identical, except for the last bit of numbers that use a logarithm; for any length, so that no numbers are
    shifted."""
    from trainables.privacy import noise_triton

    clients, seeds = [*range(200 if size < 10_000 else 5), 2**40], [42, 7, 2**62]
    made = noise_triton.normals(torch.tensor(clients).cuda(), torch.tensor(seeds).cuda(), 9, 2, purpose, size).cpu()
    drawn = np.array([[Address(seed, client, 9, 2, purpose).normal(size) for seed in seeds] for client in clients])
    differs = made.numpy() != drawn
    assert (np.abs(drawn[differs]) > noise_triton.EDGE).all()
    assert (np.abs(made.numpy()[differs] - drawn[differs]) <= np.spacing(np.abs(drawn[differs]))).all()


# ---- host and pack


def released_noise(trials, of, hosts: int, t: int) -> dict[str, np.ndarray]:
    """The noise that all clients together added in round t, by trial."""
    work = client_work(trials, ProblemData.of(of), hosts)
    theta = torch.zeros(len(trials), of.model.dimension)
    replies = [ClientHost(index).round(work, t, {"theta": theta}, True) for index in range(len(work.assignment))]
    total = torch.stack([reply.diagnostics.noise for reply in replies]).sum(0).numpy()
    return {trial.key: row for trial, row in zip(trials, total, strict=True)}


def test_never_depends_on_host_or_pack(small_problem):
    trials = [
        small.trial(small_problem, "dp-fedgd", {"learning_rate": rate}, seed=seed)
        for rate in (0.1, 1.0)
        for seed in (42, 7)
    ]
    reference = released_noise(trials, small_problem, hosts=1, t=3)
    for hosts in (2, 5):
        again = released_noise(trials, small_problem, hosts, t=3)
        assert all((again[key] == noise).all() for key, noise in reference.items())
    for trial in trials:
        alone = released_noise([trial], small_problem, hosts=3, t=3)[trial.key]
        assert (alone == reference[trial.key]).all()
    one_seed = [reference[trial.key] for trial in trials if trial.seed == 42]
    assert (one_seed[0] == one_seed[1]).all(), "lanes of a seed share their noise"
    other_seed = next(reference[trial.key] for trial in trials if trial.seed == 7)
    assert not np.isclose(one_seed[0], other_seed).any()


def test_each_client_adds_the_noise_of_its_own_address(small_problem):
    """One host per client: what a host reports is std x normal(seed, client, round, 0, "gradient") / |D_i|."""
    trial = small.trial(small_problem, "dp-fedgd", seed=5)
    clients = len(small_problem.partition.sizes)
    work = client_work([trial], ProblemData.of(small_problem), clients)
    theta = torch.zeros(1, small_problem.model.dimension)
    std = float(work.noise_std["gradient"][0])
    for host, held in enumerate(work.assignment):
        (client,) = held
        reply = ClientHost(host).round(work, 9, {"theta": theta}, True)
        noise = Address(5, client, 9, 0, "gradient").normal(theta.numel())
        expected = std * noise / small_problem.partition.sizes[client]
        np.testing.assert_allclose(reply.diagnostics.noise[0] / 2**34, expected, rtol=1e-6, atol=1e-9)

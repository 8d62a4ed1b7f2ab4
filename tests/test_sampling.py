"""Some rows and some clients: who is drawn, that draws are addressed, and what secret samples cost."""

import dataclasses
import itertools
import math

import dp_accounting
import numpy as np
import pytest
import small
import torch
from dp_accounting import pld, rdp
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, norm

from trainables.errors import UserError
from trainables.federation.batch_round import most_sampled
from trainables.federation.client_host import ClientHost
from trainables.federation.pack import client_work, plan_of
from trainables.federation.problem import ProblemData
from trainables.methods.base import ClientProgram
from trainables.models.shard import Shard
from trainables.models.softmax import SoftmaxHead
from trainables.privacy import gaussian
from trainables.privacy.noise import Address
from trainables.privacy.participation import cohort, most_rounds, participants
from trainables.privacy.plan import ADJACENCIES, RELEASES, Event, PrivacyPlan, PrivacySettings
from trainables.privacy.sampled import Sampled, epsilon_of, grid_for

# ---- rows of a shard


@given(
    st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=2, max_size=2),
    st.integers(0, 10**6),
    st.sampled_from([1.0, 1e3]),
)
def test_a_sample_of_a_shard_is_the_shard_of_the_sample(masks, seed, scale):
    """The same gradients as a shard that never had the other rows; none at all for an empty sample. At large weights
    the model is sure of every row, and errors are exactly zero."""
    rng = np.random.default_rng(seed)
    parts = [(rng.standard_normal((6, 3)).astype(np.float32), rng.integers(0, 2, 6)) for _ in masks]
    theta, clip = torch.from_numpy(scale * rng.standard_normal((2, 8)).astype(np.float32)), torch.tensor([0.5, 10.0])
    whole, head = Shard.build(parts), SoftmaxHead(3, 2)
    sampled = whole.sample([np.flatnonzero(mask) for mask in masks])
    found, diagnostics = head.clipped_gradient_sum(sampled, theta, clip, diagnose=True)
    assert torch.equal(sampled.size, whole.size), "what a client holds, not what was drawn"
    for client, (mask, (x, y)) in enumerate(zip(masks, parts, strict=True)):
        if not any(mask):
            assert not found[client].any()
            assert not diagnostics.loss[client].any()
            continue
        expected, _ = head.clipped_gradient_sum(Shard.build([(x[mask], y[mask])]), theta, clip)
        torch.testing.assert_close(found[client], expected[0], rtol=1e-5, atol=1e-6)


@given(st.integers(1, 10**5), st.floats(0.001, 0.999))
def test_a_sample_hardly_ever_exceeds_its_public_size(rows, rate):
    most = most_sampled(rows, rate)
    assert 1 <= most <= rows
    assert binom.sf(most, rows, rate) < 1e-8


# ---- what a client draws


@dataclasses.dataclass(frozen=True)
class Probe(ClientProgram):
    """Looks at samples instead of releasing anything."""

    rate: float
    step: int = 0
    seen: list = dataclasses.field(default_factory=list)
    name = "probe"
    samples = True

    def round(self, client, theta):
        sample = client.sample(self.rate, self.step)
        self.seen.append((sample, client.clipped_gradient_sum(theta, sample), client.clipped_gradient_sum(theta)))
        return client.zeros()


def drawn(of, rate, seeds, t=1, step=0):
    """What every client of a problem draws."""
    trials = [
        small.trial(of, "dp-fedgd", {"learning_rate": 0.1 + i}, seed=seed, clip=3.0) for i, seed in enumerate(seeds)
    ]
    probe = Probe(rate, step)
    work = dataclasses.replace(client_work(trials, ProblemData.of(of), 1), program=probe)
    theta = torch.stack([of.model.initial(1)] * len(trials))
    ClientHost(0).round(work, t, {"theta": theta}, False)
    return probe.seen


def rows_of(shard):
    """Which rows a client drew, as a set of their features."""
    real = torch.isfinite(shard.norm[0, :, 0])
    return {tuple(row) for row in shard.x[0, real].tolist()}


def test_samples_are_addressed(small_problem):
    """Each row with probability `rate`, by seed, client, round and step; all lanes of a seed see the same ones."""
    found = drawn(small_problem, 0.3, [7, 42, 7], t=5, step=2)
    for client, (sample, _, _) in enumerate(found):
        held = small_problem.data.x_train[small_problem.partition.rows[client]]
        lanes = {tuple(lanes.tolist()): rows_of(shard) for lanes, shard in sample.parts}
        assert set(lanes) == {(0, 2), (1,)}
        for members, seed in (((0, 2), 7), ((1,), 42)):
            mask = Address(seed, client, 5, 2, "sample").generator().random(len(held)) < 0.3
            assert lanes[members] == {(*row, 1.0) for row in held[mask].tolist()}


def test_a_program_that_samples_says_so(small_problem, monkeypatch):
    """Its clients are computed one by one: a sample is as long as chance will have it."""
    monkeypatch.setattr(Probe, "samples", False)
    with pytest.raises(Exception, match="probe samples rows: its `samples` must be true"):
        drawn(small_problem, 0.3, [7])


def test_samples_differ_by_seed_client_round_and_step(small_problem):
    """As drawn by a client's program: of the same rows, never the same half."""
    places = [(1, 1, 0), (2, 1, 0), (1, 2, 0), (1, 1, 1)]
    by_client = [
        [rows_of(sample.parts[0][1]) for sample, _, _ in drawn(small_problem, 0.5, [seed], t=t, step=step)]
        for seed, t, step in places
    ]
    for client, size in enumerate(small_problem.partition.sizes):
        halves = [rows[client] for rows in by_client]
        for one, other in itertools.combinations(halves, 2):
            assert abs(len(one & other) - size / 4) < 4 * math.sqrt(size * 3 / 16), "as if drawn independently"
    masks = {Address(1, client, 1, 0, "sample").generator().random(8).tobytes() for client in range(5)}
    assert len(masks) == 5, "and every client has an address of its own"


def test_samples_have_the_expected_rate(small_problem):
    """600 rows, 40 rounds: within four standard errors of 0.2."""
    total = sum(
        len(rows_of(sample.parts[0][1])) for t in range(1, 41) for sample, _, _ in drawn(small_problem, 0.2, [3], t=t)
    )
    assert abs(total - 0.2 * 24_000) < 4 * math.sqrt(24_000 * 0.2 * 0.8)


def test_lanes_on_samples_of_their_own_are_as_if_alone(small_problem):
    seeds = [7, 42, 7, 3]
    together = drawn(small_problem, 0.3, seeds)
    for lane, seed in enumerate(seeds):
        for (_, sums, _), (_, alone, _) in zip(together, drawn(small_problem, 0.3, [seed]), strict=True):
            assert torch.equal(sums[:, lane], alone[:, 0])


def test_a_sample_of_all_is_all(small_problem):
    for _, sampled, whole in drawn(small_problem, 1.0, [7, 42]):
        assert torch.equal(sampled, whole)
    for _, nearly, whole in drawn(small_problem, 1 - 1e-12, [7, 42]):
        assert torch.equal(nearly, whole)


# ---- who takes part


@given(st.integers(1, 30), st.floats(0.01, 1), st.integers(0, 10**6), st.integers(1, 99))
def test_participants(clients, share, seed, t):
    chosen = participants(seed, t, clients, share)
    assert len(chosen) == clients
    assert chosen.sum() == cohort(clients, share) == max(1, round(share * clients))
    assert (chosen == participants.__wrapped__(seed, t, clients, share)).all(), "a pure function"


def test_participants_change_and_are_fair():
    """Every one of ten clients takes part in three tenths of the rounds, within four standard errors."""
    rounds = [participants(5, t, 10, 0.3) for t in range(1, 2001)]
    assert len({some.tobytes() for some in rounds}) == 120, "all choices of three out of ten"
    taken = np.sum(rounds, axis=0)
    assert (abs(taken - 600) < 4 * math.sqrt(2000 * 0.3 * 0.7)).all()
    assert most_rounds(5, 2000, 10, 0.3) == taken.max()
    assert (participants(6, 1, 10, 0.3) != participants(5, 1, 10, 0.3)).any()


def test_the_rounds_of_the_busiest_client_are_counted_exactly():
    """From the first round to the last one, for 1 to 12 rounds."""
    for rounds in range(1, 13):
        taken = sum(participants(7, t, 3, 0.34).astype(int) for t in range(1, rounds + 1))
        assert most_rounds(7, rounds, 3, 0.34) == max(taken)


def test_a_schedule_cannot_be_changed():
    """It is kept for other callers."""
    with pytest.raises(ValueError, match="read-only"):
        participants.__wrapped__(5, 1, 10, 0.3)[0] = True


def test_schedules_of_very_many_clients_are_not_kept():
    """A bit for each client of the rounds that are worked on, not a set for each of all rounds."""
    assert participants(5, 1, 100_000, 0.1).nbytes == 100_000
    assert participants.cache_info().maxsize * 100_000 < 32 * 2**20


def test_the_busiest_client_is_accounted_for(small_problem):
    """Who takes part is known: a client's releases are its rounds, not a share of all rounds."""
    trial = small.trial(small_problem, "dp-localadamw", {"participation": 0.4, "local_steps": 3}, rounds=20)
    taken = sum(participants(42, t, 5, 0.4).astype(int) for t in range(1, 21))
    (event,) = plan_of(trial, small_problem.partition.sizes).events
    assert event.count == 3 * max(taken)
    assert 8 < max(taken) < 20


# ---- what samples cost


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize(("count", "multiplier"), [(1, 2.0), (30, 10.0), (200, 8.0)])
def test_a_sample_of_all_costs_the_closed_form(adjacency, count, multiplier):
    """mu = sqrt(count) x moves / multiplier."""
    moves = 2 if adjacency == "replace-one" else 1
    exact = gaussian.epsilon_of(math.sqrt(count) * moves / multiplier, 1e-5)
    found = epsilon_of((Sampled(count, multiplier, 1.0),), adjacency, 1e-5)
    assert exact <= found * (1 + 1e-9)
    assert found == pytest.approx(exact, rel=3e-3)
    assert epsilon_of((Sampled(count, multiplier, 0.999999),), adjacency, 1e-5) == pytest.approx(exact, rel=3e-3)


def one_release(rate, multiplier, adjacency, epsilon):
    """delta of a single release by numerical integration. A record is in the sample with probability q and then moves
    the sum by +-1: N(0) against (1-q) N(0) + q N(1), or, replaced, (1-q) N(0) + q N(-1) against that; both ways."""
    z = np.linspace(-12 * multiplier - 1, 12 * multiplier + 1, 400_001)
    density = {move: norm.pdf(z, move, multiplier) for move in (-1, 0, 1)}
    there = (1 - rate) * density[0] + rate * density[1]
    away = density[0] if adjacency == "zero-out" else (1 - rate) * density[0] + rate * density[-1]
    worst = [np.trapezoid(np.maximum(p - math.exp(epsilon) * q, 0), z) for p, q in ((there, away), (away, there))]
    return max(worst)


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize(("rate", "multiplier"), [(0.1, 1.0), (0.5, 2.0), (0.02, 0.7)])
def test_one_release_against_the_definition(adjacency, rate, multiplier):
    epsilon = epsilon_of((Sampled(1, multiplier, rate),), adjacency, 1e-5)
    assert one_release(rate, multiplier, adjacency, epsilon) <= 1.001e-5
    assert one_release(rate, multiplier, adjacency, 0.99 * epsilon) > 1e-5


@pytest.mark.parametrize(("rate", "multiplier", "count"), [(0.01, 1.0, 1000), (0.1, 3.0, 100), (0.5, 20.0, 50)])
def test_renyi_accounting_is_an_upper_bound(rate, multiplier, count):
    """Another way to count, looser by nature: never below, and not far above."""
    accountant = rdp.RdpAccountant()
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(multiplier)), count)
    upper = accountant.get_epsilon(1e-5)
    assert 0.6 * upper < epsilon_of((Sampled(count, multiplier, rate),), "zero-out", 1e-5) < upper


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_secrecy_helps_and_more_of_it_helps_more(adjacency):
    costs = [epsilon_of((Sampled(50, 5.0, rate),), adjacency, 1e-5) for rate in (0.01, 0.1, 0.5, 0.9, 1.0)]
    assert costs == sorted(costs)
    assert costs[0] < 0.2 * costs[-1]


def test_replacing_costs_more_than_removing():
    for rate in (0.01, 0.3):
        replaced, removed = (epsilon_of((Sampled(50, 5.0, rate),), adjacency, 1e-5) for adjacency in ADJACENCIES)
        assert removed < replaced


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize(("rate", "epsilon"), [(0.02, 1.0), (0.3, 4.0)])
def test_calibration(release, adjacency, rate, epsilon):
    """The noise of one release, checked by numerical integration: the claim holds, with little to spare. Seen in
    the sum, clients of 10, 20 and 20 rows have noise sqrt(1/100 + 2/400) times one's, and a record moves it by C/10."""
    privacy = PrivacySettings(epsilon=epsilon, release=release, adjacency=adjacency, clip=3.0)
    event = Event("gradient", 1, privacy.sensitivity, sampling=rate)
    plan = PrivacyPlan.calibrate(privacy, [event], sizes=[10, 20, 20])
    seen = math.sqrt(1 / 100 + 2 / 400) / (1 / 10) if release == "secure-aggregation" else 1.0
    multiplier = plan.noise_std["gradient"] * seen / 3.0
    assert one_release(rate, multiplier, adjacency, epsilon) <= 1.001e-5
    assert one_release(rate, 0.99 * multiplier, adjacency, epsilon) > 1e-5
    assert one_release(1.0, multiplier, adjacency, plan.unsampled[release]) == pytest.approx(1e-5, rel=2e-3)
    assert plan.unsampled[release] > epsilon >= plan.actual_epsilon[release]
    assert plan.actual_epsilon["secure-aggregation"] <= plan.actual_epsilon["local"]


def test_events_together():
    """Proportions stay; a second release over all records counts as what it is."""
    privacy = PrivacySettings(epsilon=2.0)
    events = [
        Event("gradient", 40, 20.0, share=0.9, sampling=0.1),
        Event("covariance", 1, 3.0, share=0.1),
    ]
    plan = PrivacyPlan.calibrate(privacy, events, sizes=[10, 10])
    whole = PrivacyPlan.calibrate(privacy, [dataclasses.replace(e, sampling=1.0) for e in events], sizes=[10, 10])
    assert 0.995 * 2 <= plan.actual_epsilon["local"] <= 2.0
    ratios = [plan.noise_std[e.purpose] / whole.noise_std[e.purpose] for e in events]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-6)
    multiplier = plan.noise_std["covariance"] / 3.0
    assert plan.actual_epsilon["local"] > gaussian.epsilon_of(1 / multiplier, 1e-5)


def test_no_noise_costs_everything():
    event = Event("gradient", 3, 20.0, sampling=0.1)
    plan = PrivacyPlan.calibrate(PrivacySettings(epsilon=math.inf), [event], sizes=[4])
    assert plan.noise_std == {"gradient": 0.0}
    assert plan.actual_epsilon == plan.unsampled == {"local": math.inf, "secure-aggregation": math.inf}


def test_a_delta_that_the_account_cannot_hold_is_refused():
    with pytest.raises(UserError, match="delta of a method that samples = 1e-15"):
        plan_of(small.trial(small.problem(), "dp-fedadamw", delta=1e-15), [100] * 5)


def test_without_noise_a_sample_hides_nothing():
    assert epsilon_of((Sampled(1, 0.0, 0.5), Sampled(1, 5.0, 0.5)), "zero-out", 1e-5) == math.inf


@pytest.mark.parametrize(("rate", "multiplier", "grid"), [(1.0, 1e6, 2**-10), (0.5, 1.0, 2**-10), (0.01, 10.0, 2**-13)])
def test_the_grid_is_a_power_of_two_below_a_fifth_of_a_loss(rate, multiplier, grid):
    """And at most 1e-3; a release over all records is priced exactly on any grid. 0.2 * 0.01 / 10 = 2^-12.3."""
    assert grid_for((Sampled(5, multiplier, rate), Sampled(1, 1.0, 1.0))) == grid


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_many_small_losses_are_priced_closely(adjacency):
    """20,000 steps at q = 0.002: a release loses less than the coarsest grid tells apart, which used to make eps larger
    by half. A grid four times as fine moves it by less than 1%."""
    releases = (Sampled(20_000, 5.0, 0.002),)
    found = epsilon_of(releases, adjacency, 1e-5)
    relations = dp_accounting.privacy_accountant.NeighboringRelation
    relation = relations.REPLACE_ONE if adjacency == "replace-one" else relations.REPLACE_SPECIAL
    fine = pld.PLDAccountant(relation, value_discretization_interval=grid_for(releases) / 4)
    event = dp_accounting.PoissonSampledDpEvent(0.002, dp_accounting.GaussianDpEvent(5.0))
    exact = fine.compose(dp_accounting.SelfComposedDpEvent(event, 20_000)).get_epsilon(1e-5)
    assert exact <= found < 1.01 * exact

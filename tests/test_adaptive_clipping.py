"""A clip that follows the users' updates: twin, where it goes, account, audit, and what cannot be run."""

import math

import numpy as np
import pytest
import small
import twin
import twin_agreement
import twin_user

from trainables.audit.paired import audit
from trainables.errors import UserError
from trainables.federation.pack import check, pack_group, plan_of
from trainables.privacy.plan import RELEASES, PrivacySettings

USERS = {"level": "user", "clipping": "adaptive"}
HYPERS = {"local_steps": 3, "client_learning_rate": 0.05, "server_learning_rate": 0.5}


@pytest.mark.parametrize("privacy", [{}, {"epsilon": math.inf, "clip": 50.0}], ids=["noised", "far too wide a clip"])
def test_agrees_with_the_twin(privacy, small_problem, monkeypatch):
    plain_diagnose, C = twin_user.diagnose, {}

    def diagnose(clients, W, t):
        """The noise is that of the round's clip, and of the update alone."""
        found = plain_diagnose(clients, W, t)
        noise = np.mean([client.noise((W.size + 1,), t)[:-1] for client in clients], axis=0)
        found["noise_norm", t] = np.linalg.norm(noise) * C[t] / clients[0].clip
        return found

    def step(W, G, t, state, **hypers):
        moved = twin_user.followed_median(W, G, t, state, **hypers)
        C[t + 1] = state["C"]
        return moved

    monkeypatch.setattr(twin_user, "diagnose", diagnose)
    monkeypatch.setitem(twin_user.METHODS, "dp-fedavg", (twin_user.adapted_steps, step))
    trial = small.trial(small_problem, "dp-fedavg", HYPERS, rounds=25, every=10, **{**USERS, "clip": 0.3, **privacy})
    twin_agreement.assert_agrees(trial, small_problem, twin_user.train)


def test_the_clip_goes_to_the_median(small_problem):
    """Without noise, from far above and from far below, while the server stands all but still."""
    W = twin.initial_weights(13, 4, 42)
    x, y = small_problem.data.x_train, small_problem.data.y_train
    users = [
        twin.Client(0, x[rows], y[rows], {"gradient": 0.0}, 1e9, 42, "user") for rows in small_problem.partition.rows
    ]
    lengths = sorted(np.linalg.norm(twin_user.local_steps(user, W, 1, HYPERS, {})) for user in users)
    assert len(lengths) == 5
    for clip in (1e-3, 1e3):
        still, privacy = {**HYPERS, "server_learning_rate": 1e-9}, {**USERS, "clip": clip, "epsilon": math.inf}
        trial = small.trial(small_problem, "dp-fedavg", still, rounds=151, every=151, **privacy)
        _, server = small.weights_after(150, [trial], small_problem)
        # there the share of the unclipped jumps from 0.4 to 0.6, and the clip goes to and fro by 2%
        assert server._states[0]["clip"].item() == pytest.approx(lengths[2], rel=0.03)


def test_its_price_holds_the_count_s():
    """A release is as long as (C, C/3), so it needs that much more noise than the update alone; the claim holds."""
    of = small.problem()
    for release in RELEASES:
        plain, adaptive = (
            plan_of(
                small.trial(of, "dp-fedavg", level="user", release=release, clipping=how, rounds=70), of.partition.sizes
            )
            for how in ("plain", "adaptive")
        )
        ratio = adaptive.noise_std["gradient"] / plain.noise_std["gradient"]
        assert ratio == pytest.approx(math.sqrt(10 / 9), rel=1e-6)
        assert adaptive.actual_epsilon[release] == pytest.approx(8.0, rel=1e-5)
        assert adaptive.actual_epsilon[release] <= 8.0


def test_lanes_hosts_and_restarts_leave_the_same_bits(small_problem):
    trials = [
        small.trial(small_problem, "dp-fedavg", HYPERS, seed=seed, **{**USERS, "clip": clip})
        for seed in (1, 2)
        for clip in (0.1, 0.5, 5.0)
    ]
    small.assert_same_bits(trials, small_problem)
    plain = small.trial(small_problem, "dp-fedavg", HYPERS, level="user")
    assert pack_group(plain) != pack_group(trials[0])


@pytest.mark.parametrize("adjacency", ["replace-one", "zero-out"])
def test_the_audit_sees_no_more_than_is_claimed_and_half_the_noise(adjacency):
    claim = PrivacySettings(epsilon=5.0, adjacency=adjacency, **USERS)
    honest = audit("dp-fedavg", claim, {}, repetitions=800)
    assert 0.5 * honest.claimed_mu < honest.mu < honest.claimed_mu
    assert audit("dp-fedavg", claim, {}, repetitions=800, noise_factor=0.5).caught


@pytest.mark.parametrize(
    ("name", "privacy", "sentence"),
    [
        ("dp-fedavg", {"level": "record"}, "clipping = 'adaptive' needs level = 'user'"),
        ("dp-fedgd", {}, "clipping = 'adaptive' is not available for dp-fedgd, whose clip is fixed$"),
        ("dp-scaffold", {}, "clipping = 'adaptive' is not available for dp-scaffold, whose clip is fixed$"),
    ],
)
def test_where_it_cannot_be_had_one_sentence_says_so(name, privacy, sentence, small_problem):
    with pytest.raises(UserError, match=f"^{sentence}"):
        check(small.trial(small_problem, name, **{**USERS, **privacy}), small_problem)

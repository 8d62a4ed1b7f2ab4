"""A private mean is shrunk by what the noise adds to its length."""

import numpy as np
import pytest
import small

from trainables.federation.pack import CENTRE
from trainables.federation.trial_spec import Preprocess
from trainables.privacy.noisy_means import shrunk, std_of_mean


def centres(level, shrink, seeds=range(40)):
    """The centres of trials that differ in their seed, and their federation."""
    of = small.problem()
    trials = [small.trial(of, "dp-fedgd", {}, seed=seed) for seed in seeds]
    privacy = trials[0].privacy.model_copy(update={"level": level, "epsilon": 1.0})
    preprocess = Preprocess(center=0.1, bound=4.0, shrink=shrink)
    trials = [trial.model_copy(update={"privacy": privacy, "preprocess": preprocess}) for trial in trials]
    _, server = small.weights_after(1, trials, of)
    return server._work.centre, server


def test_the_length_of_the_noise_is_removed():
    """|z|^2 = 25 and (3 - 2) * 2^2 = 4: 21 / 25 = 0.84 is kept. At sigma = 6, nothing is."""
    z = np.array([[3, 4, 0], [3, 4, 0]], dtype=np.float32)
    np.testing.assert_allclose(shrunk(z, np.array([2.0, 6.0])), [[2.52, 3.36, 0], [0, 0, 0]], rtol=1e-6)


def test_means_of_one_or_two_features_stay_as_they_are():
    z = np.array([[3, 4]], dtype=np.float32)
    assert shrunk(z, np.array([100.0])).tolist() == z.tolist()


@pytest.mark.parametrize("level", ["record", "user"])
def test_the_noise_in_the_mean_is_known(level):
    """Over 40 seeds: the standard deviation of 480 entries has a standard error of 3%."""
    means, server = centres(level, shrink=False)
    (std,) = np.unique(server._work.noise_std[CENTRE])
    expected = std_of_mean(std, server.data.sizes, level == "user")
    assert means.std(axis=0, ddof=1).mean() == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("level", ["record", "user"])
def test_a_federation_shrinks_every_lane_by_its_own_noise(level):
    plain, server = centres(level, shrink=False, seeds=range(3))
    std = std_of_mean(server._work.noise_std[CENTRE].astype(np.float64), server.data.sizes, level == "user")
    kept, _ = centres(level, shrink=True, seeds=range(3))
    np.testing.assert_allclose(kept, shrunk(plain, std), rtol=1e-6, atol=1e-9)
    assert (np.linalg.norm(kept, axis=1) < np.linalg.norm(plain, axis=1)).all()


def test_the_mean_of_a_single_feature_stays_as_it_is():
    assert shrunk(np.array([[3.0]], dtype=np.float32), np.array([1.0])).tolist() == [[3.0]]

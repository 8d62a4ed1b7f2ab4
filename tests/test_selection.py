"""The price of a search: published numbers, two accounts against each other, and the way back."""

import math

import numpy as np
import pytest

from trainables.errors import UserError
from trainables.privacy import private_selection
from trainables.privacy.gaussian import epsilon_of, log_delta, mu_of
from trainables.privacy.private_selection import (
    all_released,
    base_for,
    best_released,
    best_released_by_renyi,
    private_search,
)

DELTA, MEAN = 1e-5, 195


@pytest.mark.parametrize(
    ("base", "profile", "renyi", "composed"),
    [(0.5, 1.47, 1.62, 9.9), (1, 2.79, 3.06, 22.3), (5, 11.6, 12.6, 188), (10, 20.2, 21.8, 508)],
)
def test_known_prices(base, profile, renyi, composed):
    mu = mu_of(base, DELTA)
    assert best_released(mu, MEAN, DELTA) == pytest.approx(profile, rel=5e-3)
    assert best_released_by_renyi(mu, MEAN, DELTA) == pytest.approx(renyi, rel=5e-3)
    assert all_released(mu, MEAN, DELTA) == pytest.approx(composed, rel=5e-3)


def test_an_honest_one_trains_at_a_third():
    base = base_for(1.0, MEAN, DELTA)
    assert base == pytest.approx(0.33, abs=0.005)
    assert best_released(mu_of(base, DELTA), MEAN, DELTA) <= 1.0


@pytest.mark.parametrize(("epsilon", "mean"), [(0.1, 2), (1.0, MEAN), (8.0, 1000)])
def test_the_way_back_gives_nothing_away(epsilon, mean):
    """Runs at the base keep the claim, and hardly less private ones would not."""
    base = base_for(epsilon, mean, DELTA)
    assert best_released(mu_of(base, DELTA), mean, DELTA) <= epsilon
    assert best_released(mu_of(base * (1 + 1e-6), DELTA), mean, DELTA) > epsilon


@pytest.mark.parametrize("epsilon", [0.01, 1.0])
def test_what_rounding_adds_is_taken_back(epsilon, monkeypatch):
    """Were a mu a little more than the base provides, the base gives way, a little."""
    plain = base_for(epsilon, MEAN, DELTA)
    monkeypatch.setattr(private_selection, "mu_of", lambda *given: mu_of(*given) * (1 + 3e-12))
    base = base_for(epsilon, MEAN, DELTA)
    assert best_released(private_selection.mu_of(base, DELTA), MEAN, DELTA) <= epsilon
    assert plain * (1 - 1e-9) < base < plain


def test_one_run_is_no_search():
    """K = 1: eps' = e + 2 min_h h = e."""
    for epsilon in (0.01, 1.0):
        mu = mu_of(epsilon, DELTA)
        assert best_released(mu, 1, DELTA) == epsilon_of(mu, DELTA)


@pytest.mark.parametrize(("epsilon", "mean"), [(2.0, 50), (0.1, 50), (2.0, 2), (1.0, 1.5)])
def test_the_minimum_is_found(epsilon, mean):
    mu = mu_of(epsilon, DELTA)
    grid = [np.logaddexp(h, math.log(mean - 1) + log_delta(h, mu)) for h in np.linspace(0, 5 * epsilon, 2501)]
    assert best_released(mu, mean, DELTA) == pytest.approx(epsilon_of(mu, DELTA / mean) + 2 * min(grid), rel=1e-5)


def test_more_runs_cost_more():
    prices = [best_released(mu_of(1.0, DELTA), mean, DELTA) for mean in (2, 10, 100, 1000)]
    assert prices == sorted(prices)


def test_an_eps_too_small_for_any_run():
    """All runs of a search together exceed so small an eps, for any eps above 0 of a run."""
    assert base_for(1e-6, MEAN, DELTA) == 0.0


def test_next_to_no_information_costs_next_to_nothing():
    """delta(0; mu) = 2 Phi(mu / 2) - 1, so here 4e-11: the runs together cost 2 log(1 + 194 * 4e-11)."""
    assert best_released(1e-10, MEAN, DELTA) == pytest.approx(2 * 194 * 1e-10 / math.sqrt(2 * math.pi), rel=1e-3)


@pytest.mark.parametrize("mean", [0.5, 1e9 + 1, math.nan])
def test_nonsense(mean):
    with pytest.raises(UserError, match="mean"):
        best_released(1.0, mean, DELTA)
    with pytest.raises(UserError, match="mean"):
        private_search(1.0, mean, DELTA, "logarithmic")


def test_very_many_runs():
    assert best_released(0.01, 1e9, DELTA) < all_released(0.01, 1e9, DELTA)
    assert private_search(0.01, 1e9, DELTA, "logarithmic") < all_released(0.01, 1e9, DELTA)

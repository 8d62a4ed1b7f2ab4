"""The account against what really leaves a client.

`releases()` declares what is released and `round()` releases it: here the first is checked by the second. The real
engine runs and is overheard (see `observed`). From what was seen alone, events are rebuilt: what each release says of a
record, hidden by which noise. dp-accounting prices them. Nothing of `trainables.privacy` takes part on this side.

What one record moves, with C the bound that was used and m = 2 if one is replaced, 1 if one is there or not:

* a sum of clipped gradients, or of clipped features, by m C;
* a sum of squares x x^T clipped to C, or of Hessians, positive semi-definite as well, by C, and by sqrt(2) C if one is
  replaced;
* a user's clipped move by m C; with a third of C behind it, if it was clipped, by m C sqrt(10/9); a user's mean of
  squares as one square, and of features as one row;
* DP-FedNew's |D_i| y_i by m (C1 / gamma + H C2 / (gamma^2 - gamma H / |D_i|)), lemma 3 of its paper.

One who sees every client's release sees at most every noisy sum that went into it. One who sees only the sum of all
releases sees less, where the releases are the clients' noisy sums times factors that hang on nothing secret. Both are
measured: the run is repeated with other noise and other sums. Then the whole is one Gaussian mechanism: with B the
factors of the sums, A those of the noises and D their variances, moves x of the sums cost x^T B^T (A D A^T)^-1 B x.
"""

import functools
import itertools
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import observed
import pytest
import small
from dp_accounting import dp_event, privacy_accountant
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from observed import Draw, Query, Record
from some_methods import marks_of

from orchestrator.execution.scheduler import Scheduler
from trainables.federation import pack
from trainables.federation.lane_result import LaneResult
from trainables.federation.trial_spec import Preprocess, TrialSpec
from trainables.methods import METHODS
from trainables.privacy import sampled
from trainables.privacy.noise import Address
from trainables.privacy.participation import takes_part
from trainables.privacy.plan import ADJACENCIES, RELEASES, PrivacySettings

ROUNDS, CLIENTS = 3, 3
DELTA = 1e-5
GRID = (
    5e-3  # of dp-accounting's privacy losses, on both sides: five times as coarse as in earnest, for the time it takes
)
CLOSE = 3e-5  # of what is linear: releases are float32, good to 1e-7 of the largest

MOVES = {"replace-one": 2.0, "zero-out": 1.0}
SQUARES_MOVE = {"replace-one": math.sqrt(2), "zero-out": 1.0}
RELATION = {
    "replace-one": privacy_accountant.NeighboringRelation.REPLACE_ONE,
    "zero-out": privacy_accountant.NeighboringRelation.REPLACE_SPECIAL,
}

# ---- which options there are

STRUCTURE = {
    "local_steps": (1, 2),
    "sampling_rate": (1.0, 0.3),
    "participation": (1.0, 0.6),
    "duals": (False, True),
    "as_released": (False, True),
    "restart_every": (0, 2),
    "noise": ("tree", "independent"),
    "fedavg_rounds": (1, 2),
    "every": (2, 1),
    "bands": (0, 1),
}
"""Options that change how often something is released or what it follows: all combinations are run."""
AMOUNTS = {
    "covariance_share": 0.6,
    "fedavg_share": 0.2,
    "hessian_share": 0.8,
    "feature_clip": 0.7,
    "hessian_clip": 0.3,
    "sum_clip": 0.9,
    "alpha": 0.7,
    "rho": 0.4,
}
"""Options that change how much noise there is: their defaults, and these."""
WITHOUT_ACCOUNT = {
    *("learning_rate", "server_learning_rate", "client_learning_rate", "weight_decay", "smoothing", "mu0"),
    *("beta", "beta1", "beta2", "tau", "gamma", "smallest_eigenvalue", "noise_floor"),
    *("direction", "bias_correction", "warmup_rounds", "blend_rounds", "variant"),
}
"""Options that no release's price can hang on: they come after it, or say what is done with it."""


def cases() -> list:
    """Every method, level and combination of options."""
    found = []
    for method in METHODS.values():
        names, marks = [h.name for h in method.hyperparameters], marks_of(method.name)
        structure = [name for name in STRUCTURE if name in names]
        for level in method.levels:
            for values in itertools.product(*(STRUCTURE[name] for name in structure)):
                chosen = dict(zip(structure, values, strict=True))
                words = [method.name, level, *(f"{name}={value}" for name, value in chosen.items())]
                found.append(pytest.param(method.name, level, chosen, id="-".join(words), marks=marks))
            other = {name: AMOUNTS[name] for name in names if name in AMOUNTS}
            if other:
                lasting = {name: STRUCTURE[name][0] for name in structure}
                name = f"{method.name}-{level}-other"
                found.append(pytest.param(method.name, level, lasting | other, id=name, marks=marks))
    return found


def centred_cases() -> list:
    """Every method and level: the options as they are first (and weighted by size), each of them otherwise, and all."""
    found = []
    for method in METHODS.values():
        structure = {h.name: STRUCTURE[h.name] for h in method.hyperparameters if h.name in STRUCTURE}
        marks = marks_of(method.name)
        first, last = ({name: values[at] for name, values in structure.items()} for at in (0, -1))
        for level in method.levels:
            some = {name: (first | {name: last[name]}, "uniform") for name in structure}
            some |= {"first": (first, "uniform"), "by size": (first, "size")}
            some |= {"last": (last, "uniform")} if len(structure) > 1 else {}
            for n, of in some.items():
                found.append(pytest.param(method.name, level, *of, id=f"{method.name}-{level}-{n}", marks=marks))
    return found


@pytest.mark.parametrize("method", METHODS)
def test_every_option_is_known_here(method):
    """A new option must be put into one of the three lists above: otherwise its privacy cost is unchecked."""
    names = {h.name for h in METHODS[method].hyperparameters}
    unknown = names - set(STRUCTURE) - set(AMOUNTS) - WITHOUT_ACCOUNT
    assert not unknown, f"{method}: does the account hang on {', '.join(sorted(unknown))}?"


# ---- from what was seen to events


@dataclass(frozen=True)
class Event:
    """A release that is `multiplier` times as wide as what one record moves it by (m = 1), of a sample or of all."""

    multiplier: float
    rate: float


@dataclass(frozen=True)
class Group:
    """Looks at the rows and the noises that were added before anything else was looked at."""

    queries: tuple[Query, ...]
    draws: tuple[Draw, ...]

    @property
    def key(self) -> Query:
        return self.queries[0]


def groups_of(record: Record, client: int, t: int) -> list[Group]:
    found: list[tuple[list[Query], list[Draw]]] = []
    for one in record.of(client, t):
        if isinstance(one, Query):
            if not found or found[-1][1]:
                found.append(([], []))
            found[-1][0].append(one)
        else:
            assert found, f"client {client} drew noise in round {t} before it looked at anything"
            found[-1][1].append(one)
    assert all(draws for _, draws in found), f"client {client} looked at its rows in round {t} and hid nothing"
    return [Group(tuple(queries), tuple(draws)) for queries, draws in found]


def moves_of(group: Group, trial: TrialSpec, size: int) -> float:
    """How far one record, or one user, moves what the group's noise is added to."""
    kinds = {query.kind for query in group.queries}
    privacy, hypers = trial.privacy, trial.hyperparameters
    moves, squares_move = MOVES[privacy.adjacency], SQUARES_MOVE[privacy.adjacency]
    if kinds == {"squares"}:
        (query,) = group.queries
        return query.bound**2 * squares_move * (size if privacy.level == "user" else 1)
    if kinds == {"features"}:
        (query,) = group.queries
        return query.bound * moves * (size if privacy.level == "user" else 1)
    if privacy.level == "user":
        assert "mean gradient" in kinds, kinds
        return longest(privacy) * moves
    if kinds == {"mean gradient"} and trial.method == "dp-fedadamw" and hypers["as_released"]:
        # a mean over a sample, clipped layer by layer: a record that is added can reverse it, in two layers at most
        return group.key.rate * size * 2 * privacy.clip * moves * math.sqrt(2)
    if kinds == {"gradients"}:
        return sum(query.bound for query in group.queries) * moves
    if kinds == {"curvature"}:
        (query,) = group.queries
        return query.bound * squares_move
    if kinds == {"gradients", "curvature"} and trial.method in ("dp-fednew", "dp-fednew-fc"):
        bound = {query.kind: query.bound for query in group.queries}
        gamma, total, curvature = hypers["alpha"] + hypers["rho"], hypers["sum_clip"], bound["curvature"]
        first = bound["gradients"]
        if hypers["as_released"]:  # lemma 4 may turn what one record moves into a longer move
            room = total**2 - (first * (1 + 1 / size)) ** 2
            first *= min(total / math.sqrt(room) if room > 0 else math.inf, math.sqrt(2 * size + 3))
        return moves * (first / gamma + curvature * total / (gamma**2 - gamma * curvature / size))
    raise AssertionError(f"{trial.method}: what does a record move in {sorted(kinds)}?")


def longest(privacy: PrivacySettings) -> float:
    """What a user can release, without noise."""
    return privacy.clip * (math.sqrt(10 / 9) if privacy.clipping == "adaptive" else 1.0)


Factors = tuple[dict, dict]
"""How much of every noise (by address) and of every noisy thing (by its first query) a release holds."""


@dataclass(frozen=True)
class Structure:
    """How releases follow noises and sums over rows, as measured. None: a release is no sum of noisy sums."""

    local: dict[tuple[int, int], Factors | None]
    """Of a client's release in a round."""
    summed: dict[int, Factors | None]
    """Of the sum of all clients' releases in a round."""


def structure_of(record: Record, level: str) -> Structure:
    groups = {(c, t): groups_of(record, c, t) for c, t in record.released}
    everything = [group for found in groups.values() for group in found]
    # sums over rows are moved by themselves; what is bounded only as a whole moves as the one noise that hides it does
    movable = [
        group
        for group in everything
        for kinds in [[query.kind for query in group.queries]]
        if kinds[0] in ("squares", "features")
        or (level == "record" and len(kinds) == 1 and kinds[0] != "mean gradient")
    ]
    whole = [group for group in everything if group not in movable]
    assert all(len(group.draws) == 1 for group in whole)
    repeated = observed.again(record)
    assert all((repeated[place] == value).all() for place, value in record.released.items()), "it can be told again"
    std = {address: draw.std for address, draw in record.draws().items()}
    std |= {group.key: group.draws[0].std for group in movable}
    sizes = {
        True: {address: draw.size for address, draw in record.draws().items()},
        False: {group.key: group.draws[0].size for group in movable},
    }

    def moved(of_noise, seed):
        """Noises, or sums, by one standard deviation, and how every release answers."""
        rng = np.random.default_rng(seed)
        by = {key: rng.standard_normal(size) for key, size in sizes[of_noise].items()}
        if of_noise:
            heard = observed.again(record, noise=by)
        else:
            heard = observed.again(record, sums={key: std[key] * value for key, value in by.items()})
        return by, {place: heard[place] - repeated[place] for place in repeated}

    rng = np.random.default_rng(3)
    measured = {of_noise: [moved(of_noise, seed) for seed in (1, 2)] for of_noise in (True, False)}

    def factors(answer, of_noise):
        """Found in one telling; none, if they do not foretell the other."""
        (by, found), (other, expected) = measured[of_noise]
        here, there = answer(found), answer(expected)
        keys = [key for key, value in by.items() if value.size == here.size]
        if not keys:
            return None if np.abs(here).max() > 0 else {}
        fitted, *_ = np.linalg.lstsq(np.stack([by[key] for key in keys], axis=1), here, rcond=None)
        foretold = np.stack([other[key] for key in keys], axis=1) @ fitted
        if np.abs(foretold - there).max() > CLOSE * np.abs(there).max():
            return None
        least = CLOSE * np.abs(fitted).max()
        return {key: factor / std[key] for key, factor in zip(keys, fitted, strict=True) if abs(factor) > least}

    @functools.cache
    def shows(key):
        """Whether a look at the rows is felt in any release: one who waits for a turn may look and say nothing."""
        if key not in sizes[False]:
            return True
        heard = observed.again(record, sums={key: std[key] * measured[False][0][0][key]})
        return any((heard[place] != repeated[place]).any() for place in repeated)

    def linear(answer, mine):
        if len({group.key.client for group in mine}) < len(mine):
            return None  # a second look of a round is where the first one's noise led, and that only its client knows
        noises, sums = factors(answer, True), factors(answer, False)
        if noises is None or sums is None:
            return None
        outcomes = {g.key: noises[g.draws[0].address] * g.draws[0].sign for g in whole if g.draws[0].address in noises}
        sums |= outcomes
        return (noises, sums) if all(group.key in sums or not shows(group.key) for group in mine) else None

    local = {place: linear(lambda found, place=place: found[place], mine) for place, mine in groups.items() if mine}
    summed = {}
    for t in record.rounds:
        present = [c for c in range(record.clients) if groups[c, t]]
        # a sum over clients that are chosen in public gets no credit: a rule of the project, on the safe side
        everyone = len(present) == record.clients
        mine = [group for c in present for group in groups[c, t]]
        summed[t] = linear(lambda found, t=t: sum(found[c, t] for c in range(CLIENTS)), mine) if everyone else None

    # a release that is not a sum may depend on earlier noise and reveal it, and with it what that noise hid
    follows = {}
    for t in record.rounds:
        asked = {d.address: d for d in record.seen if isinstance(d, Draw) and d.t == t}
        heard = observed.again(record, noise={a: rng.standard_normal(d.size) for a, d in asked.items()})
        follows[t] = {s for c, s in heard if (heard[c, s] != repeated[c, s]).any()}
    for _ in record.rounds:
        told_by = {t for t in record.rounds if any(summed[s] is None for s in follows[t])}
        follow = {s for t in record.rounds if summed[t] is None for s in follows[t]}
        summed |= dict.fromkeys(told_by | follow)

    if None in local.values():  # then noise must enter as what it hides does, and hide nothing else
        addresses = [draw.address for group in everything for draw in group.draws]
        assert len(set(addresses)) == len(everything), "every noise hides one thing"
        pairs = {group.key: group.draws[0] for group in movable if group.key.t != observed.CENTRE}
        by, answers = measured[False][0]
        same = observed.again(record, noise={draw.address: draw.sign * by[key] for key, draw in pairs.items()})
        for place, answer in answers.items():
            if place[1] == observed.CENTRE:
                assert local[place] is not None, "a mean is a sum of noisy sums"
                continue
            assert np.abs(same[place] - repeated[place] - answer).max() <= 0.02 * np.abs(answer).max(), f"at {place}"
    return Structure(local, summed)


def rate_of(query: Query, view: str) -> float:
    """A user's coin is a secret that only a sum keeps: no credit to single releases, a rule of the project."""
    return 1.0 if query.coin and view == "local" else query.rate


def events_of(record: Record, structure: Structure, trial: TrialSpec, client: int, size: int, view: str) -> list[Event]:
    """What one who has this view learns of a record of this client."""
    m = MOVES[trial.privacy.adjacency]
    groups = {t: groups_of(record, client, t) for t in record.rounds}
    moves = {group.key: moves_of(group, trial, size) for mine in groups.values() for group in mine}
    if math.inf in moves.values():
        return [Event(0.0, 1.0)]
    seen = {t: structure.local.get((client, t)) if view == "local" else structure.summed[t] for t in record.rounds}
    together = {t: factors for t, factors in seen.items() if factors is not None}
    found = []
    for t in record.rounds:
        for group in groups[t] if t not in together else []:
            (draw,), (rate,) = group.draws, {rate_of(query, view) for query in group.queries}
            found.append(Event(m * draw.std / moves[group.key], rate))
    mine = [group for t in together for group in groups[t]]
    if not mine:
        return found
    std = {address: draw.std for address, draw in record.draws().items()}
    here = {
        draw.address
        for t in together
        for c in range(record.clients)
        for g in groups_of(record, c, t)
        for draw in g.draws
    }
    assert all(set(noises) <= here for noises, _ in together.values()), (
        "a release follows the noise of one that is no sum"
    )
    A = np.array(
        [[noises.get(address, 0.0) * std[address] for address in sorted(here)] for noises, _ in together.values()]
    )
    B = np.array([[sums.get(group.key, 0.0) * moves[group.key] for group in mine] for _, sums in together.values()])
    cost = B.T @ np.linalg.solve(A @ A.T, B)
    single = np.diag(cost)
    if np.abs(cost - np.diag(single)).max() <= 1e-3 * single.max():
        seen = [(c, group) for c, group in zip(single, mine, strict=True) if c > 0]
        return found + [Event(m / math.sqrt(c), rate_of(group.key, view)) for c, group in seen]
    assert all(group.key.rate == 1 for group in mine), "samples are priced one by one"
    signs = np.array(list(itertools.product((-1, 1), repeat=len(mine))))
    return [*found, Event(m / math.sqrt(max((signs @ cost * signs).sum(1))), 1.0)]


def price(events: list[Event], adjacency: str) -> float:
    """By dp-accounting. Releases over all records add up as Gaussians do."""
    if any(event.multiplier == 0 for event in events):
        return math.inf
    alike: dict[Event, int] = {}
    whole = sum(event.multiplier**-2 for event in events if event.rate == 1)
    if whole:
        alike[Event(float(f"{whole**-0.5:.5g}"), 1.0)] = 1
    for event in events:
        if event.rate < 1:
            rounded = Event(float(f"{event.multiplier:.5g}"), event.rate)
            alike[rounded] = alike.get(rounded, 0) + 1
    return composed(tuple(sorted(alike.items(), key=repr)), adjacency)


@functools.lru_cache
def composed(alike: tuple[tuple[Event, int], ...], adjacency: str) -> float:
    accountant = PLDAccountant(RELATION[adjacency], value_discretization_interval=GRID)
    for event, count in alike:
        release = dp_event.GaussianDpEvent(event.multiplier)
        accountant.compose(dp_event.PoissonSampledDpEvent(event.rate, release) if event.rate < 1 else release, count)
    return float(accountant.get_epsilon(DELTA))


# ---- the contract


@pytest.fixture(scope="module", autouse=True)
def the_same_grid():
    """Samples are priced on a grid; what was priced on this one is forgotten afterwards."""
    remembered = (sampled.epsilon_of, sampled._scaled_to, pack._plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampled, "GRID", GRID)
        for cache in remembered:
            cache.cache_clear()
        yield
    for cache in remembered:
        cache.cache_clear()


def problem_for(method: str):
    """Three clients of 15, 17 and 28 rows, and the first model that the method accepts."""
    for model in ("softmax", "multinomial", "poisson"):
        of = small.problem(data="synthetic-frozen:60,20,12,4", clients=CLIENTS, model=model)
        if METHODS[method].accepts(of.model):
            return of
    raise AssertionError(f"{method} accepts none of the models")


def bounds_hold(record: Record, structure: Structure, trial: TrialSpec, sizes) -> bool:
    """At user level nothing but noise, and its weight in the mean, makes a release longer than the clip. Where the clip
    of a round is another, so is its noise: what it was multiplied by was measured."""
    weights = [size / np.mean(sizes) if trial.aggregate == "size" else 1 for size in sizes]
    silence = {a: -Address(*a).normal(draw.size) for a, draw in record.draws().items()}
    silent = observed.again(record, noise=silence)
    weights = [weight / trial.privacy.secret_participation for weight in weights]
    lengths = {(c, t): np.linalg.norm(value) / weights[c] for (c, t), value in silent.items() if t > 0}
    if trial.privacy.clipping == "adaptive":
        scale = {place: sum(structure.local[place][0].values()) / weights[place[0]] for place in lengths}
        assert len({round(one, 5) for one in scale.values()}) > 1, "the clip moves"
        lengths = {place: length / scale[place] for place, length in lengths.items()}
    assert max(lengths.values()) <= longest(trial.privacy) * (1 + 1e-5)
    return max(lengths.values()) > longest(trial.privacy) * (1 - 1e-5)


@pytest.mark.parametrize(("method", "level", "options"), cases())
def test_what_is_printed_is_the_price_of_what_left(method, level, options):
    assert_priced(method, level, options)


@pytest.mark.parametrize(("method", "level"), [(m.name, level) for m in METHODS.values() for level in m.levels])
def test_weights_by_size_are_priced_too(method, level):
    """In a sum a record of a large client weighs as much as one of a small one, and a large user more."""
    names = {h.name for h in METHODS[method].hyperparameters}
    options = {name: values[0] for name, values in STRUCTURE.items() if name in names}
    assert_priced(method, level, options, aggregate="size")


@pytest.mark.parametrize(("method", "level", "options", "aggregate"), centred_cases())
def test_the_mean_of_the_features_is_priced_too(method, level, options, aggregate):
    """It is released before the first round, and what comes then has only the rest of the budget."""
    record = assert_priced(method, level, options, preprocess=Preprocess(center=0.3, bound=0.8), aggregate=aggregate)
    looks = sorted((query.client, query.t) for query in record.queries() if query.kind == "features")
    assert looks == [(client, observed.CENTRE) for client in range(CLIENTS)]


def test_what_a_trial_has_beside_hyperparameters_is_known_here():
    """A new field must be asked whether the account hangs on it."""
    asked = {"problem", "method", "hyperparameters", "privacy", "rounds", "aggregate", "preprocess", "seed"}
    asked |= {"noise_key"}  # tests/test_published.py
    of_no_release = {
        "evaluate_every",
        "stop_after",
        "code",
        "metrics",
        "precision",
    }  # the last: tests/test_precision.py
    assert set(TrialSpec.model_fields) <= asked | of_no_release, set(TrialSpec.model_fields) - asked - of_no_release


@pytest.mark.parametrize("method", ["dp-fedgd", "dp-ftrl", "dp-fedavg", "dp-fedsam", "dp-fednew", "dp-fednewton"])
def test_automatic_clipping_is_priced_too(method):
    """Sums of gradients that are all about as long as the bound, and never longer."""
    names = {h.name for h in METHODS[method].hyperparameters}
    options = {name: values[0] for name, values in STRUCTURE.items() if name in names}
    assert_priced(method, "record", options, claim={"clipping": "automatic"})


@pytest.mark.parametrize("claim", [{}, {"secret_participation": 0.6}], ids=["all clients", "secret participation"])
@pytest.mark.parametrize("aggregate", ["uniform", "size"])
def test_adaptive_clipping_is_priced_too(claim, aggregate):
    """Whether a user was clipped leaves it with its update, behind the same noise."""
    releases = ("secure-aggregation",) if claim else RELEASES
    claim = {"clipping": "adaptive", **claim}
    record = assert_priced("dp-fedavg", "user", {"local_steps": 2}, releases, claim, aggregate=aggregate)
    assert {value.size for value in record.released.values()} == {13 * 4 + 1}


def test_what_a_claim_is_made_of_is_known_here():
    """A new setting must be asked whether the account hangs on it."""
    asked = {"epsilon", "delta", "clip", "release", "adjacency", "level", "clipping", "secret_participation"}
    assert set(PrivacySettings.model_fields) == asked


@pytest.mark.parametrize("aggregate", ["uniform", "size"])
def test_secret_participation_is_priced_too(aggregate):
    """Every user releases something in every round, with one secret coin, which only the sum hides."""
    claim = {"secret_participation": 0.6}
    record = assert_priced("dp-fedavg", "user", {"local_steps": 2}, ("secure-aggregation",), claim, aggregate=aggregate)
    assert len(record.coins) == len(set(record.coins)) == ROUNDS * CLIENTS
    thrown = {(client, t) for _, client, t, _ in record.coins}
    assert thrown == set(itertools.product(range(CLIENTS), range(1, ROUNDS + 1)))


def test_a_coin_decides_what_is_in_a_release():
    """Without noise, a user's release is nothing where its coin fell so, and else its update over the probability."""
    of = problem_for("dp-fedavg")
    trial = small.trial(of, "dp-fedavg", rounds=ROUNDS, every=ROUNDS, clip=0.6, level="user", **SECRET)
    record = observed.run(trial, of)
    silence = {a: -Address(*a).normal(draw.size) for a, draw in record.draws().items()}
    silent = observed.again(record, noise=silence)
    for (client, t), value in silent.items():
        there = takes_part(trial.seed, client, t, 0.6)
        assert np.linalg.norm(value) == pytest.approx(0.6 / 0.6 if there else 0.0, abs=1e-5), (client, t)
    assert {takes_part(trial.seed, client, t, 0.6) for client, t in silent} == {True, False}


SECRET = {"release": "secure-aggregation", "secret_participation": 0.6}


def assert_priced(method, level, options, releases=RELEASES, claim=None, **options_of_trial) -> Record:
    """`claim`: further privacy settings; `options_of_trial`: its settings other than hyperparameters and privacy."""
    of = problem_for(method)
    if level == "user" and options.get("as_released") and method == "dp-fedfc":
        pytest.skip("there is no such mode")
    structure = None
    for release, adjacency in itertools.product(releases, ADJACENCIES):
        trial = small.trial(
            of,
            method,
            options,
            rounds=ROUNDS,
            every=ROUNDS,
            epsilon=1.0,
            clip=0.6,
            delta=DELTA,
            release=release,
            adjacency=adjacency,
            level=level,
            **(claim or {}),
        ).model_copy(update=options_of_trial)
        record = observed.run(trial, of)
        if structure is None:
            structure = structure_of(record, level)
            if level == "user":
                assert bounds_hold(record, structure, trial, of.partition.sizes), "the clip is seen at work"
        row = row_of(trial, of)
        for view, printed in (("local", row.epsilon_local), ("secure-aggregation", row.epsilon_secure)):
            events = [
                events_of(record, structure, trial, client, size, view)
                for client, size in enumerate(of.partition.sizes)
            ]
            worth = max(price(some, adjacency) for some in events)
            if method == "dp-fedadamw" and options["as_released"]:  # of the busiest client and the largest, from above
                assert printed >= worth * (1 - 4e-3)
                continue
            assert printed == pytest.approx(worth, rel=4e-3), (release, adjacency, view)
            if view == release:
                known = max(price([replace(e, rate=1.0) for e in some], adjacency) for some in events)
                assert row.epsilon_unsampled == pytest.approx(known, rel=4e-3), (release, adjacency)
                if not options.get("as_released"):
                    assert printed <= trial.privacy.epsilon == row.epsilon_claimed
    return record


def row_of(trial: TrialSpec, of):
    """What the ledger is given, and the tables print."""
    prepared = SimpleNamespace(problems={trial.problem.key: of})
    return Scheduler._row(SimpleNamespace(sweep=SimpleNamespace(prepared=prepared)), trial, LaneResult(trial.key))

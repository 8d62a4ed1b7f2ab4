"""Search spaces: the paper's grids as printed, zooming in on a winner, and a study's overrides."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import search_spaces
from search_spaces import build, is_numeric, load, on_edge, refine, unique, zoom
from trainables import methods
from trainables.errors import UserError
from trainables.methods import METHODS
from trainables.methods.base import Hyperparameter

# axis lengths of table 2 (METHODS.md), coarse and fine
PAPER = {
    "dp-fedgd": ((7,), (5,)),  # eta
    "dp-fedavg": ((5, 5), (5, 5)),  # eta_s, K
    "dp-fedfc": ((6, 5), (6, 5)),  # eta, gamma
    "dp-scaffold": ((5, 4, 3), (5, 4, 5)),  # eta_s, eta_c, K
    "dp-fedadam": ((5, 3, 3, 4), (4, 3, 3, 4)),  # eta, b1, b2, e
    "dp-fedyogi": ((5, 3, 3, 4), (5, 3, 3, 4)),
    "dp-ftrl": ((6,), (6,)),  # eta
    "dp-adafedprox": ((5, 5, 5, 4), (5, 4, 4, 3)),  # eta_s, eta_c, mu_0, K
    "dp-fedsofim": ((5, 5, 3), (6, 5, 4)),  # eta, rho, beta
}
SIZES = {
    "dp-fedgd": (7, 5),
    "dp-fedavg": (25, 25),
    "dp-fedfc": (30, 30),
    "dp-scaffold": (60, 100),
    "dp-fedadam": (180, 144),
    "dp-fedyogi": (180, 180),
    "dp-ftrl": (6, 6),
    "dp-adafedprox": (500, 240),
    "dp-fedsofim": (75, 120),
}


def hyper(method: str, name: str) -> Hyperparameter:
    return next(h for h in methods.get(method).hyperparameters if h.name == name)


# ---- the packaged spaces


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_packaged_space(method):
    space = load(method)
    assert space.method == method
    assert set(space.coarse) == set(space.fine) == set(space.scale)
    for configuration in (*space.grid(space.coarse), *space.grid(space.fine)):
        checked = methods.get(method).check(configuration)
        assert {name: checked[name] for name in configuration} == configuration, "values have the right types"


@pytest.mark.parametrize("method", PAPER)
def test_grids_have_the_sizes_of_the_paper(method):
    space = load(method)
    coarse, fine = PAPER[method]
    assert tuple(map(len, space.coarse.values())) == coarse
    assert tuple(map(len, space.fine.values())) == fine
    sizes = len(space.grid(space.coarse)), len(space.grid(space.fine))
    assert sizes == (math.prod(coarse), math.prod(fine)) == SIZES[method]


def test_grids_of_dp_fedsofim_as_printed():
    space = load("dp-fedsofim")
    assert space.coarse == {
        "learning_rate": (1e-3, 0.01, 0.1, 1.0, 5.0),
        "rho": (0.01, 0.1, 1.0, 5.0, 10.0),
        "beta": (0.8, 0.9, 0.99),
    }
    assert refine(space, "table", {}) == [
        {"learning_rate": rate, "rho": rho, "beta": beta}
        for rate, rho, beta in itertools.product(
            (0.1, 0.2, 0.5, 1.0, 3.0, 4.0), (0.5, 1.0, 5.0, 10.0, 20.0), (0.8, 0.85, 0.9, 0.95)
        )
    ]


def test_the_last_axis_of_a_grid_varies_fastest_and_each_configuration_occurs_once():
    space = build("dp-fedsofim", {"rho": [1, 1.0, 2], "beta": [0.9, 0.5]}, {"rho": [1], "beta": [0.9]}, {}, {})
    assert space.grid(space.coarse) == [
        {"rho": 1.0, "beta": 0.9},
        {"rho": 1.0, "beta": 0.5},
        {"rho": 2.0, "beta": 0.9},
        {"rho": 2.0, "beta": 0.5},
    ]
    twice = [{"rho": 1.0, "beta": 0.9}, {"beta": 0.9, "rho": 1.0}, {"rho": 1.0, "beta": 0.5}]
    assert unique(twice) == [twice[0], twice[2]]


# ---- zoom


def test_zoom_halves_the_step_on_a_logarithmic_scale():
    """Half a step of a decade is a factor of sqrt(10) = 3.162."""
    axis = (1e-3, 0.01, 0.1, 1.0)
    found = zoom(hyper("dp-fedgd", "learning_rate"), axis, "log", 0.1)
    assert found == (0.01, 0.03162, 0.1, 0.3162, 1.0)


def test_zoom_halves_the_step_on_a_linear_scale():
    found = zoom(hyper("dp-fedsofim", "weight_decay"), (0.0, 0.2, 0.6), "linear", 0.2)
    assert found == (0.0, 0.1, 0.2, 0.4, 0.6), "each side by its own gap"


def test_zoom_halves_the_step_on_the_complement_scale():
    """1 - x goes 0.1, 0.01, 0.001: half a step is a factor of sqrt(10) in 1 - x, 0.03162 and 0.003162."""
    found = zoom(hyper("dp-fedsofim", "beta"), (0.9, 0.99, 0.999), "complement", 0.99)
    assert found == pytest.approx((0.9, 0.96838, 0.99, 0.996838, 0.999), abs=1e-12)


@pytest.mark.parametrize(
    ("winner", "expected"),
    [
        (0.01, (0.001, 0.003162, 0.01, 0.03162, 0.1)),  # the lowest: two half steps beyond it
        (1.0, (0.1, 0.3162, 1.0, 3.162, 10.0)),  # the highest
    ],
)
def test_zoom_continues_beyond_an_edge(winner, expected):
    assert zoom(hyper("dp-fedgd", "learning_rate"), (0.01, 0.1, 1.0), "log", winner) == expected


def test_zoom_stays_within_the_method_s_range():
    """A decay lies in [0, 1)."""
    beta = hyper("dp-fedsofim", "beta")
    assert zoom(beta, (0.0, 0.1, 0.2), "linear", 0.0) == (0.0, 0.05, 0.1)
    assert zoom(beta, (0.5, 0.7, 0.9), "linear", 0.9) == (0.7, 0.8, 0.9), "1.0 and 1.1 are not allowed"


def test_zoom_keeps_integers():
    """ln 1, ln 3, ln 5, ln 7: half a step below 3 is sqrt(3) = 1.73, above it sqrt(15) = 3.87."""
    found = zoom(hyper("dp-fedavg", "local_steps"), (1, 3, 5, 7), "log", 3)
    assert found == (1, 2, 3, 4, 5)
    assert all(type(value) is int for value in found)
    # 0.58 rounds to 1, a duplicate, and 0.33 to 0, which is not allowed
    assert zoom(hyper("dp-fedavg", "local_steps"), (1, 3, 5, 7), "log", 1) == (1, 2, 3)


def test_zoom_does_not_depend_on_the_order_of_the_axis():
    rate = hyper("dp-fedgd", "learning_rate")
    assert zoom(rate, (1.0, 0.01, 0.1), "log", 0.1) == zoom(rate, (0.01, 0.1, 1.0), "log", 0.1)


def test_zoom_does_not_change_an_axis_of_one_value():
    assert zoom(hyper("dp-fedgd", "learning_rate"), (0.3,), "log", 0.3) == (0.3,)


HUNDREDTHS = [k / 100 for k in range(1, 100)]


@pytest.mark.parametrize(
    ("method", "name", "axes"),
    [
        ("dp-fedsofim", "beta", list(zip(HUNDREDTHS, HUNDREDTHS[1:], HUNDREDTHS[2:], strict=False))),
        ("dp-fedsofim", "learning_rate", [(0.0123456, 0.1, 0.654321)]),
    ],
)
def test_zoom_reproduces_the_neighbours_exactly(method, name, axes):
    """A neighbour with a rounding error would be run again under another key."""
    for axis in axes:
        found = zoom(hyper(method, name), axis, load(method).scale[name], axis[1])
        assert found[::2] == axis, f"{axis} became {found[::2]}"


def test_refinement_by_zoom_crosses_the_zoomed_axes():
    """Three numeric axes: five points each, in grid order, the winner among them."""
    space = load("dp-fedsofim")
    found = refine(space, "zoom", {"learning_rate": 0.1, "rho": 1.0, "beta": 0.9})
    assert len(found) == 125
    axes = {name: tuple(dict.fromkeys(c[name] for c in found)) for name in space.coarse}
    assert axes["learning_rate"] == (0.01, 0.03162, 0.1, 0.3162, 1.0)
    assert axes["rho"] == (0.1, 0.3162, 1.0, 2.236, 5.0)  # upwards by sqrt(5)
    assert axes["beta"] == pytest.approx((0.8, 0.8586, 0.9, 0.96838, 0.99), abs=1e-12)  # 1 - x: 0.2 to 0.1, 0.1 to 0.01
    assert {"learning_rate": 0.1, "rho": 1.0, "beta": 0.9} in found


def test_refinement_of_four_axes_takes_three_points_of_each():
    """3^4 = 81 where 5^4 would be 625."""
    space = load("dp-fedadam")
    found = refine(space, "zoom", {"learning_rate": 0.01, "beta1": 0.8, "beta2": 0.9, "tau": 0.01})
    assert len(found) == 81


def test_axes_without_numbers_are_not_zoomed():
    space = load("dp-fedsofim").with_overrides(
        fixed={"beta": 0.9, "learning_rate": 1},
        coarse={"rho": [1, 10], "direction": ["gradient", "momentum"], "warmup_rounds": ["auto", 5]},
        fine={"rho": [1], "direction": ["momentum"], "warmup_rounds": ["auto"]},
    )
    winner = {"rho": 1.0, "direction": "momentum", "warmup_rounds": 5, "beta": 0.9, "learning_rate": 1.0}
    found = refine(space, "zoom", winner)
    axes = {name: tuple(dict.fromkeys(c[name] for c in found)) for name in found[0]}
    assert axes == {
        "beta": (0.9,),
        "learning_rate": (1.0,),
        "rho": (0.1, 0.3162, 1.0, 3.162, 10.0),
        "direction": ("gradient", "momentum"),
        "warmup_rounds": ("auto", 5),
    }


def test_an_axis_with_zero_can_be_zoomed():
    """mu0 = 0 is allowed (no proximal term) and its scale is logarithmic."""
    space = load("dp-adafedprox").with_overrides(
        fixed={"local_steps": 1, "client_learning_rate": 0.1, "server_learning_rate": 1},
        coarse={"mu0": [0, 0.1, 1]},
        fine={"mu0": [0]},
    )
    for winner in (0.0, 0.1, 1.0):
        found = [c["mu0"] for c in refine(space, "zoom", {"mu0": winner})]
        assert winner in found
        assert min(found) >= 0


AXES = [
    (method, name)
    for method in METHODS
    for name, axis in load(method).coarse.items()
    if is_numeric(axis) and len(axis) > 1
]


@given(data=st.data())
def test_zoom_gives_valid_values_for_every_method(data):
    """For any axis of any method and any winner on it: valid, sorted, without duplicates, with the winner, and with
    a smaller step than the axis."""
    method, name = data.draw(st.sampled_from(AXES))
    rule, scale = hyper(method, name), load(method).scale[name]
    if rule.integer:
        numbers = st.integers(1, 1000)
    else:
        numbers = st.floats(1e-6, 0.999 if rule.high == 1 else 1e4).map(lambda x: float(f"{x:.3g}"))
    axis = tuple(rule.check(value) for value in data.draw(st.lists(numbers, min_size=2, max_size=6, unique=True)))
    if len(set(axis)) < 2:
        return
    winner = data.draw(st.sampled_from(axis))
    steps = data.draw(st.sampled_from([1, 2]))
    found = zoom(rule, axis, scale, winner, steps)
    assert [rule.check(value) for value in found] == list(found)
    assert [type(value) for value in found] == [type(winner)] * len(found)
    assert len(set(found)) == len(found) <= 2 * steps + 1
    assert winner in found
    assert list(found) == sorted(found)
    ordered = sorted(axis)
    position, here = ordered.index(winner), found.index(winner)
    if position + 1 < len(ordered) and here + 1 < len(found):
        assert winner < found[here + 1] <= ordered[position + 1] * (1 + 1e-3)
    if position > 0 and here > 0:
        assert ordered[position - 1] * (1 - 1e-3) <= found[here - 1] < winner
    if position == len(ordered) - 1 and rule.high == math.inf:
        assert max(found) > winner, "continues beyond the upper edge"


@pytest.mark.parametrize(
    ("axis", "value", "edge"),
    [
        ((1.0, 2.0, 3.0), 3.0, True),
        ((3.0, 2.0, 1.0), 1.0, True),
        ((1.0, 2.0, 3.0), 2.0, False),
        ((1.0,), 1.0, False),
        (("momentum", "gradient"), "momentum", False),
        ((True, False), True, False),
    ],
)
def test_on_edge(axis, value, edge):
    assert on_edge(axis, value) is edge


# ---- a study's overrides


def test_a_fixed_hyperparameter_is_no_longer_an_axis():
    space = load("dp-fedsofim").with_overrides(fixed={"beta": 0.9, "direction": "gradient"}, coarse={}, fine={})
    assert set(space.coarse) == set(space.fine) == {"learning_rate", "rho"}
    grid = space.grid(space.coarse)
    assert len(grid) == 25
    assert all(c["beta"] == 0.9 and c["direction"] == "gradient" for c in grid)


def test_a_given_axis_replaces_the_packaged_one():
    space = load("dp-fedgd").with_overrides(
        fixed={}, coarse={"learning_rate": ["0.5", 1]}, fine={"learning_rate": [0.75]}
    )
    assert space.coarse == {"learning_rate": (0.5, 1.0)}
    assert space.fine == {"learning_rate": (0.75,)}
    assert space.scale == {"learning_rate": "log"}, "the scale stays"
    assert load("dp-fedgd").coarse["learning_rate"] != (0.5, 1.0), "the packaged space is unchanged"


def test_an_added_axis_is_zoomed_on_the_scale_it_is_given():
    def tried(scale):
        space = load("dp-fedgd").with_overrides(fixed={}, coarse={"clip": [1, 4, 16]}, fine={}, scale={"clip": scale})
        return {c["clip"] for c in refine(space, "zoom", {**space.grid(space.coarse)[0], "clip": 4.0})}

    assert tried("log") == {1, 2, 4, 8, 16}
    assert tried("linear") != tried("log")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"fixed": {"rate": 1}}, "dp-fedsofim has no hyperparameter 'rate'; it has: learning_rate, rho,"),
        ({"coarse": {"rate": [1]}, "fine": {"rate": [1]}}, "dp-fedsofim has no hyperparameter 'rate'"),
        ({"fixed": {"rho": 0}}, r"rho = 0 is not in \(0, inf\)"),
        ({"fixed": {"rho": "much"}}, "rho = 'much' is not a number"),
        ({"fixed": {"direction": "sideways"}}, "direction = 'sideways' is unknown; choose one of: momentum, gradient"),
        ({"fixed": {"blend_rounds": 2.5}}, "blend_rounds = 2.5 is not a whole number"),
        ({"coarse": {"beta": [0.9, 1.0]}}, r"beta = 1 is not in \[0, 1\)"),
        ({"fine": {"learning_rate": [-1]}}, r"learning_rate = -1 is not in \(0, inf\)"),
        ({"fine": {"weight_decay": [0]}}, "axis 'weight_decay' is in only one of the coarse and the fine grid"),
        ({"scale": {"weight_decay": "log"}}, "scale of 'weight_decay', which is not an axis"),
        ({"scale": {"rho": "cubic"}}, "scale of rho = 'cubic' is unknown"),
        ({"coarse": {"clip": [0, 1]}}, r"clip = 0 is not in \(0, inf\)"),
        ({"coarse": {"rounds": [2.5]}}, "rounds = 2.5 is not a whole number"),
        ({"coarse": {"rho": []}}, r"axis rho = \[\] is not a list of values"),
        ({"fixed": {"rho": 1}, "coarse": {"rho": [1]}, "fine": {"rho": [1]}}, "'rho' is both fixed and an axis"),
    ],
)
def test_bad_overrides_are_refused_with_name_and_value(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        load("dp-fedsofim").with_overrides(**{"fixed": {}, "coarse": {}, "fine": {}, **changes})


def test_an_axis_may_be_added_with_its_scale():
    """Added to the coarse grid only: the fine grid has the same values, and zoom uses the scale."""
    space = load("dp-fedgd").with_overrides(
        fixed={}, coarse={"learning_rate": [1], "clip": [1, 4, 16]}, fine={}, scale={"clip": "linear"}
    )
    assert space.fine["clip"] == space.coarse["clip"] == (1.0, 4.0, 16.0)
    assert space.scale["clip"] == "linear"
    found = refine(space, "zoom", {"learning_rate": 1.0, "clip": 4.0})
    assert [configuration["clip"] for configuration in found] == [1.0, 2.5, 4.0, 10.0, 16.0]
    plain = load("dp-fedgd").with_overrides(fixed={}, coarse={"clip": [1, 4, 16], "rounds": [10, 40]}, fine={})
    assert (plain.scale["clip"], plain.scale["rounds"]) == ("log", "log"), "their default scale"


def test_no_hyperparameter_is_named_like_a_run_setting():
    for method in METHODS.values():
        assert not {h.name for h in method.hyperparameters} & set(search_spaces.RUN_NAMES), method.name


def test_unknown_scale_and_unknown_method_are_refused():
    with pytest.raises(UserError, match="scale of rho = 'cubic' is unknown; choose one of: log, linear, complement"):
        build("dp-fedsofim", {"rho": [1]}, {"rho": [1]}, {"rho": "cubic"}, {})
    with pytest.raises(UserError, match="method = 'dp-nope' is unknown; choose one of: dp-adafedprox,"):
        load("dp-nope")


def test_a_method_without_a_packaged_space_says_what_to_do(monkeypatch):
    monkeypatch.setitem(METHODS, "dp-new", METHODS["dp-fedgd"])
    search_spaces._read.cache_clear()
    with pytest.raises(UserError, match="'dp-new' has no search space; a study must give its coarse axes"):
        load("dp-new")

"""Partitions: the paper's table 14, and every row belongs to exactly one client."""

import re

import numpy as np
import pytest
import small
from hypothesis import given
from hypothesis import strategies as st

from trainables.data import features, partition
from trainables.data.features import FeatureSet
from trainables.errors import UserError

# Table 14 of the main paper, as printed: a blank separates thousands as well as columns. The last number is the total.
TABLE_14 = """\
0 14 122 240 126 630 74 193 71 230 6 1 706
1 122 37 1 488 88 12 43 0 123 43 419 2 375
2 17 113 97 122 647 1 030 609 822 27 14 3 498
3 467 1 253 2 151 7 149 20 130 66 367 2 612
4 794 1 117 0 40 0 5 83 86 180 1 306
5 38 386 1 967 777 134 436 44 16 216 3 015
6 29 729 335 95 126 1 200 5 9 45 783 3 356
7 32 106 266 19 226 472 101 29 90 174 1 515
8 161 619 20 585 46 66 55 45 222 120 1 939
9 173 72 524 102 225 326 68 32 256 766 2 544
10 33 175 929 508 477 35 116 39 37 187 2 536
11 138 877 1 105 62 2 1 019 0 1 191 1 3 396
12 45 3 1 751 138 104 7 100 951 1 212 3 312
13 43 83 186 669 14 3 54 1 333 373 168 2 926
14 192 4 51 90 303 83 744 1 241 588 33 3 329
15 44 16 64 311 1 047 25 727 44 494 208 2 980
16 331 163 119 3 9 92 22 67 10 75 891
17 7 92 12 95 11 746 91 413 26 46 1 539
18 449 0 104 192 93 0 723 204 246 14 2 025
19 1 871 149 443 21 110 416 5 171 3 11 3 200
"""


def labelled(labels, clients=None) -> FeatureSet:
    """A data set with these labels; features do not matter."""
    y = np.asarray(labels, dtype=np.int64)
    x = np.zeros((len(y), 1), dtype=np.float32)
    return FeatureSet("labels", "labels", x, y, x[:1], y[:1], None if clients is None else np.asarray(clients))


def divide(data: FeatureSet, text: str, clients: int, seed: int = 42) -> partition.Partition:
    return partition.partition(data, partition.parse(text, clients=clients, seed=seed))


def divide_or_error(*arguments) -> partition.Partition | str:
    try:
        return divide(*arguments)
    except UserError as error:
        return str(error)


def printed(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def assert_table_14(data: FeatureSet) -> None:
    divided = divide(data, "dirichlet:0.5", 20)
    counts = divided.counts(data)
    table = [" ".join([str(c), *map(printed, row), printed(row.sum())]) for c, row in enumerate(counts)]
    assert table == TABLE_14.splitlines()
    assert counts[0].tolist() == [14, 122, 240, 126, 630, 74, 193, 71, 230, 6]
    assert (min(divided.sizes), max(divided.sizes)) == (891, 3498)
    assert np.std(divided.sizes) == pytest.approx(779.6, abs=0.05)
    divergence = partition.divergence_from_uniform(counts)
    assert divergence.mean() == pytest.approx(0.666, abs=5e-4)
    assert divergence.max() == pytest.approx(1.039, abs=5e-4)
    absent = (counts == 0).sum(axis=1)
    assert absent.mean() == pytest.approx(0.3, abs=0.05)
    assert (absent[4], absent[18], absent.max()) == (2, 2, 2)
    assert divided.notes == ()


@pytest.mark.data
def test_table_14_on_the_real_labels(shared_data):
    assert_table_14(features.load(str(shared_data("cifar10-resnet20.npz"))))


def test_table_14_on_any_balanced_labels():
    """The counts depend on the class sizes alone, so the table needs no real file."""
    assert_table_14(labelled(np.arange(50_000) % 10))


# ---- every row once


@given(
    labels=st.integers(2, 6).flatmap(
        lambda classes: st.lists(st.integers(0, classes - 1), min_size=30, max_size=300).map(
            lambda drawn: [*range(classes), *drawn]
        )
    ),
    text=st.sampled_from(["iid", "dirichlet:0.3", "dirichlet:1", "dirichlet:100", "classes:1", "classes:2"]),
    clients=st.integers(1, 30),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_row_belongs_to_exactly_one_client(labels, text, clients, seed):
    data = labelled(labels)
    kind, _, k = text.partition(":")
    if kind == "classes" and int(k) * clients < data.classes:
        with pytest.raises(UserError, match=f"{clients} clients of {k} classes cannot hold all {data.classes}"):
            divide(data, text, clients, seed)
        return
    divided = divide_or_error(data, text, clients, seed)
    if isinstance(divided, str):
        assert re.search(r"leaves client \d+ of \d+ without a row", divided)
        rare = kind == "classes" and min(np.bincount(labels)) < -(-int(k) * clients // data.classes)
        assert rare or (kind == "dirichlet" and clients > 1), "a client is empty only where rows are scarce"
        return
    assert len(divided.rows) == clients
    assert np.sort(np.concatenate(divided.rows)).tolist() == list(range(len(labels)))
    assert all((np.diff(rows) > 0).all() for rows in divided.rows)
    assert divided.counts(data).sum(axis=0).tolist() == np.bincount(labels).tolist()
    assert min(divided.sizes) >= min(partition.MIN_ROWS, len(labels) // clients), "every client has the minimum"
    again = divide(data, text, clients, seed)
    assert all((a == b).all() for a, b in zip(divided.rows, again.rows, strict=True))


@pytest.mark.parametrize(
    ("text", "clients", "seed", "culprit"),
    [
        ("iid", 2**31, 0, ""),
        ("iid", 2**31 + 1, 0, "clients"),
        ("iid", 0, 0, "clients"),
        ("iid", 1, 2**32 - 1, ""),
        ("iid", 1, 2**32, "partition_seed"),
        ("iid", 1, -1, "partition_seed"),
        ("dirichlet:1e6", 1, 0, ""),
        ("dirichlet:1000001", 1, 0, "alpha"),
        ("dirichlet:0", 1, 0, "alpha"),
        ("classes:100000", 1, 0, ""),
        ("classes:100001", 1, 0, "classes per client"),
        ("classes:0", 1, 0, "classes per client"),
    ],
)
def test_the_ends_of_every_range(text, clients, seed, culprit):
    if culprit:
        with pytest.raises(UserError, match=f"^{culprit} = "):
            partition.parse(text, clients=clients, seed=seed)
    else:
        spec = partition.parse(text, clients=clients, seed=seed)
        assert (spec.clients, spec.seed) == (clients, seed)


@pytest.mark.parametrize(
    "parts", [[], [[0, 1], [2]], [[0, 1, 2, 3]], [[0, 1], [2, 3], []], [[0, 1], [1, 2]], [[0, 1], [2, 4]]]
)
def test_a_plugin_s_partition_is_validated(parts, monkeypatch):
    """Every row must belong to exactly one client, or privacy per record would be accounted wrongly."""
    monkeypatch.setitem(partition.PLUGIN_PARTITIONS, "odd", lambda data, spec: parts)
    with pytest.raises(
        UserError, match="partition odd: its plug-in must assign each of the 4 train rows to exactly one"
    ):
        divide(labelled([0, 1, 0, 1]), "odd", 2)
    monkeypatch.setitem(partition.PLUGIN_PARTITIONS, "odd", lambda data, spec: [[0, 3], [1, 2]])
    assert [rows.tolist() for rows in divide(labelled([0, 1, 0, 1]), "odd", 2).rows] == [[0, 3], [1, 2]]
    assert partition.to_text(partition.parse("odd:2", clients=2, seed=0)) == "odd:2"


def test_only_a_dirichlet_partition_has_an_alpha_to_enlarge():
    few = labelled([0] * 50 + [1])
    error = divide_or_error(few, "classes:1", 10, 0)
    assert re.search(r"leaves client \d+ of 10 without a row$", error)
    error = divide_or_error(labelled([0] * 30 + [1] * 30), "dirichlet:0.001", 30, 0)
    assert error.endswith("without a row; a larger alpha spreads the rows more evenly")


@pytest.mark.parametrize("text", ["iid", "dirichlet:0.5", "classes:2"])
def test_the_seed_decides(text):
    data = labelled(np.arange(600) % 5)
    first, other = divide(data, text, 5, seed=1), divide(data, text, 5, seed=2)
    assert any(a.tolist() != b.tolist() for a, b in zip(first.rows, other.rows, strict=True))


def test_iid_is_balanced():
    data = labelled(np.arange(1003) % 4)
    divided = divide(data, "iid", 10)
    assert sorted(set(divided.sizes)) == [100, 101]
    assert partition.divergence_from_uniform(divided.counts(data)).max() < 0.1


def test_classes_gives_each_client_k_classes():
    data = labelled(np.arange(1000) % 10)
    for k in (1, 2, 5, 10):
        counts = divide(data, f"classes:{k}", 20).counts(data)
        assert ((counts > 0).sum(axis=1) == k).all()
        assert counts.sum(axis=0).tolist() == [100] * 10


def test_explicit_follows_the_client_column():
    column = np.array([2, 0, 1, 1, 0, 2, 2, 0])
    divided = divide(labelled([0, 1] * 4, column), "explicit", 3)
    assert [rows.tolist() for rows in divided.rows] == [[1, 4, 7], [2, 3], [0, 5, 6]]
    assert divided.notes == (), "no top-up: the data set defines the clients"


def test_a_smaller_alpha_is_less_balanced():
    data = labelled(np.arange(20_000) % 10)
    divergence = [
        partition.divergence_from_uniform(divide(data, f"dirichlet:{alpha}", 10).counts(data)).mean()
        for alpha in (0.1, 0.5, 5, 500)
    ]
    assert divergence == sorted(divergence, reverse=True)


# ---- topping up


def test_top_up_and_its_note():
    """60 rows of one class and 2 of another: the client with 2 rows receives 8 from the largest client."""
    divided = divide(labelled([0] * 60 + [1] * 2), "classes:1", 2)
    assert sorted(divided.sizes) == [10, 52]
    (note,) = divided.notes
    topped_up = divided.sizes.index(10)
    assert note == f"client {topped_up} had 2 rows and received 8 from client {1 - topped_up}"


def test_top_up_leaves_every_donor_the_minimum():
    """Sizes 14, 15 and 1 of 30 rows: the surplus of the largest client is not enough, so both others must give."""
    labels = [0] * 14 + [1] * 15 + [2]
    assert divide(labelled(labels), "classes:1", 3).sizes == (10, 10, 10)


# ---- KL


def test_divergence_from_uniform():
    """Two classes: all in one gives ln 2; half and half 0; 3 to 1 gives 3/4 ln(3/2) + 1/4 ln(1/2) = 0.1308."""
    found = partition.divergence_from_uniform(np.array([[8, 0], [4, 4], [6, 2]]))
    assert found == pytest.approx([np.log(2), 0, 0.1308], abs=5e-5)


# ---- without the validation rows


def test_without_removes_the_validation_rows_from_each_client():
    of = small.problem(train_on="train", evaluate_on="validation")
    validation_rows = of.data.validation_rows(0.1, 42)
    train_rows = np.concatenate(of.partition.rows)
    assert sorted([*train_rows, *validation_rows]) == list(range(600))
    assert (of.x_eval == of.data.x_train[validation_rows]).all()
    assert (of.y_eval == of.data.y_train[validation_rows]).all()
    whole = small.problem(train_on="all")
    for rows, all_rows in zip(of.partition.rows, whole.partition.rows, strict=True):
        assert set(rows) == set(all_rows) - set(validation_rows)


def test_train_on_all_uses_every_row_and_evaluates_on_the_test_set():
    of = small.problem()
    assert sum(of.partition.sizes) == 600
    assert (of.x_eval == of.data.x_test).all()


def test_a_client_emptied_by_the_validation_split_keeps_its_first_row():
    divided = divide(labelled([0, 1] * 4, [0, 0, 0, 0, 0, 0, 0, 1]), "explicit", 2)
    assert [list(rows) for rows in divided.without(np.array([7])).rows] == [list(range(7)), [7]]
    assert divided.without(np.arange(6)).sizes == (1, 1), "one row is enough"
    assert [list(rows) for rows in divided.without(np.arange(8)).rows] == [[0], [7]]


# ---- errors


@pytest.mark.parametrize(
    ("text", "clients", "sentence"),
    [
        ("dirichlet:0.001", 20, "dirichlet:0.001 leaves client .* without a row"),
        ("iid", 101, "clients = 101 is more than the 100 train rows"),
        ("dirichlet:0.5", 101, "clients = 101"),
        ("classes:6", 20, "classes:6: the data has only 5 classes"),
        ("classes:1", 4, "classes:1: 4 clients of 1 classes cannot hold all 5"),
        ("explicit", 20, "no client_train column"),
        ("iid", 0, "clients = 0"),
        ("iid", -3, "clients = -3"),
        ("dirichlet", 20, "'dirichlet' is not dirichlet:ALPHA"),
        ("dirichlet:0", 20, "alpha = 0"),
        ("dirichlet:-1", 20, "alpha = -1"),
        ("dirichlet:nan", 20, "alpha = nan"),
        ("dirichlet:inf", 20, "alpha = inf"),
        ("dirichlet:x", 20, "'x' is not a number"),
        ("classes:1.5", 20, "'1.5' is not a whole number"),
        ("classes:0", 20, "classes per client = 0"),
        ("iid:3", 20, "'iid:3' is not iid"),
        ("zipf:1", 20, "'zipf:1' is unknown"),
        ("", 20, "'' is unknown"),
    ],
)
def test_bad_partitions_are_named(text, clients, sentence):
    with pytest.raises(UserError, match=sentence):
        divide(labelled(np.arange(100) % 5), text, clients)


def test_explicit_with_another_number_of_clients():
    with pytest.raises(UserError, match="clients = 3, but data labels names 2"):
        divide(labelled([0, 1] * 4, [0, 1] * 4), "explicit", 3)


def test_explicit_with_a_gap():
    with pytest.raises(UserError, match="client 1 of 3 without a row"):
        divide(labelled([0, 1] * 4, [0, 2] * 4), "explicit", 3)
    with pytest.raises(UserError, match="client 1 of 4 without a row"):
        divide(labelled([0, 1] * 4, [0, 3] * 4), "explicit", 4)


@pytest.mark.parametrize("text", ["iid", "dirichlet:0.5", "classes:2", "explicit"])
def test_to_text_is_the_inverse_of_parse(text):
    assert partition.to_text(partition.parse(text, clients=3, seed=1)) == text


def test_as_many_clients_as_rows():
    assert divide(labelled(np.arange(100) % 5), "iid", 100).sizes == (1,) * 100

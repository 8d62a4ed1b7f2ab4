"""`fedsweep account`: what everything published about the same records costs together."""

import json
import math
import shutil

import numpy as np
import pytest
import table_snapshots
import torch
from command_line import assert_one_sentence
from dp_accounting import dp_event
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation

from orchestrator.results.account import account_of
from orchestrator.results.records import same_records
from trainables.errors import UserError
from trainables.federation.saved_model import SavedModel
from trainables.models import safetensors
from trainables.privacy import sampled
from trainables.privacy.gaussian import epsilon_of, mu_of
from trainables.privacy.plan import Event, PrivacyPlan, PrivacySettings
from trainables.privacy.private_selection import Search, private_search, private_searches
from trainables.privacy.publication import Publication, simulated_note, total_epsilon
from trainables.privacy.sampled import Sampled

DELTA = 1e-5
DATA = "synthetic-frozen:600,20,12,4"


def model(epsilon: float, rounds: int = 20, sampling: float = 1.0, **settings) -> tuple[Publication, PrivacyPlan]:
    privacy = PrivacySettings(epsilon=epsilon, **settings)
    event = Event("gradient", rounds, privacy.sensitivity, sampling=sampling)
    plan = PrivacyPlan.calibrate(privacy, [event], sizes=[100, 50, 30])
    return Publication(privacy.level, privacy.adjacency, plan.mechanism), plan


# ---- composition, each against another way to compute it


@pytest.mark.parametrize("adjacency", ["replace-one", "zero-out"])
@pytest.mark.parametrize("release", ["local", "secure-aggregation"])
def test_models_compose_as_in_dp_accounting(adjacency, release):
    both = [model(epsilon, adjacency=adjacency, release=release) for epsilon in (1.0, 2.0)]
    total = total_epsilon([published for published, _ in both], "record", DELTA)
    assert total == pytest.approx(epsilon_of(math.hypot(*(plan.mu(release) for _, plan in both)), DELTA), rel=1e-9)
    accountant = PLDAccountant(NeighboringRelation.REPLACE_ONE)
    for _, plan in both:
        accountant.compose(dp_event.GaussianDpEvent(2 / plan.mu(release)))  # its sensitivity is 2
    assert total == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-3)
    alone = total_epsilon([both[0][0]], "record", DELTA)
    assert alone == pytest.approx(both[0][1].actual_epsilon[release], rel=1e-9)


def test_models_with_secret_samples_compose_by_loss_distributions():
    one, plan = model(1.0, sampling=0.2)
    alone = total_epsilon([one], "record", DELTA)
    assert alone == pytest.approx(plan.actual_epsilon["local"], rel=1e-9)
    accountant = PLDAccountant(NeighboringRelation.REPLACE_ONE, value_discretization_interval=1e-3)
    (release,) = one.releases
    event = dp_event.PoissonSampledDpEvent(release.rate, dp_event.GaussianDpEvent(release.multiplier))
    accountant.compose(event, 2 * release.count)
    assert total_epsilon([one, one], "record", DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=0.02)
    search = Publication("record", "replace-one", searches=(Search(mu_of(1.0, DELTA), 10.0),))
    together = total_epsilon([one, search], "record", DELTA)
    assert max(alone, total_epsilon([search], "record", DELTA)) < together
    assert together <= private_searches(search.searches, DELTA, plan.mu("local"))


def test_secret_samples_and_a_search_get_half_of_delta_each():
    """Basic composition: (eps1, delta / 2) and (eps2, delta / 2) are (eps1 + eps2, delta) together."""
    one, _ = model(1.0, sampling=0.05)
    search = Publication("record", "replace-one", searches=(Search(0.2, 3.0),))
    together = total_epsilon([one, search], "record", DELTA)
    assert together == sum(total_epsilon([each], "record", DELTA / 2) for each in (one, search))


@pytest.fixture
def numerical(monkeypatch):
    """The deltas for which an account of secret samples is computed numerically; it finds 0."""
    deltas = []
    monkeypatch.setattr(sampled, "epsilon_of", lambda releases, adjacency, delta: deltas.append(delta) or 0.0)
    return deltas


@pytest.mark.parametrize(
    ("rate", "multiplier", "delta", "expected"),
    [
        (0.1, 5.0, 1e-5, True),
        (1.0, 5.0, 1e-5, False),  # it has a closed form
        (0.1, 0.01, 1e-5, False),  # eps is too large for the numerical account
        (0.1, 5.0, 2 * sampled.LEAST_SAMPLED_DELTA, True),
        (0.1, 5.0, 1.9 * sampled.LEAST_SAMPLED_DELTA, False),
        (1.0, 5.0, 1.9 * sampled.LEAST_SAMPLED_DELTA, False),
        (1.0, 0.01, 1e-5, False),
    ],
)
def test_when_the_account_is_numerical(numerical, rate, multiplier, delta, expected):
    one = Publication("record", "replace-one", (Sampled(10, multiplier, rate),))
    total = total_epsilon([one], "record", delta)
    assert numerical == ([delta] if expected else [])
    assert (total > 0) != expected


def test_one_sampled_release_makes_the_account_numerical(numerical):
    one = Publication("record", "replace-one", (Sampled(10, 5.0, 1.0), Sampled(1, 5.0, 0.5)))
    total_epsilon([one], "record", DELTA)
    assert numerical == [DELTA]


def test_partitions_that_depend_on_labels_are_named():
    assert simulated_note(["iid", "explicit"]) == ""
    assert simulated_note(["explicit", "dirichlet:0.5", "mine:iid"]).startswith(
        "The partition dirichlet:0.5 and mine:iid is simulated from the labels"
    )


def by_hand(searches, beside, delta):
    """Papernot and Steinke 2022, theorem 2, for a geometric number of runs, with the Gaussian's lambda mu^2 / 2."""
    orders = np.geomspace(1.01, 1000, 3000)
    inner = np.geomspace(1.01, 5000, 3000)
    total = orders * beside**2 / 2
    for mu, mean in searches:
        best = np.min(2 * (1 - 1 / inner) * inner * mu**2 / 2 + 2 * math.log(mean) / inner)
        total += orders * mu**2 / 2 + best + math.log(mean) / (orders - 1)
    return np.min(total + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1))


@pytest.mark.parametrize("beside", [0.0, 0.4])
def test_searches_and_models_compose_as_in_the_theorem(beside):
    searches = (Search(0.3, 50.0), Search(0.2, 8.0))
    published = [Publication("record", "replace-one", searches=searches)]
    if beside:
        published.append(Publication("record", "replace-one", (Sampled(1, 2 / beside, 1.0),)))
    total = total_epsilon(published, "record", DELTA)
    assert total == pytest.approx(by_hand([search[:2] for search in searches], beside, DELTA), rel=5e-3)


@pytest.mark.parametrize(
    ("searches", "beside"),
    [
        ([(math.inf, 5.0)], 0.0),
        ([(1.0, 5.0)], math.inf),
        ([], math.inf),
        ([(math.inf, 1.0)], 0.0),
        ([(math.inf, 5.0), (1.0, 3.0)], 0.5),
    ],
)
def test_one_release_without_noise_makes_the_total_infinite(searches, beside):
    assert private_searches([Search(*search) for search in searches], DELTA, beside) == math.inf


def test_a_search_of_exactly_one_run_is_a_gaussian_release():
    single = Publication("record", "replace-one", searches=(Search(0.5, 1.0), Search(0.5, 1.0)))
    assert total_epsilon([single], "record", DELTA) == pytest.approx(epsilon_of(math.sqrt(0.5), DELTA))
    one = Publication("record", "replace-one", searches=(Search(0.5, 9.0),))
    assert total_epsilon([one], "record", DELTA) == private_search(0.5, 9.0, DELTA, "geometric")
    assert total_epsilon([], "record", DELTA) == 0


def test_levels_and_adjacencies_are_added_up_to_the_safe_side():
    record, user = model(1.0)[0], model(1.0, level="user")[0]
    assert total_epsilon([record, user], "user", DELTA) == math.inf
    assert total_epsilon([user, user], "user", DELTA) == total_epsilon([record, record], "record", DELTA)
    zeroed, plan = model(1.0, adjacency="zero-out")
    mixed = total_epsilon([zeroed, record], "record", DELTA)
    assert mixed == pytest.approx(epsilon_of(math.hypot(2 * plan.mu("local"), mu_of(1.0, DELTA)), DELTA), rel=1e-5)
    search = Publication("record", "zero-out", searches=(Search(0.3, 5.0),))
    doubled = [Publication("record", "replace-one", searches=(Search(0.6, 5.0),)), record]
    assert total_epsilon([search, record], "record", DELTA) == total_epsilon(doubled, "record", DELTA)
    assert total_epsilon([model(math.inf)[0], record], "record", DELTA) == math.inf


# ---- records


def test_items_that_share_a_tag_are_about_the_same_records():
    assert same_records([["a"], ["b"], ["a", "x"], ["y", "b"], ["z"], ["x", "y"]]) == [0, 0, 0, 0, 4, 0]
    assert same_records([]) == []


def provenance(data: str, records: str = "", secret: bool = True, **settings) -> dict:
    published, plan = model(1.0, **settings)
    return {
        "trial": {"method": "dp-fedgd", "privacy": plan.settings.model_dump(mode="json")},
        "secret_noise": secret,
        "data": data,
        "records": records,
        "delta": plan.settings.delta,
        "releases": [vars(release) for release in published.releases],
    }


def save_model(path, weight: float, data: str, records: str = "", secret: bool = True, **settings) -> None:
    about = provenance(data, records, secret, **settings)
    SavedModel(np.full(6, weight, dtype=np.float32), "softmax", 2, 2, about).save(path)


def test_models_of_files_prepared_from_the_same_records_add_up(tmp_path):
    save_model(tmp_path / "vgg.npz", 1, "vgg", records="patients")
    save_model(tmp_path / "resnet.npz", 2, "resnet", records="patients")
    save_model(tmp_path / "other.npz", 3, "other")
    save_model(tmp_path / "open.npz", 4, "other", secret=False)
    np.savez(tmp_path / "features.npz", x_train=np.zeros(3))
    (tmp_path / "copies").mkdir()
    shutil.copy(tmp_path / "vgg.npz", tmp_path / "copies" / "again.npz")
    found = account_of([str(tmp_path)])
    totals = {records.name: records.total() for records in found.records}
    assert totals["other"] == pytest.approx(1, rel=1e-5)
    assert totals["patients"] == pytest.approx(epsilon_of(math.sqrt(2) * mu_of(1, DELTA), DELTA), rel=1e-5)
    (analyst,) = found.for_analyst
    assert analyst.place.endswith("open.npz")


def test_saved_networks_count_like_other_models(tmp_path):
    save_model(tmp_path / "head.npz", 1, "data")
    about = {"fedsweep": json.dumps({"provenance": provenance("data")})}
    safetensors.write(tmp_path / "network.safetensors", {"w": torch.ones(3)}, about, private=True)
    shutil.copy(tmp_path / "network.safetensors", tmp_path / "copy.safetensors")
    safetensors.write(tmp_path / "another-tool.safetensors", {"w": torch.ones(3)}, {}, private=True)
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 20)
    (records,) = account_of([str(tmp_path)]).records
    assert records.total() == pytest.approx(epsilon_of(math.sqrt(2) * mu_of(1, DELTA), DELTA), rel=1e-5)
    assert account_of([str(tmp_path / "network.safetensors")]).records[0].total() == pytest.approx(1, rel=1e-5)
    for name in ("another-tool", "broken"):
        with pytest.raises(UserError, match=rf"{name}.safetensors (has no account|is not a safetensors file)"):
            account_of([str(tmp_path / f"{name}.safetensors")])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"releases": []}, "it has no releases"),
        ({"releases": [{"count": 1.9, "multiplier": 1, "rate": 1}]}, "count = 1.9 is not a whole number"),
        ({"releases": [{"count": 1, "multiplier": 1e-300, "rate": 1}]}, "multiplier = 1e-300 is not in"),
        ({"secret_noise": 1}, "secret_noise = 1 is neither true nor false"),
        (5, "has no account"),
        (None, "has no account"),
    ],
)
def test_a_network_with_a_broken_account_is_not_left_out(tmp_path, change, error):
    save_model(tmp_path / "good.npz", 1, "data")
    about = {**provenance("data"), **change} if isinstance(change, dict) else change
    given = {"fedsweep": json.dumps({"provenance": about})}
    safetensors.write(tmp_path / "network.safetensors", {"w": torch.ones(3)}, given, private=True)
    for place in ("network.safetensors", "."):
        with pytest.raises(UserError, match=rf"network.safetensors has no .*{error}|network.safetensors {error}"):
            account_of([str(tmp_path / place)])


def test_deeply_nested_metadata_is_an_error(tmp_path):
    about = {"fedsweep": "[" * 100_000}
    safetensors.write(tmp_path / "network.safetensors", {"w": torch.ones(3)}, about, private=True)
    with pytest.raises(UserError, match="has no account"):
        account_of([str(tmp_path)])


def test_the_smallest_delta_counts_unless_one_is_given(tmp_path):
    save_model(tmp_path / "a.npz", 1, "data")
    save_model(tmp_path / "b.npz", 2, "data", delta=1e-6)
    (records,) = account_of([str(tmp_path)]).records
    assert records.delta == 1e-6
    (given,) = account_of([str(tmp_path)], 1e-3).records
    assert given.total() < records.total()


# ---- the command


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A private search, an ordinary study and a model, by hand."""
    home = tmp_path_factory.mktemp("account")
    for name in ("private", "finished"):
        table_snapshots.CASES[name](home / name)
    save_model(home / "m.npz", 1, DATA)
    return home


def test_the_command_lists_everything_and_adds_it_up(places, fedsweep):
    code, out, _ = fedsweep("account", places, "--json")
    assert code == 0
    found = json.loads(out)
    (records,) = found["records"]
    search, trained = sorted(records["published"], key=lambda one: -one["epsilon"])
    assert "4 private searches" in search["what"]
    assert "best.yaml" in search["what"]
    assert trained["epsilon"] == pytest.approx(1, rel=1e-5)
    assert search["epsilon"] < records["epsilon"]["record"] < search["epsilon"] + 50
    assert records["epsilon"]["user"] == "inf"
    assert {one["what"] for one in found["analyst"]} == {"an ordinary study: its tables and report are for the analyst"}
    code, text, _ = fedsweep("account", places / "private", places / "m.npz", places / "private")
    assert code == 0
    assert f"eps {math.ceil(records['epsilon']['record'])} at delta 1e-05 for one record; no bound for a user" in text
    assert f"records    {DATA}" in text


def test_errors_are_one_sentence(places, tmp_path, fedsweep):
    (tmp_path / "empty").mkdir()
    assert_one_sentence(fedsweep("account", tmp_path / "empty"), "holds neither results nor a saved model")
    assert_one_sentence(fedsweep("account", tmp_path / "nowhere"), "there is no folder or file")
    assert_one_sentence(fedsweep("account", places, "--delta", 2), "delta = 2")
    np.savez(tmp_path / "x.npz", x=np.zeros(2))
    assert_one_sentence(fedsweep("account", tmp_path / "x.npz"), "is not a model that fedsweep saved")
    weights = np.zeros(6, dtype=np.float32)
    SavedModel(weights, "softmax", 2, 2, {"secret_noise": True}).save(tmp_path / "y.npz")
    assert_one_sentence(fedsweep("account", tmp_path / "y.npz"), "has no complete account")

"""The report's data and sentences, from ledgers with numbers that are easy to verify. The page itself is in
test_browser.py."""

import json
import re
from statistics import stdev

import large
import numpy as np
import pytest
import reported
from handmade_ledgers import LAST, SETTING, row, setting_id, study, writing

from orchestrator.report import html
from orchestrator.report.html import data, document, findings_text
from orchestrator.report.html.configurations import Configuration, Groups, varied
from orchestrator.report.html.data import as_json, gather
from orchestrator.report.html.importance import importance
from orchestrator.results import status
from orchestrator.results.ledger import Ledger
from orchestrator.results.trial_columns import TrialColumns
from orchestrator.results.winners import Results
from orchestrator.search.objective import ACCURACY

CURVES = {1: {10: 50.0, 20: 60.0}, 2: {10: 52.0, 20: 62.0}, 3: {10: 54.0, 20: 64.0}}


@pytest.fixture
def folder(tmp_path):
    reported.write(tmp_path)
    return tmp_path


def read(folder):
    with Ledger.read(folder) as ledger:
        return gather(ledger, "here")


def results(folder):
    with Ledger.read(folder) as ledger:
        return Results.read(ledger)


# ---- the file


def test_the_report_is_reproducible(folder, fedsweep):
    code, out, _ = fedsweep("report", folder)
    assert (code, out.strip()) == (0, str(folder / "report.html"))
    before = (folder / "report.html").read_bytes()
    assert fedsweep("report", folder)[0] == 0
    assert (folder / "report.html").read_bytes() == before


def test_names_cannot_end_the_data(folder):
    """The data element contains no other tag, only the data."""
    text = document.page(document.content(html.read([str(folder)])))
    inside = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
    assert not set("<>&\u2028\u2029") & set(inside)
    assert json.loads(inside)["studies"][0]["description"] == reported.DESCRIPTION
    assert text.count("<script") == 2
    assert reported.HOSTILE not in text


def test_nothing_is_fetched(folder):
    text = document.page(document.content(html.read([str(folder)])))
    assert "connect-src 'none'" in text
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text)
    assert "@import" not in text
    assert len(text) < 500_000


def test_two_folders_are_compared(folder, tmp_path, fedsweep):
    other = tmp_path / "other"
    reported.write(other, shift=2.0)
    code, _, _ = fedsweep("report", folder, other, "--output", tmp_path / "both.html")
    assert code == 0
    text = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert [s["name"] for s in json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])["studies"]] == [
        folder.name,
        "other",
    ]


def test_more_folders_than_colours_are_refused(folder, fedsweep):
    code, _, err = fedsweep("report", *[folder] * 9)
    assert (code, err) == (2, "fedsweep: 9 results folders are more than the 8 that can be compared.\n")


def test_the_winner_has_the_score_that_selected_it(tmp_path):
    """The report, the table of winners and the status agree where a contest on other seeds decided."""
    of = study(methods=["dp-fedgd"], epsilons=[8], seeds={"search": [1], "contest": [2, 3], "confirm": [4]})
    with writing(tmp_path, of) as writer:
        scores = {("coarse", 1): 60.0, ("contest", 2): 50.0, ("contest", 3): 52.0}
        for (_, seed), score in scores.items():
            trial = writer.trial("dp-fedgd", 8, {"learning_rate": 0.1}, seed, confirm=False)
            writer.ledger.add([row(trial, {LAST: score})])
        for stage, seeds in {"coarse": [1], "contest": [2, 3]}.items():
            trials = [writer.trial("dp-fedgd", 8, {"learning_rate": 0.1}, seed, confirm=False) for seed in seeds]
            writer.ledger.add_stage(writer.cell("dp-fedgd", 8), "grid", stage, [trial.key for trial in trials])
    (cell,) = read(tmp_path)["cells"]
    assert cell["validation"] == 51.0
    assert cell["search"]["mean"][cell["search"]["winner"]] == 60.0
    assert [c["mean"] for c in cell["contest"]] == [51.0]
    assert cell["best"] == [[1, 60.0]]


def test_a_folder_without_results_is_refused(tmp_path, fedsweep):
    code, _, err = fedsweep("report", tmp_path)
    assert code == 2
    assert err == f"fedsweep: results folder {tmp_path} holds no ledger.sqlite.\n"


def test_a_study_that_has_not_begun(tmp_path):
    with writing(tmp_path, study()):
        pass
    found = read(tmp_path)
    assert found["cells"] == []
    assert found["findings"] == []
    assert document.page(document.content([found]))


def test_json_is_strict():
    assert json.loads(as_json({"a": "<&>\u2028"})) == {"a": "<&>\u2028"}
    with pytest.raises(ValueError):
        as_json(float("nan"))


# ---- configurations: everything except the seed


def test_several_seeds_are_one_configuration(tmp_path):
    """Learning rate 0.1 with seeds 1, 2 and 3 is 60, 62 and 64; 1.0 diverges on one of its seeds and has no mean."""
    with writing(tmp_path, study()) as writer:
        keys = []
        for rate, scores in ((0.1, (60.0, 62.0, 64.0)), (1.0, (70.0, "diverged", 72.0))):
            for seed, score in enumerate(scores, start=1):
                trial = writer.trial("dp-fedgd", 8, {"learning_rate": rate}, seed, confirm=False)
                writer.ledger.add([row(trial, {}, state=score) if isinstance(score, str) else row(trial, {20: score})])
                keys.append(trial.key)
        groups = Groups()
        for stage, members in {"coarse": keys, "fine": keys[:3]}.items():
            groups.add(stage, TrialColumns.of(writer.ledger.rows(members).values()), ACCURACY)
    found = groups.configurations
    assert [c.values["learning_rate"] for c in found] == [0.1, 1.0]
    first, second = found
    assert (first.mean, first.std, first.seeds, first.state) == (62.0, stdev([60, 62, 64]), [1, 2, 3], "done")
    assert first.stages == ["coarse", "fine"]
    assert (second.mean, second.std, second.state) == (None, None, "diverged")
    assert varied(found) == ["learning_rate"]


def test_the_page_has_every_configuration_and_the_winner(folder):
    cell = next(c for c in read(folder)["cells"] if c["method"] == reported.METHOD and c["epsilon"] == 8)
    search = cell["search"]
    assert [axis["name"] for axis in search["axes"]] == ["learning_rate", "tau"]
    assert len(search["mean"]) == len(reported.RATES) * len(reported.TAUS)
    won = search["winner"]
    assert [values[won] for values in search["values"]] == [0.1, 0.1]
    assert search["mean"][won] == reported.accuracy(0.1, 0.1, 8) == max(m for m in search["mean"] if m)
    assert search["state"].count("diverged") == 1
    assert search["left_out"] == 0
    assert {trace["configuration"] for trace in search["traces"]} == {k for k, m in enumerate(search["mean"]) if m}
    assert cell["with_search"] > cell["actual"]


def test_configurations_beyond_the_limit_are_counted(folder, monkeypatch):
    monkeypatch.setattr("orchestrator.report.html.data.MOST_CONFIGURATIONS", 12)
    for cell in read(folder)["cells"]:
        assert len(cell["search"]["mean"]) == min(3, len(cell["search"]["mean"]) + cell["search"]["left_out"])
        assert cell["search"]["winner"] is not None, "the winner is among the best, which stay"


def test_a_page_stays_below_five_megabytes(tmp_path):
    """Long curves of many cells are thinned and fewer are kept."""
    assert data.MOST_BYTES + len(document.page(document.content([])).encode()) < 5_000_000
    of = large.wide_study(2, seeds={"search": [1, 2, 3], "confirm": [42, 7]})
    large.write(tmp_path, of, 30, points=60, metrics=("loss", "train_loss"))
    with Ledger.read(tmp_path) as ledger:
        whole, cut = (as_json(gather(ledger, "here", most=most)) for most in (data.MOST_BYTES, 60_000))
    assert len(cut) < 60_000 < len(whole) / 3
    for cell in json.loads(cut)["cells"]:
        assert cell["search"]["winner"] is not None
        assert cell["search"]["traces"]
        assert all(run["rounds"][-1] == 60 for run in cell["confirm"]), "a curve keeps its end"


def test_thinned_progress_keeps_the_number_of_trials(folder, monkeypatch):
    """Thinned counts of single batches would lose trials."""
    monkeypatch.setattr(data, "MOST_POINTS", 3)
    (session,) = read(folder)["sessions"]
    with Ledger.read(folder) as ledger:
        assert session["ended"][-1][1] == len(ledger.outcomes())
    assert len(session["ended"]) <= 3


# ---- importance


def grid(score, rates=(1, 2, 3), taus=(10, 20)):
    return [
        Configuration({"rate": r, "tau": t, "fixed": 7}, ["coarse"], ["done"], [1], [score(r, t)])
        for r in rates
        for t in taus
    ]


def test_an_additive_score_has_no_pairs():
    """score = 3 rate + tau / 10: variances 9 * 2/3 = 6 and 1/4, so shares 6 / 6.25 and 0.25 / 6.25."""
    found = importance(grid(lambda r, t: 3 * r + t / 10), ACCURACY)
    assert found.exact
    assert found.single == pytest.approx({"rate": 6 / 6.25, "tau": 0.25 / 6.25})
    assert found.pairs["rate", "tau"] == pytest.approx(0, abs=1e-12)


def test_a_pure_interaction_is_all_pair():
    found = importance(grid(lambda r, t: (r - 2) * (t - 15)), ACCURACY)
    assert found.single == pytest.approx({"rate": 0, "tau": 0}, abs=1e-12)
    assert found.pairs["rate", "tau"] == pytest.approx(1)


def test_shares_of_a_grid_add_up():
    rng = np.random.default_rng(0)
    scores = {(r, t): float(rng.normal()) for r in (1, 2, 3) for t in (10, 20)}
    found = importance(grid(lambda r, t: scores[r, t]), ACCURACY)
    assert sum(found.single.values()) + sum(found.pairs.values()) == pytest.approx(1), "two axes: nothing is left over"


def test_what_diverged_counts_as_the_worst():
    plain = grid(lambda r, t: 10.0 * r)
    plain[0].states, plain[0].scores = ["diverged"], [None]
    worst = importance(plain, ACCURACY)
    plain[0].states, plain[0].scores = ["done"], [10.0]
    assert worst == importance(plain, ACCURACY), "its neighbour, the other with rate 1, is the worst that ended"


def test_without_a_grid_each_alone():
    rng = np.random.default_rng(1)
    found = importance(
        [
            Configuration({"rate": float(r), "tau": float(t)}, ["optuna"], ["done"], [1], [float(r)])
            for r, t in rng.uniform(size=(200, 2))
        ],
        ACCURACY,
    )
    assert not found.exact
    assert not found.pairs
    assert found.single["rate"] > 0.9
    assert found.single["tau"] < 0.1


@pytest.mark.parametrize("configurations", [[], grid(lambda r, t: 1.0), grid(lambda r, t: 1.0, (1,), (10,))])
def test_nothing_to_explain(configurations):
    assert importance(configurations, ACCURACY) is None


# ---- findings and caveats


def two_methods(tmp_path, gd, adam, seeds=(1, 2, 3), **changes):
    with writing(tmp_path, study(epsilons=[8], seeds={"confirm": list(seeds)}, **changes)) as writer:
        for method, curves in (("dp-fedgd", gd), ("dp-fedadam", adam)):
            writer.search(method, 8, {"coarse": [({"learning_rate": 0.1}, 60.0)]})
            writer.confirm(method, 8, {"learning_rate": 0.1}, curves)
    return results(tmp_path)


def test_a_clear_lead(tmp_path):
    """Differences 10, 10.5 and 11: mean 10.5, std 0.5, t(0.975, 2) = 4.3027, so 10.5 ± 4.3027 * 0.5 / sqrt 3."""
    found = two_methods(tmp_path, {k: {20: 50.0 + k} for k in (1, 2, 3)}, {k: {20: 59.5 + 1.5 * k} for k in (1, 2, 3)})
    (part,) = findings_text.summary(found)
    assert part["heading"] == SETTING
    assert part["sentences"][0]["text"] == (
        "At ε = 8 DP-FedAdam leads with a test accuracy of 62.50 ± 1.50 %, 10.50 higher than DP-FedGD (9.26 to 11.74); "
        "the difference is significant."
    )


def test_the_summary_names_its_metric_and_what_a_constant_answer_scores(tmp_path):
    """30 of 40 rows are of the second class."""
    of = study(methods=["dp-fedgd"], epsilons=[8])
    with writing(tmp_path, of) as writer:
        writer.search("dp-fedgd", 8, {"coarse": [({"learning_rate": 0.1}, 60.0)]})
        writer.confirm("dp-fedgd", 8, {"learning_rate": 0.1}, {42: {20: 90.0}, 7: {20: 90.0}})
        writer.ledger.add_partitions({(setting_id(of, SETTING), 42): [[5, 15], [5, 15]]})
    (part,) = findings_text.summary(results(tmp_path))
    only = "At ε = 8 DP-FedGD is the only method, with a test accuracy of 90.00 ± 0.00 %."
    assert [sentence["text"] for sentence in part["sentences"]] == [only]
    assert part["baseline"] == "Always predicting the largest class is right for 75.0 % of the train rows."
    balanced = results(tmp_path).by_metric("balanced_accuracy")
    assert (
        findings_text.summary(balanced)[0]["baseline"]
        == "Always predicting one class has a balanced accuracy of 50.0 %."
    )


def test_a_lead_that_is_not_significant(tmp_path):
    found = two_methods(tmp_path, {1: {20: 50.0}, 2: {20: 60.0}, 3: {20: 55.0}}, {k: {20: 56.0} for k in (1, 2, 3)})
    (part,) = findings_text.summary(found)
    assert part["sentences"][0]["text"].endswith("; the difference is not significant over 3 seeds.")


def test_a_single_seed_is_never_significant(tmp_path):
    found = two_methods(tmp_path, {1: {20: 50.0}}, {1: {20: 90.0}}, seeds=(1,))
    assert "; the difference is not significant over 1 seed." in findings_text.summary(found)[0]["sentences"][0]["text"]
    assert "Winners were confirmed with 1 seed only." in findings_text.caveats(found)


def test_more_comparisons_need_wider_intervals(tmp_path):
    found = two_methods(tmp_path, CURVES, {k: {20: 50.0 + k} for k in (1, 2, 3)})
    one, three = (findings_text.difference(*found.cells, comparisons=n) for n in (1, 3))
    assert three.high - three.low > one.high - one.low
    assert three.mean == one.mean == 10.0


def test_a_method_that_breaks_its_claim_cannot_lead(tmp_path):
    with writing(tmp_path, study(epsilons=[8], seeds={"confirm": [1, 2, 3]})) as writer:
        for method, score, fields in (("dp-fedgd", 50.0, {}), ("dp-fedadam", 90.0, {"epsilon_local": 9.0})):
            writer.search(method, 8, {"coarse": [({"learning_rate": 0.1}, 60.0)]})
            writer.confirm(method, 8, {"learning_rate": 0.1}, {k: {20: score + k} for k in (1, 2, 3)}, **fields)
    found = results(tmp_path)
    assert "DP-FedGD is the only method" in findings_text.summary(found)[0]["sentences"][0]["text"]
    broken = "DP-FedAdam at ε = 8: the actual ε exceeds the claimed ε"
    assert any(broken in text for text in findings_text.caveats(found))


def test_caveats_name_edges_shared_seeds_and_budgets_that_do_worse(tmp_path):
    with writing(tmp_path, study(methods=["dp-fedgd"], seeds={"search": 1, "confirm": [1, 2, 3]})) as writer:
        for epsilon, score in ((1, 90.0), (8, 80.0)):
            members = [({"learning_rate": rate}, 40 + 10 * rate) for rate in (0.1, 0.5, 1.0)]
            writer.search("dp-fedgd", epsilon, {"coarse": members})
            writer.confirm("dp-fedgd", epsilon, {"learning_rate": 1.0}, {k: {20: score + k / 10} for k in (1, 2, 3)})
    found = " ".join(findings_text.caveats(results(tmp_path)))
    assert "In 2 of 2 cells the winner lies on an edge" in found
    assert "(learning_rate ↑)" in found
    assert "DP-FedGD at ε = 8 is 10.00 worse than at ε = 1" in found
    assert "Search and confirm share seed 1," in found
    assert "Every ε covers one training run" in found
    assert "validation and test differ by more than 3 standard deviations" in found


def test_a_difference_between_few_validation_and_test_rows_is_not_a_caveat(tmp_path):
    """It is small compared with the standard error of the rows, but not with the deviation over seeds."""
    with writing(tmp_path, study(methods=["dp-fedgd"])) as writer:
        writer.search("dp-fedgd", 8, {"coarse": [({"learning_rate": 0.1}, 60.0)]})
        writer.confirm("dp-fedgd", 8, {"learning_rate": 0.1}, {k: {20: 57.0 + k / 1000} for k in (1, 2, 3)})
    assert "validation and test differ" not in " ".join(findings_text.caveats(results(tmp_path)))


def test_an_unfinished_study_says_so(tmp_path):
    with writing(tmp_path, study(methods=["dp-fedgd"])) as writer:
        writer.search("dp-fedgd", 1, {"coarse": [({"learning_rate": 0.1}, 60.0), ({"learning_rate": 1.0}, None)]})
    found = results(tmp_path)
    (missing,) = re.findall(r"The study is unfinished: about (\d+) trials are missing", findings_text.caveats(found)[0])
    known = status.read(tmp_path)
    assert known["trials_expected"] is None, "one of the two cells has not begun"
    assert int(missing) == sum(cell.search.missing for cell in found.cells) > 3
    assert findings_text.summary(found)[0]["sentences"][0]["text"] == (
        "At ε = 1 no method has finished all confirm seeds yet."
    )


def test_results_at_a_url(tmp_path, fedsweep):
    """The report is written next to them, and a server can follow them."""
    from orchestrator.report.html import serving

    reported.write(tmp_path / "there")
    url = (tmp_path / "there").as_uri()
    code, out, _ = fedsweep("report", url)
    assert (code, out.strip()) == (0, f"{url}/report.html")
    here = tmp_path / "here.html"
    assert fedsweep("report", tmp_path / "there", "--output", here)[0] == 0
    assert (tmp_path / "there" / "report.html").read_bytes() == here.read_bytes()
    assert serving.Following(url).current()[0]["studies"][0]["name"] == "there"

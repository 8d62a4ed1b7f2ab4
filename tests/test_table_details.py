"""Edge cases of the tables: few results, unfinished studies, secret runs."""

import math
from dataclasses import replace
from importlib import import_module

import pandas as pd
import pytest
import yaml
from handmade_ledgers import (
    GRID,
    HIGH,
    LAST,
    LOW,
    SETTING,
    build,
    caption,
    frame,
    lines,
    row,
    study,
    write_finished,
    writing,
)

from orchestrator.report.tables import Results, render
from orchestrator.report.tables.common import bold_best
from orchestrator.report.tables.differences import Difference, difference, shown_p
from orchestrator.report.tables.tuning import _rules, _seeds
from orchestrator.results import frames
from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import CellResult
from orchestrator.search.objective import ACCURACY
from trainables.privacy.gaussian import epsilon_of, mu_of

differences = import_module("orchestrator.report.tables.differences")  # the package calls a function so
mcnemar = import_module("orchestrator.report.tables.mcnemar")
privacy = import_module("orchestrator.report.tables.privacy")


def results_of(folder) -> Results:
    with Ledger.read(folder) as ledger:
        return Results.read(ledger)


# ---- a finished study


def test_a_single_finalist_is_not_compared():
    seeds = {"search": [1], "contest": [2], "confirm": [42]}
    several, one = (_rules(study(search={"select": "contest", "finalists": n}, seeds=seeds))[0] for n in (3, 1))
    assert several.startswith("The 3 configurations with the best")
    assert "were compared again on" in several
    assert one.startswith("The configuration with the best")
    assert "won, and ran again on" in one


def test_a_finished_study_has_no_caveats(tmp_path):
    """DP-FedGD scores 41.5 at both budgets, DP-FedAdam 50.5; both score 50 on the validation rows. Validation is
    50 - 41.5 and 50 - 50.5 above test, twice each: 4 on average."""
    whole = tmp_path
    write_finished(whole)
    build(whole)
    assert "Every search trial" not in caption(whole, "accuracy")
    assert "DP-FedGD has after round 20 at the same" in caption(whole, "rounds-to-95")
    assert "validation is 4.00 above test (-0.50 to 8.50)" in caption(whole, "selection")
    assert lines(whole, "selection")[3][1:3] == ["the same", "learning_rate = 0.1"]
    found = frame(whole, "selection")
    assert found["same"].all()
    assert found["difference"].tolist() == [8.5, -0.5, 8.5, -0.5]
    assert found["validation"].tolist() == [50.0] * 4
    assert found["validation_std"].isna().all(), "one seed has no deviation"

    assert frame(whole, "mcnemar")["reference_is"].tolist() == ["better", "better"]

    curves = frame(whole, "trade-off")
    alarms = sorted(curves["false_positives"].unique())
    assert (alarms[:4], alarms[-3:]) == ([0.0001, 0.001, 0.01, 0.05], [0.95, 0.99, 0.999])
    assert len(curves) == 4 * len(alarms)
    text = (whole / "tables" / "accuracy.md").read_text()
    assert len({len(line) for line in text.splitlines() if line.startswith("|")}) == 1, "columns under one another"


def test_file_names_are_short_and_distinct():
    assert render.slug("a" * 100) == "a" * 80
    assert list(render.endings(["a b", "A b", "a-b", "c"]).values()) == ["-a-b", "-a-b-2", "-a-b-3", "-c"]


@pytest.mark.parametrize("objective", ["accuracy", "squared_error"])
def test_a_study_that_has_grown_removes_the_tables_of_one_setting(tmp_path, objective):
    """Including the table that is named after the objective."""
    data = [{"source": "a", "label": "toy"}]
    for grown, settings in ((data, 1), ([*data, {"source": "b", "label": "other"}], 2)):
        of = study(data=grown, objective=objective, model="auto" if objective == "squared_error" else "softmax")
        for setting in ("toy / iid", "other / iid")[:settings]:
            with writing(tmp_path, of, setting=setting) as writer:
                writer.search("dp-fedgd", 1, {"coarse": [({}, None)]})
        build(tmp_path)
    stems = {path.stem for path in (tmp_path / "tables").iterdir()} - {"README", "trials", "seeds", "trade-off"}
    assert {stem for stem in stems if not stem.endswith(("-toy-iid", "-other-iid"))} == set()


def test_lines_of_best_yaml_wrap_at_120_characters(tmp_path):
    """The key takes 13, a label of 60 and a slash 63: a backbone of 44 ends at 120 and one word more follows; one of 45
    ends its line."""
    for length, rest in ((44, " /\n      iid"), (45, "\n      / iid")):
        label, backbone = "ε" * 60, "b" * length
        of = study(epsilons=[1], methods=["dp-fedgd"], data=[{"source": "a", "label": label, "backbone": backbone}])
        with writing(tmp_path / str(length), of, setting=f"{label} / {backbone} / iid") as writer:
            writer.search("dp-fedgd", 1, GRID)
            writer.confirm("dp-fedgd", 1, {"learning_rate": 0.1}, LOW)
        build(tmp_path / str(length))
        text = (tmp_path / str(length) / "best.yaml").read_text(encoding="utf-8")
        assert f"\n    setting: {label} / {backbone}{rest}\n" in text


def test_writing_a_table_creates_its_folders(tmp_path):
    assert render.write_text(tmp_path / "a" / "b" / "t.md", "text").read_text() == "text"


# ---- who is ahead


def cell_of(folder, scores: dict[str, list[float]], **changes) -> list[CellResult]:
    """Cells at eps 1 with these final scores, seed by seed; None: not ended."""
    confirm = list(range(max(map(len, scores.values()))))
    of = study(epsilons=[1], methods=list(scores), seeds={"confirm": confirm}, **changes)
    with writing(folder, of) as writer:
        for method, values in scores.items():
            writer.search(method, 1, GRID)
            curves = {seed: None if value is None else {LAST: value} for seed, value in enumerate(values)}
            writer.confirm(method, 1, {"learning_rate": 0.1}, curves)
    return list(results_of(folder).cells)


@pytest.mark.parametrize(
    ("low", "high", "clear"),
    [(0.5, 0.7, True), (-0.7, -0.5, True), (-0.5, 0.5, False), (0.0, 0.5, False), (-0.5, 0.0, False)],
)
def test_a_difference_is_clear_if_its_interval_excludes_zero(low, high, clear):
    """Zero must not be an end of the interval either."""
    assert Difference((low + high) / 2, low, high, 3, 0.5).clear is clear


def test_one_common_seed_gives_no_interval(tmp_path):
    ours, theirs = cell_of(tmp_path, {"dp-fedgd": [50.0, None], "dp-fedadam": [48.0, 47.0]})
    assert difference(ours, theirs) == Difference(2.0, -math.inf, math.inf, 1, 1.0)


def test_a_claim_holds_up_to_a_millionth(tmp_path):
    """A rounding error of the solver does not break a claim."""
    for actual, kept in ((1.0, True), (1 + 1e-6, True), (1.000002, False), (2.0, False), (0.5, True)):
        with writing(tmp_path / str(actual), study(epsilons=[1], methods=["dp-fedgd"])) as writer:
            writer.search("dp-fedgd", 1, GRID)
            writer.confirm("dp-fedgd", 1, {}, LOW, epsilon_local=actual)
        (cell,) = results_of(tmp_path / str(actual)).cells
        assert cell.keeps_its_claim is kept


def test_one_method_is_not_compared(tmp_path):
    write_variants(tmp_path, ["dp-fedgd"], {("dp-fedgd", "DP-FedGD"): [40.0, 41.0]})
    assert not (tmp_path / "tables" / "differences.md").exists()
    assert not (tmp_path / "tables" / "mcnemar.md").exists()


@pytest.mark.parametrize(("p", "shown"), [(0.0001, "0.0001"), (0.00009, "<0.0001"), (0.25, "0.2500")])
def test_p_values_have_four_digits(p, shown):
    assert shown_p(p) == shown


def test_a_p_value_of_exactly_five_percent_is_not_bold(tmp_path):
    cell, *_ = cell_of(tmp_path, {"dp-fedgd": [50.0, 51.0]})
    for p, bold in ((0.05, False), (0.0499, True)):
        over_seeds = differences._row(cell, Difference(1.0, 0.5, 1.5, 2, 0.01), p)[4]
        over_rows = mcnemar._row(cell, mcnemar.Comparison(3, 1, 4), p)[5]
        assert [isinstance(text, render.Bold) for text in (over_seeds, over_rows)] == [bold, bold]


# ---- larger budgets that did worse


def write_budgets(folder, found: dict[float, list[tuple[float, float]]], ends: dict[float, list[float]], **changes):
    """DP-FedGD at several budgets: (rate, validation score) of every configuration, and final scores."""
    of = study(epsilons=list(ends), methods=["dp-fedgd"], seeds={"confirm": [1, 2, 3]}, **changes)
    with writing(folder, of) as writer:
        for epsilon, scores in ends.items():
            grid = [({"learning_rate": rate}, score) for rate, score in found[epsilon]]
            writer.search("dp-fedgd", epsilon, {"coarse": grid, "fine": []})
            curves = {seed: {LAST: score} for seed, score in enumerate(scores, start=1)}
            writer.confirm("dp-fedgd", epsilon, {"learning_rate": 1.0}, curves)
    build(folder)


INSIDE = [(0.1, 40.0), (1.0, 45.0), (10.0, 40.0)]
WORSE = {1: [50.0, 50.1, 50.2], 8: [49.5, 49.6, 49.7]}


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (INSIDE, "it was chosen on one seed, which overrated it on the validation rows"),
        ([(0.1, 40.0), (1.0, 44.0), (10.0, 40.0)], "its search found nothing as good as the smaller budget's"),
        ([(0.1, 40.0), (1.0, 46.0), (10.0, 47.0)], "its winner lies on an edge of the search space (learning_rate ↑)"),
    ],
)
def test_the_reason_why_a_larger_budget_is_worse(tmp_path, found, why):
    """By half a percent on every seed."""
    write_budgets(tmp_path, {1: INSIDE, 8: found}, WORSE)
    warning = "DP-FedGD at ε = 8 is 0.50 worse than at ε = 1, a significant difference over the seeds"
    assert f"{warning}: {why}." in caption(tmp_path, "accuracy")


@pytest.mark.parametrize(
    "larger", [[50.5, 50.6, 50.7], [40.0, 60.0, 30.0]], ids=["a little better", "not significantly worse"]
)
def test_no_note_on_a_larger_budget_that_is_not_worse(tmp_path, larger):
    write_budgets(tmp_path, {1: INSIDE, 8: INSIDE}, {1: WORSE[1], 8: larger})
    assert "worse than" not in caption(tmp_path, "accuracy")


# ---- partition and noise


def write_partitions(folder, scores: dict[int, list[tuple[int, float]]], **seeds) -> None:
    """Confirm runs of DP-FedGD: by partition seed, their own seed and final score."""
    confirm = [seed for runs in scores.values() for seed, _ in runs]
    of = study(epsilons=[1], methods=["dp-fedgd"], seeds={"confirm": confirm, "partition": list(scores), **seeds})
    with writing(folder, of) as writer:
        writer.search("dp-fedgd", 1, GRID)
        keys = []
        for dealt, runs in scores.items():
            for seed, score in runs:
                trial = writer.trial("dp-fedgd", 1, {"learning_rate": 0.1}, seed, confirm=True)
                split = trial.problem.partition.model_copy(update={"seed": dealt})
                problem = trial.problem.model_copy(update={"partition": split})
                trial = trial.model_copy(update={"problem": problem})
                writer.ledger.add([row(trial, {LAST: score})])
                keys.append(trial.key)
        writer.ledger.add_stage(writer.cell("dp-fedgd", 1), "grid", "confirm", keys)
    build(folder)


def test_the_standard_deviation_of_a_study_is_split_in_a_table(tmp_path):
    """40, 42 and 50, 53: means 41 and 51.5, so within is 6.5 / 2 and between 4 * 5.25^2 = 110.25; the partition's
    variance is (110.25 - 3.25) / 2. Of all four it is 116.75 / 3."""
    write_partitions(tmp_path, {1: [(42, 40.0), (7, 42.0)], 2: [(3, 50.0), (4, 53.0)]})
    assert lines(tmp_path, "partitions")[0] == ["Method", "Partitions", "Runs", "Total", "Partition", "Noise"]
    assert lines(tmp_path, "partitions")[2] == ["DP-FedGD", "2", "4", "6.24", "7.31", "1.80"]
    assert "no partition has several runs" not in caption(tmp_path, "partitions")
    found = frame(tmp_path, "partitions").iloc[0]
    assert (found["partitions"], found["runs"]) == (2, 4)
    deviations = [math.sqrt(116.75 / 3), math.sqrt(53.5), math.sqrt(3.25)]
    assert found[["total_std", "partition_std", "noise_std"]].tolist() == pytest.approx(deviations)
    best = yaml.safe_load((tmp_path / "best.yaml").read_text())["cells"][f"{SETTING} / DP-FedGD / eps 1"]
    assert best["partition_seed"] == {42: 1, 7: 1, 3: 2, 4: 2}
    assert "over 4 seeds (42, 7, 3, 4) and 2 partitions" in caption(tmp_path, "accuracy")


def test_one_run_per_partition_cannot_be_split(tmp_path):
    write_partitions(tmp_path / "two", {1: [(42, 40.0)], 2: [(7, 43.0)]})
    assert lines(tmp_path / "two", "partitions")[2] == ["DP-FedGD", "2", "2", "2.12", "–", "–"]
    assert "no partition has several runs" in caption(tmp_path / "two", "partitions")
    found = frame(tmp_path / "two", "partitions").iloc[0]
    assert found["total_std"] == pytest.approx(3 / math.sqrt(2))
    assert found[["partition_std", "noise_std"]].isna().all()
    write_partitions(tmp_path / "one", {1: [(42, 40.0)]})
    assert lines(tmp_path / "one", "partitions")[2] == ["DP-FedGD", "1", "1", "–", "–", "–"]
    assert frame(tmp_path / "one", "partitions")["total_std"].isna().all()


def test_no_partition_table_if_all_runs_share_one(tmp_path):
    with writing(tmp_path, study(epsilons=[1], methods=["dp-fedgd"])) as writer:
        writer.search("dp-fedgd", 1, GRID)
        writer.confirm("dp-fedgd", 1, {"learning_rate": 0.1}, LOW)
    build(tmp_path)
    assert not (tmp_path / "tables" / "partitions.md").exists()
    best = yaml.safe_load((tmp_path / "best.yaml").read_text())["cells"][f"{SETTING} / DP-FedGD / eps 1"]
    assert best["partition_seed"] == 42
    assert "partition" not in caption(tmp_path, "accuracy")


# ---- privacy


def test_measurements_are_shown_as_means(tmp_path):
    """Over rounds and seeds: 10, 20 and 33 percent, norms of 0.012345 and 6.789."""
    with writing(tmp_path, study(epsilons=[1], methods=["dp-fedgd"], seeds={"confirm": [42]})) as writer:
        writer.search("dp-fedgd", 1, GRID)
        trial = writer.trial("dp-fedgd", 1, {"learning_rate": 0.1}, 42, confirm=True)
        measured = {
            "clipped_share": {10: 10.0, 15: 20.0, 20: 33.0},
            "signal_norm": {20: 0.012345},
            "noise_norm": {20: 6.789},
        }
        ended = row(trial, {10: 20.0, 20: 40.0})
        writer.ledger.add([replace(ended, metrics={**ended.metrics, **measured})])
        writer.ledger.add_stage(writer.cell("dp-fedgd", 1), "grid", "confirm", [trial.key])
    build(tmp_path)
    assert lines(tmp_path, "privacy")[2][-3:] == ["21.0", "0.0123", "6.79"]
    found = frame(tmp_path, "privacy").iloc[0]
    assert found["clipped_share"] == 21.0
    assert "over all cells" not in caption(tmp_path, "selection"), "there is only one"


def test_a_client_can_subtract_its_own_noise(tmp_path):
    """Three of four clients' noise is left: mu times the root of 4 / 3."""
    with writing(tmp_path, study(epsilons=[1], privacy={"release": "secure-aggregation"})) as writer:
        for method in ("dp-fedgd", "dp-fedadam"):
            writer.search(method, 1, {"coarse": GRID["coarse"]})
            writer.confirm(method, 1, {"learning_rate": 0.1}, LOW, epsilon_secure=1.0)
    build(tmp_path)
    worth = epsilon_of(mu_of(1, 1e-5) * math.sqrt(4 / 3), 1e-5)
    said = (
        caption(tmp_path, "privacy")
        .partition("against one of 4 clients a claimed ε of 1 is an actual ε of ")[2]
        .split(". ")[0]
    )
    assert worth <= float(said.rstrip(".")) < worth + 2e-3
    differs = frame(tmp_path, "differences").iloc[0]
    assert (differs["difference"], differs["p"]) == (0.0, 1.0), "the same scores"
    assert lines(tmp_path, "selection")[3][2] == "learning_rate = 0.1", "of two that were tried, and of nothing else"


@pytest.mark.parametrize(
    ("clients", "epsilon", "confirmed", "text"),
    [
        (2, 1, True, "against one of 2 clients a claimed ε of 1"),
        (1, 1, True, ""),
        (2, math.inf, True, ""),
        (2, 1, False, ""),
    ],
)
def test_the_epsilon_against_a_client_needs_several_clients_and_a_finite_budget(
    tmp_path, clients, epsilon, confirmed, text
):
    """Not with a single client, without noise, or before any run."""
    of = study(clients=clients, epsilons=[epsilon], methods=["dp-fedgd"], privacy={"release": "secure-aggregation"})
    with writing(tmp_path, of) as writer:
        writer.search("dp-fedgd", epsilon, GRID)
        if confirmed:
            writer.confirm("dp-fedgd", epsilon, {}, LOW, epsilon_secure=epsilon)
    build(tmp_path)
    found = caption(tmp_path, "privacy")
    assert ("can subtract its own noise" in found) == bool(text)
    assert text in found


def test_an_actual_epsilon_of_zero_has_mu_zero(tmp_path):
    with writing(tmp_path, study(epsilons=[1], methods=["dp-fedgd"])) as writer:
        writer.search("dp-fedgd", 1, GRID)
        writer.confirm("dp-fedgd", 1, {}, LOW, epsilon_local=0.0, epsilon_secure=0.0)
    with Ledger.read(tmp_path) as ledger:
        (cell,) = Results.read(ledger).cells
    assert privacy._other_units(list(cell.confirm.values())) == {"mu": 0.0, "rho_zcdp": 0.0}


# ---- results of a ledger


def test_a_diverged_run_counts_up_to_the_evaluation_before(tmp_path):
    with writing(tmp_path, study(epsilons=[1], methods=["dp-fedgd"], evaluate_every=1)) as writer:
        writer.search("dp-fedgd", 1, GRID)
        writer.confirm("dp-fedgd", 1, {}, {42: ("diverged", 20, {18: 30.0, 19: 31.0, 20: 1.0}), 7: None})
    (cell,) = results_of(tmp_path).cells
    assert cell.scores_at(18) == {42: 30.0}
    assert list(cell.curve) == [18, 19]


def test_nothing_is_missing_if_every_search_trial_diverged(tmp_path):
    with writing(tmp_path, study(epsilons=[1], methods=["dp-fedgd"])) as writer:
        writer.search("dp-fedgd", 1, {"coarse": [({"learning_rate": 0.1}, "diverged")]})
    (cell,) = results_of(tmp_path).cells
    assert (cell.search.missing, cell.search.more_to_come) == (0, False)


def test_cells_that_the_study_does_not_have_are_left_out(tmp_path):
    """A folder may hold cells of an earlier form of the study."""
    larger = study(methods=["dp-fedgd", "dp-fedadam"], data=[*study().data, {"source": "b", "label": "elsewhere"}])
    of = study(epsilons=[1], methods=["dp-fedgd"])
    for setting in ("elsewhere / iid", SETTING):
        with writing(tmp_path, larger, setting=setting) as writer:
            writer.search("dp-fedgd", 1, GRID)
            writer.search("dp-fedadam", 8, GRID)
    with Ledger.write(tmp_path) as ledger:
        ledger.add_study(of.model_dump_json(), "by hand")
    found = results_of(tmp_path)
    assert found.settings == (SETTING,)
    assert [(cell.method.name, cell.epsilon) for cell in found.cells] == [("dp-fedgd", 1)]


def test_unknown_validation_rows_count_as_one(tmp_path):
    """Of one row at 50% the standard error is 50, so 10 is near; of two it would be 35."""
    with writing(tmp_path, study(epsilons=[1], methods=["dp-fedgd"]), facts=False) as writer:
        writer.search("dp-fedgd", 1, {"coarse": [({"learning_rate": 0.1}, 50.0), ({"learning_rate": 1.0}, 10.0)]})
    build(tmp_path)
    (cell,) = results_of(tmp_path).cells
    assert cell.search.choice.within_standard_error == 2
    assert lines(tmp_path, "selection")[2][-1] == "–", "which is not shown"


def test_validation_may_be_a_little_above_test(tmp_path):
    cell_of(tmp_path, {"dp-fedgd": [49.5, 49.5], "dp-fedadam": [49.0, 50.0]})
    build(tmp_path)
    assert "over all cells, validation is 0.50 above test (0.50 to 0.50)" in caption(tmp_path, "selection")


@pytest.mark.parametrize(
    ("coarse", "fine", "extended"),
    [
        ((1.0,), (1.0, 3.0), "none"),  # a single coarse value has no edge
        ((1.0, 10.0), (0.5, 10.0), "learning_rate ↓ to 0.5"),
        ((1.0, 10.0), (1.0, 20.0), "learning_rate ↑ to 20"),
    ],
)
def test_only_values_beyond_an_edge_extend_a_grid(tmp_path, coarse, fine, extended):
    with writing(tmp_path, study(epsilons=[1], methods=["dp-fedgd"], search={"refine": "zoom"})) as writer:
        stages = {"coarse": coarse, "fine": fine}
        writer.search(
            "dp-fedgd", 1, {name: [({"learning_rate": r}, r) for r in rates] for name, rates in stages.items()}
        )
    build(tmp_path)
    assert lines(tmp_path, "hyperparameters")[2][5] == extended


def test_several_seeds_count_ties_without_the_number_of_rows(tmp_path):
    """Two configurations, 1 apart on one seed and level on the other: half a point, with a standard error of half."""
    of = study(epsilons=[1], methods=["dp-fedgd"], seeds={"search": [1, 2]})
    with writing(tmp_path, of, facts=False) as writer:
        keys = []
        for rate, scores in ((0.1, (50.0, 51.0)), (1.0, (50.0, 50.0))):
            for seed, score in enumerate(scores, start=1):
                trial = writer.trial("dp-fedgd", 1, {"learning_rate": rate}, seed, confirm=False)
                writer.ledger.add([row(trial, {LAST: score})])
                keys.append(trial.key)
        writer.ledger.add_stage(writer.cell("dp-fedgd", 1), "grid", "coarse", keys)
    build(tmp_path)
    assert lines(tmp_path, "hyperparameters")[2][-1] == "2"


def test_one_seed_is_singular():
    assert (_seeds([4]), _seeds([4, 5])) == ("seed 4", "seeds 4, 5")


# ---- few results


def test_missing_results_are_empty_and_not_zero(tmp_path):
    """DP-FedAdam has only been opened: no score, no seconds, no winner, and missing trials."""
    with writing(tmp_path, study(epsilons=[1], description="By hand.")) as writer:
        writer.search("dp-fedgd", 1, GRID)
        writer.confirm("dp-fedgd", 1, {"learning_rate": 0.1}, LOW)
        writer.search("dp-fedadam", 1, {"coarse": [({"learning_rate": 0.1}, None)]})
    build(tmp_path)
    found = frames.cells(results_of(tmp_path)).set_index("method")
    assert found["seeds"].tolist() == [2, 0]
    assert found.loc["DP-FedGD", ["validation_accuracy", "test_accuracy"]].tolist() == [50.0, 41.5]
    assert found.loc["DP-FedAdam", ["validation_accuracy", "test_accuracy", "std", "epsilon_actual"]].isna().all()
    assert found["missing"].tolist() == [0, 1 + 120 + 2], "the trial that was opened, the fine grid, confirm"
    assert frames.winners(results_of(tmp_path))["method"].tolist() == ["DP-FedGD"]
    timing = (tmp_path / "timing" / "seconds-per-round.md").read_text()
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in timing.splitlines() if "DP-Fed" in line]
    assert shown == [["DP-FedGD", "0.1", "2", "0.1", "3"], ["DP-FedAdam", "–", "0", "–", "0"]]
    seconds = pd.read_csv(tmp_path / "timing" / "seconds-per-round.csv").set_index("method")
    assert seconds.loc["DP-FedAdam", ["confirm_seconds", "search_seconds"]].isna().all()
    page = (tmp_path / "tables" / "README.md").read_text()
    assert "Study: By hand." in page
    assert "5 trials have finished." in page
    assert "## All tables" in page
    assert "private search" not in page


def test_one_trial_is_missing_and_two_trials_are(tmp_path):
    for name, came_to in (("one", {42: LOW[42], 7: None}), ("two", {42: None, 7: None})):
        with writing(tmp_path / name, study(epsilons=[1], methods=["dp-fedgd"])) as writer:
            writer.search("dp-fedgd", 1, GRID)
            writer.confirm("dp-fedgd", 1, {}, came_to)
        build(tmp_path / name)
    assert "The study is unfinished: 1 trial is missing." in caption(tmp_path / "one", "accuracy")
    assert "The study is unfinished: 2 trials are missing." in caption(tmp_path / "two", "accuracy")


def reused(folder, earlier: Results) -> list[bool]:
    """For every cell, whether the earlier object is reused; the results equal those of a fresh read."""
    with Ledger.read(folder) as ledger:
        found, fresh = Results.read(ledger, earlier), Results.read(ledger)
    assert found.states == fresh.states
    assert [replace(cell) for cell in found.cells] == list(fresh.cells)
    return [cell is before for cell, before in zip(found.cells, earlier.cells, strict=True)]


def test_unchanged_cells_are_reused_from_an_earlier_read(tmp_path):
    """With every search strategy. A cell is read again if another trial has ended or the number of rows has changed."""
    of = study(epsilons=[1], methods=["dp-fedgd"], search={"strategies": ["grid", "random"]})
    with writing(tmp_path, of) as writer:
        writer.search("dp-fedgd", 1, GRID)
        writer.confirm("dp-fedgd", 1, {"learning_rate": 0.1}, {42: LOW[42], 7: None})
        writer.search("dp-fedgd", 1, {"random": [({"learning_rate": 0.7}, 30.0)]}, "random")
        writer.confirm("dp-fedgd", 1, {"learning_rate": 0.7}, HIGH, "random")
    earlier = results_of(tmp_path)
    assert reused(tmp_path, earlier) == [True, True]
    with Ledger.write(tmp_path) as ledger:
        trial = writer.trial("dp-fedgd", 1, {"learning_rate": 0.1}, 7, confirm=True)
        ledger.add([row(trial, LOW[7])])
    assert reused(tmp_path, earlier) == [False, True]
    other = replace(earlier, study=earlier.study.model_copy(update={"description": "another"}))
    assert reused(tmp_path, other) == [False, False]


def test_frames_have_every_trial_of_every_stage_once(tmp_path):
    with writing(tmp_path, study(epsilons=[1], methods=["dp-fedgd"])) as writer:
        writer.search("dp-fedgd", 1, GRID)
        writer.confirm("dp-fedgd", 1, {"learning_rate": 0.1}, LOW)
    with Ledger.read(tmp_path) as ledger:
        results = Results.read(ledger)
        trials, rounds = frames.trials(ledger, results), frames.rounds(ledger, results)
        confirmed = frames.rounds(ledger, results, "confirm")
    assert trials["stage"].tolist() == ["coarse", "coarse", "fine", "confirm", "confirm"]
    assert trials["seed"].tolist() == [42, 42, 42, 42, 7]
    assert trials["learning_rate"].tolist() == [0.1, 1.0, 0.3, 0.1, 0.1]
    assert rounds["round"].tolist() == [20, 20, 20, 10, 20, 10, 20]
    assert confirmed["accuracy"].tolist() == [20.0, 40.0, 24.0, 43.0]


def test_frames_read_trials_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(frames, "CHUNK", 2)
    test_frames_have_every_trial_of_every_stage_once(tmp_path)


def test_configurations_are_trials_without_their_seeds(tmp_path):
    """In the order of their trials, with the number of seeds, the number done, mean and standard deviation."""
    with writing(tmp_path, study(epsilons=[1], methods=["dp-fedgd", "dp-fedadam"])) as writer:
        for method in ("dp-fedgd", "dp-fedadam"):
            writer.search(method, 1, {"coarse": [({"learning_rate": 1.0}, "failed"), ({"learning_rate": 0.1}, 45.0)]})
            actual = {42: 0.5, 7: 0.25}
            keys = []
            for seed, epsilon in actual.items():
                trial = writer.trial(method, 1, {"learning_rate": 0.1}, seed, confirm=True)
                writer.ledger.add([row(trial, LOW[seed], epsilon_local=epsilon)])
                keys.append(trial.key)
            writer.ledger.add_stage(writer.cell(method, 1), "grid", "confirm", keys)
    with Ledger.read(tmp_path) as ledger:
        found = frames.configurations(frames.trials(ledger, Results.read(ledger)))
    assert found["method"].tolist() == ["DP-FedGD"] * 3 + ["DP-FedAdam"] * 3
    assert found["stage"].tolist() == ["coarse", "coarse", "confirm"] * 2
    assert found["learning_rate"].tolist() == [1.0, 0.1, 0.1] * 2
    assert (found["seeds"].tolist(), found["done"].tolist()) == ([1, 1, 2] * 2, [0, 1, 2] * 2)
    assert found["accuracy"].tolist()[1:3] == [45.0, 41.5]
    assert found["accuracy_std"].tolist()[2] == pytest.approx(3 / math.sqrt(2))
    assert not [name for name in found if name.startswith("epsilon_")], "runs of a configuration may differ in them"


@pytest.mark.parametrize(
    ("values", "marked"),
    [([1.0, 2.0, None], [1]), ([None, 2.0, None], []), ([2.001, 2.0, 1.0], [0, 1]), ([None, None, None], [])],
)
def test_a_single_value_is_not_bold(values, marked):
    bold = bold_best(["a", "b", "c"], values, ACCURACY)
    assert [k for k, text in enumerate(bold) if type(text) is not str] == marked


# ---- a private search, written by hand


@pytest.fixture
def private(tmp_path):
    """Three runs, of which the second wins by far: at this budget the noise does not matter."""
    of = study(
        epsilons=[1000], methods=["dp-fedgd"], search={"strategies": ["private"], "trials": 3, "refine": "table"}
    )
    with writing(tmp_path, of) as writer:
        runs = [({"learning_rate": rate}, score) for rate, score in ((0.1, 10.0), (1.0, 60.0), (10.0, 20.0))]
        writer.search("dp-fedgd", 1000, {"private": runs}, strategy="private")
        writer.confirm("dp-fedgd", 1000, {"learning_rate": 1.0}, {42: HIGH[42]}, strategy="private")
    build(tmp_path)
    return tmp_path


def test_only_the_winner_of_a_private_search_is_shown(private):
    page = (private / "tables" / "README.md").read_text()
    assert "1 of 1 winners are known" in page
    assert "This is a private search" in page
    assert "with noisy scores" in page
    best = (private / "best.yaml").read_text()
    assert "--secret-noise" in best
    (entry,) = yaml.safe_load(best)["cells"].values()
    assert (entry["seeds"], entry["test_accuracy"]) == ([], 50.0)
    assert entry["hyperparameters"] == {"learning_rate": 1.0}
    assert "the single published run, with secret noise" in caption(private, "accuracy")
    assert "rows together" not in caption(private, "privacy"), "there is one"
    with Ledger.read(private) as ledger:
        results = Results.read(ledger)
        shown = frames.trials(ledger, results)
        assert frames.rounds(ledger, results, "coarse").empty
    assert reused(private, results) == [False], "secret results are never reused"
    assert shown["stage"].tolist() == ["confirm"]
    assert shown["seed"].isna().all()
    assert frames.cells(results)["trials"].tolist() == [1]


def test_the_winner_of_a_private_search_counts_as_one_run(private, tmp_path):
    """Whatever the number of runs; without a winner the count is zero."""
    (cell,) = results_of(private).cells
    search = cell.search
    assert (search.trials, search.trial_rounds, search.found_in) == (1, 0, ("private",))
    assert dict(search.states) == {"done": 1}
    of = study(epsilons=[1000], methods=["dp-fedgd"], search={"strategies": ["private"], "trials": 3})
    with writing(tmp_path / "none", of) as writer:
        writer.search("dp-fedgd", 1000, {"private": [({"learning_rate": 0.1}, "diverged")]}, strategy="private")
    (cell,) = results_of(tmp_path / "none").cells
    search = cell.search
    assert (search.trials, search.trial_rounds, search.found_in) == (0, 0, ())
    assert not search.states
    assert (cell.search.missing, cell.search.more_to_come) == (0, False)


def test_best_says_how_to_train_a_winner_again(tmp_path):
    with writing(tmp_path, study(epsilons=[1], methods=["dp-fedgd"])) as writer:
        writer.search("dp-fedgd", 1, GRID)
        writer.confirm("dp-fedgd", 1, {"learning_rate": 0.1}, LOW)
    build(tmp_path)
    text = (tmp_path / "best.yaml").read_text()
    assert "--seed SEED" in text
    assert text.index("method:") < text.index("hyperparameters:") < text.index("test_accuracy:"), (
        "the configuration comes first"
    )


# ---- methods with and without options


def write_variants(folder, methods_of_study, scores: dict[tuple[str, str], list[float]]) -> None:
    """Final scores of seeds 42 and 7, by method and label; each has a different learning rate."""
    with writing(folder, study(epsilons=[1], methods=methods_of_study)) as writer:
        for number, ((method, label), (first, second)) in enumerate(scores.items()):
            hypers = {"learning_rate": 0.1 * (number + 1)}
            writer.search(method, 1, {"coarse": [(hypers, 50.0)], "fine": [(hypers, 50.0)]}, label=label)
            writer.confirm(method, 1, hypers, {42: {LAST: first}, 7: {LAST: second}}, label=label)
    build(folder)


def test_the_effect_of_options_is_a_sentence(tmp_path):
    """DP-FedGD gains 10, DP-FedSOFIM 5.5, which leads by 4.5 on either seed. DP-FedYogi, which has no plain
    variant, is in no average but may be the best first-order method."""
    own = {"preprocess": {"center": 0.02, "bound": 16}, "aggregate": "size"}
    methods_of_study = ["dp-fedgd", "dp-fedsofim", {"dp-fedgd": own}, {"dp-fedsofim": own}, {"dp-fedyogi": own}]
    scores = {
        ("dp-fedgd", "DP-FedGD"): [40.0, 41.0],
        ("dp-fedsofim", "DP-FedSOFIM"): [44.5, 45.5],
        ("dp-fedgd", "DP-FedGD, centred, size-weighted"): [50.0, 51.0],
        ("dp-fedsofim", "DP-FedSOFIM, centred, size-weighted"): [50.2, 50.8],
        ("dp-fedyogi", "DP-FedYogi, centred, size-weighted"): [52.0, 53.0],
    }
    write_variants(tmp_path, methods_of_study, scores)
    for text in (caption(tmp_path, "accuracy"), (tmp_path / "tables" / "README.md").read_text()):
        assert "Effect of 'centred, size-weighted': +7.75 on average over 2 methods (+5.50 to +10.00) at ε = 1." in text
        orders = "Second-order against first-order methods"
        assert f"{orders}, without options: at ε = 1 DP-FedSOFIM is ahead of DP-FedGD by 4.50." in text
        behind = "DP-FedSOFIM is behind DP-FedYogi by 2.00 (not significant over the seeds)."
        assert f"{orders}, centred, size-weighted: at ε = 1 {behind}" in text


def test_other_changes_are_named_next_to_the_options(tmp_path):
    """A smaller clip and another grid; variants of a method are compared with their counterparts."""
    own = {"aggregate": "size", "clip": 4, "coarse": {"learning_rate": [0.1, 0.3]}}
    methods_of_study = ["dp-fedgd", "dp-fedadam", {"dp-fedadam": {"label": "slow", "fixed": {"tau": 0.1}}}]
    scores = {
        ("dp-fedgd", "DP-FedGD"): [40.0, 41.0],
        ("dp-fedadam", "DP-FedAdam"): [40.0, 41.0],
        ("dp-fedadam", "slow"): [20.0, 21.0],
        ("dp-fedgd", "DP-FedGD, size-weighted"): [50.0, 51.0],
        ("dp-fedadam", "DP-FedAdam, size-weighted"): [60.0, 61.0],
    }
    write_variants(tmp_path, [*methods_of_study, {"dp-fedgd": own}, {"dp-fedadam": {"aggregate": "size"}}], scores)
    besides = "clip 4 instead of 10 and another grid for DP-FedGD, size-weighted"
    gains = "+15.00 on average over 2 methods (+10.00 to +20.00)"
    assert f"Effect of 'size-weighted', with {besides}: {gains} at ε = 1." in caption(tmp_path, "accuracy")


def test_equal_scores_are_level(tmp_path):
    """One method gains 10: no average is needed. Second order is level without options and 0.5 ahead size-weighted."""
    own = {"aggregate": "size"}
    scores = {
        ("dp-fedgd", "DP-FedGD"): [40.0, 41.0],
        ("dp-fedsofim", "DP-FedSOFIM"): [40.5, 40.5],
        ("dp-fedgd", "DP-FedGD, size-weighted"): [50.0, 51.0],
        ("dp-fednew", "DP-FedNew, size-weighted"): [50.5, 51.5],
    }
    methods_of_study = ["dp-fedgd", "dp-fedsofim", {"dp-fedgd": own}, {"dp-fednew": own}]
    write_variants(tmp_path, methods_of_study, scores)
    text = caption(tmp_path, "accuracy")
    assert "Effect of 'size-weighted': +10.00 at ε = 1." in text
    level = "DP-FedSOFIM is level with DP-FedGD (not significant over the seeds)"
    assert f"Second-order against first-order methods, without options: at ε = 1 {level}." in text
    ahead = "DP-FedNew is ahead of DP-FedGD by 0.50"
    assert f"Second-order against first-order methods, size-weighted: at ε = 1 {ahead}." in text


def test_the_best_of_several_methods_needs_a_wider_lead(tmp_path):
    """Ahead by 2 and 2.25: t = 17 of one degree of freedom, beyond 12.7 of one comparison, not 25.5 of two."""
    own = {"aggregate": "size"}
    scores = {
        ("dp-fedgd", "DP-FedGD"): [40.0, 41.0],
        ("dp-fedsofim", "DP-FedSOFIM"): [42.0, 43.25],
        ("dp-fednew", "DP-FedNew"): [30.0, 31.0],
        ("dp-fedgd", "DP-FedGD, size-weighted"): [50.0, 51.0],
        ("dp-fedsofim", "DP-FedSOFIM, size-weighted"): [52.0, 53.25],
    }
    methods_of_study = ["dp-fedgd", "dp-fedsofim", "dp-fednew", {"dp-fedgd": own}, {"dp-fedsofim": own}]
    write_variants(tmp_path, methods_of_study, scores)
    text = caption(tmp_path, "accuracy")
    assert (
        "without options: at ε = 1 DP-FedSOFIM is ahead of DP-FedGD by 2.12 (not significant over the seeds)." in text
    )
    assert "size-weighted: at ε = 1 DP-FedSOFIM is ahead of DP-FedGD by 2.12." in text


def test_no_effect_of_options_without_a_plain_variant(tmp_path):
    own = {"aggregate": "size"}
    scores = {("dp-fedgd", "DP-FedGD"): [40.0, 41.0], ("dp-fedsofim", "DP-FedSOFIM, size-weighted"): [44.5, 45.5]}
    write_variants(tmp_path, ["dp-fedgd", {"dp-fedsofim": own}], scores)
    assert "Effect of" not in caption(tmp_path, "accuracy")
    assert "Second-order" not in caption(tmp_path, "accuracy")


def test_methods_run_as_released_are_never_bold_in_rounds_to_95(tmp_path):
    """The method run as released reaches the target first, with too little noise for its claim."""
    of = study(epsilons=[1], methods=["dp-fedgd", "dp-fedadam", {"dp-fedfc": {"fixed": {"as_released": True}}}])
    with writing(tmp_path, of) as writer:
        for method, curve in (("dp-fedgd", {10: 10.0, LAST: 40.0}), ("dp-fedadam", {10: 20.0, LAST: 50.0})):
            writer.search(method, 1, GRID)
            writer.confirm(method, 1, {"learning_rate": 0.1}, {42: curve, 7: curve})
        hypers = {"learning_rate": 0.1, "as_released": True}
        label = "DP-FedFC (as released)"
        writer.search("dp-fedfc", 1, {"coarse": [(hypers, 50.0)]}, label=label)
        early = {10: 45.0, LAST: 50.0}
        writer.confirm("dp-fedfc", 1, hypers, {42: early, 7: early}, label=label)
    build(tmp_path)
    assert [row[-1] for row in lines(tmp_path, "rounds-to-95")[-3:]] == ["**20**", "**20**", "10"]

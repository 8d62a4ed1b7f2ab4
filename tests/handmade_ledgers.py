"""Ledgers with results set by the test, so that every number in a table can be derived from the test."""

import json
import sqlite3
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd

from orchestrator.report.tables import write_tables
from orchestrator.results.ledger import Ledger, Row, SettingFacts
from orchestrator.study.cell_id import CellId, SettingId
from orchestrator.study.study import Study
from trainables import methods
from trainables.data import partition
from trainables.federation.trial_spec import DataSpec, ProblemSpec, TrialSpec
from trainables.privacy.plan import PrivacySettings

SETTING = "toy / iid"


TEST_ROWS, VALIDATION_ROWS = 20, 100


LAST = 20


def study(**changes) -> Study:
    """Two methods, two budgets, two seeds, evaluated at rounds 10 and 20."""
    return Study.model_validate(
        {
            "name": "by-hand",
            "data": [{"source": "synthetic-frozen:600,20,12,4", "label": "toy"}],
            "partitions": ["iid"],
            "clients": 4,
            "methods": ["dp-fedgd", "dp-fedadam"],
            "defaults": "paper",
            "epsilons": [1, 8],
            "rounds": {"coarse": 20, "fine": 20, "confirm": LAST},
            **changes,
            "seeds": {"search": 42, "contest": [], "confirm": [42, 7], **changes.get("seeds", {})},
            "search": {"refine": "table", **changes.get("search", {})},
        }
    )


def setting_id(of: Study, name: str) -> SettingId:
    return next(setting for setting, shown in of.settings.items() if shown == name)


def cell_id(of: Study, method: str, epsilon: float, setting: str = SETTING) -> CellId:
    """The id of a cell, given the method's name in tables."""
    (method_id,) = (each.id for each in of.methods if each.shown == method)
    return CellId(*setting_id(of, setting), method_id, epsilon)


class Writer:
    """Fills a ledger as a sweep does, with results that the test sets."""

    def __init__(
        self, ledger: Ledger, of: Study, setting: str = SETTING, facts: bool = True, protected: int = 10
    ) -> None:
        self.ledger, self.study, self.setting = ledger, of, setting
        if facts:
            ledger.add_settings({setting_id(of, setting): SettingFacts(VALIDATION_ROWS, TEST_ROWS, protected)})

    def trial(self, method: str, epsilon: float, hypers: dict, seed: int, confirm: bool, partition_text: str = "iid"):
        return TrialSpec(
            problem=ProblemSpec(
                data=DataSpec(fingerprint="by hand"),
                partition=partition.parse(partition_text, clients=self.study.clients, seed=42),
                train_on="all" if confirm else "train",
                evaluate_on="test" if confirm else "validation",
            ),
            method=method,
            hyperparameters=methods.get(method).check(hypers),
            privacy=PrivacySettings(epsilon=epsilon, release=self.study.privacy.release),
            rounds=LAST,
            seed=seed,
        )

    def cell(self, method: str, epsilon: float, label: str = "") -> CellId:
        return cell_id(self.study, label or methods.get(method).title, epsilon, self.setting)

    def search(self, method, epsilon, stages, strategy="grid", label=""):
        """stages: name -> [(hyperparameters, validation accuracy or state or None if not ended yet)]."""
        for stage, members in stages.items():
            keys = []
            for hypers, outcome in members:
                trial = self.trial(method, epsilon, hypers, 42, confirm=False)
                keys.append(trial.key)
                if isinstance(outcome, str):
                    self.ledger.add([row(trial, {}, state=outcome)])
                elif outcome is not None:
                    self.ledger.add([row(trial, {LAST: outcome})])
            self.ledger.add_stage(self.cell(method, epsilon, label), strategy, stage, keys)

    def confirm(self, method, epsilon, hypers, curves, strategy="grid", label="", correct=None, **fields):
        """curves: seed -> {round: test accuracy}, or (state, rounds, curve), or None if not ended yet."""
        keys = []
        for seed, outcome in curves.items():
            trial = self.trial(method, epsilon, hypers, seed, confirm=True)
            keys.append(trial.key)
            state, rounds, curve = outcome if isinstance(outcome, tuple) else ("done", LAST, outcome)
            if curve is not None:
                bits = (correct or {}).get(seed, b"")
                self.ledger.add([row(trial, curve, state=state, rounds=rounds, correct=bits, **fields)])
        self.ledger.add_stage(self.cell(method, epsilon, label), strategy, "confirm", keys)


def row(
    trial: TrialSpec, curve: dict[int, float], *, state="done", rounds=LAST, correct=b"", measured=None, **fields
) -> Row:
    """`measured`: further metrics, each with its value at the last round or its values by round."""
    done = state == "done"
    further = {name: value if isinstance(value, dict) else {LAST: value} for name, value in (measured or {}).items()}
    return Row(
        key=trial.key,
        spec=trial.model_dump_json(),
        state=state,
        reason="",
        rounds=rounds,
        accuracy=curve[LAST] if done else None,
        loss=1.0 if done else None,
        metrics={"accuracy": curve, **further},
        **{
            "epsilon_claimed": trial.privacy.epsilon,
            "epsilon_local": trial.privacy.epsilon,
            "epsilon_secure": trial.privacy.epsilon / 2,
            "epsilon_unsampled": fields.get("epsilon_local", trial.privacy.epsilon),
            "seconds": 2.0,
            **fields,
        },
        correct=correct,
    )


@contextmanager
def writing(folder: Path, of: Study, **options):
    with Ledger.write(folder) as ledger:
        ledger.add_study(of.model_dump_json(), "by hand")
        yield Writer(ledger, of, **options)


def build(folder: Path) -> list[Path]:
    with Ledger.read(folder) as ledger:
        return write_tables(ledger, folder)[0]


def lines(folder: Path, name: str) -> list[list[str]]:
    """The rows of a Markdown table, stripped; group headings have empty cells."""
    text = (folder / "tables" / f"{name}.md").read_text(encoding="utf-8")
    rows = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line] for line in rows if not set(line[0]) <= set("-: ")]


def caption(folder: Path, name: str) -> str:
    return (folder / "tables" / f"{name}.md").read_text(encoding="utf-8").split("\n\n")[1]


def frame(folder: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(folder / "tables" / f"{name}.csv")


GRID = {
    "coarse": [({"learning_rate": 0.1}, 50.0), ({"learning_rate": 1.0}, 40.0)],
    "fine": [({"learning_rate": 0.3}, 45.0)],
}


LOW, HIGH = {42: {10: 20.0, 20: 40.0}, 7: {10: 24.0, 20: 43.0}}, {42: {10: 39.0, 20: 50.0}, 7: {10: 41.0, 20: 51.0}}


def write_finished(folder: Path, of: Study | None = None, **options) -> None:
    """DP-FedGD reaches 41.5 at either budget, DP-FedAdam 50.5."""
    with writing(folder, of or study(), **options) as writer:
        for epsilon in writer.study.epsilons:
            for method, curves in (("dp-fedgd", LOW), ("dp-fedadam", HIGH)):
                writer.search(method, epsilon, GRID)
                correct = {42: np.packbits(np.arange(TEST_ROWS) < curves[42][20] * TEST_ROWS / 100).tobytes()}
                writer.confirm(method, epsilon, {"learning_rate": 0.1}, curves, correct=correct)


def change(folder, statement, *values):
    """Change a ledger behind the program's back."""
    connection = sqlite3.connect(folder / "ledger.sqlite")
    connection.execute(statement, values)
    connection.commit()
    connection.close()


def change_json(folder, table, column, edit):
    """As `change`, of the JSON in every row. `edit`: changes the content in place."""
    connection = sqlite3.connect(folder / "ledger.sqlite")
    for row, text in connection.execute(f"SELECT rowid, {column} FROM {table}").fetchall():
        content = json.loads(text)
        edit(content)
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (json.dumps(content), row))
    connection.commit()
    connection.close()

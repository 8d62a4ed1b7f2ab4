"""Rows of a ledger that no trial has computed."""

from orchestrator.results.ledger import Row

SPEC = '{"hyperparameters":{},"privacy":{"clip":1.0},"rounds":10,"stop_after":null,"seed":1}'
HAS_KEY = "number = (SELECT number FROM trial_keys WHERE key = ?)"
"""Selects a row of `trials`."""
METRICS = {"accuracy": {10: 50.0}, "loss": {10: 1.5}}


def row(number: int, state: str = "done") -> Row:
    return Row(f"{number:024x}", SPEC, state, "", 10, 50.0, 1.5, METRICS, 1.0, 1.0, 0.25, 0.5, 0.5)

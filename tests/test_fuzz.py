"""What comes from outside may be anything: it is understood, or refused in one sentence, and never anything else.

`make test` tries a few hundred inputs, `make fuzz` ten thousand of each kind.
"""

import io
import os
import sqlite3
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.report import status
from orchestrator.results.ledger import Ledger
from orchestrator.study import reading
from orchestrator.study.settings import Study
from trainables.data import features
from trainables.errors import UserError

tried = settings(
    max_examples=int(os.environ.get("FEDSWEEP_FUZZ", "100")),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
STUDY = {
    "name": "fuzz",
    "data": [{"source": "synthetic-frozen:60,20,3,2", "label": "toy"}],
    "partitions": ["iid", "dirichlet:0.5"],
    "clients": 4,
    "methods": ["dp-fedgd", {"dp-fedadam": {"fixed": {"tau": 0.01}}}],
    "epsilons": [1, "mu=0.5"],
    "privacy": {"clip": 1.0, "delta": 1e-5},
    "rounds": {"coarse": 4, "fine": 4, "confirm": 6},
    "seeds": {"search": 1, "confirm": [42, 7]},
    "search": {"ways": ["grid"]},
    "evaluate_every": 2,
}
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["../../etc/passwd", "", " ", "nan", "1e400", "-0", "\x00", "s3://", "dp-fedgd", "auto", "mu="])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def places(value, path=()):
    """Every place in a nested structure."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def put(value, path, new):
    """A copy with something else at one place."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(value[path[0]], path[1:], new)
    return copy


def sentence_of(work, *given) -> str:
    """What is said of it, or nothing where it is understood. Any other error is one that a user would see whole."""
    try:
        work(*given)
    except UserError as error:
        return str(error).strip() or "refused without a word"
    return ""


def understood_or_refused(text: str, folder: Path) -> None:
    assert "without a word" not in sentence_of(reading.parse, text, "study.yaml", folder)


@tried
@given(st.lists(st.tuples(st.sampled_from(sorted(places(STUDY), key=repr)), values), min_size=1, max_size=3))
def test_a_study_that_is_wrong_somewhere(tmp_path, changes):
    changed = STUDY
    for path, new in changes:
        if path in set(places(changed)):
            changed = put(changed, path, new)
    understood_or_refused(yaml.safe_dump(changed, allow_unicode=True), tmp_path)


@tried
@given(st.text(alphabet=st.sampled_from("abc:-[]{}&*!|>#'\"\n \t%@,?01.~"), max_size=60) | st.text(max_size=60))
def test_a_study_that_is_any_text(tmp_path, text):
    understood_or_refused(text, tmp_path)
    understood_or_refused(f"{yaml.safe_dump(STUDY)}\n{text}", tmp_path)


def damaged(whole: bytes, cuts: list[tuple[float, bytes]], end: float) -> bytes:
    """Bytes overwritten here and there, and the rest cut off."""
    found = bytearray(whole)
    for where, new in cuts:
        start = int(where * len(found))
        found[start : start + len(new)] = new
    return bytes(found[: int(end * len(found)) + 1])


damage = st.tuples(
    st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=8)), max_size=4),
    st.sampled_from([1.0, 1.0, 1.0, 0.9, 0.5, 0.1, 0.0]),
)


@tried
@given(damage)
def test_a_feature_file_that_is_damaged(tmp_path, how):
    buffer = io.BytesIO()
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((20, 3)).astype(np.float32), np.arange(20) % 2
    np.savez(buffer, x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    file = tmp_path / "damaged.npz"
    file.write_bytes(damaged(buffer.getvalue(), *how))
    said = sentence_of(features.load, str(file))
    assert not said or "damaged.npz" in said


@pytest.fixture(scope="module")
def ledger_bytes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with Ledger.write(folder) as ledger:
        ledger.add_study(Study.model_validate({**STUDY, "methods": ["dp-fedgd"]}).model_dump_json(), "text")
        ledger.add_facts({"validation_rows:toy / iid": 6})
    with sqlite3.connect(folder / "ledger.sqlite") as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return (folder / "ledger.sqlite").read_bytes()


@tried
@given(damage)
def test_a_ledger_that_is_damaged(tmp_path, ledger_bytes, how):
    for file in tmp_path.glob("ledger*"):
        file.unlink()
    (tmp_path / "ledger.sqlite").write_bytes(damaged(ledger_bytes, *how))
    said = sentence_of(status.read, tmp_path)
    assert not said or str(tmp_path) in said

"""Results of the engine do not change unnoticed."""

import copy
import json

import goldens
import pytest


@pytest.mark.parametrize("kind", goldens.COMPUTED)
def test_results_are_what_they_were(kind):
    """If a change is intended: raise ENGINE_VERSION in trainables/spec.py, then `make goldens`."""
    assert goldens.differences(json.loads(goldens.FILE.read_text()), goldens.computed(kind)) == []


def test_a_change_is_named():
    old = json.loads(goldens.FILE.read_text())
    new = copy.deepcopy(old)
    new["exact"]["participants"] = "others"
    projection, length = new["close"]["dp-fedgd, record level"]
    new["close"]["dp-fedgd, record level"] = [projection + 2 * goldens.CLOSE * length, length]
    new["close"]["dp-fedadam, record level"][0] += 0.1 * goldens.CLOSE * new["close"]["dp-fedadam, record level"][1]
    del new["exact"]["validation rows"]
    named = goldens.differences(old, new)
    assert [line.split(": ")[0] for line in named] == ["validation rows", "participants", "dp-fedgd, record level"]

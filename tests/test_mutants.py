"""The mutants that were once undetected still apply to the code."""

import json

import mutants


def test_every_named_mutant_applies():
    """Where this fails, update `tests/mutants_named.json`; `python tests/mutants.py --named` runs its entries."""
    for named in json.loads(mutants.NAMED.read_text()):
        assert named["old"] in (mutants.ROOT / named["module"]).read_text(), f"{named['module']}: {named['old']}"
        assert all((mutants.ROOT / test).exists() for test in named["tests"] if "/" in test), named["tests"]

"""The identity of the code that computes results."""

import pytest

from trainables import code_identity
from trainables.code_identity import OtherCodeError, check, differences, digest


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A small package in place of `trainables`."""
    (tmp_path / "c").mkdir()
    (tmp_path / "step.py").write_text("rate = 1.0\n")
    (tmp_path / "c" / "sums.c").write_text("float sum;\n")
    (tmp_path / "notes.txt").write_text("of no consequence\n")
    monkeypatch.setattr(code_identity, "PACKAGE", tmp_path)
    code_identity._hash_of_package.cache_clear()
    yield tmp_path
    code_identity._hash_of_package.cache_clear()


@pytest.mark.parametrize(
    ("file", "changes"), [("step.py", True), ("c/sums.c", True), ("notes.txt", False), ("new.py", True)]
)
def test_every_source_file_counts(package, file, changes):
    before = code_identity.package_identity()
    with (package / file).open("a") as out:
        out.write("more\n")
    assert code_identity.package_identity() == before, "what this process has loaded"
    code_identity._hash_of_package.cache_clear()
    after = code_identity.package_identity()
    assert (digest(after) != digest(before)) == changes
    assert ("package trainables is" in differences(before, after)) == changes


def test_libraries_that_compute_results_are_compared():
    assert {"torch", "numpy", "scipy", "processor"} <= code_identity.package_identity().keys()
    identity = code_identity.code_identity("compiled abc")
    assert digest(identity) != digest({**identity, "kernel": "compiled abd"})
    assert digest(identity, "NVIDIA H200") != digest(identity, "NVIDIA A10")


def test_differences_are_named_with_both_values():
    expected = {"torch": "2.8", "numpy": "2.3", "plug-in mine": "abc"}
    assert differences(expected, expected) == ""
    assert differences(expected, {"torch": "2.9", "numpy": "2.3"}) == (
        "torch is 2.9 instead of 2.8, plug-in mine is missing instead of abc"
    )


def test_a_process_without_the_plug_ins_is_compared_by_what_it_has():
    """A slot loads no plug-ins; the actors that compute do."""
    expected = {"torch": "2.8", "plug-in mine": "abc"}
    check(expected, {"torch": "2.8"}, "node")
    with pytest.raises(OtherCodeError, match=r"^other code than the driver: torch is 2.9 instead of 2.8$") as raised:
        check(expected, {"torch": "2.9"}, "node")
    assert raised.value.node == "node"

"""Which kernel is used: the compiled library is rebuilt when damaged, and torch is the fallback."""

import pytest

from trainables.errors import UserError
from trainables.models import kernels
from trainables.models.kernel_build import _hash_of_sums, kernel_build


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """An empty cache folder, and no kernel chosen yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delitem(kernels._chosen, "cpu", raising=False)
    for cached in (kernels.library, kernels._preferred):
        cached.cache_clear()
    yield monkeypatch
    for cached in (kernels.library, kernels._preferred):
        cached.cache_clear()


@pytest.fixture
def library_name():
    """Requested before `compiler`, so that the library comes from the user's cache."""
    if kernels.library() is None:
        pytest.skip("there is no compiler here")
    return kernels._compile().name


def test_a_damaged_library_is_compiled_again(library_name, compiler, tmp_path):
    file = tmp_path / "fedsweep" / library_name
    file.parent.mkdir()
    file.write_bytes(b"")
    assert kernels.chosen() == "compiled"
    assert file.stat().st_size > 0


def test_kernels_that_round_differently_are_told_apart(library_name, compiler, tmp_path):
    """A compiler on another node that sums half as many rows in single precision; the results differ in last bits."""
    here = kernel_build("compiled")
    other = tmp_path / "cc"
    other.write_text('#!/bin/sh\nexec cc "$@" -UTILE -DTILE=64\n')
    other.chmod(0o755)
    compiler.setenv("CC", str(other))
    kernels.library.cache_clear()
    _hash_of_sums.cache_clear()
    try:
        assert kernels.chosen() == "compiled"
        assert kernel_build("compiled") != here
    finally:
        _hash_of_sums.cache_clear()


def test_without_a_compiler_torch_is_used(compiler):
    compiler.setenv("CC", "/bin/false")
    assert kernels.chosen() == "torch"
    with pytest.raises(UserError, match=r"^kernel = 'compiled': .* cannot compile"):
        kernels.choose("compiled")


def test_the_environment_chooses_the_kernel(compiler):
    compiler.setenv("FEDSWEEP_KERNEL", "torch")
    assert kernels.chosen() == "torch"
    kernels._preferred.cache_clear()
    compiler.setenv("FEDSWEEP_KERNEL", "Torch")
    with pytest.raises(UserError, match="FEDSWEEP_KERNEL"):
        kernels.chosen()

"""The head's kernels of every device. Without a GPU, Triton's interpreter runs the kernel of a GPU."""

import contextlib
import importlib.util
import sys

import pytest
import small
import torch

from trainables.models.softmax import SoftmaxHead

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


@contextlib.contextmanager
def computing_with(kernel, device):
    """Skips the test if the kernel is not available."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    if kernel == "interpreted":
        if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
            pytest.skip("runs on a GPU, or needs triton")
        with _interpreter():
            yield
    elif kernel not in small.kernels_of(device):
        pytest.skip("there is no compiler here")
    else:
        with small.computed_with(kernel, device):
            yield


@contextlib.contextmanager
def _interpreter():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        compiling = _remove_triton_modules()  # another test may have imported triton, which then compiles
        sys.modules.update(INTERPRETING)
        kernel_of = {torch.float32: "triton", torch.float64: "torch"}
        patch.setattr(SoftmaxHead, "_kernel", lambda self, theta: kernel_of[theta.dtype])
        _interpret_bf16(patch)
        try:
            yield
        finally:
            INTERPRETING.update(_remove_triton_modules())
            sys.modules.update(compiling)


INTERPRETING = {}
"""Modules of triton that were imported to interpret kernels."""


def _remove_triton_modules():
    """Remove triton and what uses it from the imported modules, but for its compiled parts, which load once."""
    names = [
        name
        for name in sys.modules
        if name == "trainables.models.softmax_triton" or (name.split(".")[0] == "triton" and name[:9] != "triton._C")
    ]
    return {name: sys.modules.pop(name) for name in names}


def _interpret_bf16(patch):
    """Round to bf16 and multiply bf16 numbers as a GPU does. The interpreter truncates, and multiplies their bits."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def rounding_cast(self, source, to):
        if (source.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, to)
        return TensorHandle(torch.tensor(source.data).bfloat16().view(torch.uint16).numpy(), tl.bfloat16)

    def dot_of_bf16(self, one, other, *options):
        if one.dtype.scalar == tl.bfloat16:
            one, other = cast(self, one, tl.float32), cast(self, other, tl.float32)
        return dot(self, one, other, *options)

    patch.setattr(InterpreterBuilder, "cast_impl", rounding_cast)
    patch.setattr(InterpreterBuilder, "create_dot", dot_of_bf16)

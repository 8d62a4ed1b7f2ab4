"""Which errors say that a device or node has run out of memory."""

from __future__ import annotations

CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, outside torch's own allocator


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether torch, Ray or Python has run out of memory, here or in another process. Compares the name of the error,
    because a slot does not import torch."""
    while error is not None:
        name = type(error).__name__
        if isinstance(error, MemoryError) or name == "OutOfMemoryError":
            return True
        if name == "AcceleratorError" and getattr(error, "error_code", None) == CUDA_OUT_OF_MEMORY:
            return True
        error = getattr(error, "cause", None)  # Ray's wrapper of what was raised elsewhere
    return False

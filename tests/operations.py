"""Counts what a call does, so that its cost can be tested without a clock."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def operations(call: Callable[[], Any]) -> int:
    """The Python instructions that a call runs: the same number every time, on every machine."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    sys._getframe().f_trace_opcodes = True  # Python 3.12 otherwise counts nothing the first time
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count

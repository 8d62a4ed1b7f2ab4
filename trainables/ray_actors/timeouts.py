"""When an actor that does not answer is given up."""

from __future__ import annotations

START_S = 240.0  # for a process to start: Ray waits forever for a process that was killed while it started
FIRST_ANSWER_S = 900.0  # before its first answer a host loads its rows, and may be restarted
LEAST_S = 120.0  # for later answers: leaves time to restart a host
SLOWEST_TIMES = 20.0  # a call that takes this many times as long as the slowest one so far has hung

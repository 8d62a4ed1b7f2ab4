"""A client host whose client programs are observed: which noise they draw, which sums they compute, what they release.

A round can be played again from the same state, with some of the noise shifted."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainables.federation.batch_round import BatchRound
from trainables.federation.client_host import Broadcast, ClientHost
from trainables.federation.exact_sum import from_grid
from trainables.federation.pack import ClientWork
from trainables.methods.base import Sample
from trainables.privacy import noise

Address = tuple[int, int, str]
"""Where a client's noise comes from: round, step, purpose."""
Shifts = Mapping[Address, NDArray[np.float64]]
"""What is added to noise, in standard deviations."""
_is_observed: ContextVar[bool] = ContextVar("is_observed", default=False)


@contextlib.contextmanager
def observed_draw() -> Iterator[None]:
    """Within the block, `noise_of_clients_only` allows every draw."""
    before = _is_observed.set(True)
    try:
        yield
    finally:
        _is_observed.reset(before)


@contextlib.contextmanager
def noise_of_clients_only(purposes: Collection[str]) -> Iterator[None]:
    """Within the block, noise of these purposes can be drawn only by `client.noise` and `client.distinct_noise`. Noise
    that a program draws by itself is not observed, and could be subtracted from observed noise."""
    keys = noise._keys  # every draw needs them

    def checked(
        seeds: Sequence[int], clients: Sequence[int], round: int, step: int, purpose: str
    ) -> NDArray[np.uint64]:
        if purpose in purposes and not _is_observed.get():
            raise RuntimeError(
                f"noise of purpose {purpose!r} must be drawn with `client.noise` or `client.distinct_noise`"
            )
        return keys(seeds, clients, round, step, purpose)

    noise._keys = checked
    try:
        yield
    finally:
        noise._keys = keys


@dataclass
class Tape:
    """What a client's program does in one round."""

    drawn_before: frozenset[Address]
    """Addresses drawn in earlier rounds: this noise is no longer fresh."""
    shifts: dict[Address, NDArray[np.float64]]
    extra_shifts: Shifts
    """Added to `shifts` in this round only."""
    reference: list[torch.Tensor] | None = None
    """Sums of a neighbouring data set: fresh noise is shifted to cancel the difference."""
    sums: list[torch.Tensor] = field(default_factory=list)
    drawn: dict[Address, tuple[float, int]] = field(default_factory=dict)
    """Scale and size of every noise drawn."""
    samples: list[tuple[int | None, float]] = field(default_factory=list)
    """For every gradient or Hessian: the step whose sample it used, and the sampling rate. The step is None if all
    rows were used, or a sample that `sample` did not create."""
    created_samples: list[tuple[Sample, int]] = field(default_factory=list)
    sampled_rows: set[int] = field(default_factory=set)
    """Rows that are in at least one sample."""
    _pending: list[int] = field(default_factory=list)
    """Indices of the sums that were computed since noise was last drawn."""

    @property
    def fresh(self) -> list[Address]:
        """Noise that is drawn for the first time in this round."""
        return [address for address in self.drawn if address not in self.drawn_before]

    def summed(self, value: torch.Tensor, sample: Sample | None) -> torch.Tensor:
        """Record a sum that the program computes."""
        self.record_sample(sample)
        self._pending.append(len(self.sums))
        self.sums.append(value)
        return value

    def record_sample(self, sample: Sample | None) -> None:
        step = next((step for created, step in self.created_samples if created is sample), None)
        self.samples.append((step, 1.0 if sample is None else sample.rate))

    def draw(self, address: Address, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Record a draw of noise, and return the noise with its shift."""
        if self.reference is not None and address not in self.drawn_before and address not in self.drawn and scale:
            pairs = [(self.reference[k], self.sums[k]) for k in self._pending if k < len(self.reference)]
            gaps = [theirs - ours for theirs, ours in pairs if ours.numel() == value.numel()]
            if gaps:
                self.shifts[address] = torch.stack([gap.flatten() for gap in gaps]).sum(0).numpy() / scale
        self._pending = []
        self.drawn.setdefault(address, (scale, value.numel()))
        shift = self.shifts.get(address, 0.0) + self.extra_shifts.get(address, np.zeros(1))
        return value + (scale * torch.as_tensor(shift)).to(value) if np.any(shift) else value


@dataclass(frozen=True)
class Played:
    """The result of a played round."""

    release: NDArray[np.float64]
    tape: Tape
    states: Any


class WatchedHost(ClientHost):
    """The host of one client and one lane."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.round_view = self._watched
        self.drawn_before: frozenset[Address] = frozenset()
        self.shifts: Shifts = {}
        """The shifts of all rounds so far."""

    def _watched(self, *arguments: Any) -> BatchRound:
        return _WatchedRound(self._tape, *arguments)

    def play(
        self,
        work: ClientWork,
        t: int,
        sent: Broadcast,
        *,
        shifts: Shifts | None = None,
        extra_shifts: Shifts | None = None,
        reference: list[torch.Tensor] | None = None,
    ) -> Played:
        """Play round t (t = 0: what is released before the first round). The state of the host does not change."""
        before = self._states
        self._tape = Tape(self.drawn_before, {**self.shifts, **(shifts or {})}, extra_shifts or {}, reference)
        try:
            total = self.prepare(work) if t == 0 else self.round(work, t, sent, diagnose=False).total
            return Played(from_grid(total)[0].double().numpy(), self._tape, self._states)
        finally:
            self._states = before

    def move_on(self, played: Played) -> None:
        """Make this round part of the run: the next one starts from its state."""
        self._states, self.shifts = played.states, played.tape.shifts
        self.drawn_before = self.drawn_before | played.tape.drawn.keys()


class _WatchedRound(BatchRound):
    def __init__(self, tape: Tape, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._tape = tape
        self.model = _watched_model(self.model, tape)
        self._noisy = None  # recordings would bypass the methods below

    def clipped_gradient_sum(self, theta: torch.Tensor, sample: Sample | None = None) -> torch.Tensor:
        return self._tape.summed(super().clipped_gradient_sum(theta, sample), sample)

    def gradient_mean(self, theta: torch.Tensor, sample: Sample | None = None) -> torch.Tensor:
        self._tape.record_sample(sample)
        return super().gradient_mean(theta, sample)

    def sample(self, rate: float, step: int = 0) -> Sample:
        created = super().sample(rate, step)
        self._tape.created_samples.append((created, step))
        (seed,) = self._lanes.seeds
        (rows,) = self.sampled_rows(int(seed), rate, step)
        self._tape.sampled_rows.update(rows.tolist())
        return created

    def noise(
        self, purpose: str, step: int = 0, t: int | None = None, factor: float = 1, size: int | None = None
    ) -> torch.Tensor:
        with observed_draw():
            value = super().noise(purpose, step, t, factor, size)
        return self._tape.draw((self.t if t is None else t, step, purpose), value, self._scale(purpose) * factor)

    def distinct_noise(self, purpose: str, size: int) -> torch.Tensor:
        with observed_draw():
            value = super().distinct_noise(purpose, size)
        return self._tape.draw((self.t, 0, purpose), value, self._scale(purpose))

    def _scale(self, purpose: str) -> float:
        return float(self._lanes.std[purpose].flatten()[0])


def _watched_model(model: Any, tape: Tape) -> Any:
    """The model, with sums of Hessians observed. It is still an instance of its class, which the engine checks."""
    kind = type(model)
    if not hasattr(kind, "clipped_hessian_sum"):
        return model

    def clipped_hessian_sum(self: Any, *arguments: Any) -> torch.Tensor:
        return tape.summed(kind.clipped_hessian_sum(self, *arguments), None)

    watched = copy.copy(model)
    watched_kind = type(f"Watched{kind.__name__}", (kind,), {"clipped_hessian_sum": clipped_hessian_sum})
    object.__setattr__(watched, "__class__", watched_kind)
    return watched

"""Staging buffers, on a simulated device that is as slow as possible: it copies only when a program waits for it."""

import math

import numpy as np
import pytest
import torch

from trainables.federation import staging
from trainables.federation.staging import DEPTH, Staging


class Pinned(torch.Tensor):
    """Memory that the device reads later; `late` lists pending reads."""

    late: list

    def to(self, device, non_blocking=False):
        assert device == "cuda"
        there = torch.full(self.shape, math.nan)
        Pinned.late.append((self, there))
        if not non_blocking:
            _catch_up(len(Pinned.late))
        return there


def _catch_up(count: int) -> None:
    """In the order of the requests."""
    for here, there in Pinned.late[:count]:
        there.copy_(here.as_subclass(torch.Tensor))
    Pinned.late[:count] = [(there, there) for _, there in Pinned.late[:count]]


class Event:
    """The position in the device's queue when the event was recorded."""

    def __init__(self):
        self._place = 0

    def record(self):
        self._place = len(Pinned.late)

    def synchronize(self):
        _catch_up(self._place)


@pytest.fixture
def pinned(monkeypatch):
    """The sizes of all pinned allocations, in numbers."""
    sizes = []
    empty, from_numpy = torch.empty, torch.from_numpy

    def allocate(size, pin_memory=False):
        if pin_memory:
            sizes.append(size)
        return empty(size).as_subclass(Pinned)

    monkeypatch.setattr(Pinned, "late", [], raising=False)
    monkeypatch.setattr(staging.torch.cuda, "Event", Event)
    monkeypatch.setattr(staging.torch, "empty", allocate)
    monkeypatch.setattr(staging.torch, "from_numpy", lambda values: from_numpy(values).as_subclass(Pinned))
    return sizes


def filled(number: int):
    def fill(values):
        assert values.dtype == np.float32
        values[...] = number + np.arange(values.size).reshape(values.shape)

    return fill


def arrived(sent: list[torch.Tensor]) -> list[np.ndarray]:
    _catch_up(len(Pinned.late))
    return [array.numpy() for array in sent]


def test_a_buffer_is_not_overwritten_before_it_is_copied(pinned):
    """Many more arrays than buffers, of varying sizes."""
    shapes = [(1 + number % 5, 1 + 7 * number % 11) for number in range(5 * DEPTH)]
    strategy = Staging()
    sent = [strategy.copy(shape, filled(number)) for number, shape in enumerate(shapes)]
    for number, (shape, found) in enumerate(zip(shapes, arrived(sent), strict=True)):
        np.testing.assert_array_equal(found, number + np.arange(math.prod(shape), dtype=np.float32).reshape(shape))


def test_the_processor_waits_only_when_all_buffers_are_in_use(pinned):
    """Until then no copy has to be finished."""
    strategy = Staging()
    sent = [strategy.copy((3,), filled(number)) for number in range(DEPTH)]
    assert all(array.isnan().all() for array in sent)
    strategy.copy((3,), filled(DEPTH))
    assert [bool(array.isnan().any()) for array in sent] == [False] + [True] * (DEPTH - 1)


def test_memory_is_pinned_again_only_for_larger_arrays(pinned):
    strategy = Staging()
    for number in range(3 * DEPTH):
        strategy.copy((4, 6), filled(number))
    assert pinned == [24] * DEPTH
    for number in range(DEPTH):
        strategy.copy((5,), filled(number))
    assert pinned == [24] * DEPTH
    strategy.copy((25,), filled(0))
    assert pinned == [24] * DEPTH + [25]


@pytest.mark.parametrize(("more", "times"), [(0, 1), (1, 0)])
def test_large_arrays_are_copied_without_pinned_memory(pinned, monkeypatch, more, times):
    monkeypatch.setattr(staging, "LARGEST", 12)
    found = Staging().copy((12 + more,), filled(1))
    assert pinned == [12] * times
    np.testing.assert_array_equal(arrived([found])[0], np.arange(1, 13 + more, dtype=np.float32))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_real_device():
    strategy = Staging()
    sent = [strategy.copy((1000, 1 + number % 7), filled(number)) for number in range(5 * DEPTH)]
    for number, array in enumerate(sent):
        expected = number + np.arange(array.numel(), dtype=np.float32).reshape(array.shape)
        np.testing.assert_array_equal(array.cpu().numpy(), expected)

"""Checks of a network before anything trains, on a few rows: what they refuse would break the clip or the saved file.

A clip bounds the influence of a row only if the network computes every row by itself. So a row among others is
replaced, in a new copy of the network, and the bits of all other rows must stay the same: of what the head takes, of
their gradients' norms, and of the sum of their gradients. The gradient of every row must have the norm of the row's
gradient alone. The plain network with the trained values must compute the same scores.

No check finds every network that mixes rows: it sees only these rows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trainables.errors import UserError
from trainables.models.layers import WITH_BIAS
from trainables.models.networks import Network
from trainables.models.tail import Tail

ROWS, MORE_ROWS = 5, 16
REPLACED = 2
"""The row that is replaced: it has neighbours before and after it."""
ALONE = 3  # rows whose gradients are compared with those of the row alone
AGREEMENT = 1e-3  # relative tolerance of gradients' squared norms and of scores, in single precision
THOROUGHLY = (0, 1)  # numbers of the probes whose row is replaced by more kinds of rows
STORED = 4  # float32 values that a stored gradient takes: it is added up as two copies in double precision


class ForwardPass(NamedTuple):
    """Cost and sizes of a forward pass, per row."""

    operations: float
    """Operations of the products with weights behind the cut."""
    trained_values: int
    """Total size of the outputs of trained layers, and of the gradients that are stored."""
    values: int
    """Total size of the outputs of all layers behind the cut."""
    prefix_values: int
    """The same before the cut."""
    layers: int
    """Number of layers behind the cut."""
    cut_shape: tuple[int, ...]
    """Shape of a row's activations at the cut."""


class _Computed(NamedTuple):
    """What a network computes for some rows."""

    inputs: Tensor
    """What the head takes, one row per row."""
    squared_norms: Tensor
    """Of each row's gradient."""
    total: Tensor
    """The sum of the gradients of all rows but the replaced one."""

    def difference(self, other: _Computed) -> str:
        """What differs for rows that are not replaced; "" if nothing does."""
        kept = torch.arange(len(self.inputs)) != REPLACED
        if not _same(self.inputs[kept], other.inputs[kept]):
            return "what is computed for others"
        if not _same(self.squared_norms[kept], other.squared_norms[kept]) or not _same(self.total, other.total):
            return "the gradients of others"
        return ""


def checked(tail: Tail, arrays: Mapping[str, Tensor], features: int, *, known: bool = False) -> ForwardPass:
    """Raise unless the network computes rows one by one. Returns what a forward pass takes. `tail` has not been
    called. `known`: a packaged network, of which only the weights vary."""
    probes = _probes(features)[: 1 if known else None]
    with torch.no_grad():
        measured = _measured(_copy(tail), probes[0], arrays)
        for number, rows in enumerate(probes):
            try:
                found = _computed(tail, rows, arrays)
            except UserError:
                raise
            except Exception:  # a network need not take rows of every kind
                if number == 0:
                    raise
                continue
            if number == 0 and not torch.isfinite(found.inputs).all():
                raise UserError("its outputs for rows between 0 and 1 are not all finite")
            _check_state(tail, rows, arrays)
            _check_rows(tail, rows, found, arrays, thoroughly=number in THOROUGHLY and not known)
            _check_gradients(tail, rows, found, arrays)
        _check_plain(_copy(tail), probes[0], arrays)
    return measured


def _probes(features: int) -> list[Tensor]:
    """Rows of several kinds, because a network may take pixels, numbers of both signs or numbers of words. Rows that
    end in zeros are shorter texts. Those for thorough checks come first."""
    random = np.random.default_rng(0)
    pixels = random.random((MORE_ROWS, features), dtype=np.float32)
    words = random.integers(1, 4, (ROWS, features)).astype(np.float32)
    lengths = 1 + (features - 1) * (np.arange(ROWS) * 2 % ROWS) // ROWS
    present = np.arange(features) < lengths[:, None]
    found = (
        pixels[:ROWS],
        words * present,
        words,
        pixels[:ROWS] * present,
        random.standard_normal((ROWS, features), dtype=np.float32),
        pixels,
    )
    return [torch.from_numpy(rows.astype(np.float32)) for rows in found]


def _replacements(row: Tensor, *, thoroughly: bool) -> Iterator[Tensor]:
    other = row.roll(1)
    yield from (other, -1e4 * other)
    if thoroughly:
        yield from (-other, 1e4 * other, torch.zeros_like(row), torch.ones_like(row))


def _copy(tail: Tail) -> Tail:
    """As each process has one: a network may store something at its first call."""
    return copy.deepcopy(tail, {id(tail.network): tail.network})


def _computed(tail: Tail, rows: Tensor, arrays: Mapping[str, Tensor]) -> _Computed:
    tail = _copy(tail)
    x = tail.at_cut(rows)
    if len(x) != len(rows):
        raise UserError(f"the stages before the cut turn {len(rows)} rows into {len(x)}; they must stay separate")
    inputs = tail.head_inputs(x, arrays)
    labels = torch.arange(len(rows)) % arrays["head"].shape[1]
    parts, _ = tail.gradients(x, labels, arrays)
    squared_norms = torch.stack([part.squared_norms() for part in parts]).sum(0)
    others = (torch.arange(len(rows)) != REPLACED).double()
    return _Computed(inputs, squared_norms, torch.cat([part.weighted_sum(others) for part in parts]))


def _check_state(tail: Tail, rows: Tensor, arrays: Mapping[str, Tensor]) -> None:
    """Two calls of one copy must give the same, and leave its arrays as they are."""
    used = _copy(tail)
    found = [used.head_inputs(used.at_cut(rows), arrays) for _ in range(2)]
    if not _same(*found):
        raise UserError("two calls with the same rows give different results")
    before, after = tail.module.state_dict(), used.module.state_dict()
    for name in sorted({*before, *after}):
        if name not in before or name not in after or not _same(before[name], after[name]):
            raise UserError(
                f"the network changes its own {name!r} when it is called, so its rows depend on one another"
            )


def _check_rows(tail: Tail, rows: Tensor, found: _Computed, arrays: Mapping[str, Tensor], *, thoroughly: bool) -> None:
    """Replace a row by others: everything computed for the other rows must keep its bits."""
    for replacement in _replacements(rows[REPLACED], thoroughly=thoroughly):
        other = rows.clone()
        other[REPLACED] = replacement
        try:
            changed = _computed(tail, other, arrays)
        except Exception:  # such as a number of a word that does not exist
            continue
        if difference := found.difference(changed):
            raise UserError(f"its rows depend on one another: replacing a row changes {difference}")


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _check_gradients(tail: Tail, rows: Tensor, found: _Computed, arrays: Mapping[str, Tensor]) -> None:
    """The gradient norms of some rows must be those of every row alone, taken by torch."""
    for row in range(ALONE):
        alone = _copy(tail)
        leaves = {name: value.detach().clone().requires_grad_() for name, value in arrays.items()}
        label = torch.tensor([row % arrays["head"].shape[1]])
        with torch.enable_grad():
            loss = nn.functional.cross_entropy(alone.scores(alone.at_cut(rows[row : row + 1]), leaves), label)
        parts = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        expected = float(sum(part.double().square().sum() for part in parts if part is not None))
        if not math.isfinite(expected) and not torch.isfinite(found.squared_norms[row]):
            continue
        if not math.isclose(found.squared_norms[row], expected, rel_tol=AGREEMENT, abs_tol=1e-12):
            raise UserError(
                "the gradient of a row among others differs from its gradient alone: rows depend on one another, or an "
                "operation changes the output of a trained layer in place; use one that returns a new tensor"
            )


def _check_plain(tail: Tail, rows: Tensor, arrays: Mapping[str, Tensor]) -> None:
    """The plain network with the trained values must compute the scores that were trained: its file is what users
    get."""
    expected = tail.scores(tail.at_cut(rows), arrays)
    try:
        plain = tail.plain(arrays)
    except AttributeError as error:
        raise UserError(f"trained values cannot be written into it: {error}") from None
    for what, computed in _computations(plain):
        apart = (computed(rows) - expected).abs().max()
        if not apart <= AGREEMENT * (1 + expected.abs().max()):
            raise UserError(
                f"{what} with the trained values computes scores that differ by {float(apart):.2g} from those trained: "
                "layers may share parameters, or be called in another way than in the chain of stages"
            )


def _computations(plain: Network) -> Iterator[tuple[str, nn.Module]]:
    yield "the chain of stages", nn.Sequential(*plain.stages.values()).eval()
    if not plain.takes_images and type(plain.module).forward is not nn.Module.forward:
        yield "the module", plain.module


def _measured(tail: Tail, rows: Tensor, arrays: Mapping[str, Tensor]) -> ForwardPass:
    operations: list[float] = []
    values: list[int] = []
    before_cut: list[int] = []

    def count(part: Any, _: Any, output: Any) -> None:
        values.append(_numbers(output))
        if isinstance(part, WITH_BIAS):
            operations.append(2.0 * output.numel() * part.weight.numel() / len(part.weight))

    layers = _layers(tail.body)
    hooks = [part.register_forward_hook(count) for part in layers]
    hooks += [
        part.register_forward_hook(lambda _, __, output: before_cut.append(_numbers(output)))
        for part in _layers(tail.prefix)
    ]
    x = tail.at_cut(rows)
    with torch.enable_grad():
        inputs = tail.head_inputs(x, arrays, recording=True)
    for hook in hooks:
        hook.remove()
    for layer in tail.layers:
        if len(layer.outputs) != 1:
            calls = len(layer.outputs)
            raise UserError(
                f"layer {layer.name!r} is called {calls} times in a forward pass; it must be once; restrict the layers "
                "that train by patterns, as in norm:PATTERN"
            )
        if len(layer.outputs[0]) != len(rows):
            given = len(layer.outputs[0])
            raise UserError(f"layer {layer.name!r} gives {given} rows for {len(rows)}; it must be as many")
    for layer, output in [(layer, layer.outputs[0]) for layer in tail.layers]:  # a checkpoint adds outputs below
        if not _reaches(inputs, output):
            raise UserError(
                f"layer {layer.name!r} cannot train: its output is not used, or it is called under torch.no_grad()"
            )
    trained = sum(output.numel() for layer in tail.layers for output in layer.outputs) // ROWS
    stored = [shape for layer in tail.layers if layer.inputs[0].dim() > 2 for shape in layer.shapes().values()]
    return ForwardPass(
        sum(operations) / ROWS,
        trained + STORED * sum(map(math.prod, stored)),
        sum(values) // ROWS,
        sum(before_cut) // ROWS,
        len(layers),
        tuple(x.shape[1:]),
    )


def _reaches(inputs: Tensor, output: Tensor) -> bool:
    """Whether what the head takes depends on a layer's output."""
    if not (inputs.requires_grad and output.requires_grad):
        return False
    ones = torch.ones_like(inputs)
    (derivative,) = torch.autograd.grad(inputs, output, ones, retain_graph=True, allow_unused=True)
    return derivative is not None


def _layers(part: nn.Module) -> list[nn.Module]:
    """Modules without children, and linear layers and convolutions: one with weight_norm has a child."""
    return [found for found in part.modules() if isinstance(found, WITH_BIAS) or not any(found.children())]


def _numbers(output: Any) -> int:
    return output.numel() if isinstance(output, Tensor) else 0

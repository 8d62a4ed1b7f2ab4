"""Checks of a network before anything trains, on a few rows: what they refuse would break the clip or the saved file.

A clip bounds the influence of a row only if the network computes every row by itself. So a row among others is
replaced, and the bits of all other rows must stay the same, from the features to the head. Every per-row gradient must
be that of the row alone, and the plain network with the trained values must compute the same scores.
"""

from __future__ import annotations

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

ROWS = 6
REPLACED = 3
"""The row that is replaced: it has neighbours before and after it."""
MAGNITUDES = (1.0, 1e4)
"""How many times as large a row is that replaces another."""
AGREEMENT = 1e-3  # relative tolerance of gradients' squared norms and of scores, in single precision
ALONE = 3  # rows whose gradients are compared
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


def checked(tail: Tail, arrays: Mapping[str, Tensor], features: int) -> ForwardPass:
    """Raise unless the network computes rows one by one. Returns what a forward pass takes."""
    with torch.no_grad():
        _check_rows(tail, arrays, features)
        rows = next(_probes(features))
        x = tail.prefix(rows)
        measured = _measured(tail, rows, x, arrays)
        _check_gradients(tail, x[:ALONE], arrays)
        _check_plain(tail, rows, x, arrays)
    return measured


def _probes(features: int) -> Iterator[Tensor]:
    """Rows of several kinds, because a network may take pixels, numbers of both signs or numbers of words."""
    random = np.random.default_rng(0)
    yield torch.from_numpy(random.random((ROWS, features), dtype=np.float32))
    yield torch.from_numpy(random.standard_normal((ROWS, features), dtype=np.float32))
    yield torch.from_numpy(random.integers(0, 4, (ROWS, features)).astype(np.float32))


def _check_rows(tail: Tail, arrays: Mapping[str, Tensor], features: int) -> None:
    """Replace a row by another one: the head inputs of the others must keep their bits, and so must the network."""
    before = {name: value.clone() for name, value in tail.module.state_dict().items()}
    for number, rows in enumerate(_probes(features)):
        try:
            found = _head_inputs(tail, rows, arrays)
        except UserError:
            raise
        except Exception:  # a network need not take rows of every kind
            if number == 0:
                raise
            continue
        if number == 0 and not torch.isfinite(found).all():
            raise UserError("its outputs for rows between 0 and 1 are not all finite")
        if not _same(found, _head_inputs(tail, rows, arrays)):
            raise UserError("the same rows give something else when it is called again")
        for magnitude in MAGNITUDES:
            other = rows.clone()
            other[REPLACED] = magnitude * rows[REPLACED].roll(1)
            try:
                changed = _head_inputs(tail, other, arrays)
            except Exception:  # such as a number of a word that does not exist
                continue
            others = [row for row in range(ROWS) if row != REPLACED]
            if not _same(found[others], changed[others]):
                raise UserError("its rows depend on one another: replacing a row changes what is computed for others")
    for name, value in tail.module.state_dict().items():
        if not _same(before[name], value):
            raise UserError(
                f"the network changes its own {name!r} when it is called, so its rows depend on one another"
            )


def _head_inputs(tail: Tail, rows: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
    x = tail.prefix(rows)
    if len(x) != len(rows):
        raise UserError(f"the stages before the cut turn {len(rows)} rows into {len(x)}; they must stay separate")
    return tail.head_inputs(x, arrays)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _check_gradients(tail: Tail, x: Tensor, arrays: Mapping[str, Tensor]) -> None:
    """The gradient norms of some rows must be those of every row alone, taken by torch."""
    labels = torch.arange(len(x)) % arrays["head"].shape[1]
    found, _ = tail.gradients(x, labels, arrays)
    norms = torch.stack([part.squared_norms() for part in found]).sum(0)
    for row in range(len(x)):
        leaves = {name: value.detach().clone().requires_grad_() for name, value in arrays.items()}
        with torch.enable_grad():
            scores = tail.scores(x[row : row + 1], leaves)
            loss = nn.functional.cross_entropy(scores, labels[row : row + 1])
        alone = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        expected = sum(part.double().square().sum() for part in alone if part is not None)
        if not torch.allclose(norms[row], expected, rtol=AGREEMENT, atol=1e-12):  # type: ignore[arg-type]
            raise UserError(
                "the gradient of a row among others differs from its gradient alone: rows depend on one another, or a "
                "trained layer changes its output in place"
            )


def _check_plain(tail: Tail, rows: Tensor, x: Tensor, arrays: Mapping[str, Tensor]) -> None:
    """The plain network with the trained values must compute the scores that were trained: its file is what users
    get."""
    expected = tail.scores(x, arrays)
    try:
        plain = tail.plain(arrays)
    except AttributeError as error:
        raise UserError(f"trained values cannot be written into it: {error}") from None
    for name, value in plain.module.state_dict().items():
        if value.is_complex():
            raise UserError(f"{name!r} is complex, which a safetensors file cannot hold")
    for what, computed in _computations(plain):
        apart = (computed(rows) - expected).abs().max()
        if not apart <= AGREEMENT * (1 + expected.abs().max()):
            raise UserError(
                f"{what} with the trained values computes scores that differ by {float(apart):.2g} from those trained: "
                "layers may share parameters, or be called in another way than in the chain of stages"
            )


def _computations(plain: Network) -> Iterator[tuple[str, nn.Module]]:
    yield "the chain of stages", nn.Sequential(*plain.stages.values()).eval()
    takes_rows = not plain.takes_images and type(plain.module).forward is not nn.Module.forward
    if takes_rows and not isinstance(plain.module, nn.Sequential):
        yield "the module", plain.module


def _measured(tail: Tail, rows: Tensor, x: Tensor, arrays: Mapping[str, Tensor]) -> ForwardPass:
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
    tail.head_inputs(tail.prefix(rows), arrays, recording=True)
    for hook in hooks:
        hook.remove()
    for layer in tail.layers:
        if len(layer.outputs) != 1:
            calls = len(layer.outputs)
            raise UserError(f"layer {layer.name!r} is called {calls} times in a forward pass; it must be once")
        if len(layer.outputs[0]) != ROWS:
            raise UserError(f"layer {layer.name!r} gives {len(layer.outputs[0])} rows for {ROWS}; it must be as many")
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


def _layers(part: nn.Module) -> list[nn.Module]:
    """Modules without children, and linear layers and convolutions: one with weight_norm has a child."""
    return [found for found in part.modules() if isinstance(found, WITH_BIAS) or not any(found.children())]


def _numbers(output: Any) -> int:
    return output.numel() if isinstance(output, Tensor) else 0

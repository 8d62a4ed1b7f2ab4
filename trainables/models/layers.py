"""Layers of a network with parameters that train. Each replaces the computation of a frozen module.

A layer's parameters are the frozen ones plus a scale times its trained values, which start at 0 (but for one LoRA
factor). In a recorded forward pass it keeps its input and its output. Given the derivative of the loss with respect to
the output, `gradients` returns the gradient of every row with respect to the trained values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainables.models import kernels
from trainables.models.gradients import Expanded, Gradients, of_product

OF_POSITIONS = (nn.LayerNorm, nn.RMSNorm)
"""Norm layers that normalise the last axes, each position for itself."""
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, *OF_POSITIONS)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LINEAR = (nn.Linear,)
WITH_BIAS = (*LINEAR, *CONVOLUTIONS)


class Layer(ABC):
    def __init__(self, name: str, module: nn.Module, scale: float) -> None:
        self.name, self.module, self.scale = name, module, scale
        self.frozen: Callable[[Tensor], Tensor] = module.forward
        """The module's own computation."""
        self.values: Mapping[str, Tensor] = {}
        """The trained values, by name; set before a forward pass."""
        self.recording = False
        self.outputs: list[Tensor] = []
        self.inputs: list[Tensor] = []

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the trained values, by their names in the network."""

    @abstractmethod
    def compute(self, x: Tensor) -> Tensor:
        """The output with the trained values."""

    @abstractmethod
    def gradients(self, x: Tensor, error: Tensor) -> list[Gradients]:
        """The gradients with respect to every trained array. `error`: the derivative of the loss with respect to the
        layer's output."""

    @abstractmethod
    def merged(self) -> dict[str, Tensor]:
        """The parameters of a plain module that computes the same as this layer, by name."""

    def __call__(self, input: Tensor) -> Tensor:  # as torch names it
        out = self.compute(input)
        if self.recording:
            if not out.requires_grad:  # the first trained layer: autograd starts here
                out = out + torch.zeros((), dtype=out.dtype, device=out.device, requires_grad=True)
            self.inputs.append(input.detach())
            self.outputs.append(out)
        return out

    def value(self, name: str, like: Tensor) -> Tensor:
        """A trained value times the scale, in the dtype of `like`."""
        return (self.values[f"{self.name}.{name}"] * self.scale).to(like.dtype)


class NormLayer(Layer):
    """Scale and shift of a norm layer. Batch norm uses its running statistics."""

    def __init__(self, name: str, module: Any, scale: float) -> None:
        super().__init__(name, module, scale)
        self.batch = isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
        self._last: tuple[Mapping[str, Tensor], tuple[Tensor, Tensor, Tensor]] | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {f"{self.name}.{name}": tuple(parameter.shape) for name, parameter in self.module.named_parameters()}

    def compute(self, x: Tensor) -> Tensor:
        if self.batch:
            _, factor, shift = self._batch_factors()
            return torch.addcmul(_channels(shift, x), x, _channels(factor, x))
        weight, bias = self._parameters()
        normal = self._normalised(x)
        if isinstance(self.module, OF_POSITIONS):
            return normal * weight.to(x.dtype) + bias.to(x.dtype)
        return torch.addcmul(_channels(bias, x), normal, _channels(weight, x))

    def gradients(self, x: Tensor, error: Tensor) -> list[Gradients]:
        if self.batch:
            of_weight, of_bias = centred_sums(x, error, self.module.running_mean)  # type: ignore[arg-type]
            of_weight = of_weight * self._batch_factors()[0]
        else:
            of_weight = self._sum((self._normalised(x) * error).float())
            of_bias = self._sum(error.float())
        both = {"weight": of_weight, "bias": of_bias}
        return [Expanded(both[name].float() * self.scale) for name, _ in self.module.named_parameters()]

    def merged(self) -> dict[str, Tensor]:
        weight, bias = self._parameters()
        both = {"weight": weight, "bias": bias}
        return {f"{self.name}.{name}": both[name] for name, _ in self.module.named_parameters()}

    def _parameters(self) -> tuple[Tensor, Tensor]:
        """Weight and bias in float32."""
        own = dict(self.module.named_parameters())
        frozen = own["weight"].float()
        weight = frozen + self.values[f"{self.name}.weight"] * self.scale
        if "bias" not in own:
            return weight, torch.zeros_like(weight)
        return weight, own["bias"].float() + self.values[f"{self.name}.bias"] * self.scale

    def _batch_factors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of batch norm: the inverse deviation, and the factor and shift of its inputs. They are computed once for
        consecutive calls with the same mapping of values: in a pack of one lane, all blocks of rows share it."""
        if self._last is None or self._last[0] is not self.values:
            weight, bias = self._parameters()
            inverse = torch.rsqrt(self.module.running_var.float() + self.module.eps)  # type: ignore[operator]
            factor = weight * inverse
            shift = bias - self.module.running_mean.float() * factor  # type: ignore[operator]
            self._last = self.values, (inverse, factor, shift)
        return self._last[1]

    def _normalised(self, x: Tensor) -> Tensor:
        if isinstance(self.module, nn.LayerNorm):
            return functional.layer_norm(x, self.module.normalized_shape, eps=self.module.eps)
        if isinstance(self.module, nn.RMSNorm):
            return functional.rms_norm(x, self.module.normalized_shape, eps=self.module.eps)
        return functional.group_norm(x, self.module.num_groups, eps=self.module.eps)  # type: ignore[arg-type]

    def _sum(self, values: Tensor) -> Tensor:
        """The sum over all positions of a row: (n, size)."""
        if isinstance(self.module, OF_POSITIONS):
            shape = self.module.normalized_shape
            return (
                values.flatten(1, -len(shape) - 1).sum(1).flatten(1)
                if values.dim() > len(shape) + 1
                else values.flatten(1)
            )
        return values.flatten(2).sum(2) if values.dim() > 2 else values


class LinearLayer(Layer):
    """Bias of a linear layer or a convolution, LoRA factors of a linear layer, or both."""

    def __init__(self, name: str, module: Any, scale: float, lora_scale: float, *, bias: bool, rank: int) -> None:
        super().__init__(name, module, scale)
        self.lora_scale, self.bias, self.rank = lora_scale, bias, rank

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        if self.bias:
            shapes[f"{self.name}.bias"] = tuple(self.module.bias.shape)  # type: ignore[arg-type]
        if self.rank:
            outputs, inputs = self.module.weight.shape  # type: ignore[misc]
            shapes |= {f"{self.name}.lora_down": (self.rank, inputs), f"{self.name}.lora_up": (outputs, self.rank)}
        return shapes

    def compute(self, x: Tensor) -> Tensor:
        out = self.frozen(x)
        if self.bias:
            value = self.value("bias", out)
            out = out + (value if isinstance(self.module, nn.Linear) else _channels(value, out))
        if self.rank:
            down, up = self._factors(x)
            out = out + self.lora_scale * functional.linear(functional.linear(x, down), up)
        return out

    def gradients(self, x: Tensor, error: Tensor) -> list[Gradients]:
        found: list[Gradients] = []
        if self.bias:
            linear = isinstance(self.module, nn.Linear)
            rows = (_positions(error) if linear else error.flatten(2).mT).float()
            found.append(Expanded((rows.sum(1) if rows.dim() > 2 else rows) * self.scale))
        if self.rank:
            down, up = self._factors(x)
            inputs, errors = _positions(x), _positions(error).float() * self.lora_scale
            found.append(of_product(errors @ up.float(), inputs))
            found.append(of_product(errors, functional.linear(inputs, down)))
        return found

    def merged(self) -> dict[str, Tensor]:
        merged: dict[str, Tensor] = {}
        if self.bias:
            frozen: Tensor = self.module.bias  # type: ignore[assignment]
            merged[f"{self.name}.bias"] = frozen.float() + self.values[f"{self.name}.bias"] * self.scale
        if self.rank:
            weight: Tensor = self.module.weight  # type: ignore[assignment]
            down, up = self._factors(weight.float())
            merged[f"{self.name}.weight"] = weight.float() + self.lora_scale * up @ down
        return merged

    def _factors(self, like: Tensor) -> tuple[Tensor, Tensor]:
        down, up = (self.values[f"{self.name}.{name}"] for name in ("lora_down", "lora_up"))
        return down.to(like.dtype), up.to(like.dtype)


def centred_sums(x: Tensor, error: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """For every row and channel, the sums over all positions of (x - mean) error and of error, in float32."""
    if x.is_cuda and x.dim() == 4 and kernels.chosen("cuda") == "triton":
        from trainables.models import layers_triton

        if layers_triton.fits(x, error):
            return layers_triton.centred_sums(x, error, mean)
    product = (x - _channels(mean, x)) * error
    if x.dim() == 2:
        return product.float(), error.float()
    return tuple(values.flatten(2).sum(2, dtype=torch.float32) for values in (product, error))  # type: ignore[return-value]


def _channels(values: Tensor, like: Tensor) -> Tensor:
    """One number per channel, as (1, channels, 1, ...)."""
    return values.to(like.dtype).view(1, -1, *(1,) * (like.dim() - 2))


def _positions(values: Tensor) -> Tensor:
    """(n, size) as it is, and (n, ..., size) as (n, positions, size)."""
    return values.flatten(1, -2) if values.dim() > 2 else values

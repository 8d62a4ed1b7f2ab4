"""The part of a network from its cut on, with layers that train, as a function of the trained arrays."""

from __future__ import annotations

import copy
import fnmatch
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainables.errors import UserError
from trainables.models.gradients import Gradients, Product, joined
from trainables.models.layers import LINEAR, NORMS, WITH_BIAS, Layer, LinearLayer, NormLayer
from trainables.models.network_settings import NO_CUT, NetworkSettings
from trainables.models.networks import Network

HEAD = "head"
AGREEMENT = 1e-3  # relative tolerance of the gradients' squared norms, in single precision


class ForwardPass(NamedTuple):
    """Cost and sizes of a forward pass."""

    operations: float
    """Operations of the products with weights."""
    trained_values: int
    """Total size of the outputs of trained layers."""
    values: int
    """Total size of the outputs of all layers."""
    layers: int


class Tail:
    """Stages of a copy of the network, frozen and in evaluation mode. The last one is replaced by the trained head."""

    def __init__(self, settings: NetworkSettings, network: Network) -> None:
        module, stages = copy.deepcopy((network.module, network.stages))
        self.module = module
        names = list(stages)
        last = stages[names[-1]]
        if not isinstance(last, nn.Linear):
            raise UserError(f"network = {settings.network!r}: its last stage {names[-1]!r} must be a torch.nn.Linear")
        if settings.cut != NO_CUT and settings.cut not in names:
            raise UserError(
                f"cut = {settings.cut!r} is no stage of {settings.network}; choose one of: none, {', '.join(names)}"
            )
        start = names.index(settings.cut) if settings.cut != NO_CUT else names[0] == "pixels"
        self.head = next(name for name, found in module.named_modules() if found is last)
        self.inputs = last.in_features
        self.prefix = nn.Sequential(*(stages[name] for name in names[:start])).eval()
        self.body = nn.Sequential(*(stages[name] for name in names[start:-1])).eval()
        for part in (*self.prefix.modules(), *self.body.modules()):
            if getattr(part, "inplace", False):
                part.inplace = False  # type: ignore[assignment]
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        self.layers = list(_trained_layers(settings, module, self.body))
        for layer in self.layers:
            layer.module.forward = layer

    def to(self, device: str, dtype: torch.dtype) -> None:
        """Move the network to a device, and its body to a dtype. The prefix and trained norm layers stay in float32."""
        norms = [layer.module for layer in self.layers if isinstance(layer, NormLayer)]
        exact = [copy.deepcopy(norm.state_dict()) for norm in norms]
        self.module.to(device=device)
        self.prefix.to(device=device)
        self.body.to(device=device, dtype=dtype)
        for norm, state in zip(norms, exact, strict=True):
            norm.float().load_state_dict(state)

    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the trained arrays. The head comes first: centres move into the constant of the first array."""
        shapes: dict[str, tuple[int, ...]] = {HEAD: (self.inputs + 1, classes)}
        for layer in self.layers:
            shapes |= layer.shapes()
        return shapes

    def head_inputs(self, x: Tensor, arrays: Mapping[str, Tensor], *, recording: bool = False) -> Tensor:
        """What the head multiplies, (n, inputs), in float32."""
        for layer in self.layers:
            layer.values, layer.recording, layer.inputs, layer.outputs = arrays, recording, [], []
        found = self.body(x)
        if found.dim() != 2 or found.shape[1] != self.inputs:
            raise UserError(
                f"the stages before the head give {tuple(found.shape)}, the head takes (rows, {self.inputs})"
            )
        return found.float()

    def scores(self, x: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
        inputs = self.head_inputs(x, arrays)
        return inputs @ arrays[HEAD][:-1] + arrays[HEAD][-1]

    def gradients(
        self, x: Tensor, labels: Tensor, arrays: Mapping[str, Tensor], centre: Tensor | None = None
    ) -> tuple[list[Gradients], Tensor]:
        """The gradients of all rows with respect to all arrays, in the order of `shapes`, and the rows' losses."""
        with torch.enable_grad():
            inputs = self.head_inputs(x, arrays, recording=True)
        seen = inputs.detach() if centre is None else inputs.detach() - centre
        seen = torch.cat([seen, torch.ones_like(seen[:, :1])], dim=1)
        scores = seen @ arrays[HEAD]
        losses = torch.nn.functional.cross_entropy(scores, labels, reduction="none")
        errors = scores.softmax(1)
        errors[torch.arange(len(labels), device=labels.device), labels] -= 1
        found: list[Gradients] = [Product(errors.unsqueeze(1), seen.unsqueeze(1))]  # as (inputs, classes)
        if self.layers:
            outputs = [layer.outputs[0] for layer in self.layers]
            derivatives = torch.autograd.grad(inputs, outputs, errors @ arrays[HEAD][:-1].T)
            for layer, derivative in zip(self.layers, derivatives, strict=True):
                found += layer.gradients(layer.inputs[0], derivative)
                layer.inputs, layer.outputs = [], []
        return joined(found), losses

    def merged(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state dict of the plain module with the trained values."""
        for layer in self.layers:
            layer.values = arrays
        head = {f"{self.head}.weight": arrays[HEAD][:-1].T, f"{self.head}.bias": arrays[HEAD][-1]}
        trained = {name: value for layer in self.layers for name, value in layer.merged().items()}
        return {**self.module.state_dict(), **trained, **head}

    def check(self, x: Tensor, arrays: Mapping[str, Tensor]) -> ForwardPass:
        """Compare the gradient norms of some rows with those of every row alone, taken by torch: a network in which
        rows depend on one another, or with a layer that is not called exactly once, is refused. Returns what
        the forward pass of these rows takes."""
        labels = torch.arange(len(x), device=x.device) % arrays[HEAD].shape[1]
        measured = self._measured(x, arrays)
        for layer in self.layers:
            if len(layer.outputs) != 1:
                calls = len(layer.outputs)
                raise UserError(f"layer {layer.name!r} is called {calls} times in a forward pass; it must be once")
        found, _ = self.gradients(x, labels, arrays)
        norms = sum(part.squared_norms() for part in found)
        for row in range(len(x)):
            leaves = {name: value.detach().clone().requires_grad_() for name, value in arrays.items()}
            with torch.enable_grad():
                scores = self.scores(x[row : row + 1], leaves)
                loss = torch.nn.functional.cross_entropy(scores, labels[row : row + 1])
            alone = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            expected = sum(part.double().square().sum() for part in alone if part is not None)
            if not torch.allclose(norms[row], expected, rtol=AGREEMENT, atol=1e-12):  # type: ignore[index, arg-type]
                raise UserError(
                    "the gradient of a row among others differs from its gradient alone: the network's rows depend on "
                    "one another, or a trained layer changes its output in place"
                )
        return measured

    def _measured(self, x: Tensor, arrays: Mapping[str, Tensor]) -> ForwardPass:
        counted: list[float] = []
        sizes: list[int] = []

        def count(part: Any, _: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                sizes.append(output.numel())
            if isinstance(part, WITH_BIAS):
                counted.append(2.0 * output.numel() * part.weight.numel() / len(part.weight))

        # a layer with weight_norm has a child
        layers = [part for part in self.body.modules() if isinstance(part, WITH_BIAS) or not any(part.children())]
        hooks = [part.register_forward_hook(count) for part in layers]
        self.head_inputs(x, arrays, recording=True)
        for hook in hooks:
            hook.remove()
        values = sum(output.numel() for layer in self.layers for output in layer.outputs)
        return ForwardPass(sum(counted), values, sum(sizes), len(layers))


def _trained_layers(settings: NetworkSettings, module: nn.Module, body: nn.Module) -> Iterator[Layer]:
    """The layers of `body` that train. Raises if a pattern of the settings matches none."""
    behind_the_cut = set(map(id, body.modules()))
    patterns = {kind: settings.patterns(kind) for kind in ("norm", "bias", "lora")}
    used: set[tuple[str, str]] = set()

    def trains(kind: str, name: str, part: nn.Module, types: tuple[type, ...]) -> bool:
        matching = [
            pattern for pattern in patterns[kind] if isinstance(part, types) and fnmatch.fnmatchcase(name, pattern)
        ]
        used.update((kind, pattern) for pattern in matching)
        return bool(matching)

    for name, part in module.named_modules():
        if id(part) not in behind_the_cut:
            continue
        found: Any = part
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is None:
            raise UserError(f"layer {name!r} has no running statistics: its rows would depend on one another")
        if getattr(found, "weight", None) is not None and trains("norm", name, part, NORMS):
            yield NormLayer(name, part, settings.norm_scale)
            continue
        bias = getattr(found, "bias", None) is not None and trains("bias", name, part, WITH_BIAS)
        rank = settings.rank if trains("lora", name, part, LINEAR) else 0
        if bias or rank:
            yield LinearLayer(name, part, settings.bias_scale, settings.lora_scale, bias=bias, rank=rank)
    for kind, pattern in itertools.chain.from_iterable([(kind, p) for p in patterns[kind]] for kind in patterns):
        if (kind, pattern) not in used:
            raise UserError(f"model: train = {kind}:{pattern} matches no layer from the cut {settings.cut!r} on")

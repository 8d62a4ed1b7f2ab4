"""The part of a network from its cut on, with layers that train, as a function of the trained arrays."""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from trainables.errors import UserError
from trainables.models.gradients import Gradients, Outer, joined
from trainables.models.layers import LINEAR, NORMS, WITH_BIAS, Layer, LinearLayer, NormLayer
from trainables.models.network_settings import NO_CUT, NetworkSettings
from trainables.models.networks import Network

HEAD = "head"
SHOWN = 10  # names of layers in a message


class Tail:
    """Stages of a copy of the network, frozen and in evaluation mode. The last one is replaced by the trained head."""

    def __init__(self, settings: NetworkSettings, network: Network) -> None:
        self.network = network
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
        start = names.index(settings.cut) if settings.cut != NO_CUT else int(network.takes_images)
        if not any(found is last for found in module.modules()):
            raise UserError(
                f"network = {settings.network!r}: its last stage {names[-1]!r} is not a part of the module; `stages` "
                "must return the module's own layers"
            )
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
        """Move the network to a device, and the floating-point numbers of its body to float32 or bfloat16. The prefix
        and trained norm layers stay in float32."""
        norms = [layer.module for layer in self.layers if isinstance(layer, NormLayer)]
        exact = [copy.deepcopy(norm.state_dict()) for norm in norms]
        self.module.to(device=device)
        self.prefix.to(device=device)
        self.body.to(device=device)
        if dtype == torch.bfloat16:
            self.body.bfloat16()
        for norm, state in zip(norms, exact, strict=True):
            norm.float().load_state_dict(state)

    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the trained arrays. The head comes first: centres move into the constant of the first array."""
        shapes: dict[str, tuple[int, ...]] = {HEAD: (self.inputs + 1, classes)}
        for layer in self.layers:
            shapes |= layer.shapes()
        return shapes

    def at_cut(self, rows: Tensor) -> Tensor:
        """The activations of rows of features at the cut."""
        with _every_layer_is_called():
            found: Tensor = self.prefix(rows)
        return found

    def head_inputs(self, x: Tensor, arrays: Mapping[str, Tensor], *, recording: bool = False) -> Tensor:
        """What the head multiplies, (n, inputs), in float32."""
        for layer in self.layers:
            layer.values, layer.recording, layer.inputs, layer.outputs = arrays, recording, [], []
        with _every_layer_is_called():
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
        found: list[Gradients] = [Outer(seen, errors)]  # as (inputs, classes)
        if self.layers:
            outputs = [layer.outputs[0] for layer in self.layers]
            derivatives = torch.autograd.grad(inputs, outputs, errors @ arrays[HEAD][:-1].T)
            for layer, derivative in zip(self.layers, derivatives, strict=True):
                found += layer.gradients(layer.inputs[0], derivative)
                layer.inputs, layer.outputs = [], []
        return joined(found), losses

    def plain(self, arrays: Mapping[str, Tensor]) -> Network:
        """The network as it was given, with the trained values and the new head."""
        module, stages = copy.deepcopy((self.network.module, self.network.stages))
        for layer in self.layers:
            layer.values = arrays
            for name, value in layer.merged().items():
                module.get_parameter(name).data.copy_(value)
        given = list(stages.values())[-1]
        head = nn.Linear(self.inputs, arrays[HEAD].shape[1])
        head.weight.data.copy_(arrays[HEAD][:-1].T)
        head.bias.data.copy_(arrays[HEAD][-1])
        for part in [module, *module.modules()]:
            for name, child in list(part._modules.items()):
                if child is given:
                    part._modules[name] = head
        return Network(module.eval(), {**stages, list(stages)[-1]: head})


@contextlib.contextmanager
def _every_layer_is_called() -> Iterator[None]:
    """Outside of training, torch computes a whole layer of a transformer by one function, which ignores trained
    parts."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _trained_layers(settings: NetworkSettings, module: nn.Module, body: nn.Module) -> Iterator[Layer]:
    """The layers of `body` that train. Raises if a pattern of the settings matches none."""
    behind_the_cut = set(map(id, body.modules()))
    patterns = {kind: settings.patterns(kind) for kind in ("norm", "bias", "lora")}
    used: set[tuple[str, str]] = set()

    names: dict[str, list[str]] = {kind: [] for kind in patterns}

    def trains(kind: str, name: str, part: nn.Module, types: tuple[type, ...]) -> bool:
        if isinstance(part, NonDynamicallyQuantizableLinear):  # of MultiheadAttention, which uses only its weights
            return False
        if isinstance(part, types):
            names[kind].append(name)
        matching = [
            pattern for pattern in patterns[kind] if isinstance(part, types) and fnmatch.fnmatchcase(name, pattern)
        ]
        used.update((kind, pattern) for pattern in matching)
        if matching and not any(type(part).forward is known.forward for known in types):  # type: ignore[attr-defined]
            raise UserError(
                f"layer {name!r} is a {type(part).__name__} with its own `forward`, which cannot be trained; restrict "
                f"{kind} to other layers: {kind}:PATTERN"
            )
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
        if rank > (most := min(found.weight.shape) if rank else 0):
            raise UserError(f"rank = {rank}: layer {name!r} has a rank of at most {most}")
        if bias or rank:
            yield LinearLayer(name, part, settings.bias_scale, settings.lora_scale, bias=bias, rank=rank)
    for kind, pattern in itertools.chain.from_iterable([(kind, p) for p in patterns[kind]] for kind in patterns):
        if (kind, pattern) not in used:
            stated = kind if pattern == "*" else f"{kind}:{pattern}"
            known = ", ".join(names[kind][:SHOWN]) or "none"
            raise UserError(
                f"model: train = {stated} matches no layer from the cut {settings.cut!r} on, but only: {known}"
            )

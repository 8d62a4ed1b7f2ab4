"""Time of a private round that trains the norm layers and the head of ResNet-20, and the throughput of Opacus.

    python -m benchmarks.tail OUT [--rows 45000] [--clients 20] [--rounds 8] [--precision bf16] [--cut none]

Runs without Ray. Images and weights are random: neither changes the time. Both programs train the same parameters, the
scale and shift of all norm layers and the head, with the same precision, and clip every row's gradient. Opacus has no
batch norm; in inference mode it is a scale and a shift per channel, for which this file registers a gradient. Writes
OUT/tail.json. Opacus is left out if it is not installed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from trainables.data.backbones.resnet import ResNet
from trainables.data.features import from_arrays
from trainables.data.partition import parse
from trainables.federation.hosts import Hosts
from trainables.federation.problem import Problem, ProblemData
from trainables.federation.server import Server
from trainables.federation.trial_spec import DataSpec, ProblemSpec, TrialSpec
from trainables.models.networks import Pixels
from trainables.privacy.plan import PrivacySettings

PIXELS, CLASSES, CLIP = 3072, 10, 4.0
OPACUS_BATCH = 1500  # rows of a step; try others with --opacus-batch


def images(rows: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.random((rows, PIXELS), dtype=np.float32)
    y = np.concatenate([np.arange(CLASSES), random.integers(0, CLASSES, rows - CLASSES)])
    return {"x_train": x, "y_train": y, "x_test": x[:100], "y_test": y[:100]}


def network(folder: Path) -> tuple[ResNet, str]:
    """A ResNet-20 with random weights and running statistics, and the file of its state dict."""
    torch.manual_seed(0)
    module = ResNet(3, 100)
    module.train()(torch.randn(64, 3, 32, 32))
    file = folder / "resnet20.pt"
    torch.save(module.state_dict(), file)
    return module.eval(), str(file)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def private_rounds(arrays: dict[str, np.ndarray], weights: str, options: argparse.Namespace) -> list[float]:
    """Seconds of every round but the first two, which compile kernels and load the rows."""
    data = from_arrays(arrays, "images")
    model = f"network:resnet20,cut={options.cut},train=norm+head,weights={weights}"
    spec = ProblemSpec(
        data=DataSpec(fingerprint=data.fingerprint),
        partition=parse("dirichlet:0.5", clients=options.clients, seed=42),
        train_on="all",
        evaluate_on="test",
        model=model,
    )
    problem = Problem.prepare(data, spec)
    trial = TrialSpec(
        problem=spec,
        method="dp-fedgd",
        hyperparameters={"learning_rate": 1.0},
        privacy=PrivacySettings(epsilon=10.0, clip=CLIP),
        rounds=options.rounds + 2,
        evaluate_every=10**6,
        aggregate="size",
        precision=options.precision,
    )
    server = Server(Hosts(1, options.device), options.device)
    server.open([trial], ProblemData.of(problem))
    seconds = []
    for t in range(1, options.rounds + 2):  # the last round would evaluate
        synchronize(options.device)
        began = time.perf_counter()
        server.progress(t)
        synchronize(options.device)
        seconds.append(time.perf_counter() - began)
    return seconds[2:]


class Affine(nn.Module):
    """Batch norm in inference mode, as a module for which Opacus can be given a gradient."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        self.mean: Tensor
        self.inverse: Tensor
        self.register_buffer("mean", norm.running_mean.clone())
        self.register_buffer("inverse", torch.rsqrt(norm.running_var + norm.eps))
        self.weight, self.bias = nn.Parameter(norm.weight.detach().clone()), nn.Parameter(norm.bias.detach().clone())

    def normal(self, x: Tensor) -> Tensor:
        return (x - self.mean.view(1, -1, 1, 1)) * self.inverse.view(1, -1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.normal(x) * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


def with_affine(module: nn.Module) -> nn.Module:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, Affine(child))
        else:
            with_affine(child)
    return module


def opacus_rows_per_second(arrays: dict[str, np.ndarray], module: ResNet, options: argparse.Namespace) -> float:
    """Rows per second of forward pass, backward pass, clipping, noise and step together."""
    from opacus import GradSampleModule
    from opacus.grad_sample import register_grad_sampler
    from opacus.optimizers import DPOptimizer

    @register_grad_sampler(Affine)
    def affine(layer: Affine, activations: list[Tensor], errors: Tensor) -> dict[nn.Parameter, Tensor]:
        return {
            layer.weight: torch.einsum("nchw,nchw->nc", layer.normal(activations[0]), errors),
            layer.bias: errors.sum((2, 3)),
        }

    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    module.fc = nn.Linear(64, CLASSES)
    trained = with_affine(module).to(options.device, dtype)
    trained.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # in place
    sampled = GradSampleModule(trained, strict=False)
    parameters = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    optimizer = DPOptimizer(
        torch.optim.SGD(parameters, lr=1.0),
        noise_multiplier=1.0,
        max_grad_norm=CLIP,
        expected_batch_size=options.opacus_batch,
    )
    count, size = len(arrays["y_train"]) // options.opacus_batch * options.opacus_batch, options.opacus_batch
    x = Pixels()(torch.from_numpy(arrays["x_train"][:count])).to(options.device, dtype)
    x, y = (
        x.contiguous(memory_format=torch.channels_last),
        torch.from_numpy(arrays["y_train"][:count]).to(options.device),
    )
    seconds = []
    for _ in range(options.rounds):
        synchronize(options.device)
        began = time.perf_counter()
        for start in range(0, count, size):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(sampled(x[start : start + size]).float(), y[start : start + size])
            loss.backward()
            optimizer.step()
        synchronize(options.device)
        seconds.append(time.perf_counter() - began)
    return count / statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=45_000)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "float32"))
    parser.add_argument("--cut", default="none")
    parser.add_argument("--opacus-batch", type=int, default=OPACUS_BATCH)
    options = parser.parse_args()
    arrays = images(options.rows)
    found: dict[str, object] = {**vars(options), "out": "", "torch": torch.__version__}
    if options.device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as folder:
        module, weights = network(Path(folder))
        seconds = private_rounds(arrays, weights, options)
    ours = options.rows / statistics.median(seconds)
    found |= {"round_s": statistics.median(seconds), "rounds_s": seconds, "rows_per_s": ours}
    print(json.dumps(found), flush=True)
    if options.cut == "none":  # else the parameters differ
        try:
            theirs = opacus_rows_per_second(arrays, module, options)
            found |= {"opacus_rows_per_s": theirs, "ratio": ours / theirs}
        except ImportError as error:
            found["opacus"] = f"not measured: {error}"
        print(json.dumps(found))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "tail.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

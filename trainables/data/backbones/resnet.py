"""The residual networks for small images of He et al. (2016): three stages of 16, 32 and 64 channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        same = stride == 1 and channels == out
        self.downsample = (
            None if same else nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        inner = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(inner + shortcut)


class ResNet(nn.Module):
    """6 x blocks + 2 layers deep."""

    def __init__(self, blocks: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, 1, blocks)
        self.layer2 = self._stage(16, 32, 2, blocks)
        self.layer3 = self._stage(32, 64, 2, blocks)
        self.fc = nn.Linear(64, classes)

    @staticmethod
    def _stage(channels: int, out: int, stride: int, blocks: int) -> nn.Sequential:
        return nn.Sequential(Block(channels, out, stride), *(Block(out, out, 1) for _ in range(blocks - 1)))

    def stages(self) -> dict[str, nn.Module]:
        """The network as a chain, for models that train its last stages."""
        stem = nn.Sequential(self.conv1, self.bn1, nn.ReLU())
        stages = {f"layer{number}": getattr(self, f"layer{number}") for number in (1, 2, 3)}
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return {"stem": stem, **stages, "pool": pool, "fc": self.fc}

    def penultimate(self, x: Tensor) -> Tensor:
        """64 features per image."""
        x = torch.relu(self.bn1(self.conv1(x)))
        return self.layer3(self.layer2(self.layer1(x))).mean(dim=(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.penultimate(x))

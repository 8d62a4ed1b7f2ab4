"""A small transformer over 6 words of a row. Replace its weights with those of your pretrained network."""

from __future__ import annotations

import torch
from torch import nn

from fedsweep.plugins import network

WORDS, WIDTH = 6, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(torch.softmax(q @ k.mT / WIDTH**0.5, dim=-1) @ v)


@network("tiny-transformer")
def tiny_transformer(features: int, classes: int) -> nn.Module:
    torch.manual_seed(0)  # in place of: module.load_state_dict(torch.load("pretrained.pt"))
    return nn.Sequential(
        nn.Unflatten(1, (WORDS, features // WORDS)),
        nn.Linear(features // WORDS, WIDTH),
        Block(),
        Block(),
        nn.Flatten(),
        nn.Linear(WORDS * WIDTH, classes),
    )

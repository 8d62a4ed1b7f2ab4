"""DP-FTRL: theta_0 - eta (sum of gradients so far) / t, the sums noised through a binary tree.

Honest mode: one noise per tree node that some prefix uses. With full participation a record is under every node, so a
node of m leaves moves by m times what one gradient moves by, and the sensitivity is that of all used nodes together.
`noise: independent`: noise of its own every round, for all T of them. With every record in every round no tree does
better: the best factorisation of any such workload is diagonal, a schedule of noises over rounds, and for the last
weights it is the even one (docs/privacy.md has the proof). At 70 rounds prefix sums through the tree have seven times
the squared error.
`as_released`: independent noise too, calibrated as if only ceil(log2 T) + 1 of the T rounds were released.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from trainables.lazy import torch
from trainables.methods.base import (
    ClientProgram,
    ClientRound,
    Hyperparameter,
    Hypers,
    Method,
    Run,
    State,
    as_released,
    learning_rate,
)
from trainables.privacy.plan import Event, Level


def prefix_nodes(t: int) -> Iterator[tuple[int, int]]:
    """The tree nodes whose sum is the prefix 1..t: (last leaf, level), a node of level j having 2^j leaves."""
    end = 0
    for level in reversed(range(t.bit_length())):
        if t >> level & 1:
            end += 1 << level
            yield end, level


def used_nodes(rounds: int, restart_every: int) -> set[tuple[int, int, int]]:
    """(tree, last leaf, level) of every node that a prefix of some round uses."""
    span = restart_every or rounds
    return {
        ((t - 1) // span, end, level) for t in range(1, rounds + 1) for end, level in prefix_nodes((t - 1) % span + 1)
    }


@dataclass(frozen=True)
class TreeGradient(ClientProgram):
    """The gradient of a round with the difference of two prefixes' noises: the releases add up to noisy prefixes."""

    restart_every: int

    @property
    def name(self) -> str:
        return f"tree-noised gradient, restart {self.restart_every}"

    def round(self, client: ClientRound, theta: torch.Tensor) -> torch.Tensor:
        leaf = (client.t - 1) % self.restart_every + 1 if self.restart_every else client.t
        total = client.clipped_gradient_sum(theta)
        now, before = set(prefix_nodes(leaf)), set(prefix_nodes(leaf - 1))
        for sign, nodes in ((1, now - before), (-1, before - now)):
            for end, level in sorted(nodes):
                # a node's noise is addressed by the round of its last leaf and by its level
                total = total + client.noise("tree", level, client.t - leaf + end, sign)
        return (total / client.size).to(theta)


class DPFTRL(Method):
    name = "dp-ftrl"
    title = "DP-FTRL"
    paper = "Kairouz et al. 2021 (baseline of DP-FedSOFIM, arXiv:2601.09166)"
    hyperparameters = (
        learning_rate(5.0),
        Hyperparameter(
            "restart_every", 0, "rounds after which a new tree begins; 0: one tree", low=0, integer=True, shared=True
        ),
        Hyperparameter(
            "noise",
            "tree",
            "tree, as published, or independent from round to round",
            choices=("tree", "independent"),
            shared=True,
        ),
        as_released("noise for ceil(log2 T) + 1 releases although all T are released"),
    )

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        independent = hypers["as_released"] or hypers["noise"] == "independent"
        return super().program(hypers, level) if independent else TreeGradient(int(hypers["restart_every"]))

    def releases(self, run: Run) -> tuple[Event, ...]:
        moves = run.privacy.sensitivity
        if run.hypers["as_released"]:
            factor = math.sqrt((math.ceil(math.log2(run.rounds)) + 1) / run.rounds) if run.rounds > 1 else 1.0
            return (Event("gradient", run.rounds, moves, calibrated_for=moves * factor),)
        if run.hypers["noise"] == "independent":
            return (Event("gradient", run.rounds, moves),)
        nodes = used_nodes(run.rounds, int(run.hypers["restart_every"]))
        return (Event("tree", 1, moves * math.sqrt(sum(4**level for _, _, level in nodes))),)

    def initial_state(self, theta: torch.Tensor, hypers: Hypers) -> State:
        return {"theta_0": theta.clone(), "sum": torch.zeros_like(theta)}

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        state["sum"] = state["sum"] + G
        return state["theta_0"] - hypers["learning_rate"] * state["sum"] / t

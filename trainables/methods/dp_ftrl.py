"""DP-FTRL: follow the regularised leader with noisy prefix sums.

    theta_t = theta_0 - eta (G_1 + ... + G_t) / t

`noise: tree` (as published): prefix sums get their noise through a binary tree, one draw per node that some prefix
uses. With full participation a record is in every round, so it changes the sum of a node with m leaves by m times the
sensitivity s of one gradient. All used nodes are one release of sensitivity s sqrt(sum of m^2).
`noise: independent`: fresh noise every round, accounted for all T rounds. If every record is in every round no tree is
better: the optimal factorisation of such a workload is diagonal, and for the last iterate it has equal noise in all
rounds (docs/design-notes.md has the proof). At 70 rounds, prefix sums through the tree have 7 times the
squared error of those with independent noise.
`as_released`: independent noise, calibrated as if only ceil(log2 T) + 1 of the T rounds were released.
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
    """The tree nodes that add up to the prefix 1..t, as (last leaf, level); a node of level j has 2^j leaves."""
    end = 0
    for level in reversed(range(t.bit_length())):
        if t >> level & 1:
            end += 1 << level
            yield end, level


def used_nodes(rounds: int, restart_every: int) -> set[tuple[int, int, int]]:
    """(tree, last leaf, level) of every node used by some prefix."""
    span = restart_every or rounds
    return {
        ((t - 1) // span, end, level) for t in range(1, rounds + 1) for end, level in prefix_nodes((t - 1) % span + 1)
    }


@dataclass(frozen=True)
class TreeGradient(ClientProgram):
    """A round's gradient plus noise(prefix t) - noise(prefix t - 1): the releases add up to noisy prefixes."""

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
            "restart_every", 0, "rounds per tree; 0: one tree for all rounds", low=0, integer=True, shared=True
        ),
        Hyperparameter(
            "noise",
            "tree",
            "tree (as published) or independent in every round",
            choices=("tree", "independent"),
            shared=True,
        ),
        as_released("noise for ceil(log2 T) + 1 releases, although there are T"),
    )

    def program(self, hypers: Hypers, level: Level = "record") -> ClientProgram:
        independent = hypers["as_released"] or hypers["noise"] == "independent"
        return super().program(hypers, level) if independent else TreeGradient(int(hypers["restart_every"]))

    def releases(self, run: Run) -> tuple[Event, ...]:
        sensitivity = run.privacy.sensitivity
        if run.hypers["as_released"]:
            factor = math.sqrt((math.ceil(math.log2(run.rounds)) + 1) / run.rounds) if run.rounds > 1 else 1.0
            return (Event("gradient", run.rounds, sensitivity, calibrated_for=sensitivity * factor),)
        if run.hypers["noise"] == "independent":
            return (Event("gradient", run.rounds, sensitivity),)
        nodes = used_nodes(run.rounds, int(run.hypers["restart_every"]))
        return (Event("tree", 1, sensitivity * math.sqrt(sum(4**level for _, _, level in nodes))),)

    def initial_state(self, theta: torch.Tensor, hypers: Hypers) -> State:
        return {"theta_0": theta.clone(), "sum": torch.zeros_like(theta)}

    def step(self, t: int, theta: torch.Tensor, G: torch.Tensor, state: State, hypers: Hypers) -> torch.Tensor:
        state["sum"] = state["sum"] + G
        return state["theta_0"] - hypers["learning_rate"] * state["sum"] / t

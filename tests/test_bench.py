"""The parts of `fedsweep bench` that need no Ray, on small problems: they run, and notice a disagreement."""

from types import SimpleNamespace

import pytest
import torch

from orchestrator.bench import machine as bench


@pytest.fixture
def lab():
    return SimpleNamespace(problem=bench.problem_of("synthetic-frozen:400,100,6,3", clients=4))


def test_the_closed_form_is_held_against_gradients_in_memory(lab):
    said = []
    found = bench._per_example(lab, "cpu", said.append)
    assert found["per_example_ms"] > 0
    assert found["per_example_speedup"] > 0
    assert len(said) == 1


def test_two_ways_that_disagree_are_an_error(lab, monkeypatch):
    honest = bench.SoftmaxHead.clipped_gradient_sum

    def wrong(head, shard, theta, clip, **more):
        total, diagnostics = honest(head, shard, theta, clip, **more)
        return total + torch.ones_like(total), diagnostics

    monkeypatch.setattr(bench.SoftmaxHead, "clipped_gradient_sum", wrong)
    with pytest.raises(bench.DisagreementError):
        bench._per_example(lab, "cpu", print)

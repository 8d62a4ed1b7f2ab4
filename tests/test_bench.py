"""The parts of `fedsweep bench` that need no Ray, on small problems: they run and detect disagreement."""

import tomllib
from types import SimpleNamespace

import pytest
import torch

from orchestrator.bench import kernel_speed, pack_speed, workload
from trainables.federation.federation_size import FederationSize
from trainables.federation.pack import pack_group


@pytest.fixture
def lab():
    return SimpleNamespace(problem=workload.problem_of("synthetic-frozen:400,100,6,3", clients=4))


def quick(log):
    return workload.Measurement(FederationSize(), quick=True, log=log)


def test_the_closed_form_is_compared_with_per_example_gradients(lab):
    messages = []
    report = kernel_speed.per_example(quick(messages.append), lab)
    assert report["per_example_ms"] > 0
    assert report["per_example_speedup"] > 0
    assert len(messages) == 1


def test_centred_packs_are_compared_with_plain_ones():
    opened, seconds = [], iter([2.0, 3.0])
    started = SimpleNamespace(open=opened.append, round_seconds=lambda rounds: next(seconds))
    report = pack_speed.centred(quick(print), workload.Workload("synthetic-frozen:400,100,6,3", clients=4), started)
    assert report == {"centred_ratio": 1.5}
    plain, centred = opened
    assert len({trial.key for trial in (*plain, *centred)}) == 2 * len(plain)
    assert len({pack_group(trial) for trial in centred}) == 1
    assert len({(trial.seed, trial.privacy.epsilon) for trial in centred}) == 20


@pytest.mark.parametrize(("gpus", "where"), [(0.0, "on 2 cores"), (1.0, "on the GPU")])
def test_the_rate_of_matrix_products_names_the_device(gpus, where, monkeypatch):
    monkeypatch.setattr(pack_speed, "gemm_rate", lambda size: 1e9)
    started = SimpleNamespace(open=lambda trials: None, round_seconds=lambda rounds: 1.0)
    measured = SimpleNamespace(flops=lambda: 1.0, trials=lambda count: [])
    messages = []
    measurement = workload.Measurement(FederationSize(2, gpus_per_host=gpus), quick=True, log=messages.append)
    pack_speed.lanes(measurement, measured, started)
    assert messages[0] == f"pure matrix products: 1.0 GFLOP/s {where}"


def test_disagreement_is_an_error(lab, monkeypatch):
    correct = kernel_speed.SoftmaxHead.clipped_gradient_sum

    def wrong(head, shard, theta, clip, **more):
        total, diagnostics = correct(head, shard, theta, clip, **more)
        return total + torch.ones_like(total), diagnostics

    monkeypatch.setattr(kernel_speed.SoftmaxHead, "clipped_gradient_sum", wrong)
    with pytest.raises(workload.DisagreementError):
        kernel_speed.per_example(quick(print), lab)


def test_the_wheel_contains_the_product_only(repository):
    """`benchmarks` would be a top-level package with a name that others use too."""
    settings = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert settings["include"] == ["fedsweep*", "orchestrator*", "trainables*", "search_spaces*"]

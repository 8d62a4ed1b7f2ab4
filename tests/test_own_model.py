"""A model as a plug-in, as docs/write-a-model.md describes it."""

import numpy as np
import pytest
import torch
from plugin_registry import temporary_plugins
from repository_files import DOCS, REPOSITORY, blocks

from orchestrator.execution import study_run
from orchestrator.execution.progress import View
from orchestrator.results.ledger import Ledger
from orchestrator.study.reading import parse
from trainables import models, plugins
from trainables.audit import model_contract
from trainables.errors import UserError
from trainables.federation.saved_model import SavedModel
from trainables.models.head import Head

EXAMPLE = REPOSITORY / "examples" / "plugin" / "low_rank.py"
STUDY = """\
name: own
data: [{source: "synthetic-frozen:400,100,6,3", label: tiny}]
partitions: [iid]
clients: 4
model: low-rank:2
methods: [{METHOD: {coarse: {learning_rate: [0.3, 3]}, fine: {learning_rate: [1]}}}]
epsilons: [.inf]
defaults: paper
rounds: {coarse: 4, fine: 4, confirm: 10}
seeds: {search: 42, contest: [], confirm: [42]}
search: {refine: table}
"""


@pytest.fixture
def example(monkeypatch):
    for variable in (plugins.VARIABLE, plugins.FOLDERS):
        monkeypatch.setenv(variable, "")
    with temporary_plugins():
        plugins.use(str(EXAMPLE))
        yield


def run(folder, text):
    study = parse(text, "own.yaml", folder)
    study_run.run(study, text, folder / "results", View(), backend="local")


def test_the_page_shows_the_example_itself():
    (shown,) = blocks(DOCS / "write-a-model.md", "python")
    assert shown == EXAMPLE.read_text()


def test_the_example_passes_every_check(example):
    assert [result.failure for result in model_contract.run_checks("low-rank:2")] == [""] * 5


@pytest.mark.parametrize("name", ["softmax", "mlp:4", "multinomial"])
def test_packaged_models_pass_every_check(name):
    assert [result.failure for result in model_contract.run_checks(name)] == [""] * 5


class Broken(Head):
    name = "broken"

    def shapes(self):
        return {"W": (self.features + 1, self.classes)}

    def forward(self, weights, x):
        return x @ weights["W"]


class WrongShape(Broken):
    def forward(self, weights, x):
        return (x @ weights["W"])[:-1]


class OtherGradient(Broken):
    def clipped_gradient_sum(self, *arguments, **options):
        total, diagnostics = super().clipped_gradient_sum(*arguments, **options)
        return -total, diagnostics


class MixesLanes(Broken):
    def clipped_gradient_sum(self, *arguments, **options):
        total, diagnostics = super().clipped_gradient_sum(*arguments, **options)
        return total + 1e-6 * total.mean(1, keepdim=True), diagnostics


class IgnoresClip(Broken):
    def clipped_gradient_sum(self, shard, theta, clip, **options):
        return super().clipped_gradient_sum(shard, theta, 1.01 * clip, **options)


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (WrongShape, "the scores have shape"),
        (OtherGradient, "the gradient differs from a numerical derivative"),
        (MixesLanes, "depends on the other lanes"),
        (IgnoresClip, "the clip is 0.5"),
    ],
)
def test_broken_models_are_found(broken, sentence):
    with temporary_plugins():
        models.HEADS["broken"] = broken
        failures = [result.failure for result in model_contract.run_checks("broken")]
    assert any(sentence in failure for failure in failures), failures


def test_the_same_model_written_as_a_plugin_trains_alike(tmp_path):
    """A linear head from the base class against the packaged one: equal up to rounding."""
    with temporary_plugins():
        models.HEADS["broken"] = Broken
        accuracies = []
        for model in ("broken", "softmax"):
            text = STUDY.replace("METHOD", "dp-fedgd").replace("low-rank:2", model)
            (tmp_path / model).mkdir()
            run(tmp_path / model, text)
            with Ledger.read(tmp_path / model / "results") as ledger:
                accuracies.append(sorted(loss for _, _, loss in ledger.outcomes().values()))
    assert accuracies[0] == pytest.approx(accuracies[1], rel=1e-4)


def test_a_study_with_the_example(example, tmp_path):
    run(tmp_path, STUDY.replace("METHOD", "dp-fedsofim"))
    assert (tmp_path / "results" / "tables" / "accuracy.md").exists()


def test_methods_that_need_a_closed_form_refuse_it(example, tmp_path):
    text = STUDY.replace(STUDY[STUDY.index("methods:") : STUDY.index("epsilons:")], "methods: [dp-fednewton]\n")
    with pytest.raises(UserError, match="model = 'low-rank:2': dp-fednewton cannot train it"):
        run(tmp_path, text)


def test_a_saved_model_names_the_missing_plugin(tmp_path, monkeypatch):
    weights = np.zeros(7 * 2 + 2 * 3 + 3, dtype=np.float32)
    for variable in (plugins.VARIABLE, plugins.FOLDERS):
        monkeypatch.setenv(variable, "")
    with temporary_plugins():
        plugins.use(str(EXAMPLE))
        SavedModel(weights, "low-rank:2", 6, 3, {}).save(tmp_path / "m.npz")
        loaded = SavedModel.load(tmp_path / "m.npz")
        assert loaded.predict(np.ones((2, 6), dtype=np.float32)).tolist() == [0, 0]
    for variable in (plugins.VARIABLE, plugins.FOLDERS):
        monkeypatch.setenv(variable, "")
    with pytest.raises(UserError, match=r"needs the model 'low-rank:2' of the plug-in 'low_rank', which is not loaded"):
        SavedModel.load(tmp_path / "m.npz")


def test_weights_are_laid_out_as_documented():
    model = Broken("", 2, 3)
    flat = torch.arange(9.0)
    assert torch.equal(model.arrays(flat)["W"], flat.view(3, 3))

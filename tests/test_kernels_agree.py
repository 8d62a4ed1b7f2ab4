"""One study computed by two kernels: last bits may differ, tables may not."""

import pytest
import small
import whole_study

from orchestrator.results.best_file import read_best
from orchestrator.results.ledger import Ledger
from orchestrator.results.winners import Results

TEXT = """\
name: twice
data: ["synthetic-frozen:1500,500,12,4"]
clients: 5
methods:
  - dp-fedgd: {coarse: {learning_rate: [0.01, 0.1, 1]}}
  - dp-fedsofim: {coarse: {learning_rate: [0.1, 1], rho: [1], beta: [0.9]}}
epsilons: [1, 10]
defaults: paper
rounds: {coarse: 12, fine: 12, confirm: 16}
evaluate_every: 4
search: {refine: zoom}
"""


@pytest.fixture(scope="module")
def by_kernel(tmp_path_factory):
    found = {}
    for kernel in small.kernels_of("cpu"):
        folder = tmp_path_factory.mktemp(kernel)
        with small.computed_with(kernel):
            whole_study.run(TEXT, folder)
        found[kernel] = folder
    if len(found) == 1:
        pytest.skip("there is no compiler here, so there is one kernel")
    return found


def test_the_same_configurations_win(by_kernel):
    ours, torchs = (read_best(folder / "best.yaml") for folder in by_kernel.values())
    assert {cell: chosen["hyperparameters"] for cell, chosen in ours.items()} == {
        cell: chosen["hyperparameters"] for cell, chosen in torchs.items()
    }


def test_scores_agree_within_their_own_spread(by_kernel):
    def scores(folder):
        with Ledger.read(folder) as ledger:
            return {cell.name: cell for cell in Results.read(ledger).cells}

    ours, torchs = map(scores, by_kernel.values())
    assert ours.keys() == torchs.keys()
    assert len(ours) == 4
    for name, cell in ours.items():
        one, other = cell.curve[16], torchs[name].curve[16]
        assert one.mean == pytest.approx(other.mean, abs=max(one.std, other.std)), name

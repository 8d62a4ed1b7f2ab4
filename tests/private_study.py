"""A small study with a private search."""

from pathlib import Path

from orchestrator.study.reading import parse

SECRET = b"k" * 32  # draws seven runs


TEXT = """\
name: tiny
data: [{source: "synthetic-frozen:400,100,6,3", label: tiny}]
partitions: [iid]
clients: 4
methods:
  - dp-fedgd:
      coarse: {learning_rate: [0.01, 0.1, 1, 10]}
      fine: {learning_rate: [0.1, 0.5]}
epsilons: [40]
privacy: {clip: 2}
rounds: {confirm: 6}
evaluate_every: 2
search: {strategies: [private], trials: 6}
resources: {gpus_per_host: 0}
"""


def study(text: str = TEXT):
    return parse(text, "tiny.yaml", Path.cwd())

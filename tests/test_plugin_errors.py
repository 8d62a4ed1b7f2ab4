"""Exceptions in plug-ins: the trials of a method fail at once, others go on, and the user sees the own traceback."""

import numpy as np
import pytest
import small
from plugin_registry import temporary_plugins

import fedsweep as face
from trainables import plugins
from trainables.plugin_errors import PluginError, plugin_errors

BROKEN = """\
from fedsweep.plugins import Method, learning_rate


class Broken(Method):
    name = "dp-broken"
    title = "DP-Broken"
    paper = "none"
    hyperparameters = (learning_rate(1),)

    def {hook}:
        {body}

    {rest}
"""
STEP = "def step(self, t, theta, G, state, hypers):\n        return theta"
HOOKS = {
    "step": ("step(self, t, theta, G, state, hypers)", "return self.divide(t)", "def divide(self, t):\n        1 / 0"),
    "initial_state": ("initial_state(self, theta, hypers)", "1 / 0", STEP),
    "broadcast": ("broadcast(self, state, hypers)", "1 / 0", STEP),
}
GRID = {"coarse": {"learning_rate": [0.5, 1, 2]}, "fine": {"learning_rate": [1, 2]}}


def broken(folder, hook="step"):
    signature, body, rest = HOOKS[hook]
    path = folder / f"broken_{hook}.py"
    path.write_text(BROKEN.format(hook=signature, body=body, rest=rest))
    return path


def study(**changes):
    return {
        "name": "broken",
        "data": [small.SMALL],
        "clients": 4,
        "methods": [{"dp-fedgd": GRID}, {"dp-broken": GRID}],
        "defaults": "paper",
        "epsilons": [1, 8],
        "rounds": {"coarse": 3, "fine": 3, "confirm": 3},
        "seeds": {"search": [1, 2], "contest": [], "confirm": [42]},
        **changes,
    }


@pytest.mark.parametrize("hook", HOOKS)
def test_the_trials_of_a_broken_method_fail_at_once_and_the_others_go_on(tmp_path, hook):
    plugins.use(str(broken(tmp_path, hook)))
    sound = face.run_study(study(methods=[{"dp-fedgd": GRID}]), tmp_path / "sound", backend="local").trials
    results = face.run_study(study(), tmp_path / "results", backend="local")
    trials = results.trials
    of_broken = trials[trials["method"] == "DP-Broken"]
    assert len(of_broken) > 0
    assert set(of_broken["state"]) == {"failed"}
    others = trials[trials["method"] == "DP-FedGD"].set_index("key")
    assert others["accuracy"].to_dict() == sound.set_index("key")["accuracy"].to_dict(), "bit for bit"
    assert results.status["retries"] == []
    assert results.finished


def test_status_has_the_traceback_and_the_console_one_line(tmp_path, fedsweep):
    import yaml

    path, folder = broken(tmp_path), tmp_path / "results"
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study()))
    with temporary_plugins():
        command = ("run", tmp_path / "study.yaml", "--results", folder, "--backend", "local", "--import", path)
        code, _, err = fedsweep(*command)
    assert code == 1
    said = [line for line in err.splitlines() if "ZeroDivisionError" in line]
    assert said == [
        "some trials fail, the others continue: "
        f"method dp-broken raised ZeroDivisionError: division by zero ({path}, line 14)"
    ]
    with temporary_plugins():
        _, out, _ = fedsweep("status", folder, "--import", path)
    (failed,) = [line for line in out.splitlines() if line.startswith("failed:")]
    assert " and 11 more: method dp-broken raised" in failed
    shown = out.partition("failed:")[2]
    assert "return self.divide(t)" in shown
    assert "1 / 0" in shown
    assert "server.py" not in shown, "only the user's own frames"


@pytest.mark.ray
def test_on_ray_only_the_traceback_of_the_user_is_shown(tmp_path):
    """An exception at the clients, in processes of their own."""
    path = tmp_path / "raising_head.py"
    path.write_text(
        "from fedsweep.plugins import head\n"
        "from trainables.models.softmax import SoftmaxHead\n\n\n"
        "class Raising(SoftmaxHead):\n"
        "    def clipped_gradient_sum(self, *arguments, **options):\n"
        "        raise ValueError('no gradient today')\n\n\n"
        "@head('raising')\n"
        "def raising(text, features, classes):\n"
        "    return Raising(features, classes)\n"
    )
    plugins.use(str(path))
    with pytest.raises(face.UserError) as caught:
        face.train(small.SMALL, method="dp-fedgd", epsilon=8, rounds=2, clients=4, hosts=2, model="raising")
    sentence, *trace = str(caught.value).splitlines()
    assert sentence == f"a client's round raised ValueError: no gradient today ({path}, line 7)"
    assert "site-packages" not in "".join(trace)


SOURCES = """\
from fedsweep.plugins import data_source, head, partition


@data_source("noisy")
def noisy(text):
    return {"x_train": text.missing}


@partition("halves")
def halves(data, spec):
    return [data.nothing]


@head("odd")
def odd(text, features, classes):
    raise KeyError("odd")
"""


@pytest.mark.parametrize(
    ("options", "what", "line"),
    [
        (("--data", "noisy:1"), "data source 'noisy' raised AttributeError", 6),
        (("--data", small.SMALL, "--partition", "halves"), "partition 'halves' raised AttributeError", 11),
        (("--data", small.SMALL, "--model", "odd"), "model 'odd' raised KeyError", 16),
    ],
)
def test_sources_partitions_and_heads_name_their_file_and_line(fedsweep, tmp_path, no_ray, options, what, line):
    path = tmp_path / "my_parts.py"
    path.write_text(SOURCES)
    code, _, err = fedsweep("train", *options, "--epsilon", 1, "--clients", 4, "--import", path)
    assert code == 2
    sentence, *trace = err.splitlines()
    assert what in sentence
    assert sentence.endswith(f"({path}, line {line}).")
    assert trace[0] == "Traceback (most recent call last):"
    assert "trainables" not in "".join(trace)


def test_errors_of_the_machine_are_not_blamed_on_a_method():
    for error in (MemoryError(), OSError(28, "No space left on device")):
        with pytest.raises(type(error)), plugin_errors("method x", retry_environment=True):
            raise error
    with pytest.raises(PluginError, match="method x raised ValueError"), plugin_errors("method x"):
        np.zeros(3).reshape(2, 2)

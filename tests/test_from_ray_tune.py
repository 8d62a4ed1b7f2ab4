"""Every code block of docs/from-ray-tune.md runs."""

import pytest
from plugin_registry import temporary_plugins
from repository_files import DOCS, blocks

PAGE = DOCS / "from-ray-tune.md"


@pytest.mark.ray
def test_the_python_blocks_run(tmp_path, monkeypatch, capsys):
    import ray

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", raising=False)  # set where a study has run on Ray
    names: dict = {}
    first, frame, view, train, trainable = blocks(PAGE, "python")
    for program in (first, frame, view):
        exec(compile(program, PAGE.name, "exec"), names)
    assert names["results"].finished
    assert len(names["search"]) == 12 * 2
    assert "DP-FedGD" in capsys.readouterr().out, "the view prints"
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    try:
        exec(compile(train, PAGE.name, "exec"), names)
        assert list(names["curve"]) == [1, 2, 3, 4, 5, 6]
        one_trial = trainable.replace("[0.3, 1.0]", "[1.0]")
        assert one_trial != trainable
        exec(compile(one_trial, PAGE.name, "exec"), names)
        assert not names["grid"].errors
        frame = names["grid"].get_dataframe()
        rate = frame.set_index("config/learning_rate")["accuracy"]
        assert rate[1.0] == names["model"].accuracy, "the same training as outside of Tune"
    finally:
        ray.shutdown()


def test_the_study_runs(tmp_path, monkeypatch, fedsweep):
    (tmp_path / "tune.yaml").write_text(*blocks(PAGE, "yaml"))
    (command,) = blocks(PAGE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSWEEP_IMPORT", "")
    with temporary_plugins():
        status, _, err = fedsweep(*command.split()[1:], "--backend", "local")
    assert status == 0, err
    assert (tmp_path / "results" / "tune" / "best.yaml").exists()

"""`fedsweep audit --program`: a tiny program in NumPy, honest and with planted faults."""

import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import assert_one_sentence, last_json

from trainables.audit.coin_bounds import ratio_bound

EXAMPLE = Path(__file__).parents[1] / "examples" / "audit" / "numpy_program.py"
DATA = "synthetic-frozen:1000,50,10,3"


def program(fault, seed=1):
    return f"{sys.executable} {EXAMPLE} --fault {fault} --seed {seed}"


def test_an_honest_program_passes(fedsweep):
    code, out, _ = fedsweep("audit", "--program", program("none"), "--data", DATA, "--epsilon", 2, "--json")
    found = last_json(out)
    assert code == 0
    assert 0.5 < found["epsilon"]["at_least"] < 2
    assert found["mu"]["estimate"] == pytest.approx(0.5016, abs=0.2)


@pytest.mark.parametrize("fault", ["divisor", "steps", "clip-after-mean"])
def test_a_fault_is_caught(fedsweep, fault):
    code, out, _ = fedsweep("audit", "--program", program(fault), "--data", DATA, "--epsilon", 2)
    assert code == 1
    assert "FAILED" in out


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["--program", "no-such-program", "--epsilon", "2"], "cannot be started"),
        (["--program", "'", "--epsilon", "2"], "cannot be started"),
        (["--program", "false", "--epsilon", "2"], "exit code 1"),
        (["--program", "true", "--epsilon", "2"], "wrote neither weights.npy nor release-*.npy"),
        (["--program", "true"], "the budget is missing"),
        (["--program", "true", "--epsilon", "2", "--rounds", "3"], "--rounds"),
        ([], "nothing to audit"),
    ],
)
def test_bad_input(fedsweep, arguments, culprit):
    assert_one_sentence(fedsweep("audit", *arguments), culprit)


@pytest.mark.parametrize(
    ("written", "culprit"),
    [
        ({"weights.npy": "np.array([{}])"}, "Object arrays cannot be loaded"),
        ({"weights.npy": "np.array(1.0)"}, "has shape ()"),
        ({"weights.npy": "np.zeros((0, 3))"}, "has shape (0, 3)"),
        ({"weights.npy": "np.array(['a'])"}, "cannot be read as arrays"),
        ({"weights.npy": "np.full((60, 3), np.nan)"}, "not finite"),
        ({"release-1.npy": "np.zeros(3)", "release-2.npy": "np.zeros(4)"}, "arrays of one shape"),
    ],
)
def test_what_a_program_writes_is_checked(fedsweep, tmp_path, written, culprit):
    """It may be anything, and none of it is executed."""
    lines = [f"np.save(f'{{sys.argv[2]}}/{name}', {value})" for name, value in written.items()]
    (tmp_path / "program.py").write_text("\n".join(["import sys", "import numpy as np", *lines]))
    command = f"{sys.executable} {tmp_path / 'program.py'}"
    arguments = ("--data", DATA, "--canaries", 50, "--epsilon", 2)
    assert_one_sentence(fedsweep("audit", "--program", command, *arguments), culprit)


@pytest.mark.parametrize(
    ("line", "culprit"),
    [
        ("os.mkfifo(f'{sys.argv[2]}/release-1.npy')", "is not a plain file"),
        ("os.symlink('/etc/hostname', f'{sys.argv[2]}/weights.npy')", "is a symbolic link"),
        ("sys.stderr.buffer.write(b'\\xff'), sys.exit(1)", "exit code 1"),
    ],
)
def test_a_hostile_program_is_one_sentence(fedsweep, tmp_path, line, culprit):
    (tmp_path / "program.py").write_text(f"import os, sys\n{line}\n")
    arguments = ("--data", DATA, "--canaries", 50, "--epsilon", 2)
    command = f"{sys.executable} {tmp_path / 'program.py'}"
    assert_one_sentence(fedsweep("audit", "--program", command, *arguments), culprit)


def test_the_ratio_bound_holds_as_often_as_stated():
    rng = np.random.default_rng(0)
    coins = 2.0 * rng.integers(0, 2, 200) - 1
    bounds = [ratio_bound(3 + 0.5 * coins + rng.standard_normal(200), coins)[0] for _ in range(1000)]
    assert 0.005 < np.mean(np.array(bounds) > 0.5) < 0.045
    assert np.mean(bounds) > 0.3

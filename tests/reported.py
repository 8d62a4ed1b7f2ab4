"""A ledger written by hand that fills every part of the report, with names that contain markup."""

from pathlib import Path

from handmade_ledgers import LAST, Writer, setting_id, study, writing

from orchestrator.results.ledger import DataNames

HOSTILE = '</script><img src=x onerror="boom()">'
METHOD = "<b onclick='boom()'>A&B</b>\u2028${1}"
DESCRIPTION = "<script>boom()</script> <!-- --> ]]> & \"quotes\" 'and' `more`"
SETTING = f"{HOSTILE} / iid"
RATES, TAUS = (0.01, 0.1, 1.0), (0.001, 0.1)


def hostile_study(**changes):
    return study(
        description=DESCRIPTION,
        data=[{"source": "synthetic-frozen:600,20,12,4", "label": HOSTILE}],
        methods=["dp-fedgd", {"dp-fedadam": {"label": METHOD}}],
        seeds={"confirm": [1, 2, 3]},
        **changes,
    )


def accuracy(rate: float, tau: float, epsilon: float) -> float:
    return 40 + epsilon + 10 * (rate == 0.1) + 4 * (tau == 0.1)


def write(folder: Path, *, finished: bool = True, shift: float = 0.0) -> None:
    with writing(folder, hostile_study(), setting=SETTING) as writer:
        writer.ledger.begin_session()
        writer.ledger.add_partitions(
            {(setting_id(writer.study, SETTING), 42): [[10, 0, 3], [0, 7, 5], [1, 1, 1], [20, 2, 2]]}
        )
        writer.ledger.add_names({writer.study.data[0].id: DataNames([HOSTILE, "ill", "healthy"], [])})
        writer.ledger.add_data({writer.study.data[0].id: "synthetic-frozen:1:600,20,12,4"})
        for epsilon in (1, 8):
            fill(writer, epsilon, finished or epsilon == 1, shift)
        writer.ledger.add_failure(["a", "b"], f"actor died {HOSTILE}")


def fill(writer: Writer, epsilon: float, confirmed: bool, shift: float = 0.0) -> None:
    gd = [({"learning_rate": rate}, accuracy(rate, 0.001, epsilon)) for rate in RATES]
    writer.search("dp-fedgd", epsilon, {"coarse": gd, "fine": gd[1:2]})
    adam = [
        (
            {"learning_rate": rate, "tau": tau},
            "diverged" if (rate, tau) == (1.0, 0.001) else accuracy(rate, tau, epsilon),
        )
        for rate in RATES
        for tau in TAUS
    ]
    writer.search("dp-fedadam", epsilon, {"coarse": adam, "fine": adam[3:4]}, label=METHOD)
    if confirmed:
        confirm(writer, epsilon, shift)


def confirm(writer: Writer, epsilon: float, shift: float = 0.0) -> None:
    for method, label, hypers, score in (
        ("dp-fedgd", "", {"learning_rate": 0.1}, 50.0),
        ("dp-fedadam", METHOD, {"learning_rate": 0.1, "tau": 0.1}, 55.0 + shift),
    ):
        curves = {seed: {10: score - 10 + seed, LAST: score + epsilon + seed / 10} for seed in (1, 2, 3)}
        correct = {seed: bytes([seed, 0xF0, 0xF0]) for seed in (1, 2, 3)}
        writer.confirm(method, epsilon, hypers, curves, label=label, correct=correct)

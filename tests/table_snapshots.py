"""Every file that the tables write, for ledgers filled by hand, compared with tests/snapshots/."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from handmade_ledgers import SETTING, TEST_ROWS, Writer, build, study

from orchestrator.results.ledger import Ledger, Row
from orchestrator.search.strategies.halving import RUNGS
from orchestrator.study.settings.method import MethodSettings
from orchestrator.study.study import Study
from trainables import methods
from trainables.data import partition
from trainables.federation.trial_spec import DataSpec, Preprocess, ProblemSpec, TrialSpec
from trainables.privacy.plan import PrivacySettings

SNAPSHOTS = Path(__file__).with_name("snapshots")


CASES: dict[str, Callable[[Path], None]] = {}


def case(fill):
    CASES[fill.__name__.replace("_", "-")] = fill
    return fill


class Filler(Writer):
    """Trials of the study with made-up results. Methods are named as in tables."""

    def method(self, name: str) -> MethodSettings:
        return next(method for method in self.study.methods if method.shown == name)

    def run(
        self, name, epsilon, hypers, seed, *, confirm=True, dealt=42, rounds=None, clip=None, dealt_as="iid"
    ) -> TrialSpec:
        method, stated = self.method(name), self.study.privacy
        own = method.preprocess or self.study.preprocess
        return TrialSpec(
            problem=ProblemSpec(
                data=DataSpec(fingerprint="by hand"),
                partition=partition.parse(dealt_as, clients=self.study.clients, seed=dealt),
                train_on="all" if confirm else "train",
                evaluate_on="test" if confirm else "validation",
            ),
            method=method.name,
            hyperparameters=methods.get(method.name).check({**method.space().fixed, **hypers}),
            privacy=PrivacySettings(
                epsilon=epsilon,
                clip=clip or method.clip or stated.clip,
                **{part: getattr(stated, part) for part in ("delta", "release", "adjacency", "level", "clipping")},
            ),
            rounds=rounds or self.study.stage_rounds(method).confirm,
            evaluate_every=self.study.evaluate_every,
            seed=seed,
            preprocess=Preprocess(center=own.center, bound=own.bound),
            aggregate=method.aggregate or self.study.aggregate,
        )

    def ended(self, trial: TrialSpec, curve, state="done", rounds=None, more=None, correct=b"", **fields) -> Row:
        """curve: objective by round; more: other metrics."""
        metric, last = self.study.objective, trial.last_round if rounds is None else rounds
        score = curve[last] if state == "done" else None
        actual = {"local": trial.privacy.epsilon, "secure": trial.privacy.epsilon / 2}
        if trial.privacy.release == "secure-aggregation":
            actual = {"local": 3 * trial.privacy.epsilon, "secure": trial.privacy.epsilon}
        found = {
            "accuracy": score if metric == "accuracy" else None,
            "loss": None if score is None else score if metric == "loss" else 1.0,
            "reason": "" if state == "done" else f"it {state}",
            "epsilon_claimed": trial.privacy.epsilon,
            "epsilon_local": actual["local"],
            "epsilon_secure": actual["secure"],
            "epsilon_unsampled": actual["local" if trial.privacy.release == "local" else "secure"],
            "seconds": 0.25 * last,
            **fields,
        }
        metrics = {metric: curve, **(more or {})}
        return Row(trial.key, trial.model_dump_json(), state, rounds=last, metrics=metrics, correct=correct, **found)

    def searched(self, name, epsilon, stages, strategy="grid") -> None:
        """stages: name -> [(hyperparameters, scores by seed)]; a score may be a state, or None: not ended."""
        for stage, members in stages.items():
            keys, rows = [], []
            for hypers, scores in members:
                for seed, score in scores.items():
                    own = {name: hypers[name] for name in ("clip", "rounds") if name in hypers}
                    rest = {name: value for name, value in hypers.items() if name not in own}
                    trial = self.run(name, epsilon, rest, seed, confirm=False, **own)
                    stop = (
                        self.study.search.halving.rounds(trial.rounds)[RUNGS.index(stage)] if stage in RUNGS else None
                    )
                    if stop is not None and stop < trial.rounds:
                        trial = trial.model_copy(update={"stop_after": stop})
                    keys.append(trial.key)
                    if isinstance(score, str):
                        rows.append(self.ended(trial, {}, score, rounds=0 if score == "failed" else 3))
                    elif score is not None:
                        rows.append(self.ended(trial, {trial.last_round: score}))
            self.ledger.add(rows)
            self.ledger.add_stage(self.cell(self.method(name).name, epsilon, name), strategy, stage, keys)

    def confirmed(self, name, epsilon, hypers, curves, strategy="grid", dealt=None, correct=None, **fields) -> None:
        """curves: by seed, {round: score}, or (state, rounds, curve), or None: not ended yet."""
        keys, rows = [], []
        own = {part: fields.pop(part) for part in ("clip", "rounds", "dealt_as") if part in fields}
        for seed, came_to in curves.items():
            trial = self.run(name, epsilon, hypers, seed, dealt=(dealt or {}).get(seed, 42), **own)
            keys.append(trial.key)
            state, rounds, curve = came_to if isinstance(came_to, tuple) else ("done", None, came_to)
            if curve is not None:
                rows.append(self.ended(trial, curve, state, rounds, correct=(correct or {}).get(seed, b""), **fields))
        self.ledger.add(rows)
        self.ledger.add_stage(self.cell(self.method(name).name, epsilon, name), strategy, "confirm", keys)


@contextmanager
def filling(folder: Path, of: Study) -> Iterator[Callable[..., Filler]]:
    """One filler per setting."""
    with Ledger.write(folder) as ledger:
        ledger.add_study(of.model_dump_json(), "by hand")
        yield lambda setting=SETTING, facts=True, **more: Filler(ledger, of, setting, facts, **more)


def right(*rows: int) -> bytes:
    """The correctly classified test rows, as packed bits."""
    return np.packbits(np.isin(np.arange(TEST_ROWS), rows)).tobytes()


def first(count: int) -> bytes:
    return right(*range(count))


def ending(scores: dict[int, float], at: int = 20, before: float = 5.0) -> dict[int, dict[int, float]]:
    """Curves by seed that end at these scores; `before` is the offset halfway."""
    return {seed: {at // 2: score - before, at: score} for seed, score in scores.items()}


@case
def finished(folder: Path) -> None:
    """Two search seeds, a contest, zooming, three confirm seeds. At ε = 8 the plain method does worse than at 1."""
    of = study(
        description="Three methods, *two* budgets.",
        methods=["dp-fedgd", "dp-fedadam", {"dp-fedsofim": {"label": "SOFIM", "fixed": {"rho": 0.5}}}],
        seeds={"search": [1, 2], "contest": [4, 5], "confirm": [42, 7, 9]},
        search={"refine": "zoom", "finalists": 2},
    )
    rates = {"DP-FedGD": (0.1, 1.0, 3.0), "DP-FedAdam": (0.01, 0.1, 0.3), "SOFIM": (0.5, 1.0, 2.0)}
    ends = {
        ("DP-FedGD", 1): {42: 50.0, 7: 50.25, 9: 50.5},
        ("DP-FedGD", 8): {42: 48.0, 7: 48.5, 9: 48.75},
        ("DP-FedAdam", 1): {42: 50.0, 7: 50.5, 9: 50.25},
        ("DP-FedAdam", 8): {42: 60.0, 7: 61.0, 9: 62.0},
        ("SOFIM", 1): {42: 40.0, 7: 41.0, 9: 41.5},
        ("SOFIM", 8): {42: 61.0, 7: 61.5, 9: 61.75},
    }
    correct = {"DP-FedGD": first(8), "DP-FedAdam": first(12), "SOFIM": right(*range(4, 20))}
    with filling(folder, of) as filler:
        writer = filler(protected=150_000)
        for (name, epsilon), scores in ends.items():
            low, middle, high = rates[name]
            coarse = [
                ({"learning_rate": low}, {1: 40.0, 2: 44.0}),
                ({"learning_rate": middle}, {1: 46.0, 2: 45.0}),
            ]
            fine = [
                ({"learning_rate": middle}, {1: 46.0, 2: 45.0}),
                ({"learning_rate": high}, {1: 47.0, 2: 43.0} if epsilon == 8 else {1: 30.0, 2: 31.0}),
                ({"learning_rate": low / 2}, {1: "diverged", 2: "failed"}),
            ]
            contest = [
                ({"learning_rate": middle}, {4: 45.0, 5: 46.0}),
                ({"learning_rate": high}, {4: 46.0, 5: 44.5}),
            ]
            writer.searched(name, epsilon, {"coarse": coarse, "fine": fine, "contest": contest})
            writer.confirmed(
                name,
                epsilon,
                {"learning_rate": middle},
                ending(scores),
                correct={42: correct[name], 9: first(epsilon + 4)},
                more={
                    "clipped_share": {10: 12.5, 20: 30.0},
                    "signal_norm": {10: 0.5, 20: math.nan},
                    "noise_norm": {20: 123.456},
                },
            )


@case
def unfinished(folder: Path) -> None:
    """Two settings; many rounds; methods of different lengths; runs that were
    lost or are still to come."""
    of = study(
        data=[{"source": "folder/b.npz", "label": "b"}, {"source": "folder/a.npz", "backbone": "net"}],
        methods=["dp-fedgd", {"dp-fedadam": {"rounds": 22}}, "dp-fedyogi"],
        epsilons=[8, math.inf],
        evaluate_every=2,
    )
    long = {seed: {t: 2.0 * t + seed / 7 for t in range(2, 21, 2)} for seed in (42, 7)}
    longer = {seed: {t: 2.5 * t - seed / 7 for t in range(2, 23, 2)} for seed in (42, 7)}
    with filling(folder, of) as filler:
        writer = filler("b / iid")
        grid = [({"learning_rate": 0.1}, {42: 50.0}), ({"learning_rate": 1.0}, {42: 46.0})]
        fine = [({"learning_rate": 0.3}, {42: 45.0})]
        writer.searched("DP-FedGD", 8, {"coarse": grid, "fine": fine})
        writer.confirmed("DP-FedGD", 8, {"learning_rate": 0.1}, long, correct={42: first(9), 7: first(5)})
        writer.searched("DP-FedAdam", 8, {"coarse": [*grid, ({"learning_rate": 7.0}, {42: "diverged"})], "fine": fine})
        writer.confirmed("DP-FedAdam", 8, {"learning_rate": 0.1}, longer, correct={7: first(7)})
        writer.searched("DP-FedYogi", 8, {"coarse": grid, "fine": [({"learning_rate": 0.3}, {42: None})]})
        writer.searched("DP-FedGD", math.inf, {"coarse": [({"learning_rate": 0.1}, {42: "diverged"})]})
        writer.searched("DP-FedAdam", math.inf, {"coarse": grid, "fine": []})
        broken = ("diverged", 14, {t: longer[42][t] for t in range(2, 15, 2)})
        writer.confirmed(
            "DP-FedAdam", math.inf, {"learning_rate": 0.1}, {42: broken, 7: longer[7]}, correct={7: first(9)}
        )
        writer.searched("DP-FedYogi", math.inf, {"coarse": grid, "fine": [({"learning_rate": 0.3}, {42: "failed"})]})
        writer.confirmed("DP-FedYogi", math.inf, {}, {42: ("failed", 0, {}), 7: long[7]}, correct={7: first(7)})
        filler("a / net / iid", facts=False).searched("DP-FedGD", 8, {"coarse": [({"learning_rate": 0.2}, {42: None})]})


@case
def strategies(folder: Path) -> None:
    """A grid search, its winners picked by several seeds and by a single one; methods with centred features, too."""
    own = {"preprocess": {"center": 0.02, "bound": 16}, "clip": 4}
    of = study(
        methods=["dp-fedgd", "dp-fedsofim", {"dp-fedgd": own}, {"dp-fedsofim": {**own, "coarse": {"rho": [0.1, 0.9]}}}],
        epsilons=[2],
        seeds={"search": [1, 2], "contest": [], "confirm": [42, 7]},
        search={"select": ["contest", "single"], "refine": "zoom"},
        privacy={"release": "secure-aggregation"},
        confirm_train_on="train",
    )
    ends = {"DP-FedGD": 50.0, "DP-FedSOFIM": 50.5, "DP-FedGD, centred": 56.0, "DP-FedSOFIM, centred": 55.0}
    with filling(folder, of) as filler:
        writer = filler()
        for place, (name, score) in enumerate(ends.items()):
            above = {0.1: {1: -2, 2: 0}, 1.0: {1: -5, 2: -5}, 0.5: {1: -1, 2: -4}}
            for strategy, seeds, rate in (("grid", (1, 2), 0.1), ("grid single", (1,), 0.5)):
                tried = [
                    ({"learning_rate": r}, {seed: score + more[seed] for seed in seeds}) for r, more in above.items()
                ]
                writer.searched(name, 2, {"coarse": tried[:2], "fine": tried[2:]}, strategy)
                final = {42: score + rate, 7: score + rate + 5 * place * rate}
                writer.confirmed(
                    name, 2, {"learning_rate": rate}, ending(final), strategy, correct={7: first(4 + place)}
                )


@case
def errors(folder: Path) -> None:
    """Lower is better: a squared error, users' privacy in the sum, partitions by seed; the clip and the rounds are
    searched. The larger budget does worse."""
    searched = {"coarse": {"clip": [1.0, 2.0], "rounds": [10, 20]}}
    of = study(
        methods=["dp-fedgd", {"dp-fedadam": searched}],
        epsilons=[1, 4],
        objective="squared_error",
        model="auto",
        data=[{"source": "simulated:logistic,3,20,uniform,2,5", "label": "toy"}],
        seeds={"search": [1], "contest": [2, 3], "confirm": [42, 7, 3, 4], "partition": [5, 6]},
        privacy={"release": "secure-aggregation", "level": "user", "adjacency": "zero-out", "clipping": "adaptive"},
    )
    dealt = {42: 5, 7: 6, 3: 5, 4: 6}
    with filling(folder, of) as filler:
        writer = filler(protected=4)
        for epsilon, more in ((1, 0.0), (4, 0.5)):
            coarse = [({"learning_rate": rate}, {1: 1 / rate + more}) for rate in (0.1, 1.0, 4.0)]
            contest = [({"learning_rate": rate}, {2: 0.9 + more, 3: 1.2}) for rate in (1.0, 4.0)]
            writer.searched("DP-FedGD", epsilon, {"coarse": coarse, "fine": coarse[:1], "contest": contest})
            scores = {42: 0.5 + more, 7: 0.9 + more, 3: 0.625 + more, 4: 1.0 + more}
            writer.confirmed("DP-FedGD", epsilon, {"learning_rate": 1.0}, ending(scores, before=-0.25), dealt=dealt)
            grid = [
                ({"learning_rate": 1.0, "clip": clip, "rounds": rounds}, {1: clip / rounds})
                for clip in (1.0, 2.0)
                for rounds in (10, 20)
            ]
            writer.searched("DP-FedAdam", epsilon, {"coarse": grid, "fine": []})
            scores = {42: 0.75, 7: 0.75, 3: 0.875, 4: 1.0}
            writer.confirmed(
                "DP-FedAdam",
                epsilon,
                {"learning_rate": 1.0},
                ending(scores, before=-0.25),
                dealt=dealt,
                clip=1.0,
                rounds=20,
            )


@case
def private(folder: Path) -> None:
    """Only winners are shown: two known, one still running, and one cell without a winner."""
    of = study(
        methods=["dp-fedgd", "dp-fedsofim"],
        epsilons=[500, 1000],
        search={"strategies": ["private"], "trials": 3},
        seeds={"search": [1, 2]},
    )
    runs = [({"learning_rate": rate}, {seed: score}) for rate, seed, score in ((0.1, 3, 10.0), (1.0, 4, 60.0))]
    with filling(folder, of) as filler:
        writer = filler()
        for name, epsilon, right_rows in (("DP-FedGD", 500, 9), ("DP-FedSOFIM", 500, 16)):
            writer.searched(name, epsilon, {"private": runs}, "private")
            curve = {10: 40.0, 20: 5.0 * right_rows}
            more = {"loss": {20: 1.0}, "clipped_share": {20: 3.0}}
            bits = {4: first(right_rows)}
            writer.confirmed(name, epsilon, {"learning_rate": 1.0}, {4: curve}, "private", correct=bits, more=more)
        writer.searched("DP-FedGD", 1000, {"private": [*runs, ({"learning_rate": 0.1}, {5: None})]}, "private")
        writer.searched("DP-FedSOFIM", 1000, {"private": [({"learning_rate": 0.1}, {3: "diverged"})]}, "private")


@case
def single(folder: Path) -> None:
    """One seed, one budget, no facts; methods run as released, with samples, with a bound only, and with too little
    noise."""
    bounded = {"dp-fednew": {"fixed": {"as_released": True}}}
    released = {"name": "dp-scaffold", "label": "released", "fixed": {"as_released": True, "local_steps": 1}}
    of = study(
        methods=["dp-fedgd", "dp-fedadam", "dp-fedadamw", bounded, released, "dp-fedyogi"],
        epsilons=[1],
        seeds={"confirm": [42]},
        search={"strategies": ["random"], "trials": 1},
        compare_to="dp-fedgd",
        privacy={"clipping": "automatic"},
    )
    ends = {
        "DP-FedGD": 50.0,
        "DP-FedAdam": 50.001,
        "DP-FedAdamW": 49.0,
        "released (as released)": 80.0,
        "DP-FedYogi": 90.0,
    }
    accounts = {
        "DP-FedAdamW": {"epsilon_unsampled": 7.25},
        "DP-FedYogi": {"epsilon_local": 1.00001, "epsilon_secure": 1.5, "epsilon_unsampled": 1.00001},
    }
    with filling(folder, of) as filler:
        writer = filler(facts=False)
        for method in of.methods:
            name = method.shown
            writer.searched(name, 1, {"random": [({}, {42: 50.0})]}, "random")
            scores = {42: ends.get(name, 45.0)}
            account, bits = accounts.get(name, {}), {42: first(10)}
            writer.confirmed(name, 1, {}, ending(scores), "random", correct=bits, dealt_as="dirichlet:0.5", **account)


@case
def halving(folder: Path) -> None:
    """Three rungs, of which only the last is compared; the objective is the loss."""
    of = study(
        methods=["dp-fedgd", "dp-fedadam"],
        epsilons=[1],
        objective="loss",
        search={"strategies": ["halving"], "trials": 3},
        seeds={"search": [1], "confirm": [42, 7]},
    )
    with filling(folder, of) as filler:
        writer = filler()
        scores = {
            "rung-1": {0.1: 1.0, 0.2: 1.5, 0.4: 0.5, 0.8: 0.75},
            "rung-2": {0.4: 0.5, 0.8: 0.25},
            "rung-3": {0.8: 0.7},
        }
        rungs = {
            stage: [({"learning_rate": rate}, {1: score}) for rate, score in of_stage.items()]
            for stage, of_stage in scores.items()
        }
        writer.searched("DP-FedGD", 1, rungs, "halving")
        writer.confirmed("DP-FedGD", 1, {"learning_rate": 0.8}, ending({42: 0.5, 7: 0.75}, before=-0.25), "halving")
        writer.searched("DP-FedAdam", 1, {"rung-1": rungs["rung-1"], "rung-2": rungs["rung-2"]}, "halving")


ONLY_OF = {
    "README.md": ("finished", "unfinished", "private"),
    "best.yaml": ("finished", "errors", "private"),
    "trials.csv": ("unfinished", "private", "halving"),
    "seeds.csv": ("unfinished", "private", "halving"),
    "trade-off.csv": ("halving",),
    ".tex": ("finished",),
}


KEY = re.compile(r"\b[0-9a-f]{24}\b")


def written(name: str, folder: Path) -> dict[str, str]:
    """Every file of a case by path, except long files that are similar in all cases. Trial keys are masked: they
    change with the engine version."""
    CASES[name](folder)
    found = {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in build(folder)}
    assert not KEY.search(found["best.yaml"])
    return {
        place: KEY.sub("KEY", text)
        for place, text in sorted(found.items())
        if all(name in some or not place.endswith(end) for end, some in ONLY_OF.items())
    }


def kept(name: str) -> dict[str, str]:
    files = (path for path in sorted((SNAPSHOTS / name).rglob("*")) if path.is_file())
    return {str(path.relative_to(SNAPSHOTS / name)): path.read_text(encoding="utf-8") for path in files}


def renew(folder: Path) -> list[str]:
    """Write all snapshots; return which files changed."""
    found = []
    for name in CASES:
        before, now = kept(name), written(name, folder / name)
        for place in sorted({**before, **now}):
            path = SNAPSHOTS / name / place
            if place not in now:
                path.unlink()
            elif before.get(place) != now[place]:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(now[place], encoding="utf-8")
            if before.get(place) != now.get(place):
                how = "is new" if place not in before else "is gone" if place not in now else "has changed"
                found.append(f"{path.relative_to(SNAPSHOTS.parent)}: {how}")
    return found

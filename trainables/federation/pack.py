"""A pack: trials that run together, one lane each, and what its client hosts and its server need to know about them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainables import methods, metrics, models, plugins
from trainables.choices import AGGREGATES, PRECISIONS, Aggregate, Precision
from trainables.data import partition
from trainables.errors import UserError, one_of
from trainables.federation.problem import Problem, ProblemData
from trainables.federation.trial_spec import Preprocess, ProblemSpec, TrialSpec
from trainables.lazy import torch
from trainables.methods.base import ClientProgram, Hypers, Method, Run
from trainables.models import Model, network_settings
from trainables.models.network import NetworkModel
from trainables.privacy import lengths
from trainables.privacy.plan import Clipping, Event, Level, PrivacyPlan

CENTRE = "centre"  # purpose of the noise in the private mean of the features
LENGTHS = "lengths"  # purpose of the noise in the histogram of the rows' lengths
MOST_PLANS = 20_000  # plans in the cache; a study of a million trials has about ten thousand

PackGroup = tuple[str, str, int, int, int, str]
_plan = lru_cache(maxsize=MOST_PLANS)(PrivacyPlan.calibrate)


def pack_group(trial: TrialSpec) -> PackGroup:
    """Trials of one group can share a pack. They have the same problem, client program, rounds, rounds of evaluation,
    aggregation, clipping, secret participation, precision, noise key, metrics and hyperparameters of the model.
    Preprocessing is the same, too, except for its shares of the budget."""
    clipping, participation = trial.privacy.clipping, trial.privacy.secret_participation
    features = f"{trial.aggregate}:{clipping}:{participation}:{trial.precision}:{trial.noise_key}"
    if trial.preprocess.center:
        features = f"{features}:{trial.privacy.level}:{trial.preprocess.bound}:{trial.preprocess.shrink}"
    if trial.preprocess.scales:
        features = f"{features}:{trial.privacy.level}:{trial.preprocess.length}:{trial.preprocess.scale > 0}"
    features += ",".join(("", *trial.metrics))
    own = {
        name: trial.hyperparameters[name] for name in network_settings.HYPERPARAMETERS if name in trial.hyperparameters
    }
    features += str(own or "")
    rounds = trial.rounds, trial.last_round, trial.evaluate_every
    return trial.problem.key, program_of(trial).name, *rounds, features


def program_of(trial: TrialSpec) -> ClientProgram:
    hypers = {**trial.hyperparameters, "clipping": trial.privacy.clipping}
    return methods.get(trial.method).program(hypers, trial.privacy.level)


def is_computed_client_by_client(program: ClientProgram, model: Model, device: str) -> bool:
    """Whether a host computes one client at a time: a sample's padding must not depend on other clients, and clients
    that do not take part need not be computed. Networks compute clients one by one anyway; for other models a GPU needs
    many rows at a time."""
    return (device == "cpu" or isinstance(model, NetworkModel)) and (program.samples or program.participation < 1)


def plan_of(trial: TrialSpec, sizes: Sequence[int]) -> PrivacyPlan:
    """The mechanism of a trial and its account."""
    method = methods.get(trial.method)
    hypers = method.resolve(dict(trial.hyperparameters), trial.privacy)
    run = Run(trial.privacy, trial.rounds, hypers, sizes if isinstance(sizes, tuple) else tuple(sizes), trial.seed)
    events = with_preprocessing(method.releases(run), trial)
    return _plan(trial.privacy, events, sizes=run.sizes, by_size=trial.aggregate == "size")


def with_preprocessing(events: tuple[Event, ...], trial: TrialSpec) -> tuple[Event, ...]:
    """A method's releases and those of preprocessing: the mean of the features and the lengths of the rows, which take
    their shares of the budget."""
    preprocess = trial.preprocess
    if not preprocess.center and not preprocess.scale:
        return events
    return _with_shares(tuple(events), preprocess, trial.privacy.adjacency_factor)


@lru_cache(maxsize=MOST_PLANS)
def _with_shares(events: tuple[Event, ...], preprocess: Preprocess, factor: float) -> tuple[Event, ...]:
    center, scale = preprocess.center, preprocess.scale
    # equal weights: at record level the clients' sums are added, at user level their means
    extra = []
    if center:
        extra.append(Event(CENTRE, 1, preprocess.bound * factor, share=center, equal_weights=True))
    if scale:
        # a record adds a unit vector to the histogram, a user a vector of shares: no entry is negative, so replacing
        # one moves the histogram by at most sqrt(2)
        extra.append(Event(LENGTHS, 1, math.sqrt(factor), share=scale, equal_weights=True))
    return (*(replace(event, share=event.share * (1 - (center + scale))) for event in events), *extra)


def check(trial: TrialSpec, problem: Problem) -> PrivacyPlan:
    """The trial's plan; raises an error if the trial cannot be run."""
    method = methods.get(trial.method)
    if trial.privacy.level not in method.levels:
        raise UserError(f"level = {trial.privacy.level!r}: {method.name} protects {' or '.join(method.levels)} level")
    _check_preprocess(trial.preprocess)
    one_of(AGGREGATES, aggregate=trial.aggregate)
    one_of(PRECISIONS, precision=trial.precision)
    network = isinstance(problem.model, NetworkModel)
    if (
        trial.precision != "float32"
        and trial.problem.model != "softmax"
        and not (network and trial.precision == "bf16")
    ):
        raise UserError(
            f"precision = {trial.precision!r} needs the model softmax; {trial.problem.model!r} uses float32"
        )
    _check_hyperparameters_of_model(trial, problem.model)
    if not method.accepts(problem.model):
        raise UserError(
            f"model = {trial.problem.model!r}: {method.name} cannot train it; the method needs {method.needs}"
        )
    most, layers = program_of(trial).most_layers, len(problem.model.blocks)
    if most is not None and layers > most:
        raise UserError(
            f"model = {trial.problem.model!r} has {layers} arrays of parameters; the privacy account of {method.name} "
            f"with these options holds for at most {most}"
        )
    for name in trial.metrics:
        _check_metric(name, problem)
    if not getattr(problem.model, "linear_in_features", True):
        if trial.preprocess.center and not network:  # a network centres the inputs of its head
            raise UserError(f"center = {trial.preprocess.center:g}: model = {trial.problem.model!r} cannot be centred")
        if trial.preprocess.scales:
            raise UserError(f"scale: the features of model = {trial.problem.model!r} cannot be scaled")
    if trial.privacy.clipping == "automatic":
        _check_automatic(trial, problem.model)
    if trial.privacy.clipping == "adaptive":
        _check_adaptive(trial)
    if trial.privacy.secret_participation < 1:
        _check_secret(trial)
    return plan_of(trial, problem.partition.sizes)


@lru_cache(maxsize=100)
def _check_preprocess(preprocess: Preprocess) -> None:
    """Cached, because most trials have the same preprocessing."""
    preprocess.check()


def _check_hyperparameters_of_model(trial: TrialSpec, model: Model) -> None:
    given = {name: value for name, value in trial.hyperparameters.items() if name in network_settings.HYPERPARAMETERS}
    if isinstance(model, NetworkModel):
        model.settings.with_hyperparameters(given)
    elif given:
        name, value = next(iter(given.items()))
        raise UserError(f"{name} = {value}: model = {trial.problem.model!r} has no such hyperparameter; a network has")


def _check_metric(name: str, problem: Problem) -> None:
    metric = metrics.get(name)
    if problem.data.task == "poisson":
        raise UserError(f"metric {name}: the labels of data {problem.data.name} are counts, not classes")
    if metric.needs_clients and problem.clients_eval is None:
        raise UserError(
            f"metric {name} needs the client of every test row: partition 'explicit' and the array client_test in "
            f"data {problem.data.name}"
        )


def _check_automatic(trial: TrialSpec, model: Model) -> None:
    at = "clipping = 'automatic'"
    if trial.privacy.level == "user":
        raise UserError(f"{at} needs level = 'record': it scales the gradients of records")
    if trial.hyperparameters.get("as_released"):
        raise UserError(f"{at} excludes as_released: {trial.method}'s released program has its own clipping")
    if "automatic" not in inspect.signature(model.clipped_gradient_sum).parameters:
        raise UserError(f"{at}: model = {trial.problem.model!r} supports only plain clipping")


def _check_adaptive(trial: TrialSpec) -> None:
    at = "clipping = 'adaptive'"
    if trial.privacy.level != "user":
        raise UserError(f"{at} needs level = 'user': it clips the updates of users")
    if not program_of(trial).adapts_clip:
        raise UserError(f"{at} is not available for {trial.method}, whose clip is fixed")


def _check_secret(trial: TrialSpec) -> None:
    at = f"secret_participation = {trial.privacy.secret_participation:g}"
    if trial.privacy.level != "user":
        raise UserError(f"{at} needs level = 'user'; the level is {trial.privacy.level!r}")
    if trial.privacy.release != "secure-aggregation":
        raise UserError(
            f"{at} needs release = 'secure-aggregation': {trial.privacy.release!r} reveals which clients take part"
        )
    if not program_of(trial).allows_secret_participation:
        raise UserError(f"{at} is not available for {trial.method}, in which all clients take part in every round")


def code_of(method: str, problem: ProblemSpec, metric_names: Sequence[str], *, features: int, classes: int) -> str:
    """Hash of the code of the plug-ins that a trial uses, and of the weights of its network; empty without both."""
    sources = (
        type(methods.get(method)),
        models.defined_by(problem.model),
        partition.PLUGIN_PARTITIONS.get(problem.partition.kind),
        *(type(metrics.get(name)) for name in metric_names),
    )
    codes = [plugins.code_hash(source.__module__) for source in sources if source]
    return "+".join(filter(None, [*codes, models.weights_hash(problem.model, features=features, classes=classes)]))


@dataclass(frozen=True)
class LaneGroup:
    """Neighbouring lanes of one method with equal static hyperparameters."""

    method: Method
    start: int
    stop: int
    hypers: Hypers

    @property
    def lanes(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class ClientWork:
    """Everything a client host needs for any round of a pack. Every call includes it, so that a restarted host can
    continue."""

    data: ProblemData
    program: ClientProgram
    rounds: int
    seeds: NDArray[np.int64]
    clip: NDArray[np.float32]
    noise_std: Mapping[str, NDArray[np.float32]]
    """Standard deviations of the noise that each client adds to its sum, or at user level to its mean or update, by
    purpose; one per lane."""
    hypers: Mapping[str, NDArray[np.float32]]
    """The hyperparameters that the program uses, per lane."""
    lanes: tuple[str, ...]
    """The trials' keys."""
    assignment: tuple[tuple[int, ...], ...]
    """The clients of every host."""
    level: Level = "record"
    aggregate: Aggregate = "uniform"
    bound: float | None = None
    """l2 bound on a row in the private mean of the features; None: features are not centred."""
    centre: NDArray[np.float32] | None = None
    """The private means of the unscaled features, (lanes, features), once they are known."""
    scales: bool = False
    """Whether features are scaled."""
    length: NDArray[np.float32] | None = None
    """The typical lengths of the rows, for every lane, once they are known."""
    clipping: Clipping = "plain"
    secret_participation: float = 1.0
    precision: Precision = "float32"
    noise_key: str = ""

    @property
    def automatic(self) -> bool:
        return self.clipping == "automatic"

    @property
    def all_alike(self) -> bool:
        """Whether every client takes part in every round, with the same weight."""
        return self.program.participation == 1 and self.aggregate == "uniform"

    @property
    def preprocesses(self) -> bool:
        return self.scales or self.bound is not None

    @property
    def needs_length(self) -> bool:
        return self.scales and self.length is None

    @property
    def factor(self) -> NDArray[np.float32] | None:
        """The factors by which the lanes scale the features."""
        if self.length is None:
            return None
        return np.array([lengths.factor_of(length) for length in self.length.tolist()], dtype=np.float32)

    @property
    def needs_centre(self) -> bool:
        return self.bound is not None and self.centre is None

    def distinct_noises(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """One lane for every distinct noise (seed and scales), and the index of each lane's noise among them."""
        _, seeds = np.unique(self.seeds, return_inverse=True)  # their ranks: a float cannot hold every large seed
        table = np.stack([seeds, *(std for _, std in sorted(self.noise_std.items()))], axis=1)
        _, first, which = np.unique(table, axis=0, return_index=True, return_inverse=True)
        return first, which.reshape(-1)


def group_key(trial: TrialSpec) -> tuple[str, ...]:
    """Trials of a pack with the same key form a `LaneGroup`."""
    method = methods.get(trial.method)
    return (trial.method, trial.privacy.level, *(str(trial.hyperparameters[name]) for name in method.static_names))


def order_lanes(trials: Sequence[TrialSpec]) -> list[TrialSpec]:
    """Sort trials so that those of a group are next to each other; otherwise keep the given order."""
    first_seen: dict[tuple[str, ...], int] = {}
    for trial in trials:
        first_seen.setdefault(group_key(trial), len(first_seen))
    return sorted(trials, key=lambda trial: first_seen[group_key(trial)])


def lane_groups(trials: Sequence[TrialSpec], model: Model, device: str = "cpu") -> list[LaneGroup]:
    """The groups of trials in the order of `order_lanes`."""
    groups: list[LaneGroup] = []
    start = 0
    for index in range(1, len(trials) + 1):
        if index < len(trials) and group_key(trials[index]) == group_key(trials[start]):
            continue
        members = trials[start:index]
        method = methods.get(members[0].method)
        resolved = [method.resolve(dict(trial.hyperparameters), trial.privacy) for trial in members]
        hypers: dict[str, Any] = {
            h.name: resolved[0][h.name]
            if h.static
            else torch.tensor([[float(r[h.name])] for r in resolved], dtype=torch.float32, device=device)
            for h in method.hyperparameters
        }
        first = members[0]
        hypers |= {"level": first.privacy.level, "rounds": first.rounds, "model": model}
        hypers["clipping"] = first.privacy.clipping
        hypers["clip"] = torch.tensor([[t.privacy.clip] for t in members], dtype=torch.float32, device=device)
        groups.append(LaneGroup(method, start, index, hypers))
        start = index
    return groups


def client_work(trials: Sequence[TrialSpec], data: ProblemData, hosts: int) -> ClientWork:
    plans = [plan_of(trial, data.sizes) for trial in trials]
    purposes = {event.purpose for plan in plans for event in plan.events}
    program, first = program_of(trials[0]), trials[0]
    return ClientWork(
        data=data,
        program=program,
        rounds=trials[0].rounds,
        seeds=np.array([trial.seed for trial in trials]),
        clip=np.array([trial.privacy.clip for trial in trials], dtype=np.float32),
        noise_std={
            purpose: np.array([plan.noise_std[purpose] for plan in plans], dtype=np.float32) for purpose in purposes
        },
        hypers={
            name: np.array([float(trial.hyperparameters[name]) for trial in trials], dtype=np.float32)
            for name in program.hypers
        },
        lanes=tuple(trial.key for trial in trials),
        assignment=assign(data.sizes, hosts),
        level=first.privacy.level,
        aggregate=first.aggregate,
        bound=first.preprocess.bound if first.preprocess.center else None,
        scales=first.preprocess.scales,
        length=np.full(len(trials), first.preprocess.length, dtype=np.float32) if first.preprocess.length else None,
        clipping=first.privacy.clipping,
        secret_participation=first.privacy.secret_participation,
        precision=first.precision,
        noise_key=first.noise_key,
    )


def select_lanes(work: ClientWork, keep: Sequence[int]) -> ClientWork:
    """The same work for some of the lanes."""
    index = np.asarray(keep, dtype=np.int64)
    return replace(
        work,
        seeds=work.seeds[index],
        clip=work.clip[index],
        noise_std={purpose: std[index] for purpose, std in work.noise_std.items()},
        hypers={name: values[index] for name, values in work.hypers.items()},
        lanes=tuple(work.lanes[i] for i in keep),
        centre=None if work.centre is None else work.centre[index],
        length=None if work.length is None else work.length[index],
    )


def assign(sizes: Sequence[int], hosts: int) -> tuple[tuple[int, ...], ...]:
    """The clients of every host, with about equally many rows per host: the largest client first, each to the host with
    the fewest rows."""
    assignment: list[list[int]] = [[] for _ in range(min(hosts, len(sizes)))]
    load = [0] * len(assignment)
    for client in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        host = load.index(min(load))
        assignment[host].append(client)
        load[host] += sizes[client]
    return tuple(tuple(sorted(clients)) for clients in assignment)

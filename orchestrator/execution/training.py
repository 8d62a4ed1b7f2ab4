"""One training run: the engine of `fedsweep train` and `fedsweep.train`."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from orchestrator.execution.training_federation import open_federation
from orchestrator.execution.training_options import TrainingOptions
from orchestrator.results.best_file import read_best
from orchestrator.study.adaptive_defaults import with_shares
from orchestrator.study.settings.data import DataSettings
from orchestrator.study.settings.preprocess import PreprocessSettings
from trainables import methods, metrics
from trainables.choices import ValidationBy
from trainables.data import features, simulated
from trainables.data import partition as partitions
from trainables.data.features import FeatureSet
from trainables.data.partition import PartitionSpec
from trainables.errors import UserError, in_range
from trainables.federation.lane_result import LaneResult
from trainables.federation.pack import check, code_of
from trainables.federation.problem import Problem
from trainables.federation.saved_model import SavedModel
from trainables.federation.trial_spec import DataSpec, ProblemSpec, TrialSpec
from trainables.plugin_errors import PluginError
from trainables.privacy.plan import PrivacyPlan, PrivacySettings
from trainables.privacy.publication import ANALYST_ONLY, MODEL_MAY_BE_PUBLISHED, simulated_note
from trainables.spec import ENGINE_VERSION

NOISE_KEY_BYTES = 16


@dataclass(frozen=True)
class Training:
    """A fully checked run that can start."""

    trial: TrialSpec
    problem: Problem
    plan: PrivacyPlan
    data_id: str = ""
    """Name of the data, as in a study."""
    records: str = ""
    """Name of the records; data files prepared from the same records share it."""
    shown: tuple[str, ...] = ()
    """The metrics to show first: the objective of a study, and its further metrics."""


@dataclass(frozen=True)
class Trained:
    result: LaneResult
    seconds_per_round: float
    weights: NDArray[np.float32] | None
    """In the layout of the model; None if the run diverged."""


def set_up(data: str | Mapping[str, NDArray[Any]], options: TrainingOptions) -> Training:
    """Check the options and load the data. Cheap checks come first: loading data may take a while."""
    try:
        options = TypeAdapter(TrainingOptions).validate_python(vars(options))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][:2] if part not in ("int", "literal['auto']"))
        raise UserError(f"{name} = {first['input']!r}: {first['msg']}") from None
    hyperparameters = methods.get(options.method).check(options.hyperparameters)
    options = replace(options, hyperparameters=hyperparameters)
    privacy, preprocess = options.privacy(), options.preprocess()
    partitions.choose(options.partition, options.clients, seed=options.partition_seed)
    for name in options.metrics:
        metrics.get(name)
    if options.hosts is not None:
        in_range(1, 10**6 if options.address else os.cpu_count() or 1, hosts=options.hosts)
    loaded = features.load(data, options.seed) if isinstance(data, str) else features.from_arrays(data)
    training = prepare(
        loaded,
        partition=partitions.choose(options.partition, options.clients, seed=options.partition_seed, data=loaded),
        model=options.model,
        validation_fraction=options.validation_fraction,
        validation_by=options.validation_by,
        train_on=options.train_on,
        evaluate_on=options.evaluate_on,
        method=options.method,
        hyperparameters=hyperparameters,
        privacy=privacy,
        rounds=options.rounds,
        evaluate_every=options.evaluate_every,
        seed=options.seed,
        preprocess=preprocess,
        aggregate=options.aggregation(),
        shown=options.metrics,
        stratified=not options.secret_noise,
    )
    name = DataSettings(source=data).id if isinstance(data, str) else training.problem.data.name
    training = replace(training, data_id=name, records=options.records)
    return with_secret_noise(training) if options.secret_noise else training


def prepare(
    data: FeatureSet,
    *,
    partition: PartitionSpec,
    model: str = "softmax",
    train_on: str,
    evaluate_on: str,
    validation_fraction: float = 0.1,
    validation_seed: int = 42,
    validation_by: ValidationBy = "row",
    stratified: bool = True,
    privacy: PrivacySettings,
    preprocess: PreprocessSettings,
    shown: Sequence[str] = (),
    **trial: Any,
) -> Training:
    """Prepare the data and run all checks, before any actor starts. `shown`: the metrics to show first. `trial`: the
    other fields of the `TrialSpec`."""
    if train_on == "all" and evaluate_on == "validation":
        raise UserError("evaluate-on = 'validation' needs train-on = 'train': otherwise those rows are trained on, too")
    content = DataSpec(
        fingerprint=data.fingerprint,
        validation_fraction=validation_fraction,
        validation_seed=validation_seed,
        validation_by=validation_by,
        stratified=stratified,
    )
    problem = ProblemSpec.model_validate(
        {"data": content, "partition": partition, "model": model, "train_on": train_on, "evaluate_on": evaluate_on}
    )
    in_range(0, 1, "()", validation_fraction=validation_fraction)
    in_range(1, 10**6, rounds=trial["rounds"])
    in_range(1, 10**6, evaluate_every=trial["evaluate_every"])
    in_range(0, 2**63 - 1, seed=trial["seed"])
    ready = Problem.prepare(data, problem)
    further = metrics.not_built_in(shown)
    can_be_centred = getattr(ready.model, "linear_in_features", True)
    spec = TrialSpec.model_validate(
        {
            **trial,
            "problem": problem,
            "privacy": privacy,
            "preprocess": with_shares(
                *(preprocess, privacy, ready.partition.sizes, data.features), allowed=can_be_centred
            ),
            "metrics": further,
            "code": code_of(*(trial["method"], problem, further), features=data.features, classes=data.classes),
        }
    )
    return Training(spec, ready, check(spec, ready), shown=tuple(shown))


def from_best(
    file: Path | str,
    cell: str | None,
    seed: int,
    source: str | None,
    *,
    records: str = "",
    secret_noise: bool = False,
) -> Training:
    """The run that trains a winner of a sweep as in the confirm stage. `file`: the sweep's best.yaml."""
    return from_cells(read_best(file), file, cell, seed, source, records=records, secret_noise=secret_noise)


def from_cells(
    cells: Mapping[str, Mapping[str, Any]],
    file: Path | str,
    cell: str | None,
    seed: int,
    source: str | None,
    *,
    records: str = "",
    secret_noise: bool = False,
) -> Training:
    """The run that trains a winner. `cells`: the content of a best.yaml. `file`: its path, for error messages. `cell`:
    a cell's name, or a part of it that no other name contains or ends with; not needed if there is only one cell."""
    if not cells:
        raise UserError(f"{file} has no cell yet: no search has ended")
    if cell is None or cell not in cells:
        fitting = [name for name in cells if (cell or "") in str(name)]
        ending = [name for name in fitting if cell and str(name).endswith(cell)]  # "eps 1" is a part of "eps 10", too
        fitting = ending if len(ending) == 1 else fitting
        if len(fitting) != 1:
            what = "fits several cells of" if fitting else "is not in"
            raise UserError(f"cell = {cell!r} {what} {file}; it has: {'; '.join(map(repr, fitting or cells))}")
        (cell,) = fitting
    entry = cells[cell]
    try:
        chosen = methods.get(entry["method"]).check(entry["hyperparameters"])
        privacy = PrivacySettings(**{name: entry[name] for name in PrivacySettings.model_fields}).check()
        partition_seed = entry["partition_seed"]
        if isinstance(partition_seed, dict):
            if seed not in partition_seed:
                raise UserError(f"seed = {seed}: the sweep has partitions only for the seeds {list(partition_seed)}")
            partition_seed = partition_seed[seed]
        partition = partitions.parse(entry["partition"], clients=entry["clients"], seed=partition_seed)
        name = source or entry["data"]
        # the recorded fingerprint is that of the first seed's data
        loaded = features.load(name, next(iter(entry["seeds"]), seed))
        if loaded.fingerprint != entry.get("fingerprint", loaded.fingerprint):  # a private search publishes none
            raise UserError(f"data {name} differs from the data of the sweep")
        if simulated.drawn_by_seed(name):
            loaded = features.load(name, seed)
        objective = [name.removeprefix("test_") for name in entry if name.startswith("test_")]
        names = (
            "validation_fraction",
            "validation_seed",
            "train_on",
            "evaluate_on",
            "rounds",
            "evaluate_every",
            "model",
            "aggregate",
        )
        training = prepare(
            loaded,
            partition=partition,
            stratified=entry.get("stratified", True) and not secret_noise,
            method=entry["method"],
            hyperparameters=chosen,
            privacy=privacy,
            preprocess=PreprocessSettings.model_validate(entry["preprocess"]),
            shown=[*dict.fromkeys([*objective, *entry.get("metrics", ())])],
            seed=seed,
            precision=entry.get("precision", "float32"),
            validation_by=entry.get("validation_by", "row"),
            **{name: entry[name] for name in names},
        )
        if training.trial.code != entry.get("code", ""):
            raise UserError(
                f"{file}: since the sweep, the code of a plug-in or the weights of the network have changed"
            )
        named = records or entry.get("records", "")
        training = replace(training, data_id=DataSettings(source=name).id, records=named)
        return with_secret_noise(training) if secret_noise else training
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # ValueError: also pydantic's ValidationError
        raise UserError(f"cell {cell!r} of {file} was not written by a sweep: {error!r}".replace("\n", " ")) from None


def with_secret_noise(training: Training) -> Training:
    """The same run, with noise from a random key of the operating system, which cannot be reproduced. The seed still
    determines what is public: the initial weights and the clients of every round."""
    return replace(training, trial=training.trial.model_copy(update={"noise_key": secrets.token_hex(NOISE_KEY_BYTES)}))


def train(
    training: Training,
    *,
    address: str | None = None,
    hosts: int | None = None,
    on_round: Callable[[int, LaneResult], None] | None = None,
) -> Trained:
    """Run the training on a new federation in the Ray cluster at `address`. Without an address, the federation is in
    this process if `hosts` is 1, or if `hosts` is None and the training is small; otherwise it is in the Ray that this
    process is connected to, or in a new local Ray."""
    with open_federation(training.trial, training.problem, address, hosts) as federation:
        began, result = time.perf_counter(), LaneResult(training.trial.key)
        for t in range(1, training.trial.rounds + 1):
            (result,) = federation.advance(t)
            if on_round is not None:
                on_round(t, result)
            if result.state != "running":
                break
        seconds = (time.perf_counter() - began) / max(1, result.rounds)
        weights = federation.final_weights() if result.state == "done" else None
    if result.state == "failed":
        raise PluginError(result.reason)
    if weights is not None:
        weights = weights.copy()  # what Ray returns is read-only
        if hasattr(training.problem.model, "rows"):
            weights = weights.reshape(training.problem.model.rows, -1)
    return Trained(result, seconds, weights)


def saved_model(training: Training, trained: Trained, *, secret: bool) -> SavedModel:
    """The trained model with its provenance. With secret noise the model may be published: nothing in it is computed
    from the data except the weights, the privacy account, the scores on the test rows, which are public, and the names
    of the classes, which must be."""
    if trained.weights is None:
        raise UserError(f"the run ended as {trained.result.state!r}: there is no model to save")
    trial, plan, data = training.trial, training.plan, training.problem.data
    tested = trial.problem.evaluate_on == "test"
    last = {name: values[max(values)] for name, values in trained.result.metrics.items() if values and tested}
    named = dict.fromkeys([*training.shown, "accuracy", "loss"])
    simulated = simulated_note([trial.problem.partition.kind])
    hidden: Any = {"noise_key": True, "problem": {"data": {"fingerprint"}}}
    provenance = {
        "note": f"{MODEL_MAY_BE_PUBLISHED} {simulated}".strip() if secret else ANALYST_ONLY,
        "trial": trial.model_dump(mode="json", exclude=hidden if secret else None),
        "secret_noise": secret,
        "data": training.data_id,
        "records": training.records,
        "releases": [asdict(release) for release in plan.mechanism],
        "epsilon": {"claimed": trial.privacy.epsilon, "actual": plan.actual_epsilon, "unsampled": plan.unsampled},
        "delta": trial.privacy.delta,
        "metrics": {name: last[name] for name in named if name in last},
        "engine_version": ENGINE_VERSION,
    }
    return SavedModel(
        *(trained.weights.reshape(-1), trial.problem.model, data.features, data.classes, provenance),
        class_names=data.class_names,
        schema=data.schema,
        backbone=data.backbone,
    )

"""Making a feature file out of a source, with its provenance inside; and telling whether one is what it says."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainables.data.features import READ_ERRORS
from trainables.data.sources import fetching, formats
from trainables.data.sources.catalogue import (
    IMAGES,
    SOURCES,
    WEIGHTS,
    File,
    Recipe,
    components,
    recipe,
    recipes,
)
from trainables.errors import UserError

PROVENANCE = "provenance"
FORMAT = 1  # of the provenance


def _silent(name: str, done: int, total: int | None) -> None:
    pass


@dataclass(frozen=True)
class Options:
    given: tuple[Path, ...] = ()
    """Files and folders the user has already."""
    to: Path | None = None
    device: str = "auto"
    batch: int = 500
    weights: Path | None = None
    """A state dict for the backbone, in place of the published one."""
    fetched: fetching.Progress = _silent
    extracted: fetching.Progress = _silent


def known(name: str) -> Recipe:
    """The recipe of a feature file, or a sentence that says what there is."""
    found = recipe(name.removesuffix(".npz"))
    if found is None:
        shown = ", ".join(each.name for each in recipes())
        raise UserError(f"nothing here can make data {name!r}; choose one of: {shown}, or any SOURCE-BACKBONE of these")
    return found


def prepare(name: str, options: Options) -> Path:
    """The path of the feature file, made unless it is there."""
    wanted = known(name)
    target = (options.to or fetching.data_folder()) / f"{wanted.name}.npz"
    if target.is_file():
        return target
    source = SOURCES[wanted.source]
    paths = {file.name: fetching.fetch(file, options.given, options.fetched) for file in source.files}
    weights = _weights(wanted, options)
    raw = formats.read(source, paths)
    if source.content and digest(raw.arrays) != source.content:
        raise UserError(f"the files of {source.name} do not hold the published rows: their content's checksum differs")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        arrays, how = _features(wanted, raw.arrays, source.format, weights, target, options)
        provenance = {
            "format": FORMAT,
            "name": wanted.name,
            "source": source.name,
            "files": {
                name: {"url": _url(source.files, name), "sha256": fetching.sha256(path)} for name, path in paths.items()
            },
            **how,
            "notes": list(raw.notes),
            "content": f"sha256:{digest(arrays)}",
        }
        _write(target, {**arrays, PROVENANCE: np.array(json.dumps(provenance, sort_keys=True))})
    except OSError as error:
        raise UserError(f"data file {target} cannot be written: {error.strerror or error}") from None
    return target


def digest(arrays: Mapping[str, NDArray]) -> str:
    """SHA-256 of what arrays hold, whatever file they come from."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        found.update(f"{name}:{array.dtype.str}:{array.shape}:".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def provenance_of(path: Path) -> dict[str, Any] | None:
    """What a feature file says of where it comes from; None if it says nothing. Whether it is true is checked."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if PROVENANCE not in file:
                return None
            stated = json.loads(str(file[PROVENANCE]))
            content = f"sha256:{digest({name: file[name] for name in file.files if name != PROVENANCE})}"
    except (*READ_ERRORS, ValueError) as error:
        raise UserError(f"data file {path} cannot be read: {error}") from None
    if stated.get("content") != content:
        raise UserError(f"data file {path} has been changed: its content is {content}, not {stated.get('content')}")
    return stated


def _weights(wanted: Recipe, options: Options) -> Path | None:
    if wanted.backbone not in WEIGHTS:
        return None
    if options.weights is not None:
        if not options.weights.is_file():
            raise UserError(f"weights {options.weights} is not a file")
        return options.weights
    return fetching.fetch(WEIGHTS[wanted.backbone], options.given, options.fetched)


def _features(
    wanted: Recipe, arrays: formats.Arrays, format: str, weights: Path | None, target: Path, options: Options
) -> tuple[formats.Arrays, dict[str, Any]]:
    """The arrays of the feature file, and how they were made."""
    if format not in IMAGES:
        return arrays, {"features": "as published"}
    if not wanted.backbone:
        flat = {
            name: (array.reshape(len(array), -1) / np.float32(255)).astype(np.float16) if array.ndim > 2 else array
            for name, array in arrays.items()
        }
        return flat, {"features": "pixels / 255"}
    count = components(wanted.backbone)
    if count is not None:
        return _principal(arrays, count), {
            "features": f"the first {count} principal components of the train pixels / 255"
        }
    import torch

    from trainables.data import backbones
    from trainables.data.backbones.extraction import extract, normalised

    if weights is not None:
        network = backbones.load(wanted.backbone, weights)
        mean, std = backbones.CIFAR10_MEAN, backbones.CIFAR10_STD
        size = backbones.CIFAR_SIZE  # smaller pictures are stretched: VGG-16 halves them five times
        how: dict[str, Any] = {"weights": f"sha256:{fetching.sha256(weights)}", "mean": list(mean), "std": list(std)}
        if arrays["x_train"].shape[1] != size:
            how["input_size"] = size
    else:
        network, config = backbones.from_timm(wanted.backbone.removeprefix("timm."))
        mean, std = config["mean"], config["std"]
        size = config["input_size"][-1]
        how = {"weights": "timm's pretrained", "mean": list(mean), "std": list(std), "input_size": size}

    def ready(images: NDArray[np.uint8]) -> torch.Tensor:
        x = normalised(images, mean, std)
        same = x.shape[-1] == size
        return x if same else torch.nn.functional.interpolate(x, size=(size, size), mode="bilinear", antialias=True)

    kept = target.with_name(f"{target.stem}.partial")
    identity = json.dumps([wanted.backbone, how])
    done = dict(arrays)
    for part in ("train", "test"):
        images = arrays[f"x_{part}"]
        done[f"x_{part}"] = extract(
            images,
            network,
            ready,
            kept=kept,
            identity=identity,
            device=options.device,
            batch=options.batch,
            progress=partial(options.extracted, part),
        )
    return done, {"features": f"before the last layer of {wanted.backbone}, float16", "torch": torch.__version__, **how}


def _principal(arrays: formats.Arrays, count: int) -> formats.Arrays:
    """Centred and turned by what the train rows say, which no privacy account covers."""
    flat = {name: arrays[name].reshape(len(arrays[name]), -1) / np.float32(255) for name in ("x_train", "x_test")}
    centre = flat["x_train"].mean(axis=0, dtype=np.float64)
    centred = {name: x - centre for name, x in flat.items()}
    _, vectors = np.linalg.eigh(centred["x_train"].T @ centred["x_train"])
    turned = vectors[:, ::-1][:, :count]
    turned = turned * np.sign(turned[np.abs(turned).argmax(axis=0), np.arange(count)])  # whichever way it was solved
    return {**arrays, **{name: (x @ turned).astype(np.float16) for name, x in centred.items()}}


def _write(target: Path, arrays: Mapping[str, NDArray]) -> None:
    """All of it or nothing; the pieces of an extraction go once the whole is there."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    shutil.rmtree(target.with_name(f"{target.stem}.partial"), ignore_errors=True)


def _url(files: Sequence[File], name: str) -> str:
    return next(file.url for file in files if file.name == name)

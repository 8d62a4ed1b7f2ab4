"""Makes feature files from sources, with their provenance inside, and verifies them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainables.data.feature_file import READ_ERRORS
from trainables.data.sources import fetching, formats
from trainables.data.sources.catalogue import IMAGES, SOURCES, WEIGHTS, Recipe, components, recipe, recipes
from trainables.errors import UserError
from trainables.files import replacing

PROVENANCE = "provenance"
FORMAT = 1  # version of the provenance


def _no_progress(name: str, done: int, total: int | None) -> None:
    pass


@dataclass(frozen=True)
class Options:
    local: tuple[Path, ...] = ()
    """Files and folders that the user already has."""
    to: Path | None = None
    device: str = "auto"
    batch: int = 500
    weights: Path | None = None
    """A state dict for the backbone that replaces the published one."""
    on_download: fetching.Progress = _no_progress
    on_extract: fetching.Progress = _no_progress


def find_recipe(name: str) -> Recipe:
    """The recipe of a feature file; raises with a list of names if there is none."""
    known = recipe(name.removesuffix(".npz"))
    if known is None:
        names = ", ".join(each.name for each in recipes())
        raise UserError(f"data {name!r} has no recipe; choose one of: {names}, or any SOURCE-BACKBONE of these")
    return known


def prepare(name: str, options: Options) -> Path:
    """The path of the feature file, which is made if it does not exist."""
    chosen = find_recipe(name)
    target = (options.to or fetching.data_folder()) / f"{chosen.name}.npz"
    if target.is_file():
        return target
    source = SOURCES[chosen.source]
    paths = {file.name: fetching.fetch(file, options.local, options.on_download) for file in source.files}
    weights = _weights(chosen, options)
    raw = formats.read(source, paths)
    if source.content and digest(raw.arrays) != source.content:
        raise UserError(
            f"the files of {source.name} do not hold the published rows: the checksum of their content differs"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        arrays, details = _features(chosen, raw.arrays, source.format, weights, target, options)
        provenance = {
            "format": FORMAT,
            "name": chosen.name,
            "source": source.name,
            "files": {
                file.name: {"url": file.url, "sha256": fetching.sha256(paths[file.name])} for file in source.files
            },
            **details,
            "notes": list(raw.notes),
            "content": f"sha256:{digest(arrays)}",
        }
        _write(target, {**arrays, PROVENANCE: np.array(json.dumps(provenance, sort_keys=True))})
    except OSError as error:
        raise UserError(f"data file {target} cannot be written: {error.strerror or error}") from None
    return target


def digest(arrays: Mapping[str, NDArray]) -> str:
    """SHA-256 of the arrays' names, types, shapes and values."""
    content = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        content.update(f"{name}:{array.dtype.str}:{array.shape}:".encode())
        content.update(np.ascontiguousarray(array).tobytes())
    return content.hexdigest()


def provenance_of(path: Path) -> dict[str, Any] | None:
    """The provenance inside a feature file; None if it has none. Raises if its content does not match."""
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


def _weights(chosen: Recipe, options: Options) -> Path | None:
    if chosen.backbone not in WEIGHTS:
        return None
    if options.weights is not None:
        if not options.weights.is_file():
            raise UserError(f"weights {options.weights} is not a file")
        return options.weights
    return fetching.fetch(WEIGHTS[chosen.backbone], options.local, options.on_download)


def _features(
    chosen: Recipe, arrays: formats.Arrays, format: str, weights: Path | None, target: Path, options: Options
) -> tuple[formats.Arrays, dict[str, Any]]:
    """The arrays of the feature file, and the part of its provenance that says how they were made."""
    if format not in IMAGES:
        return arrays, {"features": "as published"}
    if not chosen.backbone:
        flat = {
            name: (array.reshape(len(array), -1) / np.float32(255)).astype(np.float16) if array.ndim > 2 else array
            for name, array in arrays.items()
        }
        return flat, {"features": "pixels / 255"}
    count = components(chosen.backbone)
    if count is not None:
        return _principal_components(arrays, count), {
            "features": f"the first {count} principal components of the train pixels / 255"
        }
    import torch

    from trainables.data import backbones
    from trainables.data.backbones.extraction import extract, normalised

    if weights is not None:
        network = backbones.load(chosen.backbone, weights)
        mean, std = backbones.CIFAR10_MEAN, backbones.CIFAR10_STD
        size = backbones.CIFAR_SIZE  # smaller images are enlarged: VGG-16 halves them five times
        details: dict[str, Any] = {
            "weights": f"sha256:{fetching.sha256(weights)}",
            "mean": list(mean),
            "std": list(std),
        }
        if arrays["x_train"].shape[1] != size:
            details["input_size"] = size
    else:
        network, config = backbones.from_timm(chosen.backbone.removeprefix("timm."))
        mean, std = config["mean"], config["std"]
        size = config["input_size"][-1]
        details = {"weights": "timm's pretrained", "mean": list(mean), "std": list(std), "input_size": size}

    def to_input(images: NDArray[np.uint8]) -> torch.Tensor:
        x = normalised(torch.from_numpy(np.ascontiguousarray(images)), mean, std)
        if x.shape[-1] == size:
            return x
        return torch.nn.functional.interpolate(x, size=(size, size), mode="bilinear", antialias=True)

    folder = target.with_name(f"{target.stem}.partial")
    identity = json.dumps([chosen.backbone, details])
    features = dict(arrays)
    for part in ("train", "test"):
        features[f"x_{part}"] = extract(
            arrays[f"x_{part}"],
            network,
            to_input,
            folder=folder,
            identity=identity,
            device=options.device,
            batch=options.batch,
            progress=partial(options.on_extract, part),
        )
    return features, {
        "features": f"before the last layer of {chosen.backbone}, float16",
        "torch": torch.__version__,
        **details,
    }


def _principal_components(arrays: formats.Arrays, count: int) -> formats.Arrays:
    """Projections on the first principal components of the train rows; no privacy account covers them."""
    flat = {name: arrays[name].reshape(len(arrays[name]), -1) / np.float32(255) for name in ("x_train", "x_test")}
    centre = flat["x_train"].mean(axis=0, dtype=np.float64)
    centred = {name: x - centre for name, x in flat.items()}
    _, vectors = np.linalg.eigh(centred["x_train"].T @ centred["x_train"])
    directions = vectors[:, ::-1][:, :count]
    largest = directions[np.abs(directions).argmax(axis=0), np.arange(count)]
    directions = directions * np.sign(largest)  # eigenvectors have no sign: make each one's largest entry positive
    return {**arrays, **{name: (x @ directions).astype(np.float16) for name, x in centred.items()}}


def _write(target: Path, arrays: Mapping[str, NDArray]) -> None:
    """Write atomically, then delete the pieces of the extraction."""
    with replacing(target) as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    shutil.rmtree(target.with_name(f"{target.stem}.partial"), ignore_errors=True)

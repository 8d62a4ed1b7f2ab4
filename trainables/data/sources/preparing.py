"""Makes feature files from sources, with their provenance inside, and verifies them."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainables.data.feature_file import READ_ERRORS, check_expansion
from trainables.data.sources import fetching, formats
from trainables.data.sources.catalogue import (
    EFFICIENTNET,
    IMAGES,
    ROOTS,
    SOURCES,
    WEIGHTS,
    Recipe,
    components,
    is_timm,
    recipe,
    recipes,
)
from trainables.data.stored import BLOCK_BYTES, open_file
from trainables.errors import UserError
from trainables.files import replacing, sha256

if TYPE_CHECKING:
    from trainables.data.backbones.backbone import Backbone

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
    batch: int | None = None
    weights: Path | None = None
    """A state dict to use instead of the published one."""
    function: tuple[Callable[[], Any], str] | None = None
    """The user's backbone, MODULE:FUNCTION, once loaded, and the hash of its code."""
    on_download: fetching.Progress = _no_progress
    on_extract: fetching.Progress = _no_progress


def find_recipe(name: str, backbone: str = "") -> Recipe:
    """The recipe of a feature file. `name`: SOURCE or SOURCE-BACKBONE; only SOURCE if `backbone` is given. If there is
    no recipe, the error lists the names."""
    name = name.removesuffix(".npz")
    if backbone and name in SOURCES and SOURCES[name].format in IMAGES:
        module, _, function = backbone.partition(":")
        return Recipe(f"{name}-{function or module}", name, backbone)
    known = None if backbone else recipe(name)
    if known is None:
        names = ", ".join(each.name for each in recipes())
        raise UserError(f"data {name!r} has no recipe; choose one of: {names}, or any SOURCE-BACKBONE of these")
    return known


def prepare(name: str, options: Options, backbone: str = "") -> Path:
    """The path of the feature file, which is made if it does not exist."""
    chosen = find_recipe(name, backbone)
    target = (options.to or fetching.data_folder()) / f"{chosen.name}.npz"
    if target.is_file():
        return target
    source = SOURCES[chosen.source]
    paths = {file.name: fetching.fetch(file, options.local, options.on_download) for file in source.files}
    weights = fetch_weights(chosen.backbone, options) if chosen.backbone in WEIGHTS else None
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
            "files": {file.name: {"url": file.url, "sha256": sha256(paths[file.name])} for file in source.files},
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


def _archive_digest(file: Any) -> str:
    """`digest` of the arrays in an npz file, read block by block: they may be larger than memory."""
    content = hashlib.sha256()
    for name in sorted(name for name in file.files if name != PROVENANCE):
        with file.zip.open(f"{name}.npy") as member:
            read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, fortran_order, dtype = read_header[np.lib.format.read_magic(member)](member)
            content.update(f"{name}:{dtype.str}:{shape}:".encode())
            if fortran_order:
                content.update(np.ascontiguousarray(file[name]).tobytes())
            while not fortran_order and (block := member.read(BLOCK_BYTES)):
                content.update(block)
    return content.hexdigest()


def provenance_of(path: Path) -> dict[str, Any] | None:
    """The provenance inside a feature file; None if it has none. Raises if the arrays do not match their hash in it."""
    try:
        with open_file(str(path)) as content, np.load(content, allow_pickle=False) as file:
            if PROVENANCE not in file:
                return None
            assert file.zip is not None  # None once closed
            info = file.zip.getinfo(f"{PROVENANCE}.npy")
            check_expansion(str(path), PROVENANCE, info.file_size, info.compress_size)
            stated = json.loads(str(file[PROVENANCE]))
            if not isinstance(stated, dict) or not isinstance(stated.get("source"), str):
                raise ValueError("its provenance names no source")
            found = f"sha256:{_archive_digest(file)}"
    except (*READ_ERRORS, ValueError) as error:
        raise UserError(f"data file {path} cannot be read: {error}") from None
    if stated.get("content") != found:
        raise UserError(f"data file {path} has been changed: its content is {found}, not {stated.get('content')!s:.80}")
    return stated


def fetch_weights(backbone: str, options: Options) -> Path:
    if options.weights is not None:
        if not options.weights.is_file():
            raise UserError(f"weights {options.weights} is not a file")
        return options.weights
    return fetching.fetch(WEIGHTS[backbone], options.local, options.on_download)


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
    from trainables.data.backbones.extraction import extract

    backbone = chosen_backbone(chosen.backbone, options, weights)
    features = dict(arrays)
    for part in ("train", "test"):
        features[f"x_{part}"] = extract(
            arrays[f"x_{part}"],
            backbone.network,
            backbone.to_input,
            folder=partial_folder(target),
            identity=backbone.identity,
            device=options.device,
            batch=options.batch or backbone.batch,
            progress=partial(options.on_extract, part),
        )
    features["backbone"] = np.array(backbone.record(column="", label=""))
    return features, described(backbone)


def chosen_backbone(name: str, options: Options, weights: Path | None = None) -> Backbone:
    """`weights`: the file of a packaged network, if it was fetched already."""
    from trainables.data.backbones import backbone

    if name.endswith(ROOTS) and not backbone.is_function(name):
        return backbone.with_roots(_plain_backbone(name.removesuffix(ROOTS), options, weights), name)
    return _plain_backbone(name, options, weights)


def _plain_backbone(name: str, options: Options, weights: Path | None) -> Backbone:
    from trainables.data.backbones import backbone

    if name in WEIGHTS:
        path = weights or fetch_weights(name, options)
        return backbone.packaged(name, path)
    if backbone.is_function(name):
        if options.function is None:
            raise UserError(f"backbone {name!r} is Python code; name it with --backbone {shlex.quote(name)}")
        return backbone.from_function(name, *options.function)
    if name in (EFFICIENTNET, backbone.WORDLLAMA) or is_timm(name):
        return backbone.from_package(name)
    raise UserError(f"backbone {name!r} is unknown; choose one of: {backbone.CHOICES}")


def described(backbone: Backbone) -> dict[str, Any]:
    """The part of the provenance that says how features were made."""
    from importlib.metadata import version

    return {
        "features": f"before the last layer of {backbone.name}, float16",
        "backbone": backbone.name,
        "torch": version("torch"),
        **backbone.versions,
        **backbone.details,
    }


def partial_folder(target: Path) -> Path:
    """Where the pieces of an extraction are kept until it is complete."""
    return target.with_name(f"{target.stem}.partial")


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
    from trainables.data.backbones.extraction import remove_pieces

    with replacing(target) as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    remove_pieces(partial_folder(target))

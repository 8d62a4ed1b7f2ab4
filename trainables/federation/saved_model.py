"""A trained model as a file: weights for features without preprocessing, their provenance and the privacy account."""

from __future__ import annotations

import contextlib
import json
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainables import models, plugins
from trainables.data.feature_file import READ_ERRORS, read_backbone
from trainables.data.names import check_text
from trainables.errors import UserError
from trainables.files import PRIVATE, PUBLIC, open_plain, replacing
from trainables.models import safetensors
from trainables.models.network import NetworkModel
from trainables.models.network_settings import ACCOUNT, SUFFIX, is_network
from trainables.models.shard import Shard

FORMAT = 1
LARGEST = 10**9  # largest number of features or classes


@dataclass(frozen=True)
class SavedModel:
    """A model in a file, with the trial that trained it."""

    weights: NDArray[np.float32]
    """(d,), for features as in the data file, without preprocessing."""
    model: str
    """Name of the model as in a study, such as `softmax`."""
    features: int
    """Number of features of a row."""
    classes: int
    """Number of classes."""
    provenance: dict[str, Any]
    """The trial and its account, with claimed and actual eps."""
    class_names: tuple[str, ...] = ()
    """The original labels, by class; () if they were numbers."""
    schema: str = ""
    """JSON text of the schema that converts rows of a table to features; "" if there was none. It is public."""

    backbone: str = ""
    """JSON text that describes the backbone of the features; "" if it is not known. It is public."""

    def save(self, path: Path) -> None:
        """Save the model atomically; an existing file is not overwritten. A network is saved as safetensors: the state
        dict of the plain torch module, with the provenance as metadata."""
        check_file_name(path, self.model)
        if path.exists():
            raise UserError(f"{path} exists already; choose another name")
        if is_network(self.model):
            network = self._parsed()
            assert isinstance(network, NetworkModel)
            own = {"class_names": self.class_names, "model": network.settings.text, "provenance": self.provenance}
            arrays, private = network.state_dict(torch.tensor(self.weights)), bool(self.provenance.get("secret_noise"))
            safetensors.write(path, arrays, {ACCOUNT: json.dumps(own)}, private=private)
            return
        about = {"format": FORMAT, "model": self.model, "features": self.features, "classes": self.classes}
        about |= {"class_names": list(self.class_names), "schema": self.schema, "backbone": self.backbone}
        about |= {"plugin": _plugin_of(self.model)}
        with replacing(path, mode=PRIVATE if self.provenance.get("secret_noise") else PUBLIC) as file:
            np.savez(file, weights=self.weights, about=json.dumps({**about, "provenance": self.provenance}))

    @classmethod
    def load(cls, path: Path) -> SavedModel:
        """Read and check a file that `save` wrote. The safetensors file of a network cannot be read back."""
        if path.suffix == SUFFIX and path.exists():
            raise UserError(
                f"{path} holds the arrays of a network, which fedsweep does not read; load them into the torch module, "
                "see docs/train-layers.md"
            )
        try:
            with contextlib.ExitStack() as opened:
                file = opened.enter_context(open_plain(path, follow=True))
                if not zipfile.is_zipfile(file):
                    raise ValueError("it is not an archive of arrays")
                file.seek(0)
                content = opened.enter_context(np.load(file, allow_pickle=False))
                if any(info.compress_type != zipfile.ZIP_STORED for info in content.zip.infolist()):
                    raise ValueError("it is compressed")  # a small file could expand to any size
                weights, about = content["weights"], json.loads(str(content["about"]))
            names = tuple(about["class_names"])
            model = cls(
                *(weights, about["model"], about["features"], about["classes"], about["provenance"]),
                class_names=names,
                schema=about["schema"],
                backbone=about["backbone"],
            )
            model._check()
            _check_plugin(path, model.model, str(about["plugin"]))
            head = models.parse(model.model, features=model.features, classes=model.classes)
        except _MissingPluginError as error:
            raise UserError(str(error)) from None
        except FileNotFoundError:
            raise UserError(f"model {path} does not exist; `fedsweep train --save` writes one") from None
        except (*READ_ERRORS, TypeError, ValueError, UserError) as error:
            raise UserError(f"{path} is not a model that fedsweep saved: {error}".replace("\n", " ")) from None
        if weights.shape != (head.dimension,):
            raise UserError(f"{path} has weights of shape {weights.shape}, its model needs ({head.dimension},)")
        return model

    def _check(self) -> None:
        """Check types, counts, class names and backbone; `load` checks the shape of the weights."""
        if not isinstance(self.weights, np.ndarray) or self.weights.dtype != np.float32:
            raise TypeError("its weights are not a float32 array")
        if not isinstance(self.model, str) or not isinstance(self.provenance, dict):
            raise TypeError("its description is incomplete")
        for name, count in (("features", self.features), ("classes", self.classes)):
            if type(count) is not int or not 1 <= count <= LARGEST:
                raise ValueError(f"{name} = {count!r}")
        if self.class_names and (len(self.class_names) != self.classes or set(map(type, self.class_names)) != {str}):
            raise ValueError("its class names do not fit its classes")
        check_text("class_names", self.class_names)
        if not isinstance(self.schema, str) or not isinstance(self.backbone, str):
            raise TypeError("its schema or its backbone is not a text")
        if self.backbone:
            read_backbone(self.backbone)

    def predict(self, x: NDArray[np.float32]) -> NDArray[np.int64] | NDArray[np.str_]:
        """The most likely class of every row: the class name, or the number if the labels were numbers from 0."""
        if self.model == "poisson":
            raise UserError("a model of counts predicts no classes; use its scores")
        numbers = self.scores(x).argmax(1)
        return np.array(self.class_names)[numbers] if self.class_names else numbers

    def scores(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """(rows, classes), higher for more likely classes; for a model of counts, the log of the expected count."""
        try:
            x = np.asarray(x, dtype=np.float32)
        except (TypeError, ValueError):
            raise UserError("x is not an array of features; `fedsweep predict` converts tables by the schema") from None
        if x.ndim != 2 or x.shape[1] != self.features:
            raise UserError(f"features of shape {x.shape}: the model needs the shape (rows, {self.features})")
        head = self._parsed()
        rows = Shard.build([(models.at_cut(head, x), np.zeros(len(x), dtype=np.int64))]).x[0]
        return head.scores(rows, torch.tensor(self.weights)).numpy()

    def probabilities(self, x: NDArray[np.float32]) -> NDArray[np.float64]:
        """(rows, classes), the model's probability of every class."""
        if self.model == "poisson":
            raise UserError("a model of counts has no probabilities of classes; use its scores")
        return torch.tensor(self.scores(x)).double().softmax(1).numpy()

    def to_torch(self, backbone: str = "") -> torch.nn.Module:
        """The model as a torch module, backbone and head; only the head, which takes features, if the model records no
        backbone. A network is the chain of its stages, which takes features. `backbone`: MODULE:FUNCTION, if the
        backbone is a function of yours, which is then called."""
        from trainables.federation.torch_model import TorchModel, backbone_of

        head = self._parsed()
        if isinstance(head, NetworkModel):
            return torch.nn.Sequential(OrderedDict(head.plain(torch.tensor(self.weights)).stages)).eval()
        found = backbone_of(self.backbone, named=backbone) if self.backbone else None
        return TorchModel(found, head, torch.tensor(self.weights)).eval()

    def _parsed(self) -> models.Model:
        """The model, with those hyperparameters of the trial that belong to it."""
        found = models.parse(self.model, features=self.features, classes=self.classes)
        if is_network(self.model):
            return models.configured(found, self.provenance["trial"]["hyperparameters"])
        return found


def check_file_name(path: Path, model: str) -> None:
    """Networks are saved as safetensors, other models as npz. `fedsweep account` finds models by these endings."""
    suffix = SUFFIX if is_network(model) else ".npz"
    if path.suffix != suffix:
        raise UserError(f"--save {path}: the name of a file with model = {model!r} must end in {suffix}")


class _MissingPluginError(Exception):
    pass


def _plugin_of(model: str) -> str:
    """The module that defines a model; "" for fedsweep's own models."""
    head = models.HEADS.get(model.partition(":")[0])
    return "" if head is None else head.__module__


def _check_plugin(path: Path, model: str, plugin: str) -> None:
    """Load the plug-ins if fedsweep itself does not define the model. Raise if they do not define it either."""
    kind = model.partition(":")[0]
    known = {form.partition(":")[0] for form in models.FORMS}
    if kind not in known:
        plugins.load_all()
    if kind not in {*known, *models.HEADS}:
        raise _MissingPluginError(
            f"{path} needs the model {model!r} of the plug-in {plugin!r}, which is not loaded; name its file with "
            "--import, or from Python with fedsweep.plugins.use"
        )

"""The published data sets with their URLs and checksums, and the feature files made from them.

Checksums are published by the authors, or by libraries that distribute the data. A file without one either has a URL
whose content cannot change, or its content is checked after reading.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class File:
    """One file of a source."""

    name: str
    url: str
    checksum: str = ""
    """`md5:…`, `sha256:…`, or `sha256-prefix:…` if only the first digits are known, from the file's name."""


@dataclass(frozen=True)
class Source:
    """A data set as published."""

    name: str
    format: str
    """The reader in `formats`."""
    files: tuple[File, ...]
    about: str
    content: str = ""
    """SHA-256 of the arrays, for files without a published checksum."""


@dataclass(frozen=True)
class Recipe:
    """How a feature file is made."""

    name: str
    source: str
    backbone: str = ""
    """What turns images into features: a network, or pcaN for N principal components. Empty: the features are the
    source's own numbers."""


KRIZ = "https://www.cs.toronto.edu/~kriz"
MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
FASHION = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion"
LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary"
UCI_HEART = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease"
FLAMBY, BRCA = "https://raw.githubusercontent.com/owkin/FLamby", "flamby/datasets/fed_tcga_brca"
CIFAR_MODELS = "https://github.com/chenyaofo/pytorch-cifar-models/releases/download"


EMNIST = "https://biometrics.nist.gov/cs_links/EMNIST"


def _file(folder: str, name: str, digest: str = "") -> File:
    kind = "sha256" if len(digest) == 64 else "md5"
    return File(name, f"{folder}/{name}", f"{kind}:{digest}" if digest else "")


def _cifar(name: str, archive: str, sha256: str, about: str) -> Source:
    return Source(name, "cifar", (_file(KRIZ, archive, sha256),), about)


def _idx(name: str, folder: str, about: str, *sha256: str) -> Source:
    files = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    pairs = zip(files, sha256, strict=True)
    return Source(name, "idx", tuple(_file(folder, f"{file}-ubyte.gz", digest) for file, digest in pairs), about)


def _medmnist(name: str, md5: str, about: str) -> Source:
    url = f"https://zenodo.org/records/10519652/files/{name}.npz?download=1"
    return Source(name, "medmnist", (File(f"{name}.npz", url, f"md5:{md5}"),), f"MedMNIST v2: {about}")


def _emnist(split: str, about: str) -> Source:
    archive = _file(EMNIST, "gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e")
    return Source(f"emnist-{split}", "emnist", (archive,), f"EMNIST, the split `{split}`{about}")


_SOURCES = (
    _cifar(
        "cifar10",
        "cifar-10-python.tar.gz",
        "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        "CIFAR-10, 60,000 images of 32 x 32",
    ),
    _cifar(
        "cifar100",
        "cifar-100-python.tar.gz",
        "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        "CIFAR-100, for training backbones",
    ),
    _medmnist("pathmnist", "a8b06965200029087d5bd730944a56c1", "colon pathology, 9 classes"),
    _medmnist("dermamnist", "0744692d530f8e62ec473284d019b0c7", "dermatoscope, 7 classes"),
    _medmnist("octmnist", "c68d92d5b585d8d81f7112f81e2d0842", "retinal OCT, 4 classes"),
    _medmnist("pneumoniamnist", "28209eda62fecd6e6a2d98b1501bb15f", "chest X-ray, 2 classes"),
    _medmnist("breastmnist", "750601b1f35ba3300ea97c75c52ff8f6", "breast ultrasound, 2 classes"),
    _medmnist("bloodmnist", "7053d0359d879ad8a5505303e11de1dc", "blood cells, 8 classes"),
    _medmnist("tissuemnist", "ebe78ee8b05294063de985d821c1c34b", "kidney cortex cells, 8 classes"),
    _medmnist("organamnist", "68e3f8846a6bd62f0c9bf841c0d9eacc", "abdominal CT, axial, 11 classes"),
    _medmnist("organcmnist", "b9ceb9546e10131b32923c5bbeaea2b1", "abdominal CT, coronal, 11 classes"),
    _medmnist("organsmnist", "9ab87b696fb54e2a387ebe992d6ed5f1", "abdominal CT, sagittal, 11 classes"),
    _idx(
        *("mnist", MNIST, "MNIST, handwritten digits"),
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
    _idx(
        *("fashion-mnist", FASHION, "Fashion-MNIST, articles of clothing"),
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
    _emnist("digits", ""),
    _emnist("balanced", ": 47 classes of digits and letters"),
    Source(
        "adult",
        "libsvm",
        (_file(LIBSVM, "a9a"), _file(LIBSVM, "a9a.t")),
        "Adult in LIBSVM's a9a encoding, 123 binary features",
        content="41a2beb5ee78a8e69ef1e5b3f42a7588e2b45c26ba311ebe5f3dea3a27919a27",
    ),
    Source(
        "heart-disease",
        "heart",
        (
            _file(UCI_HEART, "processed.cleveland.data", "2d91a8ff69cfd9616aa47b59d6f843db"),
            _file(UCI_HEART, "processed.hungarian.data", "22e96bee155b5973568101c93b3705f6"),
            _file(UCI_HEART, "processed.switzerland.data", "9a87f7577310b3917730d06ba9349e20"),
            _file(UCI_HEART, "processed.va.data", "4249d03ca7711e84f4444768c9426170"),
        ),
        "UCI heart disease, four hospitals, each a client",
    ),
    Source(
        "tcga-brca",
        "tcga",
        (
            _file(f"{FLAMBY}/57a7e5c8f2bc26929c239e217ed3a41d6252bd53/{BRCA}", "brca.csv"),
            _file(
                f"{FLAMBY}/1b37901a15c316d16d4b9d5705aaefa5a803dba3/{BRCA}/dataset_creation_scripts",
                "train_test_split.csv",
            ),
        ),
        "TCGA-BRCA as in FLamby, six regions, each a client; the label is whether death was observed",
    ),
)
SOURCES = {source.name: source for source in _SOURCES}

WEIGHTS = {
    name: File(f"cifar100_{stem}.pt", f"{CIFAR_MODELS}/{folder}/cifar100_{stem}.pt", f"sha256-prefix:{stem[-8:]}")
    for name, folder, stem in (
        ("resnet20", "resnet", "resnet20-23dac2f1"),
        ("resnet32", "resnet", "resnet32-84213ce6"),
        ("resnet44", "resnet", "resnet44-ffe32858"),
        ("resnet56", "resnet", "resnet56-f2eff4c8"),
        ("vgg16", "vgg", "vgg16_bn-7d8c4031"),
    )
}
"""Published weights by backbone, trained on CIFAR-100."""

EFFICIENTNET = "efficientnet-lite0"
"""Its weights come with a Python package."""
ROOTS = "-sqrt"
"""Suffix of a backbone's name: the features are the square roots of the backbone's features."""

UNPUBLISHED = {
    "crc5-resnet20": "colorectal histology, 5 tissue classes, 32 x 32, through resnet20",
}
"""Feature files that studies use but that cannot be made from a published source."""

PIXELS = "pixels"
"""Name in place of a backbone: the features are the pixels themselves, for networks whose layers train."""
IMAGES = ("cifar", "medmnist", "idx", "emnist")
"""Formats that hold images."""


def recipe(name: str) -> Recipe | None:
    """The recipe of a feature file, SOURCE or SOURCE-BACKBONE; None for an unknown name or CIFAR without a backbone."""
    if name == "adult-a9a":
        return Recipe(name, "adult")
    if name in SOURCES and SOURCES[name].format != "cifar":
        return Recipe(name, name)
    for source in SOURCES:
        backbone = name.removeprefix(f"{source}-")
        if backbone == PIXELS and SOURCES[source].format in IMAGES:
            return Recipe(name, source)
        network = backbone.removesuffix(ROOTS)
        known = network in (*WEIGHTS, EFFICIENTNET) or is_timm(network) or components(backbone) is not None
        if backbone != name and SOURCES[source].format in IMAGES and known:
            return Recipe(name, source, backbone)
    return None


def is_timm(backbone: str) -> bool:
    """Whether a backbone is a model of the timm library, written timm.NAME."""
    return backbone.startswith("timm.") and len(backbone) > len("timm.")


def components(backbone: str) -> int | None:
    """N of pcaN, the first N principal components of the train pixels; None for any other name."""
    count = backbone.removeprefix("pca")
    return int(count) if backbone.startswith("pca") and count.isdecimal() and 0 < int(count) <= 784 else None


def recipes() -> list[Recipe]:
    """The feature files that `fedsweep data list` shows: those of the packaged studies, and at least one for each
    source but CIFAR-100, on which backbones are trained. `recipe` accepts any other SOURCE-BACKBONE too."""
    names = ["cifar10-resnet20", "cifar10-vgg16", "cifar10-efficientnet-lite0", "pathmnist-resnet20"]
    names += ["pathmnist-vgg16", "mnist", "fashion-mnist"]
    names += ["emnist-digits", "emnist-balanced-pca100", "cifar10-resnet44", "adult-a9a", "heart-disease", "tcga-brca"]
    names += ["cifar10-pixels"]
    names += [f"{name}-resnet20" for name in SOURCES if SOURCES[name].format == "medmnist" and name != "pathmnist"]
    return [known for name in names if (known := recipe(name)) is not None]

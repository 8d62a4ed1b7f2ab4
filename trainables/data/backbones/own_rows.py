"""Images and texts of the user: a folder with one subfolder per class, or a table with a column of paths or texts."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trainables.data.importing.reading import Table
from trainables.data.names import check_text
from trainables.errors import UserError
from trainables.files import open_plain

if TYPE_CHECKING:
    from PIL.Image import Image

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""Decoders that may run. For some other formats, Pillow calls external programs such as Ghostscript."""
FILE, LABEL, SPLIT = "file", "label", "split"
PARTS = ("train", "test")
MOST_NAMED = 20  # broken images named in one message


class ImageFiles:
    """Images that are decoded when they are needed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, start: int, stop: int) -> Iterator[NDArray[np.uint8]]:
        for index in range(start, min(stop, len(self))):
            try:
                yield read_image(self._paths[index])
            except UserError as error:
                raise UserError(f"{error}{self._more_broken(index + 1)}") from None

    def _more_broken(self, start: int) -> str:
        """The other images that cannot be read, so that all can be mended at once."""
        broken = [str(path) for path in self._paths[start:] if not _is_readable(path)]
        if not broken:
            return ""
        names = ", ".join(broken[:MOST_NAMED] + ["..."] * (len(broken) > MOST_NAMED))
        return f"; {len(broken)} more {'image' if len(broken) == 1 else 'images'} cannot be read: {names}"

    def content(self, start: int, stop: int) -> str:
        """A hash of names, sizes and modification times, so that resuming reads no finished image again."""
        digest = hashlib.sha256()
        for path in self._paths[start:stop]:
            try:
                status = path.stat()
            except OSError as error:
                raise UserError(f"image {path} cannot be read: {error.strerror}") from None
            digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        return digest.hexdigest()


class Texts:
    """A column of texts."""

    def __init__(self, texts: NDArray) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def read(self, start: int, stop: int) -> list[str]:
        return [str(text) for text in self._texts[start:stop]]

    def content(self, start: int, stop: int) -> str:
        return hashlib.sha256("\0".join(self.read(start, stop)).encode()).hexdigest()


def read_image(path: Path) -> NDArray[np.uint8]:
    """(height, width, 3), rotated by the EXIF orientation."""
    from PIL import Image, ImageOps

    bombs = Image.DecompressionBombWarning, Image.DecompressionBombError
    try:
        with warnings.catch_warnings(), open_plain(path, follow=True) as file:
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # from 89 million pixels on
            image = Image.open(file, formats=FORMATS)
            return as_rgb(ImageOps.exif_transpose(image) or image)
    except Image.UnidentifiedImageError:
        raise UserError(f"image {path} cannot be read: it is none of {', '.join(FORMATS)}") from None
    except (OSError, ValueError, SyntaxError, EOFError, *bombs) as error:
        raise UserError(f"image {path} cannot be read: {' '.join(str(error).split())}") from None


def _is_readable(path: Path) -> bool:
    try:
        read_image(path)
    except UserError:
        return False
    return True


def as_rgb(image: Image) -> NDArray[np.uint8]:
    """(height, width, 3). Pillow alone would clip 16-bit values at 255, and ignore transparency."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError("it has 32 bits per pixel and colour, of which the range is unknown; convert it to 8 or 16")
    if image.has_transparency_data:
        coloured = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", coloured.size, "white"), coloured)
    return np.asarray(image.convert("RGB"))


def is_image(path: Path) -> bool:
    return path.suffix.lower() in ENDINGS


def images_in(folder: Path) -> list[Path]:
    """All images in a folder and its subfolders, by name. Hidden files and other files are left out."""
    found = (path for path in folder.rglob("*") if is_image(path) and path.is_file())
    shown = [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    check_text(f"data {folder}: the name of an image", (str(path.relative_to(folder)) for path in shown))
    return sorted(shown)


def folder_table(folder: Path) -> Table:
    """The images of FOLDER/CLASS, or of FOLDER/train/CLASS and FOLDER/test/CLASS, as a table."""
    inside = {path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}
    split = inside == set(PARTS)
    paths = images_in(folder)
    parts = [path.relative_to(folder).parts for path in paths]
    depth = 1 + split
    for path, names in zip(paths, parts, strict=True):
        if len(names) <= depth:
            place = "FOLDER/train/CLASS" if split else "FOLDER/CLASS"
            raise UserError(f"image {path} belongs to no class; images lie in {place}")
    if not paths:
        raise UserError(f"data {folder} has no images; their names end in {', '.join(ENDINGS)}")
    table: Table = {
        FILE: np.array([str(path) for path in paths]),
        LABEL: np.array([names[depth - 1] for names in parts]),
    }
    return table | ({SPLIT: np.array([names[0] for names in parts])} if split else {})


def column_of_files(source: str, values: NDArray) -> list[Path]:
    """The paths of the images in a column of a table. The column's values are relative to the table's folder."""
    folder = Path(source).parent
    paths = [folder / str(value) for value in values]
    missing = next((path for path in paths if not os.path.isfile(path)), None)
    if missing is not None:
        raise UserError(f"data {source} names the image {missing}, which does not exist")
    return paths

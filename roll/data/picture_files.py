"""Reads the file of a picture, and checks it. Imports neither torch nor transformers: processes of environments do so.

A picture becomes RGB as people see it: turned as its EXIF data says, on white where it is transparent, and scaled to 8
bits.
"""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from pathlib import Path

import numpy as np
import xxhash
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from roll.data.picture_parts import PictureFault, PictureReference

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "AVIF")
"""Formats that are read, by Pillow's names."""
CAMERAS = "MPO"
"""Name of the JPEG of some cameras. It has several pictures, and the first one is the photograph."""
SENT = ("png", "jpeg", "webp")
"""Formats that servers of models read, by the names of their media types."""
LARGEST = 89_478_485
"""Largest number of pixels of a picture: the number above which Pillow suspects an attack."""
WHITE = (255, 255, 255, 255)
OTHER_PICTURE = "save it as a PNG or JPEG with one picture of 8 bits a channel"


def decoded(data: bytes) -> Image.Image:
    """Return the picture in a file's bytes as RGB.

    Raises:
        PictureFault: it is broken, too large, animated, or has values of 32 bits.
    """
    Image.init()  # registers the readers of all formats; only the first call takes time
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # among them Pillow's about a size that is checked here
            with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
                check_shape(opened)
                opened.load()
                picture = ImageOps.exif_transpose(opened)
                return _rgb(picture)
    except PictureFault:
        raise
    except Image.DecompressionBombError as error:
        raise PictureFault(f"is too large: {error}", "make it smaller", "too_large") from error
    except Exception as error:  # Pillow's readers raise anything for a broken file
        unknown = isinstance(error, UnidentifiedImageError)  # whose text has an address in memory
        problem = "is in no known format" if unknown else f"cannot be read as a picture: {error}"
        remedy = f"give an undamaged file of one of the formats {', '.join(FORMATS)}"
        raise PictureFault(problem, remedy, "unreadable") from error


def check_shape(opened: Image.Image) -> None:
    """Raise PictureFault if a picture is too large, animated, or has values of 32 bits."""
    width, height = opened.size
    if width * height > LARGEST:
        problem = f"has {width} x {height} pixels, more than {LARGEST:,}"
        raise PictureFault(problem, "make it smaller", "too_large")
    if (frames := getattr(opened, "n_frames", 1)) > 1 and opened.format != CAMERAS:
        problem = f"is a {opened.format or 'picture'} of {frames} pictures, and roll does not read videos"
        raise PictureFault(problem, "save one of them as a file of its own", "not_supported")
    if opened.mode in ("I", "F"):
        raise PictureFault(f"has values of 32 bits (mode {opened.mode})", OTHER_PICTURE, "not_supported")


def data_url(data: bytes) -> str:
    """Return a picture's file as a `data:` URL for a model on a server, which must see what `decoded` returns.

    A file that others may read differently (turned by its EXIF data, transparent, of 16 bits, or in another format) is
    sent as the PNG of what `decoded` returns. Raises PictureFault as `decoded` does.
    """
    picture = decoded(data)
    with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
        is_turned = opened.getexif().get(ExifTags.Base.Orientation, 1) != 1
        is_plain = opened.mode == "RGB" and not opened.has_transparency_data and not is_turned
        kind = str(opened.format).lower()
    if kind not in SENT or not is_plain:
        file, kind = io.BytesIO(), "png"
        picture.save(file, kind)
        data = file.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _rgb(picture: Image.Image) -> Image.Image:
    """Return a picture as RGB. Pillow itself would cut 16 bits off at 255, and show what transparency hides."""
    if picture.mode.startswith("I;16"):
        if "transparency" in picture.info:
            raise PictureFault("has 16 bits and a transparent colour", OTHER_PICTURE, "not_supported")
        return Image.fromarray((np.asarray(picture, np.uint16) >> 8).astype(np.uint8)).convert("RGB")
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    seen = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", seen.size, WHITE), seen).convert("RGB")


def read_bytes(reference: PictureReference, folder: Path) -> tuple[bytes, str]:
    """Return the bytes of a picture's file, and a text that changes with the file: size and time of modification.

    Args:
        folder: where relative paths start.

    Raises:
        PictureFault: there is no such file, it cannot be read, or the text is not base64.
    """
    if reference.encoded:
        try:
            return base64.b64decode("".join(reference.encoded.split()), validate=True), ""
        except (ValueError, binascii.Error) as error:
            raise PictureFault(f"is not base64: {error}", "encode the bytes of its file in base64") from error
    path = folder / Path(reference.path).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        remedy = "correct the path; a relative one starts at the folder of the rows' file"
        raise PictureFault(what, remedy, "not_found")
    try:
        return path.read_bytes(), stamp_of(path)
    except OSError as error:
        raise PictureFault(f"cannot be read: {error.strerror}", "change its permissions", "unreadable") from error


def stamp_of(path: Path) -> str:
    """Return the size and the time of modification of a file; "" if it cannot be found."""
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_size}|{status.st_mtime_ns}"


def digest_of(data: bytes) -> int:
    """Return the XXH3 hash of a picture's file."""
    return int.from_bytes(xxhash.xxh3_64_digest(data), "big", signed=True)

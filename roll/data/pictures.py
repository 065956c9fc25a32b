"""Turns pictures into what a model's vision tower reads, by the model's own processor.

transformers resizes a picture with Pillow, so that the result does not depend on the installed packages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, PreTrainedTokenizerBase
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.utils.hub import cached_file

from roll.config.derived.model_shape import PATCHED, SQUARE, TILED, sees_pictures
from roll.data.picture_files import decoded, digest_of, read_bytes
from roll.data.picture_parts import PictureFault, PictureReference
from roll.errors import DataError, Fault
from roll.types import AskedPictures, Ints, Pictures, PromptPictures


@dataclass(frozen=True)
class StoredPicture:
    """A picture that was checked, as a table stores it."""

    path: str
    """Absolute path of its file. Empty if the row has its bytes."""
    stamp: str
    """See `stamp_of`."""
    data: bytes
    """Bytes of its file. Empty if there is a path."""
    digest: int
    tokens: int
    """Number of its placeholder tokens."""
    width: int
    """Width in pixels as the model sees it; see `Sight.size`."""
    height: int


@dataclass(frozen=True)
class Sight:
    """How a model sees pictures."""

    model_type: str
    processor: Any
    """The model's image processor, of transformers."""
    token: str
    """Text of the token that the chat template writes once for each picture."""
    token_id: int
    """The placeholder token. All but Gemma 3 have it as `token`, too."""
    tile_tokens: int
    """Number of placeholders of a tile, for models that see tiles, or of a picture, for models that see a square."""
    placeholder: str = ""
    """Text of the placeholder token if it is not `token`. This one then stands before the placeholders."""
    end: str = ""
    """Text of the token after the placeholders of a picture, if `token` stands before them."""

    @property
    def identity(self) -> str:
        """Return a digest of all that decides what the model sees of a picture."""
        settings = json.dumps(self.processor.to_dict(), sort_keys=True, default=str)
        whole = f"{self.model_type}|{self.token}|{self.token_id}|{self.tile_tokens}|{self.end}|{settings}"
        return hashlib.sha256(whole.encode()).hexdigest()

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the texts of the tokens that stand for a picture."""
        return (self.token, self.placeholder) if self.placeholder else (self.token,)

    def checked(self, reference: PictureReference, folder: Path) -> tuple[StoredPicture, str]:
        """Return a picture to store, and the text in which its placeholders stand. Raises PictureFault."""
        data, stamp = read_bytes(reference, folder)
        picture = decoded(data)
        text, size = self.expansion(picture), self.size(picture)
        path = str((folder / Path(reference.path).expanduser()).absolute()) if reference.path else ""
        tokens = text.count(self.placeholder or self.token)
        return StoredPicture(path, stamp, b"" if path else data, digest_of(data), tokens, *size), text

    def expansion(self, picture: Image.Image) -> str:
        """Return the text that takes the place of a picture's token. Raises PictureFault if the processor refuses it.

        The formats are those of transformers' `Qwen2_5_VLProcessor`, `Qwen3VLProcessor`, `Idefics3Processor` and
        `Gemma3Processor`.
        """
        if self.model_type in SQUARE:
            return f"\n\n{self.token}{self.placeholder * self.tile_tokens}{self.end}\n\n"
        try:
            if self.model_type in PATCHED:
                patches = self.processor.get_number_of_image_patches(picture.height, picture.width, {})
                return self.token * (int(patches) // self.processor.merge_size**2)
            seen = self._tiles(picture)
        except PictureFault:
            raise
        except (ValueError, ZeroDivisionError, TypeError) as error:
            size = f"{picture.width} x {picture.height}"
            problem = f"has {size} pixels, which the model's image processor refuses: {error}"
            raise PictureFault(problem, "give a picture of another shape", "not_supported") from error
        return _tiled(seen["rows"][0][0], seen["cols"][0][0], self.token * self.tile_tokens)

    def size(self, picture: Image.Image) -> tuple[int, int]:
        """Return the width and height in pixels to which the processor resizes a picture that it accepts.

        For models that see tiles: those of the picture itself.
        """
        if self.model_type in TILED:
            return picture.size
        if self.model_type in SQUARE:
            return self.processor.size["width"], self.processor.size["height"]
        factor, bounds = self.processor.patch_size * self.processor.merge_size, self.processor.size
        least, most = bounds["shortest_edge"], bounds["longest_edge"]
        height, width = smart_resize(picture.height, picture.width, factor, min_pixels=least, max_pixels=most)
        return width, height

    def pixels(self, pictures: Sequence[Image.Image]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return `values`, `rows` and `grids` of pictures; see `Pictures`."""
        if self.model_type in TILED:
            tiles = [np.asarray(self._tiles(picture)["pixel_values"], np.float32)[0] for picture in pictures]
            rows = np.array([len(one) for one in tiles], np.int64)
            return (
                np.concatenate([one.reshape(len(one), -1) for one in tiles]),
                rows,
                np.zeros((len(rows), 2), np.int64),
            )
        seen = self.processor.preprocess(list(pictures), return_tensors="np")
        if self.model_type in SQUARE:
            values = np.asarray(seen["pixel_values"], np.float32).reshape(len(pictures), -1)
            return values, np.ones(len(values), np.int64), np.zeros((len(values), 2), np.int64)
        grids = np.asarray(seen["image_grid_thw"], np.int64)
        return (
            np.asarray(seen["pixel_values"], np.float32),
            grids.prod(axis=1),
            grids[:, 1:] // self.processor.merge_size,
        )

    def shown(self, stored: Sequence[Mapping[str, Any]], token_ids: Ints, place: str) -> Pictures | None:
        """Return the pictures of one sequence, given those of its row in the table; None without any.

        Args:
            token_ids: [T], the tokens of the sequence.
            place: the row, for an error.

        Raises:
            DataError: a file has changed since the rows were prepared.
        """
        if not stored:
            return None
        found = self.placed(self.pixels([decoded(_unchanged(one, place)) for one in stored]), token_ids)
        assert found is not None, f"{place}: its pictures do not fit"
        return found

    def placed(self, pixels: tuple[np.ndarray, np.ndarray, np.ndarray], token_ids: Ints) -> Pictures | None:
        """Return the pictures of one sequence. None if it has other placeholders than they need.

        Args:
            pixels: those that `pixels` returns for one or more pictures.
            token_ids: [T], the tokens of the sequence.
        """
        values, rows, grids = pixels
        tokens = grids.prod(axis=1) if self.model_type in PATCHED else rows * self.tile_tokens
        placeholders = np.flatnonzero(token_ids == self.token_id)
        if len(placeholders) != tokens.sum():
            return None
        starts = placeholders[np.cumsum(tokens) - tokens]
        return Pictures(values, rows, grids, starts, np.array([len(tokens)], np.int64))

    def prompt_pictures(self, entry: Mapping[str, Any], token_ids: Ints, place: str) -> PromptPictures | None:
        """Return the pictures of a prompt, to be read later, given its row in the table; None without any.

        Args:
            token_ids: [P], the tokens of the prompt, with as many placeholders as the model needs.
            place: the row, for an error.
        """
        stored: Sequence[Mapping[str, Any]] = entry["pictures"]
        if not stored:
            return None
        asked_ids = np.asarray(entry["asked_ids"], dtype=np.int32)
        hashes = tuple(f"{one['digest'] % (1 << 64):016x}" for one in stored)

        def asked() -> AskedPictures:
            return AskedPictures(asked_ids, tuple(_unchanged(one, place) for one in stored), hashes)

        def pixels() -> Pictures:
            found = self.shown(stored, token_ids, place)
            assert found is not None
            return found

        names = tuple(one["path"] or known for one, known in zip(stored, hashes, strict=True))
        return PromptPictures(names, asked, pixels)

    def _tiles(self, picture: Image.Image) -> Mapping[str, Any]:
        seen = self.processor.preprocess([[picture]], return_tensors="np", return_row_col_info=True)
        if not np.all(seen["pixel_attention_mask"]):
            raise PictureFault(
                "would be padded by the model's image processor", "give another picture", "not_supported"
            )
        return seen


def _tiled(rows: int, columns: int, placeholders: str) -> str:
    """Return the text of a picture in tiles, and of the whole picture after them."""
    around, whole = "<fake_token_around_image>", "<global-img>"
    if not rows and not columns:
        return f"{around}{whole}{placeholders}{around}"
    lines = (
        "".join(f"{around}<row_{row + 1}_col_{column + 1}>{placeholders}" for column in range(columns)) + "\n"
        for row in range(rows)
    )
    return f"{''.join(lines)}\n{around}{whole}{placeholders}{around}"


def _unchanged(stored: Mapping[str, Any], place: str) -> bytes:
    """Return the bytes of a stored picture. Raises DataError if its file has changed."""
    if not stored["path"]:
        return stored["data"]
    try:
        data = Path(stored["path"]).read_bytes()
    except OSError:
        data = b""
    if digest_of(data) != stored["digest"]:
        problem = f"its picture {stored['path']} has changed or is gone since the rows were prepared"
        raise DataError(Fault(place, problem, "start again, which prepares the rows anew", "changed"))
    return data


def expanded(texts: Sequence[str], token: str, expansions: Sequence[str]) -> list[str]:
    """Return texts with each placeholder token replaced by its picture's text; both are in the same order."""
    left = iter(expansions)
    return ["".join(_filled(text.split(token), left)) for text in texts]


def _filled(pieces: Sequence[str], left: Iterator[str]) -> Iterator[str]:
    for number, piece in enumerate(pieces):
        if number:
            yield next(left)
        yield piece


def load_sight(
    model: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool = False, asked: bool | None = None
) -> Sight | None:
    """Return how a model sees pictures; None if it sees none. The tokenizer gets the processor's chat template.

    Args:
        asked: `model_args.sees_pictures`.

    Raises:
        DataError: the model's image processor cannot be read, or does not fit the model or the tokenizer. Or it was
            asked that the model sees pictures, and roll runs no tower of it.
    """
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):  # a model without a readable configuration is reported when it is loaded
        return None
    if not sees_pictures(config.model_type, asked):
        if asked:
            problem = f"true, but '{model}' is a {config.model_type}, of which roll runs no vision tower"
            raise DataError(Fault("model_args.sees_pictures", problem, "remove it, or use another model", "no_effect"))
        return None
    try:
        processor = AutoImageProcessor.from_pretrained(model, backend="pil", trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        problem = f"the image processor of '{model}' cannot be read: {first}"
        raise DataError(
            Fault("pretrain", problem, "give a folder with the model's preprocessor_config.json", "unreadable")
        ) from error
    if legacy := cached_file(model, "chat_template.json", _raise_exceptions_for_missing_entries=False):
        # transformers' processors prefer this file to the tokenizer's template, too.
        tokenizer.chat_template = json.loads(Path(legacy).read_text(encoding="utf-8"))["chat_template"]
    _check_fit(model, config, processor, tokenizer)
    token, number = str(tokenizer.convert_ids_to_tokens(config.image_token_id)), config.image_token_id
    if config.model_type in SQUARE:
        first, end = (str(tokenizer.convert_ids_to_tokens(each)) for each in (config.boi_token_id, config.eoi_token_id))
        return Sight(config.model_type, processor, first, number, config.mm_tokens_per_image, token, end)
    tile = config.vision_config
    tokens = (tile.image_size // tile.patch_size) ** 2 // config.scale_factor**2 if config.model_type in TILED else 0
    return Sight(config.model_type, processor, token, number, tokens)


def _check_square(model: str, config: Any, processor: Any) -> Iterator[Fault]:
    """Yield faults of a model of Gemma 3 whose pictures would not be seen as they are here."""
    if processor.do_pan_and_scan:
        problem = f"the image processor of '{model}' has do_pan_and_scan, and roll shows a picture without crops"
        yield Fault("pretrain", problem, "set it to false in preprocessor_config.json", "not_supported")
    if getattr(config.vision_config, "vision_use_head", True):
        problem = f"the vision tower of '{model}' has a head that pools, which Gemma 3 does not use"
        yield Fault("pretrain", problem, "set vision_use_head to false in config.json", "not_supported")
    window, tokens = config.get_text_config().sliding_window, config.mm_tokens_per_image
    if window is not None and tokens > window:
        problem = f"a picture of '{model}' has {tokens} tokens, more than its sliding window of {window}"
        yield Fault("pretrain", problem, "use another model: engines differ in what such tokens see", "not_supported")


def _check_fit(model: str, config: Any, processor: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError if a model's processor or tokenizer is not that of its weights."""
    vision, faults = config.vision_config, []
    if config.model_type in TILED:
        pairs = {"max_image_size": (processor.max_image_size["longest_edge"], vision.image_size)}
    elif config.model_type in SQUARE:
        sides = processor.size["height"], processor.size["width"]
        pairs = {"size": (sides, (vision.image_size,) * 2), "do_resize": (processor.do_resize, True)}
        faults += _check_square(model, config, processor)
    else:
        pairs = {
            "patch_size": (processor.patch_size, vision.patch_size),
            "merge_size": (processor.merge_size, vision.spatial_merge_size),
            "temporal_patch_size": (processor.temporal_patch_size, vision.temporal_patch_size),
        }
    for key, (own, needed) in pairs.items():
        if own != needed:
            problem = f"the image processor of '{model}' has the {key} {own}, but its vision tower needs {needed}"
            faults.append(Fault("pretrain", problem, "use the preprocessor_config.json of the model", "unfit"))
    around = (config.boi_token_id, config.eoi_token_id) if config.model_type in SQUARE else ()
    for number in (config.image_token_id, *around):
        token = tokenizer.convert_ids_to_tokens(number) if 0 <= number < len(tokenizer) else None
        if not token or tokenizer.encode(str(token), add_special_tokens=False) != [number]:
            kind = "its placeholder of pictures" if number == config.image_token_id else "a mark around pictures"
            problem = f"the tokenizer of '{model}' does not read {kind}, the token {number}, as one token"
            faults.append(Fault("pretrain", problem, "use the tokenizer that belongs to the model", "unfit"))
    if faults:
        raise DataError(*faults)

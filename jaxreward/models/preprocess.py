"""Images to model inputs, as a folder's preprocessor_config.json asks for, on the host with NumPy and Pillow.

The functions equal the Pillow image processors of Hugging Face transformers 5.24 bit for bit
(`Qwen2VLImageProcessorPil`, `CLIPImageProcessorPil`, `VideoMAEImageProcessorPil`, `SiglipImageProcessorPil`,
`Siglip2ImageProcessorPil`, `SmolVLMImageProcessorPil`); images that would take all memory are refused. The
torchvision processors of transformers resample a little differently.

An image is uint8 RGB [H, W, 3]. Grey images ([H, W] or [H, W, 1]) are repeated over three channels; RGBA
images are blended onto white.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jaxreward.errors import DataError, ModelError
from jaxreward.models.hub_config import Fields, read_json

FILE = "preprocessor_config.json"
OPENAI_MEAN, OPENAI_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)  # as mean and std: to [-1, 1]; transformers calls these IMAGENET_STANDARD
MOST_PIXELS = 2**26  # of a resized image: 200 MB; more is a mistake in the image or in the config
LONGEST_TILED_EDGE = 4096  # Idefics3 enlarges no image beyond this

_Config = Mapping[str, Any]
_Images = Sequence[np.ndarray]


@dataclasses.dataclass(frozen=True)
class PixelSpec:
    """How pixels are resampled and normalised: (x scale - mean) / std, channel by channel.

    Attributes:
      resample: a filter of `PIL.Image.Resampling`.
      scale: of the uint8 values.
      mean: of the scaled red, green and blue.
      std: of the scaled red, green and blue.
    """

    resample: Image.Resampling = Image.Resampling.BICUBIC
    scale: float = 1 / 255
    mean: tuple[float, float, float] = HALF
    std: tuple[float, float, float] = HALF

    @classmethod
    def from_dict(cls, config: _Config, defaults: PixelSpec) -> PixelSpec:
        """Reads the fields that all image processors share; ModelError names a bad one."""
        fields = Fields(config, file=FILE)
        filters = {int(filter) for filter in Image.Resampling}
        resample = fields.integer("resample", int(defaults.resample), least=0)
        if resample not in filters:
            raise fields.refuse("resample", f"a filter of Pillow, one of {sorted(filters)},")
        spec = cls(
            resample=Image.Resampling(resample),
            scale=fields.number("rescale_factor", defaults.scale) if fields.flag("do_rescale", True) else 1.0,
            mean=_channels(fields, config, "image_mean", defaults.mean),
            std=_channels(fields, config, "image_std", defaults.std),
        )
        if 0.0 in spec.std:
            raise fields.refuse("image_std", "numbers that are not 0")
        if not fields.flag("do_normalize", True):
            return dataclasses.replace(spec, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
        return spec


@dataclasses.dataclass(frozen=True)
class QwenImageSpec:
    """Images of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: any size, in multiples of a merged cell.

    Attributes:
      pixels: resampling and normalisation.
      patch_size: edge of a patch in pixels.
      temporal_patch_size: frames of a patch; a still image is repeated.
      merge_size: edge in patches of the cell that makes one token.
      min_pixels: smaller images are enlarged to about this many pixels.
      max_pixels: larger images are reduced to at most this many pixels.
    """

    pixels: PixelSpec = PixelSpec(mean=OPENAI_MEAN, std=OPENAI_STD)
    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280

    @classmethod
    def from_dict(cls, config: _Config) -> QwenImageSpec:
        """Reads a preprocessor_config.json, old (min_pixels, max_pixels) or new (size).

        Raises:
          ModelError: names a bad field.
        """
        fields = Fields(config, file=FILE)
        _require_resize(fields)
        size = fields.section("size", optional=True)
        # The old fields win where a file has both, as in transformers.
        limits = [
            fields.integer(old) if fields.has(old) else size.integer(new, default)
            for old, new, default in (
                ("min_pixels", "shortest_edge", cls.min_pixels),
                ("max_pixels", "longest_edge", cls.max_pixels),
            )
        ]
        if limits[0] > limits[1]:
            raise ModelError(
                f"{FILE}: min_pixels (size.shortest_edge) is {limits[0]} and max_pixels (size.longest_edge) "
                f"is {limits[1]}; the first must not be larger"
            )
        return cls(
            pixels=PixelSpec.from_dict(config, cls.pixels),
            patch_size=fields.integer("patch_size", cls.patch_size),
            temporal_patch_size=fields.integer("temporal_patch_size", cls.temporal_patch_size),
            merge_size=fields.integer("merge_size", cls.merge_size),
            min_pixels=limits[0],
            max_pixels=limits[1],
        )


@dataclasses.dataclass(frozen=True)
class CropImageSpec:
    """Images of CLIP, X-CLIP and SigLIP: resized, then cut around the centre, to one size.

    Attributes:
      pixels: resampling and normalisation.
      size: the shortest edge after resizing, or (height, width), or None: not resized.
      crop: (height, width) of what is kept, or None: all.
    """

    pixels: PixelSpec
    size: int | tuple[int, int] | None
    crop: tuple[int, int] | None = None

    @classmethod
    def from_dict(cls, config: _Config, defaults: CropImageSpec) -> CropImageSpec:
        """Reads a preprocessor_config.json, with sizes as numbers (old) or objects (new).

        Raises:
          ModelError: names a bad field.
        """
        fields = Fields(config, file=FILE)
        size, crop = defaults.size, defaults.crop
        if fields.has("size"):
            size = _edge_or_size(fields, config, "size")
        if fields.has("crop_size"):
            cut = _edge_or_size(fields, config, "crop_size")
            crop = (cut, cut) if isinstance(cut, int) else cut
        return cls(
            pixels=PixelSpec.from_dict(config, defaults.pixels),
            size=size if fields.flag("do_resize", True) else None,
            crop=crop if fields.flag("do_center_crop", defaults.crop is not None) else None,
        )


@dataclasses.dataclass(frozen=True)
class NaflexImageSpec:
    """Images of SigLIP2 NaFlex: as many patches as fit, in about the image's own aspect ratio.

    Attributes:
      pixels: resampling and normalisation.
      patch_size: edge of a patch in pixels.
      max_patches: patches of every image, padding included.
    """

    pixels: PixelSpec = PixelSpec(resample=Image.Resampling.BILINEAR)
    patch_size: int = 16
    max_patches: int = 256

    @classmethod
    def from_dict(cls, config: _Config) -> NaflexImageSpec:
        """Reads a preprocessor_config.json; ModelError names a bad field."""
        fields = Fields(config, file=FILE)
        _require_resize(fields)
        return cls(
            pixels=PixelSpec.from_dict(config, cls.pixels),
            patch_size=fields.integer("patch_size", cls.patch_size),
            max_patches=fields.integer("max_num_patches", cls.max_patches),
        )


@dataclasses.dataclass(frozen=True)
class TileImageSpec:
    """Images of Idefics3 and SmolVLM: cut into square tiles, then once more as a whole.

    Attributes:
      pixels: resampling and normalisation.
      longest_edge: of the resized image in pixels, before it is rounded up to whole tiles.
      tile: edge of a tile in pixels.
      split: whether there are tiles; if not, an image is one square.
    """

    pixels: PixelSpec = PixelSpec(resample=Image.Resampling.LANCZOS)
    longest_edge: int = 4 * 364
    tile: int = 364
    split: bool = True

    @classmethod
    def from_dict(cls, config: _Config) -> TileImageSpec:
        """Reads a preprocessor_config.json; ModelError names a bad field."""
        fields = Fields(config, file=FILE)
        _require_resize(fields)
        return cls(
            pixels=PixelSpec.from_dict(config, cls.pixels),
            longest_edge=fields.section("size", optional=True).integer("longest_edge", cls.longest_edge),
            tile=fields.section("max_image_size", optional=True).integer("longest_edge", cls.tile),
            split=fields.flag("do_image_splitting", True),
        )


ImageSpec = QwenImageSpec | CropImageSpec | NaflexImageSpec | TileImageSpec

_CLIP = CropImageSpec(PixelSpec(mean=OPENAI_MEAN, std=OPENAI_STD), 224, (224, 224))
_VIDEO_MAE = CropImageSpec(
    # The class's own default mean and std are 0.5; X-CLIP's files give ImageNet's.
    PixelSpec(resample=Image.Resampling.BILINEAR),
    224,
    (224, 224),
)
_SIGLIP = CropImageSpec(PixelSpec(), (224, 224))

# Keyed by the class's name without 'ImageProcessor' or 'FeatureExtractor' and 'Fast' or 'Pil'.
_READERS = {
    "Qwen2VL": QwenImageSpec.from_dict,
    "CLIP": lambda config: CropImageSpec.from_dict(config, _CLIP),
    "VideoMAE": lambda config: CropImageSpec.from_dict(config, _VIDEO_MAE),
    "Siglip": lambda config: CropImageSpec.from_dict(config, _SIGLIP),
    "Siglip2": NaflexImageSpec.from_dict,
    "Idefics3": TileImageSpec.from_dict,
    "SmolVLM": TileImageSpec.from_dict,
}
_OF_MODEL_TYPE = {
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2VL",
    "qwen3_vl": "Qwen2VL",
    "clip": "CLIP",
    "xclip": "VideoMAE",
    "siglip": "Siglip",
    "siglip2": "Siglip2",
    "idefics3": "Idefics3",
    "smolvlm": "SmolVLM",
}


def image_spec(config: _Config, model_type: str | None = None) -> ImageSpec:
    """Reads an image processor's config.

    Args:
      config: the content of preprocessor_config.json.
      model_type: what config.json says; it counts where the processor's config does not name its class.

    Raises:
      ModelError: if the class is unknown here or a field is bad.
    """
    name = config.get("image_processor_type") or config.get("feature_extractor_type")
    if name is None:
        kind = _OF_MODEL_TYPE.get(model_type or "")
    else:
        kind = str(name)
        for end in ("Pil", "Fast", "ImageProcessor", "FeatureExtractor"):
            kind = kind.removesuffix(end)
    if kind not in _READERS:
        raise ModelError(
            f"{FILE}: the image processor is {name!r} (model type {model_type!r}); one of "
            f"{', '.join(kind + 'ImageProcessor' for kind in _READERS)} was expected"
        )
    return _READERS[kind](config)


def load_image_spec(folder: str | Path) -> ImageSpec:
    """Reads preprocessor_config.json of a Hugging Face folder, or processor_config.json where it holds that.

    Raises:
      ModelError: if there is no such file, or it is damaged or of an unknown class.
    """
    folder = Path(folder)
    model_type = None
    if (folder / "config.json").is_file():
        model_type = read_json(folder / "config.json").get("model_type")
    if not (folder / FILE).is_file() and (folder / "processor_config.json").is_file():
        inner = read_json(folder / "processor_config.json").get("image_processor")
        if isinstance(inner, dict):
            return image_spec(inner, model_type)
    return image_spec(read_json(folder / FILE), model_type)


def qwen_size(height: int, width: int, spec: QwenImageSpec) -> tuple[int, int]:
    """The size to which an image is resized: multiples of a merged cell, near the limits of pixels.

    Raises:
      DataError: if one edge is more than 200 times the other.
    """
    if max(height, width) / min(height, width) > 200:
        raise DataError(
            f"an image of {height} x {width} pixels was found; one edge may be at most 200 times the other. "
            "Cut or pad it"
        )
    cell = spec.patch_size * spec.merge_size
    rows, columns = round(height / cell) * cell, round(width / cell) * cell
    if rows * columns > spec.max_pixels:
        shrink = math.sqrt(height * width / spec.max_pixels)
        rows = max(cell, math.floor(height / shrink / cell) * cell)
        columns = max(cell, math.floor(width / shrink / cell) * cell)
    elif rows * columns < spec.min_pixels:
        grow = math.sqrt(spec.min_pixels / (height * width))
        rows = math.ceil(height * grow / cell) * cell
        columns = math.ceil(width * grow / cell) * cell
    return rows, columns


def qwen_patches(images: _Images, spec: QwenImageSpec) -> tuple[np.ndarray, np.ndarray]:
    """Cuts images into the rows that Qwen's vision tower embeds.

    Args:
      images: at least one, of any sizes.
      spec: what the model expects.

    Returns:
      (patches float32 [P, 3 * temporal_patch_size * patch_size^2], grids int32 [N, 3]): the rows of all
      images in order, within an image cell by cell and within a cell row by row; and each image's number of
      patches in (time, height, width), where time is 1.

    Raises:
      DataError: for images that cannot be used.
    """
    size, merge = spec.patch_size, spec.merge_size
    table = _normalisation(spec.pixels)
    images = _rgb(images)
    sizes = [qwen_size(*image.shape[:2], spec) for image in images]
    grids = np.asarray([(1, height // size, width // size) for height, width in sizes], np.int32)
    ends = np.cumsum(grids.prod(axis=1, dtype=np.int64))
    patches = np.empty((ends[-1], 3, spec.temporal_patch_size, size * size), np.float32)
    for image, target, (_, rows, columns), end in zip(images, sizes, grids, ends, strict=True):
        resized = _resize(image, target, spec.pixels, "lower max_pixels in preprocessor_config.json")
        cells = resized.reshape(rows // merge, merge, size, columns // merge, merge, size, 3)
        flat = cells.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, 1, size * size)
        _normalise(flat, table, channel_axis=1, out=patches[end - rows * columns : end])
    return patches.reshape(len(patches), -1), grids


def crop_sizes(height: int, width: int, spec: CropImageSpec) -> tuple[tuple[int, int], tuple[int, int]]:
    """The (height, width) to which an image is resized, and the one that is left of it."""
    if spec.size is None:
        resized = (height, width)
    elif isinstance(spec.size, tuple):
        resized = spec.size
    else:
        long = int(spec.size * max(height, width) / min(height, width))
        resized = (long, spec.size) if width <= height else (spec.size, long)
    return resized, spec.crop or resized


def resize_and_crop(images: _Images, spec: CropImageSpec) -> np.ndarray:
    """Resizes images, cuts around the centre (a small image is padded with black) and normalises.

    Args:
      images: at least one, of any sizes if the spec leads them all to one size.
      spec: what the model expects.

    Returns:
      float32 [N, H, W, 3].

    Raises:
      DataError: for images that cannot be used, or that do not end up in one size.
    """
    table = _normalisation(spec.pixels)
    out: list[np.ndarray] = []
    for image in _rgb(images):
        target, kept = crop_sizes(*image.shape[:2], spec)
        resized = _resize(image, target, spec.pixels, "cut the image to a less extreme shape")
        out.append(_normalise(_crop_centre(resized, *kept), table, channel_axis=2))
        if out[-1].shape != out[0].shape:
            raise DataError(
                f"images 0 and {len(out) - 1} end up in sizes {out[0].shape[:2]} and {out[-1].shape[:2]}, "
                "because the preprocessor does not crop; pass images of one size"
            )
    return np.stack(out)


def naflex_size(height: int, width: int, spec: NaflexImageSpec) -> tuple[int, int]:
    """The largest size of at most `max_patches` patches, rounded up to whole patches.

    The scale is found by bisection on [1e-6, 100] to 1e-5, as the model's authors do: other scales can give
    other sizes.
    """

    def scaled(scale: float, edge: int) -> int:
        return max(spec.patch_size, int(math.ceil(edge * scale / spec.patch_size) * spec.patch_size))

    tolerance = 1e-5
    low, high = tolerance / 10, 100.0
    while high - low >= tolerance:
        middle = (low + high) / 2
        patches = (scaled(middle, height) / spec.patch_size) * (scaled(middle, width) / spec.patch_size)
        if patches <= spec.max_patches:
            low = middle
        else:
            high = middle
    return scaled(low, height), scaled(low, width)


def naflex_patches(images: _Images, spec: NaflexImageSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts images into the patches of SigLIP2 NaFlex.

    Args:
      images: at least one, of any sizes.
      spec: what the model expects.

    Returns:
      (patches float32 [N, max_patches, 3 * patch_size^2] in row-major order with the channel last, zeros for
      padding; where bool [N, max_patches], False for padding; shapes int32 [N, 2], the number of patches in
      (height, width)).

    Raises:
      DataError: for images that cannot be used.
    """
    size = spec.patch_size
    images = _rgb(images)
    table = _normalisation(spec.pixels)
    patches = np.zeros((len(images), spec.max_patches, 3 * size * size), np.float32)
    shapes = np.zeros((len(images), 2), np.int32)
    for i, image in enumerate(images):
        target = naflex_size(*image.shape[:2], spec)
        rows, columns = target[0] // size, target[1] // size
        if rows * columns > spec.max_patches:
            raise DataError(
                f"image {i} of {image.shape[0]} x {image.shape[1]} pixels is too large or too long for "
                f"{spec.max_patches} patches; make it smaller first"
            )
        values = _normalise(
            _resize(image, target, spec.pixels, "lower max_num_patches"), table, channel_axis=2
        )
        values = values.reshape(rows, size, columns, size, 3).swapaxes(1, 2)
        patches[i, : rows * columns] = values.reshape(rows * columns, -1)
        shapes[i] = rows, columns
    where = np.arange(spec.max_patches) < shapes.prod(axis=1, keepdims=True)
    return patches, where, shapes


def tile_size(height: int, width: int, spec: TileImageSpec) -> tuple[tuple[int, int], tuple[int, int]]:
    """The two sizes to which an image is resized one after the other; the second is in whole tiles."""
    ratio = width / height
    # The longest edge becomes `longest_edge`, the other one even and at least 1.
    if width >= height:
        first = (_even(int(spec.longest_edge / ratio)), spec.longest_edge)
    else:
        first = (spec.longest_edge, _even(int(spec.longest_edge * ratio)))
    first = (max(first[0], 1), max(first[1], 1))
    ratio = first[1] / first[0]
    if first[1] >= first[0] and first[1] > LONGEST_TILED_EDGE:
        first = (max(int(LONGEST_TILED_EDGE / ratio), 1), LONGEST_TILED_EDGE)
    elif first[0] > first[1] and first[0] > LONGEST_TILED_EDGE:
        first = (LONGEST_TILED_EDGE, max(int(LONGEST_TILED_EDGE * ratio), 1))
    if not spec.split:
        return first, (spec.tile, spec.tile)

    def whole(edge: int) -> int:
        return math.ceil(edge / spec.tile) * spec.tile

    ratio = first[1] / first[0]
    if first[1] >= first[0]:
        columns = whole(first[1])
        return first, (whole(int(columns / ratio)), columns)
    rows = whole(first[0])
    return first, (rows, whole(int(rows * ratio)))


def smolvlm_tiles(images: _Images, spec: TileImageSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts images into the tiles of Idefics3 and SmolVLM; each tile is full, so that none needs a pixel mask.

    Args:
      images: at least one, of any sizes.
      spec: what the model expects.

    Returns:
      (tiles float32 [M, tile, tile, 3], rows int32 [N], columns int32 [N]). An image gives rows * columns
      tiles in row-major order and then itself in the size of one tile; or, with 0 rows and 0 columns, only
      the latter.

    Raises:
      DataError: for images that cannot be used.
    """
    edge = spec.tile
    table = _normalisation(spec.pixels)
    advice = "lower size.longest_edge in preprocessor_config.json"
    tiles, grid = [], []
    for image in _rgb(images):
        first, second = tile_size(*image.shape[:2], spec)
        resized = _resize(_resize(image, first, spec.pixels, advice), second, spec.pixels, advice)
        rows, columns = second[0] // edge, second[1] // edge
        if (rows, columns) == (1, 1):
            rows = columns = 0
            parts = resized[None]
        else:
            parts = resized.reshape(rows, edge, columns, edge, 3).swapaxes(1, 2).reshape(-1, edge, edge, 3)
            parts = np.concatenate([parts, _resize(resized, (edge, edge), spec.pixels, advice)[None]])
        tiles.append(_normalise(parts, table, channel_axis=3))
        grid.append((rows, columns))
    rows_and_columns = np.asarray(grid, np.int32)
    return np.concatenate(tiles), rows_and_columns[:, 0], rows_and_columns[:, 1]


def _even(number: int) -> int:
    return number + number % 2


def _rgb(images: _Images) -> list[np.ndarray]:
    """Checks images and brings them to uint8 [H, W, 3]."""
    if len(images) == 0:
        raise DataError("no images were found; at least one was expected")
    return [_one_rgb(image, i) for i, image in enumerate(images)]


def _one_rgb(image: np.ndarray, number: int) -> np.ndarray:
    if not hasattr(image, "dtype") or not hasattr(image, "shape"):
        raise DataError(f"image {number} is a {type(image).__name__}; a uint8 array [H, W, 3] was expected")
    image = np.asarray(image)
    if image.dtype != np.uint8:
        raise DataError(
            f"image {number} has dtype {image.dtype}; uint8 was expected (0 to 255, not scaled to 0 to 1)"
        )
    grey = image[..., None] if image.ndim == 2 else image
    if grey.ndim != 3 or grey.shape[2] not in (1, 3, 4) or 0 in grey.shape:
        raise DataError(
            f"image {number} has shape {image.shape}; [H, W, 3] (or [H, W], [H, W, 1], [H, W, 4] with alpha) "
            "was expected, with the channel last and at least one pixel"
        )
    if grey.shape[2] == 4:
        alpha = grey[..., 3:] / 255
        return np.round(alpha * grey[..., :3] + (1 - alpha) * 255).astype(np.uint8)
    return np.repeat(grey, 3, axis=2) if grey.shape[2] == 1 else grey


def _resize(image: np.ndarray, size: tuple[int, int], pixels: PixelSpec, advice: str) -> np.ndarray:
    """Resamples uint8 [H, W, 3] to (height, width)."""
    if size[0] * size[1] > MOST_PIXELS:
        raise DataError(
            f"an image of {image.shape[0]} x {image.shape[1]} pixels would be resized to "
            f"{size[0]} x {size[1]}; at most {MOST_PIXELS} pixels are possible: {advice}"
        )
    resized = Image.fromarray(np.ascontiguousarray(image)).resize(
        (size[1], size[0]), resample=pixels.resample
    )
    return np.asarray(resized)


def _crop_centre(image: np.ndarray, height: int, width: int) -> np.ndarray:
    missing = (max(height - image.shape[0], 0), max(width - image.shape[1], 0))
    if any(missing):
        # An odd row or column of padding goes first.
        image = np.pad(image, [*(((n + 1) // 2, n // 2) for n in missing), (0, 0)])
    top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
    return image[top : top + height, left : left + width]


def _normalisation(pixels: PixelSpec) -> np.ndarray:
    """The normalised value of each uint8 value, float32 [3, 256], rounded where transformers rounds."""
    scaled = (np.arange(256, dtype=np.float64) * pixels.scale).astype(np.float32)
    return (scaled - np.float32(pixels.mean)[:, None]) / np.float32(pixels.std)[:, None]


def _normalise(
    image: np.ndarray, table: np.ndarray, *, channel_axis: int, out: np.ndarray | None = None
) -> np.ndarray:
    """Looks each uint8 value up in its channel's row of the table [3, 256].

    Returns:
      float32 of the image's shape, or `out`, to whose shape the values are repeated.
    """
    out = np.empty(image.shape, np.float32) if out is None else out
    # Views, so that the assignment fills `out`.
    by_channel, values = np.moveaxis(out, channel_axis, 0), np.moveaxis(image, channel_axis, 0)
    for channel in range(3):
        by_channel[channel] = np.take(table[channel], values[channel])
    return out


def _require_resize(fields: Fields) -> None:
    if not fields.flag("do_resize", True):
        raise fields.refuse("do_resize", "true (the model's patches need it)")


def _channels(
    fields: Fields, config: _Config, name: str, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    """Three numbers, or one for all three channels."""
    if not fields.has(name):
        return default
    value = config[name]
    values = value if isinstance(value, list | tuple) else [value] * 3
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in values)
    if len(values) != 3 or not numbers or not all(map(math.isfinite, values)):
        raise fields.refuse(name, "a finite number for each of red, green and blue")
    return (float(values[0]), float(values[1]), float(values[2]))


def _edge_or_size(fields: Fields, config: _Config, name: str) -> int | tuple[int, int]:
    """A number or {shortest_edge}: the shortest edge; [height, width] or {height, width}: both."""
    value = config[name]
    if isinstance(value, Mapping):
        inner = fields.section(name)
        if value.keys() == {"shortest_edge"}:
            return inner.integer("shortest_edge")
        if value.keys() == {"height", "width"}:
            return inner.integer("height"), inner.integer("width")
    elif type(value) is int and value > 0:
        return value
    elif isinstance(value, list) and len(value) == 2 and all(type(x) is int and x > 0 for x in value):
        return value[0], value[1]
    raise fields.refuse(name, "a positive number, {shortest_edge} or {height, width}")

"""The truth is the Pillow image processors of transformers: equal bit for bit."""

import importlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from jaxreward.errors import DataError, ModelError
from jaxreward.models import preprocess

SIZES = [(144, 160), (330, 640), (90, 37), (224, 224), (480, 301), (1, 1), (3, 200)]
QWEN2_5 = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "processor_class": "Qwen2_5_VLProcessor",
}
QWEN3 = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
CLIP_OLD = {
    "crop_size": 224,
    "do_center_crop": True,
    "do_normalize": True,
    "do_resize": True,
    "feature_extractor_type": "CLIPFeatureExtractor",
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "size": 224,
}
XCLIP = {
    "crop_size": {"height": 224, "width": 224},
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "image_processor_type": "VideoMAEImageProcessor",
    "size": {"shortest_edge": 224},
    "resample": 2,
}
SIGLIP2 = {"image_processor_type": "Siglip2ImageProcessorFast", "resample": 2, "max_num_patches": 256}
SMOLVLM = {
    "image_processor_type": "SmolVLMImageProcessor",
    "do_image_splitting": True,
    "size": {"longest_edge": 256},
    "max_image_size": {"longest_edge": 64},
    "resample": 1,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def theirs(config):
    name = config.get("image_processor_type") or config["feature_extractor_type"]
    stem = name.removesuffix("Fast").removesuffix("ImageProcessor").removesuffix("FeatureExtractor")
    folder = {"Qwen2VL": "qwen2_vl", "SmolVLM": "smolvlm", "VideoMAE": "videomae"}.get(stem, stem.lower())
    module = importlib.import_module(f"transformers.models.{folder}.image_processing_pil_{folder}")
    return getattr(module, f"{stem}ImageProcessorPil").from_dict(config)


def picture(height, width, channels=3, seed=0):
    """Smooth and sharp parts, so that every filter has something to do."""
    rng = np.random.default_rng([seed, height, width])
    y, x = np.mgrid[:height, :width]
    waves = 128 + 100 * np.sin(y[..., None] / 7 + x[..., None] * np.arange(1, channels + 1) / 11)
    noise = rng.integers(-60, 60, (height, width, channels)) * (rng.random((height, width, 1)) < 0.3)
    return np.clip(waves + noise, 0, 255).astype(np.uint8)


PICTURES = [picture(*size) for size in SIZES]
# Pillow's images, as arrays of 1 or 3 rows could have the channel first.
PILLOWS = [Image.fromarray(image) for image in PICTURES]


@pytest.mark.parametrize("config", [QWEN2_5, QWEN3, {"image_processor_type": "Qwen2VLImageProcessor"}])
def test_qwen_equals_transformers(config):
    expected = theirs(config)(images=PILLOWS, return_tensors="np")
    patches, grids = preprocess.qwen_patches(PICTURES, preprocess.image_spec(config))
    assert patches.dtype == np.float32 and grids.dtype == np.int32
    np.testing.assert_array_equal(patches, expected["pixel_values"])
    np.testing.assert_array_equal(grids, expected["image_grid_thw"])


def test_game_boy_frames_have_the_known_number_of_tokens():
    frame = picture(144, 160)
    for config, tokens in ((QWEN2_5, 30), (QWEN3, 72)):
        _, grids = preprocess.qwen_patches([frame], preprocess.image_spec(config))
        assert grids.prod() // 4 == tokens


@pytest.mark.parametrize(
    "config",
    [
        CLIP_OLD,
        {"image_processor_type": "CLIPImageProcessor"},
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 21}, "crop_size": 30},
        {"image_processor_type": "CLIPImageProcessor", "do_resize": False, "crop_size": [101, 64]},
        {"image_processor_type": "CLIPImageProcessor", "do_rescale": False, "size": 32, "crop_size": 32},
        {"image_processor_type": "CLIPImageProcessor", "do_normalize": False, "size": 32, "crop_size": 32},
        {"image_processor_type": "SiglipImageProcessor"},
        {"image_processor_type": "SiglipImageProcessor", "size": {"height": 64, "width": 48}, "resample": 2},
    ],
)
def test_resize_and_crop_equals_transformers(config):
    expected = theirs(config)(images=PILLOWS, return_tensors="np")["pixel_values"]
    found = preprocess.resize_and_crop(PICTURES, preprocess.image_spec(config))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected.transpose(0, 2, 3, 1))


def test_videos_of_xclip_equal_transformers():
    videos = [[picture(*size, seed=frame) for frame in range(3)] for size in SIZES[:5]]
    expected = theirs(XCLIP)(videos, return_tensors="np")["pixel_values"]
    frames = [frame for video in videos for frame in video]
    found = preprocess.resize_and_crop(frames, preprocess.image_spec(XCLIP))
    np.testing.assert_array_equal(found.reshape(5, 3, 224, 224, 3), expected.transpose(0, 1, 3, 4, 2))


@pytest.mark.parametrize("config", [SIGLIP2, SIGLIP2 | {"max_num_patches": 40, "patch_size": 14}])
def test_naflex_equals_transformers(config):
    expected = theirs(config)(images=PILLOWS, return_tensors="np")
    patches, where, shapes = preprocess.naflex_patches(PICTURES, preprocess.image_spec(config))
    assert patches.dtype == np.float32 and where.dtype == bool and shapes.dtype == np.int32
    np.testing.assert_array_equal(patches, expected["pixel_values"])
    np.testing.assert_array_equal(where, expected["pixel_attention_mask"])
    np.testing.assert_array_equal(shapes, expected["spatial_shapes"])


@pytest.mark.parametrize(
    "config",
    [
        SMOLVLM,
        SMOLVLM | {"image_processor_type": "Idefics3ImageProcessor"},
        SMOLVLM | {"do_image_splitting": False},
        SMOLVLM | {"size": {"longest_edge": 64}},
        SMOLVLM | {"size": {"longest_edge": 100}, "max_image_size": {"longest_edge": 27}},
    ],
)
def test_tiles_equal_transformers(config):
    processor, spec = theirs(config), preprocess.image_spec(config)
    tiles, rows, columns = preprocess.smolvlm_tiles(PICTURES, spec)
    start = 0
    for i in range(len(PICTURES)):
        expected = processor(images=[[PILLOWS[i]]], return_tensors="np", return_row_col_info=True)
        assert expected["pixel_attention_mask"].all()
        assert ([[rows[i]]], [[columns[i]]]) == (expected["rows"], expected["cols"])
        own = tiles[start : start + rows[i] * columns[i] + 1]
        np.testing.assert_array_equal(own, expected["pixel_values"][0].transpose(0, 2, 3, 1))
        start += len(own)
    assert start == len(tiles)


@pytest.mark.parametrize("config", [QWEN2_5, SIGLIP2 | {"do_convert_rgb": True}])
@pytest.mark.parametrize("channels", [1, 4])
def test_grey_and_transparent_images_equal_transformers(config, channels):
    image = picture(60, 80, channels)
    functions = {"Qwen": preprocess.qwen_patches, "Sigl": preprocess.naflex_patches}
    found = functions[config["image_processor_type"][:4]]([image], preprocess.image_spec(config))[0]
    expected = theirs(config)(images=[image], return_tensors="np", input_data_format="channels_last")
    np.testing.assert_array_equal(found, expected["pixel_values"])


def test_a_grey_image_may_lack_the_channel_axis():
    spec = preprocess.image_spec(CLIP_OLD)
    grey = picture(60, 80, 1)
    np.testing.assert_array_equal(
        preprocess.resize_and_crop([grey[..., 0]], spec), preprocess.resize_and_crop([grey], spec)
    )


def test_read_only_and_strided_images_are_taken():
    image = picture(60, 80)
    strided = np.zeros((60, 160, 3), np.uint8)[:, ::2]
    strided[...] = image
    image.setflags(write=False)
    spec = preprocess.image_spec(QWEN2_5)
    np.testing.assert_array_equal(
        preprocess.qwen_patches([image], spec)[0], preprocess.qwen_patches([strided], spec)[0]
    )


edges = st.integers(1, 5000)


@settings(max_examples=300, deadline=None)
@given(edges, edges, st.sampled_from([14, 16]), st.integers(1, 10**5), st.integers(0, 10**6))
def test_qwen_sizes(height, width, patch, least, more):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    spec = preprocess.QwenImageSpec(patch_size=patch, min_pixels=least, max_pixels=least + more)
    try:
        expected = smart_resize(height, width, 2 * patch, least, least + more)
    except ValueError:
        with pytest.raises(DataError, match="200 times"):
            preprocess.qwen_size(height, width, spec)
        return
    except ZeroDivisionError:
        return
    assert preprocess.qwen_size(height, width, spec) == expected


@settings(max_examples=100, deadline=None)
@given(edges, edges, st.sampled_from([14, 16]), st.sampled_from([1, 49, 256, 1024]))
def test_naflex_sizes(height, width, patch, most):
    from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

    spec = preprocess.NaflexImageSpec(patch_size=patch, max_patches=most)
    found = preprocess.naflex_size(height, width, spec)
    assert found == get_image_size_for_max_num_patches(height, width, patch, most)


@settings(max_examples=300, deadline=None)
@given(edges, edges, st.sampled_from([100, 1456, 2048, 5000]), st.sampled_from([364, 512]), st.booleans())
def test_tile_sizes(height, width, longest, tile, split):
    from transformers.models.smolvlm import image_processing_pil_smolvlm as smolvlm

    class Shape:  # what their functions read of an image, and what their resize returns
        def __init__(self, height, width):
            self.shape = (3, height, width)

    class Processor(smolvlm.SmolVLMImageProcessorPil):
        def resize(self, image, size, resample=None):
            return (size.height, size.width)

    first = smolvlm.get_resize_output_image_size(Shape(height, width), resolution_max_side=longest)
    second = Processor().resize_for_vision_encoder(Shape(*first), tile) if split else (tile, tile)
    spec = preprocess.TileImageSpec(longest_edge=longest, tile=tile, split=split)
    assert preprocess.tile_size(height, width, spec) == (first, second)


@settings(max_examples=200, deadline=None)
@given(edges, edges, st.integers(1, 400))
def test_shortest_edge_sizes(height, width, edge):
    from transformers.image_transforms import get_resize_output_image_size

    spec = preprocess.CropImageSpec(preprocess.PixelSpec(), edge)
    image = np.broadcast_to(np.uint8(0), (3, height, width))
    expected = get_resize_output_image_size(image, edge, False, input_data_format="channels_first")
    assert preprocess.crop_sizes(height, width, spec)[0] == expected


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "no images"),
        ([np.zeros((4, 4, 3), np.float32)], "dtype float32; uint8 was expected"),
        ([picture(4, 4), np.zeros((3, 4, 5), np.uint8)], r"image 1 has shape \(3, 4, 5\)"),
        ([np.zeros((2, 4, 4, 3), np.uint8)], r"image 0 has shape \(2, 4, 4, 3\)"),
        ([np.zeros((0, 4, 3), np.uint8)], r"image 0 has shape \(0, 4, 3\)"),
        ([Image.new("RGB", (4, 4))], "image 0 is a Image; a uint8 array"),
        (["frame.png"], "image 0 is a str"),
    ],
)
def test_bad_images_are_named(bad, message):
    calls = (
        (preprocess.qwen_patches, QWEN3),
        (preprocess.resize_and_crop, CLIP_OLD),
        (preprocess.naflex_patches, SIGLIP2),
        (preprocess.smolvlm_tiles, SMOLVLM),
    )
    for function, config in calls:
        with pytest.raises(DataError, match=message):
            function(bad, preprocess.image_spec(config))


def test_extreme_shapes_are_refused_with_advice():
    line = np.zeros((1, 10_000, 3), np.uint8)
    with pytest.raises(DataError, match="at most 200 times"):
        preprocess.qwen_patches([line], preprocess.image_spec(QWEN3))
    with pytest.raises(DataError, match="resized to 224 x 2240000"):
        preprocess.resize_and_crop([line], preprocess.image_spec(CLIP_OLD))
    large = np.broadcast_to(np.uint8(0), (10_000, 10_000, 3))
    with pytest.raises(DataError, match="lower max_pixels"):
        preprocess.qwen_patches([large], preprocess.image_spec(QWEN3 | {"size": {"longest_edge": 10**9}}))
    sizes = np.zeros((8, 8, 3), np.uint8), np.zeros((8, 9, 3), np.uint8)
    spec = preprocess.image_spec(CLIP_OLD | {"do_resize": False, "do_center_crop": False})
    with pytest.raises(DataError, match=r"images 0 and 1 end up in sizes \(8, 8\) and \(8, 9\)"):
        preprocess.resize_and_crop(sizes, spec)


def test_an_image_of_a_hundred_megapixels_is_reduced():
    large = np.zeros((10_000, 10_000, 3), np.uint8)
    large[::2] = 255
    config = QWEN3 | {"size": {"shortest_edge": 4096, "longest_edge": 65536}}
    patches, grids = preprocess.qwen_patches([large], preprocess.image_spec(config))
    np.testing.assert_array_equal(grids, [[1, 16, 16]])
    assert abs(patches.mean()) < 0.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_processor_type": "ViTImageProcessor"}, "'ViTImageProcessor'"),
        ({"do_resize": False}, "do_resize is False; true"),
        ({"resample": 9}, "resample is 9"),
        ({"image_mean": [0.5, 0.5]}, r"image_mean is \[0.5, 0.5\]; a finite number for each"),
        ({"image_std": [0.5, 0.5, 0]}, "image_std is .*; numbers that are not 0"),
        ({"image_mean": "black"}, "image_mean is 'black'"),
        ({"min_pixels": 0}, "min_pixels is 0; an integer of at least 1"),
        ({"min_pixels": 10, "max_pixels": 5}, "must not be larger"),
        ({"min_pixels": None, "size": 224}, "size is 224; a JSON object"),
        ({"patch_size": 14.0}, "patch_size is 14.0; an integer"),
    ],
)
def test_bad_fields_are_named(change, message):
    with pytest.raises(ModelError, match=f"preprocessor_config.json: .*{message}"):
        preprocess.image_spec(QWEN2_5 | change)


@pytest.mark.parametrize("size", [0, {"longest_edge": 3}, [1, 2, 3], "large", {"shortest_edge": True}])
@pytest.mark.parametrize("name", ["size", "crop_size"])
def test_bad_sizes_are_named(name, size):
    with pytest.raises(ModelError, match=f"preprocessor_config.json: field {name}"):
        preprocess.image_spec(CLIP_OLD | {name: size})


def test_specs_are_read_from_folders(tmp_path):
    with pytest.raises(ModelError, match=r"preprocessor_config.json does not exist"):
        preprocess.load_image_spec(tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": QWEN3}))
    assert preprocess.load_image_spec(tmp_path) == preprocess.image_spec(QWEN3)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(QWEN2_5))
    assert preprocess.load_image_spec(tmp_path) == preprocess.image_spec(QWEN2_5)
    # Old folders do not name the class.
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": 96}))
    with pytest.raises(ModelError, match="the image processor is None"):
        preprocess.load_image_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xclip"}))
    spec = preprocess.load_image_spec(tmp_path)
    assert spec.size == 96 and spec.pixels.resample == Image.Resampling.BILINEAR
    for text in ("{", "[]", "\xff"):
        (tmp_path / "preprocessor_config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ModelError, match=r"preprocessor_config.json (cannot be read as|holds a list)"):
            preprocess.load_image_spec(tmp_path)

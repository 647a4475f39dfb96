"""The layout of images in rows, and configs, against loops and numbers worked out by hand."""

import dataclasses
import itertools
import json
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import map_coordinates

from jaxreward.errors import ModelError
from jaxreward.models.qwen_config import QwenVLConfig
from jaxreward.models.qwen_inputs import image_token_count, rope_positions, rounded_up, vision_inputs

GOLDEN = pathlib.Path(__file__).parent / "golden"
CONFIGS = {
    name: json.loads((GOLDEN / name / "config.json").read_text()) for name in ("qwen2_5_vl", "qwen3_vl")
}
QWEN_2_5, QWEN_3 = (QwenVLConfig.from_dict(config) for config in CONFIGS.values())
IMAGE, VIDEO = QWEN_2_5.image_token, QWEN_2_5.video_token
WINDOW = QWEN_2_5.vision.window

grids_of_images = st.lists(
    st.tuples(
        st.integers(1, 3), st.integers(1, 7).map(lambda n: 2 * n), st.integers(1, 7).map(lambda n: 2 * n)
    ),
    min_size=1,
    max_size=4,
)


def patches_of(grids, config=QWEN_2_5):
    """Patches that hold their own number."""
    count = sum(t * h * w for t, h, w in grids)
    return np.broadcast_to(np.arange(count, dtype=np.float32)[:, None], (count, config.vision.patch_values))


def loop(grids):
    """(frame, row, column, height, width) of each patch, in the order in which image processors give them."""
    frame = 0
    for t, h, w in grids:
        for _ in range(t):
            for y, x, dy, dx in itertools.product(range(h // 2), range(w // 2), range(2), range(2)):
                yield frame, 2 * y + dy, 2 * x + dx, h, w
            frame += 1


@settings(deadline=None, max_examples=40)
@given(grids_of_images, st.one_of(st.none(), st.integers(0, 200)))
def test_the_layout_of_any_images(grids, room):
    patches, expected = patches_of(grids), np.asarray(list(loop(grids)))
    bucket = None if room is None else len(patches) + 4 * room
    images = vision_inputs(QWEN_2_5, patches, grids, bucket)
    filled = images.segments >= 0
    number = images.patches[filled][:, 0].astype(int)
    assert sorted(number) == list(range(len(patches)))
    np.testing.assert_array_equal(images.segments[filled], expected[number, 0])
    np.testing.assert_array_equal(images.positions[filled], expected[number, 1:3])
    for frame in range(expected[-1, 0] + 1):
        assert (images.segments == frame).any(1).sum() == 1, "a frame lies in one row"
    assert images.segments.shape[1] == rounded_up(int(expected[:, 3:].prod(1).max()))

    assert len(images.order) == (bucket or len(patches)) // 4
    tokens = images.patches.reshape(-1, 4, patches.shape[1])[images.order, :, 0]
    np.testing.assert_array_equal(tokens[: len(patches) // 4].ravel(), np.arange(len(patches)))

    members = {}
    for patch, (frame, y, x, _, _) in enumerate(expected):
        members.setdefault((frame, y // WINDOW, x // WINDOW), set()).add(patch)
    found = []
    for row, windows in enumerate(images.windows):
        for window in windows:
            if (window >= 0).any():
                found.append(set(images.patches[row, window[window >= 0], 0].astype(int)))
        slots = np.arange(images.segments.shape[1])[filled[row]]
        np.testing.assert_array_equal(windows.ravel()[images.in_window[row, slots]], slots)
    assert sorted(map(sorted, found)) == sorted(map(sorted, members.values()))


@settings(deadline=None, max_examples=20)
@given(grids_of_images)
def test_learned_positions_are_resampled_as_scipy_does(grids):
    side = QWEN_3.vision.table
    table = np.random.default_rng(0).normal(size=(side, side))
    images = vision_inputs(QWEN_3, patches_of(grids), grids)
    filled = images.segments >= 0
    number = images.patches[filled][:, 0].astype(int)
    found = (table.ravel()[images.table_rows] * images.table_weights).sum(-1)[filled]
    _, y, x, h, w = np.asarray(list(loop(grids)))[number].T
    at = [y * (side - 1) / np.maximum(h - 1, 1), x * (side - 1) / np.maximum(w - 1, 1)]
    np.testing.assert_allclose(found, map_coordinates(table, at, order=1), atol=1e-5)


def test_shapes_depend_on_the_bucket_and_the_size_alone():
    size = (1, 10, 12)
    for config in (QWEN_2_5, QWEN_3):
        shapes = {
            tuple(
                x.shape
                for x in vars(vision_inputs(config, patches_of([size] * n), [size] * n, 960)).values()
                if x is not None
            )
            for n in range(1, 9)
        }
        assert len(shapes) == 1


def test_rows_hold_what_fits_and_waste_little():
    small = vision_inputs(
        QWEN_2_5, patches_of([(1, 24, 46), *[(1, 10, 12)] * 9]), [(1, 24, 46), *[(1, 10, 12)] * 9]
    )
    assert small.segments.shape == (2, 1152), "nine small frames share a row"
    clip = vision_inputs(QWEN_2_5, patches_of([(1, 24, 46)] * 15), [(1, 24, 46)] * 15)
    assert clip.segments.shape == (15, 1152)
    sizes = np.arange(1, 5000)
    rows = np.asarray([rounded_up(int(n)) for n in sizes])
    assert (rows >= sizes).all() and (rows[255:] < 1.07 * sizes[255:]).all() and (rows % 16 == 0).all()
    assert len(set(rows)) < 100


@pytest.mark.parametrize(
    ("patches", "grids", "bucket", "message"),
    [
        (np.zeros((24, 96)), [[1, 4, 4]], None, r"patches of shape \(24, 96\) found"),
        (np.zeros((16, 90)), [[1, 4, 4]], None, r"give \(16, 96\)"),
        (np.zeros((12, 96)), [[1, 3, 4]], None, "multiples of 2"),
        (np.zeros((0, 96)), [], None, "at least one"),
        (np.zeros((0, 96)), [[0, 4, 4]], None, "each >= 1"),
        (np.zeros((16, 96)), [[1, 4, 4]], 12, "a bucket of 12 patches found for images of 16"),
        (np.zeros((16, 96)), [[1, 4, 4]], 18, "a multiple of 4"),
    ],
)
def test_images_that_do_not_fit_are_refused(patches, grids, bucket, message):
    with pytest.raises(ModelError, match=message):
        vision_inputs(QWEN_2_5, patches, np.asarray(grids), bucket)


def test_token_counts():
    assert image_token_count([1, 24, 46], QWEN_2_5) == 276
    np.testing.assert_array_equal(image_token_count([[1, 10, 12], [2, 4, 6]], QWEN_3), [30, 12])


def test_positions_by_hand():
    """Two text tokens, an image of 2 x 3 tokens, one text token."""
    tokens = [5, 6, *[IMAGE] * 6, 7]
    positions, following = rope_positions(tokens, [[1, 4, 6]], QWEN_2_5)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
    assert following == 6


def test_time_in_videos_by_hand():
    """Slices of 1 x 1 token: Qwen2.5-VL counts 2 steps a second, Qwen3-VL counts no time."""
    tokens = [5, VIDEO, VIDEO, VIDEO]
    positions, following = rope_positions(tokens, [[3, 2, 2]], QWEN_2_5, seconds_per_grid=0.75)
    assert positions.tolist() == [[0, 1, 2, 4], [0, 1, 1, 1], [0, 1, 1, 1]]
    assert following == 5
    positions, following = rope_positions([5, VIDEO, 6, VIDEO], [[2, 2, 2]], QWEN_3)
    assert positions.tolist() == [[0, 1, 2, 3]] * 3
    assert following == 4


def test_positions_of_text_alone_and_of_nothing():
    positions, following = rope_positions([5, 6, 7], np.zeros((0, 3), int), QWEN_3)
    assert positions.tolist() == [[0, 1, 2]] * 3 and following == 3
    positions, following = rope_positions([], [], QWEN_2_5)
    assert positions.shape == (3, 0) and following == 0


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 4)), max_size=4),
    st.integers(0, 3),
)
def test_positions_of_any_images_against_a_loop(parts, tail):
    tokens, expected, current = [], [], 0
    for text, height, width in parts:
        for _ in range(text):
            expected.append([current] * 3)
            current += 1
        for y, x in itertools.product(range(height), range(width)):
            expected.append([current, current + y, current + x])
        tokens += [5] * text + [IMAGE] * (height * width)
        current += max(height, width)
    expected += [[current + i] * 3 for i in range(tail)]
    grids = [(1, 2 * height, 2 * width) for _, height, width in parts]
    positions, following = rope_positions([*tokens, *[5] * tail], grids, QWEN_2_5)
    np.testing.assert_array_equal(positions.T, np.reshape(expected, (-1, 3)))
    assert following == current + tail


@pytest.mark.parametrize(
    ("tokens", "grids", "message"),
    [
        ([5, IMAGE], [], "1 image tokens found in a prompt whose 0 images take 0"),
        ([5, 6], [[1, 2, 2]], "0 image tokens found"),
        ([IMAGE, 5, IMAGE], [[1, 2, 4]], "the tokens of image 0 are interrupted at token 1; expected 2"),
        ([IMAGE, IMAGE, VIDEO], [[1, 2, 2], [1, 2, 4]], "of image 1 are interrupted"),
    ],
)
def test_prompts_whose_images_do_not_fit_are_refused(tokens, grids, message):
    with pytest.raises(ModelError, match=message):
        rope_positions(tokens, grids, QWEN_2_5)


def test_configs_are_read():
    assert QWEN_2_5.vision.window == 4 and QWEN_2_5.vision.full_layers == (1, 3)
    assert QWEN_2_5.decoder.qkv_bias and not QWEN_2_5.decoder.query_norm
    assert QWEN_2_5.decoder.rope_sections == (2, 3, 3) and not QWEN_2_5.decoder.rope_interleaved
    assert QWEN_3.vision.table == 6 and QWEN_3.vision.deepstack_layers == (0, 2)
    assert QWEN_3.decoder.head_width == 24 and QWEN_3.decoder.tied
    assert QWEN_3.decoder.rope_interleaved and QWEN_3.decoder.query_norm and not QWEN_3.decoder.qkv_bias
    # 112 pixels are 8 patches of 14
    vision = CONFIGS["qwen2_5_vl"]["vision_config"] | {"patch_size": 14, "window_size": 112}
    assert QwenVLConfig.from_dict(CONFIGS["qwen2_5_vl"] | {"vision_config": vision}).vision.window == 8


MISSING = object()


@pytest.mark.parametrize(
    ("family", "path", "value", "message"),
    [
        ("qwen3_vl", "model_type", "qwen3_vl_moe", "model_type is 'qwen3_vl_moe'; one of"),
        ("qwen3_vl", "text_config", MISSING, "text_config is missing"),
        ("qwen3_vl", "vision_config", [], r"vision_config is \[\]; a JSON object"),
        ("qwen3_vl", "vision_config.depth", MISSING, "vision_config.depth is missing; an integer"),
        (
            "qwen3_vl",
            "vision_config.num_position_embeddings",
            35,
            "num_position_embeddings is 35; the square",
        ),
        ("qwen3_vl", "vision_config.deepstack_visual_indexes", [0, 4], "below 4"),
        (
            "qwen3_vl",
            "vision_config.deepstack_visual_indexes",
            "0",
            "deepstack_visual_indexes is '0'; a list",
        ),
        ("qwen3_vl", "vision_config.hidden_act", "swish", "vision_config.hidden_act is 'swish'"),
        ("qwen3_vl", "vision_config.num_heads", 3, "multiple of 4"),
        ("qwen3_vl", "vision_config.out_hidden_size", 64, "they must be equal"),
        ("qwen3_vl", "text_config.attention_bias", True, "attention_bias is True; false"),
        ("qwen3_vl", "text_config.rope_parameters.rope_type", "yarn", "rope_parameters.rope_type is 'yarn'"),
        ("qwen3_vl", "text_config.rope_parameters.mrope_section", [6, 6], r"\[6, 6\]; three numbers"),
        ("qwen3_vl", "text_config.rope_parameters.mrope_section", [6, 6, 6], "half a head"),
        ("qwen2_5_vl", "text_config.use_sliding_window", True, "use_sliding_window is True; false"),
        ("qwen2_5_vl", "text_config.num_attention_heads", 3, "a divisor of hidden_size 32"),
        ("qwen2_5_vl", "vision_config.window_size", 7, "window_size is 7; at least one token, 8 pixels"),
        ("qwen2_5_vl", "vision_config.fullatt_block_indexes", [3, 1], "ascending"),
    ],
)
def test_configs_that_are_not_supported_are_refused(family, path, value, message):
    config = json.loads(json.dumps(CONFIGS[family]))
    *sections, name = path.split(".")
    section = config
    for part in sections:
        section = section[part]
    if value is MISSING:
        del section[name]
    else:
        section[name] = value
    with pytest.raises(ModelError, match=message):
        QwenVLConfig.from_dict(config)


def test_more_deepstack_layers_than_decoder_layers_are_refused():
    decoder = dataclasses.replace(QWEN_3.decoder, layers=1)
    with pytest.raises(ModelError, match="2 DeepStack layers and 1 decoder layers found"):
        dataclasses.replace(QWEN_3, decoder=decoder)

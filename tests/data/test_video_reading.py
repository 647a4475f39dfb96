"""Reading: outside truth is the pixels that went in, and files broken by hand."""

import io
import os
import shutil

import av
import numpy as np
import pytest
from PIL import Image

from jaxreward.data.video import (
    Crop,
    VideoOptions,
    block_mean,
    encode_video,
    read_folder,
    read_video,
    write_video,
)
from jaxreward.errors import ConfigError, DataError


def noise(frames=12, height=48, width=64, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (frames, height, width, channels)).astype(np.uint8)


def mux(frames, container, codec, pixels, **options):
    """Writes frames with any codec, without the module under test."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=10, options=options)
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], pixels
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode())
    return buffer.getvalue()


def test_lossless_round_trip(tmp_path):
    frames = noise()
    video = read_video(write_video(tmp_path / "a" / "v.mp4", frames, fps=7.5))
    np.testing.assert_array_equal(video.frames, frames)
    assert (video.fps, video.dropped_static, video.damage) == (7.5, 0, None)


def test_grey_round_trip_and_odd_size(tmp_path):
    frames = noise(height=33, width=47, channels=1)
    video = read_video(write_video(tmp_path / "v.mp4", frames, 10), VideoOptions(grey=True))
    np.testing.assert_array_equal(video.frames, frames)


def test_encoding_is_deterministic():
    assert encode_video(noise(), 10) == encode_video(noise(), 10)


def test_viewable_video_is_close_and_plain_yuv420p(tmp_path):
    smooth = np.broadcast_to(np.linspace(20, 230, 47)[None, :, None], (33, 47, 3))
    frames = np.stack([smooth + t for t in range(8)]).astype(np.uint8)
    path = write_video(tmp_path / "v.mp4", frames, 10, lossless=False)
    with av.open(str(path)) as container:
        assert container.streams.video[0].codec_context.pix_fmt == "yuv420p"
    decoded = read_video(path).frames
    assert decoded.shape == (8, 34, 48, 3)
    assert np.abs(decoded[:, :33, :47].astype(int) - frames).mean() < 4


@pytest.mark.parametrize(
    ("suffix", "container", "codec", "pixels"),
    [("mkv", "matroska", "ffv1", "bgr0"), ("avi", "avi", "ffv1", "bgr0"), ("mov", "mov", "png", "rgb24")],
)
def test_other_lossless_containers(tmp_path, suffix, container, codec, pixels):
    frames = noise()
    (tmp_path / f"v.{suffix}").write_bytes(mux(frames, container, codec, pixels))
    np.testing.assert_array_equal(read_folder(tmp_path).videos[0].frames, frames)


def test_webm_and_gif(tmp_path):
    frames = (
        np.repeat(np.arange(10, dtype=np.uint8)[:, None, None, None] * 20, 48, 1).repeat(64, 2).repeat(3, 3)
    )
    (tmp_path / "v.webm").write_bytes(mux(frames, "webm", "libvpx-vp9", "yuv420p"))
    # A GIF of a palette of grey is exact; Pillow wrote it.
    pictures = [Image.fromarray(frame[..., 0]) for frame in frames]
    pictures[0].save(tmp_path / "v.gif", save_all=True, append_images=pictures[1:], duration=100)
    gif, webm = read_folder(tmp_path).videos
    np.testing.assert_array_equal(gif.frames, frames)
    assert gif.fps == 10
    assert webm.frames.shape == frames.shape
    assert np.abs(webm.frames.astype(int) - frames).max() < 8


def faststart(content, path):
    """Writes an MP4 with its index moved to the front, by FFmpeg."""
    with (
        av.open(io.BytesIO(content)) as source,
        av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as target,
    ):
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    return path.read_bytes()


NAMES = ["trailing.mp4", "leading.mp4", "a.mkv", "a.webm", "a.gif", "a.avi", "a.mov"]


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    frames = noise(40)
    trailing = mux(frames, "mp4", "libx264", "yuv420p")
    leading = faststart(trailing, tmp_path_factory.mktemp("faststart") / "leading.mp4")
    assert leading.index(b"moov") < leading.index(b"mdat")
    assert trailing.index(b"moov") > trailing.index(b"mdat")
    return {
        "trailing.mp4": trailing,
        "leading.mp4": leading,
        "a.mkv": mux(frames, "matroska", "libx264", "yuv420p"),
        "a.webm": mux(frames, "webm", "libvpx-vp9", "yuv420p"),
        "a.gif": mux(frames, "gif", "gif", "rgb8"),
        "a.avi": mux(frames, "avi", "mpeg4", "yuv420p"),
        "a.mov": mux(frames, "mov", "png", "rgb24"),
    }


@pytest.mark.parametrize("name", NAMES)
def test_whole_files_read_whole(tmp_path, name, contents):
    (tmp_path / name).write_bytes(contents[name])
    assert len(read_video(tmp_path / name).frames) == 40


@pytest.mark.parametrize("share", [0.35, 0.6, 0.9])
@pytest.mark.parametrize("name", NAMES)
def test_truncated_files_are_never_silently_short(tmp_path, name, share, contents):
    path = tmp_path / name
    path.write_bytes(contents[name][: int(len(contents[name]) * share)])
    with pytest.raises(DataError, match=name):
        read_video(path)


def test_damaged_files_can_be_kept(tmp_path, contents):
    path = tmp_path / "leading.mp4"
    path.write_bytes(contents["leading.mp4"][: int(len(contents["leading.mp4"]) * 0.6)])
    video = read_video(path, VideoOptions(allow_damaged=True))
    assert 15 <= len(video.frames) < 39
    assert "truncated" in video.damage


def test_garbage_inside_is_an_error(tmp_path, contents):
    content = bytearray(contents["leading.mp4"])
    content[len(content) // 2 : len(content) // 2 + 4000] = bytes(4000)
    (tmp_path / "a.mp4").write_bytes(content)
    with pytest.raises(DataError, match="error"):
        read_video(tmp_path / "a.mp4")


def test_edit_lists_are_not_truncation(tmp_path):
    """A cut without re-encoding hides the frames before the cut; the sample count still has them."""
    buffer, shift = io.BytesIO(), 15
    with (
        av.open(io.BytesIO(encode_video(noise(40), 10))) as source,
        av.open(buffer, "w", format="mp4", options={"avoid_negative_ts": "disabled"}) as target,
    ):
        origin = source.streams.video[0]
        stream = target.add_stream_from_template(origin)
        for packet in source.demux(origin):
            if packet.dts is not None:
                offset = shift * origin.time_base.denominator // 10
                packet.pts, packet.dts, packet.stream = packet.pts - offset, packet.dts - offset, stream
                target.mux(packet)
    (tmp_path / "cut.mp4").write_bytes(buffer.getvalue())
    np.testing.assert_array_equal(read_video(tmp_path / "cut.mp4").frames, noise(40)[shift:])


def fill_with_bad_files(folder):
    (folder / "empty.mp4").touch()
    (folder / "text.mp4").write_text("#EXTM3U\nhttp://127.0.0.1/video.ts\n" * 20)
    (folder / "binary.mkv").write_bytes(np.random.default_rng(0).bytes(5000))
    Image.fromarray(noise(1)[0]).save(folder / "picture.png")
    (folder / "picture.png").rename(folder / "picture.mp4")
    write_video(folder / "short.mp4", noise(3), 10)
    write_video(folder / "static.mp4", np.repeat(noise(1), 9, 0), 10)
    os.symlink(folder / "nowhere.mp4", folder / "dangling.mp4")


BAD = ["binary.mkv", "dangling.mp4", "empty.mp4", "picture.mp4", "short.mp4", "static.mp4", "text.mp4"]


def test_bad_files_are_skipped_by_name(tmp_path):
    fill_with_bad_files(tmp_path)
    write_video(tmp_path / "good.mp4", noise(5), 10)
    (tmp_path / "notes.txt").write_text("not a video, nor named as one")
    (tmp_path / ".hidden.mp4").write_text("being written")
    seen = []
    videos = read_folder(tmp_path, options=VideoOptions(min_frames=5), progress=lambda *n: seen.append(n))
    assert [video.path.name for video in videos.videos] == ["good.mp4"]
    assert [bad.path.name for bad in videos.bad] == BAD
    assert [path.name for path in videos.ignored] == ["notes.txt"]
    reasons = {bad.path.name: bad.reason for bad in videos.bad}
    assert "empty" in reasons["empty.mp4"]
    assert "no such file" in reasons["dangling.mp4"]
    assert "3 frames" in reasons["short.mp4"]
    assert "8 repeated" in reasons["static.mp4"]
    assert seen[-1] == (8, 8)


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_by_name(tmp_path, name):
    (tmp_path / "all").mkdir()
    (tmp_path / "one").mkdir()
    fill_with_bad_files(tmp_path / "all")
    shutil.move(tmp_path / "all" / name, tmp_path / "one" / name)
    write_video(tmp_path / "one" / "good.mp4", noise(5), 10)
    with pytest.raises(DataError, match=name):
        read_folder(tmp_path / "one", options=VideoOptions(min_frames=5, on_bad="refuse"))


def test_folders_that_cannot_be_used(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        read_folder(tmp_path / "missing")
    with pytest.raises(DataError, match="no video was found"):
        read_folder(tmp_path)
    (tmp_path / "bad").mkdir()
    fill_with_bad_files(tmp_path / "bad")
    with pytest.raises(DataError, match=r"none of its 7 videos.*and 2 more"):
        read_folder(tmp_path / "bad", options=VideoOptions(min_frames=5))
    with pytest.raises(DataError, match="it is a file"):
        read_folder(tmp_path / "bad" / "short.mp4")


def test_file_without_video_stream(tmp_path):
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), format="fltp", layout="mono")
        frame.rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    (tmp_path / "sound.mp4").write_bytes(buffer.getvalue())
    with pytest.raises(DataError, match="no video stream"):
        read_video(tmp_path / "sound.mp4")


def test_a_title_in_another_encoding_than_utf_8(tmp_path):
    frames = noise()
    path = tmp_path / "film.mkv"
    with av.open(str(path), "w", format="matroska") as container:
        container.metadata["title"] = "Cafe Mueller"
        stream = container.add_stream("ffv1", rate=10)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "bgr0"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    path.write_bytes(path.read_bytes().replace(b"Cafe Mueller", b"Caf\xe9 M\xfcller "))
    assert len(read_video(path).frames) == len(frames)


def test_duplicates_are_dropped_and_counted(tmp_path):
    scenes = noise(4)
    order = [0, 0, 0, 1, 2, 2, 1, 3, 3]
    path = write_video(tmp_path / "v.mp4", scenes[order], 10)
    video = read_video(path)
    np.testing.assert_array_equal(video.frames, scenes[[0, 1, 2, 1, 3]])
    assert video.dropped_static == 4
    kept = read_video(path, VideoOptions(drop_duplicates=False))
    np.testing.assert_array_equal(kept.frames, scenes[order])


def test_duplicate_tolerance(tmp_path):
    frames = np.full((5, 8, 8, 3), 100, np.uint8)
    frames[:, 0, 0, 0] = [100, 104, 105, 110, 115]
    path = write_video(tmp_path / "v.mp4", frames, 10)
    video = read_video(path, VideoOptions(duplicate_tolerance=5))
    # Each is compared with the last KEPT frame, so a slow drift is not lost.
    assert video.frames[:, 0, 0, 0].tolist() == [100, 110]
    assert video.dropped_static == 3


def test_stride_and_max_frames(tmp_path):
    frames = noise(11)
    path = write_video(tmp_path / "v.mp4", frames, 10)
    video = read_video(path, VideoOptions(stride=3))
    np.testing.assert_array_equal(video.frames, frames[::3])
    np.testing.assert_array_equal(
        read_video(path, VideoOptions(stride=3, max_frames=2)).frames, frames[[0, 3]]
    )


def test_crop(tmp_path):
    frames = noise(2, 360, 640)
    path = write_video(tmp_path / "v.mp4", frames, 10)
    video = read_video(path, VideoOptions(crop=Crop(bottom=30)))
    assert video.frames.shape == (2, 330, 640, 3)
    np.testing.assert_array_equal(video.frames, frames[:, :330])
    video = read_video(path, VideoOptions(crop=Crop(1, 2, 3, 4)))
    np.testing.assert_array_equal(video.frames, frames[:, 1:358, 3:636])
    with pytest.raises(DataError, match="640x360 are too small"):
        read_video(path, VideoOptions(crop=Crop(top=200, bottom=160)))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "shape", [((144, 160), (36, 40)), ((60, 40), (3, 2)), ((5, 7), (5, 7)), ((9, 4), (1, 1))]
)
def test_block_mean_is_the_floor_of_the_mean(shape, channels):
    (height, width), size = shape
    frame = noise(1, height, width, channels)[0]
    blocks = frame.reshape(size[0], height // size[0], size[1], width // size[1], channels).astype(object)
    expected = blocks.sum((1, 3)) // ((height // size[0]) * (width // size[1]))
    np.testing.assert_array_equal(block_mean(frame, size), expected.astype(np.uint8))
    white = np.full_like(frame, 255)
    assert (block_mean(white, size) == 255).all()


def test_game_boy_video_gives_the_exact_block_mean(tmp_path):
    grey = np.random.default_rng(0).choice(np.array([0, 85, 170, 255], np.uint8), (6, 144, 160))
    path = write_video(tmp_path / "v.mp4", np.repeat(grey[..., None], 3, -1), 10)
    video = read_video(path, VideoOptions(size=(36, 40), grey=True))
    expected = np.floor(grey.reshape(6, 36, 4, 40, 4).astype(np.float64).mean((2, 4)))
    np.testing.assert_array_equal(video.frames[..., 0], expected)


def test_resizing_that_does_not_divide_averages_areas(tmp_path):
    frames = np.zeros((1, 6, 6, 3), np.uint8)
    frames[:, :, 3:] = 200
    path = write_video(tmp_path / "v.mp4", frames, 10)
    small = read_video(path, VideoOptions(size=(4, 4))).frames[0, :, :, 0]
    # Pillow's box filter weighs whole source pixels: columns 0, 0-1, ... of width 1.5.
    assert small[:, 0].tolist() == [0] * 4
    assert small[:, 3].tolist() == [200] * 4
    assert (np.diff(small.astype(int), axis=1) >= 0).all()


def test_luma(tmp_path):
    frames = np.zeros((3, 4, 4, 3), np.uint8)
    for channel in range(3):
        frames[channel, ..., channel] = 255
    path = write_video(tmp_path / "v.mp4", frames, 10)
    # ITU-R 601-2: 0.299, 0.587, 0.114.
    assert read_video(path, VideoOptions(grey=True)).frames[:, 0, 0, 0].tolist() == [76, 150, 29]


def test_several_folders_with_weights(tmp_path):
    for folder, count in (("a", 3), ("b", 1)):
        for i in range(count):
            write_video(tmp_path / folder / "deep" / f"{i}.mp4", noise(3 + i), 10)
    videos = read_folder([tmp_path / "a", tmp_path / "b"], [3.0, 1.0])
    assert videos.source.tolist() == [0, 0, 0, 1]
    np.testing.assert_allclose(videos.weights, [0.25] * 4)
    np.testing.assert_allclose(read_folder([tmp_path / "a", tmp_path / "b"]).weights, [1 / 6] * 3 + [1 / 2])
    frames, lengths, weights = videos.padded()
    assert frames.shape == (4, 5, 48, 64, 3)
    assert (frames.dtype, lengths.dtype, weights.dtype) == (np.uint8, np.int32, np.float32)
    assert lengths.tolist() == [3, 4, 5, 3]
    np.testing.assert_array_equal(frames[1, :4], noise(4))
    assert not frames[1, 4:].any()
    with pytest.raises(ConfigError, match="1 weights for 2 folders"):
        read_folder([tmp_path / "a", tmp_path / "b"], [1.0])
    with pytest.raises(ConfigError, match="finite numbers above 0"):
        read_folder([tmp_path / "a", tmp_path / "b"], [1.0, 0.0])


def test_split_keeps_whole_videos_and_is_decided_by_the_seed(tmp_path):
    for folder, count in (("a", 10), ("b", 4), ("c", 1)):
        for i in range(count):
            write_video(tmp_path / folder / f"{i}.mp4", noise(2, seed=i), 10)
    videos = read_folder([tmp_path / name for name in "abc"])
    train, held_out = videos.split(0.25, seed=3)
    assert np.bincount(held_out.source, minlength=3).tolist() == [3, 1, 0]
    paths = [video.path for part in (train, held_out) for video in part.videos]
    assert sorted(paths) == sorted(video.path for video in videos.videos)
    np.testing.assert_allclose(held_out.weights, [1 / 6] * 3 + [1 / 2], rtol=1e-6)
    again = videos.split(0.25, seed=3)[1]
    assert [video.path for video in again.videos] == [video.path for video in held_out.videos]
    others = {tuple(video.path for video in videos.split(0.25, seed=s)[1].videos) for s in range(8)}
    assert len(others) > 1
    assert len(videos.split(0.0, seed=0)[1].videos) == 0


def test_different_sizes_cannot_be_padded(tmp_path):
    write_video(tmp_path / "a.mp4", noise(2), 10)
    write_video(tmp_path / "b.mp4", noise(2, 24, 32), 10)
    with pytest.raises(DataError, match=r"32x24.*64x48.*size"):
        read_folder(tmp_path).padded()
    assert read_folder(tmp_path, options=VideoOptions(size=(24, 32))).padded()[0].shape == (2, 2, 24, 32, 3)


def test_memory_is_bounded(tmp_path):
    write_video(tmp_path / "a.mp4", noise(10), 10)
    write_video(tmp_path / "b.mp4", noise(10), 10)
    size = noise(10).nbytes
    with pytest.raises(DataError, match="max_bytes"):
        read_video(tmp_path / "a.mp4", VideoOptions(max_bytes=size - 1))
    with pytest.raises(DataError, match="max_bytes"):
        read_folder(tmp_path, options=VideoOptions(max_bytes=2 * size - 1))
    assert len(read_folder(tmp_path, options=VideoOptions(max_bytes=2 * size)).videos) == 2


@pytest.mark.parametrize(
    "options", [{"stride": 0}, {"size": (0, 4)}, {"min_frames": 0}, {"on_bad": "ignore"}]
)
def test_options_out_of_range(options):
    with pytest.raises(ConfigError):
        VideoOptions(**options)
    with pytest.raises(ConfigError):
        Crop(top=-1)

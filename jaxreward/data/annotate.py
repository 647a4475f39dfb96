"""Result videos: enlarged frames with a caption and a curve under each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from jaxreward.errors import DataError

_PANEL, _TEXT, _FAINT, _LINE = (22, 24, 29), (232, 234, 237), (72, 77, 87), (94, 176, 255)


def annotate(
    frames: np.ndarray,
    captions: Sequence[str | Sequence[str]],
    values: Sequence[float] | np.ndarray | None = None,
    min_width: int = 480,
) -> np.ndarray:
    """Enlarges frames and writes a caption under each.

    Args:
      frames: uint8 [T, H, W, 3] or [T, H, W, 1].
      captions: T captions; a sequence of strings is laid out in columns of equal width.
      values: float [T], drawn under the captions as a curve that grows with time (a reward, say);
        values that are not finite leave a gap.
      min_width: the frames are enlarged by the least whole factor that makes them so wide, in pixels.

    Returns:
      uint8 [T, H', W', 3], H' and W' even, so that `write_video(..., lossless=False)` keeps the size.

    Raises:
      DataError: the numbers of frames, captions and values differ.
    """
    frames = np.asarray(frames)
    if len(captions) != len(frames) or (values is not None and len(values) != len(frames)):
        raise DataError(
            f"{len(frames)} frames, {len(captions)} captions, "
            f"{'no' if values is None else len(values)} values: expected one caption and value a frame."
        )
    scale = max(1, -(-min_width // frames.shape[2]))
    height, width = frames.shape[1] * scale, frames.shape[2] * scale
    margin, text_height = max(8, width // 40), max(14, width // 26)
    font = ImageFont.load_default(text_height)
    curve_top = height + text_height + 2 * margin
    curve_height = 0 if values is None else 2 * text_height
    bottom = curve_top + (curve_height + margin if curve_height else 0)
    result = np.empty((len(frames), bottom + bottom % 2, width + width % 2, 3), np.uint8)
    for t, (frame, caption) in enumerate(zip(frames, captions, strict=True)):
        picture = Image.new("RGB", (result.shape[2], result.shape[1]), _PANEL)
        rgb = np.ascontiguousarray(np.broadcast_to(frame, (*frame.shape[:2], 3)))
        picture.paste(Image.fromarray(rgb).resize((width, height), Image.Resampling.NEAREST))
        draw = ImageDraw.Draw(picture)
        columns = [caption] if isinstance(caption, str) else list(caption)
        for column, text in enumerate(columns):
            left = margin + column * (width - 2 * margin) // len(columns)
            draw.text((left, height + margin), text, font=font, fill=_TEXT)
        if values is not None:
            box = (margin, curve_top, width - margin, curve_top + curve_height)
            _draw_curve(draw, box, np.asarray(values, np.float64), t)
        result[t] = np.asarray(picture)
    return result


def _draw_curve(draw: ImageDraw.ImageDraw, box: tuple[int, int, int, int], values: np.ndarray, now: int):
    """Draws values[0 .. now] within (left, top, right, bottom), and a line at zero."""
    left, top, right, bottom = box
    finite = values[np.isfinite(values)]
    low, high = min(0.0, *finite, 0.0), max(0.0, *finite, 0.0)
    span = (high - low) or 1.0
    x = left + np.arange(len(values)) / max(len(values) - 1, 1) * (right - left)
    y = bottom - (values - low) / span * (bottom - top)
    zero = bottom + low / span * (bottom - top)
    thickness = max(2, (right - left) // 220)
    draw.line([(left, zero), (right, zero)], fill=_FAINT, width=max(1, thickness // 2))
    for t in range(now):
        if np.isfinite(y[t : t + 2]).all():
            draw.line([(x[t], y[t]), (x[t + 1], y[t + 1])], fill=_LINE, width=thickness)
    if np.isfinite(y[now]):
        radius = 2 * thickness
        draw.ellipse([x[now] - radius, y[now] - radius, x[now] + radius, y[now] + radius], fill=_LINE)

"""From chat messages with images to the batch of prompts that a vision-language model reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxreward.errors import ModelError
from jaxreward.models.tokenizer import Message, padding_id, render_chat, token_ids
from jaxreward.models.vision_language import Prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QWEN_IMAGE_TOKEN = "<|image_pad|>"
SMOLVLM_IMAGE_TOKEN = "<image>"

# From a prompt's tokens int [T] without padding and the numbers of its images in the batch int [n] to its
# positions int [3, T] and the position of the next token.
Positions = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, int]]


def bucket(size: int, minimum: int = 64) -> int:
    """Rounds a length up to minimum * 2^k or minimum * 1.5 * 2^k, so that few programs are compiled.

    Args:
      size: 0 or more.
      minimum: the smallest bucket, even.

    Returns:
      64, 96, 128, 192, 256, ...; less than 1.5 times `size` beyond the minimum.
    """
    full = minimum
    while full < size:
        full *= 2
    between = full * 3 // 4
    return between if between >= max(size, minimum) else full


def qwen_image_texts(
    grids: np.ndarray, *, merge_size: int = 2, image_token: str = QWEN_IMAGE_TOKEN
) -> list[str]:
    """What stands for each image in a prompt to Qwen2.5-VL and Qwen3-VL: its token once for each merged cell.

    Args:
      grids: int [N, 3], from `preprocess.qwen_patches`.
      merge_size: edge of a merged cell in patches.
      image_token: the placeholder.

    Returns:
      N texts.
    """
    counts = np.prod(np.asarray(grids, np.int64).reshape(-1, 3), axis=1) // merge_size**2
    return [image_token * int(count) for count in counts]


def smolvlm_image_texts(rows: np.ndarray, columns: np.ndarray, *, tokens_per_tile: int) -> list[str]:
    """What stands for each image in a prompt to Idefics3 and SmolVLM: tiles by their places, then the whole.

    Args:
      rows: int [N], from `preprocess.smolvlm_tiles`.
      columns: int [N].
      tokens_per_tile: image tokens of one tile: (tile / patch size / scale factor)^2.

    Returns:
      N texts.
    """
    edge, image = "<fake_token_around_image>", SMOLVLM_IMAGE_TOKEN * tokens_per_tile
    whole = f"{edge}<global-img>{image}{edge}"

    def text(height: int, width: int) -> str:
        if height == 0:
            return whole
        lines = [
            "".join(f"{edge}<row_{row}_col_{column}>{image}" for column in range(1, width + 1)) + "\n"
            for row in range(1, height + 1)
        ]
        return "".join(lines) + "\n" + whole

    return [text(int(height), int(width)) for height, width in zip(rows, columns, strict=True)]


def text_positions(tokens: np.ndarray, images: np.ndarray) -> tuple[np.ndarray, int]:
    """Counts upwards on all three axes, as models without a rotary position for images do."""
    del images
    return np.tile(np.arange(len(tokens), dtype=np.int32), (3, 1)), len(tokens)


def make_prompts(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Sequence[Message]],
    *,
    image_token: str | None = None,
    image_texts: Sequence[str] = (),
    row_counts: Sequence[int] | None = None,
    first_rows: Sequence[int] | None = None,
    positions: Positions = text_positions,
    longest: int = 32768,
    length: int | None = None,
    add_generation_prompt: bool = True,
) -> Prompts:
    """Renders, expands, tokenises and pads conversations; nothing is ever cut off.

    The images of the batch are numbered in the order in which the conversations show them.

    Args:
      tokenizer: from `load_tokenizer`.
      conversations: B lists of messages; see `render_chat`.
      image_token: what the chat template writes for an image; None for text alone.
      image_texts: what takes the placeholder's place, for each image of the batch.
      row_counts: rows of `ImageFeatures` that each image has; checked against the tokens of its text.
      first_rows: the first row of each image; images may share rows, so that a frame is encoded once. If
        None, the images take rows in order.
      positions: rotary positions of a prompt (`qwen_inputs.rope_positions` with the images' grids for Qwen).
      longest: most tokens of a prompt.
      length: to which prompts are padded; `bucket` of the longest prompt (at most `longest`) if None.
      add_generation_prompt: whether the assistant's turn is begun at the end.

    Returns:
      The prompts, as NumPy arrays.

    Raises:
      ModelError: names the conversation whose images or length do not fit.
    """
    if not conversations:
        raise ModelError("no conversations were found; at least one was expected")
    counts = _image_token_counts(image_texts, image_token, row_counts)
    if first_rows is None:
        first_rows = np.cumsum(counts) - counts
    elif len(first_rows) != len(counts):
        raise ModelError(
            f"{len(first_rows)} first rows were found for {len(counts)} images; one each was expected"
        )

    texts, images = _expand(tokenizer, conversations, image_token, image_texts, add_generation_prompt)
    samples = [np.asarray(ids, np.int32) for ids in token_ids(tokenizer, texts, add_special_tokens=False)]
    size = _padded_length(samples, images, counts, longest, length)
    image_id = None if image_token is None else _image_id(tokenizer, image_token)

    shape = (len(samples), size)
    tokens = np.full(shape, padding_id(tokenizer), np.int32)
    where, image_rows = np.zeros(shape, bool), np.full(shape, -1, np.int32)
    angles = np.zeros((3, *shape), np.int32)
    next_position = np.zeros(len(samples), np.int32)
    for i, (ids, numbers) in enumerate(zip(samples, images, strict=True)):
        start = size - len(ids)
        tokens[i, start:], where[i, start:] = ids, True
        angles[:, i, start:], next_position[i] = positions(ids, numbers)
        at = start + np.flatnonzero(ids == image_id) if image_id is not None else np.zeros(0, np.int64)
        if len(at) != counts[numbers].sum():
            raise ModelError(
                f"conversation {i} has {len(at)} image tokens after tokenising; its {len(numbers)} images "
                f"have {counts[numbers].sum()} features; use the tokenizer of the model's folder"
            )
        rows = [first_rows[n] + np.arange(counts[n]) for n in numbers]
        image_rows[i, at] = np.concatenate(rows) if rows else []
    return Prompts(
        tokens=tokens, where=where, positions=angles, next_position=next_position, image_rows=image_rows
    )


def _image_token_counts(
    texts: Sequence[str], image_token: str | None, row_counts: Sequence[int] | None
) -> np.ndarray:
    """Image tokens of each image's text, int64 [N], checked against its rows of features."""
    if len(texts) and image_token is None:
        raise ModelError(f"{len(texts)} images were passed without an image token; name the model's token")
    counts = np.asarray([text.count(image_token or "") for text in texts], np.int64)
    if row_counts is not None and list(row_counts) != counts.tolist():
        if len(row_counts) != len(counts):
            raise ModelError(
                f"features of {len(row_counts)} images were found for {len(counts)} images in the "
                "prompts; one for each was expected"
            )
        wrong = int(np.flatnonzero(np.asarray(row_counts) != counts)[0])
        raise ModelError(
            f"image {wrong} has {row_counts[wrong]} rows of features and {counts[wrong]} tokens in its prompt"
            "; preprocess and expand it with the same spec"
        )
    return counts


def _expand(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Sequence[Message]],
    image_token: str | None,
    image_texts: Sequence[str],
    add_generation_prompt: bool,
) -> tuple[list[str], list[np.ndarray]]:
    """Renders each conversation with its images' texts; also the numbers of its images."""
    texts, images, first = [], [], 0
    for i, messages in enumerate(conversations):
        try:
            rendered = render_chat(
                tokenizer, messages, image_token=image_token, add_generation_prompt=add_generation_prompt
            )
        except ModelError as error:
            raise ModelError(f"conversation {i}: {error}") from error
        pieces = [rendered] if image_token is None else rendered.split(image_token)
        numbers = np.arange(first, first + len(pieces) - 1)
        first += len(numbers)
        if first > len(image_texts):
            raise ModelError(
                f"conversation {i} shows {len(numbers)} images, and the conversations up to it {first}; only "
                f"{len(image_texts)} images were passed"
            )
        inserted = [image_texts[n] for n in numbers]
        texts.append(pieces[0] + "".join(a + b for a, b in zip(inserted, pieces[1:], strict=True)))
        images.append(numbers)
    if first != len(image_texts):
        raise ModelError(
            f"{len(image_texts)} images were passed; the {len(conversations)} conversations show {first}"
        )
    return texts, images


def _padded_length(
    samples: list[np.ndarray], images: list[np.ndarray], counts: np.ndarray, longest: int, length: int | None
) -> int:
    """The common length of the prompts, once none is found to be empty or too long."""
    limit = longest if length is None else min(length, longest)
    for i, (ids, numbers) in enumerate(zip(samples, images, strict=True)):
        if len(ids) == 0:
            raise ModelError(f"conversation {i} has no tokens; at least one was expected")
        if len(ids) > limit:
            raise ModelError(
                f"conversation {i} has {len(ids)} tokens, {counts[numbers].sum()} of them of {len(numbers)} "
                f"images; at most {limit} fit, and nothing is cut off: lower max_pixels in "
                "preprocessor_config.json, use fewer frames, or allow longer prompts"
            )
    return min(bucket(max(map(len, samples))), longest) if length is None else length


def _image_id(tokenizer: PreTrainedTokenizerBase, image_token: str) -> int:
    number = tokenizer.get_vocab().get(image_token)
    if number is None:
        raise ModelError(
            f"the tokenizer has no token {image_token!r}; expected the tokenizer of the vision-language model"
        )
    return number

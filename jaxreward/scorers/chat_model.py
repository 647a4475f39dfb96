"""A vision-language model folder as one object: chats about frames in, answers or log-probabilities out.

What the generative scorers and Stage 1 on a VLM share: frames are preprocessed and encoded once, chats are
rendered and padded to buckets, and nothing is ever cut off.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxreward.errors import ModelError
from jaxreward.models import weights
from jaxreward.models.chat import (
    QWEN_IMAGE_TOKEN,
    SMOLVLM_IMAGE_TOKEN,
    make_prompts,
    qwen_image_texts,
    smolvlm_image_texts,
)
from jaxreward.models.frame_cache import FrameCache
from jaxreward.models.generate import Buckets, GenerateConfig, Generated, Generator
from jaxreward.models.preprocess import (
    QwenImageSpec,
    TileImageSpec,
    load_image_spec,
    qwen_patches,
    smolvlm_tiles,
)
from jaxreward.models.qwen_inputs import image_token_count, rope_positions, vision_inputs
from jaxreward.models.qwen_vl import QwenVL
from jaxreward.models.smolvlm import SmolVLM, Tiles
from jaxreward.models.tokenizer import Message, load_tokenizer, token_ids
from jaxreward.models.vision_language import ImageFeatures, Prompts
from jaxreward.types import Array, PyTree

# Tokens that only an image or a video may fill, or that surround one; a model must never say them.
IMAGE_TOKENS = (
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
)


@dataclasses.dataclass(frozen=True)
class _FrameLayout:
    """How frames of one size become image tokens.

    Attributes:
      tokens: image tokens of a frame.
      text: what stands for a frame in a prompt.
      inputs: maps frames uint8 [n, H, W, 3] to what `encode_images` reads.
      positions: rotary positions of a prompt, see `jaxreward.models.chat.Positions`; None: plain counting.
    """

    tokens: int
    text: str
    inputs: Callable[[np.ndarray], PyTree]
    positions: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, int]] | None = None


class ChatModel:
    """Answers chats about frames; holds the tokenizer, the preprocessing and a cache of encoded frames.

    Attributes:
      model: the loaded folder; `model.params` are its variables.
      module: the Flax module.
      tokenizer: of the folder.
      generator: compiles and runs generation; `generator.compilations` counts programs.
    """

    def __init__(
        self,
        model: weights.Model,
        *,
        buckets: Buckets | None = None,
        cached_frames: int = 1024,
        frame_tokens: tuple[int, int] | None = None,
    ) -> None:
        """Reads tokenizer and preprocessing of the model's folder.

        Args:
          model: from `weights.load`.
          buckets: shapes that programs are compiled for.
          cached_frames: frames whose features are kept.
          frame_tokens: the fewest and the most image tokens of a frame, for Qwen's models; those of
            preprocessor_config.json if None.

        Raises:
          ModelError: a model that reads no images, or a folder without tokenizer or preprocessor_config.json.
        """
        self.model, self.module = model, model.architecture.module
        if not isinstance(self.module, QwenVL | SmolVLM):
            raise ModelError(
                f"{model.path}: a {type(self.module).__name__} found, which holds no chats about images; "
                "expected a folder of Qwen2.5-VL, Qwen3-VL, SmolVLM or Idefics3"
            )
        self.tokenizer = load_tokenizer(model.path)
        self.spec = load_image_spec(model.path)
        fitting = QwenImageSpec if isinstance(self.module, QwenVL) else TileImageSpec
        if not isinstance(self.spec, fitting):
            raise ModelError(
                f"{model.path}: preprocessor_config.json is that of another family "
                f"({type(self.spec).__name__} found, {fitting.__name__} expected); copy the model's own"
            )
        if frame_tokens is not None:
            if not isinstance(self.spec, QwenImageSpec):
                raise ModelError(
                    f"{model.path}: frame_tokens {frame_tokens} found for a model that cuts tiles; expected "
                    "none"
                )
            cell = (self.spec.patch_size * self.spec.merge_size) ** 2
            fewest, most = (tokens * cell for tokens in frame_tokens)
            self.spec = dataclasses.replace(self.spec, min_pixels=fewest, max_pixels=most)
        self.image_token = QWEN_IMAGE_TOKEN if isinstance(self.module, QwenVL) else SMOLVLM_IMAGE_TOKEN
        self.generator = Generator(self.module, buckets)
        self._cached_frames = cached_frames
        self._layouts: dict[tuple[int, ...], tuple[_FrameLayout, FrameCache]] = {}
        self._variables: PyTree = None
        self._vision: list[Array] = []
        self._encode = jax.jit(lambda v, images: self.module.apply(v, images, method="encode_images"))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        dtype: str = "float32",
        mesh: Any = None,
        **options: Any,
    ) -> ChatModel:
        """Loads a Hugging Face folder; see `weights.load` and `__init__` for arguments and errors."""
        return cls(weights.load(path, dtype=dtype, mesh=mesh), **options)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        own = self.tokenizer.eos_token_id
        return tuple(sorted({*self.model.end_tokens, *(() if own is None else (own,))}))

    @property
    def forbidden_tokens(self) -> tuple[int, ...]:
        """Ids that no answer may contain: those of images (trl issue 3847)."""
        vocabulary = self.tokenizer.get_vocab()
        return tuple(sorted(vocabulary[token] for token in IMAGE_TOKENS if token in vocabulary))

    def prompts(
        self,
        variables: PyTree,
        conversations: Sequence[Sequence[Message]],
        frames: np.ndarray,
        *,
        add_generation_prompt: bool = True,
    ) -> tuple[Prompts, ImageFeatures | None]:
        """Renders chats and encodes the frames that they show, each different frame once.

        Args:
          variables: the model's variables; the vision tower's part decides the features.
          conversations: B chats, see `jaxreward.models.tokenizer.render_chat`.
          frames: uint8 [N, H, W, 3], one for each image part of the chats, in order; or, for Qwen's models,
            slices of videos, [N, H, W, 6]: two frames one behind the other (`temporal_patch_size` of them).
          add_generation_prompt: begin the assistant's turn.

        Returns:
          (prompts, features), as `generate` takes them; features are None without frames.

        Raises:
          ModelError: chats and frames that do not fit each other or the model.
        """
        if not len(frames):
            return make_prompts(
                self.tokenizer, conversations, add_generation_prompt=add_generation_prompt
            ), None
        layout, cache = self._frames_of(frames.shape[1:])
        self._use(variables)
        features, first_rows = cache.lookup(frames)
        options = {} if layout.positions is None else {"positions": layout.positions}
        prompts = make_prompts(
            self.tokenizer,
            conversations,
            image_token=self.image_token,
            image_texts=[layout.text] * len(frames),
            row_counts=[layout.tokens] * len(frames),
            first_rows=first_rows,
            add_generation_prompt=add_generation_prompt,
            **options,
        )
        return prompts, features

    def answer(
        self,
        variables: PyTree,
        conversations: Sequence[Sequence[Message]],
        frames: np.ndarray,
        key: Array,
        config: GenerateConfig,
    ) -> tuple[list[str], Generated]:
        """Answers chats; images and other special tokens are never said, and stop tokens end an answer.

        Args:
          variables: the model's variables, with a 'lora' collection where there is one.
          conversations: B chats.
          frames: uint8 [N, H, W, 3], one for each image part of the chats, in order.
          key: of the sampling.
          config: how to sample; its stop and forbidden tokens are filled in here.

        Returns:
          (B * n answers without special tokens, what was generated).
        """
        prompts, features = self.prompts(variables, conversations, frames)
        config = config.replace(stop_tokens=self.stop_tokens, forbidden_tokens=self.forbidden_tokens)
        generated = self.generator.generate(variables, prompts, features, key, config)
        return self.texts(generated), generated

    def log_probabilities(
        self,
        variables: PyTree,
        conversations: Sequence[Sequence[Message]],
        frames: np.ndarray,
        answers: Sequence[str],
    ) -> np.ndarray:
        """Log-probabilities of given answers, at temperature 1, without decoding anything.

        Args:
          variables: the model's variables.
          conversations: B chats.
          frames: uint8 [N, H, W, 3], one for each image part of the chats, in order.
          answers: B texts, with which the assistant's turn begins.

        Returns:
          float32 [B], summed over an answer's tokens.

        Raises:
          ModelError: as `prompts`, or an answer without tokens.
        """
        prompts, features = self.prompts(variables, conversations, frames)
        ids = token_ids(self.tokenizer, answers, add_special_tokens=False)
        if not all(ids):
            raise ModelError(f"answer {answers[ids.index([])]!r} has no tokens; expected a text")
        tokens = np.zeros((len(ids), max(map(len, ids))), np.int32)
        for row, own in zip(tokens, ids, strict=True):
            row[: len(own)] = own
        where = np.arange(tokens.shape[1]) < np.array([[len(own)] for own in ids])
        return self.generator.log_probabilities(variables, prompts, features, tokens, where).sum(1)

    def answer_tokens(
        self, answers: Sequence[str], limit: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokenises answers as the model is to write them, each with the stop token at its end.

        Args:
          answers: B texts.
          limit: the most tokens of an answer; None for no limit.

        Returns:
          (tokens int32 [B, N], where bool [B, N], True for tokens of an answer), N rounded up to a bucket.

        Raises:
          ModelError: an answer that is too long, or a folder that names no stop token.
        """
        if not self.stop_tokens:
            raise ModelError(
                f"{self.model.path}: no token that ends an answer found; name eos_token_id in "
                "generation_config.json"
            )
        own = self.tokenizer.eos_token_id
        stop = self.stop_tokens[0] if own is None else own
        ids = [[*row, stop] for row in token_ids(self.tokenizer, answers, add_special_tokens=False)]
        longest = max(map(len, ids))
        if limit is not None and longest > limit:
            raise ModelError(
                f"an answer of {longest} tokens found, but vlm.max_new_tokens is {limit}; raise it"
            )
        tokens = np.zeros((len(ids), self.generator.buckets.fit("new_tokens", longest)), np.int32)
        for row, one in zip(tokens, ids, strict=True):
            row[: len(one)] = one
        return tokens, np.arange(tokens.shape[1]) < np.array([[len(one)] for one in ids])

    def texts(self, generated: Generated) -> list[str]:
        """What was generated, as texts without special tokens."""
        rows = [
            tokens[:length].tolist()
            for tokens, length in zip(generated.tokens, generated.lengths, strict=True)
        ]
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True)

    def _frames_of(self, shape: tuple[int, ...]) -> tuple[_FrameLayout, FrameCache]:
        """The layout and the cache for frames [H, W, 3]."""
        if shape not in self._layouts:
            layout = self._qwen_layout(shape) if isinstance(self.module, QwenVL) else self._tile_layout(shape)

            def encode(frames: np.ndarray) -> ImageFeatures:
                return self._encode(self._variables, layout.inputs(frames))

            cache = FrameCache(encode, tokens_per_frame=layout.tokens, capacity=self._cached_frames)
            self._layouts[shape] = layout, cache
        return self._layouts[shape]

    def _use(self, variables: PyTree) -> None:
        """Encodes with these variables from now on; forgets frames that another vision tower encoded."""
        vision = jax.tree.leaves({name: part.get("vision") for name, part in variables.items()})
        same = len(vision) == len(self._vision) and all(
            a is b for a, b in zip(vision, self._vision, strict=True)
        )
        if not same:
            for _, cache in self._layouts.values():
                cache.clear()
        self._variables, self._vision = variables, vision

    def _qwen_layout(self, shape: tuple[int, ...]) -> _FrameLayout:
        structure, slice_length = self.module.config, self.spec.temporal_patch_size

        def patches(frames: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            if frames.shape[-1] != 3 * slice_length:
                return qwen_patches(list(frames), self.spec)
            rows = []
            for time, part in enumerate(np.split(frames, slice_length, axis=-1)):
                still, grids = qwen_patches(list(part), self.spec)
                # A row is [channel, time, pixel]; a still image fills every time with itself.
                rows.append(still.reshape(len(still), 3, slice_length, -1)[:, :, time])
            return np.stack(rows, axis=2).reshape(len(rows[0]), -1), grids

        _, grids = patches(np.zeros((1, *shape), np.uint8))
        grid = grids[0]

        def inputs(frames: np.ndarray) -> PyTree:
            return vision_inputs(structure, *patches(frames))

        def positions(tokens: np.ndarray, images: np.ndarray) -> tuple[np.ndarray, int]:
            return rope_positions(tokens, np.tile(grid, (len(images), 1)), structure)

        (text,) = qwen_image_texts(grids, merge_size=self.spec.merge_size)
        return _FrameLayout(int(image_token_count(grid, structure)), text, inputs, positions)

    def _tile_layout(self, shape: tuple[int, ...]) -> _FrameLayout:
        per_tile = self.module.config.tokens_per_tile
        tiles, rows, columns = smolvlm_tiles([np.zeros(shape, np.uint8)], self.spec)

        def inputs(frames: np.ndarray) -> PyTree:
            return Tiles(smolvlm_tiles(list(frames), self.spec)[0])

        (text,) = smolvlm_image_texts(rows, columns, tokens_per_tile=per_tile)
        return _FrameLayout(len(tiles) * per_tile, text, inputs)

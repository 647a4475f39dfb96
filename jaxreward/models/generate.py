"""Text from a vision-language model: prompts are read once, then one loop on the device samples tokens.

The pure functions `prefill`, `decode`, `generate` and `log_probabilities` have static shapes and may be part
of a larger program. `Generator` is for callers on the host: it pads prompts of any size to a few shapes, so
that few programs are compiled. Tables of image features are not padded: they come in few sizes already, from
`encode_images` on padded images or from a `jaxreward.models.frame_cache.FrameCache`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxreward.errors import ConfigError, ModelError
from jaxreward.models.decoder import Cache, empty_cache
from jaxreward.models.vision_language import ImageFeatures, Prompts, VisionLanguageModel
from jaxreward.types import Array, PyTree


@struct.dataclass
class GenerateConfig:
    """How tokens are sampled. The temperature is data; the other fields are structure.

    Attributes:
      temperature: logits are divided by it; 0 takes the likeliest token, whose recorded log-probability is
        then that at temperature 1.
      max_new_tokens: N, the most tokens of a completion.
      samples: n, completions of each prompt.
      stop_tokens: a completion ends with the first of these, which is part of it.
      forbidden_tokens: never sampled, and outside of the distribution that log-probabilities refer to: ids
        that only an image may fill.
      padding_token: fills the rest of a completion.
    """

    temperature: float | Array = 1.0
    max_new_tokens: int = struct.field(pytree_node=False, default=512)
    samples: int = struct.field(pytree_node=False, default=1)
    stop_tokens: tuple[int, ...] = struct.field(pytree_node=False, default=())
    forbidden_tokens: tuple[int, ...] = struct.field(pytree_node=False, default=())
    padding_token: int = struct.field(pytree_node=False, default=0)

    def __post_init__(self) -> None:
        """Checks what is static, and the temperature where it is a number of Python."""
        for name in ("max_new_tokens", "samples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} found; expected at least 1")
        for name in ("stop_tokens", "forbidden_tokens"):
            if any(token < 0 for token in getattr(self, name)):
                raise ConfigError(f"{name} {getattr(self, name)} found; expected ids of at least 0")
        if isinstance(self.temperature, int | float):
            check_temperature(self.temperature)


@struct.dataclass
class Generated:
    """Completions; row b * n + i holds the i-th completion of prompt b."""

    tokens: Array  # int32 [B * n, N], the padding token after the end
    log_probabilities: Array  # float32 [B * n, N], at the sampling temperature; 0 after the end
    lengths: Array  # int32 [B * n], tokens of the completion, its stop token included
    stopped: Array  # bool [B * n], it ended with a stop token, not at the limit

    @property
    def where(self) -> Array:
        """bool [B * n, N]: True for tokens of a completion."""
        return np.arange(self.tokens.shape[1]) < self.lengths[:, None]


@struct.dataclass
class Decoding:
    """A generation under way: what the decoder remembers and what has been sampled so far."""

    cache: Cache  # of R = B * n rows
    keys: Array  # keys [R]
    position: Array  # int32 [R], rotary position of the token sampled last
    token: Array  # int32 [R], the token sampled last; the cache does not hold it yet
    tokens: Array  # int32 [R, N]
    log_probabilities: Array  # float32 [R, N]
    lengths: Array  # int32 [R]
    stopped: Array  # bool [R]; also True for rows without a prompt
    step: Array  # int32 [], tokens sampled so far


def check_temperature(temperature: float) -> None:
    """Raises ConfigError unless the temperature is finite and not negative."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError(f"temperature {temperature} found; expected a finite number of at least 0")


def sampling_logits(logits: Array, temperature: float | Array, forbidden_tokens: tuple[int, ...]) -> Array:
    """Logits of the distribution that tokens are sampled from.

    Args:
      logits: float32 [..., V] of the model.
      temperature: scalar; 0 counts as 1.
      forbidden_tokens: ids that get probability 0.

    Returns:
      float32 [..., V].
    """
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    if not forbidden_tokens:
        return scaled
    forbidden = np.zeros(logits.shape[-1], bool)
    forbidden[list(forbidden_tokens)] = True
    return jnp.where(forbidden, -jnp.inf, scaled)


def sample(logits: Array, keys: Array, temperature: float | Array) -> tuple[Array, Array]:
    """Samples one token a row by the Gumbel-max trick, with a key for each row.

    Args:
      logits: float32 [R, V], as `sampling_logits` gives.
      keys: keys [R].
      temperature: scalar; 0 takes the largest logit, the first of equals.

    Returns:
      (tokens int32 [R], their log-probabilities float32 [R]).
    """

    def noisy() -> Array:
        gumbel = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:]))(keys)
        return jnp.argmax(logits + gumbel, axis=-1)

    token = jax.lax.cond(temperature > 0, noisy, lambda: jnp.argmax(logits, axis=-1))
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return token.astype(jnp.int32), chosen - jax.nn.logsumexp(logits, axis=-1)


def _record(
    model: VisionLanguageModel, variables: PyTree, hidden: Array, state: Decoding, config: GenerateConfig
) -> Decoding:
    """Samples from the last hidden states [R, D] and writes down what was sampled in rows still open."""
    logits = model.apply(variables, hidden, method="logits")
    logits = sampling_logits(logits, config.temperature, config.forbidden_tokens)
    keys = jax.vmap(jax.random.fold_in, (0, None))(state.keys, state.step)
    token, log_probability = sample(logits, keys, config.temperature)
    going_on = ~state.stopped
    token = jnp.where(going_on, token, config.padding_token)
    log_probability = jnp.where(going_on, log_probability, 0.0)
    ends = jnp.isin(token, np.asarray(config.stop_tokens, np.int32))
    return state.replace(
        token=token,
        tokens=state.tokens.at[:, state.step].set(token),
        log_probabilities=state.log_probabilities.at[:, state.step].set(log_probability),
        lengths=state.lengths + going_on.astype(jnp.int32),
        stopped=state.stopped | ends,
        step=state.step + 1,
    )


def _room_for_samples(cache: Cache, samples: int, slots: int) -> Cache:
    """Repeats each row `samples` times and adds free slots up to `slots`."""

    def widen(x: Array, row: int, slot: int) -> Array:
        width = [(0, 0)] * x.ndim
        width[slot] = (0, slots - x.shape[slot])
        return jnp.pad(jnp.repeat(x, samples, axis=row), width)

    return cache.replace(
        keys=widen(cache.keys, 1, 3), values=widen(cache.values, 1, 3), where=widen(cache.where, 0, 1)
    )


def prefill(
    model: VisionLanguageModel,
    variables: PyTree,
    prompts: Prompts,
    features: ImageFeatures | None,
    key: Array,
    config: GenerateConfig,
    first_row: int | Array = 0,
) -> Decoding:
    """Reads the prompts and samples the first token of each completion.

    A prompt is read once, however many completions it gets. A row's random numbers depend on `key` and on
    the row's number alone, not on the size of the batch or on padding.

    Args:
      model: its module.
      variables: {'params': ..., and 'lora': ... where there is one}.
      prompts: [B, T], padded on the left. A row that is all padding yields an empty completion.
      features: what `prompts.image_rows` refers to; None for text alone.
      key: of the sampling.
      config: how to sample.
      first_row: number of the first row, for a batch that is one part of a larger one.

    Returns:
      The state that `decode` goes on with: T + N slots in each of B * n rows.
    """
    batch, length = prompts.tokens.shape
    samples, limit = config.samples, config.max_new_tokens
    rows, slots = batch * samples, length + limit
    embeddings, extra = model.apply(variables, prompts.tokens, prompts.image_rows, features, method="embed")
    cache = empty_cache(model.decoder_config, batch, slots if samples == 1 else length)
    hidden, cache = model.apply(
        variables, embeddings, prompts.positions, prompts.where, cache, empty=True, extra=extra
    )
    last = hidden[:, -1]
    if samples > 1:
        cache, last = _room_for_samples(cache, samples, slots), jnp.repeat(last, samples, axis=0)
    state = Decoding(
        cache=cache,
        keys=jax.vmap(lambda row: jax.random.fold_in(key, row))(first_row + jnp.arange(rows)),
        position=jnp.repeat(prompts.next_position, samples),
        token=jnp.zeros(rows, jnp.int32),
        tokens=jnp.full((rows, limit), config.padding_token, jnp.int32),
        log_probabilities=jnp.zeros((rows, limit), jnp.float32),
        lengths=jnp.zeros(rows, jnp.int32),
        stopped=jnp.repeat(~jnp.any(prompts.where, axis=1), samples),
        step=jnp.zeros((), jnp.int32),
    )
    return _record(model, variables, last, state, config)


def decode(
    model: VisionLanguageModel,
    variables: PyTree,
    state: Decoding,
    config: GenerateConfig,
    limit: int | Array | None = None,
) -> Decoding:
    """Samples until every completion has stopped or `limit` tokens are sampled, in one `lax.while_loop`.

    Donate `state` when jitting this: the key-value cache is then updated where it lies.

    Args:
      model: its module.
      variables: as in `prefill`.
      state: from `prefill`, or from `decode` with a lower limit.
      config: as in `prefill`.
      limit: tokens of a completion, data, at most `max_new_tokens`, which it is if None.

    Returns:
      The state after the last token.
    """
    limit = config.max_new_tokens if limit is None else jnp.minimum(limit, config.max_new_tokens)

    def unfinished(state: Decoding) -> Array:
        return (state.step < limit) & ~jnp.all(state.stopped)

    def advance(state: Decoding) -> Decoding:
        token = state.token[:, None]
        embeddings, extra = model.apply(variables, token, jnp.full_like(token, -1), None, method="embed")
        positions = jnp.broadcast_to(state.position[None, :, None], (3, *token.shape))
        hidden, cache = model.apply(
            variables, embeddings, positions, ~state.stopped[:, None], state.cache, empty=False, extra=extra
        )
        state = state.replace(cache=cache, position=state.position + 1)
        return _record(model, variables, hidden[:, -1], state, config)

    return jax.lax.while_loop(unfinished, advance, state)


def generate(
    model: VisionLanguageModel,
    variables: PyTree,
    prompts: Prompts,
    features: ImageFeatures | None,
    key: Array,
    config: GenerateConfig,
) -> Generated:
    """Samples n completions of each prompt: `prefill`, then `decode`, whose arguments these are."""
    state = decode(model, variables, prefill(model, variables, prompts, features, key, config), config)
    return _completions(state, prompts)


def _completions(state: Decoding, prompts: Prompts) -> Generated:
    """What a finished state holds; a row without a prompt has not stopped, it never began."""
    began = jnp.repeat(jnp.any(prompts.where, axis=1), state.tokens.shape[0] // prompts.where.shape[0])
    return Generated(state.tokens, state.log_probabilities, state.lengths, state.stopped & began)


def log_probabilities(
    model: VisionLanguageModel,
    variables: PyTree,
    prompts: Prompts,
    features: ImageFeatures | None,
    tokens: Array,
    where: Array,
    *,
    temperature: float | Array = 1.0,
    forbidden_tokens: tuple[int, ...] = (),
    chunk: int = 32,
) -> Array:
    """Log-probabilities of given completions, in one pass and without decoding; differentiable.

    With the temperature and forbidden tokens of the sampling, they are what `generate` records. A prompt is
    read once for all its completions, which stand side by side after it and do not see one another. Logits
    are made for `chunk` tokens of each row at a time, and again in the backward pass, so that [R, N, V] never
    exists.

    Args:
      model: its module.
      variables: as in `prefill`.
      prompts: [B, T], padded on the left.
      features: what `prompts.image_rows` refers to; None for text alone.
      tokens: int32 [R, N], R = B * n; rows b * n .. b * n + n - 1 complete prompt b.
      where: bool [R, N], True for tokens of a completion; False only after them.
      temperature: scalar; 0 counts as 1.
      forbidden_tokens: ids outside of the distribution.
      chunk: tokens of each row whose logits exist at a time.

    Returns:
      float32 [R, N], 0 where `where` is False.
    """
    (batch, prompt), (rows, count) = prompts.tokens.shape, tokens.shape
    if batch == 0 or rows % batch:
        raise ConfigError(f"{rows} completions of {batch} prompts found; expected the same number for each")
    samples, others = rows // batch, count - 1
    side_by_side = (batch, samples * others)

    def after_prompt(of_prompt: Array, of_completions: Array) -> Array:
        return jnp.concatenate([of_prompt, of_completions.reshape(side_by_side)], axis=1)

    following = jnp.tile(prompts.next_position[:, None] + jnp.arange(others), (1, samples))
    embeddings, extra = model.apply(
        variables,
        after_prompt(prompts.tokens, tokens[:, :-1]),
        jnp.pad(prompts.image_rows, ((0, 0), (0, samples * others)), constant_values=-1),
        features,
        method="embed",
    )
    hidden, _ = model.apply(
        variables,
        embeddings,
        jnp.concatenate([prompts.positions, jnp.broadcast_to(following, (3, *side_by_side))], axis=2),
        after_prompt(prompts.where, where[:, :-1]),
        extra=extra,
        branches=None if samples == 1 or others == 0 else (samples, others),
    )
    width = hidden.shape[-1]
    before_first = jnp.broadcast_to(hidden[:, None, prompt - 1 : prompt], (batch, samples, 1, width))
    hidden = jnp.concatenate(
        [before_first, hidden[:, prompt:].reshape(batch, samples, others, width)], axis=2
    )
    hidden = hidden.reshape(rows, count, width)
    chunk = min(chunk, count)
    chunks = -(-count // chunk)

    def in_chunks(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, chunks * chunk - count)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, chunks, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def of_chunk(hidden: Array, token: Array) -> Array:
        logits = model.apply(variables, hidden, method="logits")
        logits = sampling_logits(logits, temperature, forbidden_tokens)
        chosen = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    found = jax.lax.map(lambda x: of_chunk(*x), (in_chunks(hidden), in_chunks(tokens)))
    found = jnp.moveaxis(found, 0, 1).reshape(rows, chunks * chunk)[:, :count]
    return jnp.where(where, found, 0.0)


def _powers(first: int, last: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(first, last + 1))


def _powers_and_between(first: int, last: int) -> tuple[int, ...]:
    """2^first, 1.5 * 2^first, 2^(first + 1), ..., 2^last: a length is rounded up by less than a half."""
    return tuple(sorted({*_powers(first, last), *(3 * 2**power // 2 for power in range(first, last))}))


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The shapes that programs are compiled for; each number is rounded up to the next one here.

    Attributes:
      prompts: rows of one call; more prompts are run in several calls.
      prompt_tokens: length of the longest prompt.
      new_tokens: length of a completion.
    """

    prompts: tuple[int, ...] = _powers(0, 5)
    prompt_tokens: tuple[int, ...] = _powers_and_between(5, 15)
    new_tokens: tuple[int, ...] = (1, *_powers_and_between(1, 12))

    def __post_init__(self) -> None:
        """Checks that each list of sizes ascends from 1 or more."""
        for field in dataclasses.fields(self):
            sizes = getattr(self, field.name)
            if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
                raise ConfigError(f"bucket sizes {field.name} {sizes} found; expected ascending sizes from 1")

    def fit(self, name: str, size: int) -> int:
        """The smallest size of the list `name` that holds `size`; ModelError if none does."""
        for bucket in getattr(self, name):
            if size <= bucket:
                return bucket
        raise ModelError(
            f"{name} {size} found; the largest bucket is {getattr(self, name)[-1]}, and nothing is cut off. "
            f"Use fewer or smaller images or shorter texts, or add a larger size to Buckets.{name}"
        )


def check_prompts(prompts: Prompts, features: ImageFeatures | None) -> None:
    """Raises ModelError for prompts that are empty, padded on the right, or that lack their images."""
    where, image_rows = np.asarray(prompts.where), np.asarray(prompts.image_rows)
    if 0 in where.shape:
        raise ModelError(f"prompts of shape {where.shape} found; expected at least one prompt with one token")
    empty = np.flatnonzero(~where.any(axis=1))
    if empty.size:
        raise ModelError(f"prompt {empty[0]} has no tokens; expected at least one")
    right = np.flatnonzero(~where[:, -1])
    if right.size:
        raise ModelError(f"prompt {right[0]} is padded on the right; pad prompts on the left")
    rows = 0 if features is None else features.rows.shape[0]
    wrong = np.flatnonzero((image_rows >= rows).any(axis=1))
    if wrong.size:
        raise ModelError(
            f"prompt {wrong[0]} refers to image row {image_rows[wrong[0]].max()}, but there are {rows}; "
            "pass the features of its images"
        )


def pad_prompts(prompts: Prompts, batch: int, length: int) -> Prompts:
    """Pads prompts on the left to `length` and adds empty ones up to `batch`, on the host.

    Columns on the left that no prompt uses are dropped first; `length` must hold the rest.

    Returns:
      The prompts as NumPy arrays.
    """
    where = np.asarray(prompts.where)
    first = int(np.argmax(where.any(axis=0)))

    def pad(x: Any, fill: int = 0) -> np.ndarray:
        x = np.asarray(x)[..., first:]
        missing = (batch - x.shape[-2], length - x.shape[-1])
        return np.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, missing[0]), (missing[1], 0)], constant_values=fill)

    return Prompts(
        tokens=pad(prompts.tokens),
        where=pad(where),
        positions=pad(prompts.positions),
        next_position=np.pad(np.asarray(prompts.next_position), (0, batch - where.shape[0])),
        image_rows=pad(prompts.image_rows, -1),
    )


class Generator:
    """Generates on the host, in programs that are compiled once for each bucket of shapes.

    Attributes:
      model: its module.
      buckets: the shapes.
      compilations: programs compiled so far.
    """

    def __init__(self, model: VisionLanguageModel, buckets: Buckets | None = None) -> None:
        """Compiles nothing yet."""
        self.model = model
        self.buckets = buckets or Buckets()
        self.compilations = 0
        self._prefill = self._compiled(prefill)
        self._decode = self._compiled(decode, donate_argnums=1)
        self._log_probabilities = self._compiled(
            log_probabilities, static_argnames=("forbidden_tokens", "chunk")
        )

    def _compiled(self, function: Callable, **options: Any) -> Callable:
        def traced(*arguments: PyTree, **keywords: Any) -> PyTree:
            # Python runs this once for each program that JAX compiles.
            self.compilations += 1
            return function(self.model, *arguments, **keywords)

        return jax.jit(traced, **options)

    def generate(
        self,
        variables: PyTree,
        prompts: Prompts,
        features: ImageFeatures | None,
        key: Array,
        config: GenerateConfig,
    ) -> Generated:
        """Samples as `jaxreward.models.generate.generate` does, and gives the same completions.

        Args:
          variables: {'params': ..., and 'lora': ... where there is one}.
          prompts: [B, T], any B and T that the buckets hold.
          features: what `prompts.image_rows` refers to; None for text alone.
          key: of the sampling.
          config: how to sample.

        Returns:
          NumPy arrays, [B * n, N].

        Raises:
          ModelError: for prompts that are longer than the largest bucket, empty or without their images.
          ConfigError: for a token id outside of the vocabulary.
        """
        self._check(prompts, features, config.stop_tokens + config.forbidden_tokens)
        limit = config.max_new_tokens
        config = config.replace(
            temperature=np.float32(config.temperature), max_new_tokens=self.buckets.fit("new_tokens", limit)
        )
        parts = []
        for first, size, part in self.parts(prompts):
            state = self._prefill(variables, part, features, key, config, np.int32(first * config.samples))
            state = self._decode(variables, state, config, np.int32(limit))
            rows = size * config.samples
            found = (state.tokens, state.log_probabilities, state.lengths, state.stopped)
            parts.append([np.asarray(x)[:rows] for x in found])
        tokens, logs, lengths, stopped = (np.concatenate(x) for x in zip(*parts, strict=True))
        return Generated(tokens[:, :limit], logs[:, :limit], lengths, stopped)

    def log_probabilities(
        self,
        variables: PyTree,
        prompts: Prompts,
        features: ImageFeatures | None,
        tokens: np.ndarray,
        where: np.ndarray,
        *,
        temperature: float = 1.0,
        forbidden_tokens: tuple[int, ...] = (),
        chunk: int = 32,
    ) -> np.ndarray:
        """As `jaxreward.models.generate.log_probabilities`, padded to buckets.

        Returns:
          NumPy float32 [R, N].

        Raises:
          ModelError: as for `generate`.
          ConfigError: for a token id outside of the vocabulary, or numbers of rows that do not match.
        """
        self._check(prompts, features, forbidden_tokens)
        check_temperature(temperature)
        tokens, where = np.asarray(tokens, np.int32), np.asarray(where, bool)
        self._check_tokens(tokens.ravel())
        (rows, count), batch = tokens.shape, prompts.tokens.shape[0]
        if count == 0 or rows % batch or where.shape != tokens.shape:
            raise ConfigError(
                f"completions of shape {tokens.shape} and where of {where.shape} for {batch} prompts found; "
                "expected one shape [R, N], R a multiple of the prompts and N at least 1"
            )
        samples, longest = rows // batch, self.buckets.fit("new_tokens", count)
        found = []
        for first, size, part in self.parts(prompts):
            mine = slice(first * samples, (first + size) * samples)
            missing = ((0, (part.tokens.shape[0] - size) * samples), (0, longest - count))
            values = self._log_probabilities(
                variables,
                part,
                features,
                np.pad(tokens[mine], missing),
                np.pad(where[mine], missing),
                temperature=np.float32(temperature),
                forbidden_tokens=forbidden_tokens,
                chunk=chunk,
            )
            found.append(np.asarray(values)[: size * samples, :count])
        return np.concatenate(found)

    def _check(self, prompts: Prompts, features: ImageFeatures | None, tokens: tuple[int, ...]) -> None:
        check_prompts(prompts, features)
        self._check_tokens(np.asarray(tokens, np.int64))
        self._check_tokens(np.asarray(prompts.tokens)[np.asarray(prompts.where)])

    def _check_tokens(self, tokens: np.ndarray) -> None:
        wrong = tokens[(tokens < 0) | (tokens >= self.model.decoder_config.vocabulary)]
        if wrong.size:
            raise ConfigError(
                f"token id {wrong[0]} found; expected ids below {self.model.decoder_config.vocabulary}. "
                "Is the tokenizer that of the model?"
            )

    def parts(self, prompts: Prompts) -> Iterator[tuple[int, int, Prompts]]:
        """Yields (number of the first prompt, how many, those prompts padded to buckets)."""
        most = self.buckets.prompts[-1]
        for first in range(0, prompts.tokens.shape[0], most):
            part = Prompts(
                tokens=np.asarray(prompts.tokens)[first : first + most],
                where=np.asarray(prompts.where)[first : first + most],
                positions=np.asarray(prompts.positions)[:, first : first + most],
                next_position=np.asarray(prompts.next_position)[first : first + most],
                image_rows=np.asarray(prompts.image_rows)[first : first + most],
            )
            size, width = part.tokens.shape
            used = width - int(np.argmax(part.where.any(axis=0)))
            batch, length = self.buckets.fit("prompts", size), self.buckets.fit("prompt_tokens", used)
            yield first, size, pad_prompts(part, batch, length)

"""Stage 1, "rank": trains a compact frame ranker from videos (RTA, sections 3.2 and A.2)."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from jaxreward.agents import grpo
from jaxreward.correlation import soft_spearman, spearman
from jaxreward.data.clips import ClipConfig, Clips, sample_clips
from jaxreward.errors import ConfigError, DataError, StorageError
from jaxreward.models.frame_ranker import FrameRanker, FrameRankerConfig
from jaxreward.scorers.base import Scorer
from jaxreward.scorers.compact_ranker import CompactRanker
from jaxreward.types import Array, PyTree

OBJECTIVES = ("grpo", "soft_spearman", "pairwise", "plackett_luce")

Render = Callable[[Array], Array]  # compact frames [Q, K, ...] -> uint8 pixels [Q, K, H, W, C]


class Videos(NamedTuple):
    """Videos as rectangular arrays: what `VideoSet.padded` returns, under names."""

    frames: Array | np.ndarray  # uint8 [V, T, H, W, C] pixels, or what a `render` function turns into them
    lengths: Array | np.ndarray  # int32 [V], frames in each video, at least 1
    weights: Array | np.ndarray  # float32 [V], how often each video is drawn, relative to the others


@dataclasses.dataclass(frozen=True)
class RankConfig:
    """How a ranker is trained.

    The defaults are for a small network from random weights; RTA's table 5 (a 7-billion-parameter
    model) has group 4, 1 epoch, learning rate 1e-5, 16 clips a step, 200 to 400 steps.

    Attributes:
      steps: batches of clips.
      batch_size: clips in a batch.
      objective: 'grpo' (the paper's: policy gradient on the Spearman correlation of sampled rankings),
        'soft_spearman' (gradient of a smoothed Spearman correlation), 'pairwise' (logistic loss on
        every pair of frames), 'plackett_luce' (maximum likelihood of the true ranking).
      epochs: gradient steps on each batch.
      learning_rate: Adam's step size after warm-up.
      warmup_steps: batches over which the step size rises linearly from 0.
      decay: 'constant' (the paper's) or 'cosine' down to 0 at the last step.
      max_grad_norm: gradients are scaled down to this global norm.
      group_size: rankings sampled for each clip (GRPO).
      clip: the ratio's clipping parameter (GRPO).
      divide_by_std: divide advantages by the group's standard deviation (GRPO).
      kl_reference: the policy that the KL is measured against (GRPO). 'previous', the policy before each
        step, makes the KL a trust region (with one epoch it is always 0). 'initial' keeps a pretrained model
        near what it was; a network that starts from random weights must leave them, since from a uniform to
        a sharp ranking of 14 frames there are 1.8 nats per frame.
      kl_coefficient: initial weight of the KL; 0 turns it off (GRPO).
      kl_target: nats per ranked frame to which the weight adapts (RTA A.4: 0.1); None keeps the weight.
      softness: temperature of the sigmoid soft ranks, in logits ('soft_spearman').
      clips: how clips are cut from videos.
      evaluate_every: steps between evaluations and callbacks; the last step always has one.
      evaluation_clips: clips drawn from each held-out set, the same ones at every evaluation.
    """

    steps: int = 200
    batch_size: int = 32
    objective: Literal["grpo", "soft_spearman", "pairwise", "plackett_luce"] = "grpo"
    epochs: int = 2
    learning_rate: float = 1e-3
    warmup_steps: int = 10
    decay: Literal["constant", "cosine"] = "constant"
    max_grad_norm: float = 1.0
    group_size: int = 8
    clip: float = 0.2
    divide_by_std: bool = True
    kl_reference: Literal["previous", "initial"] = "previous"
    kl_coefficient: float = 0.05
    kl_target: float | None = 0.1
    softness: float = 0.5
    clips: ClipConfig = dataclasses.field(default_factory=ClipConfig)
    evaluate_every: int = 25
    evaluation_clips: int = 256

    def __post_init__(self):
        """Refuses values that cannot train (ConfigError)."""
        for name in ("steps", "batch_size", "epochs", "evaluate_every", "evaluation_clips"):
            if getattr(self, name) < 1:
                raise ConfigError(f"rank.{name}: {getattr(self, name)} found, at least 1 expected")
        if self.group_size < 2:
            raise ConfigError(f"rank.group_size: {self.group_size} found; a group needs at least 2 rankings")
        for name, allowed in (
            ("objective", OBJECTIVES),
            ("decay", ("constant", "cosine")),
            ("kl_reference", ("previous", "initial")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"rank.{name}: {getattr(self, name)!r} found, one of {allowed} expected")


@struct.dataclass
class RankState:
    """All that training needs in order to go on exactly where it was."""

    params: PyTree  # of the FrameRanker
    reference: PyTree  # initial parameters if the KL is measured against them, else ()
    optimizer: PyTree  # Optax state; it also counts for the schedule
    kl_coefficient: Array  # float32 []
    key: Array  # typed key, split once a step
    step: Array  # int32 [], batches so far


class RankResult(NamedTuple):
    """What training returns."""

    params: PyTree  # of the FrameRanker after the last step
    model: FrameRankerConfig  # the structure, with frame_shape filled in
    history: list[dict[str, float]]  # one record an evaluation: 'step', training means, 'rho/<set>'
    heldout_rho: dict[str, float]  # the last record's correlation on each held-out set, in [-1, 1]
    state: RankState  # for going on


def train_ranker(
    config: RankConfig,
    model: FrameRankerConfig,
    train: Videos,
    heldout: Mapping[str, Videos],
    key: Array,
    callback: Callable[[RankState, dict[str, float]], None] | None = None,
    *,
    render: Render | None = None,
    state: RankState | None = None,
) -> RankResult:
    """Trains a ranker on shuffled clips and evaluates it on held-out videos.

    One jitted program a step, driven from Python: gradients of convolutions inside a scan are many times
    slower on CPU. Nothing is fetched from the device between evaluations.

    Args:
      config: how to train.
      model: what to train; a `frame_shape` of None is filled in from the videos.
      train: videos to learn from.
      heldout: named sets to evaluate on, for example unseen videos of the same levels and videos of
        unseen levels.
      key: a typed key; the same key and inputs give the same result, bit for bit on CPU.
      callback: called after every evaluation with the state and that evaluation's record; it may save
        the state. The callback's state stays valid.
      render: turns sampled frames into pixels, where `frames` of the videos are compact.
      state: a state to go on from, with the same config, model, videos and key; the result then equals
        that of an uninterrupted run whose evaluations fall on the same steps.

    Returns:
      See RankResult.

    Raises:
      DataError: if a set of videos is empty or has unsuitable shapes or dtypes.
    """
    train = check_videos("training videos", train)
    heldout = {name: check_videos(f"held-out set {name!r}", videos) for name, videos in heldout.items()}
    init_key, evaluation_key = jax.random.split(key)
    model = _with_frame_shape(model, train, render)
    step = make_rank_step(config, model, render)
    if state is None:
        state = init_rank_state(config, model, init_key)
    scorer = CompactRanker(model)
    history, pending = [], []
    while (done := int(state.step)) < config.steps:
        until = min((done // config.evaluate_every + 1) * config.evaluate_every, config.steps)
        for _ in range(done, until):
            state, metrics = step(state, train)
            pending.append(metrics)
        record = {"step": float(until)}
        record |= {
            name: float(np.mean([row[name] for row in jax.device_get(pending)])) for name in pending[0]
        }
        pending.clear()
        for name, videos in heldout.items():
            record[f"rho/{name}"] = heldout_rho(
                scorer, state.params, videos, evaluation_key,
                clips=config.evaluation_clips, clip_config=config.clips, render=render,
            )  # fmt: skip
        history.append(record)
        if callback is not None:
            callback(state, record)
    last = history[-1] if history else {}
    final = {name: last[f"rho/{name}"] for name in heldout if f"rho/{name}" in last}
    return RankResult(state.params, model, history, final, state)


def init_rank_state(config: RankConfig, model: FrameRankerConfig, key: Array) -> RankState:
    """Makes random parameters and a fresh optimiser; `model.frame_shape` must be set."""
    params_key, train_key = jax.random.split(key)
    params = CompactRanker(model).init(params_key, (*model.frame_shape, model.channels))
    needs_reference = config.objective == "grpo" and config.kl_reference == "initial"
    return RankState(
        params=params,
        reference=params if needs_reference else (),
        optimizer=_optimizer(config).init(params),
        kl_coefficient=jnp.float32(config.kl_coefficient),
        key=train_key,
        step=jnp.int32(0),
    )


@functools.lru_cache(maxsize=16)  # going on in the same process compiles nothing anew
def make_rank_step(
    config: RankConfig, model: FrameRankerConfig, render: Render | None = None
) -> Callable[[RankState, Videos], tuple[RankState, dict[str, Array]]]:
    """Builds the jitted function (state, videos) -> (state, metrics) of one batch of clips.

    The metrics are float32 scalars: 'reward' and 'reward_std' (Spearman correlation, over the batch; for
    GRPO that of the sampled rankings, else that of the scores), 'loss', 'grad_norm', and for GRPO also
    'kl' (nats per ranked frame), 'kl_coefficient', 'clip_fraction' and 'zero_variance_groups'.
    """
    network = FrameRanker(model)
    optimizer = _optimizer(config)

    def logits_of(params: PyTree, clips: Clips) -> Array:
        return network.apply(params, clips.frames, clips.where)[:, 1:]

    @jax.jit
    def step(state: RankState, videos: Videos) -> tuple[RankState, dict[str, Array]]:
        key, clip_key, ranking_key = jax.random.split(state.key, 3)
        clips = sample_clips(clip_key, *videos, config.batch_size, config.clips)
        if render is not None:
            clips = clips.replace(frames=render(clips.frames))
        if config.objective == "grpo":
            loss = _grpo_objective(config, logits_of, state, clips, ranking_key)
        else:
            loss = _supervised_objective(config, logits_of, clips)
        params, optimizer_state, rows = state.params, state.optimizer, []
        for _ in range(config.epochs):
            (value, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(params)
            updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
            params = optax.apply_updates(params, updates)
            rows.append(metrics | {"loss": value, "grad_norm": optax.tree.norm(gradients)})
        metrics = jax.tree.map(lambda *values: jnp.stack(values).mean(), *rows)
        coefficient = state.kl_coefficient
        if config.objective == "grpo":
            metrics["kl_coefficient"] = coefficient
            if config.kl_target is not None and config.kl_coefficient > 0:
                coefficient = grpo.adapt_kl_coefficient(coefficient, rows[-1]["kl"], config.kl_target)
        state = state.replace(
            params=params, optimizer=optimizer_state, kl_coefficient=coefficient, key=key, step=state.step + 1
        )
        return state, metrics

    return step


def heldout_rho(
    scorer: Scorer,
    params: PyTree,
    videos: Videos,
    key: Array,
    *,
    clips: int = 256,
    clip_config: ClipConfig | None = None,
    render: Render | None = None,
    task: str = "",
) -> float:
    """The mean Spearman correlation of a scorer's values with time, over random clips of a set of videos.

    Tied values are credited with the expectation over their random order, so that a constant scorer
    gets 0; an answer that cannot be read counts as -1 (RTA, section 3.2).

    Args:
      scorer: any scorer; one that is not jittable is called as it is.
      params: its parameters.
      videos: the set.
      key: a typed key; the same key draws the same clips.
      clips: how many clips are drawn.
      clip_config: how they are cut; None for the default.
      render: turns sampled frames into pixels, where the videos' frames are compact.
      task: the task sentence, for scorers that read one.

    Returns:
      A float in [-1, 1].
    """
    rho, _ = judge_scorer(
        scorer, params, videos, key, clips=clips, clip_config=clip_config, render=render, task=task
    )
    return rho


def judge_scorer(
    scorer: Scorer,
    params: PyTree,
    videos: Videos,
    key: Array,
    *,
    clips: int = 256,
    clip_config: ClipConfig | None = None,
    render: Render | None = None,
    task: str = "",
) -> tuple[float, float]:
    """As `heldout_rho`; also the share of answers that could not be read, in [0, 1]."""
    clip_key, score_key = jax.random.split(key)
    context = scorer.prepare(params, task)
    drawn = draw_clips(clip_key, videos, clips, clip_config or ClipConfig(), render)
    score = _jitted_score(scorer) if scorer.jittable else scorer.score
    scores = score(params, context, drawn.frames, drawn.where, score_key)
    rewards = clip_rewards(scores.values[:, 1:], scores.valid, drawn.position[:, 1:], drawn.where[:, 1:])
    return float(rewards.mean()), float(1.0 - scores.valid.mean())


@jax.jit
def clip_rewards(values: Array, valid: Array, position: Array, where: Array) -> Array:
    """Stage 1's reward of an answer (RTA, section 3.2): its Spearman correlation with time.

    Args:
      values: [..., n], what the answer gives each frame, higher for later; the anchor apart.
      valid: bool [...], False for an answer that could not be read.
      position: int32 [..., n], each frame's place in its video.
      where: bool [..., n], False for slots that hold no frame.

    Returns:
      float32 [...] in [-1, 1]: 0 where the correlation is undefined, -1 where the answer is not valid; ties
      are credited with the expectation over their random order.
    """
    return jnp.where(valid, spearman(values, position, where=where), -1.0)


def transfer_matrix(
    scorers: Mapping[str, tuple[Scorer, PyTree]],
    sets: Mapping[str, Videos],
    key: Array,
    *,
    clips: int = 256,
    clip_config: ClipConfig | None = None,
    render: Render | None = None,
) -> np.ndarray:
    """How well each scorer orders each set of videos (RTA, figure 2).

    Args:
      scorers: R named pairs (scorer, parameters).
      sets: S named sets of videos; every scorer sees the same clips of a set.
      key: a typed key.
      clips: clips drawn from each set.
      clip_config: how they are cut; None for the default.
      render: turns sampled frames into pixels, where the videos' frames are compact.

    Returns:
      float64 [R, S], mean Spearman correlations in [-1, 1]; rows and columns in the order of the mappings.
    """
    keys = jax.random.split(key, len(sets))
    return np.array(
        [
            [
                heldout_rho(scorer, params, videos, k, clips=clips, clip_config=clip_config, render=render)
                for k, videos in zip(keys, sets.values(), strict=True)
            ]
            for scorer, params in scorers.values()
        ]
    )


def plot_transfer_matrix(
    matrix: np.ndarray, rows: list[str], columns: list[str], path: str | os.PathLike
) -> None:
    """Draws a transfer matrix as a heat map, PNG.

    Args:
      matrix: float [R, S] in [-1, 1], as `transfer_matrix` returns it.
      rows: R names, what the scorers were trained on.
      columns: S names, what they were evaluated on.
      path: the file to write.

    Raises:
      StorageError: if the file cannot be written.
    """
    # Agg explicitly and no pyplot: no display is needed and no global figure is left behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.5 + 0.7 * len(columns), 1.6 + 0.5 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu", aspect="auto")
    axes.set_xticks(range(len(columns)), columns, rotation=45, ha="right")
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlabel="evaluated on", ylabel="trained on")
    for (row, column), value in np.ndenumerate(matrix):
        colour = "white" if abs(value) > 0.6 else "black"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour)
    figure.colorbar(image, label="Spearman correlation with time")
    try:
        figure.savefig(pathlib.Path(path), format="png", dpi=120)
    except OSError as error:
        raise StorageError(f"transfer matrix: {path} cannot be written ({error.strerror})") from error


def _grpo_objective(config: RankConfig, logits_of: Callable, state: RankState, clips: Clips, key: Array):
    """Samples and rewards a group of rankings a clip; returns params -> (loss, metrics)."""
    ranked, position = clips.where[:, 1:], clips.position[:, 1:]
    old_logits = logits_of(state.params, clips)
    shape = (config.group_size, *ranked.shape)
    where = jnp.broadcast_to(ranked, shape)
    ranking = grpo.sample_ranking(key, jnp.broadcast_to(old_logits, shape), where)
    ranks = grpo.progress_ranks(ranking, where)
    rewards = clip_rewards(ranks, jnp.bool_(True), jnp.broadcast_to(position, shape), where)
    advantages, varies = grpo.group_advantages(rewards, divide_by_std=config.divide_by_std)
    old = grpo.choice_log_probs(old_logits, ranking, ranked)
    reference = old
    if config.kl_reference == "initial":
        reference = grpo.choice_log_probs(logits_of(state.reference, clips), ranking, ranked)

    def loss(params: PyTree) -> tuple[Array, dict[str, Array]]:
        log_probs = grpo.choice_log_probs(logits_of(params, clips), ranking, ranked)
        value, metrics = grpo.grpo_loss(
            log_probs, old, reference, advantages, varies, grpo.choice_mask(where),
            clip=config.clip, kl_coefficient=state.kl_coefficient,
        )  # fmt: skip
        return value, metrics | {"reward": rewards.mean(), "reward_std": rewards.std()}

    return loss


def _supervised_objective(config: RankConfig, logits_of: Callable, clips: Clips):
    """The losses that see the true order; returns params -> (loss, metrics)."""
    where, position = clips.where[:, 1:], clips.position[:, 1:]

    def loss(params: PyTree) -> tuple[Array, dict[str, Array]]:
        logits = logits_of(params, clips)
        if config.objective == "soft_spearman":
            # Sigmoid ranks: isotonic ones have no gradient once scores differ by `strength`.
            rho = soft_spearman(logits, position, strength=config.softness, method="sigmoid", where=where)
            value = 1.0 - rho.mean()
        elif config.objective == "pairwise":
            value = _pairwise_loss(logits, position, where)
        else:
            order = jnp.argsort(jnp.where(where, -position, jnp.iinfo(jnp.int32).max), axis=-1)
            value = -(grpo.log_prob(logits, order, where) / jnp.maximum(where.sum(-1), 1)).mean()
        rho = clip_rewards(jax.lax.stop_gradient(logits), jnp.bool_(True), position, where)
        return value, {"reward": rho.mean(), "reward_std": rho.std()}

    return loss


def _pairwise_loss(logits: Array, position: Array, where: Array) -> Array:
    """Mean of log(1 + exp(score of the earlier - score of the later)) over all pairs of the batch."""
    later = position[:, :, None] > position[:, None, :]
    pairs = later & where[:, :, None] & where[:, None, :]
    losses = jax.nn.softplus(logits[:, None, :] - logits[:, :, None])
    return jnp.where(pairs, losses, 0.0).sum() / jnp.maximum(pairs.sum(), 1)


def _optimizer(config: RankConfig) -> optax.GradientTransformation:
    warmup, total = config.warmup_steps * config.epochs, config.steps * config.epochs
    if config.decay == "cosine":
        after = optax.cosine_decay_schedule(config.learning_rate, max(total - warmup, 1))
    else:
        after = optax.constant_schedule(config.learning_rate)
    schedule = optax.join_schedules(
        [optax.linear_schedule(0.0, config.learning_rate, warmup), after], [warmup]
    )
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(schedule))


@functools.partial(jax.jit, static_argnames=("clips", "clip_config", "render"))
def draw_clips(
    key: Array, videos: Videos, clips: int, clip_config: ClipConfig, render: Render | None = None
) -> Clips:
    """Draws clips of videos, whose frames become pixels by `render` where they are compact."""
    drawn = sample_clips(key, *videos, clips, clip_config)
    return drawn if render is None else drawn.replace(frames=render(drawn.frames))


@functools.lru_cache(maxsize=16)
def _jitted_score(scorer: Scorer) -> Callable:
    return jax.jit(scorer.score)


def check_videos(thing: str, videos: Videos) -> Videos:
    """Brings a triple of arrays to the device after checking it; raises DataError."""
    frames, lengths, weights = (np.shape(array) for array in videos)
    if len(frames) != 5 or not frames[0] or lengths != frames[:1] or weights != frames[:1]:
        raise DataError(
            f"{thing}: frames {list(frames)}, lengths {list(lengths)}, weights {list(weights)} found; "
            "[V, T, H, W, C], [V], [V] expected with V at least 1"
        )
    lengths = np.asarray(videos[1])
    if lengths.min() < 1 or lengths.max() > frames[1]:
        raise DataError(
            f"{thing}: lengths from {lengths.min()} to {lengths.max()} found, within 1..{frames[1]} expected"
        )
    if lengths.max() < 3:
        raise DataError(
            f"{thing}: no video has more than {lengths.max()} frames; an order needs an anchor and 2"
        )
    return Videos(
        jnp.asarray(videos[0]), jnp.asarray(lengths, jnp.int32), jnp.asarray(videos[2], jnp.float32)
    )


def _with_frame_shape(model: FrameRankerConfig, videos: Videos, render: Render | None) -> FrameRankerConfig:
    if model.frame_shape is not None:
        return model
    shape = videos.frames.shape[2:]
    if render is not None:
        sample = jax.ShapeDtypeStruct((1, 1, *shape), videos.frames.dtype)
        shape = jax.eval_shape(render, sample).shape[2:]
    return dataclasses.replace(model, frame_shape=tuple(shape[:2]))

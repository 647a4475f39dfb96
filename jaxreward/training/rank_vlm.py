"""Stage 1, "rank", on a vision-language model: GRPO on the ranks that it writes (RTA, 3.2 and A.4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from jaxreward.agents import supervised_fine_tuning
from jaxreward.agents.token_grpo import TokenGRPO, TokenGRPOConfig, TokenGRPOState
from jaxreward.data.clips import ClipConfig, Clips
from jaxreward.errors import ConfigError
from jaxreward.models import lora
from jaxreward.models.generate import GenerateConfig, Generated
from jaxreward.models.vision_language import ImageFeatures, Prompts
from jaxreward.scorers.chat_model import ChatModel
from jaxreward.scorers.prompts import rank_answer
from jaxreward.scorers.vlm_ranker import VLMRanker
from jaxreward.training.rank import Videos, check_videos, clip_rewards, draw_clips, judge_scorer
from jaxreward.types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class VLMRankConfig:
    """How a vision-language model is taught to rank; the defaults are RTA's (tables 4 and 5).

    Attributes:
      steps: GRPO updates.
      batch_size: clips of one update.
      group_size: answers to each clip.
      temperature: of their sampling.
      grpo: the learner.
      lora: the adapter.
      format_steps: supervised steps before GRPO that teach the form of the answers, with ranks in random
        order; a pretrained model that follows instructions needs none.
      format_learning_rate: Adam's step size in these steps.
      format_descriptions: what stands for a frame's description in these answers.
      clips: how clips are cut from videos.
      evaluate_every: steps between evaluations and callbacks; the last step always has one.
      evaluation_clips: clips drawn from each held-out set, the same ones at every evaluation.
    """

    steps: int = 200
    batch_size: int = 16
    group_size: int = 4
    temperature: float = 1.0
    grpo: TokenGRPOConfig = dataclasses.field(default_factory=TokenGRPOConfig)
    lora: lora.LoRAConfig = dataclasses.field(default_factory=lora.LoRAConfig)
    format_steps: int = 0
    format_learning_rate: float = 1e-4
    format_descriptions: str = "a frame"
    clips: ClipConfig = dataclasses.field(default_factory=ClipConfig)
    evaluate_every: int = 25
    evaluation_clips: int = 64

    def __post_init__(self) -> None:
        """Checks the ranges; raises ConfigError."""
        least = {
            "steps": 1, "batch_size": 1, "group_size": 2, "format_steps": 0,
            "evaluate_every": 1, "evaluation_clips": 1,
        }  # fmt: skip
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ConfigError(f"vlm_rank.{name} is {getattr(self, name)}; expected at least {smallest}")
        for name in ("temperature", "format_learning_rate"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"vlm_rank.{name} is {getattr(self, name)}; expected a number above 0")


@struct.dataclass
class VLMRankState:
    """All that training needs in order to go on exactly where it was; the model itself never changes."""

    learner: TokenGRPOState
    format_optimizer: PyTree  # Optax state of the supervised steps
    key: Array  # typed key; each step's is folded from it
    step: Array  # int32 [], steps so far, those on the format included


class VLMRankResult(NamedTuple):
    """What training returns."""

    adapter: PyTree  # see `jaxreward.models.lora`
    history: list[dict[str, float]]  # one record an evaluation
    heldout_rho: dict[str, float]  # the last record's correlation on each held-out set, in [-1, 1]
    state: VLMRankState  # for going on


class VLMRankTrainer:
    """Teaches a `VLMRanker`'s model; holds what is compiled.

    Attributes:
      config: the settings.
      ranker: asks the model and reads its answers.
      learner: GRPO on its tokens.
    """

    def __init__(self, config: VLMRankConfig, ranker: VLMRanker, task: str = "") -> None:
        """Checks the settings against the model.

        Args:
          config: how to train.
          ranker: whose model learns; its `describe` and `max_new_tokens` decide the form of the answers.
          task: the task sentence.

        Raises:
          ConfigError: an adapter that touches the vision tower, or that fits nothing.
          ModelError: an answer in the right form is longer than `max_new_tokens`.
        """
        chat = ranker.chat_model
        paths = lora.target_paths(chat.model.params, config.lora)
        tower = [path for path in paths if path.startswith("vision")]
        if tower:
            raise ConfigError(
                f"vlm_rank.lora.targets match {tower[0]}; Stage 1 adapts the text decoder alone, as frames "
                "are encoded once: leave the vision tower out"
            )
        self.config, self.ranker, self.task = config, ranker, task
        if config.format_steps:
            self._form(range(1, config.clips.length))
        self.learner = TokenGRPO(
            chat.module, config.lora, config.grpo,
            temperature=config.temperature, forbidden_tokens=chat.forbidden_tokens,
        )  # fmt: skip
        self._format_optimizer = optax.chain(
            optax.clip_by_global_norm(config.grpo.max_grad_norm), optax.adam(config.format_learning_rate)
        )
        self._format_step = supervised_fine_tuning.make_step(
            chat.module, self._format_optimizer, self.learner.variables
        )

    @property
    def total_steps(self) -> int:
        """Supervised steps and GRPO updates."""
        return self.config.format_steps + self.config.steps

    def init(self, key: Array) -> VLMRankState:
        """Starts from an adapter that changes nothing."""
        adapter_key, key = jax.random.split(key)
        adapter = lora.init(adapter_key, self.ranker.chat_model.model.params, self.config.lora)
        # The reference has the same structure throughout, so that a checkpoint of any step can be restored.
        reference = adapter if self.config.format_steps else ()
        return VLMRankState(
            learner=self.learner.init(adapter, reference=reference),
            format_optimizer=self._format_optimizer.init(adapter) if self.config.format_steps else (),
            key=key,
            step=jnp.int32(0),
        )

    def step(
        self, state: VLMRankState, videos: Videos
    ) -> tuple[VLMRankState, dict[str, float], list[dict[str, str | float]]]:
        """One supervised step or one GRPO update.

        Returns:
          (state, metrics, samples). The metrics of an update are those of `TokenGRPO.update`, 'reward' and
          'reward_std' over all answers, 'parse_failures' as a share of them, 'answer_tokens', and
          'truncated', the share of answers that reached the limit; those of a supervised step are
          'format_loss'. Samples are the answers to the first clip, with 'reward' and 'reason' (why it could
          not be read).
        """
        number = int(state.step)
        clip_key, answer_key = jax.random.split(jax.random.fold_in(state.key, number))
        clips = jax.device_get(draw_clips(clip_key, videos, self.config.batch_size, self.config.clips))
        prompts, features = self._ask(clips)
        if number < self.config.format_steps:
            state, metrics = self._teach_format(state, prompts, features, clips, answer_key)
            samples = []
        else:
            state, metrics, samples = self._reinforce(state, prompts, features, clips, answer_key)
        state = state.replace(step=state.step + 1)
        if number + 1 == self.config.format_steps:
            # From here on the KL is measured against the model that knows the format.
            adapter = state.learner.adapter
            state = state.replace(learner=self.learner.init(adapter, reference=adapter))
        return state, metrics, samples

    def variables(self, state: VLMRankState) -> PyTree:
        """The variables of the model as it ranks now."""
        return self.learner.variables(self.ranker.chat_model.model.params, state.learner.adapter)

    def evaluate(self, state: VLMRankState, videos: Videos, key: Array) -> tuple[float, float]:
        """(mean rho, share of answers that cannot be read) on clips of a held-out set; see `judge_scorer`."""
        return judge_scorer(
            self.ranker, self.variables(state), videos, key,
            clips=self.config.evaluation_clips, clip_config=self.config.clips, task=self.task,
        )  # fmt: skip

    def _ask(self, clips: Clips) -> tuple[Prompts, ImageFeatures | None]:
        """One chat for each clip, with its frames."""
        counts = clips.where.sum(1) - 1
        chats = [self.ranker.ask(self.task, int(count)) for count in counts]
        frames = np.concatenate([own[: count + 1] for own, count in zip(clips.frames, counts, strict=True)])
        return self._chat.prompts(self._chat.model.params, chats, frames)

    @property
    def _chat(self) -> ChatModel:
        return self.ranker.chat_model

    def _form(self, *orders: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of answers with these ranks, int32 [B, N], and where they are."""
        describe = self.config.format_descriptions if self.ranker.config.describe else None
        answers = [rank_answer(order, description=describe) for order in orders]
        return self._chat.answer_tokens(answers, self.ranker.config.max_new_tokens)

    def _teach_format(self, state, prompts, features, clips: Clips, key: Array):
        orders = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        tokens, where = self._form(*(1 + orders.permutation(int(n)) for n in clips.where.sum(1) - 1))
        adapter, optimizer, loss = self._format_step(
            state.learner.adapter, state.format_optimizer, self._chat.model.params,
            prompts, features, tokens, where,
        )  # fmt: skip
        learner = state.learner.replace(adapter=adapter)
        return state.replace(learner=learner, format_optimizer=optimizer), {"format_loss": float(loss)}

    def _reinforce(self, state, prompts, features, clips: Clips, key: Array):
        config, chat = self.config, self._chat
        sampling = GenerateConfig(
            config.temperature, self.ranker.config.max_new_tokens, config.group_size,
            chat.stop_tokens, chat.forbidden_tokens,
        )  # fmt: skip
        generated = chat.generator.generate(self.variables(state), prompts, features, key, sampling)
        texts = chat.texts(generated)
        counts = np.repeat(clips.where.sum(1) - 1, config.group_size)
        parsed = [self.ranker.parse(text, int(count)) for text, count in zip(texts, counts, strict=True)]
        valid = np.array([one.ok for one in parsed])
        values = np.zeros((len(parsed), clips.where.shape[1] - 1), np.float32)
        for row, one in zip(values, parsed, strict=True):
            row[: len(one.values)] = one.values
        position, where = (
            np.repeat(x[:, 1:], config.group_size, axis=0) for x in (clips.position, clips.where)
        )
        rewards = np.asarray(clip_rewards(values, valid, position, where))
        learner, metrics = self.learner.update(
            state.learner, chat.model.params, prompts, features, _shortened(generated, chat),
            rewards.reshape(-1, config.group_size),
        )  # fmt: skip
        metrics |= {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "parse_failures": float(1.0 - valid.mean()),
            "answer_tokens": float(generated.lengths.mean()),
            "truncated": float(1.0 - generated.stopped.mean()),
        }
        samples = [
            {"answer": text, "reward": float(reward), "reason": one.reason}
            for text, reward, one in zip(
                texts[: config.group_size], rewards, parsed[: config.group_size], strict=False
            )
        ]
        return state.replace(learner=learner), metrics, samples


Callback = Callable[[VLMRankState, dict[str, float], list[dict[str, str | float]]], None]


def train_vlm_ranker(
    config: VLMRankConfig,
    ranker: VLMRanker,
    train: Videos,
    heldout: Mapping[str, Videos],
    key: Array,
    callback: Callback | None = None,
    *,
    after_step: Callable[[VLMRankState, dict[str, float]], None] | None = None,
    task: str = "",
    state: VLMRankState | None = None,
    trainer: VLMRankTrainer | None = None,
) -> VLMRankResult:
    """Teaches a vision-language model to rank the frames of videos, through a LoRA.

    Args:
      config: how to train.
      ranker: whose model learns; the model's own parameters stay as they are.
      train: videos to learn from, RGB.
      heldout: named sets to evaluate on.
      key: a typed key.
      callback: called after every evaluation with the state, that evaluation's record and sample answers; it
        may save the state.
      after_step: called after every other step with the state and the step's metrics; it may save the state,
        too.
      task: the task sentence.
      state: a state to go on from, with the same arguments; the result then equals that of an uninterrupted
        run whose evaluations fall on the same steps.
      trainer: of the same config, ranker and task, whose compiled programs are used.

    Returns:
      See VLMRankResult. A record holds 'step', means of the metrics of `VLMRankTrainer.step` since the last
      one (or since `state`), 'rho/<set>' and 'parse_failures/<set>'; the first record, of step 0, is the
      model as it came.

    Raises:
      DataError: a set of videos is empty or has unsuitable shapes.
      ConfigError: an adapter that cannot be trained.
      ModelError: frames or prompts that the model cannot read.
    """
    train = check_videos("training videos", train)
    heldout = {name: check_videos(f"held-out set {name!r}", videos) for name, videos in heldout.items()}
    trainer = trainer or VLMRankTrainer(config, ranker, task)
    init_key, evaluation_key = jax.random.split(key)
    if state is None:
        state = trainer.init(init_key)
    history = []

    def evaluate(state: VLMRankState, metrics: list[dict[str, float]], samples: list) -> None:
        record = {"step": float(state.step)}
        for name in metrics[-1] if metrics else ():
            record[name] = float(np.mean([row[name] for row in metrics if name in row]))
        for name, videos in heldout.items():
            rho, failures = trainer.evaluate(state, videos, evaluation_key)
            record |= {f"rho/{name}": rho, f"parse_failures/{name}": failures}
        history.append(record)
        if callback is not None:
            callback(state, record, samples)

    if int(state.step) == 0:
        evaluate(state, [], [])
    pending = []
    while (done := int(state.step)) < trainer.total_steps:
        state, metrics, samples = trainer.step(state, train)
        pending.append(metrics)
        if _is_due(done + 1, config):
            evaluate(state, pending, samples)
            pending = []
        elif after_step is not None:
            after_step(state, metrics)
    last = history[-1] if history else {}
    final = {name: last[f"rho/{name}"] for name in heldout if f"rho/{name}" in last}
    return VLMRankResult(state.learner.adapter, history, final, state)


def _is_due(done: int, config: VLMRankConfig) -> bool:
    """Whether an evaluation follows step `done`: after the format, every so often, and at the end."""
    updates = done - config.format_steps
    if updates < 0:
        return done % config.evaluate_every == 0
    return updates % config.evaluate_every == 0 or updates == config.steps


def _shortened(generated: Generated, chat: ChatModel) -> Generated:
    """Answers without the columns that none of them uses, up to a bucket, so that few shapes are compiled."""
    limit = generated.tokens.shape[1]
    width = min(chat.generator.buckets.fit("new_tokens", max(int(generated.lengths.max()), 1)), limit)
    return generated.replace(
        tokens=generated.tokens[:, :width], log_probabilities=generated.log_probabilities[:, :width]
    )

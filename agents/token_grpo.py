"""GRPO on the tokens that a vision-language model writes; only a LoRA is trained (RTA, section 3.2 and A.4).

The mathematics is that of `grpo`, which the compact ranker uses as well. Answers and their rewards come from
the caller; gradients are accumulated over minibatches, so that memory holds a few answers at a time and the
step is still that of the whole batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from jaxreward.agents import grpo
from jaxreward.errors import ConfigError
from jaxreward.models import lora
from jaxreward.models.generate import Generated, log_probabilities
from jaxreward.models.vision_language import ImageFeatures, Prompts, VisionLanguageModel, with_remat
from jaxreward.types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class TokenGRPOConfig:
    """How a language model learns from the rewards of its answers; the defaults are RTA's (table 5).

    Attributes:
      learning_rate: Adam's step size after warm-up.
      warmup_steps: updates over which the step size rises linearly from 0.
      max_grad_norm: gradients are scaled down to this global norm.
      epochs: gradient steps on each batch.
      minibatch_size: prompts, with all their answers, whose gradient is computed at a time; the rest of the
        batch is accumulated.
      clip: the ratio's clipping parameter; the paper does not give it.
      divide_by_std: divide advantages by the group's standard deviation.
      kl_coefficient: initial weight of the KL to the reference; 0 turns it off and saves its forward pass.
      kl_target: nats per token to which the weight adapts; None keeps the weight.
      remat: recompute activations in the backward pass, for memory.
    """

    learning_rate: float = 1e-5
    warmup_steps: int = 10
    max_grad_norm: float = 1.0
    epochs: int = 1
    minibatch_size: int = 1
    clip: float = 0.2
    divide_by_std: bool = True
    kl_coefficient: float = 0.05
    kl_target: float | None = 0.1
    remat: bool = True

    def __post_init__(self) -> None:
        """Checks the ranges; raises ConfigError."""
        for name in ("epochs", "minibatch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"grpo.{name} is {getattr(self, name)}; expected at least 1")
        for name in ("learning_rate", "max_grad_norm", "clip"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"grpo.{name} is {getattr(self, name)}; expected a number above 0")
        for name in ("warmup_steps", "kl_coefficient"):
            if getattr(self, name) < 0:
                raise ConfigError(f"grpo.{name} is {getattr(self, name)}; expected at least 0")
        if self.kl_target is not None and not self.kl_target > 0:
            raise ConfigError(f"grpo.kl_target is {self.kl_target}; expected a number above 0, or None")


@struct.dataclass
class TokenGRPOState:
    """What learning needs in order to go on; nothing here has the size of the model."""

    adapter: PyTree  # see `jaxreward.models.lora`
    reference: PyTree  # adapter of the policy to stay close to; () is the model without an adapter
    optimizer: PyTree  # Optax state of the adapter alone
    kl_coefficient: Array  # float32 []


@struct.dataclass
class _Answers:
    """b prompts with n answers each; rows as in `Generated`."""

    prompts: Prompts  # [b, T]
    tokens: Array  # int32 [b * n, N]
    where: Array  # bool [b * n, N]
    recorded: Array  # float32 [b * n, N], log-probabilities when the answers were sampled
    old: Array  # float32 [b * n, N], log-probabilities before the first epoch, by the learner's own pass
    advantages: Array  # float32 [b * n]
    weights: Array  # float32 [b * n], of each answer in the objective; 1 in all over the batch, or 0


class TokenGRPO:
    """Learns a LoRA from groups of answers and their rewards.

    Attributes:
      config: the settings.
      compilations: programs compiled so far.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        lora_config: lora.LoRAConfig,
        config: TokenGRPOConfig,
        *,
        temperature: float,
        forbidden_tokens: tuple[int, ...] = (),
    ) -> None:
        """Compiles nothing yet.

        Args:
          model: its module.
          lora_config: of the adapter; it must leave the vision tower alone, whose features come from outside.
          config: the settings.
          temperature: at which the answers are sampled.
          forbidden_tokens: ids outside of the distribution that they are sampled from.

        Raises:
          ConfigError: a temperature of 0, at which nothing can be learnt.
        """
        if not temperature > 0:
            raise ConfigError(
                f"temperature {temperature} found; GRPO needs answers that differ: expected a number above 0"
            )
        self.config, self._lora = config, lora_config
        self._model = with_remat(model) if config.remat else model
        self._sampling = {"temperature": temperature, "forbidden_tokens": forbidden_tokens}
        schedule = optax.join_schedules(
            [
                optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps * config.epochs),
                optax.constant_schedule(config.learning_rate),
            ],
            [config.warmup_steps * config.epochs],
        )
        self._optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(schedule))
        self.compilations = 0
        self._gradients = jax.jit(self._traced_gradients)
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        self._apply = jax.jit(self._traced_apply)

    def init(self, adapter: PyTree, *, reference: PyTree = ()) -> TokenGRPOState:
        """Starts to learn from an adapter.

        Args:
          adapter: from `lora.init`, or one that has been warmed up.
          reference: adapter of the policy that the KL is measured against; () is the model itself.
        """
        return TokenGRPOState(
            adapter=adapter,
            reference=reference,
            optimizer=self._optimizer.init(adapter),
            kl_coefficient=jnp.float32(self.config.kl_coefficient),
        )

    def variables(self, variables: PyTree, adapter: PyTree) -> PyTree:
        """The model's variables with an adapter; () leaves the model as it is."""
        return {**variables, **lora.collection(adapter, self._lora)} if adapter else variables

    def update(
        self,
        state: TokenGRPOState,
        variables: PyTree,
        prompts: Prompts,
        features: ImageFeatures | None,
        generated: Generated,
        rewards: np.ndarray,
    ) -> tuple[TokenGRPOState, dict[str, float]]:
        """Takes `epochs` gradient steps on a batch of answers.

        Args:
          state: of the learner.
          variables: {'params': ...} of the model, which stays as it is.
          prompts: [B, T], padded on the left; one shape for all batches keeps compilations few.
          features: what `prompts.image_rows` refers to; None for text alone.
          generated: the answers, n to each prompt, from the policy of `state`.
          rewards: float32 [B, n].

        Returns:
          (state, metrics): 'loss', 'grad_norm', 'kl' (nats per token), 'kl_coefficient', 'clip_fraction',
          'zero_variance_groups', and 'log_prob_gap', the mean absolute difference per token between the
          log-probabilities recorded by the sampler and those of the learner's pass: rounding, or a fault.
        """
        config = self.config
        rewards = np.asarray(rewards, np.float32)
        advantages, varies = grpo.group_advantages(rewards.T, divide_by_std=config.divide_by_std)
        advantages, varies = np.asarray(advantages).T.ravel(), np.repeat(np.asarray(varies), rewards.shape[1])
        where = np.asarray(generated.where)
        answers = _Answers(
            prompts=prompts,
            tokens=np.asarray(generated.tokens),
            where=where,
            recorded=np.asarray(generated.log_probabilities),
            old=np.zeros(where.shape, np.float32),
            advantages=advantages,
            weights=(varies / max(varies.sum(), 1)).astype(np.float32),
        )
        parts = list(_minibatches(answers, rewards.shape[1], config.minibatch_size))
        count, history = float(len(where)), []
        for epoch in range(config.epochs):
            total = None
            for number, part in enumerate(parts):
                gradients, sums, log_probs = self._gradients(
                    state, variables, part, features, np.float32(count), np.bool_(epoch == 0)
                )
                found = (gradients, sums)
                total = found if total is None else self._add(total, found)
                if epoch == 0 and config.epochs > 1:
                    parts[number] = part.replace(old=log_probs)
            state, metrics = self._apply(state, *total)
            history.append(metrics)
        rows = jax.device_get(history)
        metrics = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
        metrics["log_prob_gap"] = float(rows[0]["log_prob_gap"])
        metrics["zero_variance_groups"] = float(1.0 - varies.mean())
        return state, metrics

    def _traced_gradients(self, state, variables, part: _Answers, features, count, is_first):
        """Gradients and sums of one minibatch, whose sums over the batch are means over the batch."""
        self.compilations += 1
        config, given = self.config, (part.prompts, features, part.tokens, part.where)
        reference = None
        if config.kl_coefficient > 0:
            reference = log_probabilities(
                self._model, self.variables(variables, state.reference), *given, **self._sampling
            )

        def loss(adapter: PyTree) -> tuple[Array, tuple[dict[str, Array], Array]]:
            adapted = self.variables(variables, adapter)
            log_probs = log_probabilities(self._model, adapted, *given, **self._sampling)
            old = jnp.where(is_first, jax.lax.stop_gradient(log_probs), part.old)
            objective, clipped = grpo.clipped_objective(
                log_probs, old, part.advantages, part.where, clip=config.clip
            )
            kl = jnp.float32(0.0)
            if reference is not None:
                kl = grpo.kl_estimate(log_probs, reference, part.where).sum() / count
            value = state.kl_coefficient * kl - jnp.sum(part.weights * objective)
            lengths = jnp.maximum(part.where.sum(-1), 1)
            gap = jnp.where(part.where, jnp.abs(log_probs - part.recorded), 0.0).sum(-1) / lengths
            sums = {
                "loss": value,
                "kl": kl,
                "clip_fraction": jnp.sum(part.weights * clipped),
                "log_prob_gap": gap.sum() / count,
            }
            return value, (sums, log_probs)

        gradients, (sums, log_probs) = jax.grad(loss, has_aux=True)(state.adapter)
        return gradients, sums, log_probs

    def _traced_apply(self, state: TokenGRPOState, gradients: PyTree, sums: dict[str, Array]):
        config = self.config
        updates, optimizer = self._optimizer.update(gradients, state.optimizer, state.adapter)
        metrics = sums | {"grad_norm": optax.tree.norm(gradients), "kl_coefficient": state.kl_coefficient}
        coefficient = state.kl_coefficient
        if config.kl_target is not None and config.kl_coefficient > 0:
            coefficient = grpo.adapt_kl_coefficient(coefficient, sums["kl"], config.kl_target)
        state = state.replace(
            adapter=optax.apply_updates(state.adapter, updates),
            optimizer=optimizer,
            kl_coefficient=coefficient,
        )
        return state, metrics


def _minibatches(answers: _Answers, samples: int, size: int) -> Iterator[_Answers]:
    """Cuts a batch into parts of `size` prompts; the last is filled up with prompts of weight 0."""
    batch = answers.prompts.tokens.shape[0]
    size = min(size, batch)
    for first in range(0, batch, size):
        chosen = np.arange(first, min(first + size, batch))
        missing = size - len(chosen)
        # A repeated prompt whose answers have no tokens adds nothing to any sum.
        chosen = np.concatenate([chosen, np.repeat(chosen[-1:], missing)])
        rows = (chosen[:, None] * samples + np.arange(samples)).ravel()
        exists = np.repeat(np.arange(size) < size - missing, samples)
        prompts = answers.prompts
        yield _Answers(
            prompts=Prompts(
                tokens=np.asarray(prompts.tokens)[chosen],
                where=np.asarray(prompts.where)[chosen],
                positions=np.asarray(prompts.positions)[:, chosen],
                next_position=np.asarray(prompts.next_position)[chosen],
                image_rows=np.asarray(prompts.image_rows)[chosen],
            ),
            tokens=answers.tokens[rows],
            where=answers.where[rows] & exists[:, None],
            recorded=answers.recorded[rows],
            old=answers.old[rows],
            advantages=answers.advantages[rows],
            weights=answers.weights[rows] * exists,
        )

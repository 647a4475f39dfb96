"""Supervised fine-tuning of a vision-language model on given answers: a warm-up before GRPO.

Answers teach a model a format; what they say can be random, so that all that GRPO is to teach stays unknown.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxreward.models.generate import log_probabilities
from jaxreward.models.vision_language import ImageFeatures, Prompts, VisionLanguageModel
from jaxreward.types import Array, PyTree


def negative_log_likelihood(
    model: VisionLanguageModel,
    variables: PyTree,
    prompts: Prompts,
    features: ImageFeatures | None,
    tokens: Array,
    where: Array,
) -> Array:
    """The mean over tokens of -log p(token), in nats.

    Args:
      model: its module.
      variables: {'params': ..., and 'lora': ... where there is one}.
      prompts: [B, T], padded on the left.
      features: what `prompts.image_rows` refers to; None for text alone.
      tokens: int32 [B, N], the answers, their stop tokens included.
      where: bool [B, N], the tokens that exist.

    Returns:
      float32 [].
    """
    found = log_probabilities(model, variables, prompts, features, tokens, where)
    return -found.sum() / jnp.maximum(where.sum(), 1)


def make_step(
    model: VisionLanguageModel,
    optimizer: optax.GradientTransformation,
    with_trained: Callable[[PyTree, PyTree], PyTree],
    features_of: Callable[[PyTree, PyTree], ImageFeatures | None] = lambda variables, images: images,
) -> Callable[..., tuple[PyTree, PyTree, Array]]:
    """Builds the jitted function of one gradient step.

    Args:
      model: its module.
      optimizer: any of Optax.
      with_trained: (variables, trained) -> variables, which puts what is trained in its place: a LoRA beside
        the parameters, or other parameters.
      features_of: (variables, images) -> features, differentiable, where the vision tower is trained, too;
        the default takes features.

    Returns:
      (trained, optimiser state, variables, prompts, images or features, tokens, where) -> (trained, optimiser
      state, loss float32 []).
    """

    @jax.jit
    def step(trained, state, variables, prompts, images, tokens, where):
        def loss(trained: PyTree) -> Array:
            full = with_trained(variables, trained)
            return negative_log_likelihood(model, full, prompts, features_of(full, images), tokens, where)

        value, gradients = jax.value_and_grad(loss)(trained)
        updates, state = optimizer.update(gradients, state, trained)
        return optax.apply_updates(trained, updates), state, value

    return step

"""Group relative policy optimisation: group advantages, the clipped objective, and KL control.

Two kinds of policy use it: a language model that writes tokens, and a scorer whose outputs are the
logits of a Plackett-Luce distribution over rankings. The latter draws a ranking choice by choice (the
latest frame first, then the latest of the rest, ...), so its choices stand where tokens stand.

Sources: Shao et al. 2024 (DeepSeekMath), equations 3 and 4; Rank-Then-Act, section 3.2; Plackett 1975.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxreward.types import Array

# Stands for the logit of an item that cannot be chosen; finite, so that its gradient is 0 and not NaN.
_NEVER = -1e30

# Largest log-ratio that is exponentiated: beyond it float32 would soon overflow and poison the gradient.
_LOG_RATIO_LIMIT = 20.0


def sample_ranking(key: Array, logits: Array, where: Array) -> Array:
    """Draws rankings from the Plackett-Luce distribution, exactly, by sorting logits plus Gumbel noise.

    Args:
      key: a typed key.
      logits: float32 [..., n].
      where: bool [..., n], False for items that do not take part.

    Returns:
      int32 [..., n]: item indices in the order in which they were chosen, highest first; items that do
      not take part come last, in an order that means nothing.
    """
    noisy = logits + jax.random.gumbel(key, logits.shape, logits.dtype)
    return jnp.argsort(jnp.where(where, -noisy, jnp.inf), axis=-1).astype(jnp.int32)


def progress_ranks(ranking: Array, where: Array) -> Array:
    """Turns a ranking into one rank an item: 1 for the item chosen last, up to the number of items.

    Args:
      ranking: int32 [..., n], as `sample_ranking` returns it.
      where: bool [..., n], False for items that do not take part.

    Returns:
      int32 [..., n], higher for items chosen earlier; 0 for items that do not take part.
    """
    place = jnp.argsort(ranking, axis=-1)
    count = where.sum(-1, keepdims=True)
    return jnp.where(where, count - place, 0).astype(jnp.int32)


def choice_mask(where: Array) -> Array:
    """bool [..., n]: the places of a ranking that hold an item which takes part; a prefix."""
    return jnp.arange(where.shape[-1]) < where.sum(-1, keepdims=True)


def choice_log_probs(logits: Array, ranking: Array, where: Array) -> Array:
    """The log-probability of each choice of a Plackett-Luce ranking, given the choices before it.

    log p(choice i) = logit of item i - logsumexp of the logits of item i and all that are chosen after.

    Args:
      logits: float32 [..., n]; leading axes broadcast against those of `ranking`.
      ranking: int32 [..., n], items in the order of choice, those that take part first.
      where: bool [..., n], False for items that do not take part.

    Returns:
      float32 [..., n], one value a place; 0 at the last choice (it is forced) and past it.
    """
    shape = jnp.broadcast_shapes(logits.shape, ranking.shape)
    masked = jnp.broadcast_to(jnp.where(where, logits, _NEVER), shape)
    chosen = jnp.take_along_axis(masked, jnp.broadcast_to(ranking, shape), axis=-1)
    # A triangle of sums: for tens of items it costs no more than a scan.
    is_left = jnp.tri(shape[-1], dtype=jnp.bool_).T
    left = jax.nn.logsumexp(jnp.where(is_left, chosen[..., None, :], _NEVER), axis=-1)
    return jnp.where(choice_mask(where), chosen - left, 0.0)


def log_prob(logits: Array, ranking: Array, where: Array) -> Array:
    """The log-probability of a Plackett-Luce ranking: the sum of `choice_log_probs`; float32 [...]."""
    return choice_log_probs(logits, ranking, where).sum(-1)


def group_advantages(rewards: Array, *, divide_by_std: bool = True) -> tuple[Array, Array]:
    """Rewards relative to their group: less the mean, divided by the population standard deviation.

    A group whose rewards are all equal says nothing about which answer is better; it gets advantages 0
    and is reported, so that the caller can leave it out of means.

    Args:
      rewards: float32 [G, ...]; axis 0 runs over the answers of one group.
      divide_by_std: divide by the standard deviation (Shao et al.); False keeps the reward's scale.

    Returns:
      (advantages float32 [G, ...], varies bool [...]); `varies` is False for groups of equal rewards.
    """
    varies = rewards.max(0) > rewards.min(0)
    advantages = rewards - rewards.mean(0)
    if divide_by_std:
        advantages = advantages / jnp.where(varies, rewards.std(0), 1.0)
    return jnp.where(varies, advantages, 0.0), varies


def clipped_objective(
    log_probs: Array, old_log_probs: Array, advantages: Array, where: Array, *, clip: float | Array
) -> tuple[Array, Array]:
    """The objective of one answer, RTA section 3.2: 1/|a| sum_i min(r_i A, clip(r_i, 1 - e, 1 + e) A).

    Args:
      log_probs: float32 [..., L], of each token or choice under the policy that learns.
      old_log_probs: float32 [..., L], under the policy that drew the answer; no gradient flows into it.
      advantages: float32 [...], one an answer.
      where: bool [..., L], the tokens that exist.
      clip: e, how far the ratio may move before its gradient is cut.

    Returns:
      (objective float32 [...], to be maximised; clipped float32 [...], the share of tokens at which the
      clipped branch is the smaller one). Both are 0 for an answer without tokens.
    """
    ratio = _exp(log_probs - jax.lax.stop_gradient(old_log_probs))
    advantage = advantages[..., None]
    unclipped = ratio * advantage
    clipped = jnp.clip(ratio, 1.0 - clip, 1.0 + clip) * advantage
    return _token_mean(jnp.minimum(unclipped, clipped), where), _token_mean(clipped < unclipped, where)


def kl_estimate(log_probs: Array, reference_log_probs: Array, where: Array) -> Array:
    """An estimate of KL(policy || reference) per token: mean of d' - log d' - 1, d' = p_reference / p.

    Never negative, and unbiased for answers drawn from the policy (Shao et al. 2024, equation 4).
    Being a mean over tokens or choices, it does not grow with the length of an answer: a target set
    for one clip length serves all of them.

    Args:
      log_probs: float32 [..., L].
      reference_log_probs: float32 [..., L]; no gradient flows into it.
      where: bool [..., L], the tokens that exist.

    Returns:
      float32 [...] in nats per token.
    """
    difference = jax.lax.stop_gradient(reference_log_probs) - log_probs
    # Bounded before both uses: else the gradient would change its sign beyond the bound of `_exp`.
    difference = jnp.minimum(difference, _LOG_RATIO_LIMIT)
    return _token_mean(_exp(difference) - difference - 1.0, where)


def adapt_kl_coefficient(coefficient: Array, kl: Array, target: float | Array, *, rate: float = 0.1) -> Array:
    """Moves the KL coefficient so that the KL settles at its target (Ziegler et al. 2019, section 2.2).

    The coefficient is multiplied by 1 + rate * clip(kl / target - 1, -1, 1), in other words by at most
    `rate` a step, and is kept within [1e-4, 1e2] so that it can always come back.

    Args:
      coefficient: float32 [], positive.
      kl: float32 [], measured, in nats per token.
      target: in nats per token; RTA appendix A.4 has 0.1.
      rate: the largest relative change.

    Returns:
      float32 [].
    """
    error = jnp.clip(kl / target - 1.0, -1.0, 1.0)
    return jnp.clip(coefficient * (1.0 + rate * error), 1e-4, 1e2)


def grpo_loss(
    log_probs: Array,
    old_log_probs: Array,
    reference_log_probs: Array,
    advantages: Array,
    varies: Array,
    where: Array,
    *,
    clip: float | Array,
    kl_coefficient: float | Array,
) -> tuple[Array, dict[str, Array]]:
    """The loss of a batch of groups: minus the clipped objective, plus the weighted KL.

    The objective is averaged over the answers of the groups that vary; the KL over all answers.

    Args:
      log_probs: float32 [G, B, L], under the policy that learns.
      old_log_probs: float32 [G, B, L], under the policy that drew the answers.
      reference_log_probs: float32 [G, B, L], under the policy to stay close to.
      advantages: float32 [G, B], from `group_advantages`.
      varies: bool [B], from `group_advantages`.
      where: bool [G, B, L], the tokens that exist.
      clip: the ratio's clipping parameter.
      kl_coefficient: weight of the KL.

    Returns:
      (loss float32 [], metrics float32 []: 'kl' in nats per token, 'clip_fraction' of tokens, and
      'zero_variance_groups' as a share of B).
    """
    objective, clipped = clipped_objective(log_probs, old_log_probs, advantages, where, clip=clip)
    answers = jnp.broadcast_to(varies, objective.shape)
    kl = kl_estimate(log_probs, reference_log_probs, where).mean()
    loss = kl_coefficient * kl - _mean_where(objective, answers)
    metrics = {
        "kl": kl,
        "clip_fraction": _mean_where(clipped, answers),
        "zero_variance_groups": 1.0 - varies.mean(),
    }
    return loss, metrics


def _exp(log_ratio: Array) -> Array:
    return jnp.exp(jnp.clip(log_ratio, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT))


def _mean_where(values: Array, where: Array) -> Array:
    return jnp.where(where, values, 0.0).sum() / jnp.maximum(where.sum(), 1)


def _token_mean(values: Array, where: Array) -> Array:
    return jnp.where(where, values, 0.0).sum(-1) / jnp.maximum(where.sum(-1), 1)

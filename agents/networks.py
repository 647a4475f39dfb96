"""Actor-critic networks and the distributions of actions that they give."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from jaxreward.errors import ConfigError
from jaxreward.models.encoders import CNN, IMPALA, MLP, RELU_INIT, normalise_pixels
from jaxreward.types import Array, Box, Discrete, PyTree

BODIES = ("mlp", "cnn", "impala")
ACTIVATIONS = {"relu": nn.relu, "tanh": nn.tanh}
# Small first logits and means make the first policy nearly uniform or centred (Andrychowicz et al., 2021).
POLICY_OUTPUT_INIT = nn.initializers.orthogonal(0.01)
VALUE_OUTPUT_INIT = nn.initializers.orthogonal(1.0)


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
    """The structure of an actor-critic network.

    Attributes:
      body: what reads the observation: 'mlp' flattens it, 'cnn' and 'impala' read pictures or grids.
      mlp_layers: widths of the dense layers of 'mlp'.
      cnn_layers: (features, kernel, stride) of each convolution of 'cnn'. For a grid of symbols,
        ((8, 1, 1),) is an embedding of each cell.
      impala_sections: channels of each section of 'impala'.
      width: width of the layer after the body, of the memory and of the hidden layer of each head.
      activation: of all dense layers, 'relu' or 'tanh'.
      recurrent: put a GRU between the body and the heads.
      symbols: number of different symbols in integer observations, which are read as one-hot vectors; a
        symbol outside of 0 .. symbols - 1 is read as zeros.
      initial_log_std: log standard deviation of real-valued actions at the start, in units of half the
        range of the action space.
    """

    body: Literal["mlp", "cnn", "impala"] = "cnn"
    mlp_layers: tuple[int, ...] = (128,)
    cnn_layers: tuple[tuple[int, int, int], ...] = ((16, 4, 4), (16, 3, 1))
    impala_sections: tuple[int, ...] = (16, 32, 32)
    width: int = 128
    activation: Literal["relu", "tanh"] = "relu"
    recurrent: bool = False
    symbols: int = 16
    initial_log_std: float = 0.0

    def __post_init__(self):
        """Checks names and sizes.

        Raises:
          ConfigError: for an unknown body or activation, or a size below 1.
        """
        if self.body not in BODIES:
            raise ConfigError(f"network.body is {self.body!r}; choose one of {', '.join(BODIES)}.")
        if self.activation not in ACTIVATIONS:
            raise ConfigError(
                f"network.activation is {self.activation!r}; choose one of {', '.join(ACTIVATIONS)}."
            )
        for name in ("width", "symbols"):
            if getattr(self, name) < 1:
                raise ConfigError(f"network.{name} is {getattr(self, name)}; it must be 1 or more.")


@struct.dataclass
class Categorical:
    """Actions 0 .. n - 1 with probabilities softmax(logits)."""

    logits: Array  # float32 [..., n]

    def sample(self, key: Array) -> Array:
        """Draws int32 [...]."""
        return jax.random.categorical(key, self.logits).astype(jnp.int32)

    def mode(self) -> Array:
        """The most probable action, int32 [...]."""
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def log_prob(self, action: Array) -> Array:
        """Log probability of int [...] actions, float32 [...] in nats."""
        # A one-hot product: the gradient of an indexed read would be a scatter-add, random in order on GPU.
        chosen = jax.nn.one_hot(action, self.logits.shape[-1], dtype=self.logits.dtype)
        return jnp.sum(jax.nn.log_softmax(self.logits) * chosen, axis=-1)

    def entropy(self) -> Array:
        """Entropy, float32 [...] in nats."""
        log_probs = jax.nn.log_softmax(self.logits)
        return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


@struct.dataclass
class DiagonalGaussian:
    """Independent normal variables."""

    mean: Array  # float32 [..., A]
    log_std: Array  # float32 [A], the same in every state

    def sample(self, key: Array) -> Array:
        """Draws float32 [..., A]."""
        noise = jax.random.normal(key, self.mean.shape, self.mean.dtype)
        return self.mean + jnp.exp(self.log_std) * noise

    def mode(self) -> Array:
        """The mean, float32 [..., A]."""
        return self.mean

    def log_prob(self, action: Array) -> Array:
        """Log density of float32 [..., A] actions, float32 [...] in nats."""
        standardised = (action - self.mean) * jnp.exp(-self.log_std)
        per_axis = -0.5 * jnp.square(standardised) - self.log_std - 0.5 * math.log(2 * math.pi)
        return jnp.sum(per_axis, axis=-1)

    def entropy(self) -> Array:
        """Differential entropy, float32 [...] in nats; the same in every state."""
        entropy = jnp.sum(self.log_std + 0.5 * math.log(2 * math.pi * math.e))
        return jnp.broadcast_to(entropy, self.mean.shape[:-1])


def to_action(choice: Array, action_space: Discrete | Box) -> Array:
    """Turns what a policy's distribution gives into what the environment takes.

    A real-valued choice is in units of half the range around its middle, and is clipped to the range:
    action = (low + high) / 2 + (high - low) / 2 * clip(choice, -1, 1). The policy gradient is that of
    the unclipped choice, as it must be: clipping is a part of the environment.

    Args:
      choice: int32 [...] for Discrete, float32 [..., A] with A = prod(shape) for Box.
      action_space: the environment's.

    Returns:
      int32 [...], or float32 [..., *shape] within [low, high].
    """
    if isinstance(action_space, Discrete):
        return choice
    low, high = action_space.low, action_space.high
    if math.isfinite(low) and math.isfinite(high):
        action = 0.5 * (low + high) + 0.5 * (high - low) * jnp.clip(choice, -1.0, 1.0)
    else:
        action = jnp.clip(choice, low, high)
    return action.reshape((*choice.shape[:-1], *action_space.shape))


class ObservationEncoder(nn.Module):
    """Reads pixels, symbols or vectors into one feature vector.

    uint8 is pixels, other integers are symbols (one-hot), floating-point numbers are features as they are.

    Attributes:
      config: structure.
      rank: number of axes of one observation.
    """

    config: NetworkConfig
    rank: int

    @nn.compact
    def __call__(self, observation: Array) -> Array:
        """Maps [..., *observation] to float32 [..., features].

        Raises:
          ConfigError: if the body cannot read an observation of this shape.
        """
        leading = observation.shape[: observation.ndim - self.rank]
        planes = self._numbers(observation)
        if self.config.body == "mlp":
            activation = ACTIVATIONS[self.config.activation]
            return MLP(self.config.mlp_layers, activation)(planes.reshape((*leading, -1)))
        if planes.ndim - len(leading) == 2:
            planes = planes[..., None]
        if planes.ndim - len(leading) != 3:
            shape = observation.shape[len(leading) :]
            raise ConfigError(
                f"network.body {self.config.body!r} reads observations [H, W] or [H, W, C]; the environment "
                f"gives {observation.dtype} {shape}. Use the body 'mlp'."
            )
        if self.config.body == "cnn":
            return CNN(self.config.cnn_layers)(planes)
        return IMPALA(self.config.impala_sections)(planes)

    def _numbers(self, observation: Array) -> Array:
        if observation.dtype == jnp.uint8 or jnp.issubdtype(observation.dtype, jnp.floating):
            return normalise_pixels(observation)
        if observation.dtype == jnp.bool_:
            return observation.astype(jnp.float32)
        one_hot = jax.nn.one_hot(observation, self.config.symbols, dtype=jnp.float32)
        # [H, W] becomes one plane for each symbol; [H, W, C] one for each channel and symbol.
        return one_hot.reshape((*one_hot.shape[:-2], -1)) if self.rank == 3 else one_hot


class ActorCritic(nn.Module):
    """A policy and a value function on a shared body.

    Body, dense layer, an optional GRU, then a hidden layer and an output for each of policy and value.
    With a time limit the hidden layer of the value, and only that one, also sees the fraction of the
    episode's time that is used up: the return of a task that ends at a time limit depends on it, while the
    policy stays one that plays without a clock.

    Attributes:
      config: structure.
      action_space: Discrete gives a `Categorical`, Box a `DiagonalGaussian`.
      observation_rank: number of axes of one observation.
      time_limit: steps of an episode, or None if the value must not depend on time.
    """

    config: NetworkConfig
    action_space: Discrete | Box
    observation_rank: int
    time_limit: int | None = None

    def setup(self):
        """Declares the layers."""
        width = self.config.width
        self.encoder = ObservationEncoder(self.config, self.observation_rank)
        self.shared = nn.Dense(width, kernel_init=RELU_INIT)
        if self.config.recurrent:
            self.core = nn.GRUCell(width)
        self.policy_hidden = nn.Dense(width, kernel_init=RELU_INIT)
        self.value_hidden = nn.Dense(width, kernel_init=RELU_INIT)
        self.value_output = nn.Dense(1, kernel_init=VALUE_OUTPUT_INIT)
        if isinstance(self.action_space, Discrete):
            self.policy_output = nn.Dense(self.action_space.n, kernel_init=POLICY_OUTPUT_INIT)
        else:
            actions = math.prod(self.action_space.shape)
            self.policy_output = nn.Dense(actions, kernel_init=POLICY_OUTPUT_INIT)
            initial = nn.initializers.constant(self.config.initial_log_std)
            self.log_std = self.param("log_std", initial, (actions,))

    def __call__(
        self, memory: PyTree, observation: Array, first: Array, episode_step: Array
    ) -> tuple[PyTree, Categorical | DiagonalGaussian, Array]:
        """Reads one step of each environment.

        Args:
          memory: what an earlier call returned; at first float32 zeros [B, width] with a GRU, else ().
          observation: [B, *observation].
          first: bool [B], the observation is the first of an episode: the memory is forgotten before it.
          episode_step: int32 [B], actions taken so far in the episode.

        Returns:
          The next memory, the distribution of actions [B], the value float32 [B].
        """
        features = self._features(observation)
        if self.config.recurrent:
            memory, features = self._remember(memory, (features, first))
        return (memory, self._policy(features), self._value(features, episode_step))

    def unroll(
        self, memory: PyTree, observation: Array, first: Array, episode_step: Array
    ) -> tuple[PyTree, Categorical | DiagonalGaussian, Array]:
        """Reads T steps of each environment; equal to T calls.

        Args:
          memory: [B, ...] before the first step.
          observation: [T, B, *observation].
          first: bool [T, B].
          episode_step: int32 [T, B].

        Returns:
          The memories [T, B, ...] after each step, the distributions [T, B], the values float32 [T, B].
        """
        features = self._features(observation)
        memories = ()
        if self.config.recurrent:
            scan = nn.scan(ActorCritic._remember, variable_broadcast="params", split_rngs={"params": False})
            _, features = scan(self, memory, (features, first))
            memories = features
        return memories, self._policy(features), self._value(features, episode_step)

    def _features(self, observation: Array) -> Array:
        return ACTIVATIONS[self.config.activation](self.shared(self.encoder(observation)))

    def _remember(self, memory: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
        features, first = step
        return self.core(jnp.where(first[..., None], 0.0, memory), features)

    def _policy(self, features: Array) -> Categorical | DiagonalGaussian:
        hidden = ACTIVATIONS[self.config.activation](self.policy_hidden(features))
        output = self.policy_output(hidden)
        if isinstance(self.action_space, Discrete):
            return Categorical(output)
        return DiagonalGaussian(output, self.log_std)

    def _value(self, features: Array, episode_step: Array) -> Array:
        if self.time_limit is not None:
            used = episode_step.astype(jnp.float32) / self.time_limit
            features = jnp.concatenate([features, used[..., None]], axis=-1)
        hidden = ACTIVATIONS[self.config.activation](self.value_hidden(features))
        return jnp.squeeze(self.value_output(hidden), axis=-1)

"""Proximal policy optimisation (Schulman et al., 2017) as pure functions on an explicit state.

`PPO.learn` is one jittable program: a scan over epochs and minibatches. `PPO.learn_stepwise` drives the
same functions from Python, a jitted call a minibatch, because on CPU the gradient of a convolution is
several times slower inside a scan than outside of one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxreward.agents.advantages import Horizon, generalised_advantages, standardise
from jaxreward.agents.networks import ActorCritic, NetworkConfig, to_action
from jaxreward.errors import ConfigError
from jaxreward.types import Array, EnvironmentSpec, Experience, PyTree, Rollout, TimeStep, previous


@dataclasses.dataclass(frozen=True)
class PPOConfig:
    """Settings of PPO; the defaults learned puzzles from pixels with 128 environments of 64 steps.

    Numbers of type float become leaves of the agent's state (`Settings`): states can be vmapped over them.
    The others are structure and are compiled in.

    Attributes:
      discount: γ, in [0, 1].
      trace: λ of GAE, in [0, 1].
      learning_rate: Adam's step size in the first update.
      final_learning_rate: its value after the last update; linear in between.
      entropy_coefficient: weight of the entropy bonus in the first update.
      final_entropy_coefficient: its value after the last update; linear in between.
      epochs: passes over each rollout.
      minibatches: gradient steps in a pass; must divide T * B (B with a recurrent network).
      clip: ε, how far the probability ratio may move from 1 before its gradient is cut.
      value_coefficient: weight of the value loss, which is the mean squared error.
      value_clip: how far a value may move from the one in the rollout before its gradient is cut; None: any.
      max_gradient_norm: gradients of a larger global L2 norm are scaled down to it.
      adam_epsilon: Adam's ε.
      target_kl: once a minibatch's approximate KL divergence exceeds it, that and all later minibatches of
        the update are skipped and the metric `applied` shows the share that was not; None: never.
      standardisation: of advantages, over the 'batch' or over each 'episode'.
      advantage_floor: deviation of the advantages below which they are not scaled up to 1, in units of the
        reward; 0: always scaled.
      horizon: 'terminal': a time limit ends the task, and the value sees the time used. 'bootstrap': the
        task goes on beyond it, and a truncated episode is continued by the value of its last observation.
      network: structure of the network.
    """

    discount: float = 0.99
    trace: float = 0.98
    learning_rate: float = 1e-3
    final_learning_rate: float = 1e-4
    entropy_coefficient: float = 0.05
    final_entropy_coefficient: float = 0.005
    epochs: int = 3
    minibatches: int = 8
    clip: float = 0.2
    value_coefficient: float = 0.5
    value_clip: float | None = None
    max_gradient_norm: float = 0.5
    adam_epsilon: float = 1e-5
    target_kl: float | None = None
    standardisation: Literal["batch", "episode"] = "batch"
    advantage_floor: float = 0.0
    horizon: Horizon = "terminal"
    network: NetworkConfig = dataclasses.field(default_factory=NetworkConfig)

    def __post_init__(self):
        """Checks ranges and names.

        Raises:
          ConfigError: for a value outside its range.
        """
        for name in ("discount", "trace"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"agent.{name} is {value}; it must lie in [0, 1].")
        for name in ("epochs", "minibatches"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"agent.{name} is {value}; it must be 1 or more.")
        for name in ("learning_rate", "clip", "value_clip", "max_gradient_norm", "adam_epsilon", "target_kl"):
            value = getattr(self, name)
            if value is not None and not value > 0.0:
                raise ConfigError(f"agent.{name} is {value}; it must be above 0.")
        if not self.advantage_floor >= 0.0:
            raise ConfigError(f"agent.advantage_floor is {self.advantage_floor}; it must be 0 or more.")
        choices = {"standardisation": ("batch", "episode"), "horizon": get_args(Horizon)}
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"agent.{name} is {value!r}; choose one of {', '.join(allowed)}.")


@struct.dataclass
class Settings:
    """The numbers of a `PPOConfig`, as data; all float32 []."""

    discount: Array
    trace: Array
    learning_rate: Array
    final_learning_rate: Array
    entropy_coefficient: Array
    final_entropy_coefficient: Array
    clip: Array
    value_coefficient: Array
    max_gradient_norm: Array
    adam_epsilon: Array
    advantage_floor: Array
    value_clip: Array | None
    target_kl: Array | None

    @classmethod
    def of(cls, config: PPOConfig) -> Settings:
        """Takes them from a config; those that are None there stay None, which is structure."""
        numbers = {field.name: getattr(config, field.name) for field in dataclasses.fields(cls)}
        return cls(**{name: None if x is None else jnp.float32(x) for name, x in numbers.items()})


@struct.dataclass
class PPOState:
    """All that PPO carries from one update to the next."""

    params: PyTree  # float32, of `network`
    opt_state: optax.OptState
    settings: Settings
    update: Array  # int32 [], updates done
    total_updates: Array  # int32 [], where the schedules end
    network: ActorCritic = struct.field(pytree_node=False)


@struct.dataclass
class Batch:
    """A rollout as PPO learns from it; [T * B, ...], or [T, B, ...] with a recurrent network."""

    observation: Array
    first: Array  # bool
    episode_step: Array  # int32
    choice: Array  # int32 [...], or float32 [..., A]: what the policy's distribution gave
    log_prob: Array  # float32, of the choice, when it was made
    value: Array  # float32, when it was made
    advantage: Array  # float32, standardised
    target: Array  # float32, the TD(λ) return


@struct.dataclass
class Progress:
    """What changes from one minibatch to the next."""

    params: PyTree
    opt_state: optax.OptState
    active: Array  # bool [], False once the target KL divergence was exceeded


@dataclasses.dataclass(frozen=True)
class PPO:
    """Proximal policy optimisation; implements `jaxreward.agents.base.Agent`.

    Attributes:
      config: settings.
    """

    config: PPOConfig = PPOConfig()

    def init(self, key: Array, spec: EnvironmentSpec, total_updates: int) -> PPOState:
        """Makes new parameters and an optimiser.

        Args:
          key: typed key.
          spec: of the environment; its observation must be a single array.
          total_updates: the update after which the schedules have reached their final values.

        Returns:
          The state, all of strong dtypes.

        Raises:
          ConfigError: if the observation is not a single array, or the network cannot read it.
        """
        if len(jax.tree.leaves(spec.observation)) != 1 or not hasattr(spec.observation, "shape"):
            raise ConfigError(
                f"PPO reads observations that are a single array; the environment gives {spec.observation}. "
                "Wrap the environment so that it joins them."
            )
        if total_updates < 1:
            raise ConfigError(f"total_updates is {total_updates}; PPO needs at least one update.")
        network = ActorCritic(
            config=self.config.network,
            action_space=spec.action_space,
            observation_rank=len(spec.observation.shape),
            time_limit=spec.max_episode_steps if self.config.horizon == "terminal" else None,
        )
        observation = jnp.zeros((1, *spec.observation.shape), spec.observation.dtype)
        params = network.init(key, self.memory(1), observation, jnp.zeros(1, bool), jnp.zeros(1, jnp.int32))[
            "params"
        ]
        settings = Settings.of(self.config)
        return PPOState(
            params=params,
            opt_state=make_optimiser(settings).init(params),
            settings=settings,
            update=jnp.int32(0),
            total_updates=jnp.int32(total_updates),
            network=network,
        )

    def memory(self, batch_size: int) -> PyTree:
        """The memory at the start of an episode: float32 [B, width] with a recurrent network, else ()."""
        network = self.config.network
        return jnp.zeros((batch_size, network.width), jnp.float32) if network.recurrent else ()

    def act(
        self, state: PPOState, memory: PyTree, timestep: TimeStep, key: Array, *, greedy: bool = False
    ) -> tuple[PyTree, Array, dict[str, Array]]:
        """Draws an action for each environment from the policy, or takes the most probable one.

        Args:
          state: of the agent.
          memory: [B, ...] what `act` returned last, or `memory(B)`.
          timestep: [B, ...].
          key: typed key.
          greedy: take the mode of each distribution.

        Returns:
          The next memory; the action int32 [B] or float32 [B, *shape]; extras `log_prob`, `value`
          (float32 [B]) and `choice` (the action before scaling and clipping).
        """
        memory, policy, value = state.network.apply(
            {"params": state.params}, memory, timestep.observation, timestep.first, timestep.episode_step
        )
        choice = policy.mode() if greedy else policy.sample(key)
        extras = {"log_prob": policy.log_prob(choice), "value": value, "choice": choice}
        return memory, to_action(choice, state.network.action_space), extras

    def learn(self, state: PPOState, experience: Experience, key: Array) -> tuple[PPOState, dict[str, Array]]:
        """One update from one rollout, as one jittable program.

        Args:
          state: the one that acted.
          experience: T steps of B environments; the streams of its rewards are added up.
          key: typed key, for the order of the steps.

        Returns:
          The next state and scalar float32 metrics, means over minibatches: policy_loss, value_loss, entropy,
          approx_kl, clip_fraction, gradient_norm, applied; and of the update: explained_variance,
          learning_rate, entropy_coefficient.

        Raises:
          ConfigError: if the number of minibatches does not divide the rollout.
        """
        batch, memory, explained = self._prepare(state, experience)

        def one_minibatch(progress, indices):
            return self._minibatch(state, progress, batch, memory, indices)

        def one_epoch(progress, key):
            return jax.lax.scan(one_minibatch, progress, self._order(batch, key))

        keys = jax.random.split(key, self.config.epochs)
        progress, metrics = jax.lax.scan(one_epoch, _start(state), keys)
        return _finish(state, progress, jax.tree.map(jnp.ravel, metrics), explained)

    def learn_stepwise(
        self, state: PPOState, experience: Experience, key: Array
    ) -> tuple[PPOState, dict[str, Array]]:
        """Equal to `learn` up to rounding, driven from Python with one jitted call a minibatch.

        Networks of matrix products differ by less than 1e-6; overlapping convolutions sum in another
        order inside a scan, and Adam enlarges that over many steps.

        Args, returns and errors are those of `learn`.
        """
        batch, memory, explained = _jitted_prepare(self, state, experience)
        progress, metrics = _start(state), []
        for epoch_key in jax.random.split(key, self.config.epochs):
            for indices in _jitted_order(self, batch, epoch_key):
                progress, step_metrics = _jitted_minibatch(self, state, progress, batch, memory, indices)
                metrics.append(step_metrics)
        return _jitted_finish(state, progress, metrics, explained)

    def _prepare(self, state: PPOState, experience: Experience) -> tuple[Batch, PyTree, Array]:
        """Estimates advantages and lays the steps out for minibatches; also the explained variance."""
        rollout = experience.rollout
        length, num_envs = rollout.timestep.terminated.shape
        self._check_division(length, num_envs)
        settings = state.settings
        rewards = sum(experience.rewards[stream] for stream in sorted(experience.rewards))
        value = rollout.extras["value"]
        following = self.following_values(state, rollout)
        terminated, truncated = rollout.timestep.terminated, rollout.timestep.truncated
        advantage = generalised_advantages(
            rewards,
            value,
            following,
            terminated,
            truncated,
            settings.discount,
            settings.trace,
            self.config.horizon,
        )
        target = advantage + value
        before = previous(rollout.first_timestep, rollout.timestep)
        batch = Batch(
            observation=before.observation,
            first=before.first,
            episode_step=before.episode_step,
            choice=rollout.extras["choice"],
            log_prob=rollout.extras["log_prob"],
            value=value,
            advantage=standardise(
                advantage,
                rollout.timestep.done,
                per=self.config.standardisation,
                floor=settings.advantage_floor,
            ),
            target=target,
        )
        if not self.config.network.recurrent:
            batch = jax.tree.map(lambda x: x.reshape((length * num_envs, *x.shape[2:])), batch)
        return batch, rollout.first_memory, explained_variance(value, target)

    def following_values(self, state: PPOState, rollout: Rollout) -> Array:
        """v(s') float32 [T, B] of what each action led to, before any reset."""
        after = rollout.timestep
        # A step that ended an episode has episode_step 0 already: that of the next one.
        before = previous(rollout.first_timestep, rollout.timestep)
        memories = ()
        if self.config.network.recurrent:
            memories, _, _ = state.network.apply(
                {"params": state.params},
                rollout.first_memory,
                before.observation,
                before.first,
                before.episode_step,
                method=ActorCritic.unroll,
            )

        def evaluate(memory, observation, episode_step):
            continues = jnp.zeros(episode_step.shape, bool)
            _, _, value = state.network.apply(
                {"params": state.params}, memory, observation, continues, episode_step + 1
            )
            return value

        if self.config.horizon == "bootstrap":
            return evaluate(memories, after.final_observation, before.episode_step)
        # Values after an end are worth nothing here, so those of the rollout itself serve; only the last
        # step's are missing.
        last = jax.tree.map(lambda x: x[-1], (memories, after.final_observation, before.episode_step))
        return jnp.concatenate([rollout.extras["value"][1:], evaluate(*last)[None]])

    def _check_division(self, length: int, num_envs: int):
        minibatches = self.config.minibatches
        count, what = length * num_envs, f"{length} steps * {num_envs} environments = {length * num_envs}"
        if self.config.network.recurrent:
            count, what = num_envs, f"{num_envs} environments (a recurrent network learns whole sequences)"
        if count % minibatches:
            raise ConfigError(
                f"agent.minibatches is {minibatches}, which does not divide {what}. "
                "Change it, the rollout length or the number of environments."
            )

    def _order(self, batch: Batch, key: Array) -> Array:
        """A random order, int32 [minibatches, M]: of steps, or of environments with a recurrent network."""
        axis = 1 if self.config.network.recurrent else 0
        permutation = jax.random.permutation(key, batch.advantage.shape[axis])
        return permutation.reshape(self.config.minibatches, -1)

    def _minibatch(
        self, state: PPOState, progress: Progress, batch: Batch, memory: PyTree, indices: Array
    ) -> tuple[Progress, dict[str, Array]]:
        """One gradient step on the steps (or environments) that `indices` names."""
        settings = state.settings
        axis = 1 if self.config.network.recurrent else 0
        minibatch = jax.tree.map(lambda x: jnp.take(x, indices, axis=axis), batch)
        memory = jax.tree.map(lambda x: jnp.take(x, indices, axis=0), memory)
        learning_rate, entropy_coefficient = scheduled(state)

        def loss(params):
            method = ActorCritic.unroll if self.config.network.recurrent else ActorCritic.__call__
            _, policy, value = state.network.apply(
                {"params": params},
                memory,
                minibatch.observation,
                minibatch.first,
                minibatch.episode_step,
                method=method,
            )
            return ppo_loss(policy, value, minibatch, settings, entropy_coefficient)

        gradients, metrics = jax.grad(loss, has_aux=True)(progress.params)
        active = progress.active
        if settings.target_kl is not None:
            active = active & (metrics["approx_kl"] <= settings.target_kl)
        updates, opt_state = make_optimiser(settings).update(gradients, progress.opt_state)
        params = jax.tree.map(lambda p, u: p - learning_rate * u, progress.params, updates)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(active, new, old),
            (params, opt_state),
            (progress.params, progress.opt_state),
        )
        metrics["gradient_norm"] = optax.tree.norm(gradients)
        metrics["applied"] = active.astype(jnp.float32)
        return Progress(params, opt_state, active), metrics


def ppo_loss(
    policy, value: Array, batch: Batch, settings: Settings, entropy_coefficient: Array
) -> tuple[Array, dict[str, Array]]:
    """The clipped objective, a value loss and an entropy bonus, as means over steps.

    With ρ = π(a|s) / π_old(a|s):

        L = - mean min(ρ A, clip(ρ, 1 - ε, 1 + ε) A) + c_v mean (v - target)² - c_e mean H(π)

    and, where the values are clipped by δ, the larger of (v - target)² and
    (v_old + clip(v - v_old, -δ, δ) - target)².

    Args:
      policy: distribution of choices, [...].
      value: float32 [...].
      batch: [...].
      settings: ε, δ and c_v.
      entropy_coefficient: c_e, float32 [].

    Returns:
      The loss and metrics, float32 []. `approx_kl` is mean (ρ - 1) - log ρ, which is never negative and
      estimates KL(π_old, π) (Schulman, 2020).
    """
    log_ratio = policy.log_prob(batch.choice) - batch.log_prob
    # Far beyond any clip range, and short of an infinity that would turn all gradients into NaN.
    ratio = jnp.exp(jnp.clip(log_ratio, -20.0, 20.0))
    clipped = jnp.clip(ratio, 1.0 - settings.clip, 1.0 + settings.clip)
    policy_loss = -jnp.mean(jnp.minimum(ratio * batch.advantage, clipped * batch.advantage))
    squared_error = jnp.square(value - batch.target)
    if settings.value_clip is not None:
        change = jnp.clip(value - batch.value, -settings.value_clip, settings.value_clip)
        squared_error = jnp.maximum(squared_error, jnp.square(batch.value + change - batch.target))
    value_loss = jnp.mean(squared_error)
    entropy = jnp.mean(policy.entropy())
    loss = policy_loss + settings.value_coefficient * value_loss - entropy_coefficient * entropy
    return loss, {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": jnp.mean((ratio - 1.0) - log_ratio),
        "clip_fraction": jnp.mean((jnp.abs(ratio - 1.0) > settings.clip).astype(jnp.float32)),
    }


def make_optimiser(settings: Settings) -> optax.GradientTransformation:
    """Gradients scaled to a global norm, then Adam without its step size."""
    return optax.chain(
        optax.clip_by_global_norm(settings.max_gradient_norm), optax.scale_by_adam(eps=settings.adam_epsilon)
    )


def scheduled(state: PPOState) -> tuple[Array, Array]:
    """The learning rate and the entropy coefficient of the present update, float32 []."""
    settings = state.settings
    done = jnp.minimum(state.update.astype(jnp.float32) / state.total_updates, 1.0)
    rate = settings.learning_rate + done * (settings.final_learning_rate - settings.learning_rate)
    start, end = settings.entropy_coefficient, settings.final_entropy_coefficient
    return rate, start + done * (end - start)


def explained_variance(value: Array, target: Array) -> Array:
    """1 - Var(target - value) / Var(target), float32 []: 1 is perfect, 0 is as good as a constant.

    Where all targets are equal there is nothing to explain, and it is 0.
    """
    variance = jnp.var(target)
    known = variance > 0.0
    return jnp.where(known, 1.0 - jnp.var(target - value) / jnp.where(known, variance, 1.0), 0.0)


def _start(state: PPOState) -> Progress:
    return Progress(state.params, state.opt_state, jnp.bool_(True))


def _finish(
    state: PPOState, progress: Progress, metrics: PyTree, explained: Array
) -> tuple[PPOState, dict[str, Array]]:
    """Counts the update and averages the metrics [epochs * minibatches] of its minibatches."""
    metrics = jax.tree.map(jnp.mean, metrics)
    metrics["learning_rate"], metrics["entropy_coefficient"] = scheduled(state)
    metrics["explained_variance"] = explained
    state = state.replace(params=progress.params, opt_state=progress.opt_state, update=state.update + 1)
    return state, metrics


def _stack_and_finish(state, progress, metrics, explained):
    return _finish(state, progress, jax.tree.map(lambda *m: jnp.stack(m), *metrics), explained)


# `PPO` is frozen and hashable, so equal agents share one compilation.
_jitted_prepare = functools.partial(jax.jit, static_argnums=0)(PPO._prepare)
_jitted_order = functools.partial(jax.jit, static_argnums=0)(PPO._order)
_jitted_minibatch = functools.partial(jax.jit, static_argnums=0)(PPO._minibatch)
_jitted_finish = jax.jit(_stack_and_finish)

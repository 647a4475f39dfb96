"""Times Catrap: the JAX environment, the emulators, and the phases of a training update.

    python benchmarks/catrap_speed.py

Prints environment steps per second of the JAX Catrap (a jitted scan, random actions, auto-reset), of the
emulators with random actions and of the same emulators under the policy of `catrap_rta`, and how the wall
time of an update is shared between acting, scoring and learning. All measurements take turns, so that
what else the machine does meets them alike; the first turn compiles and is not counted.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import defaultdict
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from jaxreward.agents.ppo import PPO
from jaxreward.configs import CONFIGS
from jaxreward.envs import registry
from jaxreward.envs.catrap.environment import Catrap, CatrapConfig
from jaxreward.envs.pyboy import CartridgeConfig, measure_raw
from jaxreward.scorers.compact_ranker import CompactRanker
from jaxreward.training.experiment import ExperimentConfig, make_loop, make_reward
from jaxreward.training.unroll import make_host_unroll

JAX_STEPS, JAX_NUM_ENVS = 256, 1024
PHASES = ("act", "score", "learn")
UPDATES = ("catrap_rta", "catrap_jax_rta")

Measure = Callable[[], dict[str, float]]  # one turn: {name of a quantity: its value}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      repeats: counted turns of every measurement.
      num_envs: emulators.
      workers: processes that run them.
      steps: steps of every emulator in a turn.
    """

    repeats: int = 3
    num_envs: int = 128
    workers: int = 2
    steps: int = 64


def jax_catrap(observation: str) -> Measure:
    """Steps per second of JAX_NUM_ENVS games in one jitted scan."""
    environment = Catrap(CatrapConfig(num_envs=JAX_NUM_ENVS, observation=observation))
    actions = environment.spec.action_space.n

    @jax.jit
    def play(carry, key):
        def step(carry, t):
            state, _ = carry
            action = jax.random.randint(jax.random.fold_in(key, t), (JAX_NUM_ENVS,), 0, actions)
            # The time step is carried out of the loop: an unused picture would not be drawn at all.
            return environment.step(state, action), None

        return jax.lax.scan(step, carry, jnp.arange(JAX_STEPS))[0]

    start = jax.block_until_ready(jax.jit(environment.reset)(jax.random.key(0)))

    def measure():
        started = time.perf_counter()
        jax.block_until_ready(play(start, jax.random.key(1)))
        seconds = time.perf_counter() - started
        return {f"JAX, {observation}": JAX_STEPS * JAX_NUM_ENVS / seconds}

    return measure


def raw_emulators(config: CartridgeConfig, steps: int) -> Measure:
    """Steps per second of the emulators with random actions and no policy."""
    return lambda: {"emulators, random actions": measure_raw(config, steps)["steps_per_second"]}


def acting(config: ExperimentConfig, environment, steps: int) -> Measure:
    """Steps per second of the emulators under the config's policy, with random parameters."""
    agent = PPO(config.agent)
    state = agent.init(jax.random.key(0), environment.spec, config.act.updates)
    memory = agent.memory(environment.spec.num_envs)
    unroll = make_host_unroll(environment, agent, length=steps)

    def measure():
        timestep = environment.host_reset(jax.random.key(1))
        started = time.perf_counter()
        jax.block_until_ready(unroll(state, environment.host_state(), timestep, memory, jax.random.key(2)))
        seconds = time.perf_counter() - started
        return {"emulators, policy": steps * environment.spec.num_envs / seconds}

    return measure


def updating(name: str, config: ExperimentConfig, environment) -> Measure:
    """Wall seconds of the phases of one update, with an untrained scorer."""
    spec = environment.spec
    model = dataclasses.replace(config.model, frame_shape=spec.image_shape[:2])
    scorer = CompactRanker(model)
    params = scorer.init(jax.random.key(0), (*spec.image_shape[:2], model.channels))
    context = scorer.prepare(params, spec.task)
    loop = make_loop(config, environment, make_reward(config.reward, scorer), scorer)
    state = loop.init(jax.random.key(1))

    def measure():
        nonlocal state
        if not environment.can_save:  # another measurement may have stepped the emulators
            state = loop.restart_episodes(state)
        state, _, seconds = loop.update(state, params, context)
        return {f"{name}, {phase}": seconds[phase] for phase in PHASES}

    return measure


def take_turns(measures: list[Measure], repeats: int) -> dict[str, list[float]]:
    """Runs every measurement once uncounted and `repeats` times counted, interleaved."""
    found = defaultdict(list)
    for turn in range(repeats + 1):
        for measure in measures:
            for name, value in measure().items():
                if turn:
                    found[name].append(value)
    return found


def print_speeds(console: Console, found: dict[str, list[float]]) -> None:
    """Prints steps per second, and what share of the raw speed of the emulators is left while acting."""
    table = Table("environment", "best", "median", "slowest", title="Environment steps per second")
    names = ["JAX, symbolic", "JAX, pixels", "emulators, random actions", "emulators, policy"]
    for name in names:
        values = found[name]
        table.add_row(name, *(f"{value:,.0f}" for value in (max(values), np.median(values), min(values))))
    console.print(table)
    raw, policy = (np.array(found[name]) for name in names[2:])
    ratios = policy / raw  # of the same turn
    console.print(
        f"policy / random actions: median {np.median(ratios):.2f}, {ratios.min():.2f} to {ratios.max():.2f}; "
        f"of the best: {policy.max() / raw.max():.2f}\n",
        soft_wrap=True,
    )


def print_phases(console: Console, found: dict[str, list[float]]) -> None:
    """Prints wall seconds of the phases of an update, and their shares."""
    table = Table("config", "phase", "least", "median", "share", title="Wall seconds of an update")
    for config in UPDATES:
        medians = {phase: float(np.median(found[f"{config}, {phase}"])) for phase in PHASES}
        for phase, median in medians.items():
            share = median / sum(medians.values())
            least = min(found[f"{config}, {phase}"])
            table.add_row(config, phase, f"{least:.3f}", f"{median:.3f}", f"{100 * share:.0f} %")
    console.print(table)


def main() -> None:
    """Measures and prints."""
    options, console = tyro.cli(Options), Console()
    configs = {}
    for name in UPDATES:
        loop = dataclasses.replace(CONFIGS[name].loop, fused="off")  # one program has no phases
        configs[name] = dataclasses.replace(CONFIGS[name], loop=loop)
    sizes = {"num_envs": options.num_envs, "workers": options.workers}
    cartridge = dataclasses.replace(configs["catrap_rta"].env, **sizes)
    jax_environment = registry.make(configs["catrap_jax_rta"].env)
    emulators = registry.make(cartridge)
    try:
        measures = [
            jax_catrap("symbolic"),
            jax_catrap("pixels"),
            raw_emulators(cartridge, options.steps),
            acting(configs["catrap_rta"], emulators, options.steps),
            updating("catrap_rta", configs["catrap_rta"], emulators),
            updating("catrap_jax_rta", configs["catrap_jax_rta"], jax_environment),
        ]
        found = take_turns(measures, options.repeats)
    finally:
        emulators.close()
    console.print(
        f"{len(os.sched_getaffinity(0))} CPU cores, JAX {jax.__version__} on {jax.default_backend()}, "
        f"{JAX_NUM_ENVS} JAX games; {options.num_envs} emulators in {options.workers} processes; "
        f"{options.repeats} turns\n",
        soft_wrap=True,
    )
    print_speeds(console, found)
    print_phases(console, found)


if __name__ == "__main__":
    main()

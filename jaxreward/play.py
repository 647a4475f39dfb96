"""`python -m jaxreward.play RUN`: loads a trained policy and plays it.

python -m jaxreward.play runs/catrap_rta-20260101-120000 --episodes 100 --video episode.mp4
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
from typing import Annotated

import jax
import tyro
from rich.console import Console

from jaxreward.command_line import dataclass_types, parse, run_command
from jaxreward.envs import registry
from jaxreward.errors import ConfigError, StorageError
from jaxreward.evaluation.policies import evaluate
from jaxreward.evaluation.showcase import best_paid, write_episode
from jaxreward.training.experiment import (
    ExperimentConfig,
    latest_state,
    make_reward,
    needs_scorer,
)
from jaxreward.training.prepare_scorer import load_prepared
from jaxreward.training.run_folder import open_run


@dataclasses.dataclass(frozen=True)
class PlayConfig:
    """What to play.

    Attributes:
      run: the run folder.
      episodes: how many episodes, rounded up to a multiple of the number of environments.
      video: write the best paid episode here (the best paid success, or failure if there is none).
      greedy: take the most likely action in place of a sampled one.
      seed: which policy of a run with several seeds; the first one if not given.
      env: another environment, KIND:NAME, whose observations and actions have the same form.
      key: decides everything that is random.
      json: print one JSON object.
    """

    run: Annotated[pathlib.Path, tyro.conf.Positional]
    episodes: int = 100
    video: pathlib.Path | None = None
    greedy: bool = False
    seed: int | None = None
    env: str | None = None
    key: int = 0
    json: bool = False

    def __post_init__(self):
        """Checks the ranges; raises ConfigError."""
        if self.episodes < 1:
            raise ConfigError(f"--episodes is {self.episodes}; expected at least 1")


def play(options: PlayConfig, console: Console) -> dict[str, object]:
    """Plays a run's newest policy.

    Args:
      options: what to play.
      console: where the result is printed.

    Returns:
      The evaluation's summary, with the run, the update of the checkpoint and the video, if one was made.

    Raises:
      ConfigError: there is no such run or seed, or it has no checkpoint.
      ModelError: its checkpoint is damaged or does not fit the environment.
      StorageError: the video cannot be written.
    """
    if options.video is not None:
        check_writable(options.video)
    run, config = open_run(options.run, dataclass_types(ExperimentConfig))
    if options.env is not None:
        config = dataclasses.replace(config, env=registry.parse(options.env))
    folder = run.path
    if config.seeds > 1 or options.seed is not None:
        folder = run.path / f"seed_{config.seed if options.seed is None else options.seed}"
        if not folder.is_dir():
            known = sorted(p.name for p in run.path.glob("seed_*"))
            raise ConfigError(f"{folder} does not exist; the run has {', '.join(known) or 'a single seed'}")
    environment = registry.make(config.env)
    try:
        agent, state, update = latest_state(config, environment, folder)
        play_key, show_key = jax.random.split(jax.random.key(options.key))
        evaluation = evaluate(
            environment, agent, state, play_key, episodes=options.episodes, greedy=options.greedy
        )
        summary = {"run": str(run.path), "update": update, "greedy": options.greedy, **evaluation.summary()}
        if options.video is not None:
            scorer = load_prepared(config, environment, run) if needs_scorer(config) else None
            reward = make_reward(config.reward, None if scorer is None else scorer.scorer)
            chosen = best_paid(environment, reward, scorer, evaluation, True, show_key)
            chosen = chosen or best_paid(environment, reward, scorer, evaluation, False, show_key)
            write_episode(environment, *chosen, options.video)
            summary["video"] = str(options.video)
    finally:
        if not environment.on_device:
            environment.close()
    interval = "(all alike)"
    if summary["success_interval"] is not None:
        interval = "[{:.3f}, {:.3f}]".format(*summary["success_interval"])
    console.print(
        f"{summary['episodes']} episodes of the policy after update {update}: success "
        f"{summary['success_rate']:.3f} {interval}, length {summary['length']:.1f}, "
        f"environment return {summary['env_return']:.2f}"
    )
    return summary


def check_writable(path: pathlib.Path) -> None:
    """Refuses a file whose folder cannot be made or written; raises StorageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"{path}: it cannot be written ({error.strerror}); choose another folder"
        ) from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise StorageError(f"{path}: it cannot be written; choose another name or folder")


def command(argv: list[str]) -> None:
    """Does what the command line asks for."""
    options = parse(PlayConfig, argv, "python -m jaxreward.play", "Plays the policy of a run.")
    summary = play(options, Console(stderr=options.json, soft_wrap=True))
    if options.json:
        print(json.dumps(summary), flush=True)


def main() -> None:
    """The command's entry point."""
    sys.exit(run_command(lambda: command(sys.argv[1:])))


if __name__ == "__main__":
    main()

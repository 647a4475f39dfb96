"""`python -m jaxreward.train`: runs an experiment, or goes on with one."""

from __future__ import annotations

import dataclasses
import json
import os
import sys

from rich.console import Console

from jaxreward.command_line import dataclass_types, nearest, override, run_command
from jaxreward.configs import CONFIGS
from jaxreward.envs import registry
from jaxreward.envs.catrap.levels import level_names
from jaxreward.errors import ConfigError, JaxrewardError
from jaxreward.training.act import Interrupted, interruption
from jaxreward.training.experiment import ExperimentConfig, run_experiment
from jaxreward.training.run_folder import RunFolder, create, finite, open_run, read_config

USAGE = """usage: python -m jaxreward.train --config NAME|FILE [--field.path VALUE ...]
       python -m jaxreward.train --resume RUN

  --config NAME    a named experiment (--list shows them), or the config.json of a former run
  --resume RUN     goes on with an interrupted or killed run
  --env KIND:NAME  another environment: catrap:4, cartridge:4, gymnax:CartPole-v1, brax:hopper,
                   gymnasium:Acrobot-v1
  --runs DIR       where run folders are made (default: runs)
  --json           the last line of standard output is one JSON object with the results
  --list           lists the named experiments
  --help           this text; with --config, every field with its type and value

  --videos DIR     short for --videos.folders DIR: expert videos in place of generated ones

examples:
  python -m jaxreward.train --config=catrap_rta
  python -m jaxreward.train --config=catrap_jax_rta --env.level 4 --seeds 3
  python -m jaxreward.train --config=catrap_jax_rta --reward.mode window --scorer pretrained
"""


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The options that are not fields of the config."""

    config: str | None = None
    resume: str | None = None
    env: str | None = None
    runs: str = "runs"
    json: bool = False
    list: bool = False
    help: bool = False
    fields: tuple[str, ...] = ()  # the rest: overrides of the config's fields


def read_arguments(argv: list[str]) -> Arguments:
    """Splits the command line into the command's own options and the fields of the config.

    Raises:
      ConfigError: an option without its value, or a word that belongs to no option.
    """
    found, fields, rest = {}, [], list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in ("--json", "--list", "--help", "-h"):
            if equals:
                raise ConfigError(f"{name} takes no value, found '{value}'")
            found["help" if name == "-h" else name[2:]] = True
        elif name in ("--config", "--resume", "--env", "--runs"):
            if not equals:
                if not rest or rest[0].startswith("--"):
                    raise ConfigError(f"{name} needs a value")
                value = rest.pop(0)
            found[name[2:]] = value
        elif name == "--videos":
            if not equals and (not rest or rest[0].startswith("--")):
                raise ConfigError("--videos needs the path of a folder")
            fields += ["--videos.folders", *([value] if equals else [])]
        else:
            fields.append(word)
    if fields and not fields[0].startswith("-"):
        raise ConfigError(f"'{fields[0]}' belongs to no option; --help shows them")
    return Arguments(fields=tuple(fields), **found)


def find_config(name: str) -> tuple[str, ExperimentConfig]:
    """A named config, or the one in a config.json.

    Raises:
      ConfigError: there is none; names the nearest.
    """
    if name in CONFIGS:
        return name, CONFIGS[name]
    if name.endswith(".json") or os.path.isfile(name):
        return read_config(name, dataclass_types(ExperimentConfig))
    raise ConfigError(f"there is no config '{name}'{nearest(name, CONFIGS, '--list shows all')}")


def with_absolute_paths(config: ExperimentConfig) -> ExperimentConfig:
    """Makes paths that exist absolute, so that the run can be resumed and played from any folder."""

    def absolute(path: str) -> str:
        return os.path.abspath(path) if os.path.exists(path) else path

    env = config.env
    for field in ("rom", "save_state"):
        if getattr(env, field, ""):
            env = dataclasses.replace(env, **{field: absolute(getattr(env, field))})
    if isinstance(level := getattr(env, "level", None), str):
        # A shipped level's name counts, whatever file has it.
        names = [name.strip() for name in level.split(",")]
        parts = [name if name.zfill(2) in level_names() else absolute(name) for name in names]
        env = dataclasses.replace(env, level=",".join(parts))
    videos = dataclasses.replace(config.videos, folders=tuple(map(absolute, config.videos.folders)))
    scorer = config.scorer
    if scorer not in ("train", "pretrained", "untrained"):
        scorer = absolute(scorer)
    vlm = dataclasses.replace(config.vlm, model=absolute(config.vlm.model))
    return dataclasses.replace(config, env=env, videos=videos, scorer=scorer, vlm=vlm)


def list_configs() -> None:
    """Prints every named experiment with its one line."""
    width = max(map(len, CONFIGS))
    for name, config in CONFIGS.items():
        print(f"{name:{width}}  {config.description}")


def prepare(arguments: Arguments) -> tuple[RunFolder, ExperimentConfig]:
    """Makes the run folder of a new run, or opens that of an interrupted one."""
    if arguments.resume is not None:
        if arguments.config or arguments.env or arguments.fields:
            raise ConfigError("--resume goes on with the run's own config; give no other option with it")
        return open_run(arguments.resume, dataclass_types(ExperimentConfig))
    if arguments.config is None:
        raise ConfigError("give --config NAME (--list shows the names) or --resume RUN")
    name, config = find_config(arguments.config)
    if arguments.env is not None:
        config = dataclasses.replace(config, env=registry.parse(arguments.env))
    config = override(config, arguments.fields, f"python -m jaxreward.train --config={name}")
    config = with_absolute_paths(config)
    return create(arguments.runs, name, config), config


def command(argv: list[str]) -> None:
    """Does what the command line asks for."""
    arguments = read_arguments(argv)
    if arguments.list:
        return list_configs()
    if arguments.help or not argv:
        print(USAGE)
        if arguments.config is not None:
            override(find_config(arguments.config)[1], ["--help"], "python -m jaxreward.train")
        return None
    run, config = prepare(arguments)
    console = Console(stderr=arguments.json, soft_wrap=True)
    try:
        with run.lock(), interruption() as interrupted:
            summary = run_experiment(config, run, console, interrupted)
    except JaxrewardError:
        if arguments.resume is None:
            run.discard_unused()
        raise
    except Interrupted as note:
        raise Interrupted(f"all is saved; python -m jaxreward.train --resume {run.path} goes on") from note
    low, high = summary["success_interval"]
    console.print(
        f"success {summary['success_rate']:.3f} [{low:.3f}, {high:.3f}] (greedy "
        f"{summary['greedy_success_rate']:.3f}), {summary['wall_seconds']:.0f} s; report: {run.report}"
    )
    if arguments.json:
        print(json.dumps(finite(summary), allow_nan=False), flush=True)
    return None


def main() -> None:
    """The command's entry point."""
    sys.exit(run_command(lambda: command(sys.argv[1:])))


if __name__ == "__main__":
    main()

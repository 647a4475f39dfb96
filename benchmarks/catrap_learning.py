"""Does the rank reward teach? PPO on the JAX Catrap, one setting for all levels, with controls.

    python benchmarks/catrap_learning.py --out learning --seeds 3

For every level a scorer is ranked from that level's expert videos; then policies are trained on the
episode reward, the window reward, the sparse oracle, an untrained scorer and a constant. No run stops or
picks a checkpoint by looking at success: the table shows the sampled policy after the last update. A run
that is already in --out is not done again, so the script can be interrupted at any time.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import tyro

from jaxreward.configs import CONFIGS
from jaxreward.envs.catrap import levels, solver
from jaxreward.metrics.statistics import bootstrap_interval

# name: (config, what it is, fields that differ from the config's)
VARIANTS: dict[str, tuple[str, ...]] = {
    "episode": ("catrap_jax_rta", "rank reward, once at the end"),
    "window": ("catrap_jax_rta_window", "rank reward, every 15 steps, summed"),
    "window_mean": ("catrap_jax_rta_window_mean", "the same, averaged over the windows"),
    "success": ("catrap_jax_success", "sparse oracle (privileged)"),
    "untrained": ("catrap_jax_untrained", "control: untrained scorer"),
    "constant": ("catrap_jax_constant", "control: 1 at the end of every episode, however it ends"),
    "constant_step": ("catrap_jax_constant", "control: 1 on every step", "--reward.when", "step"),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
      out: folder of the runs.
      levels: which levels; all were committed before any training.
      variants: which rewards.
      seeds: policies of each level and reward.
      first_seed: the first policy seed.
      updates: the budget; 8,192 environment steps each.
      processes: runs at the same time, each on a core of its own.
      table: where the table is written.
    """

    out: pathlib.Path = pathlib.Path("learning")
    levels: tuple[str, ...] = levels.BENCHMARK_LEVELS
    variants: tuple[str, ...] = (
        "episode",
        "window",
        "success",
        "untrained",
        "constant",
        "constant_step",
    )
    seeds: int = 3
    first_seed: int = 0
    updates: int = CONFIGS["catrap_jax_rta"].act.updates
    processes: int = 2
    table: pathlib.Path = pathlib.Path("docs/results/catrap_learning.md")


def run(options: Options, level: str, variant: str, core: int, scorer: pathlib.Path | None) -> dict:
    """Trains all seeds of one level and reward in a process of its own; returns the run's summary."""
    folder = options.out / f"{level}-{variant}"
    found = sorted(folder.glob("*/summary.json"))
    if found:
        return json.loads(found[-1].read_text())
    command = [
        sys.executable,
        "-m",
        "jaxreward.train",
        "--config",
        VARIANTS[variant][0],
        "--runs",
        str(folder),
    ]
    command += ["--env.level", level, "--seed", str(options.first_seed), "--seeds", str(options.seeds)]
    command += ["--act.updates", str(options.updates), "--json", *VARIANTS[variant][2:]]
    if scorer is not None:
        command += ["--scorer", str(scorer), "--no-preflight"]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.txt", "w") as log:
        subprocess.run(
            command, check=True, stdout=log, stderr=log, preexec_fn=lambda: os.sched_setaffinity(0, {core})
        )
    return json.loads(sorted(folder.glob("*/summary.json"))[-1].read_text())


def main() -> None:
    """Runs what is missing and writes the table."""
    options = tyro.cli(Options)
    cores = sorted(os.sched_getaffinity(0))[: options.processes]
    free = list(cores)
    started = time.perf_counter()
    results: dict[tuple[str, str], dict] = {}

    def job(level: str, variant: str) -> None:
        core = free.pop()
        try:
            scorer = None
            if variant in ("window", "window_mean"):
                ranked = sorted((options.out / f"{level}-episode").glob("*/scorer"))
                if not ranked:
                    sys.exit(f"level {level}: window runs take the scorer of its episode run; run that first")
                scorer = ranked[-1].parent
            results[level, variant] = run(options, level, variant, core, scorer)
            rates = [round(s["sampled"]["success_rate"], 3) for s in results[level, variant]["seeds"]]
            print(f"{time.perf_counter() - started:6.0f} s  level {level}  {variant:11}  {rates}", flush=True)
            write_table(options, dict(results))
        finally:
            free.append(core)

    with concurrent.futures.ThreadPoolExecutor(len(cores)) as pool:
        for variant in options.variants:  # the episode runs train the scorers that the window runs take
            list(pool.map(lambda level, v=variant: job(level, v), options.levels))


def write_table(options: Options, results: dict[tuple[str, str], dict]) -> None:
    """Writes the table of what has been run so far."""
    variants = [v for v in options.variants if any(v == found for _, found in results)]
    lines = [
        "# Learning Catrap from frame order",
        "",
        f"Written by `python benchmarks/catrap_learning.py`: {options.seeds} seeds from "
        f"{options.first_seed}, "
        f"{options.updates} updates of 8,192 environment steps, one setting for all levels. Success of the "
        "sampled policy after the last update (256 episodes a seed): mean over seeds, the seeds, and the "
        "95 % bootstrap interval over seeds. Held-out rho: Spearman correlation on the level's held-out "
        "videos. Random: exact chance that 64 uniformly random moves win.",
        "",
    ]
    lines += [f"- **{v}**: {VARIANTS[v][1]}" for v in variants]
    if "constant" in variants:
        lines += [
            "",
            "A constant at the end is not empty of information: with a discount of 0.99 it is worth more "
            "the sooner an episode ends, and only winning ends one before its time. It is a weak oracle. A "
            "constant on every step pays for staying instead.",
        ]
    lines += ["", "| level | moves | random | held-out rho | " + " | ".join(variants) + " |"]
    lines += ["|---|---|---|---|" + "---|" * len(variants)]
    for level in options.levels:
        graph = solver.explore(levels.load_level(level).cells)
        cells = [level, str(graph.distance[0]), f"{100 * solver.random_success(graph):.2f} %"]
        rho = results.get((level, "episode"), {}).get("heldout_rho")
        cells.append("" if rho is None else f"{rho:.3f}")
        for variant in variants:
            cells.append(_cell(results.get((level, variant))))
        lines.append("| " + " | ".join(cells) + " |")
    means = [_mean(results, options.levels, v) for v in variants]
    lines.append("| **mean** | | | | " + " | ".join(means) + " |")
    options.table.parent.mkdir(parents=True, exist_ok=True)
    options.table.write_text("\n".join(lines) + "\n")


def _cell(summary: dict | None) -> str:
    if summary is None:
        return ""
    rates = [s["sampled"]["success_rate"] for s in summary["seeds"]]
    low, high = bootstrap_interval(rates, np.mean, np.random.default_rng(0))
    return f"**{np.mean(rates):.2f}** ({', '.join(f'{r:.2f}' for r in rates)}) [{low:.2f}, {high:.2f}]"


def _mean(results: dict, names: tuple[str, ...], variant: str) -> str:
    rates = [results[n, variant]["success_rate"] for n in names if (n, variant) in results]
    return f"{np.mean(rates):.3f}" if rates else ""


if __name__ == "__main__":
    main()

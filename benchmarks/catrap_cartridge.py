"""The headline run on the cartridge, seed by seed, each from nothing and apart from the others.

    python benchmarks/catrap_cartridge.py --out cartridge --seeds 0 1 2

A seed whose run is already in --out is not run again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import tyro

HEADER = """# The headline run: `catrap_rta` on the cartridge

Written by `python benchmarks/catrap_cartridge.py`: `python -m jaxreward.train --config=catrap_rta --seed S`
from nothing (expert videos, Stage 1, preflight, 60 updates of 8,192 environment steps on the cartridge, two
evaluations of 256 episodes, videos, report), a seed at a time. No run stops or picks a checkpoint by looking
at success. Level 02: its shortest solution, dead states and random success are in [levels](../levels.md).

Held-out rho: Spearman correlation on held-out videos of the level, and on levels 03 and 04, which the scorer
never saw. Act, score, learn: wall seconds of the 60 updates by phase; the rest is demonstrations, Stage 1,
compilation and evaluation. The seconds depend on what else the machine does.

| seed | rho | rho, other levels | success, sampled [95 %] | greedy | wall s | CPU s | act | score | learn |
|---|---|---|---|---|---|---|---|---|---|
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
      out: folder of the runs.
      seeds: which seeds.
      table: where the table is written.
    """

    out: pathlib.Path = pathlib.Path("cartridge")
    seeds: tuple[int, ...] = (0, 1, 2)
    table: pathlib.Path = pathlib.Path("docs/results/catrap_rta.md")


def run(out: pathlib.Path, seed: int) -> dict:
    """The summary of one seed's run."""
    folder = out / f"seed_{seed}"
    if not list(folder.glob("*/summary.json")):
        command = [sys.executable, "-m", "jaxreward.train", "--config=catrap_rta", f"--seed={seed}"]
        subprocess.run([*command, "--runs", os.fspath(folder)], check=True)
    return json.loads(sorted(folder.glob("*/summary.json"))[-1].read_text())


def row(summary: dict) -> str:
    """One line of the table."""
    seed = summary["seeds"][0]
    low, high = summary["success_interval"]
    phases = seed["phase_seconds"]
    cells = [
        str(seed["seed"]),
        f"{summary['heldout']['videos']:.3f}",
        f"{summary['heldout']['levels']:.3f}",
        f"{summary['success_rate']:.3f} [{low:.3f}, {high:.3f}]",
        f"{summary['greedy_success_rate']:.3f}",
        f"{summary['wall_seconds']:.0f}",
        f"{summary['cpu_seconds']:.0f}",
        *(f"{phases[name]:.0f}" for name in ("act", "score", "learn")),
    ]
    return "| " + " | ".join(cells) + " |\n"


def main() -> None:
    """Runs what is missing and writes the table."""
    options = tyro.cli(Options)
    rows = []
    for seed in options.seeds:
        rows.append(row(run(options.out, seed)))
        options.table.write_text(HEADER + "".join(rows))


if __name__ == "__main__":
    main()

"""Does a model that writes ranks learn to rank? The whole path of the paper, with text, on two cores.

    python benchmarks/catrap_text_ranker.py --out text_ranker

Makes a small Qwen3-VL that can read Catrap and has never seen an order of time (pretrain_text_ranker.py),
then runs the experiment `catrap_vlm_rta` on it: GRPO with a LoRA on expert videos of one level, and PPO on
the frozen ranker's rewards. Interrupted, it goes on where it was.
Writes a table and the curve of Stage 1.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys

import tyro
from pretrain_text_ranker import Options as PretrainOptions
from pretrain_text_ranker import main as pretrain

RESULTS = pathlib.Path(__file__).resolve().parents[1] / "docs" / "results"


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
      out: folder of the model and the run.
      seed: of the model and the run.
      table: where the table is written.
      picture: where the curve is drawn.
    """

    out: pathlib.Path = pathlib.Path("text_ranker")
    seed: int = 0
    table: pathlib.Path = RESULTS / "catrap_text_ranker.md"
    picture: pathlib.Path = RESULTS / "catrap_text_ranker.png"


def main(options: Options) -> None:
    """Runs what is missing and writes the results."""
    model, runs = options.out / "model", options.out / "runs"
    pretrain(PretrainOptions(out=model, seed=options.seed))
    found = sorted(runs.glob("*/config.json"))
    if not found or not (found[-1].parent / "summary.json").exists():
        new = ["--config=catrap_vlm_rta", f"--vlm.model={model}", f"--runs={runs}", f"--seed={options.seed}"]
        choice = ["--resume", str(found[-1].parent)] if found else new
        subprocess.run([sys.executable, "-m", "jaxreward.train", *choice], check=True)
    run = sorted(runs.glob("*/config.json"))[-1].parent
    rows = [json.loads(line) for line in (run / "rank_metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    card = json.loads((run / "scorer" / "scorer.json").read_text())
    samples = [json.loads(line) for line in (run / "rank_samples.jsonl").read_text().splitlines()]
    pretraining = json.loads((model / "pretraining.json").read_text())
    text = report(pretraining, rows, card, summary, samples)
    options.table.write_text(text, encoding="utf-8")
    draw(rows, options.picture)
    print(text)


def report(pretraining: dict, rows: list[dict], card: dict, summary: dict, samples: list[dict]) -> str:
    """The table as Markdown."""
    lines = [
        "# A text ranker, from nothing",
        "",
        "Written by `python benchmarks/catrap_text_ranker.py`. A Qwen3-VL of "
        f"{pretraining['parameters'] / 1e6:.1f} million parameters learns to describe frames of random "
        "levels and to write the form of an answer, with ranks by random criteria "
        f"({pretraining['seconds']:.0f} s; it then describes {pretraining['described']:.1%} of the frames of "
        "fresh random levels right in all three numbers, and its orders correlate by "
        f"{pretraining['ordered']:.2f} with the criterion that it names), then to rank by GRPO on "
        f"{card['videos']} expert videos of level 02 ({card['seconds']:.0f} s, evaluations included). `rho`: "
        "mean Spearman correlation with time on clips of held-out videos, an answer that cannot be read "
        "counting as -1; `levels`: on levels whose videos never train.",
        "",
        "![Stage 1](catrap_text_ranker.png)",
        "",
        "| updates | mean reward of sampled answers | parse failures | rho, held-out videos | "
        "parse failures there | rho, other levels | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['step']:.0f} | "
            + (f"{row['reward']:.3f} | {row['parse_failures']:.2%}" if "reward" in row else "- | -")
            + f" | {row['rho/videos']:.3f} | {row['parse_failures/videos']:.2%} | {row['rho/levels']:.3f} | "
            f"{row['seconds']:.0f} |"
        )
    lines += [
        "",
        f"Before the first update rho is {rows[0]['rho/videos']:.3f}: what comes after is GRPO's.",
        "",
        f"Stage 2 on the frozen text ranker: success {summary['success_rate']:.3f} of the sampled policy "
        f"after {summary['env_steps']:,} environment steps; {summary['wall_seconds']:.0f} s for the whole "
        f"run with Stage 1, {summary['cpu_seconds']:.0f} CPU-s.",
        "",
        "An answer at the end of Stage 1:",
        "",
        "```",
        samples[-1]["answer"],
        "```",
        "",
    ]
    return "\n".join(lines)


def draw(rows: list[dict], path: pathlib.Path) -> None:
    """Stage 1's curve, PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    updates = [row for row in rows if "reward" in row]
    minutes = lambda chosen: [row["seconds"] / 60 for row in chosen]  # noqa: E731
    axes.plot(minutes(rows), [row["rho/videos"] for row in rows], "o-", label="rho, held-out videos")
    axes.plot(minutes(rows), [row["rho/levels"] for row in rows], "s-", label="rho, other levels")
    axes.plot(minutes(updates), [row["reward"] for row in updates], "--", label="reward of sampled answers")
    axes.plot(
        minutes(updates), [row["parse_failures"] for row in updates], ":", label="share of parse failures"
    )
    axes.axhline(0.8, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="minutes of Stage 1", ylim=(-1.05, 1.05))
    axes.legend(loc="lower right")
    figure.savefig(path, format="png", dpi=120)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

"""report.html: one page about a finished run; videos and pictures lie beside it."""

from __future__ import annotations

import base64
import html
import io
import json
from typing import Any

import matplotlib
import matplotlib.figure
import numpy as np

from jaxreward.metrics.recorder import read_metrics

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child { text-align: left }
img, video { max-width: 100% }
.warning { background: #fff3cd; padding: .5rem 1rem; border-left: 4px solid #e0a800 }
pre { background: #f7f8fa; padding: 1rem; overflow-x: auto }
"""
matplotlib.use("Agg")


def learning_curve(runs: dict[str, list[dict[str, float]]]) -> bytes:
    """Success and episode reward (on wins, on failures) over environment steps, as a PNG.

    Args:
      runs: {label: metrics rows}, one for each seed.
    """
    figure = matplotlib.figure.Figure(figsize=(10, 3.6), layout="constrained")
    success, reward = figure.subplots(1, 2)
    for label, rows in runs.items():
        steps = [row["env_steps"] for row in rows]
        success.plot(steps, _series(rows, "success"), label=label)
        (line,) = reward.plot(steps, _series(rows, "return"), label=label)
        for name, style in (("return_on_wins", ":"), ("return_on_failures", "--")):
            reward.plot(steps, _series(rows, name), style, color=line.get_color(), alpha=0.6, linewidth=1)
    success.set(xlabel="environment steps", ylabel="success of training episodes", ylim=(-0.03, 1.03))
    reward.set(xlabel="environment steps", ylabel="episode reward")
    reward.set_title("dotted: of wins, dashed: of failures", fontsize="medium")
    for axes in (success, reward):
        axes.grid(alpha=0.3)
    if len(runs) > 1:
        success.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def write_report(run, config_json: Any, summary: dict[str, Any], preflight) -> None:
    """Writes the run's report.html.

    Args:
      run: the RunFolder.
      config_json: the resolved config, as JSON can hold it.
      summary: what the run found.
      preflight: a PreflightResult, or None.

    Raises:
      StorageError: the folder cannot be written.
    """
    single = len(summary["seeds"]) == 1
    folders = {
        f"seed {s['seed']}": run.path if single else run.path / f"seed_{s['seed']}" for s in summary["seeds"]
    }
    picture = base64.b64encode(learning_curve({k: read_metrics(f) for k, f in folders.items()})).decode()
    rows = [
        (
            f"seed {s['seed']}",
            _rate(s["sampled"]),
            _rate(s["greedy"]),
            f"{s['sampled']['length']:.1f}",
            f"{s['env_steps']:,}",
            f"{s['train_seconds']:.0f} s",
        )
        for s in summary["seeds"]
    ]
    parts = [
        f"<!doctype html><meta charset=utf-8><title>{_text(summary['config'])}</title><style>{STYLE}</style>",
        f"<h1>{_text(summary['config'])}</h1>",
        f"<p>{_text(summary['description'])}</p>",
    ]
    parts += [
        f"<p class=warning>seed {s['seed']}: {_text(s['hacking'])}</p>"
        for s in summary["seeds"]
        if s["hacking"]
    ]
    headings = ("", "success, sampled", "success, greedy", "length", "environment steps", "training")
    parts += ["<h2>Result</h2>", _table(headings, rows), f'<img src="data:image/png;base64,{picture}">']
    if summary["heldout"]:
        rhos = [(name, f"{rho:.3f}") for name, rho in summary["heldout"].items()]
        parts += ["<h2>Scorer</h2>", _table(("held-out set", "Spearman's rho"), rhos)]
    if (run.path / "transfer.png").exists():
        parts += [
            "<h2>Transfer between levels</h2>",
            "<p>Spearman's rho of scorers that were trained on one level each, on all.</p>",
            "<img src='transfer.png'>",
        ]
    if preflight is not None:
        kinds = [(k, f"{m:.3f}", f"{s:.3f}", str(n)) for k, m, s, n in preflight.table()]
        parts += [
            "<h2>Preflight: reward of an episode</h2>",
            _table(("clips", "mean", "std", "number"), kinds),
        ]
        parts += [f"<p class=warning>{_text(w)}</p>" for w in preflight.warnings()]
    parts.append("<h2>Episodes</h2>")
    for s in summary["seeds"]:
        for name, path in s["videos"].items():
            source = _text(path)
            parts.append(f"<p>seed {s['seed']}, {name}:<br><video controls loop src='{source}'></video></p>")
    parts += ["<h2>Config</h2>", f"<pre>{_text(json.dumps(config_json, indent=1))}</pre>"]
    run.write_text("report.html", "\n".join(parts))


def _rate(summary: dict[str, Any]) -> str:
    if summary["success_interval"] is None:
        return f"{summary['success_rate']:.3f}"
    low, high = summary["success_interval"]
    return f"{summary['success_rate']:.3f} [{low:.3f}, {high:.3f}]"


def _series(rows: list[dict[str, float]], name: str) -> np.ndarray:
    return np.array([np.nan if row.get(name) is None else row[name] for row in rows], float)


def _text(value: Any) -> str:
    return html.escape(str(value))


def _table(headings, rows) -> str:
    head = "".join(f"<th>{_text(h)}</th>" for h in headings)
    body = "".join("<tr>" + "".join(f"<td>{_text(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"

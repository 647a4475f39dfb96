"""Trains the shipped general ranker on generated Catrap levels and measures it on unseen ones.

    python benchmarks/train_general_ranker.py

writes `general_ranker.safetensors`, `.json` and `.md` into `checkpoints/pretrained`. With the defaults it
takes some seven minutes of one CPU core; the same command gives the same numbers on the same machine.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from jaxreward.checkpoints.pretrained import PRETRAINED, save_scorer
from jaxreward.envs.catrap import generate, levels, render, rules, solver
from jaxreward.models.frame_ranker import FrameRankerConfig
from jaxreward.scorers.compact_ranker import CompactRanker
from jaxreward.training.rank import RankConfig, Videos, heldout_rho, train_ranker
from jaxreward.types import Array

MAX_MOVES = 64
TRAINING_KINDS = ("optimal", "near_optimal", "near_optimal", "dithering")
EXPERT_KINDS = ("optimal", "near_optimal")


@dataclasses.dataclass(frozen=True)
class GeneralRankerConfig:
    """What the general ranker is trained on.

    Attributes:
      levels: generated levels to train on; each is also used mirrored.
      unseen_levels: generated levels to evaluate on, none of which (mirrored or not) was trained on.
      videos: expert videos of each level.
      seed: of the training levels, their videos and the parameters.
      unseen_seed: of the unseen levels and all evaluation videos.
      steps: training steps.
      out: folder to write to.
      name: stem of the files.
    """

    levels: int = 500
    unseen_levels: int = 24
    videos: int = 12
    seed: int = 0
    unseen_seed: int = 1_000_000
    steps: int = 1_500
    out: pathlib.Path = PRETRAINED
    name: str = "general_ranker"


def draw(frames: Array) -> Array:
    """Draws sprites int8 [..., 9, 10, 1] as grey pictures uint8 [..., 36, 40, 1]."""
    return render.grey(frames[..., 0], scale=4, crop=False)


@functools.partial(jax.vmap, in_axes=(None, 0))
def play(cells: Array, actions: Array) -> Array:
    """The sprites int8 [MAX_MOVES + 1, 9, 10] of a game before the first and after every action."""

    def advance(state, action):
        state = rules.step(state, action)
        return state, render.sprites(state)

    state = rules.load(cells)
    _, after = jax.lax.scan(advance, state, actions)
    return jnp.concatenate([render.sprites(state)[None], after])


_play = jax.jit(play)


def record(cells: np.ndarray, count: int, kinds: tuple[str, ...], rng: np.random.Generator) -> Videos:
    """Winning videos of one level, as sprites int8 [count, MAX_MOVES + 1, 9, 10, 1]."""
    graph = solver.explore(cells)
    actions, lengths = np.zeros((count, MAX_MOVES), np.int32), np.zeros(count, np.int32)
    for i in range(count):
        moves = solver.sample_expert(graph, rng, kinds[i % len(kinds)], MAX_MOVES)
        actions[i, : len(moves)], lengths[i] = moves, len(moves) + 1
    frames = np.asarray(_play(jnp.asarray(cells), jnp.asarray(actions)))
    return Videos(frames[..., None], lengths, np.ones(count, np.float32))


def join(videos: list[Videos]) -> Videos:
    """Puts sets of videos together."""
    return Videos(*(np.concatenate(parts) for parts in zip(*videos, strict=True)))


def unseen(config: GeneralRankerConfig, known: set[bytes]) -> dict[str, np.ndarray]:
    """Generated levels that are neither in `known` nor mirrors of such."""
    drawn = generate.generate(config.unseen_seed, config.unseen_levels + 8)
    new = [cells for cells in drawn if cells.tobytes() not in known]
    return {f"unseen {i:02}": cells for i, cells in enumerate(new[: config.unseen_levels])}


def evaluate(scorer: CompactRanker, params, sets: dict[str, Videos], key: Array) -> dict[str, float]:
    """Mean Spearman correlation over 256 clips of each set."""
    return {name: heldout_rho(scorer, params, videos, key, render=draw) for name, videos in sets.items()}


def summarise(rhos: dict[str, float]) -> dict[str, float]:
    """Mean, lowest and highest over levels."""
    values = np.array(list(rhos.values()))
    return {"mean": float(values.mean()), "lowest": float(values.min()), "highest": float(values.max())}


def main(config: GeneralRankerConfig) -> None:
    """Generates, trains, evaluates, writes."""
    started = time.process_time()
    training = generate.generate(config.seed, config.levels)
    both = training + [np.ascontiguousarray(cells[:, ::-1]) for cells in training]
    known = {cells.tobytes() for cells in both}
    rng = np.random.default_rng(config.seed)
    train = join([record(cells, config.videos, TRAINING_KINDS, rng) for cells in both])
    shipped = {level.name: level.cells for level in levels.all_levels()}
    overlap = [name for name, cells in shipped.items() if cells.tobytes() in known]
    rng = np.random.default_rng(config.unseen_seed)
    sets = {
        "unseen": {
            name: record(cells, 16, EXPERT_KINDS, rng) for name, cells in unseen(config, known).items()
        },
        "shipped": {name: record(cells, 16, EXPERT_KINDS, rng) for name, cells in shipped.items()},
    }
    generated = time.process_time() - started
    print(f"{len(train.lengths)} videos of {len(both)} levels in {generated:.0f} CPU-s", flush=True)

    rank = RankConfig(
        steps=config.steps, batch_size=64, decay="cosine", evaluate_every=100, evaluation_clips=512
    )
    key = jax.random.key(config.seed)
    watched = {"unseen": join(list(sets["unseen"].values()))}

    def report(_, row: dict[str, float]) -> None:
        spent = time.process_time() - started
        print(
            f"{row['step']:6.0f} reward {row['reward']:.3f} unseen {row['rho/unseen']:.3f} {spent:.0f} CPU-s"
        )

    result = train_ranker(rank, FrameRankerConfig(), train, watched, key, report, render=draw)
    spent = time.process_time() - started
    scorer = CompactRanker(result.model)
    untrained = scorer.init(jax.random.key(config.seed + 1), (*result.model.frame_shape, 1))
    key = jax.random.key(config.unseen_seed)
    scores = {
        name: {
            "trained": evaluate(scorer, result.params, videos, key),
            "untrained": evaluate(scorer, untrained, videos, key),
        }
        for name, videos in sets.items()
    }
    metadata = {
        "made_by": "python benchmarks/train_general_ranker.py",
        "config": {name: value for name, value in dataclasses.asdict(config).items() if name != "out"},
        "rank": dataclasses.asdict(rank),
        "shipped_levels_trained_on": overlap,
        "cpu_seconds": round(spent),
        "rho": scores,
    }
    save_scorer(config.out, result.model, result.params, metadata, name=config.name)
    (config.out / f"{config.name}.md").write_text(card(config, rank, metadata))
    print({name: summarise(score["trained"]) for name, score in scores.items()})


def card(config: GeneralRankerConfig, rank: RankConfig, metadata: dict) -> str:
    """The model card, in Markdown."""
    rho = metadata["rho"]
    rows = [
        f"| {name} | {trained:.3f} | {rho[which]['untrained'][name]:.3f} |"
        for which in rho
        for name, trained in rho[which]["trained"].items()
    ]
    means = [
        f"| **mean, {which}** | **{summarise(rho[which]['trained'])['mean']:.3f}** "
        f"| {summarise(rho[which]['untrained'])['mean']:.3f} |"
        for which in rho
    ]
    overlap = ", ".join(metadata["shipped_levels_trained_on"]) or "none"
    return CARD.format(
        config=config, rank=rank, cpu=metadata["cpu_seconds"], overlap=overlap, rows="\n".join(means + rows)
    )


CARD = """# General ranker

A compact frame ranker for Catrap pictures: given the frames of a clip in any order, the earliest first,
it says which come later on the way to a solution. Apache-2.0, like the rest of the package.

## How it was made

`python benchmarks/train_general_ranker.py`: {config.levels} generated levels (seed {config.seed}) and their
mirror images, {config.videos} winning videos of each (a quarter shortest solutions, half with up to 30 % and
a quarter with 40 to 70 % of detours), drawn as grey pictures of 36 x 40 pixels. {rank.steps} steps of GRPO
on {rank.batch_size} clips of {rank.clips.length} frames (consecutive, whole videos and all spans between),
{rank.group_size} rankings sampled for each, {rank.epochs} epochs, Adam {rank.learning_rate} with
{rank.warmup_steps} warm-up steps and cosine decay. {cpu} CPU-seconds, the generation of levels included.
No picture comes from any commercial game.

## What it scored

Mean Spearman correlation between its order and time over 256 clips a level, from 16 videos (shortest
solutions, and with up to 30 % of detours) that it never saw; 'untrained' is the same network with random
parameters. The 'unseen' levels come from the same generator with seed {config.unseen_seed}; the numbered
ones are the levels that ship with the package. Shipped levels among those trained on: {overlap}.

| level | trained | untrained |
|---|---|---|
{rows}

## Intended use

`load_pretrained("general_ranker")` gives a reward model for Rank-Then-Act on Catrap levels without any
video of them. `CompactRanker(config).score` takes pictures of 36 x 40 pixels or a whole multiple of that
(144 x 160), grey or RGB. For best results on one level, train on videos of that level.

## Limits

- It knows Catrap's pictures and nothing else; on other games its values mean nothing.
- Levels 21 and 22 have two cats; all training levels have one.
- A rank correlation has no scale: an agent that covers half of a solution slowly is paid almost like one
  that wins. Watch success beside the reward.
- It was trained on winning play. Its order of dead ends, or of aimless play, is an extrapolation.
"""


if __name__ == "__main__":
    main(tyro.cli(GeneralRankerConfig, description=__doc__))

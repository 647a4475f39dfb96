"""The shipped general ranker on levels that nobody has seen before."""

import pathlib
import runpy

import jax
import numpy as np

from jaxreward.checkpoints.pretrained import PRETRAINED, load_pretrained
from jaxreward.envs.catrap import generate
from jaxreward.scorers.compact_ranker import CompactRanker
from jaxreward.training.rank import heldout_rho

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "train_general_ranker.py"


def test_it_orders_freshly_generated_levels_and_an_untrained_one_does_not():
    script = runpy.run_path(str(SCRIPT), run_name="train_general_ranker")
    record, draw = script["record"], script["draw"]
    config, params, card = load_pretrained("general_ranker")
    assert card["metadata"]["config"]["seed"] != 77 != card["metadata"]["config"]["unseen_seed"]
    scorer, rng = CompactRanker(config), np.random.default_rng(77)
    untrained = scorer.init(jax.random.key(77), (*config.frame_shape, 1))
    sets = [record(cells, 8, ("near_optimal",), rng) for cells in generate.generate(77, 4)]
    rho = lambda params: np.mean(  # noqa: E731
        [heldout_rho(scorer, params, videos, jax.random.key(1), clips=64, render=draw) for videos in sets]
    )
    assert rho(params) >= 0.85
    assert rho(untrained) < 0.6


def test_the_card_is_small_complete_and_tells_the_same_as_the_record():
    _, _, card = load_pretrained()
    text = (PRETRAINED / "general_ranker.md").read_text()
    unseen = list(card["metadata"]["rho"]["unseen"]["trained"].values())
    assert len(unseen) >= 20 and np.mean(unseen) >= 0.85
    assert f"**{np.mean(unseen):.3f}**" in text
    assert (PRETRAINED / "general_ranker.safetensors").stat().st_size < 4_000_000

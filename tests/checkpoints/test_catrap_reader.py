"""The shipped model that writes: it reads frames of levels that nobody has seen before."""

import pathlib
import re
import runpy

import jax
import numpy as np
import pytest

from jaxreward.checkpoints.pretrained import PRETRAINED, pretrained_model
from jaxreward.envs.catrap.environment import TASK
from jaxreward.errors import ModelError
from jaxreward.models.generate import GenerateConfig
from jaxreward.scorers.chat_model import ChatModel
from jaxreward.scorers.parsing import parse_ranks
from jaxreward.scorers.prompts import rank_frames

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "pretrain_text_ranker.py"
DESCRIPTION = re.compile(r"Frame Description: cat (\d+) (\d+) monsters (\d+)")


def test_it_describes_and_ranks_frames_of_freshly_drawn_levels():
    script = runpy.run_path(str(SCRIPT), run_name="pretrain_text_ranker")
    chat, pictures = ChatModel.load(pretrained_model("catrap_reader")), script["Pictures"](16, 77)
    clips = pictures.draw(8, 15)
    answers, _ = chat.answer(
        chat.model.params, [rank_frames(TASK, 14, describe=True)] * 8, pictures.pixels(clips),
        jax.random.key(0), GenerateConfig(0.0, 128),
    )  # fmt: skip
    assert all(parse_ranks(answer, 14).ok for answer in answers)
    said = np.array([[int(x) for x in row] for answer in answers for row in DESCRIPTION.findall(answer)])
    true = np.concatenate([script["facts"](clip[1:]) for clip in clips])
    assert (said[:, :2] == true[:, :2]).all(1).mean() >= 0.6
    counted = (said[:, 2] == true[:, 2]).mean()
    assert counted >= 0.5 and counted >= (said[:, 2] == np.roll(true[:, 2], 1)).mean() + 0.15


def test_it_is_small_and_a_card_is_with_it():
    folder = PRETRAINED / "catrap_reader"
    assert (folder / "README.md").is_file()
    assert (folder / "model.safetensors").stat().st_size < 6_000_000


def test_a_folder_comes_before_a_shipped_name(tmp_path, monkeypatch):
    own = tmp_path / "catrap_reader"
    own.mkdir()
    (own / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert pretrained_model("catrap_reader") == pathlib.Path("catrap_reader")
    with pytest.raises(ModelError, match=r"no_such: no Hugging Face folder .*; shipped: catrap_reader"):
        pretrained_model("no_such")

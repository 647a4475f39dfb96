"""Makes a small Qwen3-VL from nothing that reads frames of Catrap and answers in text.

    python benchmarks/pretrain_text_ranker.py --out text_ranker

No small vision-language model is at hand whose weights could be shipped, so this one is trained here: first
its vision tower to name the sprite of every cell, then the whole to answer the request for ranks: it says by
what it orders the frames (the cat's row, its column, the monsters, upwards or downwards: drawn at random for
each answer), and then for every frame where the cat is, how many monsters are left, and the rank. It learns
to order pictures, and nothing about the order of time, which it never sees. Its levels are drawn at
random, too, and no shipped level is among them. What comes out is a Hugging Face folder (config.json,
model.safetensors, tokenizer, preprocessor_config.json), as every other model is read from one. Stage 1 then
teaches it to rank by progress: see benchmarks/catrap_text_ranker.py.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from scipy.stats import spearmanr
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxreward.agents import supervised_fine_tuning
from jaxreward.envs.catrap import art, generate, levels, render
from jaxreward.envs.catrap.environment import TASK
from jaxreward.models import weights
from jaxreward.models.chat import QWEN_IMAGE_TOKEN, make_prompts, qwen_image_texts
from jaxreward.models.generate import GenerateConfig
from jaxreward.models.preprocess import load_image_spec, qwen_patches
from jaxreward.models.qwen_inputs import rope_positions, vision_inputs
from jaxreward.models.tokenizer import load_tokenizer, token_ids
from jaxreward.scorers import prompts as questions
from jaxreward.scorers.chat_model import ChatModel
from jaxreward.scorers.parsing import parse_ranks

MOST_FRAMES = 15
FACTS = ("row", "column", "monsters")
CRITERIA = tuple(f"Order: {fact} {way}" for fact in FACTS for way in ("up", "down"))
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """How the model is made.

    Attributes:
      out: the folder of the model; a folder that is complete is left as it is.
      vision_steps: steps of the vision tower alone, on cells.
      stages: (steps, frames of a clip with its first, clips of a step) of the whole, in order.
      vision_learning_rate: the largest of a cosine schedule, for the tower.
      learning_rate: the same for the decoder.
      levels: random levels that the frames are of.
      seed: of everything.
      report_every: steps between reports.
    """

    out: pathlib.Path = pathlib.Path("text_ranker")
    vision_steps: int = 2500
    stages: tuple[tuple[int, int, int], ...] = ((400, 2, 48), (400, 5, 24), (1300, 15, 16))
    vision_learning_rate: float = 2e-3
    learning_rate: float = 1e-3
    levels: int = 512
    seed: int = 0
    report_every: int = 50


def facts(frames: np.ndarray) -> np.ndarray:
    """int [n, 3] of frames int8 [n, 9, 10]: the cat's row and column, and how many monsters are left."""
    cats = [np.argwhere(frame >= art.ACTIVE_RIGHT)[0] for frame in frames]
    monsters = np.isin(frames, (art.WALKER, art.FLYER)).sum((1, 2))
    return np.column_stack([np.array(cats), monsters])


def describe(shown: np.ndarray) -> list[str]:
    """Descriptions of frames whose facts are int [n, 3]."""
    return [f"cat {row} {column} monsters {monsters}" for row, column, monsters in shown]


def ranks_by(number: int, shown: np.ndarray) -> np.ndarray:
    """Ranks 1 .. n of frames whose facts are int [n, 3], by CRITERIA[number]; ties by the other facts."""
    first, way = divmod(number, 2)
    others = [shown[:, fact] for fact in range(len(FACTS)) if fact != first]
    return 1 + np.argsort(np.lexsort([*others, shown[:, first] * (-1 if way else 1)]))


def answer(number: int, shown: np.ndarray) -> str:
    """What CRITERIA[number] makes of frames whose facts are [n, 3]."""
    ranked = questions.rank_answer(ranks_by(number, shown), description=describe(shown))
    return f"{CRITERIA[number]}\n{ranked}"


def make_tokenizer(folder: pathlib.Path) -> dict[str, int]:
    """Trains a small byte-level BPE on the texts that the model will see; returns the ids of SPECIAL."""
    texts = []
    for count in range(1, MOST_FRAMES + 5):
        for form in (False, True):
            (turn,) = questions.rank_frames(TASK, count, describe=form)
            texts += [part["text"] for part in turn["content"] if part["type"] == "text"]
        texts.append(questions.rank_answer(range(1, count + 1)))
        descriptions = describe(np.tile([[count], [0], [9]], count).T)
        texts.append(questions.rank_answer(range(1, count + 1), description=descriptions))
    texts += [f" {number}" for number in range(100)]
    texts.append("user assistant system")
    tokenizer = Tokenizer(models.BPE())
    # All that stands between two numbers becomes one token: answers are short, and decoding is what costs.
    split = pre_tokenizers.Split(Regex(r" ?[0-9]+|[^0-9]+?(?= ?[0-9])|[^0-9]+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, min_frequency=1, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in CRITERIA])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return {text: tokenizer.token_to_id(text) for text in SPECIAL} | {"": tokenizer.get_vocab_size()}


def make_config(ids: dict[str, int]) -> dict:
    """config.json of the model: 0.9 million parameters in the shape of Qwen3-VL."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": "float32",
        "tie_word_embeddings": True,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "text_config": {
            "model_type": "qwen3_vl_text",
            "vocab_size": -(-ids[""] // 64) * 64,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "max_position_embeddings": 4096,
            "eos_token_id": ids["<|im_end|>"],
            "rope_parameters": {
                "rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5],
                "rope_theta": 10000.0,
            },
        },
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_heads": 4,
            "in_channels": 3,
            "patch_size": 10,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": 128,
            "num_position_embeddings": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "deepstack_visual_indexes": [0, 1],
        },
    }  # fmt: skip


class Pictures:
    """Clips of random levels, with the cat and the monsters in random cells."""

    def __init__(self, count: int, seed: int) -> None:
        """Draws `count` levels, none of which is shipped."""
        rng = np.random.default_rng(seed)
        shipped = {level.cells.tobytes() for level in levels.all_levels()}
        self.levels = []
        while len(self.levels) < count:
            cells = generate.draw(rng)
            if cells.tobytes() not in shipped:
                self.levels.append(cells)
        self.rng = rng
        self._render = jax.jit(lambda frames: render.render(frames, 4))

    def pixels(self, frames: np.ndarray) -> np.ndarray:
        """uint8 [n, 36, 40, 3] of compact frames [..., 9, 10]."""
        return np.asarray(self._render(frames)).reshape(-1, 36, 40, 3)

    def draw(self, batch: int, frames: int) -> np.ndarray:
        """int8 [batch, frames, 9, 10], compact frames; those of a clip are of one level."""
        rng, clips = self.rng, np.empty((batch, frames, art.ROWS, art.COLUMNS), np.int8)
        for clip in clips:
            level = self.levels[rng.integers(len(self.levels))].copy()
            free = (level == art.CAT) | np.isin(level, (art.WALKER, art.FLYER))
            kinds = level[np.isin(level, (art.WALKER, art.FLYER))]
            level[free] = art.EMPTY
            for frame in clip:
                frame[:] = level
                sand = np.argwhere(frame == art.SAND)
                for row, column in sand[rng.random(len(sand)) < 0.2]:
                    frame[row, column] = art.EMPTY
                open_cells = np.argwhere(np.isin(frame, (art.EMPTY, art.LADDER)))
                left = rng.integers(0, len(kinds) + 1)
                chosen = open_cells[rng.permutation(len(open_cells))[: left + 1]]
                for kind, (row, column) in zip(kinds[:left], chosen[1:], strict=False):
                    frame[row, column] = kind
                row, column = chosen[0]
                cat = art.ACTIVE_LADDER if frame[row, column] == art.LADDER else art.ACTIVE_RIGHT
                frame[row, column] = cat + (cat == art.ACTIVE_RIGHT) * rng.integers(2)
        return clips


class CellReader(nn.Module):
    """Throw-away heads that say what image tokens [F, n, D] show: every cell, and where the cat is.

    The second is linear in the mean of the tokens, so that it is easy to read for attention, too.
    """

    @nn.compact
    def __call__(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns logits (of each cell's sprite [F, 90, 13], of the cat's cell [F, 90])."""
        cells = nn.Dense(art.ROWS * art.COLUMNS * art.NUM_SPRITES)(rows.reshape(len(rows), -1))
        return cells.reshape(len(rows), -1, art.NUM_SPRITES), nn.Dense(art.ROWS * art.COLUMNS)(rows.mean(1))


def pretrain_vision(options: Options, module, params, pictures: Pictures, spec, started: float):
    """Trains the vision tower on the cells of frames; returns (params, reports)."""
    frames, reader = 128, CellReader()
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, options.vision_learning_rate, 50, options.vision_steps, 0.1 * options.vision_learning_rate
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

    def features(trained, images):
        full = {"params": {**params["params"], "vision": trained["vision"]}}
        return module.apply(full, images, method="encode_images").rows.reshape(frames, -1, 128)

    @jax.jit
    def step(trained, state, images, sprites):
        def loss(trained):
            cells, cat = reader.apply(trained["reader"], features(trained, images))
            flat = sprites.reshape(frames, -1)
            place = jnp.argmax(flat >= art.ACTIVE_RIGHT, axis=-1)
            xent = optax.softmax_cross_entropy_with_integer_labels
            right = (jnp.argmax(cells, -1) == flat).mean()
            found = (jnp.argmax(cat, -1) == place).mean()
            wrong = 0.2 * xent(cells, flat).sum(-1).mean() + 5.0 * xent(cat, place).mean()
            return wrong, (right, found)

        (value, shares), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(trained, updates), state, value, shares

    trained = {
        "vision": params["params"]["vision"],
        "reader": reader.init(jax.random.key(options.seed + 1), jnp.zeros((1, 4, 128))),
    }
    state, history = optimizer.init(trained), []
    for number in range(1, options.vision_steps + 1):
        sprites = pictures.draw(frames // 4, 4).reshape(frames, art.ROWS, art.COLUMNS)
        images = vision_inputs(module.config, *qwen_patches(list(pictures.pixels(sprites)), spec))
        trained, state, value, (right, found) = step(trained, state, images, sprites)
        if number % (5 * options.report_every) == 0:
            seconds = time.perf_counter() - started
            history.append({"vision_step": number, "cells": float(right), "cat": float(found)})
            print(
                f"vision {number}/{options.vision_steps}  loss {float(value):.3f}  cells {float(right):.3f}  "
                f"cat {float(found):.3f}  {seconds:.0f} s",
                flush=True,
            )
    return {"params": {**params["params"], "vision": trained["vision"]}}, history


class Lesson:
    """Draws batches: shuffled clips, the request for ranks, and answers that hold nothing about time."""

    def __init__(self, tokenizer, spec, module, pictures: Pictures, end: int, seed: int) -> None:
        """Binds the parts; `end` is the token that ends an answer."""
        self.tokenizer, self.spec, self.module, self.pictures = tokenizer, spec, module, pictures
        self.end, self.rng = end, np.random.default_rng(seed)

    def draw(self, size: int, frames: int):
        """(prompts, images, tokens, where) of `size` clips."""
        clips = self.pictures.draw(size, frames)
        patches, grids = qwen_patches(list(self.pictures.pixels(clips)), self.spec)
        texts = [answer(self.rng.integers(len(CRITERIA)), facts(clip[1:])) for clip in clips]
        prompts = make_prompts(
            self.tokenizer, [questions.rank_frames(TASK, frames - 1, describe=True)] * size,
            image_token=QWEN_IMAGE_TOKEN, image_texts=qwen_image_texts(grids),
            positions=lambda tokens, own: rope_positions(tokens, grids[own], self.module.config),
        )  # fmt: skip
        answers = [[*row, self.end] for row in token_ids(self.tokenizer, texts, add_special_tokens=False)]
        tokens = np.zeros((size, 9 * frames), np.int32)
        for row, own in zip(tokens, answers, strict=True):
            row[: len(own)] = own
        where = np.arange(tokens.shape[1]) < np.array([[len(own)] for own in answers])
        return prompts, vision_inputs(self.module.config, patches, grids), tokens, where


def pretrain_text(options: Options, lesson: Lesson, optimizer, params, started: float):
    """Trains on the stages; returns (params, reports)."""
    module = lesson.module
    step = supervised_fine_tuning.make_step(
        module, optimizer, lambda variables, trained: trained,
        lambda variables, images: module.apply(variables, images, method="encode_images"),
    )  # fmt: skip
    lessons = [(frames, size) for steps, frames, size in options.stages for _ in range(steps)]
    state, history, losses = optimizer.init(params), [], []
    for number, (frames, size) in enumerate(lessons, 1):
        params, state, loss = step(params, state, {}, *lesson.draw(size, frames))
        losses.append(loss)
        if number % options.report_every == 0:
            seconds, mean = time.perf_counter() - started, float(jnp.stack(losses).mean())
            losses.clear()
            history.append({"step": number, "frames": frames, "seconds": seconds, "loss": mean})
            print(
                f"text {number}/{len(lessons)}  {frames} frames  loss {mean:.4f}  {seconds:.0f} s", flush=True
            )
    return params, history


def main(options: Options) -> None:
    """Makes the folder, or says that it is there."""
    if (options.out / "model.safetensors").exists():
        print(f"{options.out} is complete")
        return
    started, folder = time.perf_counter(), options.out
    ids = make_tokenizer(folder)
    config = make_config(ids)
    architecture = weights.build(config)
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 10,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 400, "longest_edge": 65536},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(
        json.dumps(preprocessor, indent=2) + "\n", encoding="utf-8"
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids["<|im_end|>"]}) + "\n")
    tokenizer, spec, module = load_tokenizer(folder), load_image_spec(folder), architecture.module
    params = architecture.initialise(jax.random.key(options.seed))
    print(f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters, {ids['']} tokens")

    pictures = Pictures(options.levels, options.seed)
    params, history = pretrain_vision(options, module, params, pictures, spec, started)
    # Until the decoder reads, it would only spoil what the tower knows; DeepStack's mergers are new to both.
    learns = jax.tree.map_with_path(
        lambda path, _: path[1].key != "vision" or path[2].key == "deepstack", params
    )
    lesson = Lesson(tokenizer, spec, module, pictures, ids["<|im_end|>"], options.seed)
    steps = sum(steps for steps, _, _ in options.stages)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, 50, steps, 0.05 * options.learning_rate
    )
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
    optimizer = optax.partition({True: adam, False: optax.set_to_zero()}, learns)
    params, rows = pretrain_text(options, lesson, optimizer, params, started)
    history += rows
    made = weights.Model(architecture, config, params, folder, (ids["<|im_end|>"],))
    final = folder.with_name(folder.name + ".saved")
    weights.save(final, made)
    for file in final.iterdir():
        file.replace(folder / file.name)
    final.rmdir()
    record = {
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "seconds": time.perf_counter() - started,
        **check(folder),
        "history": history,
    }
    (folder / "pretraining.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def check(folder: pathlib.Path) -> dict[str, float]:
    """What greedy answers about fresh random levels are worth.

    Returns:
      'readable': the share of answers; 'described': the share of frames whose three facts are right;
      'ordered': the mean Spearman correlation of the ranks with those by the criterion that is named.
    """
    chat, pictures, shown = ChatModel.load(folder), Pictures(64, 1), MOST_FRAMES - 1
    clips = pictures.draw(16, MOST_FRAMES)
    request = questions.rank_frames(TASK, shown, describe=True)
    answers, _ = chat.answer(
        chat.model.params, [request] * 16, pictures.pixels(clips), jax.random.key(0), GenerateConfig(0.0, 128)
    )
    found = {"readable": 0.0, "described": 0.0, "ordered": 0.0}
    for text, clip in zip(answers, clips, strict=True):
        parsed, true, first = parse_ranks(text, shown), facts(clip[1:]), text.split("\n", 1)[0]
        said = re.findall(r"Frame (\d+):\nFrame Description: (.*)", text)
        right = [describe(true)[int(n) - 1] == words for n, words in said if 1 <= int(n) <= shown]
        found["readable"] += parsed.ok / len(answers)
        found["described"] += sum(right) / shown / len(answers)
        if parsed.ok and first in CRITERIA:
            expected = ranks_by(CRITERIA.index(first), true)
            found["ordered"] += float(spearmanr(parsed.values, expected).statistic) / len(answers)
    print(f"{answers[0]}\n{found}")
    return found


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

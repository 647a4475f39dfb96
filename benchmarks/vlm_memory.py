"""How much memory Qwen2.5-VL-7B needs on each accelerator, without having one: scoring and LoRA-GRPO.

    python benchmarks/vlm_memory.py

Shapes come from `jax.eval_shape`, shardings from `jaxreward.parallel`, and what a program needs beside its
arguments from the compiler's own memory analysis on virtual CPU devices; nothing is allocated. The CPU's
compiler computes in float32 where an accelerator stays in bfloat16: the last number is an upper bound.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import traverse_util

from jaxreward import parallel
from jaxreward.agents import grpo
from jaxreward.models import lora, weights
from jaxreward.models.generate import GenerateConfig, decode, log_probabilities, prefill
from jaxreward.models.vision_language import ImageFeatures, Prompts, with_remat

TABLE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "results" / "vlm_memory.md"
# Of the Hub's Qwen/Qwen2.5-VL-7B-Instruct.
CONFIG = {
    "model_type": "qwen2_5_vl",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": False,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
        "tokens_per_second": 2,
    },
}
GIB = 2.0**30


@dataclasses.dataclass(frozen=True)
class Options:
    """What is asked of the model.

    Attributes:
      frames: of a clip, the anchor included (RTA: 15).
      frame_tokens: image tokens of a frame (640 x 330 pixels: 276).
      text_tokens: of the prompt's text.
      new_tokens: of an answer with descriptions.
      queries: scored at a time, for each device.
      group: answers to a clip in GRPO.
      meshes: (fsdp, tensor) of each row.
      table: where the table is written.
    """

    frames: int = 15
    frame_tokens: int = 276
    text_tokens: int = 468
    new_tokens: int = 512
    queries: int = 8
    group: int = 4
    meshes: tuple[tuple[int, int], ...] = ((1, 1), (4, 1), (1, 4), (8, 1), (2, 4))
    table: pathlib.Path = TABLE

    @property
    def prompt(self) -> int:
        """Tokens of a prompt."""
        return self.frames * self.frame_tokens + self.text_tokens


def shapes_on(mesh, architecture) -> dict:
    """The parameters as sharded shapes."""
    placed = {}
    for path, shape in weights.parameter_shapes(architecture).items():
        stored = architecture.tensors[path]
        spec, _ = parallel.partition(mesh, stored.axes, shape.shape, heads=stored.heads)
        placed[path] = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=jax.NamedSharding(mesh, spec))
    return {"params": traverse_util.unflatten_dict(placed, sep="/")}


def batch_of(mesh, options: Options, size: int) -> tuple[Prompts, ImageFeatures]:
    """Prompts and a table of image features as sharded shapes."""

    def array(shape, dtype, axis=0):
        place = parallel.batch_sharding(mesh, shape[axis], axis)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    tokens = (size, options.prompt)
    prompts = Prompts(
        tokens=array(tokens, jnp.int32),
        where=array(tokens, bool),
        positions=array((3, *tokens), jnp.int32, 1),
        next_position=array((size,), jnp.int32),
        image_rows=array(tokens, jnp.int32),
    )
    rows = (size * options.frames * options.frame_tokens, 3584)
    return prompts, ImageFeatures(array(rows, jnp.bfloat16))


def on_each(tree) -> float:
    """GiB of a tree of sharded shapes on one device."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * np.dtype(leaf.dtype).itemsize
    return total / GIB


def beside_arguments(function, *arguments, **options) -> float:
    """GiB that a compiled program needs on one device beside its arguments."""
    analysis = jax.jit(function, **options).lower(*arguments).compile().memory_analysis()
    extra = analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return extra / GIB


def measure(options: Options, fsdp: int, tensor: int) -> list[str]:
    """The cells of one row."""
    mesh = parallel.make_mesh(1, fsdp, tensor)
    architecture = weights.build(CONFIG, dtype="bfloat16")
    module, variables = architecture.module, shapes_on(mesh, architecture)
    key = jax.eval_shape(lambda: jax.random.key(0))

    prompts, features = batch_of(mesh, options, options.queries * fsdp)
    config = GenerateConfig(0.2, options.new_tokens, stop_tokens=(151645,))
    filled = functools.partial(prefill, module, config=config)
    state = jax.eval_shape(filled, variables, prompts, features, key)
    places = parallel.cache_shardings(mesh, state.cache)
    cache = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state.cache, places
    )
    read = beside_arguments(filled, variables, prompts, features, key)
    written = beside_arguments(
        functools.partial(decode, module, config=config), variables, state.replace(cache=cache),
        donate_argnums=1,
    )  # fmt: skip

    clips = fsdp
    prompts, features = batch_of(mesh, options, clips)
    adapted = lora.LoRAConfig()
    adapter = jax.eval_shape(lambda k: lora.init(k, variables, adapted), key)
    moments = jax.eval_shape(optax.adam(1e-5).init, adapter)
    answers = jax.ShapeDtypeStruct((clips * options.group, options.new_tokens), jnp.int32)
    learner = with_remat(module)

    def gradients(adapter, variables, prompts, features, tokens):
        where = tokens >= 0

        def loss(adapter):
            found = log_probabilities(
                learner, {**variables, **lora.collection(adapter, adapted)}, prompts, features, tokens, where
            )
            old = jax.lax.stop_gradient(found)
            objective, _ = grpo.clipped_objective(found, old, jnp.ones(len(tokens)), where, clip=0.2)
            return -objective.mean()

        return jax.grad(loss)(adapter)

    learnt = beside_arguments(gradients, adapter, variables, prompts, features, answers)
    weight, kept = on_each(variables), on_each(adapter) + on_each(moments)
    count = fsdp * tensor
    return [
        f"{count}", f"fsdp {fsdp}, tensor {tensor}", f"{weight:.1f}", f"{on_each(cache):.1f}",
        f"{read:.1f}", f"{written:.1f}", f"{weight + max(read, on_each(cache) + written):.1f}",
        f"{kept:.2f}", f"{learnt:.1f}", f"{weight + kept + learnt:.1f}",
    ]  # fmt: skip


def main(options: Options) -> None:
    """Prints and writes the table."""
    jax.config.update("jax_num_cpu_devices", max(fsdp * tensor for fsdp, tensor in options.meshes))
    lines = [
        "# Memory of Qwen2.5-VL-7B on each accelerator, GiB",
        "",
        f"Written by `python benchmarks/vlm_memory.py`: bfloat16, prompts of {options.prompt} tokens "
        f"({options.frames} frames), answers of {options.new_tokens}. Scoring: {options.queries} queries at "
        f"a time for each fsdp part. LoRA-GRPO (rank 16): one clip with {options.group} answers at a time "
        "for each fsdp part, the rest accumulated; a second forward pass for the KL comes after another and "
        "adds nothing. Weights, cache, adapter and Adam's moments are exact; 'reading', 'writing' and "
        "'gradient' are what the CPU's compiler plans beside the arguments, in float32 where an accelerator "
        "has bfloat16: an upper bound.",
        "",
        "| devices | mesh | weights | KV cache | reading prompts | writing | **scoring, in all** | "
        "adapter and Adam | gradient | **LoRA-GRPO, in all** |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for fsdp, tensor in options.meshes:
        lines.append("| " + " | ".join(measure(options, fsdp, tensor)) + " |")
        print(lines[-1], flush=True)
    options.table.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

"""Times language-model decoding and CLIP's towers against PyTorch transformers.

    python benchmarks/vlm_speed.py --torch-python ~/torch/bin/python
    python benchmarks/vlm_speed.py --size tiny

A decoder of SmolLM2-135M's size and a CLIP of ViT-B/32's size get random weights, which are written once to
a temporary folder and read by both sides; without `--torch-python`, an interpreter that has torch and
transformers, only our side runs. Each side runs in processes of its own, on the same cores, and the two take
turns, so that what else the machine does meets both alike. Decoding is greedy, with a key-value cache and
equal prompts; the rate is that of all tokens but the first, whose time, compilation included, stands apart.
Before any rate is believed, the outputs of the two sides are compared.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from jaxreward.models import weights
from jaxreward.models.generate import Decoding, GenerateConfig, decode, prefill
from jaxreward.models.vision_language import Prompts

# Structures as config.json gives them: SmolLM2-135M and openai/clip-vit-base-patch32, and small ones to try.
LLAMA = {
    "full": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
CLIP = {
    "full": {"vision": {"image_size": 224, "patch_size": 32}, "text": {}},
    "tiny": {
        "vision": {"image_size": 32, "patch_size": 16, "hidden_size": 64, "num_attention_heads": 4},
        "text": {"vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2},
    },
}
END_TOKEN = {"full": 49407, "tiny": 511}
TEXT_TOKENS = 77
PYTORCH = Path(__file__).with_name("vlm_speed_pytorch.py")


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
      torch_python: an interpreter that has torch and transformers; None: our side alone.
      size: 'full', or 'tiny' to see that everything runs.
      dtype: of weights and computation, on both sides.
      batches: prompts, images or texts at a time.
      prompt_tokens: length of the prompts.
      new_tokens: tokens that follow each prompt.
      rounds: processes of each side, taking turns.
      repeats: counted measurements of each quantity in a process.
      cores: the cores that both sides may use; all that this process may, if empty.
      output: a JSON file for all measurements.
    """

    torch_python: Path | None = None
    size: Literal["full", "tiny"] = "full"
    dtype: Literal["float32", "bfloat16"] = "float32"
    batches: tuple[int, ...] = (1, 8, 32)
    prompt_tokens: int = 64
    new_tokens: int = 64
    rounds: int = 2
    repeats: int = 3
    cores: tuple[int, ...] = ()
    output: Path | None = None


def configs(size: str) -> dict[str, dict[str, Any]]:
    """The config.json of each model."""
    llama = LLAMA[size] | {"rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True}
    llama |= {"bos_token_id": None, "eos_token_id": None}
    clip = {
        "vision_config": CLIP[size]["vision"],
        "text_config": CLIP[size]["text"]
        | {"eos_token_id": END_TOKEN[size], "max_position_embeddings": TEXT_TOKENS},
        "projection_dim": 512,
    }
    return {
        "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **llama},
        "clip": {"model_type": "clip", "architectures": ["CLIPModel"], **clip},
    }


def write_job(options: Options, folder: Path) -> None:
    """Writes what both sides read: weights, inputs.npz and job.json."""
    config = configs(options.size)
    for number, (name, values) in enumerate(config.items()):
        architecture = weights.build(values, dtype=options.dtype)
        variables = jax.jit(architecture.initialise)(jax.random.key(number))
        weights.save(folder / name, weights.Model(architecture, values, variables, folder / name))
    rng, most = np.random.default_rng(0), max(options.batches)
    vocabulary, side = config["llama"]["vocab_size"], config["clip"]["vision_config"]["image_size"]
    texts = rng.integers(0, END_TOKEN[options.size], (most, TEXT_TOKENS))
    texts[:, -1] = END_TOKEN[options.size]
    np.savez(
        folder / "inputs.npz",
        prompts=rng.integers(0, vocabulary, (most, options.prompt_tokens)).astype(np.int32),
        images=rng.normal(size=(most, side, side, 3)).astype(np.float32),
        texts=texts.astype(np.int32),
    )
    fields = ("dtype", "batches", "new_tokens", "repeats")
    job = {name: getattr(options, name) for name in fields} | {"threads": len(os.sched_getaffinity(0))}
    (folder / "job.json").write_text(json.dumps(job))


def seconds(call: Callable[[], Any]) -> float:
    """How long a call and what it starts on the device take."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def as_prompts(tokens: np.ndarray) -> Prompts:
    """Prompts of equal length, of text alone."""
    batch, length = tokens.shape
    return Prompts(
        tokens=jnp.asarray(tokens),
        where=jnp.ones((batch, length), bool),
        positions=jnp.broadcast_to(jnp.arange(length), (3, batch, length)),
        next_position=jnp.full(batch, length),
        image_rows=jnp.full((batch, length), -1),
    )


def measure(folder: Path) -> None:
    """Our side: measures what job.json says, and writes jaxreward.json and jaxreward.npz."""
    job, inputs = json.loads((folder / "job.json").read_text()), np.load(folder / "inputs.npz")
    rates: dict[str, list[float]] = defaultdict(list)
    llama = weights.load(folder / "llama", dtype=job["dtype"])
    module = llama.architecture.module
    config = GenerateConfig(temperature=0.0, max_new_tokens=job["new_tokens"])
    key = jax.random.key(0)
    start = jax.jit(lambda variables, prompts: prefill(module, variables, prompts, None, key, config))
    go_on = jax.jit(lambda variables, state: decode(module, variables, state, config), donate_argnums=1)

    first_token = seconds(lambda: start(llama.params, as_prompts(inputs["prompts"][:1])))
    for batch in job["batches"]:
        prompts = as_prompts(inputs["prompts"][:batch])
        for repeat in range(job["repeats"] + 1):  # the first one compiles
            state: list[Decoding] = []
            reading = seconds(lambda: state.append(start(llama.params, prompts)) or state)  # noqa: B023
            writing = seconds(lambda: go_on(llama.params, state.pop()))  # noqa: B023
            if repeat:
                rates[f"prompt tokens/s, batch {batch}"].append(prompts.tokens.size / reading)
                rates[f"new tokens/s, batch {batch}"].append(batch * (job["new_tokens"] - 1) / writing)
    logits = module.apply(llama.params, inputs["prompts"][:1], method="read")[:, -1]

    clip = weights.load(folder / "clip", dtype=job["dtype"])
    towers = {
        kind: jax.jit(lambda v, x, kind=kind: clip.architecture.module.apply(v, x, method=f"encode_{kind}"))
        for kind in ("image", "text")
    }
    outputs = {"logits": logits}
    for kind, encode in towers.items():
        for batch in job["batches"]:
            x = inputs[f"{kind}s"][:batch]
            outputs[kind] = encode(clip.params, x)
            times = [seconds(lambda: encode(clip.params, x)) for _ in range(job["repeats"])]  # noqa: B023
            rates[f"CLIP {kind}s/s, batch {batch}"] += [batch / t for t in times]
    report = {"rates": rates, "first_token": first_token, "version": f"jax {jax.__version__}"}
    (folder / "jaxreward.json").write_text(json.dumps(report))
    np.savez(folder / "jaxreward.npz", **{name: np.asarray(x, np.float32) for name, x in outputs.items()})


def compare(folder: Path, dtype: str) -> dict[str, float]:
    """Largest difference of each output of the two sides, relative to the largest absolute value.

    Raises:
      SystemExit: if the two did not compute the same; their speeds then mean nothing.
    """
    ours, theirs = np.load(folder / "jaxreward.npz"), np.load(folder / "pytorch.npz")
    errors = {
        name: float(np.abs(ours[name] - theirs[name]).max() / np.abs(theirs[name]).max()) for name in ours
    }
    if max(errors.values()) > {"float32": 1e-4, "bfloat16": 0.1}[dtype]:
        raise SystemExit(f"the two sides compute different numbers: {errors}")
    return errors


def show(sides: dict[str, list[dict[str, Any]]], errors: dict[str, float], options: Options) -> None:
    """Prints the table and writes the JSON file."""
    rates: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for side, reports in sides.items():
        for name in reports[0]["rates"]:
            rates[name][side] = [rate for report in reports for rate in report["rates"][name]]
    cores = len(os.sched_getaffinity(0))
    table = Table(title=f"{options.size}, {options.dtype}, {cores} cores: median (lowest to highest)")
    for column in ("", *(f"{side}, {reports[0]['version']}" for side, reports in sides.items()), "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    for name, of_sides in rates.items():
        middle = {side: float(np.median(found)) for side, found in of_sides.items()}
        cells = [f"{middle[side]:.4g} ({min(x):.4g} to {max(x):.4g})" for side, x in of_sides.items()]
        ratio = f"{middle['jaxreward'] / middle['pytorch']:.2f}" if "pytorch" in middle else ""
        table.add_row(name, *cells, ratio)
    first = {side: [report["first_token"] for report in reports] for side, reports in sides.items()}
    table.add_row(
        "seconds to the first token, compilation included",
        *(f"{np.median(x):.3g} ({min(x):.3g} to {max(x):.3g})" for x in first.values()),
    )
    console = Console(width=120)
    console.print(table)
    for name, error in errors.items():
        console.print(f"{name}: the two sides differ by {error:.1e} of the largest value")
    if options.output:
        found = {"rates": rates, "first_token": first, "errors": errors, "cores": cores}
        options.output.write_text(json.dumps(found | {"dtype": options.dtype}, indent=1))


def main(options: Options) -> None:
    """Lets the two sides take turns and prints what they measured."""
    if options.cores:
        os.sched_setaffinity(0, options.cores)  # children inherit it
    commands = {"jaxreward": [sys.executable, __file__, "--measure"]}
    if options.torch_python:
        commands["pytorch"] = [str(options.torch_python), str(PYTORCH)]
    sides: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_job(options, folder)
        for _ in range(options.rounds):
            for side, command in commands.items():
                subprocess.run([*command, str(folder)], check=True)
                sides[side].append(json.loads((folder / f"{side}.json").read_text()))
        errors = compare(folder, options.dtype) if options.torch_python else {}
    show(sides, errors, options)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(Path(sys.argv[2]))
    else:
        main(tyro.cli(Options))

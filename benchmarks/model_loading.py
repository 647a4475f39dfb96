"""Peak memory of loading a model folder, against the size of the weights.

    python benchmarks/model_loading.py --megabytes 640

Writes a Llama with random weights of about that size, bfloat16 and float32, into a temporary folder (scanned
layers, sharded files, an untied output layer), and loads it in a child process for each case. `peak_mb` is
the child's highest resident memory while loading, minus what it held before (the kernel's VmHWM, after the
mark was reset); `ratio` is that over the bytes of the parameters, which on the CPU are part of the peak
themselves. Linux only. Prints one JSON line for each case.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from jaxreward import parallel
from jaxreward.models import model_folder, weights
from jaxreward.models.tensor_files import write_file

# {case: (stored dtype, dtype of the parameters, mesh as data, fsdp, tensor)}
CASES = {
    "bfloat16": ("bfloat16", "bfloat16", None),
    "bfloat16 to float32": ("bfloat16", "float32", None),
    "float32": ("float32", "float32", None),
    "float32 to bfloat16": ("float32", "bfloat16", None),
    "float32, fsdp 4 x tensor 2": ("float32", "float32", (1, 4, 2)),
}


def llama_config(megabytes: int) -> dict:
    """config.json of a Llama whose bfloat16 weights take about `megabytes`."""
    width, layers, vocabulary = 1024, 16, 32768
    others = 2 * vocabulary * width + layers * 4 * width * width
    mlp = max(256, round((megabytes * 5e5 - others) / (3 * layers * width) / 256) * 256)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }


def write_folder(folder: Path, config: dict, dtype: str) -> None:
    """Writes random weights in four shards, with no more than one tensor in memory."""
    architecture = weights.build(config)
    shapes = weights.parameter_shapes(architecture)
    tensors = {
        name: (np.dtype(getattr(ml_dtypes, dtype, dtype)), weights.stored_shape(stored, shapes[path].shape))
        for path, stored in architecture.tensors.items()
        for name in stored.names()
    }
    rng = np.random.default_rng(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names, listed = list(tensors), {}
    for shard in range(4):
        part = {name: tensors[name] for name in names[shard::4]}
        file = f"model-{shard + 1:05d}-of-00004.safetensors"
        write_file(
            folder / file,
            part,
            lambda name, part=part: [
                rng.standard_normal(part[name][1], np.float32).astype(part[name][0]) / 32
            ],
        )
        listed.update(dict.fromkeys(part, file))
    (folder / model_folder.INDEX).write_text(json.dumps({"weight_map": listed}))


def status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def measure(folder: Path, dtype: str, sizes: tuple[int, ...] | None) -> dict[str, float]:
    """Loads a folder in this process."""
    mesh = None if sizes is None else parallel.make_mesh(*sizes)
    # JAX starts its threads and traces before the baseline is taken
    weights.parameter_shapes(weights.build(model_folder.read_config(folder), dtype=dtype))
    jax.block_until_ready(jax.device_put(np.zeros(8, np.float32)) + 1)
    Path("/proc/self/clear_refs").write_text("5")
    before, start, cpu = status("VmRSS"), time.perf_counter(), time.process_time()
    model = weights.load(folder, dtype=dtype, mesh=mesh)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    size = sum(x.nbytes for x in jax.tree.leaves(model.params))
    peak = status("VmHWM") - before
    return {
        "weights_mb": size / 1e6,
        "peak_mb": peak / 1e6,
        "ratio": peak / size,
        "seconds": seconds,
        "cpu_seconds": cpu,
    }


def main() -> None:
    """Writes the folders and loads each case in a child process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=640, help="of the bfloat16 weights")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="where the weights are written for a while")
    options = parser.parse_args()
    if options.case:
        _, dtype, sizes = CASES[options.case]
        result = measure(options.folder, dtype, sizes)
        print(json.dumps({"case": options.case} | {k: round(v, 3) for k, v in result.items()}))
        return
    config = llama_config(options.megabytes)
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        for dtype in ("bfloat16", "float32"):
            write_folder(Path(temporary) / dtype, config, dtype)
        for case, (stored, _, sizes) in CASES.items():
            devices = "8" if sizes else "1"
            environment = os.environ | {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            }
            command = [sys.executable, __file__, "--case", case, "--folder", str(Path(temporary) / stored)]
            subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main()

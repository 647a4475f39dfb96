"""What `test_parallel.py` asks of a process with eight virtual devices; prints a report as JSON.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python tests/eight_devices.py FOLDER
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from jaxreward import parallel
from jaxreward.models import weights
from jaxreward.models.decoder import Decoder, DecoderConfig, decoder_tensors, empty_cache

CONFIG = DecoderConfig(
    vocabulary=64,
    width=32,
    mlp_width=48,
    layers=3,
    heads=4,
    kv_heads=2,
    head_width=8,
    rope_sections=(2, 1, 1),
    query_norm=True,
    qkv_bias=True,
)
BATCH, LENGTH = 4, 7
TOKENS = jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, CONFIG.vocabulary)
WHERE = jnp.ones((BATCH, LENGTH), bool).at[1, :3].set(False)
POSITIONS = jnp.broadcast_to(jnp.maximum(jnp.cumsum(WHERE, 1) - 1, 0), (3, BATCH, LENGTH))


def run(module, tokens, positions, where, cache):
    hidden, cache = module(module.embed(tokens), positions, where, cache)
    return module.logits(hidden), cache


def architecture(*_, **__):
    """Stands in for `weights.build`: the decoder alone, whose axes all divide."""
    module = Decoder(CONFIG)
    return weights.Architecture(
        module,
        decoder_tensors(CONFIG, model="model.", head="lm_head.weight", into=""),
        lambda key: module.init(key, TOKENS, POSITIONS, WHERE, None, method=run),
    )


def meshes():
    """Which devices a mesh takes, and where intermediate results and whole arrays go."""
    mesh = parallel.make_mesh(fsdp=4, tensor=2)
    rules = parallel.DEFAULT_RULES | {"embed": "tensor"}
    halved = jax.jit(lambda x: parallel.constrain(x * 0.5, mesh, ("batch", "embed"), rules))(jnp.ones((8, 6)))
    return {
        "devices": len(jax.devices()),
        "all": dict(parallel.make_mesh(-1, 2, 2).shape),
        "first": [device.id for device in parallel.make_mesh(tensor=2).devices.flat],
        "constrained": list(halved.addressable_shards[0].data.shape),
        "whole": parallel.shard_batch(mesh, jnp.ones((3, 2)), None).sharding.is_fully_replicated,
    }


def parameters(folder, mesh):
    """Loads a folder on one device and on the mesh: (report, the one, the other)."""
    initial = jax.tree.map(lambda x: 5 * x if x.ndim > 2 else x, architecture().initialise(jax.random.key(0)))
    weights.save(folder / "decoder", weights.Model(architecture(), {}, initial, folder))
    whole = weights.load(folder / "decoder")
    split = weights.load(folder / "decoder", mesh=mesh)
    weights.save(folder / "again", split)
    files = [(folder / name / "model.safetensors").read_bytes() for name in ("decoder", "again")]
    narrow = weights.load(folder / "decoder", mesh=parallel.make_mesh(fsdp=2, tensor=4))
    flat = traverse_util.flatten_dict(split.params["params"], sep="/")

    def equal(a, b):
        return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool(np.array_equal(x, y)), a, b)))

    report = {
        "same": equal(whole.params, initial) and equal(split.params, initial),
        "saved": files[0] == files[1],
        "replicated": dict(split.replicated),
        "narrow": dict(narrow.replicated),
        "shares": {name: x.addressable_shards[0].data.size / x.size for name, x in flat.items()},
    }
    return report, whole.params, split.params


def logits(whole, split, mesh):
    """Runs the decoder on one device and on the mesh."""

    def apply(*arguments):
        return Decoder(CONFIG).apply(*arguments, method=run)

    cache = empty_cache(CONFIG, BATCH, LENGTH)
    batch = parallel.shard_batch(mesh, (TOKENS, POSITIONS, WHERE), (0, 1, 0))
    placed = parallel.shard_cache(mesh, cache)
    out = (parallel.batch_sharding(mesh, BATCH), parallel.cache_shardings(mesh, placed))
    with jax.default_matmul_precision("highest"):
        expected, cache = jax.jit(apply)(whole, TOKENS, POSITIONS, WHERE, cache)
        found, placed = jax.jit(apply, out_shardings=out)(split, *batch, placed)

    def error(x, y):
        return float(np.abs(np.asarray(x) - np.asarray(y)).max() / np.abs(np.asarray(y)).max())

    return {
        "logits": float(jnp.abs(expected).max()),
        "error": error(found, expected),
        "key_error": error(placed.keys, cache.keys),
        "key_shard": list(placed.keys.addressable_shards[0].data.shape),
    }


def main():
    weights.build = architecture
    mesh = parallel.make_mesh(fsdp=4, tensor=2)
    report, whole, split = parameters(Path(sys.argv[1]), mesh)
    print(json.dumps(meshes() | report | logits(whole, split, mesh)))


if __name__ == "__main__":
    main()

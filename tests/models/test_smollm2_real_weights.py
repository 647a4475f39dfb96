"""SmolLM2-135M-Instruct itself; needs its weights, which benchmarks/convert_smollm2.py makes from a package.

JAXREWARD_REAL_WEIGHTS names a folder with smollm2/ in it. Where JAXREWARD_TORCH_PYTHON names an interpreter
that has torch and transformers, logits are compared with PyTorch's.
"""

import os
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxreward.models import weights
from jaxreward.models.generate import GenerateConfig, Generator
from jaxreward.models.tokenizer import load_tokenizer, render_chat, token_ids
from jaxreward.models.vision_language import Prompts

FOLDER = pathlib.Path(os.environ.get("JAXREWARD_REAL_WEIGHTS", "")) / "smollm2"
TORCH = os.environ.get("JAXREWARD_TORCH_PYTHON", "")
pytestmark = pytest.mark.skipif(
    "JAXREWARD_REAL_WEIGHTS" not in os.environ or not FOLDER.is_dir(),
    reason="JAXREWARD_REAL_WEIGHTS names no folder with smollm2/ in it",
)

PYTORCH = """
import sys, numpy, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
with torch.no_grad():
    numpy.save(sys.argv[3], model(torch.tensor(numpy.load(sys.argv[2]))).logits.numpy())
"""


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FOLDER)


@pytest.fixture(scope="module")
def tokens(tokenizer):
    text = render_chat(tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    return np.asarray(token_ids(tokenizer, [text], add_special_tokens=False), np.int32)


@pytest.mark.skipif(not TORCH, reason="JAXREWARD_TORCH_PYTHON names no interpreter that has torch")
def test_logits_equal_pytorch(tokens, tmp_path):
    np.save(tmp_path / "tokens.npy", tokens.astype(np.int64))
    arguments = [FOLDER, tmp_path / "tokens.npy", tmp_path / "logits.npy"]
    subprocess.run([TORCH, "-c", PYTORCH, *map(str, arguments)], check=True, capture_output=True)
    expected = np.load(tmp_path / "logits.npy")
    model = weights.load(FOLDER)
    with jax.default_matmul_precision("highest"):
        found = jax.jit(lambda p, t: model.architecture.module.apply(p, t, method="read"))(
            model.params, tokens
        )
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    np.testing.assert_array_equal(np.argmax(found, -1), np.argmax(expected, -1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_knows_the_capital_of_france(tokenizer, tokens, dtype):
    model = weights.load(FOLDER, dtype=dtype)
    shape = tokens.shape
    prompts = Prompts(
        tokens=jnp.asarray(tokens),
        where=jnp.ones(shape, bool),
        positions=jnp.broadcast_to(jnp.arange(shape[1]), (3, *shape)),
        next_position=jnp.full(shape[:1], shape[1]),
        image_rows=jnp.full(shape, -1),
    )
    config = GenerateConfig(temperature=0.0, max_new_tokens=16, stop_tokens=model.end_tokens)
    out = Generator(model.architecture.module).generate(
        model.params, prompts, None, jax.random.key(0), config
    )
    assert out.stopped[0]
    assert "Paris" in tokenizer.decode(out.tokens[0, : out.lengths[0]])

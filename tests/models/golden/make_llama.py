"""Makes tests/models/golden/llama: a tiny random Llama as transformers saves it, and what PyTorch computes.

Run with an interpreter that has torch and transformers: python tests/models/golden/make_llama.py
"""

import pathlib

import numpy as np
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / "llama"


def randomise(model: torch.nn.Module) -> None:
    """Draws weights large enough that every part of the model shows in its output."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(noise * (0.3 if "embed" in name else 1.5 / weight[0].numel() ** 0.5))
            else:
                weight.copy_(noise * 0.2 + ("norm" in name and name.endswith("weight")))


def main() -> None:
    """Writes config.json, model.safetensors and golden.npz."""
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=48,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    randomise(model)
    model.save_pretrained(FOLDER)

    rng = np.random.default_rng(0)
    tokens = rng.integers(3, 320, (2, 12))
    where = np.ones((2, 12), bool)
    where[1, :5] = False
    tokens[~where] = 0
    positions = np.maximum(np.cumsum(where, 1) - 1, 0)
    inputs = {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(where.astype(np.int64))}
    with torch.no_grad():
        out = model(**inputs, position_ids=torch.tensor(positions), output_hidden_states=True)
        greedy = model.generate(**inputs, do_sample=False, max_new_tokens=8, eos_token_id=10**6)
    np.savez_compressed(
        FOLDER / "golden.npz",
        tokens=tokens.astype(np.int32),
        where=where,
        hidden=out.hidden_states[-1].numpy(),
        logits=out.logits.numpy(),
        greedy=greedy[:, tokens.shape[1] :].numpy().astype(np.int32),
    )


if __name__ == "__main__":
    main()

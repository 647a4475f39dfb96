"""Makes tests/models/golden/smolvlm: a tiny random SmolVLM as transformers saves it, and PyTorch's outputs.

Run with an interpreter that has torch and transformers: python tests/models/golden/make_smolvlm.py
"""

import pathlib

import numpy as np
import torch
import transformers
from make_llama import randomise

FOLDER = pathlib.Path(__file__).parent / "smolvlm"
IMAGE, SIZE, ROWS = 229, 26, 9  # image token, side of a tile in pixels, image tokens of a tile
TABLES = (14, 16, 24, 26, 27, 32)  # patches along a side in released checkpoints


def transformers_positions(tower: torch.nn.Module, side: int) -> np.ndarray:
    """Rows of the position table [side + 1, side] that transformers gives to columns of n valid patches."""
    embeddings = type(tower.embeddings)(
        transformers.SmolVLMVisionConfig(hidden_size=2, image_size=side, patch_size=1, num_attention_heads=1)
    )
    with torch.no_grad():
        embeddings.patch_embedding.weight.zero_()
        embeddings.patch_embedding.bias.zero_()
        embeddings.position_embedding.weight.copy_(torch.arange(side**2)[:, None].expand(-1, 2))
        mask = torch.tensor(np.tri(side + 1, side, -1, dtype=bool))[:, None, :].repeat(1, side, 1)
        mask[0, 0, 0] = True
        found = embeddings(torch.zeros(side + 1, 3, side, side), mask)
    return found[:, :side, 0].numpy().astype(np.int32)


def main() -> None:
    """Writes config.json, model.safetensors and golden.npz."""
    config = transformers.SmolVLMConfig(
        text_config={
            "model_type": "llama",
            "vocab_size": 232,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIZE,
            "patch_size": 4,
        },
        scale_factor=2,
        image_token_id=IMAGE,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.SmolVLMForConditionalGeneration(config).eval()
    randomise(model)
    model.save_pretrained(FOLDER)

    rng = np.random.default_rng(0)
    # Three tiles for the first prompt (whole, and two that are padded) and one for the second.
    sizes = [(26, 26), (26, 17), (11, 26), (13, 20)]
    pixel_where = np.zeros((4, SIZE, SIZE), bool)
    for mask, (height, width) in zip(pixel_where, sizes, strict=True):
        mask[:height, :width] = True
    pixels = (rng.normal(size=(4, SIZE, SIZE, 3)) * pixel_where[..., None]).astype(np.float32)

    image = [IMAGE] * ROWS
    words = [list(rng.integers(3, 225, n)) for n in (4, 3, 2, 5, 6, 4)]
    rows = [
        words[0] + image + words[1] + image + words[2] + image + words[3],
        words[4] + image + words[5],
    ]
    length = max(map(len, rows))
    tokens = np.array([[0] * (length - len(row)) + row for row in rows])
    where = np.array([[False] * (length - len(row)) + [True] * len(row) for row in rows])
    positions = np.maximum(np.cumsum(where, 1) - 1, 0)

    # transformers wants as many tiles in every row; those that are 0 everywhere are dropped.
    batched = np.zeros((2, 3, 3, SIZE, SIZE), np.float32)
    batched[0], batched[1, 0] = pixels[:3].transpose(0, 3, 1, 2), pixels[3].transpose(2, 0, 1)
    batched_where = np.zeros((2, 3, SIZE, SIZE), bool)
    batched_where[0], batched_where[1, 0] = pixel_where[:3], pixel_where[3]
    inputs = {
        "input_ids": torch.tensor(tokens),
        "attention_mask": torch.tensor(where.astype(np.int64)),
        "pixel_values": torch.tensor(batched),
        "pixel_attention_mask": torch.tensor(batched_where),
    }
    with torch.no_grad():
        out = model(**inputs, position_ids=torch.tensor(positions), output_hidden_states=True)
        images = model.model.get_image_features(inputs["pixel_values"], inputs["pixel_attention_mask"])
        plain = model.model.get_image_features(inputs["pixel_values"])
        greedy = model.generate(**inputs, do_sample=False, max_new_tokens=8, eos_token_id=10**6)
        text = torch.tensor(tokens[1:, -4:])
        text_logits = model(input_ids=text).logits
    np.savez_compressed(
        FOLDER / "golden.npz",
        pixels=pixels,
        pixel_where=pixel_where,
        tower=images.last_hidden_state.numpy(),
        features=torch.cat(list(images.pooler_output)).numpy(),
        features_without_mask=torch.cat(list(plain.pooler_output)).numpy(),
        tokens=tokens.astype(np.int32),
        where=where,
        hidden=out.hidden_states[-1].numpy(),
        logits=out.logits.numpy(),
        greedy=greedy[:, length:].numpy().astype(np.int32),
        text=text.numpy().astype(np.int32),
        text_logits=text_logits.numpy(),
        **{f"positions_{n}": transformers_positions(model.model.vision_model, n) for n in TABLES},
    )


if __name__ == "__main__":
    main()

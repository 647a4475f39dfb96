"""Writes tiny random Qwen2.5-VL and Qwen3-VL folders and what PyTorch transformers computes with them.

Run it with an interpreter that has torch 2.13 and transformers 5.24: `python make_qwen_vl.py`.
"""

import itertools
from pathlib import Path

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).parent
VOCABULARY = 224
PAD, VISION_START, VISION_END, IMAGE, VIDEO = 208, 209, 210, 211, 212
GRIDS = [(1, 8, 12), (1, 6, 10), (1, 4, 4)]
PATCH = 4
NEW_TOKENS = 8
SPECIAL = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION = {
    "depth": 4,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def qwen2_5_vl():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT
        | {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": rope, "rms_norm_eps": 1e-5},
        vision_config=VISION
        | {"window_size": 4 * PATCH, "fullatt_block_indexes": [1, 3], "tokens_per_second": 2},
        tie_word_embeddings=False,
        **SPECIAL,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl():
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [6, 3, 3],
        "mrope_interleaved": True,
    }
    config = transformers.Qwen3VLConfig(
        text_config=TEXT
        | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24, "rope_parameters": rope},
        vision_config=VISION | {"deepstack_visual_indexes": [0, 2], "num_position_embeddings": 36},
        tie_word_embeddings=True,
        **SPECIAL,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


@torch.no_grad()
def randomise(model, seed):
    """Draws weights so large that every path of the network matters to the result."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            parameter.copy_(0.3 * noise)
        elif parameter.ndim == 1:
            parameter.copy_(1 + 0.3 * noise)
        elif "embed_tokens" in name:
            # small, so that a model with tied weights does not repeat the last token
            parameter.copy_(0.2 * noise)
        elif "pos_embed" in name:
            parameter.copy_(noise)
        else:
            parameter.copy_(1.2 * noise / parameter[0].numel() ** 0.5)


def image(grid, token=IMAGE):
    return [VISION_START, *[token] * (int(np.prod(grid)) // 4), VISION_END]


def padded(rows):
    """Pads on the left; returns tokens and mask."""
    length = max(len(row) for row in rows)
    tokens = [[PAD] * (length - len(row)) + row for row in rows]
    return torch.tensor(tokens), torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])


def types(tokens):
    return (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()


def rope_cases(model):
    """Positions of prompts with images and videos, one prompt each."""
    split = model.config.model_type == "qwen3_vl"
    video = [(3, 4, 8), (2, 8, 6)]
    parts = [[5, 6], image(GRIDS[0]), [7]]
    for grid in video:
        slices = [(1, *grid[1:])] * grid[0] if split else [grid]
        for part in slices:
            parts += [[8, 9], image(part, VIDEO)]
    parts += [image(GRIDS[1]), image(GRIDS[2]), [3, 4, 5]]
    tokens = torch.tensor([list(itertools.chain(*parts))])
    images, videos = torch.tensor(GRIDS), torch.tensor(video)
    options = {} if split else {"second_per_grid_ts": torch.tensor([0.5, 1.7])}
    positions, delta = model.model.get_rope_index(
        tokens, types(tokens), image_grid_thw=images, video_grid_thw=videos, **options
    )
    return {
        "video_tokens": tokens[0].numpy(),
        "video_grids": np.asarray([GRIDS[0], *video, *GRIDS[1:]]),
        "video_positions": positions[:, 0].numpy(),
        "video_next": int(delta) + tokens.shape[1],
    }


@torch.no_grad()
def outputs(model):
    rng = np.random.default_rng(0)
    # few different values, as pixels have, which makes the file small
    patches = rng.normal(size=(sum(np.prod(grid) for grid in GRIDS), 3 * 2 * PATCH**2))
    patches = (np.round(patches * 8) / 8).astype(np.float32)
    tokens, where = padded(
        [[1, 2, 3, *image(GRIDS[0]), 10, 11], [4, *image(GRIDS[1]), 5, 6, *image(GRIDS[2]), 12, 13, 14, 15]]
    )
    text, text_where = padded([[20, 21, 22], [30, 31, 32, 33, 34, 35]])
    pixels, grids = torch.tensor(patches), torch.tensor(GRIDS)
    inputs = {
        "input_ids": tokens,
        "attention_mask": where,
        "pixel_values": pixels,
        "image_grid_thw": grids,
        "mm_token_type_ids": types(tokens),
    }
    full = model(**inputs, output_hidden_states=True)
    vision = model.model.visual(pixels, grid_thw=grids)
    positions, delta = model.model.get_rope_index(
        tokens, types(tokens), image_grid_thw=grids, attention_mask=where
    )
    generated = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=PAD)
    generated = generated[:, tokens.shape[1] :]
    assert generated.shape[1] == NEW_TOKENS, generated
    assert not np.isin(generated.numpy(), (PAD, VISION_START, VISION_END, IMAGE, VIDEO)).any(), generated
    assert all(len(set(row)) > 2 for row in generated.tolist()), generated
    model.model.rope_deltas = None
    plain = model(input_ids=text, attention_mask=text_where)
    deepstack = getattr(vision, "deepstack_features", None)
    return {
        "patches": patches,
        "grids": np.asarray(GRIDS),
        "tokens": tokens.numpy(),
        "where": where.numpy().astype(bool),
        "positions": positions.numpy(),
        "next_position": (where.sum(1) + delta[:, 0]).numpy(),
        "vision": vision.pooler_output.numpy(),
        "hidden": full.hidden_states[-1].numpy(),
        "last_logits": full.logits[:, -4:].numpy(),
        "generated": generated.numpy(),
        "text_tokens": text.numpy(),
        "text_where": text_where.numpy().astype(bool),
        "text_logits": plain.logits.numpy(),
        **rope_cases(model),
        **({} if deepstack is None else {"deepstack": np.stack([x.numpy() for x in deepstack])}),
    }


# with which the generated tokens vary
SEEDS = {qwen2_5_vl: 0, qwen3_vl: 8}


def main():
    for make, seed in SEEDS.items():
        model = make().eval()
        model.set_attn_implementation("eager")
        randomise(model, seed)
        folder = FOLDER / make.__name__
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(folder / "golden.npz", **outputs(model))
        print(folder.name, {path.name: path.stat().st_size for path in folder.iterdir()})


if __name__ == "__main__":
    main()

"""Writes xclip/: a tiny X-CLIP with random weights, and what PyTorch transformers makes of some inputs."""

import numpy as np
import torch
from encoder_golden import channels_first, hidden, randomise, save
from transformers import XCLIPConfig, XCLIPModel

config = XCLIPConfig(
    projection_dim=20,
    prompt_layers=2,
    prompt_num_attention_heads=4,
    text_config={
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 16,
    },
    vision_config={
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 12,
        "patch_size": 4,
        "num_frames": 4,
        "mit_hidden_size": 20,
        "mit_intermediate_size": 28,
        "mit_num_hidden_layers": 2,
        "mit_num_attention_heads": 2,
    },
)
model = XCLIPModel._from_config(config, attn_implementation="eager").eval()
randomise(model)
rng = np.random.default_rng(0)
videos = rng.standard_normal((2, 4, 12, 12, 3), dtype=np.float32)
tokens = rng.integers(0, 254, (3, 10))
tokens[0, 9] = tokens[1, 6] = tokens[2, 4] = 255
tokens[1, 7:] = tokens[2, 5:] = 0
where = np.ones((3, 10), bool)
where[1, 7:] = where[2, 5:] = False
inputs = {"input_ids": torch.from_numpy(tokens), "attention_mask": torch.from_numpy(where.astype(int))}
with torch.no_grad():
    output = model(**inputs, pixel_values=channels_first(videos), output_hidden_states=True)
    vision = model.vision_model(channels_first(videos).flatten(0, 1), output_hidden_states=True)
    text = model.text_model(**inputs, output_hidden_states=True)
save(
    "xclip",
    model,
    videos=videos,
    tokens=tokens.astype(np.int32),
    where=where,
    frame_hidden=hidden(vision),
    text_hidden=hidden(text),
    text_embeddings=model.text_projection(text.pooler_output),
    integrated=output.mit_output.pooler_output,
    video_embeddings=output.video_embeds,
    prompted_embeddings=output.text_embeds,
    logits=output.logits_per_video,
)

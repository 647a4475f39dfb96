"""Writes siglip/: a tiny SigLIP with random weights, and what PyTorch transformers makes of some inputs."""

import numpy as np
import torch
from encoder_golden import channels_first, hidden, randomise, save
from transformers import SiglipConfig, SiglipModel

config = SiglipConfig(
    text_config={
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 12,
        "projection_size": 24,
    },
    vision_config={
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "image_size": 18,  # two pixels more than whole patches, as in so400m-patch14-384
        "patch_size": 4,
    },
)
model = SiglipModel._from_config(config, attn_implementation="eager").eval()
randomise(model)
rng = np.random.default_rng(0)
images = rng.standard_normal((3, 18, 18, 3), dtype=np.float32)
tokens = rng.integers(0, 512, (4, 12))
with torch.no_grad():
    output = model(torch.from_numpy(tokens), channels_first(images))
    vision = model.vision_model(channels_first(images), output_hidden_states=True)
    text = model.text_model(torch.from_numpy(tokens), output_hidden_states=True)
save(
    "siglip",
    model,
    images=images,
    tokens=tokens.astype(np.int32),
    image_hidden=hidden(vision),
    text_hidden=hidden(text),
    image_embeddings=vision.pooler_output,
    text_embeddings=text.pooler_output,
    logits=output.logits_per_image,
)

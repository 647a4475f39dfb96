"""Writes clip/: a tiny CLIP with random weights, and what PyTorch transformers makes of some inputs."""

import numpy as np
import torch
from encoder_golden import channels_first, hidden, randomise, save
from transformers import CLIPConfig, CLIPModel

END, PADDING = 510, 511

config = CLIPConfig(
    projection_dim=20,
    text_config={
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 16,
        "eos_token_id": END,
        "bos_token_id": 509,
        "pad_token_id": PADDING,
    },
    vision_config={
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "image_size": 16,
        "patch_size": 4,
        "hidden_act": "gelu",
    },
)
model = CLIPModel._from_config(config, attn_implementation="eager").eval()
randomise(model)
rng = np.random.default_rng(0)
images = rng.standard_normal((3, 16, 16, 3), dtype=np.float32)
tokens = rng.integers(0, 509, (4, 10))
tokens[0, 9] = tokens[1, 6] = tokens[2, 4] = tokens[3, 8] = END
tokens[1, 7:] = tokens[2, 5:] = PADDING
where = np.ones((4, 10), bool)
where[1, 7:] = where[2, 5:] = False
where[3, :2] = False  # padding on the left
tokens[3, :2] = PADDING
inputs = {"input_ids": torch.from_numpy(tokens), "attention_mask": torch.from_numpy(where.astype(int))}
with torch.no_grad():
    vision = model.vision_model(pixel_values=channels_first(images), output_hidden_states=True)
    text = model.text_model(**inputs, output_hidden_states=True)
    image_embeddings = model.visual_projection(vision.pooler_output)
    text_embeddings = model.text_projection(text.pooler_output)
    logits = model(**inputs, pixel_values=channels_first(images)).logits_per_image
    model.text_model.eos_token_id = 2
    legacy = model.text_projection(model.text_model(**inputs).pooler_output)
save(
    "clip",
    model,
    images=images,
    tokens=tokens.astype(np.int32),
    where=where,
    image_hidden=hidden(vision),
    text_hidden=hidden(text),
    image_embeddings=image_embeddings,
    text_embeddings=text_embeddings,
    legacy_text_embeddings=legacy,
    logits=logits,
)

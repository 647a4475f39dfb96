"""Writes siglip2/: a tiny NaFlex SigLIP 2 with random weights, and what PyTorch transformers computes."""

import numpy as np
import torch
from encoder_golden import hidden, randomise, save
from transformers import Siglip2Config, Siglip2Model

config = Siglip2Config(
    text_config={
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 12,
        "projection_size": 24,
    },
    vision_config={
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "patch_size": 4,
        "num_patches": 36,
    },
)
model = Siglip2Model._from_config(config, attn_implementation="eager").eval()
randomise(model)
rng = np.random.default_rng(0)
LENGTH = 20
shapes = np.array([[4, 5], [2, 7], [9, 2], [1, 1], [3, 3]])
patches = rng.standard_normal((len(shapes), LENGTH, 48), dtype=np.float32)
where = np.arange(LENGTH) < shapes.prod(1)[:, None]
tokens = rng.integers(0, 256, (4, 12))
images = {
    "pixel_values": torch.from_numpy(patches),
    "pixel_attention_mask": torch.from_numpy(where.astype(int)),
    "spatial_shapes": torch.from_numpy(shapes),
}
# PyTorch's own interpolation of the table, image by image, to shapes both smaller and larger than the table
table = model.vision_model.embeddings.position_embedding.weight.detach().reshape(6, 6, 24)
resampling_shapes = np.array([[6, 6], [2, 3], [13, 3], [1, 40], [5, 8]])
resampled = [
    torch.nn.functional.interpolate(
        table.permute(2, 0, 1)[None], tuple(shape), mode="bilinear", align_corners=False, antialias=True
    )[0]
    .permute(1, 2, 0)
    .reshape(-1, 24)
    .numpy()
    for shape in resampling_shapes.tolist()
]
with torch.no_grad():
    output = model(torch.from_numpy(tokens), **images)
    vision = model.vision_model(**images, output_hidden_states=True)
    text = model.text_model(torch.from_numpy(tokens), output_hidden_states=True)
save(
    "siglip2",
    model,
    patches=patches,
    where=where,
    shapes=shapes.astype(np.int32),
    tokens=tokens.astype(np.int32),
    image_hidden=hidden(vision),
    text_hidden=hidden(text),
    image_embeddings=vision.pooler_output,
    text_embeddings=text.pooler_output,
    logits=output.logits_per_image,
    resampling_shapes=resampling_shapes.astype(np.int32),
    resampled=np.concatenate(resampled),
)

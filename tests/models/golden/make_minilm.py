"""Writes minilm/: a tiny BERT with random weights, and what PyTorch transformers makes of some inputs."""

import numpy as np
import torch
from encoder_golden import hidden, randomise, save
from transformers import BertConfig, BertModel

config = BertConfig(
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=3,
    vocab_size=512,
    max_position_embeddings=16,
)
model = BertModel._from_config(config, attn_implementation="eager").eval()
randomise(model)
rng = np.random.default_rng(0)
tokens = rng.integers(0, 512, (4, 10))
where = np.ones((4, 10), bool)
where[1, 7:] = where[2, 1:] = where[3, :3] = False
types = rng.integers(0, 2, (4, 10))
mask = torch.from_numpy(where.astype(int))
inputs = {"input_ids": torch.from_numpy(tokens), "attention_mask": mask}


def embed(states):
    """Mean pooling and normalisation, as sentence-transformers does them."""
    weights = mask[..., None].float()
    mean = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
    return torch.nn.functional.normalize(mean, p=2, dim=1)


with torch.no_grad():
    plain = model(**inputs, output_hidden_states=True)
    typed = model(**inputs, token_type_ids=torch.from_numpy(types), output_hidden_states=True)
save(
    "minilm",
    model,
    tokens=tokens.astype(np.int32),
    where=where,
    types=types.astype(np.int32),
    hidden=hidden(plain),
    embeddings=embed(plain.last_hidden_state),
    typed_hidden=hidden(typed),
    typed_embeddings=embed(typed.last_hidden_state),
)

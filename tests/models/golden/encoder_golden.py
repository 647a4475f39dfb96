"""What the make_*.py scripts of the encoders share; runs where torch and transformers are installed."""

import math
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent


def randomise(model, seed: int = 0) -> None:
    """Random weights so large that every path matters: sharp attention, shifted norms, large biases."""
    generator = torch.Generator().manual_seed(seed)

    def normal(parameter):
        return torch.randn(parameter.shape, generator=generator)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("logit_scale"):
                parameter.fill_(1.3)
            elif name.endswith("logit_bias"):
                parameter.fill_(-0.7)
            elif name.endswith("alpha"):
                parameter.copy_(0.5 + 0.2 * normal(parameter))
            elif "norm" in name.lower() or "layernorm" in name or "message_ln" in name:
                parameter.copy_(float(name.endswith("weight")) + 0.3 * normal(parameter))
            elif ("embedding" in name and "patch" not in name) or "probe" in name:
                parameter.copy_(0.7 * normal(parameter))
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * normal(parameter))
            else:
                fan_in = math.prod(parameter.shape[1:])
                parameter.copy_(1.5 / math.sqrt(fan_in) * normal(parameter))


def hidden(output) -> np.ndarray:
    """All hidden states of a tower: [1 + layers, N, T, D]."""
    return torch.stack(output.hidden_states).numpy()


def channels_first(images: np.ndarray) -> torch.Tensor:
    """[..., H, W, 3] to torch's [..., 3, H, W]."""
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(images, -1, -3)))


def save(family: str, model, **arrays) -> None:
    """Writes the folder of a family: config.json, model.safetensors and golden.npz."""
    folder = HERE / family
    model.save_pretrained(folder)
    arrays = {
        name: value.detach().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        for name, value in arrays.items()
    }
    np.savez_compressed(folder / "golden.npz", **arrays)
    print(
        family,
        sum(f.stat().st_size for f in folder.iterdir()) // 1000,
        "kB",
        {k: v.shape for k, v in arrays.items()},
    )

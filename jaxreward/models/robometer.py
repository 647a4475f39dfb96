"""Robometer (Liang et al., 2026, arXiv:2603.02115): Qwen3-VL with heads for progress, success and preference.

Two layouts of the same weights are read: the authors', with the backbone's config.json and settings in
config.yaml, and the one of LeRobot's `rewards/robometer`, whose names have one more 'model.' in front and
whose config.json keeps the backbone's under `vlm_config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxreward.errors import ModelError
from jaxreward.models import qwen_vl
from jaxreward.models.encoder_layers import linear_tensors, norm_tensors
from jaxreward.models.layers import LayerNorm, Linear
from jaxreward.models.qwen_config import QwenVLConfig
from jaxreward.models.tensor_files import TensorEntry
from jaxreward.models.weights import Architecture
from jaxreward.types import Array, PyTree

PROGRESS_TOKEN, PREFERENCE_TOKEN, SPLIT_TOKEN = "<|prog_token|>", "<|pref_token|>", "<|split_token|>"
HEADS = ("progress", "success", "preference")
# The heads read states AFTER the decoder's final norm. Both codes take `hidden_states[-1]`, and there
# transformers puts `last_hidden_state`, the output of that norm: `check_model_inputs` (4.57, the authors')
# and `capture_outputs` (5.4 and later, LeRobot's) do so around the forward of Qwen3-VL's text model.
EMBEDDING = "language_model.embed_tokens.weight"
# torch.nn.LayerNorm's default; the files do not say it.
EPSILON = 1e-5


class Head(nn.Module):
    """Linear to half the width, layer norm, exact GELU, linear; the dropout of training is off.

    Attributes:
      outputs: numbers for each hidden state.
      dtype: of the computation.
    """

    outputs: int
    dtype: Any

    @nn.compact
    def __call__(self, hidden: Array) -> Array:
        """Maps [..., H] to float32 [..., outputs]."""
        inner = Linear(hidden.shape[-1] // 2, dtype=self.dtype, name="inner")(hidden)
        inner = jax.nn.gelu(LayerNorm(EPSILON, name="norm")(inner), approximate=False)
        return Linear(self.outputs, dtype=self.dtype, name="out")(inner).astype(jnp.float32)


class Robometer(qwen_vl.QwenVL):
    """A `QwenVL` with three heads.

    Attributes:
      config: structure of the backbone.
      bins: of the progress head, centred on 0 .. 1 in equal steps; 1: a single number.
    """

    bins: int = 10

    def setup(self) -> None:
        """Declares the backbone and the heads."""
        super().setup()
        dtype = self.config.decoder.dtype
        self.progress_head, self.success_head, self.preference_head = (
            Head(outputs, dtype) for outputs in (self.bins, 1, 1)
        )

    def progress(self, hidden: Array) -> Array:
        """Progress in [0, 1], float32 [...], from hidden states [..., H] at progress tokens."""
        out = self.progress_head(hidden)
        if self.bins == 1:
            return jax.nn.sigmoid(out[..., 0])
        return jax.nn.softmax(out) @ jnp.linspace(0.0, 1.0, self.bins)

    def success(self, hidden: Array) -> Array:
        """Probability of success, float32 [...], from hidden states [..., H] at progress tokens."""
        return jax.nn.sigmoid(self.success_head(hidden)[..., 0])

    def preference(self, hidden: Array) -> Array:
        """Probability that the first of two videos is the better, float32 [...], from [..., H]."""
        return jax.nn.sigmoid(self.preference_head(hidden)[..., 0])


def read_structure(
    config: Mapping[str, Any], entries: Mapping[str, TensorEntry], settings: str = ""
) -> dict[str, Any]:
    """The config of a folder in either layout, as `architecture` takes it.

    Args:
      config: its config.json.
      entries: its tensors; the progress head's shape says how many bins there are.
      settings: text of the authors' config.yaml, where there is one.

    Returns:
      'vlm_config' and 'progress_bins'; 'pairs_ask_progress': videos are compared with a prompt that asks for
      progress, too (`predict_pref_progress`, on in the authors' configuration); 'stored_as_output': the token
      embedding is stored under the name of the output layer.

    Raises:
      ModelError: no progress head, so that it is another model, or one that is read without progress tokens.
    """
    if config.get("model_type") == "robometer":
        return dict(config)

    def setting(name: str) -> bool:
        # Several sections of config.yaml repeat a setting; one that has no use for it may leave it off.
        found = re.findall(rf"^\s*{name}\s*:\s*(true|false)\b", settings, re.MULTILINE | re.IGNORECASE)
        value = "true" in map(str.lower, found) if found else config.get(name, True)
        if not isinstance(value, bool):
            raise ModelError(f"field {name} is {value!r}; true or false was expected")
        return value

    for name in ("use_multi_image", "use_per_frame_progress_token"):
        if not setting(name):
            raise ModelError(
                f"field {name} is False; expected True, a progress token behind each image (as in "
                "Robometer-4B): other readings of the heads are not supported"
            )
    name = "progress_head.4.weight"
    if name not in entries or not entries[name].shape:
        raise ModelError(
            f"no tensor {name} found; a Robometer has it, with one row for each bin of progress. Is this the "
            "folder of the backbone alone?"
        )
    # LeRobot's safetensors keep one name of tensors that share memory, the first in the alphabet: of a tied
    # backbone the output layer's.
    embedded = any(stored.endswith(EMBEDDING) for stored in entries)
    backbone = config.get("vlm_config") or config
    return {
        "model_type": "robometer",
        "vlm_config": backbone,
        "progress_bins": entries[name].shape[0],
        "pairs_ask_progress": setting("predict_pref_progress"),
        "stored_as_output": not embedded and QwenVLConfig.from_dict(backbone, dtype="float32").decoder.tied,
    }


def architecture(config: Mapping[str, Any], *, dtype: str) -> Architecture:
    """The model that a config from `read_structure` describes.

    Args:
      config: 'vlm_config', the backbone's config.json, 'progress_bins' and perhaps 'stored_as_output'.
      dtype: of computation and parameters, 'float32' or 'bfloat16'.

    Returns:
      The module `Robometer`, where its parameters are stored (the authors' layout), and its initialiser.

    Raises:
      ModelError: for a config that is not supported.
    """
    backbone, bins = config.get("vlm_config"), config.get("progress_bins")
    if not isinstance(backbone, Mapping) or backbone.get("model_type") != "qwen3_vl":
        found = backbone.get("model_type") if isinstance(backbone, Mapping) else backbone
        raise ModelError(f"robometer: vlm_config of model_type {found!r} found; expected 'qwen3_vl'")
    if not isinstance(bins, int) or bins < 1:
        raise ModelError(f"robometer: progress_bins {bins!r} found; expected a whole number of at least 1")
    # Nothing is generated: the output layer, which the authors' files lack, is left out.
    backbone = {**backbone, "tie_word_embeddings": True}
    plain = qwen_vl.architecture(backbone, dtype=dtype)
    module = Robometer(QwenVLConfig.from_dict(backbone, dtype=dtype), bins=bins)
    tensors = dict(plain.tensors)
    for head in HEADS:
        name = f"{head}_head"
        tensors |= linear_tensors(f"{name}/inner", f"{name}.0", "embed", None)
        tensors |= norm_tensors(f"{name}/norm", f"{name}.1")
        tensors |= linear_tensors(f"{name}/out", f"{name}.4", None, None)

    def initialise(key: Array) -> PyTree:
        own, *keys = jax.random.split(key, 1 + len(HEADS))
        params = dict(plain.initialise(own)["params"])
        hidden = jnp.zeros((1, module.config.decoder.width), dtype)
        for head, head_key in zip(HEADS, keys, strict=True):
            one = Head(bins if head == "progress" else 1, module.config.decoder.dtype)
            params[f"{head}_head"] = one.init(head_key, hidden)["params"]
        return {"params": params}

    return Architecture(
        module=module,
        tensors=tensors,
        initialise=initialise,
        aliases={**plain.aliases, "model.model.": "model."}
        | ({"model.lm_head.weight": "model." + EMBEDDING} if config.get("stored_as_output") else {}),
        # Pools image tokens in models that have no progress tokens; the published ones do not use it.
        ignored=(*plain.ignored, r"lm_head\.weight", r"^frame_pool_attn\.weight$"),
    )

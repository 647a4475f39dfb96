"""What every test process needs."""

import json
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from flax import traverse_util

# A shell starts background jobs with SIGINT ignored, and children inherit that; tests send it to theirs.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_chat_folder(tmp_path_factory):
    """A random Qwen3-VL whose token ids are those of the tokenizer beside it."""
    from jaxreward.models import weights

    golden = Path(__file__).parent / "models" / "golden"
    folder = tmp_path_factory.mktemp("qwen")
    shutil.copytree(golden / "tokenizer", folder, dirs_exist_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    config = json.loads((golden / "qwen3_vl" / "config.json").read_text())
    config["text_config"]["vocab_size"] = 448
    for field, token in (
        ("image_token_id", "<|image_pad|>"),
        ("video_token_id", "<|video_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"),
        ("vision_end_token_id", "<|vision_end|>"),
    ):
        config[field] = ids[token]
    vision = config["vision_config"]
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "size": {"shortest_edge": 16, "longest_edge": 4096},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    architecture = weights.build(config)
    rng = np.random.default_rng(3)
    params = {
        tuple(path.split("/")): (0.08 * rng.normal(size=shape.shape) + path.endswith("scale")).astype(
            "float32"
        )
        for path, shape in weights.parameter_shapes(architecture).items()
    }
    params = {"params": traverse_util.unflatten_dict(params)}
    made = weights.Model(architecture, config, params, folder)
    saved = tmp_path_factory.mktemp("saved") / "qwen"
    weights.save(saved, made)
    return saved

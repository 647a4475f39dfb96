"""Makes tests/models/golden/tokenizer, and the token ids that transformers' own processors give with it.

Needs torch, torchvision (the processors of Qwen import it) and transformers; the image processor is the
Pillow one. Run as: python tests/models/golden/make_tokenizer.py
"""

import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, Qwen2_5_VLProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

FOLDER = Path(__file__).parent / "tokenizer"
SENTENCES = [
    "The agent chops a tree and collects wood, then it places a table.",
    "Frame 1: Task Completion Percentages: 0%. Frame 2: Task Completion Percentages: 45%.",
    "You are a helpful assistant. Rank the frames of the video by how far the task is done.",
    "The cat climbs the ladder, pushes the block and catches the mouse: what is the reward?",
    "system user assistant Answer with numbers only, please.",
]
# As Qwen's own tokenizers split words.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
TEMPLATE = """\
{%- if messages[0]['role'] != 'system' -%}
<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def text(words):
    return {"type": "text", "text": words}


IMAGE = {"type": "image"}
CONVERSATIONS = [
    [{"role": "user", "content": [text("Rank the frames: "), IMAGE, IMAGE, text(" how far is the task?")]}],
    [
        {"role": "system", "content": "Répondez à la question. 日本語 🎮"},
        {"role": "user", "content": [IMAGE, text("What is the reward?\n\n  Frame 1:")]},
        {"role": "assistant", "content": "45%"},
        {"role": "user", "content": [text("And\tnow?"), IMAGE]},
    ],
    [{"role": "user", "content": "Only words, please."}],
]
SIZES = [(60, 80), (28, 28), (150, 40), (33, 97)]


def build() -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")]
    )
    FOLDER.mkdir(exist_ok=True)
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 64,  # shorter than the prompts with images: nothing may be cut off
        "clean_up_tokenization_spaces": False,
    }
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (FOLDER / "chat_template.jinja").write_text(TEMPLATE)


def images() -> list[np.ndarray]:
    """One image of each size."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in SIZES]


def golden() -> None:
    """Writes golden.json: what the processors render and tokenise, padded on the left."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    tokenizer.model_max_length = 10**9
    out = {"conversations": CONVERSATIONS, "sizes": SIZES}
    for family, processor_class, video_class, options in (
        ("qwen2_5_vl", Qwen2_5_VLProcessor, Qwen2VLVideoProcessor, {"patch_size": 14}),
        ("qwen3_vl", Qwen3VLProcessor, Qwen3VLVideoProcessor, {"patch_size": 16, "min_pixels": 4096}),
    ):
        image_processor = Qwen2VLImageProcessorPil(**options)
        processor = processor_class(image_processor, tokenizer, video_class(), chat_template=TEMPLATE)
        rendered = [
            processor.apply_chat_template(messages, add_generation_prompt=True) for messages in CONVERSATIONS
        ]
        inputs = processor(
            text=rendered, images=images(), padding=True, padding_side="left", return_tensors="np"
        )
        out[family] = {
            "options": options,
            "rendered": rendered,
            "input_ids": inputs["input_ids"].tolist(),
            "attention_mask": inputs["attention_mask"].tolist(),
            "image_grid_thw": inputs["image_grid_thw"].tolist(),
        }
    (FOLDER / "golden.json").write_text(json.dumps(out, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    build()
    golden()
    print({file.name: file.stat().st_size for file in FOLDER.iterdir()})

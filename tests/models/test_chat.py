"""The truth is what transformers' own processors render and tokenise, recorded or run beside ours."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxreward.errors import ModelError
from jaxreward.models import chat, preprocess, qwen_inputs
from jaxreward.models.qwen_config import QwenVLConfig
from jaxreward.models.tokenizer import load_tokenizer, neutralise, render_chat, special_texts

FOLDER = Path(__file__).parent / "golden" / "tokenizer"
GOLDEN = json.loads((FOLDER / "golden.json").read_text(encoding="utf-8"))
IMAGE = {"type": "image"}
TOKEN = chat.QWEN_IMAGE_TOKEN
FAMILIES = ["qwen2_5_vl", "qwen3_vl"]


def text(words):
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FOLDER)


@pytest.fixture(scope="module")
def image_id(tokenizer):
    return tokenizer.get_vocab()[TOKEN]


def golden_images():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in GOLDEN["sizes"]]


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, 64), (1, 64), (64, 64), (65, 96), (96, 96), (97, 128), (129, 192), (193, 256), (4097, 6144)],
)
def test_buckets(size, expected):
    assert chat.bucket(size) == expected


@given(st.integers(1, 10**7), st.sampled_from([2, 16, 64]))
def test_buckets_are_powers_of_two_or_half_way_between(size, minimum):
    found = chat.bucket(size, minimum)
    assert found >= size
    assert found == minimum or found < 1.5 * size + 1
    quotient = found // minimum
    assert found % minimum == 0 or found == minimum * 3 // 2
    assert quotient & (quotient - 1) == 0 or found % (3 * minimum // 2) == 0
    assert chat.bucket(found, minimum) == found


@pytest.mark.parametrize("family", FAMILIES)
def test_qwen_prompts_equal_transformers(tokenizer, image_id, family):
    golden = GOLDEN[family]
    spec = preprocess.image_spec({"image_processor_type": "Qwen2VLImageProcessor", **golden["options"]})
    _, grids = preprocess.qwen_patches(golden_images(), spec)
    np.testing.assert_array_equal(grids, golden["image_grid_thw"])
    rendered = [render_chat(tokenizer, messages, image_token=TOKEN) for messages in GOLDEN["conversations"]]
    assert rendered == golden["rendered"]

    counts = grids.prod(axis=1) // 4
    prompts = chat.make_prompts(
        tokenizer,
        GOLDEN["conversations"],
        image_token=TOKEN,
        image_texts=chat.qwen_image_texts(grids),
        row_counts=counts,
    )
    length = len(golden["input_ids"][0])
    assert prompts.tokens.shape == (3, 128) == (3, chat.bucket(length))
    where = np.asarray(golden["attention_mask"], bool)
    np.testing.assert_array_equal(prompts.where[:, -length:], where)
    assert not prompts.where[:, :-length].any()
    np.testing.assert_array_equal(
        prompts.tokens[:, -length:][where], np.asarray(golden["input_ids"], np.int32)[where]
    )
    # Images take their rows in order over the whole batch.
    is_image = (prompts.tokens == image_id) & prompts.where
    np.testing.assert_array_equal(prompts.image_rows[is_image], np.arange(counts.sum()))
    assert (prompts.image_rows[~is_image] == -1).all()
    for row, positions, following in zip(
        prompts.where, prompts.positions.swapaxes(0, 1), prompts.next_position, strict=True
    ):
        np.testing.assert_array_equal(positions[:, row], np.tile(np.arange(row.sum()), (3, 1)))
        assert (positions[:, ~row] == 0).all() and following == row.sum()


def test_positions_are_asked_for_with_the_images_of_each_prompt(tokenizer, image_id):
    grids = np.asarray(GOLDEN["qwen2_5_vl"]["image_grid_thw"])
    asked = []

    def positions(tokens, images):
        asked.append((len(tokens), int((tokens == image_id).sum()), images.tolist()))
        return np.full((3, len(tokens)), 7), 1000 + len(asked)

    prompts = chat.make_prompts(
        tokenizer,
        GOLDEN["conversations"],
        image_token=TOKEN,
        image_texts=chat.qwen_image_texts(grids),
        positions=positions,
    )
    assert asked == [(48, 10, [0, 1]), (101, 13, [2, 3]), (33, 0, [])]
    assert prompts.next_position.tolist() == [1001, 1002, 1003]
    np.testing.assert_array_equal(prompts.positions, np.where(prompts.where, 7, 0)[None].repeat(3, axis=0))


@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_positions_of_qwen(tokenizer, image_id, family):
    config = json.loads((FOLDER.parent / family / "config.json").read_text())
    config = QwenVLConfig.from_dict(config | {"image_token_id": image_id})
    grids = np.asarray(GOLDEN[family]["image_grid_thw"])
    prompts = chat.make_prompts(
        tokenizer,
        GOLDEN["conversations"],
        image_token=TOKEN,
        image_texts=chat.qwen_image_texts(grids),
        positions=lambda tokens, images: qwen_inputs.rope_positions(tokens, grids[images], config),
    )
    for i, images in enumerate(([0, 1], [2, 3], [])):
        where = prompts.where[i]
        positions, tokens = prompts.positions[:, i, where], prompts.tokens[i, where]
        # By hand: text goes on after the longer side of each grid of merged cells.
        expected, at, following = [], 0, 0
        for n in images:
            _, height, width = grids[n] // [1, 2, 2]
            text_length = int(np.flatnonzero(tokens[at:] == image_id)[0])
            expected += [np.tile(following + np.arange(text_length), (3, 1))]
            following += text_length
            rows, columns = np.divmod(np.arange(height * width), width)
            expected += [following + np.stack([0 * rows, rows, columns])]
            at, following = at + text_length + height * width, following + max(height, width)
        expected += [np.tile(following + np.arange(len(tokens) - at), (3, 1))]
        np.testing.assert_array_equal(positions, np.concatenate(expected, axis=1))
        assert prompts.next_position[i] == following + len(tokens) - at
        assert (prompts.positions[:, i, ~where] == 0).all()


def test_images_may_share_rows(tokenizer):
    grids = np.asarray([[1, 2, 4], [1, 4, 4], [1, 2, 4]])
    one = [{"role": "user", "content": [IMAGE, text("then"), IMAGE]}]
    other = [{"role": "user", "content": [text("again"), IMAGE]}]
    prompts = chat.make_prompts(
        tokenizer,
        [one, other],
        image_token=TOKEN,
        image_texts=chat.qwen_image_texts(grids),
        first_rows=[10, 3, 10],
    )
    rows = [row[row >= 0].tolist() for row in prompts.image_rows]
    assert rows == [[10, 11, 3, 4, 5, 6], [10, 11]]


def test_lengths(tokenizer):
    conversation = [[{"role": "user", "content": "Only words, please."}]]
    assert chat.make_prompts(tokenizer, conversation).tokens.shape == (1, 64)
    assert chat.make_prompts(tokenizer, conversation, length=50).tokens.shape == (1, 50)
    assert chat.make_prompts(tokenizer, conversation, longest=40).tokens.shape == (1, 40)
    grids = np.asarray([[1, 20, 20]] * 2)
    images = [[{"role": "user", "content": "short"}], [{"role": "user", "content": [IMAGE, IMAGE]}]]
    arguments = {"image_token": TOKEN, "image_texts": chat.qwen_image_texts(grids)}
    assert chat.make_prompts(tokenizer, images, **arguments).tokens.shape == (2, 256)
    for limit in ({"longest": 128}, {"length": 200}):
        message = (
            r"conversation 1 has 2\d\d tokens, 200 of them of 2 images; at most .* lower max_pixels .*fewer"
        )
        with pytest.raises(ModelError, match=message):
            chat.make_prompts(tokenizer, images, **arguments, **limit)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_texts": [TOKEN]}, "conversation 1 shows 1 images, and the conversations up to it 2; only 1"),
        ({"image_texts": [TOKEN] * 3}, "3 images were passed; the 2 conversations show 2"),
        ({"row_counts": [1, 2]}, "image 1 has 2 rows of features and 1 tokens"),
        ({"row_counts": [1]}, "features of 1 images were found for 2 images"),
        ({"first_rows": [0]}, "1 first rows were found for 2 images"),
        ({"image_token": None}, "2 images were passed without an image token"),
        (
            {"image_token": None, "image_texts": []},
            "conversation 0: 1 images were found in messages to a model",
        ),
        (
            {"image_token": "<image>"},
            "conversation 0: the chat template writes 0 images; the messages have 1",
        ),
        ({"conversations": []}, "no conversations"),
        ({"conversations": [[]]}, "conversation 0: no messages"),
    ],
)
def test_what_does_not_fit_is_named(tokenizer, change, message):
    arguments = {
        "conversations": [[{"role": "user", "content": [IMAGE, text("one")]}]] * 2,
        "image_token": TOKEN,
        "image_texts": [TOKEN] * 2,
    }
    with pytest.raises(ModelError, match=message):
        chat.make_prompts(tokenizer, **(arguments | change))


def test_a_tokenizer_of_another_model_is_refused(tokenizer):
    broken = load_tokenizer(FOLDER)
    broken.chat_template = tokenizer.chat_template.replace(TOKEN, "<image>")
    with pytest.raises(ModelError, match="the tokenizer has no token '<image>'"):
        chat.make_prompts(
            broken, [[{"role": "user", "content": [IMAGE]}]], image_token="<image>", image_texts=["<image>"]
        )


def test_start_tokens_come_from_the_template_alone():
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(FOLDER)
    start = tokenizer.get_vocab()["<|im_start|>"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    conversation = [{"role": "system", "content": "Be brief."}]
    prompts = chat.make_prompts(tokenizer, [conversation], add_generation_prompt=False)
    assert prompts.tokens[prompts.where].tolist().count(start) == 1


words = st.text(max_size=20) | st.sampled_from(
    [
        "<|image_pad|>",
        "<|im_end|>\n<|im_start|>system\n",
        "<|image_",
        "pad|>",
        "<",
        "|im_end|>",
        " ",
        "日本語 🎮",
    ]
)
parts = st.lists(st.just(IMAGE) | words.map(text), max_size=6)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": words | parts}
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_text_is_never_taken_for_an_image_or_a_turn(tokenizer, image_id, data):
    conversations = data.draw(st.lists(st.lists(message, min_size=1, max_size=3), min_size=1, max_size=3))
    shown = [
        sum(part == IMAGE for m in messages if isinstance(m["content"], list) for part in m["content"])
        for messages in conversations
    ]
    counts = data.draw(st.lists(st.integers(1, 9), min_size=sum(shown), max_size=sum(shown)))
    prompts = chat.make_prompts(
        tokenizer,
        conversations,
        image_token=TOKEN,
        image_texts=[TOKEN * count for count in counts],
        row_counts=counts,
    )
    is_image = (prompts.tokens == image_id) & prompts.where
    np.testing.assert_array_equal(is_image, prompts.image_rows >= 0)
    np.testing.assert_array_equal(prompts.image_rows[is_image], np.arange(sum(counts)))
    assert prompts.tokens.shape[1] == chat.bucket(prompts.where.sum(axis=1).max())
    end = tokenizer.get_vocab()["<|im_end|>"]
    start = tokenizer.get_vocab()["<|im_start|>"]
    for tokens, where, messages, images in zip(
        prompts.tokens, prompts.where, conversations, shown, strict=True
    ):
        tokens = tokens[where]
        assert not where[: len(where) - len(tokens)].any()
        turns = len(messages) + (messages[0]["role"] != "system")
        assert (np.sum(tokens == end), np.sum(tokens == start)) == (turns, turns + 1)
        assert np.sum(tokens == tokenizer.get_vocab()["<|vision_start|>"]) == images


@given(st.text(alphabet="<|ab>s ", max_size=30))
def test_neutralised_text_holds_no_special_token(content):
    special = {"<s>", "<|a|>", "< s>", "|", "  a", "ab"}
    found = neutralise(content, special)
    assert not any(token in found for token in special)
    if not any(token in content for token in special):
        assert found == content


def test_spelled_out_tokens_are_still_readable(tokenizer):
    spelled = [{"role": "user", "content": [text("What is <|image_"), text("pad|>?")]}]
    rendered = render_chat(tokenizer, spelled, image_token=TOKEN)
    assert "What is < |image_pad|>?" in rendered
    # Not special: what a model writes by itself.
    thought = [{"role": "user", "content": "<think>yes</think>"}]
    assert "<think>yes</think>" in render_chat(tokenizer, thought)
    assert "<think>" not in special_texts(tokenizer)


@pytest.fixture(scope="module")
def idefics3(tokenizer, tmp_path_factory):
    """A processor of transformers that runs without PyTorch, and its tokenizer loaded by us."""
    from transformers import AutoTokenizer, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    folder = tmp_path_factory.mktemp("idefics3")
    theirs = AutoTokenizer.from_pretrained(FOLDER)
    names = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    theirs.add_special_tokens({"additional_special_tokens": [*names, "<global-img>"]})
    images = Idefics3ImageProcessorPil(size={"longest_edge": 96}, max_image_size={"longest_edge": 32})
    # As the model's own: it loops over parts, so that contents must be lists.
    template = (
        "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
        "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
        "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
        "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
        "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    )
    processor = Idefics3Processor(images, theirs, image_seq_len=4, chat_template=template)
    theirs.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template)
    (folder / "preprocessor_config.json").write_text(images.to_json_string())
    return processor, folder


def test_idefics3_prompts_equal_transformers(idefics3):
    processor, folder = idefics3
    ours = load_tokenizer(folder)
    images = [np.full((height, width, 3), 90, np.uint8) for height, width in ((40, 40), (30, 90), (96, 20))]
    conversations = [
        [
            {"role": "system", "content": "Be brief."},  # lists are made where the template wants them
            {"role": "user", "content": [text("Which of "), IMAGE, text(" and "), IMAGE, text("?")]},
        ],
        [{"role": "user", "content": [IMAGE, text("The reward?")]}],
    ]
    as_lists = [
        [
            m | {"content": [text(m["content"])] if isinstance(m["content"], str) else m["content"]}
            for m in messages
        ]
        for messages in conversations
    ]
    rendered = processor.apply_chat_template(as_lists, add_generation_prompt=True)
    expected = processor(
        text=rendered, images=[images[:2], images[2:]], padding=True, padding_side="left", return_tensors="np"
    )

    tiles, rows, columns = preprocess.smolvlm_tiles(images, preprocess.load_image_spec(folder))
    prompts = chat.make_prompts(
        ours,
        conversations,
        image_token=chat.SMOLVLM_IMAGE_TOKEN,
        image_texts=chat.smolvlm_image_texts(rows, columns, tokens_per_tile=4),
        row_counts=4 * (rows * columns + 1),
    )
    assert (prompts.image_rows >= 0).sum() == 4 * len(tiles)
    for tokens, where, ids, mask in zip(
        prompts.tokens, prompts.where, expected["input_ids"], expected["attention_mask"], strict=True
    ):
        np.testing.assert_array_equal(tokens[where], ids[mask == 1])


def test_a_single_tile_has_no_rows():
    found = chat.smolvlm_image_texts(np.array([0]), np.array([0]), tokens_per_tile=2)
    edge = "<fake_token_around_image>"
    assert found == [f"{edge}<global-img><image><image>{edge}"]

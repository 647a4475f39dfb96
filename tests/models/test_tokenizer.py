import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxreward.errors import ModelError
from jaxreward.models.tokenizer import (
    encode_texts,
    find_chat_template,
    load_tokenizer,
    render_chat,
    token_ids,
)

FOLDER = Path(__file__).parent / "golden" / "tokenizer"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FOLDER)


@pytest.fixture
def folder(tmp_path):
    """A copy to damage."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(FOLDER / name, tmp_path)
    return tmp_path


def test_texts_come_back(tokenizer):
    texts = ["The agent chops a tree.", "日本語 🎮\n\n  x", "a\tb", ""]
    for words, ids in zip(texts, token_ids(tokenizer, texts, add_special_tokens=False), strict=True):
        assert tokenizer.decode(ids) == words


def test_nothing_is_cut_off(folder):
    # A limit in the config, and truncation and padding in the tokenizer's own file (as MiniLM's has).
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    texts = ["x" * 500, "The agent"]
    found = token_ids(load_tokenizer(folder), texts, add_special_tokens=True)
    assert [len(ids) for ids in found] == [500, 2]


def test_sentences_are_padded_on_the_right(tokenizer):
    tokens, where = encode_texts(tokenizer, ["The agent", "The agent chops a tree"])
    assert tokens.dtype == np.int32 and where.dtype == bool
    assert where.tolist() == [[True] * 2 + [False] * (tokens.shape[1] - 2), [True] * tokens.shape[1]]
    assert (tokens[~where] == tokenizer.pad_token_id).all()
    assert tokens[0, :2].tolist() == tokens[1, :2].tolist()
    assert encode_texts(tokenizer, ["The agent"], length=77)[0].shape == (1, 77)
    with pytest.raises(ModelError, match=r"text 1 \('xxx.*\) has 300 tokens; at most 77"):
        encode_texts(tokenizer, ["The agent", "x" * 300], length=77)
    for bad in ([], "The agent"):
        with pytest.raises(ModelError, match="a list of at least one string"):
            encode_texts(tokenizer, bad)


def test_sentences_equal_the_clip_tokenizer_of_transformers(tmp_path):
    from transformers import CLIPTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [
        *letters,
        *(letter + "</w>" for letter in letters),
        "th",
        "the</w>",
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\nth e</w>\n")
    theirs = CLIPTokenizer(vocab=vocabulary, merges=[("t", "h"), ("th", "e</w>")])
    theirs.save_pretrained(tmp_path)
    texts = ["The cat climbs the ladder", "wood"]
    expected = theirs(texts, padding="max_length", max_length=32, return_tensors="np")
    tokens, where = encode_texts(load_tokenizer(tmp_path), texts, length=32)
    np.testing.assert_array_equal(tokens, expected["input_ids"])
    np.testing.assert_array_equal(where, expected["attention_mask"])
    assert tokens[0, 0] == vocabulary["<|startoftext|>"]


def test_templates_are_found_in_each_file(folder):
    (folder / "chat_template.jinja").unlink()
    assert find_chat_template(folder) is None and load_tokenizer(folder).chat_template is None
    with pytest.raises(ModelError, match="the tokenizer has no chat template"):
        render_chat(load_tokenizer(folder), HELLO)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [
        {"name": "tools", "template": "no"},
        {"name": "default", "template": "C{{messages[0]['content']}}"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    assert render_chat(load_tokenizer(folder), HELLO) == "CHello"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "B{{messages[0]['content']}}"}))
    assert render_chat(load_tokenizer(folder), HELLO) == "BHello"
    (folder / "chat_template.jinja").write_text("A{{messages[0]['content']}}")
    assert render_chat(load_tokenizer(folder), HELLO) == "AHello"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ nothing.at.all }}", "the chat template fails: 'nothing' is undefined"),
        ("{{ raise_exception('roles must alternate') }}", "the chat template fails: roles must alternate"),
        ("{% for %}", "the chat template fails"),
        ("{{ messages[0]['role'] }}", "the chat template leaves out 'Hello'"),
        ("{{ ''.__class__.__mro__ }}", "the chat template"),
        ("{{ messages[0]['content'] }}<|image_pad|>", "writes 1 images; the messages have 0"),
    ],
)
def test_templates_that_fail_or_lose_text(folder, template, message):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match=message):
        render_chat(load_tokenizer(folder), HELLO, image_token="<|image_pad|>")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no messages"),
        (["Hello"], "message 0 is 'Hello'; a dict"),
        ([{"content": "Hello"}], "message 0 is .*; a dict"),
        ([*HELLO, {"role": "user"}], "message 1 has content None"),
        ([{"role": "user", "content": [{"type": "video"}]}], "part {'type': 'video'}.*list of images"),
        ([{"role": "user", "content": [{"type": "text"}]}], "part {'type': 'text'}"),
        ([{"role": "user", "content": ["Hello"]}], "part 'Hello'"),
        ([{"role": "user", "content": [{"type": "image"}]}], "1 images were found in messages to a model"),
    ],
)
def test_bad_messages_are_named(tokenizer, messages, message):
    with pytest.raises(ModelError, match=message):
        render_chat(tokenizer, messages)


@pytest.mark.parametrize(
    "template",
    [
        "User:{% for message in messages %}{{ message['content'] }}{% endfor %}",
        "User:{% for message in messages %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}"
        "{% endfor %}",
    ],
)
@pytest.mark.parametrize("content", ["U", [{"type": "text", "text": "U"}]])
def test_each_template_gets_the_content_in_the_form_that_it_writes(folder, template, content):
    (folder / "chat_template.jinja").write_text(template)
    # A letter that the template writes itself would not be missed.
    found = render_chat(load_tokenizer(folder), [{"role": "user", "content": content}])
    assert found == "User:U"


def test_an_image_in_a_part_reaches_no_template(tokenizer):
    part = {"type": "image", "image": np.zeros((2, 2, 3), np.uint8)}
    found = render_chat(tokenizer, [{"role": "user", "content": [part]}], image_token="<|image_pad|>")
    assert found.count("<|image_pad|>") == 1


def test_folders_that_hold_no_tokenizer(folder, tmp_path):
    with pytest.raises(ModelError, match="nowhere is no folder"):
        load_tokenizer(tmp_path / "nowhere")
    for damaged in ("{", '{"version": "1.0"}', "[]"):
        (folder / "tokenizer.json").write_text(damaged)
        with pytest.raises(ModelError, match=r"the tokenizer in .* cannot be loaded"):
            load_tokenizer(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match=r"the tokenizer in .* cannot be loaded"):
        load_tokenizer(folder)
    (folder / "chat_template.json").write_text('{"chat_template": 3}')
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template.jinja cannot be read"):
        find_chat_template(folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="chat_template is a int; a string"):
        find_chat_template(folder)


def test_loading_says_nothing_and_imports_no_torch():
    program = (
        "import sys; from jaxreward.models.tokenizer import load_tokenizer, render_chat;"
        "assert 'transformers' not in sys.modules;"
        f"tokenizer = load_tokenizer({str(FOLDER)!r});"
        f"assert 'Hello' in render_chat(tokenizer, {HELLO!r});"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

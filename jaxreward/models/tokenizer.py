"""Tokenizers and chat templates of Hugging Face folders; no text is ever cut off."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxreward.errors import ModelError
from jaxreward.models.hub_config import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a Hugging Face folder, with the chat template wherever the folder keeps it.

    Only files of the folder are read, and no code of it is run.

    Args:
      folder: holds tokenizer.json, or the vocabulary of an older tokenizer, and tokenizer_config.json.

    Returns:
      transformers' tokenizer, without the limit of length that its config may give.

    Raises:
      ModelError: if there is no such folder, or its tokenizer or template cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder; a Hugging Face folder with a tokenizer was expected")
    with _quiet():
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        # The tokenizers library raises plain Exception for a damaged file.
        except Exception as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ModelError(
                f"the tokenizer in {folder} cannot be loaded ({reason}); tokenizer.json and "
                "tokenizer_config.json were expected there"
            ) from error
    tokenizer.model_max_length = int(1e30)  # what transformers takes for 'no limit'
    tokenizer.chat_template = find_chat_template(folder)
    return tokenizer


def find_chat_template(folder: str | Path) -> str | None:
    """Finds a folder's chat template.

    It is in chat_template.jinja, else in chat_template.json, else in tokenizer_config.json. Where a file
    holds several named templates, the one called 'default' counts.

    Raises:
      ModelError: if a file that should hold a template cannot be read.
    """
    folder = Path(folder)
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} cannot be read ({error}); copy or download it again") from error
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        template = read_json(path).get("chat_template") if path.is_file() else None
        if isinstance(template, list):
            named = {
                entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)
            }
            template = named.get("default")
        if isinstance(template, str):
            return template
        if template is not None:
            raise ModelError(f"{path}: chat_template is a {type(template).__name__}; a string was expected")
    return None


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, length: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Tokenises sentences for an encoder (CLIP, SigLIP, MiniLM), with its start and end tokens.

    Args:
      tokenizer: from `load_tokenizer`.
      texts: at least one.
      length: to which they are padded on the right; the longest text's if None.

    Returns:
      (tokens int32 [N, T], where bool [N, T], False for padding).

    Raises:
      ModelError: for no texts, or for one that is longer than `length`; it names the text.
    """
    if isinstance(texts, str) or not texts:
        raise ModelError(f"texts {texts!r} were found; a list of at least one string was expected")
    rows = token_ids(tokenizer, texts, add_special_tokens=True)
    longest = max(map(len, rows))
    length = longest if length is None else length
    if longest > length:
        number = max(range(len(rows)), key=lambda i: len(rows[i]))
        raise ModelError(
            f"text {number} ({texts[number][:60]!r}) has {longest} tokens; at most {length} fit, and nothing "
            "is cut off: shorten it"
        )
    tokens = np.full((len(rows), length), padding_id(tokenizer), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return tokens, np.arange(length) < np.array([[len(ids)] for ids in rows])


def token_ids(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """Tokenises texts, each to its own length; `add_special_tokens` puts start and end tokens around each."""
    # Explicit, as a tokenizer.json may ask for truncation and padding itself.
    found = tokenizer(list(texts), add_special_tokens=add_special_tokens, truncation=False, padding=False)
    return found["input_ids"]


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills up rows; no model reads it where the mask says padding."""
    for number in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if number is not None:
            return number
    return 0


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    image_token: str | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Renders messages with the tokenizer's chat template, in Jinja's sandbox.

    Special tokens that a text spells out ('<|image_pad|>') are text, never an image or the end of a turn:
    they get a space behind their first character. Text parts next to each other are joined.

    Args:
      tokenizer: from `load_tokenizer`.
      messages: each with 'role' and 'content'; the content is a string, or a list of {'type': 'text',
        'text': ...}, {'type': 'image'} and {'type': 'token', 'token': ...}, a special token that is meant as
        one. Other fields of an image part (the image itself) are left out.
      image_token: what the template writes for an image; None: there must be no images.
      add_generation_prompt: whether the assistant's turn is begun at the end.

    Returns:
      The text to tokenise without further special tokens, with `image_token` once for each image.

    Raises:
      ModelError: for messages of another form, for a tokenizer without a template, or for a template that
        fails or leaves out texts or images.
    """
    if tokenizer.chat_template is None:
        raise ModelError(
            "the tokenizer has no chat template; expected one in chat_template.jinja, chat_template.json or "
            "tokenizer_config.json of its folder (instruction-tuned models have it)"
        )
    special = special_texts(tokenizer) | ({image_token} if image_token else set())
    parts = [(_role(message, i, special), _parts(message, i, special)) for i, message in enumerate(messages)]
    if not parts:
        raise ModelError("no messages were found; at least one was expected")
    images = sum(part is None for _, content in parts for part in content)
    if images and image_token is None:
        raise ModelError(f"{images} images were found in messages to a model that reads text alone")

    as_lists = not _takes_strings(tokenizer)
    text = _render(
        tokenizer,
        [{"role": role, "content": _content(content, as_lists)} for role, content in parts],
        add_generation_prompt,
    )
    # Templates may drop what an assistant thought in earlier turns.
    said = (part for role, content in parts if role != "assistant" for part in content if part)
    found = text.count(image_token) if image_token else 0
    problem = None
    if found != images:
        problem = f"writes {found} images; the messages have {images}"
    elif lost := [part for part in said if part.strip() not in text]:
        problem = f"leaves out {lost[0]!r:.80}"
    if problem:
        raise ModelError(
            f"the chat template {problem}. Pass messages that it can render, or correct the template in the "
            "model's folder"
        )
    return text


def special_texts(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The texts that the tokenizer reads as special tokens, as the ends of turns and images."""
    added = tokenizer.added_tokens_decoder.values()
    return set(tokenizer.all_special_tokens) | {token.content for token in added if token.special}


def neutralise(text: str, special: set[str]) -> str:
    """Puts a space behind the first character of every special token in a text, until there is none."""
    # The longest first, as one may hold another.
    ordered = sorted(filter(None, special), key=len, reverse=True)
    while found := next((token for token in ordered if token in text), None):
        apart = f"{found[0]} {found[1:]}"
        # A token of one character, or one that begins with spaces, cannot be taken apart.
        text = text.replace(found, "" if found in apart else apart)
    return text


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], begin_answer: bool) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=begin_answer)
    # A template may fail in any way; a sandboxed one does no more than that.
    except Exception as error:
        raise ModelError(f"the chat template fails: {error}") from error


def _takes_strings(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the template writes a content that is a string; some (SmolVLM's) silently drop it."""
    probe = "3f9c1e7a"
    try:
        return probe in _render(tokenizer, [{"role": "user", "content": probe}], False)
    except ModelError:
        return False


def _role(message: Message, number: int, special: set[str]) -> str:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ModelError(
            f"message {number} is {message!r:.80}; a dict with 'role' and 'content' was expected"
        )
    return neutralise(message["role"], special)


class _Token(str):
    """A special token that stands in a text on purpose."""

    __slots__ = ()


def _parts(message: Message, number: int, special: set[str]) -> list[str | None]:
    """A message's content as texts, with None for an image."""
    content = message.get("content")
    if isinstance(content, str):
        return [neutralise(content, special)]
    if not isinstance(content, list | tuple):
        raise ModelError(
            f"message {number} has content {content!r:.80}; a string or a list of parts was expected"
        )
    parts: list[str | None] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "image":
            parts.append(None)
        elif kind == "token" and isinstance(part.get("token"), str):
            if part["token"] not in special:
                raise ModelError(
                    f"message {number} names the token {part['token']!r}, which the tokenizer does not have; "
                    "use the tokenizer of the model's folder"
                )
            parts.append(_Token(part["token"]))
        elif kind == "text" and isinstance(part.get("text"), str):
            # Joined first: two parts could spell out a special token together.
            if parts and type(parts[-1]) is str:
                parts[-1] += part["text"]
            else:
                parts.append(part["text"])
        else:
            raise ModelError(
                f"message {number} has a part {part!r:.80}; {{'type': 'text', 'text': ...}}, "
                "{'type': 'image'} or {'type': 'token', 'token': ...} was expected (a video is a list of "
                "images)"
            )
    return [neutralise(part, special) if type(part) is str else part for part in parts]


def _content(parts: list[str | None], as_list: bool) -> str | list[dict[str, str]]:
    if not as_list and None not in parts:
        return "".join(part for part in parts if part)
    return [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops the line about a missing PyTorch that transformers logs when it is first imported."""

    def keep(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger = logging.getLogger("transformers")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)

"""Text and token ids: a checkpoint's `tokenizer.json` and chat template."""

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2
import tokenizers

from detjax.models.configuration.json_object import CheckpointError, parse_json_object, read_file
from detjax.models.text import typescript_tools
from detjax.models.text.chat_template import Sandbox, without_addresses
from detjax.models.text.incremental_decoder import IncrementalDecoder
from detjax.models.text.tiktoken_file import VOCABULARY, tokenizer_json

_TOKENIZER: Final = "tokenizer.json"
_CONFIG: Final = "tokenizer_config.json"
_SPECIAL_TOKENS: Final = "special_tokens_map.json"
_TEMPLATE: Final = "chat_template.jinja"
_MORE_TEMPLATES: Final = "additional_chat_templates"
_TEMPLATE_DATE: Final = "chat_template_date.txt"
"""The file with the fixed date for chat templates; see `Tokenizer.with_template_date`."""

_ROLES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKENS_WITHOUT_ROLE: Final = ("extra_special_tokens", "additional_special_tokens")
_BYTE_TOKEN: Final = re.compile("<0x([0-9A-F]{2})>")
_SPACE: Final = "\u2581"
"""The character for a space in tokenizers that are not byte-level."""

_sandbox: Final = functools.cache(Sandbox)


class Tokenizer:
    """A checkpoint's tokenizer, which converts text to token ids and back, and conversations to text.

    Attributes:
        files: the files that it was read from, by their path in the checkpoint.
        special_tokens: text of the tokens that have a role ("bos_token", "eos_token", ...) in this checkpoint.
        is_byte_level: whether text is decoded as UTF-8 from the concatenated bytes of its tokens.
    """

    def __init__(self, files: Mapping[str, bytes], source: str) -> None:
        """Makes a tokenizer from a checkpoint's files by path, including `tokenizer.json`; `source` is their directory.

        Raises:
            CheckpointError: a file is damaged.
        """
        self.files = dict(files)
        self._source = source
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(files[_TOKENIZER])
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(f"{source}/{_TOKENIZER} is not a tokenizer: {error}") from error
        # The file may contain a training run's truncation and padding, which are not part of the text's ids.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

        config = self._object(_SPECIAL_TOKENS)
        config |= {key: value for key, value in self._object(_CONFIG).items() if value is not None}
        self.special_tokens = {
            role: self._content(role, config[role]) for role in _ROLES if config.get(role) is not None
        }
        self._mark_special([*self.special_tokens.values(), *self._tokens_without_role(config)])
        self._added = self._tokenizer.get_added_tokens_decoder()
        self.is_byte_level = '"ByteLevel"' in json.dumps(self._object(_TOKENIZER).get("decoder"))
        self._bytes: dict[int, bytes] = {}
        self._templates = self._read_templates(config)
        self._template_date = self._read_template_date()
        self._compiled: dict[str, jinja2.Template] = {}

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer | None":
        """Returns the tokenizer of the checkpoint in `directory`, or None if it has none.

        It is read from `tokenizer.json`, or made of Kimi's `tiktoken.model`.

        Raises:
            CheckpointError: a file is damaged.
        """
        files = (_TOKENIZER, _CONFIG, _SPECIAL_TOKENS, _TEMPLATE, _TEMPLATE_DATE)
        names = [name for name in files if (directory / name).exists(follow_symlinks=False)]
        names += sorted(f"{_MORE_TEMPLATES}/{path.name}" for path in (directory / _MORE_TEMPLATES).glob("*.jinja"))
        contents = {name: read_file(directory / name) for name in names}
        if _TOKENIZER not in contents:
            if not (directory / VOCABULARY).exists(follow_symlinks=False):
                return None
            config = parse_json_object(contents.get(_CONFIG, b"{}"), f"{directory}/{_CONFIG}")
            alphabet = {byte: character for character, byte in byte_alphabet().items()}
            contents[_TOKENIZER] = tokenizer_json(read_file(directory / VOCABULARY), config, alphabet, str(directory))
        return cls(contents, str(directory))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the tokenizer as its files."""
        return type(self), (self.files, self._source)

    def with_template_date(self, date: datetime.date) -> "Tokenizer":
        """Returns this tokenizer with `date` as today's date in chat templates.

        By default templates get no date, because a prompt that depends on the day is not a function of its request:
        `strftime_now` is undefined. Llama 3.2's template has a default date for that case; a template that requires the
        date raises an error when it uses it. The date is one of the tokenizer's files, so it is part of
        `models.digest`, and `models.save` writes it.
        """
        return Tokenizer(self.files | {_TEMPLATE_DATE: f"{date.isoformat()}\n".encode()}, self._source)

    def __len__(self) -> int:
        """Returns the number of tokens that have text."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`.

        Args:
            text: any text. Chat templates already write special tokens, so encode their text with False.
            add_special_tokens: whether to add the tokenizer's tokens around every text, such as a first token.
        """
        # The batch call computes no offsets, so it takes half the time, and it lets other threads run.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids. Bytes that are not valid UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @property
    def added_tokens(self) -> tuple[int, ...]:
        """The ids of tokens outside the model's vocabulary, such as special tokens."""
        return tuple(self._added)

    def with_all_added_special(self) -> str:
        """Returns a self-contained `tokenizer.json` in which every added token is special."""
        copy = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        copy.add_special_tokens([token.content for token in self._added.values()])
        return copy.to_str()

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes that a token adds to a text, special or not; b"" for an unknown id.

        They may start or end in the middle of a character.
        """
        if token not in self._bytes:
            self._bytes[token] = self._bytes_of(token)
        return self._bytes[token]

    def _bytes_of(self, token: int) -> bytes:
        written = self._tokenizer.id_to_token(token)
        if written is None:
            return b""
        if token in self._added:
            return written.encode()
        if self.is_byte_level:
            alphabet = byte_alphabet()
            return b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in written)
        if match := _BYTE_TOKEN.fullmatch(written):
            return bytes([int(match[1], 16)])
        return written.replace(_SPACE, " ").encode()

    def stream(self, skip_special_tokens: bool = True) -> IncrementalDecoder:
        """Returns an incremental decoder of tokens."""
        return IncrementalDecoder(self if skip_special_tokens else _WithSpecialTokens(self))

    def byte_of(self, token: int) -> int | None:
        """Returns the byte that a token of a tokenizer which is not byte-level stands for; None for other tokens."""
        match = None if self.is_byte_level else _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token) or "")
        return int(match[1], 16) if match else None

    def is_left_out(self, token: int) -> bool:
        """Returns whether `decode` always omits a token: a special or empty one, or an unknown id."""
        added = self._added.get(token)
        return added.special if added else not self._tokenizer.id_to_token(token)

    def id_of(self, text: str) -> int | None:
        """Returns the id of the token that is written like this in the tokenizer, or None if no token is."""
        return self._tokenizer.token_to_id(text)

    def token_id(self, role: str) -> int | None:
        """Returns the id of the token with a role, such as "eos_token", or None if no token has it."""
        token = self.special_tokens.get(role)
        return None if token is None else self._tokenizer.token_to_id(token)

    @property
    def has_chat_template(self) -> bool:
        """True if the checkpoint has a chat template for messages without tools."""
        return "default" in self._templates

    @property
    def tool_template(self) -> str | None:
        """The source of the chat template for conversations with tools; None if the checkpoint has no template."""
        return self._templates.get("tool_use", self._templates.get("default"))

    def with_chat_template(self, template: str) -> "Tokenizer":
        """Returns this tokenizer with another chat template in Jinja, for conversations with and without tools.

        Raises:
            CheckpointError: the template is damaged.
        """
        files = {name: data for name, data in self.files.items() if not name.startswith(f"{_MORE_TEMPLATES}/")}
        changed = Tokenizer(files | {_TEMPLATE: template.encode()}, self._source)
        changed._template("default")
        return changed

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Returns the text of a conversation, ready for `encode(..., add_special_tokens=False)`.

        Args:
            messages: each with a "role" and most with a "content"; keys with the value None are omitted.
            add_generation_prompt: whether the text ends with the beginning of an answer.
            continue_final_message: whether the text ends with the last message's text instead, so that an answer
                continues it; `add_generation_prompt` must be False.
            kwargs: further variables of the template, such as `tools`, a list of JSON schemas. With several templates,
                "tool_use" is for conversations with tools, and "default" for the others. A template with the variable
                `tools_ts_str` gets TypeScript's types of the tools, as Kimi K2.5's needs them.

        Raises:
            CheckpointError: the checkpoint has no such template, or a damaged one.
            ValueError: `messages` is empty, the template refuses them, or the last one cannot be continued.
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "apply_chat_template: continue_final_message and add_generation_prompt are True; accepted: one of them"
            )
        if continue_final_message and messages:
            messages = [*messages[:-1], _with_mark(messages[-1])]
            text = self.apply_chat_template(messages, add_generation_prompt=False, **kwargs)
            return _up_to_mark(text)
        if not messages:
            raise ValueError("apply_chat_template: messages is empty; accepted: one or more messages")
        name = "tool_use" if kwargs.get("tools") and "tool_use" in self._templates else "default"
        template = self._template(name)
        conversation = [{key: value for key, value in message.items() if value is not None} for message in messages]
        if kwargs.get("tools") and typescript_tools.VARIABLE in self._templates[name]:
            given = {key: value for key, value in kwargs.items() if key != "tools"}
            kwargs = typescript_tools.with_declarations(kwargs["tools"]) | given
        variables = {
            "messages": conversation,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self.special_tokens,
            **kwargs,
        }
        try:
            return without_addresses(template.render(variables), self._templates[name], conversation, kwargs)
        except Exception as error:  # templates are programs, which can fail in any way
            raise ValueError(
                f"apply_chat_template: the chat template of {self._source} refuses these messages: {error}"
            ) from error

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._templates:
            names = ", ".join(sorted(self._templates)) or "none"
            raise CheckpointError(
                f"{self._source} has no chat template {name!r} (found: {names}); accepted: {_TEMPLATE}, chat_template "
                f"in {_CONFIG}. Add one, or encode text that is written out in full."
            )
        if name not in self._compiled:
            try:
                self._compiled[name] = _sandbox(self._template_date).from_string(self._templates[name])
            except jinja2.TemplateError as error:
                raise CheckpointError(f"{self._source}: chat template {name!r} is damaged: {error}") from error
        return self._compiled[name]

    def _object(self, name: str) -> dict[str, Any]:
        return parse_json_object(self.files[name], f"{self._source}/{name}") if name in self.files else {}

    def _content(self, key: str, token: object) -> str:
        content = token.get("content") if isinstance(token, Mapping) else token
        if not isinstance(content, str):
            raise CheckpointError(
                f"{self._source}/{_CONFIG}: {key} is {token!r}; accepted: a string, an object with a string as content"
            )
        return content

    def _tokens_without_role(self, config: Mapping[str, Any]) -> list[str]:
        tokens = []
        for key in _TOKENS_WITHOUT_ROLE:
            value = config.get(key) or []
            values = value.values() if isinstance(value, Mapping) else value
            if not isinstance(value, Mapping | list):
                raise CheckpointError(f"{self._source}/{_CONFIG}: {key} is {value!r}; accepted: a list, an object")
            tokens += [self._content(key, token) for token in values]
        return tokens

    def _mark_special(self, tokens: Sequence[str]) -> None:
        """Makes tokens special: matched in text and omitted from it, even if they were ordinary tokens."""
        known = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        words = [token for token in tokens if token not in known and self._tokenizer.token_to_id(token) is not None]
        self._tokenizer.add_special_tokens(words)

    def _read_template_date(self) -> datetime.date | None:
        if _TEMPLATE_DATE not in self.files:
            return None
        written = self.files[_TEMPLATE_DATE].decode(errors="replace").strip()
        try:
            return datetime.date.fromisoformat(written)
        except ValueError:
            raise CheckpointError(
                f"{self._source}/{_TEMPLATE_DATE} holds {written!r}; accepted: a date, such as 2026-01-31"
            ) from None

    def _read_templates(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Returns the chat templates by name. Files take precedence over the entry in `tokenizer_config.json`."""
        paths = {_TEMPLATE: "default"}
        paths |= {name: Path(name).stem for name in self.files if name.startswith(f"{_MORE_TEMPLATES}/")}
        try:
            templates = {name: self.files[path].decode("utf-8") for path, name in paths.items() if path in self.files}
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._source}: a chat template is not UTF-8: {error}") from error
        entry = config.get("chat_template")
        if templates or entry is None:
            return templates
        named = [{"name": "default", "template": entry}] if isinstance(entry, str) else entry
        try:
            templates = {item["name"]: item["template"] for item in named}
        except (TypeError, KeyError):
            templates = {}
        if not templates or not all(isinstance(text, str) for text in (*templates, *templates.values())):
            raise CheckpointError(
                f"{self._source}/{_CONFIG}: chat_template is a {type(entry).__name__}; accepted: a string, a list of "
                "objects with a name and a template"
            )
        return templates


_END_OF_TEXT: Final = "{{END OF THE LAST MESSAGE}} "
"""Marks the end of the last message in a chat template's text. Templates that trim messages remove its last space."""


def _with_mark(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message whose text ends with a mark."""
    content = message.get("content")
    if isinstance(content, str) and content:
        return {**message, "content": content + _END_OF_TEXT}
    if isinstance(content, list) and content and isinstance(content[-1], Mapping) and content[-1].get("text"):
        return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + _END_OF_TEXT}]}
    raise ValueError("apply_chat_template: the last message does not end with text; accepted: a text to continue")


def _up_to_mark(text: str) -> str:
    """Returns the text before the last mark. If the template trims messages, the continued one is trimmed, too."""
    mark = _END_OF_TEXT.strip()
    end = text.rfind(mark)
    if end < 0:
        raise ValueError(
            "apply_chat_template: the chat template leaves out the text of the last message; accepted: a message whose "
            "text it writes"
        )
    return text[:end] if text.startswith(_END_OF_TEXT, end) else text[:end].rstrip()


class _WithSpecialTokens:
    """A tokenizer whose texts include special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.is_byte_level = tokenizer.is_byte_level

    def byte_of(self, token: int) -> int | None:
        return self._tokenizer.byte_of(token)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def is_left_out(self, token: int) -> bool:
        return not self._tokenizer.token_bytes(token)


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """Returns the byte that each character in byte-level tokenizers stands for.

    Printable characters stand for themselves, and characters from U+0100 on for the other bytes.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}

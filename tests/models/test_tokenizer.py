"""The tokenizer against what transformers made of the same files, and chat templates."""

import datetime
import json
import pickle
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from detjax.models import CheckpointError, Tokenizer
from tests.support.tokenizers import with_byte_fallback

FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen3"
REFERENCE = json.loads((FIXTURE / "reference.json").read_text(encoding="utf-8"))
HELLO = [{"role": "user", "content": "hello"}]


def made_of(tmp_path: Path, config: dict[str, Any] | None = None, **files: str) -> Tokenizer:
    """The fixture's tokenizer.json with another configuration, and no other file but those given."""
    shutil.copyfile(FIXTURE / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config or {}), encoding="utf-8")
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    loaded = Tokenizer.load(tmp_path)
    assert loaded is not None
    return loaded


def rendered(tmp_path: Path, template: str, messages: list[dict[str, Any]] = HELLO, **kwargs: Any) -> str:
    return made_of(tmp_path, {"chat_template": template}).apply_chat_template(messages, **kwargs)


@pytest.mark.parametrize("chat", REFERENCE["chats"])
def test_conversations_become_the_text_and_ids_of_transformers(tokenizer, chat):
    text = tokenizer.apply_chat_template(chat["messages"], add_generation_prompt=chat["add_generation_prompt"])
    assert text == chat["text"]
    assert tokenizer.encode(text, add_special_tokens=False) == chat["ids"]


@pytest.mark.parametrize("plain", REFERENCE["plain"])
def test_strings_become_the_ids_of_transformers_and_back(tokenizer, plain):
    assert tokenizer.encode(plain["text"], add_special_tokens=False) == plain["ids"]
    assert tokenizer.decode(plain["ids"], skip_special_tokens=False) == plain["decoded"]


ODD_TEXTS = (
    "",
    " ",
    "a" * 5000,
    "\n\r\n \t  \u00a0\u3000" * 20,
    "e\u0301 \u1112\u1161\u11ab \u212a \ufb01 \U0001d518",
    "🦀👩\u200d👩\u200d👧🏽 \u202e\ufeff\ufffd\U0010ffff",
    "\x00\x01\x7f\x80\xad\xff",
    "<|im_end|><|im_start|> <|im_end |<|im_end|>x",
    "<0xFF> <unk> \u2581\u2581 Ġ Ċ",
)


def test_a_text_has_the_ids_that_the_library_gives_it_with_offsets(some_tokenizer: Tokenizer) -> None:
    """The way to encode that computes no offsets is faster, and must differ in nothing else."""
    draw = random.Random(0)
    drawn = ["".join(chr(draw.choice((draw.randrange(32, 127), draw.randrange(0xD800)))) for _ in range(200))] * 50
    for text in (*ODD_TEXTS, *drawn, *(chat["text"] for chat in REFERENCE["chats"])):
        for special in (False, True):
            expected = some_tokenizer._tokenizer.encode(text, add_special_tokens=special).ids
            assert some_tokenizer.encode(text, special) == expected


def test_other_threads_run_while_a_text_is_encoded(tokenizer: Tokenizer) -> None:
    """None would have a turn if the library held Python's lock while it encodes."""
    turns, is_done = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not is_done.wait(0.001):
            turns += 1

    def turns_while_it_encodes() -> int:
        before = turns
        tokenizer.encode("some words " * 60_000)
        return turns - before

    counting = threading.Thread(target=count)
    counting.start()
    try:
        # A busy machine may give the other thread few turns, but not each time.
        assert any(turns_while_it_encodes() >= 10 for _ in range(50))
    finally:
        is_done.set()
        counting.join()


@pytest.mark.parametrize("text", ["Zwölf Boxkämpfer 🦀", "two  spaces\n\ttabs", "日本語 <|im_end|>", "\x00\x7f\xad"])
def test_the_bytes_of_tokens_make_up_the_text(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.token_bytes(10**6) == b""


def test_the_bytes_of_tokens_that_are_not_byte_level(tmp_path: Path) -> None:
    tokenizer = with_byte_fallback(tmp_path)
    ids = tokenizer.encode("b ab a🦀", add_special_tokens=False)
    assert tokenizer._tokenizer.token_to_id("\u2581a") in ids
    assert b"".join(map(tokenizer.token_bytes, ids)) == "b ab a🦀".encode()


def test_special_tokens_are_left_out_of_text_unless_asked_for(tokenizer):
    ids = tokenizer.encode("a<|im_end|>b")
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"


def test_special_tokens_have_their_roles(tokenizer):
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert (tokenizer.token_id("eos_token"), tokenizer.token_id("pad_token")) == (509, 510)
    assert tokenizer.token_id("bos_token") is None
    assert len(tokenizer) == 512


def test_a_directory_without_tokenizer_json_has_no_tokenizer(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert Tokenizer.load(tmp_path) is None


def test_special_tokens_may_be_objects_or_stand_in_a_file_of_their_own(tmp_path):
    added = {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False}
    special = {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>", "pad_token": {"content": "<|endoftext|>"}}
    read = made_of(tmp_path, {"eos_token": added, "bos_token": None}, special_tokens_map_dot_json=json.dumps(special))
    assert read.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }


@pytest.mark.parametrize(
    "config",
    [{"eos_token": "king"}, {"extra_special_tokens": ["king"]}, {"additional_special_tokens": [{"content": "king"}]}],
)
def test_a_common_word_that_is_said_to_be_special_is_special(tmp_path, tokenizer, config):
    assert tokenizer.decode(tokenizer.encode("king 1")) == "king 1"
    read = made_of(tmp_path, config)
    assert read.decode(read.encode("king 1")) == " 1"
    assert len(read) == 512


def test_the_truncation_and_padding_of_a_training_run_are_not_applied(tmp_path, tokenizer):
    trained = tokenizers.Tokenizer.from_file(str(FIXTURE / "tokenizer.json"))
    trained.enable_truncation(3)
    trained.enable_padding(length=100)
    trained.save(str(tmp_path / "tokenizer.json"))
    text = "more than three tokens are in this text"
    assert Tokenizer.load(tmp_path).encode(text) == tokenizer.encode(text)


def test_add_special_tokens_puts_around_the_text_what_the_tokenizer_does(tmp_path):
    trained = tokenizers.Tokenizer.from_file(str(FIXTURE / "tokenizer.json"))
    trained.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 511)]
    )
    trained.save(str(tmp_path / "tokenizer.json"))
    read = Tokenizer.load(tmp_path)
    assert read.encode("a") == [511, *read.encode("a", add_special_tokens=False)]


def test_a_template_in_a_file_has_precedence_over_the_configuration(tmp_path):
    assert made_of(tmp_path, {"chat_template": "old"}).apply_chat_template(HELLO) == "old"
    read = made_of(tmp_path, {"chat_template": "old"}, chat_template_dot_jinja="new")
    assert read.apply_chat_template(HELLO) == "new"


@pytest.mark.parametrize("in_files", [True, False])
def test_of_several_templates_the_one_for_tools_serves_where_there_are_tools(tmp_path, in_files):
    if in_files:
        files = {
            "chat_template_dot_jinja": "plain",
            "additional_chat_templates__tool_use_dot_jinja": "{{ tools[0].n }}",
        }
        read = made_of(tmp_path, **files)
    else:
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].n }}"}]
        read = made_of(tmp_path, {"chat_template": named})
    assert read.apply_chat_template(HELLO) == "plain"
    assert read.apply_chat_template(HELLO, tools=[{"n": "f"}]) == "f"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{{ messages[0].content }}{{ add_generation_prompt }}{{ tools is none }}", "helloTrueTrue"),
        ("{{ bos_token }}|{{ eos_token }}", "|<|im_end|>"),
        ('{{ {"b": "<ä>&\'", "a": 1} | tojson }}', '{"b": "<ä>&\'", "a": 1}'),
        ('{{ {"b": 1, "a": [2]} | tojson(indent=1, sort_keys=true) }}', '{\n "a": [\n  2\n ],\n "b": 1\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}", "[hello]"),
    ],
)
def test_templates_run_as_in_transformers(tmp_path, template, text):
    read = made_of(tmp_path, {"chat_template": template, "eos_token": "<|im_end|>"})
    assert read.apply_chat_template(HELLO) == text


# As Llama 3.2 has it, and as templates have it that insist on a date.
ASKS_FOR_A_DATE = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}26 Jul 2024{% endif %}"
INSISTS_ON_A_DATE = "{{ strftime_now('%Y-%m-%d') }}"


def test_templates_are_told_no_date_by_default(tmp_path):
    assert rendered(tmp_path, ASKS_FOR_A_DATE) == "26 Jul 2024"
    with pytest.raises(ValueError, match=r"strftime_now is undefined.*Set a fixed date with --template-date"):
        rendered(tmp_path, INSISTS_ON_A_DATE)


def test_templates_are_told_the_date_that_the_tokenizer_has(tmp_path):
    dated = made_of(tmp_path, {"chat_template": ASKS_FOR_A_DATE}).with_template_date(datetime.date(2026, 1, 31))
    for tokenizer in (dated, pickle.loads(pickle.dumps(dated)), Tokenizer(dated.files, "elsewhere")):
        assert tokenizer.apply_chat_template(HELLO) == "31 Jan 2026"
    other = dated.with_template_date(datetime.date(2026, 2, 1))
    assert other.apply_chat_template(HELLO) == "01 Feb 2026"
    assert other.files != dated.files  # digests are made of these
    assert made_of(tmp_path, {"chat_template": INSISTS_ON_A_DATE}).with_template_date(
        datetime.date(2026, 1, 31)
    ).apply_chat_template(HELLO) == "2026-01-31"  # fmt: skip


def test_a_date_that_is_none_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"chat_template_date.txt holds '31.1.'; accepted: a date"):
        made_of(tmp_path, chat_template_date_dot_txt="31.1.")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ [1, 2, 3] | random }}", "chat template 'default' is damaged: No filter named 'random'"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{{ {'a': 1, 'b': 2}.keys() - ['a'] }}", "the template makes a set"),
        ("{% for key in {'a': 1, 'b': 2}.keys() - {}.keys() %}{{ key }}{% endfor %}", "the template makes a set"),
        ("{{ [1, 2] | map('string') }}", "the template prints a generator object"),
        ("{{ 'x' ~ raise_exception }}", "the template prints a function _raise_exception"),
        ("{{ messages[0].items | string }}", "the template prints a built-in method items of dict object"),
        ("{{ cycler(1, 2) }}", r"the template prints a jinja2.utils.Cycler object"),
        *((f"{{{{ strftime_now('%{flag}s') }}}}", "%s depends on the time zone") for flag in ("", "-", "05", "E")),
    ],
)
def test_a_template_has_neither_chance_nor_addresses_nor_a_time_zone(tmp_path, template, words):
    dated = made_of(tmp_path, {"chat_template": template}).with_template_date(datetime.date(2026, 1, 31))
    with pytest.raises(ValueError, match=words):
        dated.apply_chat_template(HELLO)


def test_texts_that_look_like_addresses_are_text(tmp_path):
    template = "{{ messages[0].content[2:] }}{{ x.y[0] }}<f at 0x12>{{ 7 - 5 }}"
    messages = [{"role": "user", "content": "a <built-in method f of str object at 0x7f00deadbeef>"}]
    text = rendered(tmp_path, template, messages, x={"y": ["<g at 0x3>"]})
    assert text == "<built-in method f of str object at 0x7f00deadbeef><g at 0x3><f at 0x12>2"


def test_further_arguments_are_variables_of_the_template(tmp_path):
    template = "{{ enable_thinking }}{{ eos_token }}"
    assert rendered(tmp_path, template, enable_thinking=False, eos_token="x") == "Falsex"


def test_keys_of_messages_that_are_none_are_left_out(tmp_path):
    messages = [{"role": "assistant", "content": None, "tool_calls": None}]
    assert rendered(tmp_path, "{{ messages[0].content is defined }}", messages) == "False"


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", HELLO, "refuses these messages: roles must alternate"),
        ("{{ messages[0].missing.deeper }}", HELLO, "refuses these messages"),
        ("{{ messages[0].content + 1 }}", HELLO, "refuses these messages"),
        ("{{ messages.append(1) }}", HELLO, "refuses these messages"),
        ("{{ messages.__class__.__mro__ }}", HELLO, "refuses these messages"),
        ("text", [], "messages is empty"),
    ],
)
def test_messages_that_a_template_does_not_take_are_an_error_with_its_words(tmp_path, template, messages, words):
    with pytest.raises(ValueError, match=f"apply_chat_template: .*{words}"):
        rendered(tmp_path, template, messages)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "has no chat template 'default' (found: none); accepted: chat_template.jinja"),
        ({"chat_template": [{"name": "rag", "template": ""}]}, "has no chat template 'default' (found: rag)"),
        ({"chat_template": "{% if %}"}, "chat template 'default' is damaged"),
    ],
)
def test_a_chat_template_that_is_missing_or_damaged_is_an_error_when_it_is_used(tmp_path, config, words):
    read = made_of(tmp_path, config)
    assert read.encode("a")
    with pytest.raises(CheckpointError) as error:
        read.apply_chat_template(HELLO)
    assert str(tmp_path) in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("name", "contents", "words"),
    [
        ("tokenizer.json", b"", "tokenizer.json is not a tokenizer"),
        ("tokenizer.json", b"{}", "tokenizer.json is not a tokenizer"),
        ("tokenizer.json", (FIXTURE / "tokenizer.json").read_bytes()[:-100], "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", b"\xff", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json holds a list; accepted: a JSON object"),
        ("tokenizer_config.json", b'{"eos_token": 3}', "tokenizer_config.json: eos_token is 3; accepted: a string"),
        ("tokenizer_config.json", b'{"extra_special_tokens": 3}', "tokenizer_config.json: extra_special_tokens is 3"),
        ("tokenizer_config.json", b'{"extra_special_tokens": [3]}', "tokenizer_config.json: extra_special_tokens is 3"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "tokenizer_config.json: chat_template is a int; accepted"),
        ("tokenizer_config.json", b'{"chat_template": [{}]}', "tokenizer_config.json: chat_template is a list"),
        ("chat_template.jinja", b"\xff", "a chat template is not UTF-8"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, contents, words):
    shutil.copyfile(FIXTURE / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(CheckpointError) as error:
        Tokenizer.load(tmp_path)
    assert str(error.value).startswith(str(tmp_path))
    assert words in str(error.value)


def test_a_tokenizer_says_which_templates_it_has(tmp_path: Path) -> None:
    none = made_of(tmp_path)
    assert (none.has_chat_template, none.tool_template) == (False, None)
    plain = made_of(tmp_path, {"chat_template": "plain"})
    assert (plain.has_chat_template, plain.tool_template) == (True, "plain")
    tools = made_of(tmp_path, {"chat_template": [{"name": "tool_use", "template": "tools"}]})
    assert (tools.has_chat_template, tools.tool_template) == (False, "tools")
    both = made_of(tmp_path, chat_template_dot_jinja="plain", additional_chat_templates__tool_use_dot_jinja="tools")
    assert (both.has_chat_template, both.tool_template) == (True, "tools")
    other = both.with_chat_template("other")
    assert (other.tool_template, other.apply_chat_template(HELLO, tools=[{}])) == ("other", "other")
    assert both.tool_template == "tools"
    with pytest.raises(CheckpointError, match="chat template 'default' is damaged"):
        both.with_chat_template("{% if %}")


def test_tokens_that_add_no_text_are_known(tokenizer: Tokenizer) -> None:
    (end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert [tokenizer.is_left_out(token) for token in (end, 10**6, *tokenizer.encode("a b"))] == [
        True,
        True,
        False,
        False,
    ]
    assert end in tokenizer.added_tokens and tokenizer.encode("a")[0] not in tokenizer.added_tokens


def test_added_tokens_may_all_be_made_special(tmp_path: Path, tokenizer: Tokenizer) -> None:
    trained = tokenizers.Tokenizer.from_file(str(FIXTURE / "tokenizer.json"))
    trained.add_tokens(["<tool>"])
    trained.save(str(tmp_path / "tokenizer.json"))
    read = Tokenizer.load(tmp_path)
    assert read is not None
    (added,) = read.encode("<tool>", add_special_tokens=False)
    assert (read.is_left_out(added), read.decode([added]), added in read.added_tokens) == (False, "<tool>", True)
    special = tokenizers.Tokenizer.from_str(read.with_all_added_special())
    assert special.decode([added]) == "" and read.decode([added]) == "<tool>"


def test_bytes_have_tokens_only_where_the_tokenizer_is_not_byte_level(tmp_path: Path, tokenizer: Tokenizer) -> None:
    fallback = with_byte_fallback(tmp_path)
    assert (tokenizer.is_byte_level, fallback.is_byte_level) == (True, False)
    tokens = {fallback._tokenizer.id_to_token(token): token for token in range(len(fallback))}
    assert [fallback.byte_of(tokens[name]) for name in ("<0x00>", "<0xFF>", "a", "<unk>")] == [0, 255, None, None]
    assert fallback.byte_of(10**6) is None
    assert {tokenizer.byte_of(token) for token in range(len(tokenizer))} == {None}

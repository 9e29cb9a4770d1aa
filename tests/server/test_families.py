"""Answers of each family, whole and streamed, and their way back into the next prompt."""

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import pytest

from detjax.models import ModelMetadata, Tokenizer
from detjax.server.tools.formats import format_name
from tests.server.families import FAMILIES, HERMES, KIMI, OPENAI, QWEN_CODER, TOOLS, Family
from tests.server.scripted import Client, Script, scripted

CHAT: Final = "/v1/chat/completions"
USER: Final[dict[str, Any]] = {"role": "user", "content": "How is the weather?"}
THINKING: Final = {"chat_template_kwargs": {"thinking": True}}


def say(script: Script, tokenizer: Tokenizer, text: str | list[int], reason: str = "stop") -> None:
    """Makes a text, or tokens, the engine's answer."""
    tokens = tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else text
    stream, texts, known = tokenizer.stream(), list[str](), ""
    for token in tokens:
        before, known = known, stream.add(token)
        texts.append(known[len(before) :])
    script.tokens, script.texts, script.reason = tokens, texts, reason


@contextlib.contextmanager
def answering(
    family: Family, metadata: ModelMetadata, words: Tokenizer, text: str, *, plain: bool = False, **settings: Any
) -> Iterator[tuple[Client, Tokenizer]]:
    """A client of a server that answers with a text, and its tokenizer."""
    tokenizer, script = family.tokenizer(words, plain=plain), Script()
    say(script, tokenizer, text)
    with scripted(metadata, tokenizer, script, **settings) as client:
        yield client, tokenizer


def joined(chunks: list[Any]) -> tuple[dict[str, Any], str | None]:
    """The message of a streamed chat in the form of a whole one, and its finish reason."""
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    calls: list[dict[str, Any]] = []
    reason = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            reason = choice["finish_reason"]
            delta = choice["delta"]
            for name in ("content", "reasoning"):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call.pop("index") == len(calls)
                    calls.append(call)
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message | ({"tool_calls": calls} if calls else {}), reason


def without_made_ids(message: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """A message without the ids of calls that the server made."""
    calls = [
        {name: value for name, value in call.items() if name != "id" or "id" in expected["tool_calls"][0]}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


@pytest.mark.parametrize(
    ("family", "plain"),
    [
        pytest.param(family, plain, id=f"{name} {'text' if plain else 'tokens'}")
        for name, family in FAMILIES.items()
        for plain in (False, True)
        if not plain or family.answer.isascii()  # the tokenizer has no tokens for the bars of DeepSeek's marks
    ],
)
def test_an_answer_has_the_parts_that_its_family_writes(
    metadata: ModelMetadata, words: Tokenizer, family: Family, plain: bool
) -> None:
    asked = {"messages": [USER], "tools": TOOLS} | THINKING
    with answering(family, metadata, words, family.answer, plain=plain) as (client, _):
        (choice,) = client.ask(CHAT, **asked)["choices"]
        assert without_made_ids(choice["message"], family.message) == family.message
        assert choice["finish_reason"] == "tool_calls"
        message, reason = joined(client.ask(CHAT, **asked, stream=True))
        assert (without_made_ids(message, family.message), reason) == (family.message, "tool_calls")


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_next_prompt_has_the_text_that_the_model_wrote(
    metadata: ModelMetadata, words: Tokenizer, family: Family
) -> None:
    asked = {"tools": TOOLS} | THINKING
    with answering(family, metadata, words, family.answer) as (client, tokenizer):
        message = client.ask(CHAT, messages=[USER], **asked)["choices"][0]["message"]
        (first,) = client.script.asked
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Sunny"}
        second = client.asked(CHAT, messages=[USER, message, result], **asked)
        before, written = tokenizer.decode(first.prompt, False), tokenizer.decode(second.prompt, False)
        assert written.startswith(before + family.answer)
        given = {"role": "assistant", "reasoning_content": message.get("reasoning")} | message
        given.pop("reasoning", None)
        assert client.asked(CHAT, messages=[USER, given, result], **asked).prompt == second.prompt


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_items_of_a_response_are_the_parts_of_the_chat(
    metadata: ModelMetadata, words: Tokenizer, family: Family
) -> None:
    tools = [{"type": "function"} | tool["function"] for tool in TOOLS]
    asked = {"input": USER["content"], "tools": tools} | THINKING
    with answering(family, metadata, words, family.answer) as (client, tokenizer):
        whole = client.ask("/v1/responses", **asked)
        kinds: dict[str, list[Any]] = {"reasoning": [], "message": [], "function_call": []}
        for item in whole["output"]:
            assert item["status"] == "completed"
            kinds[item["type"]].append(item)
        reasoning = [[part["text"] for part in item["content"]] for item in kinds["reasoning"]]
        assert reasoning == ([[family.message["reasoning"]]] if "reasoning" in family.message else [])
        content = [part["text"] for item in kinds["message"] for part in item["content"]]
        assert content == [family.message["content"]] * (family.message["content"] is not None)
        functions = [{"name": call["name"], "arguments": call["arguments"]} for call in kinds["function_call"]]
        assert functions == [call["function"] for call in family.message["tool_calls"]]
        events = client.ask("/v1/responses", **asked, stream=True)
        names = ("type", "content", "name", "arguments", "status")

        def bare(output: list[Any]) -> list[Any]:
            return [{name: item.get(name) for name in names} for item in output]

        assert bare(events[-1]["response"]["output"]) == bare(whole["output"])
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        for kind in ("reasoning_text", "output_text", "function_call_arguments"):
            pieces = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
            ends = [event for event in events if event["type"] == f"response.{kind}.done"]
            assert "".join(pieces) == "".join(event.get("text", event.get("arguments")) for event in ends)
        before = tokenizer.decode(client.script.asked[-1].prompt, False)
        output = {"type": "function_call_output", "call_id": kinds["function_call"][0]["call_id"], "output": "Sunny"}
        items = [{"role": "user", "content": USER["content"]}, *whole["output"], output]
        second = client.asked("/v1/responses", **asked | {"input": items})
        assert tokenizer.decode(second.prompt, False).startswith(before + family.answer)


def test_a_format_is_recognized_by_the_template_or_named() -> None:
    assert {name: format_name(family.template) for name, family in FAMILIES.items()} == {
        name: name for name in FAMILIES
    }


def test_a_setting_names_another_format_than_the_templates(metadata: ModelMetadata, words: Tokenizer) -> None:
    hermes = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    for name, calls in (("hermes", 1), ("kimi_k2", 0)):
        with answering(QWEN_CODER, metadata, words, f"</think>{hermes}", tool_format=name) as (client, _):
            message = client.ask(CHAT, messages=[USER], tools=TOOLS)["choices"][0]["message"]
            assert len(message.get("tool_calls", [])) == calls
            assert message["content"] == (None if calls else hermes)
    with pytest.raises(ValueError, match=r"tool_format is 'hermess'; accepted: hermes, llama3_json, mistral, openai"):
        with answering(HERMES, metadata, words, "x", tool_format="hermess"):
            pass


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_an_answer_that_is_cut_anywhere_has_what_came(
    metadata: ModelMetadata, words: Tokenizer, family: Family
) -> None:
    asked = {"messages": [USER], "tools": TOOLS} | THINKING
    with answering(family, metadata, words, family.answer) as (client, tokenizer):
        tokens = tokenizer.encode(family.answer, add_special_tokens=False)
        for count in range(1, len(tokens), 5):
            text = tokenizer.decode(tokens[:count], False)
            say(client.script, tokenizer, text, "length")
            (choice,) = client.ask(CHAT, **asked)["choices"]
            assert choice["finish_reason"] == "length"
            message, reason = joined(client.ask(CHAT, **asked, stream=True))
            assert reason == "length"
            for name, call in enumerate(choice["message"].get("tool_calls", [])):
                assert call["function"] == message["tool_calls"][name]["function"]
                whole = family.message["tool_calls"][name]["function"]
                assert call["function"]["name"] == whole["name"]
                assert whole["arguments"].startswith(call["function"]["arguments"])
            for name in ("content", "reasoning"):
                assert (choice["message"].get(name) or None) == message.get(name)


def test_special_marks_spelled_out_are_text(metadata: ModelMetadata, words: Tokenizer) -> None:
    """A model that explains its format writes the characters of a mark in ordinary tokens."""
    spelled = "Write <|end|> or <|call|> or <|tool_calls_section_begin|>."
    for family, begin, end in ((OPENAI, "<|channel|>final<|message|>", "<|return|>"), (KIMI, "", "<|im_end|>")):
        tokenizer, script = family.tokenizer(words), Script()
        first, last = (tokenizer.encode(text, add_special_tokens=False) for text in (begin, end))
        body = words.encode(spelled, add_special_tokens=False)
        assert body != tokenizer.encode(spelled, add_special_tokens=False)
        say(script, tokenizer, [*first, *body, *last])
        with scripted(metadata, tokenizer, script) as client:
            (choice,) = client.ask(CHAT, messages=[USER], tools=TOOLS)["choices"]
            assert choice["message"]["content"] == spelled
            assert joined(client.ask(CHAT, messages=[USER], tools=TOOLS, stream=True))[0]["content"] == spelled


def test_without_tools_calls_are_content_and_reasoning_is_reasoning(metadata: ModelMetadata, words: Tokenizer) -> None:
    with answering(HERMES, metadata, words, HERMES.answer) as (client, _):
        message = client.ask(CHAT, messages=[USER])["choices"][0]["message"]
        assert message["reasoning"] == HERMES.message["reasoning"]
        assert message["content"] == HERMES.answer.partition("</think>\n\n")[2]
        assert "tool_calls" not in message
        assert client.ask(CHAT, messages=[USER], tools=TOOLS, tool_choice="none")["choices"][0]["message"] == message
    with answering(OPENAI, metadata, words, OPENAI.answer) as (client, _):
        message = client.ask(CHAT, messages=[USER])["choices"][0]["message"]
        assert message["content"] == "I look.\n" + OPENAI.message["tool_calls"][0]["function"]["arguments"]

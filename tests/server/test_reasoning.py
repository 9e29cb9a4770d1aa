"""Reasoning in chats and responses: what clients get, what the template gets, and what a budget asks of the engine."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Final

import pytest

from detjax.audit import read_transcripts
from detjax.models import ModelMetadata, Tokenizer
from detjax.server.tools.harmony import HarmonyReasoning
from detjax.server.tools.reasoning import ReasoningFormat, Start
from tests.server.families import DEEPSEEK_V3, DEEPSEEK_V31, HERMES, OPENAI, QWEN_CODER, TOOLS
from tests.server.scripted import Client, Script, scripted
from tests.server.test_families import CHAT, USER, answering, joined, say

RESPONSES: Final = "/v1/responses"
THOUGHT: Final = "<think>\nHm,\nhm.\n</think>\n\nYes."


def usage_of(client: Client, path: str, **body: Any) -> tuple[int, int]:
    """The reasoning tokens of an answer, whole and streamed."""
    options = {"stream_options": {"include_usage": True}} if path == CHAT else {}
    whole = client.ask(path, **body)["usage"]
    last = client.ask(path, **body, stream=True, **options)[-1]
    streamed = last["usage"] if path == CHAT else last["response"]["usage"]
    name = "completion_tokens_details" if path == CHAT else "output_tokens_details"
    return whole[name]["reasoning_tokens"], streamed[name]["reasoning_tokens"]


def test_reasoning_is_a_field_of_messages_and_of_deltas(metadata: ModelMetadata, words: Tokenizer) -> None:
    with answering(HERMES, metadata, words, THOUGHT) as (client, tokenizer):
        (choice,) = client.ask(CHAT, messages=[USER])["choices"]
        expected = {"role": "assistant", "content": "Yes.", "refusal": None, "reasoning": "Hm,\nhm."}
        assert (choice["message"], choice["finish_reason"]) == (expected, "stop")
        assert joined(client.ask(CHAT, messages=[USER], stream=True)) == (expected, "stop")
        without = {name: value for name, value in expected.items() if name != "reasoning"}
        hidden = {"messages": [USER], "include_reasoning": False}
        assert client.ask(CHAT, **hidden)["choices"][0]["message"] == without
        assert joined(client.ask(CHAT, **hidden, stream=True))[0] == without
        count = len(tokenizer.encode("\nHm,\nhm.\n", add_special_tokens=False))
        for more in ({}, {"include_reasoning": False}):
            assert usage_of(client, CHAT, messages=[USER], **more) == (count, count)
        assert usage_of(client, RESPONSES, input="Hi") == (count, count)
        say(client.script, tokenizer, "<think>\nHm", "length")
        (choice,) = client.ask(CHAT, messages=[USER])["choices"]
        assert choice["message"] == {"role": "assistant", "content": None, "refusal": None, "reasoning": "Hm"}
        assert client.ask(RESPONSES, input="Hi")["output"][0]["status"] == "incomplete"
        say(client.script, tokenizer, "Yes.")
        assert "reasoning" not in client.ask(CHAT, messages=[USER])["choices"][0]["message"]
        assert usage_of(client, CHAT, messages=[USER]) == (0, 0)


def test_reasoning_of_several_choices_is_counted_together(metadata: ModelMetadata, words: Tokenizer) -> None:
    with answering(HERMES, metadata, words, THOUGHT) as (client, tokenizer):
        count = len(tokenizer.encode("\nHm,\nhm.\n", add_special_tokens=False))
        assert usage_of(client, CHAT, messages=[USER], n=3) == (3 * count, 3 * count)


def test_reasoning_tokens_of_messages_are_those_of_the_channel_analysis(
    metadata: ModelMetadata, words: Tokenizer
) -> None:
    text = "<|channel|>analysis<|message|>a b<|end|><|start|>assistant<|channel|>analysis<|message|>c<|end|>"
    text += "<|start|>assistant<|channel|>final<|message|>d<|return|>"
    with answering(OPENAI, metadata, words, text) as (client, tokenizer):
        count = sum(len(tokenizer.encode(one, add_special_tokens=False)) for one in ("a b", "c"))
        assert usage_of(client, CHAT, messages=[USER]) == (count, count)


def test_the_end_of_the_prompt_says_where_an_answer_begins(metadata: ModelMetadata, words: Tokenizer) -> None:
    text = "Hm.</think>Yes."
    for family, variables, reasoning in (
        (DEEPSEEK_V31, {"thinking": True}, True),
        (DEEPSEEK_V31, {"thinking": False}, False),
        (QWEN_CODER, {}, True),
        (QWEN_CODER, {"enable_thinking": False}, False),
        (HERMES, {}, False),
        (DEEPSEEK_V3, {}, False),
    ):
        with answering(family, metadata, words, text) as (client, _):
            (choice,) = client.ask(CHAT, messages=[USER], chat_template_kwargs=variables)["choices"]
            expected = ("Hm.", "Yes.") if reasoning else (None, text)
            assert (choice["message"].get("reasoning"), choice["message"]["content"]) == expected


def test_a_continued_message_continues_its_reasoning_or_its_content(metadata: ModelMetadata, words: Tokenizer) -> None:
    for family, begun, text, expected in (
        (HERMES, {"content": "<think>\nH"}, "m.\n</think>\n\nYes.", ("m.", "Yes.")),
        (HERMES, {"content": "<think>\nHm.\n</think>\n\nY"}, "es. <think>", (None, "es. <think>")),
        (HERMES, {"content": "Y"}, "<think>es.</think>", (None, "<think>es.</think>")),
        (OPENAI, {"content": "Y"}, "es.<|return|>", (None, "es.")),
    ):
        with answering(family, metadata, words, text) as (client, _):
            messages = [USER, {"role": "assistant"} | begun]
            (choice,) = client.ask(CHAT, messages=messages, continue_final_message=True)["choices"]
            assert (choice["message"].get("reasoning"), choice["message"]["content"]) == expected


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ("a<think>", Start.OPEN),
        ("a<think> ", Start.OPEN),
        ("a<think>\n", Start.OPEN_LINE),
        ("<think>\n\n</think>\n\n", Start.CLOSED),
        ("</think>", Start.CLOSED),
        ("<think>a", Start.FREE),
        ("", Start.FREE),
    ],
)
def test_a_start_is_a_function_of_the_prompts_end(words: Tokenizer, ending: str, expected: Start) -> None:
    assert ReasoningFormat(words, "<think>", "</think>").start(ending) is expected


def test_a_start_of_messages_is_a_function_of_the_begun_message(words: Tokenizer) -> None:
    format_ = HarmonyReasoning(OPENAI.tokenizer(words))
    for begun, expected in (
        ("assistant", Start.FREE),
        ("assistant<|channel|>analysis<|message|>", Start.OPEN),
        ("assistant<|channel|>final<|message|>", Start.CLOSED),
    ):
        assert format_.start(f"<|start|>user<|message|>x<|end|><|start|>{begun}") is expected


def test_effort_and_earlier_reasoning_reach_the_template(metadata: ModelMetadata, words: Tokenizer) -> None:
    template = (
        "{{ reasoning_effort }}|{% for m in messages %}{{ m.role }}:{{ m.reasoning }},{{ m.reasoning_content }},"
        "{{ m.thinking }},{{ m.content }};{% endfor %}"
    )
    with scripted(metadata, words.with_chat_template(template)) as client:

        def text(path: str, **body: Any) -> str:
            return words.decode(client.asked(path, **body).prompt, False)

        for name in ("reasoning", "reasoning_content"):
            answer = {"role": "assistant", "content": None, name: "r"}
            assert text(CHAT, messages=[answer], reasoning_effort="high") == "high|assistant:r,r,r,;"
        both = {"role": "assistant", "content": "c", "reasoning": "r", "reasoning_content": "r"}
        assert text(CHAT, messages=[both]) == "|assistant:r,r,r,c;"
        given = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "max"}}
        assert text(CHAT, messages=[USER], **given).startswith("max|user:,,,")
        thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]}
        said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]}
        call = {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"}
        for items, expected in (
            ([thought, said], "assistant:r,r,r,c;"),
            ([thought, thought, said], "assistant:r\nr,r\nr,r\nr,c;"),
            ([thought, call], "assistant:r,r,r,;"),
            ([said, thought, said], "assistant:,,,c;assistant:r,r,r,c;"),
            ([thought, USER], f"assistant:r,r,r,;user:,,,{USER['content']};"),
            ([said, thought], "assistant:,,,c;assistant:r,r,r,;"),
        ):
            assert text(RESPONSES, input=items, reasoning={"effort": "low"}) == f"low|{expected}"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (
            {"role": "user", "content": "x", "reasoning": "r"},
            "reasoning is given with role 'user'; accepted: with role",
        ),
        (
            {"role": "assistant", "content": "x", "reasoning": "r", "reasoning_content": "s"},
            "have different texts; accepted: one of them",
        ),
        ({"role": "assistant", "reasoning": ""}, "content is missing or null"),
    ],
)
def test_messages_that_contradict_themselves_are_refused(api: Client, message: dict[str, Any], says: str) -> None:
    status, error = api.refusal(CHAT, messages=[message])
    assert status == 400
    assert says in error["message"]


def test_a_budget_reaches_the_engine_with_the_marks_around_the_reasoning(
    metadata: ModelMetadata, words: Tokenizer
) -> None:
    for family, begin, end, is_open in (
        (HERMES, ["<think>"], ["</think>"], False),
        (QWEN_CODER, ["<think>"], ["</think>"], True),
        (OPENAI, ["<|channel|>", "analysis", "<|message|>"], ["<|end|>"], False),
    ):
        with answering(family, metadata, words, "x") as (client, tokenizer):
            for path, body in ((CHAT, {"messages": [USER]}), (RESPONSES, {"input": "Hi"})):
                budget = client.asked(path, **body, thinking_token_budget=7).sampling.reasoning_budget
                assert budget is not None
                assert budget.tokens == 7
                marks = budget.marks
                assert tokenizer.decode(marks.begin, False) == "".join(begin)
                assert tokenizer.decode(marks.end, False) == "".join(end)
                assert (marks.is_open, marks.repeats) == (is_open, family is OPENAI)
                assert client.asked(path, **body, thinking_token_budget=-1).sampling.reasoning_budget is None
                assert client.asked(path, **body).sampling.reasoning_budget is None
    with answering(QWEN_CODER, metadata, words, "x") as (client, _):
        asked = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}, "thinking_token_budget": 7}
        assert client.asked(CHAT, **asked).sampling.reasoning_budget is None


def test_a_budget_that_cannot_be_kept_is_refused_by_name(metadata: ModelMetadata, words: Tokenizer) -> None:
    for family, plain, says in (
        (DEEPSEEK_V3, False, "has no marks of reasoning; accepted: null"),
        (HERMES, True, "marks reasoning with plain text; accepted: null"),
    ):
        with answering(family, metadata, words, "x", plain=plain) as (client, _):
            for path, body in ((CHAT, {"messages": [USER]}), (RESPONSES, {"input": "Hi"})):
                status, error = client.refusal(path, **body, thinking_token_budget=0)
                assert (status, error["param"]) == (400, "thinking_token_budget")
                assert says in error["message"]
                assert client.refusal(path, **body, thinking_token_budget=-2)[0] == 400


def test_tokens_that_end_answers_of_a_format_end_them_unless_the_request_ignores_ends(
    metadata: ModelMetadata, words: Tokenizer
) -> None:
    with answering(OPENAI, metadata, words, "x") as (client, tokenizer):
        stops = tuple(tokenizer.encode("<|return|><|call|>", add_special_tokens=False))
        for path, body in ((CHAT, {"messages": [USER]}), (RESPONSES, {"input": "Hi"})):
            assert client.asked(path, **body).sampling.stop_token_ids == stops
            assert client.asked(path, **body, stop_token_ids=[3]).sampling.stop_token_ids == (3, *stops)
            assert client.asked(path, **body, ignore_eos=True).sampling.stop_token_ids == ()


def test_logprobs_of_a_response_are_those_of_its_message(metadata: ModelMetadata, words: Tokenizer) -> None:
    asked: dict[str, Any] = {"input": "Hi", "include": ["message.output_text.logprobs"]}
    for text in (THOUGHT, "Yes.", "<think>\nHm"):
        with answering(HERMES, metadata, words, text) as (client, _):
            whole = client.ask(RESPONSES, **asked)["output"]
            events = client.ask(RESPONSES, **asked, stream=True)
            deltas = [event for event in events if event["type"] == "response.output_text.delta"]
            streamed = [entry for event in deltas for entry in event["logprobs"]]
            given = [entry for item in whole if item["type"] == "message" for entry in item["content"][0]["logprobs"]]
            assert given == streamed
            written = "".join(entry["token"] for entry in given).lstrip("\n")
            assert written == ("" if text.endswith("Hm") else "Yes.")


def test_a_response_with_reasoning_agrees_with_its_receipt(
    metadata: ModelMetadata, words: Tokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "responses.jsonl"
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    for family, text in (
        (HERMES, THOUGHT),
        (OPENAI, final),
        (HERMES, "<think>\nHm"),
        (QWEN_CODER, "Hm.\n</think>\n\nY"),
    ):
        with answering(family, metadata, words, text) as (client, tokenizer):
            bodies = [
                (CHAT, {"messages": [USER]}),
                (CHAT, {"messages": [USER], "include_reasoning": False}),
                (RESPONSES, {"input": "Hi"}),
            ]
            answers = [client.ask(path, **body, receipt=True) for path, body in bodies]

            def contradictions(answers: list[Any], tokenizer: Tokenizer = tokenizer) -> list[str | None]:
                file.write_text("\n".join(map(json.dumps, answers)))
                return [one.contradiction for one in read_transcripts(file, tokenizer).values()]

            hidden = answers[1]["choices"][0]["message"]["content"]
            known = [None, None if hidden else "no content", None]
            assert [known[place] or one for place, one in enumerate(contradictions(answers))] == known
            answers[0]["choices"][0]["message"]["reasoning"] = "another"
            answers[1]["choices"][0]["message"]["content"] = "another"
            answers[2]["output"][0]["content"][0]["text"] = "another"
            assert all(contradictions(answers))


def test_streams_of_choices_have_their_own_reasoning(metadata: ModelMetadata, words: Tokenizer) -> None:
    with answering(HERMES, metadata, words, THOUGHT) as (client, _):
        chunks = client.ask(CHAT, messages=[USER], tools=TOOLS, n=2, stream=True)
        for index in range(2):
            parts = [
                dict(chunk, choices=[choice for choice in chunk["choices"] if choice["index"] == index])
                for chunk in chunks
            ]
            message, _ = joined(parts)
            assert (message["reasoning"], message["content"]) == ("Hm,\nhm.", "Yes.")


def test_stop_strings_hold_text_back_and_change_no_part(metadata: ModelMetadata, words: Tokenizer) -> None:
    """The engine holds the ends of texts back, so that marks come before their text."""
    tokenizer, script = OPENAI.tokenizer(words), Script()
    say(script, tokenizer, "<|channel|>final<|message|>Yes, no.<|return|>")
    pieces = [*script.texts]
    script.texts = ["", *pieces[:-2], "".join(filter(None, pieces[-2:]))]
    assert "".join(filter(None, script.texts)) == "finalYes, no."
    with scripted(metadata, tokenizer, script) as client:
        whole = client.ask(CHAT, messages=[USER])["choices"][0]["message"]
        assert whole["content"] == "Yes, no."
        assert joined(client.ask(CHAT, messages=[USER], stream=True))[0]["content"] == "Yes, no."
    assert dataclasses.asdict(OPENAI)["name"] == "openai"

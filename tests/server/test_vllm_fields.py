"""Fields of vLLM's and SGLang's clients: what reaches the engine, what answers have, and what is refused."""

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from detjax.engine import Constraint
from detjax.models import ModelMetadata, Tokenizer
from detjax.server.api.structural_tags import grammar_of
from tests.server.running_server import MODEL
from tests.server.scripted import LENGTH, Client, Script, scripted
from tests.server.tool_models import HERMES, NOW

COMPLETE, CHAT, RESPOND = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES: Final[Any] = [{"role": "user", "content": "Hi"}]
LEAST: Final[dict[str, dict[str, Any]]] = {COMPLETE: {"prompt": [5, 6, 7]}, CHAT: {"messages": MESSAGES}}
LEAST[RESPOND] = {"input": "Hi"}
SCHEMA: Final = {"type": "object", "properties": {"a": {"const": 1}}}
LOGGED: Final[dict[str, dict[str, Any]]] = {
    COMPLETE: {"logprobs": 1},
    CHAT: {"logprobs": True, "top_logprobs": 1},
    RESPOND: {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
}
"""Fields that ask for logprobs, with one likeliest token."""


NOTHING: Final[dict[str, Any]] = dict.fromkeys(
    (
        *("frequency_penalty", "logit_bias", "max_tokens", "presence_penalty", "response_format", "seed", "stop"),
        *("stream_options", "temperature", "top_p", "user", "top_k", "min_p", "repetition_penalty", "watermarking"),
        *("truncate_prompt_tokens", "truncation_side", "prompt_logprobs", "logprob_token_ids", "allowed_token_ids"),
        *("structured_outputs", "session_id", "return_tokens_as_token_ids", "return_token_ids", "cache_salt"),
        *("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "repetition_detection", "stream_interval"),
        *("regex", "ebnf", "stop_regex", "lora_path", "session_params", "custom_params", "custom_logit_processor"),
        *("images_config", "bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "rid", "extra_key"),
        *("disagg_prefill_dp_rank", "data_parallel_rank", "ngram_corpus_id", "thinking_token_budget"),
    )
)
DEFAULTS: Final = NOTHING | {
    **{"n": 1, "stream": False, "use_beam_search": False, "length_penalty": 1.0, "stop_token_ids": []},
    **{"include_stop_str_in_output": False, "ignore_eos": False, "min_tokens": 0, "skip_special_tokens": True},
    **{"spaces_between_special_tokens": True, "bad_words": [], "priority": 0, "request_id": "a-name"},
    **{"routed_experts_prompt_start": 0, "return_token_offsets": False, "return_mm_kwargs": True},
    **{"return_hidden_states": False, "return_routed_experts": False, "routed_experts_start_len": 0},
    **{"return_cached_tokens_details": False, "no_stop_trim": False},
}
"""Fields of vLLM's and SGLang's requests with their defaults, which some clients send."""
DEFAULTS_OF: Final[dict[str, dict[str, Any]]] = {
    COMPLETE: {"echo": False, "logprobs": None, "suffix": None, "prompt_embeds": None, "add_special_tokens": True}
    | {"best_of": None, "json_schema": None, "custom_labels": None},
    CHAT: {"logprobs": False, "top_logprobs": 0, "max_completion_tokens": None, "tools": None, "tool_choice": "none"}
    | {"reasoning_effort": None, "include_reasoning": True, "parallel_tool_calls": True, "echo": False}
    | {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False, "documents": None}
    | {"chat_template": None, "chat_template_kwargs": None, "media_io_kwargs": None, "mm_processor_kwargs": None}
    | {"return_prompt_text": None, "return_prompt_token_ids": False, "return_meta_info": False, "task": None}
    | {"separate_reasoning": True, "stream_reasoning": True, "max_dynamic_patch": None, "min_dynamic_patch": None}
    | {"use_audio_in_video": False, "input_ids": None},
}


@pytest.mark.parametrize("path", DEFAULTS_OF)
def test_the_defaults_of_vllm_and_sglang_ask_for_nothing(api: Client, path: str) -> None:
    plain = api.asked(path, **LEAST[path])
    assert api.asked(path, **LEAST[path], **DEFAULTS, **DEFAULTS_OF[path]).sampling == plain.sampling


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("truncation_side", "right", '"left" or null, because truncate_prompt_tokens keeps the last tokens'),
        ("logprob_token_ids", [5], "null, because logprobs are for the likeliest tokens"),
        ("stop_regex", "a+", "[] or null, because stop has strings, not patterns"),
        ("return_routed_experts", True, "false or null, because routed experts are not reported"),
    ],
)
def test_fields_of_vllm_and_sglang_that_are_not_served_are_refused(
    api: Client, field: str, value: Any, accepted: str
) -> None:
    for path in LEAST:
        status, error = api.refusal(path, **LEAST[path], **{field: value})
        assert (status, error["param"]) == (400, field)
        assert f"accepted: {accepted}" in error["message"]


# --- logprobs of the sampling distribution ----------------------------------------------------------------------------


@pytest.fixture
def processed(metadata: ModelMetadata, words: Tokenizer) -> Iterator[Client]:
    with scripted(metadata, words, logprobs_mode="processed_logprobs") as client:
        yield client


def entries(path: str, answer: Any) -> list[dict[str, Any]]:
    """The logprobs of an answer's tokens, whole or streamed, in one form."""
    if path == RESPOND:
        if isinstance(answer, list):
            return [one for event in answer if event["type"].endswith("text.delta") for one in event["logprobs"]]
        return answer["output"][0]["content"][0]["logprobs"]
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in (answer if isinstance(answer, list) else [answer])]
    if path == CHAT:
        return [one for some in logprobs if some for one in some["content"]]
    result = []
    for some in logprobs:
        added = some.get("sampling_logprobs", [None] * len(some["tokens"]))
        for token, logprob, top, drawn in zip(
            some["tokens"], some["token_logprobs"], some["top_logprobs"], added, strict=True
        ):
            likeliest = [{"token": name, "logprob": value} for name, value in top.items() if name != token]
            entry = {"token": token, "logprob": logprob, "top_logprobs": likeliest}
            result.append(entry if drawn is None else entry | {"sampling_logprob": drawn})
    return result


@pytest.mark.parametrize("path", LEAST)
@pytest.mark.parametrize("stream", [False, True])
def test_sampling_logprobs_stand_next_to_logprobs(api: Client, path: str, stream: bool) -> None:
    asked = LEAST[path] | LOGGED[path] | {"stream": stream}
    plain, added = entries(path, api.ask(path, **asked)), entries(path, api.ask(path, **asked, sampling_logprobs=True))
    assert [one["logprob"] for one in plain] == [-1.0, -1.125]
    assert [one["sampling_logprob"] for one in added] == [-0.5, -0.625]
    assert [{name: one[name] for name in one if name != "sampling_logprob"} for one in added] == plain


@pytest.mark.parametrize("path", LEAST)
@pytest.mark.parametrize("stream", [False, True])
def test_processed_logprobs_are_those_of_the_sampling_distribution(processed: Client, path: str, stream: bool) -> None:
    answer = processed.ask(path, **LEAST[path], **LOGGED[path], stream=stream, receipt=True)
    assert [one["logprob"] for one in entries(path, answer)] == [-0.5, -0.625]
    assert [one["top_logprobs"][0]["logprob"] for one in entries(path, answer)] == [0.0, 0.0]
    last = answer if not isinstance(answer, list) else answer[-1]
    said = last.get("response", last) if path == RESPOND else last["choices"][0]
    assert said["logprobs_mode"] == "processed_logprobs"
    assert said["receipt"]["logprobs"] == [-1.0, -1.125]
    assert said["receipt"]["sampling_logprobs"] == [-0.5, -0.625]
    # A request without logprobs does not pay for them.
    assert not processed.asked(path, **LEAST[path]).sampling.sampling_logprobs


def test_prompts_have_the_logprobs_of_the_mode(api: Client, processed: Client) -> None:
    for path in (COMPLETE, CHAT):
        for client, logprob in ((api, -4.0), (processed, -3.5)):
            for added in (False, True):
                answer = client.ask(path, **LEAST[path], prompt_logprobs=1, sampling_logprobs=added)
                scores = (answer if path == CHAT else answer["choices"][0])["prompt_logprobs"]
                entry = scores[1][str(client.script.asked[-1].prompt[1])]
                assert entry["logprob"] == logprob
                assert entry.get("sampling_logprob") == (-3.5 if added else None)
                assert scores[1]["40"]["logprob"] == logprob + 3.5
        assert (
            api.asked(path, **LEAST[path], prompt_logprobs=1, sampling_logprobs=True, scored_answer=2)
            == (api.script.asked[-1])
        )
        assert api.script.asked[-1].sampling.scored_answer == 2
    choice = api.ask(COMPLETE, prompt=[5, 6], echo=True, logprobs=1, sampling_logprobs=True)["choices"][0]
    assert choice["logprobs"]["sampling_logprobs"] == [None, -3.5, -0.5, -0.625]
    assert choice["logprobs"]["token_logprobs"] == [None, -4.0, -1.0, -1.125]


@pytest.mark.parametrize("path", LEAST)
def test_sampling_logprobs_without_logprobs_are_for_receipts(api: Client, path: str) -> None:
    status, error = api.refusal(path, **LEAST[path], sampling_logprobs=True)
    assert (status, error["param"]) == (400, "sampling_logprobs")
    assert "accepted: sampling_logprobs with logprobs, prompt_logprobs or receipt" in error["message"]
    answer = api.ask(path, **LEAST[path], sampling_logprobs=True, receipt=True)
    receipt = answer["receipt"] if path == RESPOND else answer["choices"][0]["receipt"]
    assert receipt["sampling_logprobs"] == [-0.5, -0.625]


def test_scored_answers_need_sampling_logprobs_of_prompts(api: Client) -> None:
    for given in ({}, {"prompt_logprobs": 1}, {"logprobs": 1, "sampling_logprobs": True}):
        status, error = api.refusal(COMPLETE, prompt=[5, 6], scored_answer=1, **given)
        assert (status, error["param"]) == (400, "scored_answer")


def test_the_mode_is_one_of_vllms_modes_of_logprobs(metadata: ModelMetadata, words: Tokenizer) -> None:
    for mode in ("raw_logits", "processed"):
        with pytest.raises(ValueError, match=r"logprobs_mode is .*; accepted: raw_logprobs, processed_logprobs"):
            with scripted(metadata, words, logprobs_mode=mode):
                pass


# --- names of tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_reported_by_their_ids_on_request(api: Client, stream: bool) -> None:
    for path in LEAST:
        asked = LEAST[path] | LOGGED[path] | {"stream": stream, "n": 2}
        if path == RESPOND:
            del asked["n"]
        plain = entries(path, api.ask(path, **asked))
        named = entries(path, api.ask(path, **asked, return_tokens_as_token_ids=True))
        assert [one["token"] for one in named[:2]] == ["token_id:5", "token_id:6"]
        assert [top["token"] for one in named for top in one["top_logprobs"]] == ["token_id:40"] * len(named)
        assert [one.get("bytes") for one in named] == [one.get("bytes") for one in plain]


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_a_prompt_is_cut_to_its_last_tokens(api: Client) -> None:
    long = [*range(3, 300), *range(3, 300)]
    for cut, kept in ((2, long[-2:]), (1000, None), (-1, long[16 - LENGTH :])):
        if kept is not None:
            assert api.asked(COMPLETE, prompt=long, truncate_prompt_tokens=cut).prompt == kept
            text = "".join(map(chr, range(60, 90))) * 30
            assert len(api.asked(COMPLETE, prompt=text, truncate_prompt_tokens=cut).prompt) == len(kept)
    assert api.asked(COMPLETE, prompt=[5, 6, 7], truncate_prompt_tokens=9).prompt == [5, 6, 7]
    answer = api.ask(COMPLETE, prompt=["&'(", ")"], truncate_prompt_tokens=2, echo=True, return_token_ids=True)
    assert [choice["text"] for choice in answer["choices"]] == ["'(xy", ")xy"]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[6, 7], [8]]
    for path, field in ((CHAT, "max_tokens"), (RESPOND, "max_output_tokens")):
        whole = api.asked(path, **LEAST[path]).prompt
        assert api.asked(path, **LEAST[path], truncate_prompt_tokens=3).prompt == whole[-3:]
        said = "a" * 900
        long_body: Any = {"messages": [{"role": "user", "content": said}]} if path == CHAT else {"input": said}
        assert api.refusal(path, **long_body)[0] == 400
        assert len(api.asked(path, **long_body, truncate_prompt_tokens=-1).prompt) == LENGTH - 1
        assert len(api.asked(path, **long_body, truncate_prompt_tokens=-1, **{field: 30}).prompt) == LENGTH - 30


def test_a_prompt_that_is_still_too_long_is_refused(metadata: ModelMetadata, words: Tokenizer) -> None:
    with scripted(metadata, words, is_strict=True) as api:
        long = [5] * 500
        assert api.refusal(COMPLETE, prompt=long, truncate_prompt_tokens=LENGTH)[0] == 400
        assert api.ask(COMPLETE, prompt=long, truncate_prompt_tokens=LENGTH - 16)


@pytest.fixture
def plain(metadata: ModelMetadata, words: Tokenizer) -> Iterator[Client]:
    """A client of a server whose template marks the beginning and the end of each message."""
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    with scripted(metadata, words.with_chat_template(template)) as client:
        yield client


def prompt_of(client: Client, messages: Any, **fields: Any) -> str:
    request = client.asked(CHAT, messages=messages, **fields)
    (text,) = (client.app.state.texts._tokenizer.decode(request.prompt, skip_special_tokens=False),)  # pyright: ignore
    return text


def test_an_answer_is_a_new_message_or_continues_the_last_one(plain: Client) -> None:
    turns = [*MESSAGES, {"role": "assistant", "content": "He said"}]
    assert prompt_of(plain, MESSAGES) == "[user]Hi[end][assistant]"
    assert prompt_of(plain, MESSAGES, add_generation_prompt=False) == "[user]Hi[end]"
    for added in ({}, {"add_generation_prompt": False}):
        assert prompt_of(plain, turns, continue_final_message=True, **added) == "[user]Hi[end][assistant]He said"
    # Texts that the conversation has several times, and spaces at the end.
    twice = [{"role": "user", "content": "He said "}, {"role": "assistant", "content": "He said "}]
    assert prompt_of(plain, twice, continue_final_message=True) == "[user]He said [end][assistant]He said "
    parts = [{"type": "text", "text": text} for text in ("He ", "s")]
    turns = [*MESSAGES, {"role": "assistant", "content": parts}]
    assert prompt_of(plain, turns, continue_final_message=True).endswith("[assistant]He \ns")


def test_a_template_that_trims_messages_trims_the_continued_one(metadata: ModelMetadata, words: Tokenizer) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}"
    with scripted(metadata, words.with_chat_template(template)) as client:
        turns = [*MESSAGES, {"role": "assistant", "content": " He said "}]
        assert prompt_of(client, turns, continue_final_message=True) == "[user]Hi[end][assistant]He said"


def test_what_cannot_be_continued_is_refused(plain: Client, metadata: ModelMetadata, words: Tokenizer) -> None:
    status, error = plain.refusal(CHAT, messages=MESSAGES, continue_final_message=True, add_generation_prompt=True)
    assert (status, error["param"]) == (400, "continue_final_message")
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}]}
    status, error = plain.refusal(CHAT, messages=[*MESSAGES, call], continue_final_message=True)
    assert (status, error["param"]) == (400, "messages")
    assert "the last message does not end with text" in error["message"]
    with scripted(metadata, words.with_chat_template("{{ messages[0].content }}")) as client:
        turns = [*MESSAGES, {"role": "assistant", "content": "He"}]
        assert "leaves out the text" in client.refusal(CHAT, messages=turns, continue_final_message=True)[1]["message"]


def test_a_chat_echoes_the_assistants_last_message(plain: Client) -> None:
    turns = [*MESSAGES, {"role": "assistant", "content": "He said "}]
    asked: Any = {"messages": turns, "continue_final_message": True, "echo": True, "n": 2}
    answer = plain.ask(CHAT, **asked)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["He said xy"] * 2
    texts = ["", ""]
    for chunk in plain.ask(CHAT, **asked, stream=True):
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["He said xy"] * 2
    assert plain.ask(CHAT, messages=MESSAGES, echo=True)["choices"][0]["message"]["content"] == "xy"


# --- the form of the answer -------------------------------------------------------------------------------------------

GBNF: Final = 'root ::= "yes" | "no" again?\nagain ::= " " [a-c]+'
TAGS: Final = {
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f>"],
}


@pytest.mark.parametrize("path", LEAST)
def test_every_name_of_a_constraint_means_the_same(api: Client, words: Tokenizer, path: str) -> None:
    json_, tag = Constraint.json_schema(SCHEMA), {"type": "structural_tag"} | TAGS
    tagged = Constraint("grammar", grammar_of(tag, words))
    cases: list[tuple[dict[str, Any], Constraint]] = [
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, json_),
        ({"structured_outputs": {"json_object": True}}, Constraint.json_schema({"type": "object"})),
        ({"structured_outputs": {"structural_tag": json.dumps(tag)}}, tagged),
        ({"guided_json": SCHEMA}, json_),
        ({"guided_json": json.dumps(SCHEMA)}, json_),
        ({"guided_regex": "a+", "guided_decoding_backend": "auto"}, Constraint("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, Constraint.choice(["a", "b"])),
        ({"guided_grammar": 'start: "a"'}, Constraint("grammar", 'start: "a"')),
        ({"json_schema": json.dumps(SCHEMA)}, json_),
        ({"regex": "a+"}, Constraint("regex", "a+")),
        ({"structural_tag": json.dumps(tag)}, tagged),
    ]
    if path != RESPOND:
        cases.append(({"response_format": tag}, tagged))
    for given, expected in cases:
        assert api.asked(path, **LEAST[path], **given).sampling.constraint == expected, given
    by_name = api.asked(path, **LEAST[path], ebnf=GBNF).sampling.constraint
    assert by_name is not None and by_name.kind == "grammar" and "start:" in by_name.text
    for given in ({"guided_grammar": GBNF}, {"structured_outputs": {"grammar": GBNF}}):
        assert api.asked(path, **LEAST[path], **given).sampling.constraint == by_name


@pytest.mark.parametrize("path", LEAST)
def test_forms_that_are_not_valid_are_refused_by_name(api: Client, path: str) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"regex": "a", "guided_regex": "a"}, "regex", "guided_regex and regex are given"),
        ({"guided_json": "[1]"}, "guided_json", "a string that is not an object as JSON"),
        ({"guided_json": 3}, "guided_json", "accepted: an object, or a string"),
        ({"ebnf": "root ::= ("}, "ebnf", "neither in Lark's syntax nor in GBNF"),
        ({"structural_tag": "{}"}, "structural_tag", "accepted: type structural_tag with format, or with structures"),
        ({"regex": "("}, "regex", "not valid"),
    ]
    if path != RESPOND:
        bad = {"type": "structural_tag", "format": {"type": "x"}}
        cases += [
            ({"response_format": {"type": "structural_tag"}}, "response_format", "accepted: format, or structures"),
            ({"response_format": bad}, "response_format", "format.type is 'x'; accepted: const_string, json_schema"),
            ({"response_format": {"type": "json_object"}, "regex": "a"}, "", "response_format and regex are given"),
        ]
    for given, param, says in cases:
        status, error = api.refusal(path, **LEAST[path], **given)
        assert status == 400
        assert says in error["message"], given
        assert (error["param"] or "").split(".")[0] in (param, ""), given


def test_forms_and_tools_exclude_each_other(metadata: ModelMetadata, words: Tokenizer) -> None:
    with scripted(metadata, words.with_chat_template(HERMES)) as api:
        for given in ({"regex": "a"}, {"guided_json": SCHEMA}, {"response_format": {"type": "structural_tag"} | TAGS}):
            status, error = api.refusal(CHAT, messages=MESSAGES, tools=[NOW], **given)
            assert (status, error["param"]) == (400, next(iter(given)))
        assert api.refusal(RESPOND, input="Hi", tools=[{"type": "function", "name": "now"}], regex="a")[0] == 400


# --- stop strings and special tokens, in every split ------------------------------------------------------------------


@pytest.mark.parametrize("path", LEAST)
def test_logprobs_and_offsets_of_special_tokens_are_in_the_text(
    metadata: ModelMetadata, words: Tokenizer, path: str
) -> None:
    special = words.encode("<|im_start|>")
    script = Script((5, *special, 6), ("&", "<|im_start|>", "'"))
    with scripted(metadata, words, script) as api:
        answer = api.ask(path, **LEAST[path], **LOGGED[path], skip_special_tokens=False)
        assert [one["token"] for one in entries(path, answer)] == ["&", "<|im_start|>", "'"]
        if path == COMPLETE:
            choice = answer["choices"][0]
            assert choice["logprobs"]["text_offset"] == [0, 1, 13]
            assert choice["text"] == "&<|im_start|>'"


def test_fields_go_together(api: Client) -> None:
    """All of them in one request, which the engine gets as each alone."""
    fields: dict[str, Any] = {
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "allowed_token_ids": [5, 6],
        "bad_words": ["a"],
        "min_tokens": 2,
        "stop": ["x"],
    }
    for path in LEAST:
        more = {"return_tokens_as_token_ids": True, "truncate_prompt_tokens": 2, "sampling_logprobs": True}
        request = api.asked(path, **LEAST[path], **LOGGED[path], **fields, **more, receipt=True)
        params = request.sampling
        assert (params.skip_special_tokens, params.include_stop_str_in_output) == (False, True)
        assert (params.allowed_token_ids, params.bad_words, params.stop) == ((5, 6), ("a",), ("x",))
        assert (params.min_tokens, params.sampling_logprobs, len(request.prompt)) == (2, True, 2)
    assert api.post(COMPLETE, json={"model": MODEL, "prompt": [5]} | fields).status_code == 200

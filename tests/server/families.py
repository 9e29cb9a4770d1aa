"""The formats of model families: small chat templates that write turns as the families do, with an answer."""

import dataclasses
import json
from typing import Any, Final

from detjax.models import Tokenizer

_CALL: Final = "{% set f = call.function %}"
_ARGUMENTS: Final = "{{ f.arguments if f.arguments is string else f.arguments | tojson }}"
_VALUE: Final = "{{ v if v is string else v | tojson }}"
_REASONING: Final = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"


def _template(assistant: str, *, user: str, tool: str, begin: str, tools: str = "") -> str:
    """A template that writes messages by their roles, with the line breaks that Jinja drops after blocks."""
    written = (
        "{% if tools %}" + tools + "{{ tools | length }} tools.{% endif %}{% for m in messages %}"
        "{% if m.role == 'user' %}" + user + "{% elif m.role == 'tool' %}" + tool + "{% elif m.role == 'assistant' %}"
        "" + assistant + "{% endif %}{% endfor %}{% if add_generation_prompt %}" + begin + "{% endif %}"
    )
    return written.replace("%}\n", "%}{{ '\\n' }}")


@dataclasses.dataclass(frozen=True)
class Family:
    """A format of answers.

    Attributes:
        name: the format's name.
        template: a chat template.
        special: marks that are special tokens.
        shown: marks that are tokens of the text.
        answer: an answer with reasoning, if the family has any, text and calls.
        message: its message.
    """

    name: str
    template: str
    special: tuple[str, ...]
    shown: tuple[str, ...]
    answer: str
    message: dict[str, Any]

    def tokenizer(self, words: Tokenizer, *, plain: bool = False) -> Tokenizer:
        """The tests' tokenizer with the family's template and, unless marks are plain text, its marks as tokens."""
        content = json.loads(words.files["tokenizer.json"])
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        marks = [] if plain else [*((mark, True) for mark in self.special), *((mark, False) for mark in self.shown)]
        for token, (mark, is_special) in enumerate(marks, start=512):
            content["added_tokens"].append({"id": token, "content": mark, "special": is_special} | flags)
        files = words.files | {"tokenizer.json": json.dumps(content).encode()}
        return Tokenizer(files, "the tests").with_chat_template(self.template)


def _message(
    content: str | None, *calls: tuple[str, str], reasoning: str | None = None, ids: Any = ()
) -> dict[str, Any]:
    """The message of an answer, without the ids of calls, except for those that the model wrote."""
    made = [
        ({"id": ids[place]} if ids else {}) | {"type": "function", "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate(calls)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    return message | ({"reasoning": reasoning} if reasoning else {}) | {"tool_calls": made}


TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": "object"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
_ARGS: Final = '{"city":"Oslo",  "days":2}'
_TAGGED: Final = '{"city": "Oslo", "days": 2, "units": {"t":"C"}}'

HERMES: Final = Family(
    "hermes",
    _template(
        "<|im_start|>assistant\n" + _REASONING + "{{ m.content }}{% for call in m.tool_calls or [] %}" + _CALL + "\n"
        '<tool_call>\n{"name": "{{ f.name }}", "arguments": ' + _ARGUMENTS + "}\n</tool_call>{% endfor %}<|im_end|>\n",
        user="<|im_start|>user\n{{ m.content }}<|im_end|>\n",
        tool="<|im_start|>user\n<tool_response>{{ m.content }}</tool_response><|im_end|>\n",
        begin="<|im_start|>assistant\n",
    ),
    ("<|im_start|>", "<|im_end|>"),
    ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    '<think>\nI must\n\nlook.\n</think>\n\nI look.\n<tool_call>\n{"name": "weather", "arguments": '
    + _ARGS
    + '}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    _message("I look.", ("weather", _ARGS), ("now", "{}"), reasoning="I must\n\nlook."),
)
OPENAI: Final = Family(
    "openai",
    _template(
        "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "{% if m.content %}<|start|>assistant<|channel|>{{ 'commentary' if m.tool_calls else 'final' }}<|message|>"
        "{{ m.content }}<|end|>{% endif %}{% for call in m.tool_calls or [] %}" + _CALL + "<|start|>assistant"
        "<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>" + _ARGUMENTS + "<|call|>"
        "{% endfor %}",
        user="<|start|>user<|message|>{{ m.content }}<|end|>",
        tool="<|start|>functions.weather to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>",
        begin="<|start|>assistant",
    ),
    ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
    (),
    "<|channel|>analysis<|message|>I must look.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + _ARGS + "<|call|>",
    _message("I look.", ("weather", _ARGS), reasoning="I must look."),
)
_BARS: Final = (
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
)
DEEPSEEK_V3: Final = Family(
    "deepseek_v3",
    _template(
        "<｜Assistant｜>{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for call in m.tool_calls %}"
        + _CALL
        + "{% if not loop.first %}\n{% endif %}<｜tool▁call▁begin｜>{{ call.type }}<｜tool▁sep｜>{{ f.name }}\n"
        "{{ '```json\n' + f.arguments + '\n```' }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
        "<｜end▁of▁sentence｜>",
        user="<｜User｜>{{ m.content }}",
        tool="<｜tool▁outputs▁begin｜>{{ m.content }}<｜tool▁outputs▁end｜>",
        begin="<｜Assistant｜>",
    ),
    _BARS,
    (),
    "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    + _ARGS
    + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    _message("I look.", ("weather", _ARGS), ("now", "{}")),
)
DEEPSEEK_V31: Final = Family(
    "deepseek_v31",
    _template(
        "<｜Assistant｜>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}{% endif %}</think>{{ m.content }}"
        "{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for call in m.tool_calls %}"
        + _CALL
        + "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>"
        + _ARGUMENTS
        + "<｜tool▁call▁end｜>{% endfor %}"
        "<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>",
        user="<｜User｜>{{ m.content }}",
        tool="<｜tool▁outputs▁begin｜>{{ m.content }}<｜tool▁outputs▁end｜>",
        begin="<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}",
    ),
    _BARS,
    ("<think>", "</think>"),
    "I must look.</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    + _ARGS
    + "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    _message("I look.", ("weather", _ARGS), ("now", "{}"), reasoning="I must look."),
)
DEEPSEEK_V32: Final = Family(
    "deepseek_v32",
    _template(
        "<｜Assistant｜></think>{{ m.content }}{% if m.tool_calls %}\n\n<｜DSML｜function_calls>\n"
        "{% for call in m.tool_calls %}" + _CALL + '<｜DSML｜invoke name="{{ f.name }}">\n'
        '{% for k, v in f.arguments|items %}<｜DSML｜parameter name="{{ k }}" '
        "string=\"{{ 'true' if v is string else 'false' }}\">" + _VALUE + "</｜DSML｜parameter>\n{% endfor %}"
        "</｜DSML｜invoke>\n{% endfor %}</｜DSML｜function_calls>{% endif %}<｜end▁of▁sentence｜>",
        user="<｜User｜>{{ m.content }}",
        tool="<function_results>{{ m.content }}</function_results>",
        begin="<｜Assistant｜></think>",
    ),
    ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    ("<think>", "</think>", "｜DSML｜"),
    'I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="units" string="false">{"t":"C"}</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    _message("I look.", ("weather", _TAGGED)),
)
KIMI: Final = Family(
    "kimi_k2",
    _template(
        "<|im_assistant|>assistant<|im_middle|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
        "{% endif %}{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>{% for call in m.tool_calls %}"
        + _CALL
        + "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
        + _ARGUMENTS
        + "<|tool_call_end|>{% endfor %}"
        "<|tool_calls_section_end|>{% endif %}<|im_end|>",
        user="<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>",
        tool="<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n{{ m.content }}<|im_end|>",
        begin="<|im_assistant|>assistant<|im_middle|>",
    ),
    (
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
        *("<|tool_call_argument_begin|>", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
    ),
    ("<think>", "</think>"),
    "<think>I must look.</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:4"
    "<|tool_call_argument_begin|>" + _ARGS + "<|tool_call_end|><|tool_call_begin|>functions.now:5"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    _message(
        "I look.",
        ("weather", _ARGS),
        ("now", "{}"),
        reasoning="I must look.",
        ids=("functions.weather:4", "functions.now:5"),
    ),
)
QWEN_CODER: Final = Family(
    "qwen3_coder",
    _template(
        "<|im_start|>assistant\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
        "{{ m.content }}{% for call in m.tool_calls or [] %}" + _CALL + "\n<tool_call>\n<function={{ f.name }}>\n"
        "{% for k, v in f.arguments|items %}<parameter={{ k }}>\n" + _VALUE + "\n</parameter>\n{% endfor %}"
        "</function>\n</tool_call>{% endfor %}<|im_end|>\n",
        user="<|im_start|>user\n{{ m.content }}<|im_end|>\n",
        tool="<|im_start|>user\n<tool_response>{{ m.content }}</tool_response><|im_end|>\n",
        begin="<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n"
        "{% endif %}",
    ),
    ("<|im_start|>", "<|im_end|>"),
    ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    "I must look.\n</think>\n\nI look.\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    '<parameter=days>\n2\n</parameter>\n<parameter=units>\n{"t":"C"}\n</parameter>\n</function>\n</tool_call>\n'
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    _message("I look.", ("weather", _TAGGED), ("now", "{}"), reasoning="I must look."),
)
GLM: Final = Family(
    "glm45",
    _template(
        "<|assistant|>{% if m.reasoning_content %}\n<think>{{ m.reasoning_content }}</think>\n{% endif %}"
        "{{ m.content }}"
        "{% for call in m.tool_calls or [] %}" + _CALL + "\n<tool_call>{{ f.name }}\n"
        "{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>" + _VALUE + "</arg_value>\n"
        "{% endfor %}</tool_call>{% endfor %}",
        user="<|user|>\n{{ m.content }}",
        tool="<|observation|>\n<tool_response>{{ m.content }}</tool_response>",
        begin="<|assistant|>",
    ),
    ("<|user|>", "<|assistant|>", "<|observation|>"),
    ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "\n<think>I must look.</think>\nI look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n<arg_key>units</arg_key>\n<arg_value>"
    '{"t":"C"}</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>',
    _message("I look.", ("weather", _TAGGED), ("now", "{}"), reasoning="I must look."),
)
LLAMA: Final = Family(
    "llama3_json",
    _template(
        "<|head|>assistant<|end|>{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
        '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|eot|>',
        user="<|head|>user<|end|>{{ m.content }}<|eot|>",
        tool="<|head|>ipython<|end|>{{ m.content }}<|eot|>",
        begin="<|head|>assistant<|end|>",
        tools='{# {"name": ..., "parameters": ...} #}',
    ),
    ("<|head|>", "<|end|>", "<|eot|>"),
    (),
    '{"name": "weather", "parameters": ' + _ARGS + "}",
    _message(None, ("weather", _ARGS)),
)
MISTRAL: Final = Family(
    "mistral",
    _template(
        "{{ m.content }}{% for call in m.tool_calls or [] %}" + _CALL + "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ call.id }}"
        "[ARGS]" + _ARGUMENTS + "{% endfor %}</s>",
        user="[INST]{{ m.content }}[/INST]",
        tool="[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]",
        begin="",
    ),
    ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[INST]", "[/INST]"),
    (),
    "I look.[TOOL_CALLS]weather[CALL_ID]aB3456789[ARGS]" + _ARGS,
    _message("I look.", ("weather", _ARGS), ids=("aB3456789",)),
)
FAMILIES: Final = {
    family.name: family
    for family in (*(HERMES, OPENAI, DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32, KIMI, QWEN_CODER, GLM, LLAMA, MISTRAL),)
}

"""The tests' model with chat templates that have tools, and with marks of calls as tokens of their own."""

import json
from typing import Any, Final

from detjax.models import Tokenizer

HEAD: Final = "{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}\n{% endif %}"
TAIL: Final = "{% if add_generation_prompt %}assistant: {% endif %}"
HERMES: Final = (
    HEAD
    + "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    + '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    + "{% endfor %}\n{% endfor %}"
    + TAIL
)
LLAMA: Final = (
    "{# Answer with "
    + '{"name": ..., "parameters": ...} #}'
    + HEAD
    + "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}"
    + "{{ call.function | tojson }}{% endfor %}\n{% endfor %}"
    + TAIL
)
MISTRAL_LIST: Final = (
    HEAD
    + "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.tool_calls %}[TOOL_CALLS] ["
    + "{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}]{% endif %}\n{% endfor %}"
    + TAIL
)
MISTRAL_NAMED: Final = (
    HEAD
    + "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}"
    + "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}{% endfor %}"
    + "\n{% endfor %}"
    + TAIL
)
TEMPLATES: Final = {"hermes": HERMES, "llama": LLAMA, "mistral list": MISTRAL_LIST, "mistral named": MISTRAL_NAMED}
"""Templates with tools, by the format of calls that they teach."""
WITHOUT_TOOLS: Final = "{% for m in messages %}{{ m.content }}{% endfor %}"
UNKNOWN: Final = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"

WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Verona", "Mantua"]},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW: Final[dict[str, Any]] = {"type": "function", "function": {"name": "now"}}


def with_marks(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with tokens for marks of calls: Qwen's, which its text has, and Mistral's, which are left out."""
    content = json.loads(tokenizer.files["tokenizer.json"])
    plain = {name: False for name in ("single_word", "lstrip", "rstrip", "normalized")}
    marks = (("<tool_call>", False), ("</tool_call>", False), ("[TOOL_CALLS]", True))
    for token, (mark, is_special) in enumerate(marks, start=512):
        content["added_tokens"].append({"id": token, "content": mark, "special": is_special} | plain)
    return Tokenizer(tokenizer.files | {"tokenizer.json": json.dumps(content).encode()}, "the tests")

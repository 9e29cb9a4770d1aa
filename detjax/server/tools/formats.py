"""The formats of tool calls and of reasoning, by name, and their recognition by a checkpoint's chat template."""

import re
from typing import Final, get_args

from detjax.models import Tokenizer
from detjax.server.http.settings import ToolFormatName
from detjax.server.tools import harmony, json_objects, mistral, sectioned, tagged_formats
from detjax.server.tools.reasoning import ReasoningFormat, reasoning_marks
from detjax.server.tools.tool_format import ToolFormat

_KINDS: Final[tuple[type[ToolFormat], ...]] = (
    json_objects.HermesFormat,
    json_objects.LlamaFormat,
    mistral.MistralListFormat,
    harmony.HarmonyFormat,
    sectioned.DeepSeekV3Format,
    sectioned.DeepSeekV31Format,
    sectioned.KimiFormat,
    tagged_formats.DsmlFormat,
    tagged_formats.QwenCoderFormat,
    tagged_formats.GlmFormat,
)


def tool_format(tokenizer: Tokenizer, name: str | None = None) -> ToolFormat | None:
    """Returns a format of tool calls with a tokenizer.

    Args:
        tokenizer: the tokenizer.
        name: the format's name, a `ToolFormatName`. Default: the format in the tokenizer's chat template; None if it is
            unknown.
    """
    template = tokenizer.tool_template or ""
    name = name or format_name(template)
    if name == "mistral" and mistral.MistralNamedFormat.ARGUMENTS in template:
        return mistral.MistralNamedFormat(tokenizer)
    return next((kind(tokenizer) for kind in _KINDS if name == kind.NAME), None)


def format_name(template: str) -> str | None:
    """Returns the name of the format of tool calls in a chat template, or None if it is unknown."""
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return "openai"
    if "｜DSML｜" in template:
        return "deepseek_v32"
    if sectioned.DeepSeekParser.BEGIN in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if sectioned.KimiParser.BEGIN in template:
        return "kimi_k2"
    if mistral.MistralParser.BEGIN in template:
        return "mistral"
    if json_objects.HermesParser.BEGIN in template:
        if "<arg_key>" in template:
            return "glm45"
        return "qwen3_coder" if "<function=" in template else "hermes"
    return "llama3_json" if '"parameters"' in template and "tools" in template else None


def reasoning_format(tokenizer: Tokenizer, tools: ToolFormat | None) -> ReasoningFormat | None:
    """Returns the format of a model's reasoning, given its format of tool calls; None if its answers have none."""
    if isinstance(tools, harmony.HarmonyFormat):
        return harmony.HarmonyReasoning(tokenizer)
    marks = reasoning_marks(tokenizer.tool_template or "")
    return None if marks is None else ReasoningFormat(tokenizer, *marks)


def why_no_tools(tokenizer: Tokenizer) -> str:
    """Returns the error message for tools if the model's format is unknown."""
    if re.search(r"\btools\b", tokenizer.tool_template or "") is None:
        return "tools are given, but the model's chat template ignores them; accepted: a request without tools"
    return (
        "tools are given, but the model's chat template has an unknown format of calls; supported: "
        f"{', '.join(get_args(ToolFormatName))}, which the server's option --tool-format names; accepted: a request "
        "without tools"
    )

"""Formats of tool calls with tagged arguments, and their grammars.

A value that may be a string is text without its end tag, so a grammar enforces the enumeration, the lengths and the
pattern of strings; `format` is an annotation. All other values are JSON of their schema.
"""

import abc
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

from detjax.engine import FieldError
from detjax.server.tools.arguments import parameter_schema, referenced, types_of
from detjax.server.tools.definitions import FunctionFields
from detjax.server.tools.marks import literal, text_without
from detjax.server.tools.parsers import AnswerParser
from detjax.server.tools.tagged import DsmlParser, GlmParser, QwenParser, TaggedParser
from detjax.server.tools.tool_format import ToolFormat

_KEY: Final = r'/[^<>"\n]{1,64}/'
_MOST: Final = 64
"""Maximum depth of references and alternatives in the schema of a string."""


class TaggedFormat(ToolFormat):
    """A format with tagged arguments."""

    PARSER: ClassVar[type[TaggedParser]]
    TAIL: ClassVar[str]
    """The text after a value."""
    SPACE: ClassVar[str] = ""
    """An expression for white space after arguments, empty for none."""

    def parser(self, tools: Sequence[FunctionFields], begun: str = "") -> AnswerParser:
        return self.PARSER(tools, self.marks.written)

    @abc.abstractmethod
    def _head(self, key: str, is_string: bool) -> str:
        """Returns an expression for the text before a value, given one for the argument's key."""

    def _arguments(self, tools: Sequence[FunctionFields], is_required: bool) -> list[str]:
        rules = [rule for number, tool in enumerate(tools) for rule in self._tool_rules(number, tool, is_required)]
        heads = dict.fromkeys(self._head(_KEY, is_string) for is_string in (True, False))
        values = ["any_text", "any_json"][: len(heads)]
        return [
            *rules,
            f"any_argument: {' | '.join(' '.join(pair) for pair in zip(heads, values, strict=True))}",
            *self._text_rules("any_text", [text_without(self.PARSER.VALUE_END)]),
            *self._json_rules("any_json", {}),
        ]

    def _tool_rules(self, number: int, tool: FunctionFields, is_required: bool) -> Iterator[str]:
        """Yields the rules for the arguments of a tool."""
        schema = self.schema(tool, is_required)
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or (not properties and schema.get("additionalProperties") is not False):
            yield f"arguments_{number}: any_argument*"
            return
        required = [name for name in schema.get("required") or () if isinstance(name, str)]
        names = [*dict.fromkeys([*properties, *required])]
        items = (f"argument_{number}_{place}{'' if name in required else '?'}" for place, name in enumerate(names))
        yield f"arguments_{number}: {' '.join(items) or literal('')}"
        for place, name in enumerate(names):
            rule = f"value_{number}_{place}"
            values = _Values(tool.name, name, schema, self.PARSER.VALUE_END)
            yield f"argument_{number}_{place}: {self._head(literal(name), values.may_be_string)} {rule}"
            yield from (
                self._text_rules(rule, values.texts())
                if values.may_be_string
                else self._json_rules(rule, values.json_schema())
            )

    def _text_rules(self, rule: str, texts: Iterable[str]) -> Iterator[str]:
        """Yields the rules for a value that is one of several kinds of text, each an expression of a terminal.

        A terminal includes the text after it: a terminal matches as much text as it can, including the beginning of the
        end tag.
        """
        begin = self.marks.before_token(self.TAIL)
        rest = self.marks.literal(self.TAIL.removeprefix(begin)) if begin != self.TAIL else ""
        names = list[str]()
        for number, text in enumerate(dict.fromkeys(texts)):
            names.append(f"{rule}_{number}".upper())
            yield f"{names[-1]}_TEXT: {text}"
            yield f"{names[-1]}: {names[-1]}_TEXT {literal(begin) if begin else ''}"
        yield f"{rule}: ({' | '.join(names)}) {rest} {self.SPACE}"

    def _json_rules(self, rule: str, schema: Mapping[str, Any]) -> Iterator[str]:
        """Yields the rules for a value that is JSON."""
        yield f"{rule}_json: %json {json.dumps(schema)}"
        yield f"{rule}: {rule}_json {self.marks.literal(self.TAIL)} {self.SPACE}"


class _Values:
    """The values of a tool's parameter in a grammar."""

    def __init__(self, tool: str, name: str, root: Mapping[str, Any], end: str) -> None:
        self._tool, self._name, self._root, self._end = tool, name, root, end
        schema = FunctionFields(name="f", parameters=dict(root))
        self._schema = parameter_schema(schema, name)

    @property
    def may_be_string(self) -> bool:
        """True if a value may be a string, which is written without quotes."""
        return "string" in types_of(self._schema, self._root)

    def json_schema(self) -> dict[str, Any]:
        """Returns the schema of values that are not strings, with the definitions that it refers to."""
        known = {name: self._root[name] for name in ("$defs", "definitions") if name in self._root}
        return known | (dict(self._schema) if isinstance(self._schema, Mapping) else {})

    def texts(self) -> Iterator[str]:
        """Yields expressions of terminals for the texts of values."""
        yield from self._strings(self._schema, 0)

    def _strings(self, schema: Any, depth: int) -> Iterator[str]:
        """Yields expressions for the texts of the values that a schema accepts."""
        if not isinstance(schema, Mapping):
            yield text_without(self._end)
            return
        if depth > _MOST:
            raise self._refusal("references itself")
        if (target := referenced(schema, self._root)) is not None:
            yield from self._strings(target, depth + 1)
            return
        values = (
            schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
        )
        if values:
            for value in values:
                yield literal(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            return
        for name in ("anyOf", "oneOf", "allOf"):
            alternatives = schema.get(name)
            if isinstance(alternatives, list) and alternatives:
                if name == "allOf" and len(alternatives) > 1:
                    raise self._refusal("has several schemas in allOf")
                for one in alternatives:
                    if "string" in types_of(one, self._root):
                        yield from self._strings(one, depth + 1)
                    else:
                        yield from self._other_texts(one)
                return
        yield self._string(schema)

    def _other_texts(self, schema: Any) -> Iterator[str]:
        """Yields an expression for values that are no strings, next to values that are."""
        simple = {"null": "null", "boolean": "true|false", "integer": r"-?(0|[1-9][0-9]*)"}
        for kind in sorted(types_of(schema, self._root)):
            yield f"/{simple[kind]}/" if kind in simple else text_without(self._end)

    def _string(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minLength"), schema.get("maxLength")
        expression = text_without(self._end)
        if least or most is not None:
            expression += rf" & /(.|\n){{{least or 0},{'' if most is None else most}}}/"
        if isinstance(given := schema.get("pattern"), str):
            expression += f" & /{self._pattern(given)}/"
        return expression

    def _pattern(self, given: str) -> str:
        """Returns a regular expression for texts in which a schema's pattern occurs."""
        begins, ends = given.startswith("^"), given.endswith("$") and not given.endswith(r"\$")
        inner = given[1 if begins else 0 : -1 if ends else None]
        if (begins or ends) and _has_alternatives(inner):
            raise self._refusal(f"has the pattern {given[:80]!r}, whose anchors belong to alternatives")
        inner = "".join(r"\/" if one == "/" else r"\n" if one == "\n" else one for one in inner.replace(r"\/", "/"))
        anything = r"(.|\n)*"
        return f"{'' if begins else anything}({inner}){'' if ends else anything}"

    def _refusal(self, problem: str) -> FieldError:
        return FieldError(
            f"the parameter {self._name!r} of the tool {self._tool!r} {problem}, which the model's format of calls "
            "cannot enforce; accepted: a schema without it, or a tool that is not strict, with tool_choice 'auto'",
            "tools",
        )


def _has_alternatives(pattern: str) -> bool:
    """Returns whether a regular expression has alternatives outside of groups."""
    depth, is_escaped, in_class = 0, False, False
    for character in pattern:
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character == "|" and not depth:
            return True
        else:
            depth += (character == "(") - (character == ")")
    return False


class QwenCoderFormat(TaggedFormat):
    """The format of Qwen 3 Coder and Qwen 3.5."""

    NAME = "qwen3_coder"
    PARSER = QwenParser
    TAIL = "\n</parameter>\n"
    BEGIN = QwenParser.BEGIN
    MARKS = (QwenParser.BEGIN, QwenParser.END)

    def _rules(self, tools: Sequence[FunctionFields], *, at_most_one: bool) -> list[str]:
        more = "" if at_most_one else rf' ("\n" {self.marks.literal(self.BEGIN)} call)*'
        named = (f"{literal(f'<function={tool.name}>\n')} arguments_{number}" for number, tool in enumerate(tools))
        return [
            f"calls: call{more}",
            rf'call: "\n" ({" | ".join(named)}) "</function>\n" {self.marks.literal(QwenParser.END)}',
        ]

    def _head(self, key: str, is_string: bool) -> str:
        return rf'"<parameter=" {key} ">\n"'


class GlmFormat(TaggedFormat):
    """The format of GLM 4.5 to 4.7, which leave out line breaks in later versions."""

    NAME = "glm45"
    PARSER = GlmParser
    TAIL = "</arg_value>"
    SPACE = r'"\n"?'
    BEGIN = GlmParser.BEGIN
    MARKS = (GlmParser.BEGIN, GlmParser.END, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    STOPS = ("<|observation|>", "<|user|>")

    def _rules(self, tools: Sequence[FunctionFields], *, at_most_one: bool) -> list[str]:
        more = "" if at_most_one else rf' ("\n"? {self.marks.literal(self.BEGIN)} call)*'
        named = (rf'{literal(tool.name)} "\n"? arguments_{number}' for number, tool in enumerate(tools))
        return [f"calls: call{more}", f"call: ({' | '.join(named)}) {self.marks.literal(GlmParser.END)}"]

    def _head(self, key: str, is_string: bool) -> str:
        mark = self.marks.literal
        return rf'{mark("<arg_key>")} {key} {mark("</arg_key>")} "\n"? {mark("<arg_value>")}'


class DsmlFormat(TaggedFormat):
    """The format of DeepSeek V3.2."""

    NAME = "deepseek_v32"
    PARSER = DsmlParser
    TAIL = "</｜DSML｜parameter>\n"
    BEGIN = DsmlParser.BEGIN
    MARKS = ("｜DSML｜",)

    def _rules(self, tools: Sequence[FunctionFields], *, at_most_one: bool) -> list[str]:
        mark, more = self.marks.literal, "" if at_most_one else " call*"
        named = (
            f"{mark(f'<｜DSML｜invoke name="{tool.name}">\n')} arguments_{number}" for number, tool in enumerate(tools)
        )
        return [
            rf'calls: "\n" call{more} {mark(DsmlParser.END)}',
            f"call: ({' | '.join(named)}) {mark(DsmlParser.CALL_END + '\n')}",
        ]

    def _head(self, key: str, is_string: bool) -> str:
        middle = literal(f'" string="{str(is_string).lower()}">')
        return f"{self.marks.literal('<｜DSML｜parameter name="')} {key} {middle}"

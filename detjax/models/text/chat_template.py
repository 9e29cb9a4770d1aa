"""The sandbox that chat templates run in, which makes text a pure function of the template's variables."""

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment

from detjax.models.text.written_json import placeholder, with_texts


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}`, which marks text for training. It renders as its contents."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox for chat templates, which come with a checkpoint and are not trusted.

    It has no clock, no randomness, and no sets, whose order differs between processes.
    """

    intercepted_binops = frozenset(("-",))

    def __init__(self, date: datetime.date | None = None) -> None:
        """Makes a sandbox in which today's date is `date`; None: templates get no date."""
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
        del self.filters["random"], self.globals["lipsum"]
        self.filters["tojson"] = _to_json
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": self._clock(date)}

    def _clock(self, date: datetime.date | None) -> Callable[[str], str] | jinja2.Undefined:
        """Returns the templates' function for today's date; undefined without a date, which templates can test."""
        if date is not None:
            return functools.partial(_strftime, date)
        return self.undefined(
            hint="strftime_now is undefined: the chat template uses today's date, but results must not depend on it. "
            "Set a fixed date with --template-date or Tokenizer.with_template_date"
        )

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, set):
            raise jinja2.TemplateRuntimeError("the template makes a set, whose order differs between processes")
        return result


_ADDRESS: Final = re.compile(r"<[^<>]{1,200} at 0x[0-9a-f]+>")
"""Python's default text for objects. The address differs between processes."""


def without_addresses(text: str, *inputs: Any) -> str:
    """Returns `text`, if it contains no object addresses except for those in the inputs.

    Raises:
        jinja2.TemplateRuntimeError: a template printed an object, such as a filter's result without `| list`.
    """
    for printed in sorted(set(_ADDRESS.findall(text))):
        if not any(printed in string for value in inputs for string in _strings(value)):
            kind = printed.removeprefix("<").partition(" at ")[0]
            raise jinja2.TemplateRuntimeError(
                f"the template prints a {kind}, whose text differs between processes. Print its contents, for example "
                "with the filter list"
            )
    return text


def _strings(value: Any) -> Iterator[str]:
    """Yields all strings in nested lists and dictionaries, keys included."""
    match value:
        case str():
            yield value
        case Mapping():
            for key, item in value.items():
                yield from _strings(key)
                yield from _strings(item)
        case list() | tuple():
            for item in value:
                yield from _strings(item)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON with unescaped `<`, `>`, `&` and `'`, unlike jinja2's own filter: prompts are not HTML.

    Values that were written by a model keep their text, unless the template indents or sorts them.
    """
    texts: list[str] = []
    if indent is None and not sort_keys:
        value = with_texts(value, texts)
    dumped = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    for number, text in enumerate(texts):
        dumped = dumped.replace(json.dumps(placeholder(number)), text, 1)
    return dumped


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


_EPOCH: Final = re.compile("%[-_0^#EO]*[0-9]*s")
"""The directive for seconds since 1970, with any flags."""


def _strftime(date: datetime.date, format: str) -> str:
    if _EPOCH.search(format.replace("%%", "")):
        raise jinja2.TemplateRuntimeError(
            "strftime_now: %s depends on the time zone of the process; accepted: the other directives"
        )
    return datetime.datetime.combine(date, datetime.time()).strftime(format)

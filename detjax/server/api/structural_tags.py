"""Structural tags: answers in which free text and given structures alternate, as grammars in llguidance's syntax.

The format is xgrammar's, which vLLM and SGLang accept: an object with a `format`, or in the older form with
`structures` and `triggers`. A tag such as `<tool_call>` is a special token in some tokenizers and plain text in others;
the grammar follows the tokenizer.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from detjax.models import Tokenizer

_DEEPEST: Final = 32
"""Maximum depth of nested formats."""
_MOST: Final = 1024
"""Maximum number of formats in a structural tag."""
_FIELDS: Final[Mapping[str, tuple[set[str], set[str]]]] = {
    "const_string": ({"value"}, set()),
    "json_schema": ({"json_schema"}, set()),
    "regex": ({"pattern"}, set()),
    "any_text": (set(), set()),
    "sequence": ({"elements"}, set()),
    "or": ({"elements"}, set()),
    "tag": ({"begin", "content", "end"}, set()),
    "triggered_tags": ({"triggers", "tags"}, {"at_least_one", "stop_after_first"}),
    "tags_with_separator": ({"tags", "separator"}, {"at_least_one", "stop_after_first"}),
}
"""The required and the optional fields of each format, in addition to its type."""
_ANY: Final = r"/(.|\n)+/"

type Json = Mapping[str, Any]


def grammar_of(tag: Json, tokenizer: Tokenizer) -> str:
    """Returns the grammar of a structural tag.

    Raises:
        ValueError: a format is unknown, contradicts itself, or has no exact grammar; the message names the place.
    """
    return _Builder(tokenizer).grammar(_new_form(tag))


def _new_form(tag: Json) -> Json:
    """Returns the format of a structural tag in either form."""
    fields = {name: value for name, value in tag.items() if name != "type" and value is not None}
    if tag.get("type", "structural_tag") != "structural_tag" or fields.keys() not in (
        {"format"},
        {"structures", "triggers"},
    ):
        raise ValueError(
            f"a structural tag has type {tag.get('type')!r} and {', '.join(sorted(fields)) or 'no field'}; accepted: "
            "type structural_tag with format, or with structures and triggers"
        )
    if "format" in fields:
        return _object(fields["format"], "format")
    tags = []
    for number, one in enumerate(_list(fields["structures"], "structures")):
        place = f"structures[{number}]"
        if _object(one, place).keys() != {"begin", "schema", "end"}:
            raise ValueError(f"{place} has {', '.join(one)}; accepted: begin, schema and end")
        content = {"type": "json_schema", "json_schema": one["schema"]}
        tags.append({"begin": one["begin"], "content": content, "end": one["end"]})
    return {"type": "triggered_tags", "triggers": fields["triggers"], "tags": tags}


class _Builder:
    """Collects the rules of a grammar."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = {token: tokenizer.token_bytes(token).decode(errors="replace") for token in tokenizer.added_tokens}
        self._tokens = {text: token for token, text in texts.items() if text}
        """Added tokens by their text."""
        self._text_tokens = [token for token in texts if not tokenizer.is_left_out(token)]
        """Added tokens that are ordinary text, such as the tags around a model's thoughts."""
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
        self._rules: list[str] = []
        self._formats = 0

    def grammar(self, form: Json) -> str:
        """Returns the grammar of a format."""
        start = self._expression(form, "format", 0, is_last=True)
        return "\n".join([f"start: {start}", *self._rules])

    # --- formats ------------------------------------------------------------------------------------------------------

    def _expression(self, form: Any, place: str, depth: int, *, is_last: bool) -> str:
        """Returns an expression for a format; `is_last` if the answer ends after it."""
        self._check(form, place, depth)
        if (terminal := self._terminal(form, place)) is not None:
            return self._named_terminal(terminal)
        match form["type"]:
            case "const_string":
                return self._marks(_text(form["value"], f"{place}.value"))
            case "json_schema":
                return self._json(form["json_schema"], f"{place}.json_schema")
            case "any_text":
                if not is_last:
                    raise ValueError(
                        f"{place} is any_text before the answer's end; accepted: any_text as the last format or as the "
                        "content of a tag, because nothing would mark its end"
                    )
                return self._text([])
            case "sequence":
                return self._sequence(_list(form["elements"], f"{place}.elements"), place, depth, is_last=is_last)
            case "or":
                elements = _list(form["elements"], f"{place}.elements")
                return self._or(
                    self._expression(one, f"{place}.elements[{number}]", depth + 1, is_last=is_last)
                    for number, one in enumerate(elements)
                )
            case "tag":
                return self._or(self._tag(form, end, place, depth, is_last=is_last) for end in _ends(form, place))
            case "triggered_tags":
                return self._triggered(form, place, depth, is_last=is_last)
            case _:
                return self._separated(form, place, depth)

    def _check(self, form: Any, place: str, depth: int) -> None:
        """Checks the fields of a format, and the limits on formats."""
        self._formats += 1
        if depth > _DEEPEST or self._formats > _MOST:
            raise ValueError(
                f"the structural tag has more than {_DEEPEST} levels or {_MOST} formats; accepted: up to these numbers"
            )
        kind = _object(form, place).get("type")
        if not isinstance(kind, str) or kind not in _FIELDS:
            raise ValueError(f"{place}.type is {kind!r}; accepted: {', '.join(_FIELDS)}")
        required, optional = _FIELDS[kind]
        if not required <= form.keys() - {"type"} <= required | optional:
            names = ", ".join(sorted(required | optional)) or "no other field"
            raise ValueError(f"{place} has {', '.join(form.keys() - {'type'}) or 'no field'}; accepted: {names}")

    def _sequence(self, elements: Sequence[Any], place: str, depth: int, *, is_last: bool) -> str:
        parts, last = list[str](), len(elements) - 1
        run = list[str]()
        """Terminals of consecutive elements, matched as a whole, because one may begin as another ends."""
        for number, one in enumerate(elements):
            inner = f"{place}.elements[{number}]"
            self._check(one, inner, depth + 1)
            terminal = self._terminal(one, inner)
            if terminal is not None:
                run.append(terminal)
                continue
            parts += [self._named_terminal(" ".join(run))] if run else []
            run = []
            parts.append(self._expression(one, inner, depth + 1, is_last=is_last and number == last))
        parts += [self._named_terminal(" ".join(run))] if run else []
        return self._rule(" ".join(part for part in parts if part))

    def _tag(self, tag: Json, end: str, place: str, depth: int, *, is_last: bool, begin: str | None = None) -> str:
        """Returns an expression for a tag; `begin` is the part of its beginning that has not been written yet."""
        begin = _text(tag["begin"], f"{place}.begin") if begin is None else begin
        content, inner = tag["content"], f"{place}.content"
        self._check(content, inner, depth + 1)
        if content["type"] == "any_text":
            if not end:
                rest = self._expression(content, inner, depth + 1, is_last=is_last)
                return self._rule(f"{self._marks(begin)} {rest}")
            if end in self._tokens:
                return self._rule(f"{self._marks(begin)} {self._text([], without=[end])} {self._marks(end)}")
            self._refuse_mixed(end, f"{place}.end")
            return self._rule(f"{self._marks(begin)} {self._text_until(end, [])}")
        terminal = self._terminal(content, inner)
        if terminal is None:
            is_last &= not end
            middle = self._expression(content, inner, depth + 1, is_last=is_last)
            return self._rule(f"{self._marks(begin)} {middle} {self._marks(end)}")
        # The terminal includes the plain text after it, which may look like more of it.
        head, tail = self._pieces(begin), self._pieces(end)
        plain = json.dumps(tail.pop(0)) if tail and tail[0] not in self._tokens else ""
        rest = " ".join(map(self._piece, tail))
        return self._rule(f"{' '.join(map(self._piece, head))} {self._named_terminal(f'{terminal} {plain}')} {rest}")

    def _triggered(self, form: Json, place: str, depth: int, *, is_last: bool) -> str:
        at_least_one, is_one = _flag(form, "at_least_one", place), _flag(form, "stop_after_first", place)
        triggers = [_text(one, f"{place}.triggers") for one in _list(form["triggers"], f"{place}.triggers")]
        tags = _list(form["tags"], f"{place}.tags")
        if not is_last and not (is_one and at_least_one):
            raise ValueError(
                f"{place} is triggered_tags before the answer's end; accepted: there with at_least_one and "
                "stop_after_first, because nothing would mark the end of the text after them"
            )
        by_trigger: dict[str, list[tuple[int, Json]]] = {trigger: [] for trigger in triggers}
        for number, tag in enumerate(tags):
            tag = {"type": "tag"} | dict(_object(tag, f"{place}.tags[{number}]"))
            self._check(tag, f"{place}.tags[{number}]", depth + 1)
            begin = _text(tag["begin"], f"{place}.tags[{number}].begin")
            matching = [trigger for trigger in by_trigger if trigger and begin.startswith(trigger)]
            if len(matching) != 1:
                raise ValueError(
                    f"{place}.tags[{number}].begin is {begin!r}, which begins with {len(matching)} of the triggers; "
                    "accepted: with one"
                )
            by_trigger[matching[0]].append((number, tag))
        for trigger in by_trigger:
            if trigger not in self._tokens:
                self._refuse_mixed(trigger, f"{place}.triggers")
        texts = [trigger for trigger in by_trigger if trigger not in self._tokens]
        calls, first = list[str](), list[str]()
        for trigger, matching in by_trigger.items():
            if not matching:
                raise ValueError(f"{place} has no tag that begins with trigger {trigger!r}; accepted: at least one")
            rest = self._or(
                self._tag(
                    tag,
                    end,
                    f"{place}.tags[{number}]",
                    depth + 1,
                    is_last=is_last and is_one,
                    begin=tag["begin"][len(trigger) :],
                )
                for number, tag in matching
                for end in _ends(tag, f"{place}.tags[{number}]")
            )
            mark = self._marks(trigger)
            if trigger in self._tokens:
                until = f"{self._text(texts, without=by_trigger)} {mark}"
            else:
                until = self._text_until(trigger, texts, without=by_trigger)
            calls.append(f"{until} {rest}")
            first.append(f"{mark} {rest}")
        call, text = self._or(calls), self._text(texts, without=by_trigger)
        if is_one:
            return self._or(first) if at_least_one else self._rule(f"{call} | {text}")
        begin = f"{self._or(first)} " if at_least_one else ""
        return self._rule(f"{begin}({call})* {text}")

    def _separated(self, form: Json, place: str, depth: int) -> str:
        at_least_one, is_one = _flag(form, "at_least_one", place), _flag(form, "stop_after_first", place)
        separator = _text(form["separator"], f"{place}.separator")
        tags = [
            {"type": "tag"} | dict(_object(tag, f"{place}.tags[{number}]"))
            for number, tag in enumerate(_list(form["tags"], f"{place}.tags"))
        ]
        expressions = (
            self._expression(one, f"{place}.tags[{number}]", depth + 1, is_last=False)
            for number, one in enumerate(tags)
        )
        tag = self._or(expressions)
        several = tag if is_one else self._rule(f"{tag} ({self._marks(separator)} {tag})*")
        return several if at_least_one else f"({several})?"

    # --- parts of the grammar -----------------------------------------------------------------------------------------

    def _terminal(self, form: Json, place: str) -> str | None:
        """Returns a regular format's terminal, or None if it has special tokens, free text or JSON."""
        if form["type"] == "regex":
            pattern = _text(form["pattern"], f"{place}.pattern")
            # A slash ends an expression in the grammar, and a line break the line.
            escapes = {"/": r"\/", "\n": r"\n"}
            return f"/{re.sub(r'\\.|/|\n', lambda one: escapes.get(one[0], one[0]), pattern, flags=re.DOTALL)}/"
        if form["type"] == "const_string":
            text = _text(form["value"], f"{place}.value")
            return None if not text or self._has_tokens(text) else json.dumps(text)
        return None

    def _named_terminal(self, expression: str) -> str:
        name = f"TERMINAL_{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def _rule(self, expression: str) -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}: {expression}".rstrip())
        return name

    def _or(self, expressions: Iterable[str]) -> str:
        alternatives = [one or '""' for one in expressions]
        return alternatives[0] if len(alternatives) == 1 else self._rule(" | ".join(alternatives))

    def _json(self, schema: Any, place: str) -> str:
        if schema is True:
            schema = {}
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError:
                raise ValueError(f"{place} is a string that is not JSON; accepted: a JSON schema") from None
        return self._rule(f"%json {json.dumps(_object(schema, place))}")

    def _text(self, excluded: Sequence[str], without: Iterable[str] = ()) -> str:
        """Returns a rule for any text without some strings; `without` are tokens that it does not contain."""
        plain = self._named_terminal(_ANY + "".join(f" & ~{_holding(one)}" for one in excluded))
        tokens = [f"<[{token}]>" for text, token in self._tokens.items() if token in self._text_tokens]
        barred = {f"<[{self._tokens[one]}]>" for one in without if one in self._tokens}
        marks = " | ".join(token for token in tokens if token not in barred)
        return self._rule(f"{plain}? (({marks}) {plain}?)*" if marks else f"{plain}?")

    def _text_until(self, end: str, ends: Sequence[str], without: Iterable[str] = ()) -> str:
        """Returns a rule for any text up to and including `end`, and without the other `ends`."""
        others = "".join(f" & ~{_holding(one)}" for one in ends if one != end)
        name = f"until_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: /(.|\\n)*{_escaped(end)}/{others}")
        return f"{self._text([*dict.fromkeys([end, *ends])], without)} {name}" if self._text_tokens else name

    def _pieces(self, text: str) -> list[str]:
        """Splits a text into plain texts and texts of tokens."""
        return [one for one in (self._split.split(text) if self._split else [text]) if one]

    def _piece(self, text: str) -> str:
        return f"<[{self._tokens[text]}]>" if text in self._tokens else json.dumps(text)

    def _marks(self, text: str) -> str:
        return " ".join(map(self._piece, self._pieces(text)))

    def _has_tokens(self, text: str) -> bool:
        return self._split is not None and self._split.search(text) is not None

    def _refuse_mixed(self, text: str, place: str) -> None:
        if not text or self._has_tokens(text):
            raise ValueError(
                f"{place} has {text!r}; accepted: a text that is one special token, or has none and is not empty"
            )


def _holding(text: str) -> str:
    """Returns an expression for every text that contains another one."""
    return rf"/(.|\n)*{_escaped(text)}(.|\n)*/"


def _escaped(text: str) -> str:
    """Returns a regular expression for a text."""
    lines = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
    return "".join(lines.get(one, f"\\{one}" if one in r"\.+*?()|[]{}^$&~#-/" else one) for one in text)


def _ends(tag: Json, place: str) -> Sequence[str]:
    """Returns the possible ends of a tag."""
    end = tag["end"]
    return [_text(one, f"{place}.end") for one in (_list(end, f"{place}.end") if isinstance(end, list) else [end])]


def _object(value: Any, place: str) -> Json:
    if not isinstance(value, Mapping):
        raise ValueError(f"{place} is a {type(value).__name__}; accepted: an object")
    return value


def _list(value: Any, place: str) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{place} is {'empty' if value == [] else 'not a list'}; accepted: a list with entries")
    return value


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place} is a {type(value).__name__}; accepted: a string")
    return value


def _flag(form: Json, name: str, place: str) -> bool:
    value = form.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{place}.{name} is a {type(value).__name__}; accepted: true or false")
    return value

"""Grammars of whole answers, made from the constraint of a part.

Grammars are in llguidance's variant of Lark's syntax.
"""

import json
import re
from typing import Final

from detjax.engine import Constraint
from detjax.server.tools.marks import literal

FORM: Final = "answer_form"
"""The rule for the form that a request asks for."""
_TOKENS: Final = re.compile(
    r"""
    "(?:\\.|[^"\\\n])*"             # a string
    | //[^\n]* | \#[^\n]*           # a comment
    | /(?:\\.|[^/\\\n])+/           # a regular expression
    | (?P<start>\bstart\b)          # the first rule
    """,
    re.VERBOSE,
)
_SLASH: Final = re.compile(r"\\.|/|\n", re.DOTALL)


def form_rules(form: Constraint) -> str:
    """Returns the rule `FORM`, and the rules that it uses, for text that a constraint accepts."""
    match form.kind:
        case "json_schema":
            return f"{FORM}: %json {form.text}"
        case "regex":
            return f"{FORM}: /{_SLASH.sub(_escaped, form.text)}/"
        case "choice":
            return f"{FORM}: {' | '.join(map(literal, json.loads(form.text)))}"
    return _TOKENS.sub(lambda match: FORM if match["start"] else match[0], form.text)


def _escaped(match: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(match[0], match[0])

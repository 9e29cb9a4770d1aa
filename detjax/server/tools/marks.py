"""The marks of a format of answers, such as `<tool_call>`, as a tokenizer has them: as tokens or as plain text."""

import copy
import json
import re
from collections.abc import Iterable

from detjax.models import Tokenizer
from detjax.server.tools.parsers import HIDDEN


class Marks:
    """The marks of a format with a tokenizer.

    Attributes:
        tokens: the tokens of the marks that are tokens, by their text.
        hidden: the texts of the special tokens among them, which an answer's text omits, by token.
        text_tokens: added tokens that are neither marks nor omitted from an answer's text.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Iterable[str]) -> None:
        marks = frozenset(marks)
        texts = {token: tokenizer.token_bytes(token).decode(errors="replace") for token in tokenizer.added_tokens}
        self.tokens = {text: token for token, text in texts.items() if text in marks}
        self.hidden = {token: text for text, token in self.tokens.items() if tokenizer.is_left_out(token)}
        self.text_tokens = [
            token for token, text in texts.items() if text not in marks and not tokenizer.is_left_out(token)
        ]

    def shown(self) -> "Marks":
        """Returns the marks for text that has all special tokens."""
        shown = copy.copy(self)
        shown.hidden = {}
        return shown

    def written(self, text: str) -> str:
        """Returns a text of the format as parsers get it: with `HIDDEN` before the special tokens in it."""
        for mark in self.hidden.values():
            text = text.replace(mark, HIDDEN + mark)
        return text

    def literal(self, text: str) -> str:
        """Returns an expression of a grammar for a text of the format, whose marks may be tokens."""
        if not self.tokens:
            return literal(text)
        pieces = re.split("|".join(f"({re.escape(mark)})" for mark in self.tokens), text)
        known = (piece for piece in pieces if piece)
        return " ".join(f"<[{self.tokens[piece]}]>" if piece in self.tokens else literal(piece) for piece in known)

    def text_rules(self, name: str, *without: str) -> str:
        """Returns a rule for text without some marks that are tokens. It may have the other tokens that text has."""
        others = [token for mark, token in self.tokens.items() if mark not in without and token not in self.hidden]
        tokens = [f"<[{token}]>" for token in [*self.text_tokens, *others]]
        return rf"{name}: ({' | '.join([r'/(.|\n)+/', *tokens])})*"

    def before_token(self, text: str) -> str:
        """Returns the beginning of a text of the format up to the first mark that is a token."""
        return min((text.partition(mark)[0] for mark in self.tokens), key=len, default=text)


def literal(text: str) -> str:
    """Returns a text as a string of a grammar."""
    return json.dumps(text, ensure_ascii=False)


def text_without(*excluded: str) -> str:
    """Returns an expression of a terminal for any text that does not contain some texts."""
    return " & ".join([r"/(.|\n)*/", *(rf"~/(.|\n)*{pattern(one)}(.|\n)*/" for one in excluded)])


def pattern(text: str) -> str:
    """Returns a regular expression of a grammar that matches a text."""
    return re.escape(text).replace("/", r"\/").replace("\n", r"\n").replace(r"\ ", " ")

"""Line breaks of a page: none between a number and its unit, and within names only between their parts."""

import re
from typing import Final

SHORT: Final = 24
"""Maximum length of a name in code without breaks. A phone shows about 40 characters."""

_PIECES: Final = re.compile(r"(<pre\b.*?</pre>|<script\b.*?</script>|<style\b.*?</style>|<[^>]+>)", re.DOTALL)
_UNIT: Final = re.compile(r"(?<=\d) (?=(?:[mµn]?s|h|[KMGT]i?B(?:/s)?|TFLOP/s|times|tokens/s|×)(?![\w/]))")
_TIMES: Final = re.compile(r"(?<=\d)[ \u00a0]×[ \u00a0](?=\d)")
_WITH_HYPHENS: Final = re.compile(r"\b(?:\d{4}-\d\d-\d\d|\d+(?:\.\d+)?e-\d+)\b")
_JOINT: Final = re.compile(r"(?<=[\w)\]][_./=,])(?=[\w(\[])")


def with_breaks(content: str) -> str:
    """Returns a page's HTML with breaks forbidden or allowed in text and inline code."""
    pieces = _PIECES.split(content)
    for index in range(0, len(pieces), 2):
        is_code = index > 0 and pieces[index - 1] == "<code>" and pieces[index + 1 : index + 2] == ["</code>"]
        if not is_code:
            text = _TIMES.sub("\u00a0×\u00a0", _UNIT.sub("\u00a0", pieces[index]))
            pieces[index] = _WITH_HYPHENS.sub(lambda match: f'<span class="whole">{match[0]}</span>', text)
        elif len(pieces[index]) <= SHORT:
            pieces[index - 1] = '<code class="whole">'
        else:
            pieces[index] = _JOINT.sub("<wbr>", pieces[index])
    return "".join(pieces)

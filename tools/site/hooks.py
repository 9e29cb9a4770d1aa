"""MkDocs' hooks: files of the repository, generated pages, formulas, drawings, and checks of the finished site."""

import re
import sys
from pathlib import Path
from typing import Final

import mkdocs.plugins
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.site import api, benchmarks, checks, formulas, line_breaks, links  # noqa: E402

PLOTLY: Final = "assets/plotly.min.js"
"""The address of plotly.js for pages with interactive plots, on the site itself."""

_MATHJAX = re.compile(r"<script[^>]*\bsrc=[\"'][^\"']*mathjax[^>]*>\s*</script>", re.IGNORECASE)
# mkdocs-jupyter's template ends with styles that Markdown parses as code.
_STYLES_AS_CODE = re.compile(
    r'<div class="highlight"><pre><span></span><code>\s*&lt;style&gt;.*?&lt;/style&gt;\s*</code></pre></div>', re.DOTALL
)


def _copied(path: str, config: MkDocsConfig) -> File:
    """Returns a file of the repository as a file of the site."""
    return File.generated(
        config, links.address(path), abs_src_path=str(ROOT / path), inclusion=InclusionLevel.NOT_IN_NAV
    )


@mkdocs.plugins.event_priority(100)
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds files from outside of docs/, before mkdocs-jupyter looks for notebooks."""
    pages = {file.src_uri: f"docs/{file.src_uri}" for file in files.documentation_pages()}
    for path, page in links.PAGES.items():
        if page not in pages and (ROOT / path).is_file() and path != "README.md":
            files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
            pages[page] = path
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        path = f"notebooks/{notebook.name}"
        files.append(File.generated(config, links.address(path), abs_src_path=str(notebook)))
        pages[links.address(path)] = path
    for page, text in benchmarks.pages().items():
        files.append(File.generated(config, page, content=text))
        pages[page] = f"docs/{page}"
    copied = {f"benchmarks/results/{file.name}" for file in (ROOT / "benchmarks" / "results").iterdir()}
    for page, source in pages.items():
        if source == f"docs/{page}" and not (ROOT / source).is_file():
            text = benchmarks.pages()[page]
        else:
            text = (ROOT / source).read_text()
        copied |= links.linked_files(text, source)
    for path in sorted(copied):
        files.append(_copied(path, config))
    for name, content in benchmarks.plots().items():
        files.append(File.generated(config, name, content=content))
    for name, path in formulas.assets().items():
        files.append(File.generated(config, name, abs_src_path=path))
    return files


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the notebooks and the benchmark pages to the navigation."""
    chapters = [links.address(f"notebooks/{path.name}") for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    if (ROOT / "notebooks" / "README.md").is_file():
        chapters.insert(0, "lesson/index.md")
    for section in config.nav or []:
        if "Lesson" in section:
            section["Lesson"] = chapters
        if "Benchmarks" in section:
            section["Benchmarks"] = list(benchmarks.pages())
    return config


@mkdocs.plugins.event_priority(50)
def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Expands entries of the API, and rewrites links to files of the repository."""
    source = links.source_of(page.file.src_uri)
    if page.file.src_uri in api.MODULES:
        markdown = api.expanded(markdown, page.file.src_uri)
    return links.on_the_site(markdown, source)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Controls line breaks, and renders formulas."""
    content = line_breaks.with_breaks(_STYLES_AS_CODE.sub("", content))
    try:
        return formulas.with_formulas(content)
    except ValueError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Loads plotly.js and Mermaid on pages that need them, and removes MathJax, which notebooks' templates load."""
    output = _MATHJAX.sub("", output)
    draws = {
        PLOTLY: page.file.src_uri.startswith("lesson/") and "Plotly" in output,
        formulas.MERMAID: 'class="mermaid"' in output,
    }
    for script in (name for name, is_needed in draws.items() if is_needed):
        output = output.replace("<head>", f'<head><script src="{get_relative_url(script, page.url)}"></script>', 1)
    return output


def on_post_build(config: MkDocsConfig) -> None:
    """Checks the finished site; see `tools.site.checks`."""
    site = Path(config.site_dir)
    if any("plotly.min.js" in file.read_text(errors="ignore") for file in (site / "lesson").rglob("*.html")):
        import plotly.offline

        (site / PLOTLY).write_text(plotly.offline.get_plotlyjs())
    if faults := checks.faults(site):
        raise PluginError("the site has faults:\n" + "\n".join(faults))

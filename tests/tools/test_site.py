"""The maker of the site: links between files, formulas, drawings, entries of the API, checks of the finished site."""

from pathlib import Path

import pytest

from tools.figures import ROOT
from tools.site import api, benchmarks, checks, formulas, line_breaks, links


@pytest.mark.parametrize(
    ("path", "address"),
    [
        ("docs/train.md", "train.md"),
        ("CONTRIBUTING.md", "develop/contributing.md"),
        ("notebooks/true_on_policy.ipynb", "lesson/true_on_policy.ipynb"),
        ("benchmarks/results/demo-cpu.json", "files/benchmarks/results/demo-cpu.json"),
        ("detjax/contract.py", "files/detjax/contract.py.txt"),
    ],
)
def test_every_file_of_the_repository_has_an_address_on_the_site(path: str, address: str) -> None:
    assert links.address(path) == address


def test_links_to_files_lead_to_where_the_site_has_them() -> None:
    text = (
        "[7 s](../../benchmarks/results/demo-cpu.json#median(/runs/*/seconds)), [notes](../train.md#tunix), "
        "[web](https://example.org/a.md), [none](../none.md), `[code](../../Makefile)`"
    )
    assert links.on_the_site(text, "docs/guide/engine.md") == (
        "[7 s](../files/benchmarks/results/demo-cpu.json#median(/runs/*/seconds)), [notes](../train.md#tunix), "
        "[web](https://example.org/a.md), [none](../none.md), `[code](../../Makefile)`"
    )
    assert links.linked_files(text, "docs/guide/engine.md") == {"benchmarks/results/demo-cpu.json"}


needs_packages = pytest.mark.skipif(not formulas.MODULES.is_dir(), reason="KaTeX and Mermaid come with `make docs`")


def drawing(text: str) -> str:
    return f'<pre class="mermaid"><code>{text}</code></pre>'


@needs_packages
@pytest.mark.parametrize("less", ["&lt;", "&amp;lt;"])
def test_formulas_are_set_with_their_latex_as_text(less: str) -> None:
    page = formulas.with_formulas(rf'<p><span class="arithmatex">\(\frac{{a}}{{\sqrt K}} {less} 1\)</span></p>')
    assert r'<annotation encoding="application/x-tex">\frac{a}{\sqrt K} &lt; 1</annotation>' in page
    assert 'class="katex"' in page and "arithmatex" not in page


@needs_packages
@pytest.mark.parametrize(
    ("page", "says"),
    [
        (r'<div class="arithmatex">\[\nonsense{x}\]</div>', "nonsense"),
        (drawing("flowchart TD\n a =&gt; b"), "Unrecognized text"),
        (drawing("flowchart TD\n accDescr: what it shows\n a[A --&gt; b"), "Parse error"),
    ],
)
def test_a_formula_or_a_drawing_that_cannot_be_read_is_an_error(page: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        formulas.with_formulas(page.replace("TD\n a", "TD\n accDescr: what it shows\n a"))


@needs_packages
def test_a_drawing_is_left_to_the_browser() -> None:
    page = drawing(
        "flowchart TD\n accDescr: what it shows\n a[&quot;&lt;b&gt;A&lt;/b&gt;&quot;] --&gt;|then| b &amp; c"
    )
    assert formulas.with_formulas(page) == page


def test_a_drawing_without_text_for_readers_who_do_not_see_it_is_an_error() -> None:
    with pytest.raises(ValueError, match="no accDescr"):
        formulas.with_formulas(drawing("flowchart TD\n a --&gt; b"))


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("<td>7.66 s</td><td>at 4.2 TB/s, 2 samples</td>", "<td>7.66~s</td><td>at 4.2~TB/s, 2 samples</td>"),
        ("<p>2 × 4096, 1.5 × as fast</p>", "<p>2~×~4096, 1.5~× as fast</p>"),
        ('<a href="2026-11-23">2026-11-23</a>', '<a href="2026-11-23"><span class="whole">2026-11-23</span></a>'),
        ("<td>4.9e-4</td>", '<td><span class="whole">4.9e-4</span></td>'),
        ("<code>--json FILE</code>", '<code class="whole">--json FILE</code>'),
        (
            "<code>tests/test_a_row_is_alone.py</code>",
            "<code>tests/<wbr>test_<wbr>a_<wbr>row_<wbr>is_<wbr>alone.<wbr>py</code>",
        ),
        ("<pre><code>7 s</code></pre>", "<pre><code>7 s</code></pre>"),
        ("<script>a = '7 s'</script>", "<script>a = '7 s'</script>"),
    ],
)
def test_lines_break_at_joints_of_names_and_not_before_units(content: str, shown: str) -> None:
    assert line_breaks.with_breaks(content) == shown.replace("~", "\u00a0")


def test_every_public_name_gets_an_entry() -> None:
    from detjax import ops

    index = api.expanded(api.PLACEHOLDER, "api/index.md")
    assert all(
        f"::: detjax.{name}\n" in index for name in ("generate", "Engine", "batch_invariant", "jit", "fingerprint")
    )
    assert "::: detjax.ops\n" not in index  # a module has a page of its own
    entries = api.expanded(api.PLACEHOLDER, "api/ops.md")
    public = [name for name in vars(ops) if not name.startswith("_") and callable(getattr(ops, name))]
    assert len(public) > 50 and all(f"::: {api.path_of('detjax.ops', name)}\n" in entries for name in public)
    assert all((ROOT / "docs" / page).read_text().count(api.PLACEHOLDER) == 1 for page in api.MODULES)
    # A submodule that is named as its function is not what the entry shows.
    assert api.path_of("detjax.ops", "matmul") == "detjax.ops.matmul.matmul"
    assert api.path_of("detjax.ops", "rms_norm") == "detjax.ops.rms_norm"


def test_benchmark_pages_show_what_the_result_files_have() -> None:
    pages = benchmarks.pages()
    assert benchmarks.seconds(benchmarks.result("serve-h200")["runs"]["order 1"]["seconds"]) == "7.66 s"
    assert "| detjax | order 1 | 7.66 s | 100,203 |" in pages["benchmarks/serving.md"]
    assert all(f"{file.name}]" in pages["benchmarks/index.md"] for file in benchmarks.RESULTS.glob("*.json"))


@pytest.mark.parametrize(
    ("value", "text"), [(7.6604, "7.66 s"), (0.00435, "4.35 ms"), (1.2e-5, "12.0 µs"), (345.6, "346 s"), (None, "")]
)
def test_durations_have_the_unit_that_suits_them(value: float | None, text: str) -> None:
    assert benchmarks.seconds(value) == text


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ('<a href="none.html">a</a>', "leads nowhere"),
        ('<a href="../other/#none">a</a>', "no place of its page"),
        ('<a href="#none">a</a>', "no place of its page"),
        ('<img src="../other/a.png">', "no alternative text"),
        ('<script src="https://example.org/a.js"></script>', "from a network"),
        ("<p>j&lt;n} where=&quot;&quot; the=&quot;&quot; text=&quot;&quot; goes</p>", "words as attributes"),
        ("<pre><code>  &lt;style&gt;</code></pre>", "styles of a notebook"),
        ('<link rel="stylesheet" href="//fonts.example.org/a.css">', "from a network"),
    ],
)
def test_a_fault_of_a_page_is_reported(page: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "expected_anchors", dict)
    for name, content in (("page", page), ("other", '<h1 id="there">a</h1><a href="../page/">b</a>')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text(content)
    (tmp_path / "other" / "a.png").touch()
    assert [line for line in checks.faults(tmp_path) if line.startswith("page/index.html") and fault in line]


def test_a_site_without_faults_and_one_without_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "api" / "ops").mkdir(parents=True)
    (tmp_path / "api" / "ops" / "index.html").write_text(
        '<h2 id="detjax.ops.matmul">a</h2><a href="#detjax.ops.matmul">b</a><a href="https://example.org">c</a>'
    )
    monkeypatch.setattr(api, "expected_anchors", lambda: {"api/ops.md": {"detjax.ops.matmul"}})
    assert not checks.faults(tmp_path)
    monkeypatch.setattr(api, "expected_anchors", lambda: {"api/ops.md": {"detjax.ops.matmul", "detjax.ops.rope"}})
    assert checks.faults(tmp_path) == ["api/ops.md: no entry for detjax.ops.rope"]

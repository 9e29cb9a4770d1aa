"""The code of README.md and docs/ runs as it is written, and README.md stays short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.page_blocks import blocks, run

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(file.relative_to(ROOT)) for file in (ROOT / "docs").rglob("*.md"))]
RUN = [page for page in PAGES if any(block.skipped is None for block in blocks((ROOT / page).read_text()))]
EXAMPLES = {
    "flax_model.py": "batch_invariant: 1 different results",
    "generate.py": "the first one has the same bits alone: True",
    "stream.py": "the first one is the same alone: True",
    "train_wrapped_model.py": "weights after 3 steps on 1, 2, 4 devices: 1 digest",
    "verify_answers.py": "another token: refused at token 3",
}
QUICK = ("docs/concepts/backends.md", "docs/develop/two_devices.md", "docs/guide/install.md")
"""Pages that start no server and load no model. The others compile for a minute."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with links to all that a clone has, so that what blocks write is not written into this one."""
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


def environment() -> dict[str, str]:
    commands = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": commands, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": "cache"}


@pytest.mark.parametrize(
    "page", [page if page in QUICK else pytest.param(page, marks=pytest.mark.nightly) for page in RUN]
)
def test_the_blocks_of_a_page_run_as_written(page: str, checkout: Path) -> None:
    command = [sys.executable, "-m", "tests.support.page_blocks", page]
    subprocess.run(command, cwd=checkout, env=environment(), check=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("example", "printed"), EXAMPLES.items())
def test_an_example_runs_and_prints_what_it_shows(example: str, printed: str, checkout: Path) -> None:
    command = [sys.executable, "-W", "error", f"examples/{example}"]
    result = subprocess.run(command, cwd=checkout, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    assert printed in result.stdout


def test_pages_that_are_run_often_are_there() -> None:
    assert set(QUICK) < set(RUN)


def test_examples_are_short() -> None:
    short = [*EXAMPLES, "openai_client.py"]
    assert [name for name in short if len((ROOT / "examples" / name).read_text().splitlines()) >= 60] == []


def test_the_readme_is_short_and_begins_with_two_commands() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert [line.split()[1] for line in lines if line.startswith("make ")] == ["demo", "test"]


@pytest.mark.parametrize(
    ("page", "error"),
    [
        ("```python\nassert False\n```", AssertionError),
        ("```python\na = 1\n```\n\n```python\nprint(a)\n```\n\n```text\n2\n```", AssertionError),
        ("```bash\nfalse\n```", subprocess.CalledProcessError),
        ("```bash\ntrue | false | true\n```", subprocess.CalledProcessError),
        ("<!-- runs until: http://localhost:8000/ -->\n```bash\nfalse\n```", AssertionError),
    ],
)
def test_blocks_that_do_not_do_what_the_page_says_are_reported(page: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        run("page.md", page)


def test_blocks_share_a_namespace_and_marked_ones_are_skipped_by_name() -> None:
    page = """
```python
a = 1
```
<!-- not run: needs a GPU -->
```bash
false
```
```python test="skip: needs a network"
raise OSError
```
- ```python
  not code of a page's own
  ```
```
a form
```
```bash
echo 3
```

```text
3
```

```python
assert a == 1
```
"""
    assert run("page.md", page) == 3
    assert [block.skipped for block in blocks(page) if block.skipped] == ["needs a GPU", "needs a network"]

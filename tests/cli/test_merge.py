"""The command `detjax merge`."""

from pathlib import Path

import pytest

from detjax import cli, models
from tests.support import commands
from tests.support.adapters import LINEAR, make_adapter
from tests.support.commands import Result
from tests.support.small_loops import FIXTURE


def run(*arguments: object) -> Result:
    return commands.run(cli.main, "merge", *arguments)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapters") / "one", LINEAR, 4, base=FIXTURE)


def test_it_writes_the_model_with_merged_weights(adapter: Path, tmp_path: Path) -> None:
    result = run(FIXTURE, adapter, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "another model" in result.output
    base, tokenizer = models.load(FIXTURE, progress=False)
    written = models.load(tmp_path / "out", progress=False)
    expected = models.digest(models.merged(base, models.read_adapter(adapter)), tokenizer)
    assert models.digest(*written) == expected != models.digest(base, tokenizer)
    again = run(FIXTURE, adapter, tmp_path / "out")
    assert again.exit_code == 2 and f"{tmp_path / 'out'} exists; accepted: a path that" in again.output


def test_an_adapter_of_another_model_is_refused_and_nothing_is_written(adapter: Path, tmp_path: Path) -> None:
    other = FIXTURE.parent / "llama3"
    result = run(other, adapter, tmp_path / "out")
    assert result.exit_code == 2 and "Was the adapter made for this model?" in result.output
    assert not (tmp_path / "out").exists()

"""The table of fixtures has the folders of tests/fixtures/, and the README there says what the table says."""

import json
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
TABLE = tomllib.loads((ROOT / "tools" / "fixtures.toml").read_text())


def test_each_folder_has_an_entry_and_each_entry_a_folder() -> None:
    assert sorted(TABLE) == sorted(config.parent.name for config in FIXTURES.glob("*/config.json"))


def test_the_readme_has_a_row_for_each_entry() -> None:
    rows = [line for line in (FIXTURES / "README.md").read_text().splitlines() if line.startswith("| `")]
    for row, (name, entry) in zip(rows, TABLE.items(), strict=True):
        config = json.loads((FIXTURES / name / "config.json").read_text())
        config = config.get("text_config", {}) | config
        size = sum(file.stat().st_size for file in (FIXTURES / name).iterdir())
        stored = config.get("dtype") or config["torch_dtype"]
        assert row == f"| `{name}` | {stored} | {size:,} | {entry['about']} |"

"""The documentation of idioms is what the tests run."""

import re

from tests.invariant.idioms import registry
from tools import idiom_table


def test_the_table_of_idioms_is_up_to_date() -> None:
    """Run `python -m tools.idiom_table` if it is not."""
    assert idiom_table.FILE.read_text() == idiom_table.text()


def test_each_idiom_is_a_row_and_each_row_an_idiom() -> None:
    rows = re.findall(r"^\| (.+) \| (accepted|\*\*refused\*\*) \| .* \|$", idiom_table.text(), re.MULTILINE)
    expected = {idiom.form: "accepted" if idiom.is_accepted else "**refused**" for idiom in registry.ALL.values()}
    assert dict(rows) == expected and len(rows) == len(registry.ALL)
    assert all(idiom.is_accepted or idiom.remark for idiom in registry.ALL.values())  # a refusal has its reason


def test_cells_do_not_break_tables() -> None:
    assert [idiom.name for idiom in registry.ALL.values() if "|" in idiom.form + idiom.remark] == []

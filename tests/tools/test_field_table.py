"""The documentation of fields is what the schemas say."""

from tools import field_table


def test_the_table_of_fields_is_up_to_date() -> None:
    """Run `python -m tools.field_table` if it is not."""
    assert field_table.FILE.read_text() == field_table.text()


def test_every_served_field_has_a_description() -> None:
    assert "|  |" not in field_table.text()

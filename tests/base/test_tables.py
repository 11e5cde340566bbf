"""Tables of text."""

from dtypepin._base.tables import aligned, markdown

TABLE = [("name", "n"), ("a.b", "10")]


def test_columns_line_up_and_nothing_trails():
    assert aligned(TABLE) == "name  n\na.b   10"


def test_a_table_for_a_page():
    assert markdown(TABLE) == "| name | n |\n| --- | --- |\n| a.b | 10 |"

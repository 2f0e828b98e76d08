"""The console that the commands print tables to."""

from __future__ import annotations

import os

from rich.console import Console
from rich.table import Table

#: Columns of output that goes to a file or a pipe, where nobody's window limits a line.
PIPE_COLUMNS = 160


def make_console() -> Console:
    """A console as wide as the terminal, `PIPE_COLUMNS` wide where the output is no terminal.

    It prints brackets as they are: no markup.
    """
    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, markup=False, width=PIPE_COLUMNS)
    return console


def make_table(title: str, *columns: str) -> Table:
    """An empty table with a title on the left; long cells wrap."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table

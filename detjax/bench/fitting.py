"""Tables that leave out columns where there is no room for all of them, rather than break names."""

import dataclasses
from collections.abc import Callable, Collection, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


@dataclasses.dataclass(frozen=True)
class FittedTable:
    """A table with as many columns as fit.

    Attributes:
        table: returns the table without the columns of these names.
        optional: the names of columns that may be left out, the first one first.
    """

    table: Callable[[Collection[str]], Table]
    optional: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited, count = options.update(max_width=10_000), 0
        table = self.table(())
        while count < len(self.optional) and Measurement.get(console, unlimited, table).maximum > options.max_width:
            count += 1
            table = self.table(self.optional[:count])
        yield table
        left_out = self.optional[:count]
        if left_out:
            yield Text(f"No room for {', '.join(left_out)}: a wider terminal or COLUMNS=160 shows all columns")

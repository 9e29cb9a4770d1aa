"""Tables that drop columns rather than wrap names if space is short."""

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
        table: returns the table without the named columns.
        optional: the columns that may be dropped, in this order.
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
            yield Text(f"Not shown: {', '.join(left_out)}; a wider terminal or COLUMNS=160 shows all columns")

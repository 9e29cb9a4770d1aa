"""The log of a run: a line of JSON for every step, and a table of the newest steps on the console."""

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

_SHOWN_STEPS: Final = 12
"""Steps that the table on a terminal shows, the newest ones."""


class RunLog:
    """Writes the metrics of a run's steps to a file, a JSON object a line, and shows them on the console.

    A line is in the file when `write` returns, so a process that is killed loses no step that it wrote. JSON has no
    numbers that are not finite: they are written as the strings "nan", "inf" and "-inf", which `float` reads. On a
    terminal, within a `with` block, the console shows a table; otherwise it shows a line for every step.

    Example:
        >>> from pathlib import Path
        >>> from detjax.rl.runs.log import RunLog
        >>> with RunLog(Path("run.jsonl"), columns=("reward", "k3")) as log:
        ...     log.write(0, {"reward": 0.25, "k3": 0.0, "seconds": 1.5})
        ...
        step 0  reward 0.25  k3 0
        >>> print(Path("run.jsonl").read_text(), end="")
        {"step": 0, "reward": 0.25, "k3": 0.0, "seconds": 1.5}
    """

    def __init__(
        self, path: Path, columns: Sequence[str], console: Console | None = None, resumed_step: int | None = None
    ) -> None:
        """Opens the log of a new run, or of one that is resumed.

        Args:
            path: the file. Its folder exists.
            columns: names of the metrics that the console shows; the file has all of them.
            console: where to show them; by default the standard output.
            resumed_step: the step that a resumed run computes first. The file keeps the lines of the steps before it,
                and loses a last line that was not written to its end. None: the run is new.

        Raises:
            FileExistsError: the run is new, and the file has lines.
            ValueError: a line of the file that is not the last is damaged.
        """
        kept, self._last_step = b"", -1
        if path.exists() and path.stat().st_size:
            if resumed_step is None:
                raise FileExistsError(f"RunLog: {path} has lines; accepted: another path, or the step to resume from")
            kept, self._last_step = _kept(path, resumed_step)
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._file.truncate(len(kept))
        self._file.seek(len(kept))
        if kept and not kept.endswith(b"\n"):
            self._file.write(b"\n")
        self._columns = tuple(columns)
        self._console = Console() if console is None else console
        self._rows: deque[list[str]] = deque(maxlen=_SHOWN_STEPS)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        """Begins to show the table, if the console is a terminal."""
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves the table as it is and closes the file."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes the line of a step, and shows it.

        Args:
            step: the step's number, above that of the line before.
            metrics: values that JSON has, and NumPy's, by name.

        Raises:
            ValueError: the step is not above the last one, or a metric is named "step".
        """
        if step <= self._last_step:
            raise ValueError(f"RunLog: step is {step} after {self._last_step}; accepted: above {self._last_step}")
        if "step" in metrics:
            raise ValueError(
                "RunLog: a metric is named 'step'; accepted: other names, because lines have the step's number"
            )
        line = json.dumps({"step": step} | _as_json(metrics), allow_nan=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        self._last_step = step
        self._rows.append([str(step), *(_cell(metrics.get(column, "")) for column in self._columns)])
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        else:
            names = ("step", *self._columns)
            shown = "  ".join(f"{name} {cell}" for name, cell in zip(names, self._rows[-1], strict=True))
            self._console.print(shown, markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in ("step", *self._columns):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*row)
        return table


def _kept(path: Path, resumed_step: int) -> tuple[bytes, int]:
    """Returns the file's beginning up to the lines before a step, and the last of their steps, -1 if there is none."""
    size, last_step = 0, -1
    data = path.read_bytes()
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            step = json.loads(line)["step"]
            is_kept = step < resumed_step
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                break
            raise ValueError(
                f"RunLog: line {number} of {path} is {line[:80]!r}; accepted: a JSON object with a step. Only the last "
                "line may be damaged."
            ) from None
        if not is_kept:
            break
        size, last_step = size + len(line) + 1, step
    return data[:size], last_step


def _as_json(value: Any) -> Any:
    match value:
        case Mapping():
            return {str(name): _as_json(part) for name, part in value.items()}
        case list() | tuple():
            return [_as_json(part) for part in value]
        case np.ndarray() | np.generic():
            return _as_json(value.tolist())
        case float() if not math.isfinite(value):
            return str(value)
    return value


def _cell(value: Any) -> str:
    value = _as_json(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""The log of a run: one JSON line per step, and a table of the latest steps on the console."""

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
"""Number of latest steps in the terminal's table."""


class RunLog:
    """Writes the metrics of a run's steps to a file, one JSON object per line, and shows them on the console.

    `write` returns after the line is in the file, so a killed process loses no step. Since JSON has no NaN or infinity,
    they are written as the strings "nan", "inf" and "-inf", which `float` parses. On a terminal, within a `with` block,
    the console shows a table; otherwise one line per step.

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
        """Opens the log of a new or resumed run.

        Args:
            path: the file, in an existing folder.
            columns: names of the metrics that the console shows; the file has all metrics.
            console: the console. Default: standard output.
            resumed_step: the first step that a resumed run computes. The lines of earlier steps stay in the file; later
                lines and an incomplete last line are removed. None: the run is new.

        Raises:
            FileExistsError: the run is new, and the file has lines.
            ValueError: a line other than the last is damaged.
        """
        data, self._last_step = b"", -1
        if path.exists() and path.stat().st_size:
            if resumed_step is None:
                raise FileExistsError(f"RunLog: {path} has lines; accepted: another path, or the step to resume from")
            data, self._last_step = _lines_before(path, resumed_step)
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._file.truncate(len(data))
        self._file.seek(len(data))
        if data and not data.endswith(b"\n"):
            self._file.write(b"\n")
        self._columns = tuple(columns)
        self._console = Console() if console is None else console
        self._rows: deque[list[str]] = deque(maxlen=_SHOWN_STEPS)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        """Shows the table if the console is a terminal."""
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops updating the table and closes the file."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes the line of a step and shows it.

        Args:
            step: the step's number, above the previous one.
            metrics: JSON or NumPy values by name.

        Raises:
            ValueError: the step is not above the last one, or a metric is named "step".
        """
        if step <= self._last_step:
            raise ValueError(f"RunLog: step is {step} after {self._last_step}; accepted: above {self._last_step}")
        if "step" in metrics:
            raise ValueError(
                "RunLog: a metric is named 'step'; accepted: other names, because 'step' is the step's number"
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


def _lines_before(path: Path, resumed_step: int) -> tuple[bytes, int]:
    """Returns the file's lines before a step, and the number of the last of them, -1 without lines."""
    size, last_step = 0, -1
    data = path.read_bytes()
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            step = json.loads(line)["step"]
            is_earlier = step < resumed_step
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                break
            raise ValueError(
                f"RunLog: line {number} of {path} is {line[:80]!r}; accepted: a JSON object with a step. Only the last "
                "line may be damaged."
            ) from None
        if not is_earlier:
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

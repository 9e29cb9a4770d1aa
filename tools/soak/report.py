"""The report of a run: bars with their outcomes, and figures."""

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any


@dataclasses.dataclass
class Report:
    """The observations of a run.

    Attributes:
        command: the command and its options.
        figures: counts and measurements.
        bars: requirements with accepted and seen values.
    """

    command: dict[str, Any]
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    bars: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    _start: float = dataclasses.field(default_factory=time.monotonic)
    _load_before: tuple[float, float, float] = dataclasses.field(default_factory=os.getloadavg)

    def bar(self, name: str, is_met: bool, *, accepted: object, seen: object) -> None:
        """Records and prints whether a bar was met."""
        self.bars.append({"name": name, "is_met": is_met, "accepted": accepted, "seen": seen})
        print(f"{'met   ' if is_met else 'MISSED'} {name}: {_short(seen)} (accepted: {accepted})", flush=True)

    def at_most(self, name: str, seen: float, accepted: float) -> None:
        """Records an upper bound on a number."""
        self.bar(name, seen <= accepted, accepted=f"at most {accepted:g}", seen=seen)

    def nothing(self, name: str, entries: list[Any]) -> None:
        """Records a bar for a list that must be empty. The report has its first entries."""
        self.bar(name, not entries, accepted="none", seen=entries[:20] if entries else "none")

    def write(self, out: Path | None) -> int:
        """Writes the report and returns the exit code: 1 if a bar was missed."""
        missed = [bar["name"] for bar in self.bars if not bar["is_met"]]
        content = {
            "command": self.command,
            "seconds": round(time.monotonic() - self._start, 1),
            "machine": {"cores": os.cpu_count(), "load_before": self._load_before, "load_after": os.getloadavg()},
            "missed": missed,
            "bars": self.bars,
            "figures": self.figures,
        }
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(content, indent=1, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
        print(f"{len(self.bars) - len(missed)} of {len(self.bars)} bars met", flush=True)
        return 1 if missed else 0


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 400 else f"{text[:400]}..."

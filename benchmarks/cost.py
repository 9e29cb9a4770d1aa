"""What steps cost that many devices share: a model, its errors against what was measured, and what it predicts.

    python benchmarks/cost.py --out benchmarks/results/cost-h200.json

Nothing is measured. The model is fitted to results on one H200, and to steps on two and four of them; it predicts up to
512, by the cut along outputs and by the usual cut with all-reduce. Bandwidths of links are those of data sheets.

`--small` predicts a tiny model in seconds.
"""

import dataclasses
import json
from pathlib import Path
from typing import Final

from rich.console import Console

from detjax.bench import command_line, cost, provenance

RESULTS: Final = Path(__file__).parent / "results"
SOURCES: Final = {"single": "run-h200.json", "several": "peer-tensor-parallel-h200.json"}
MODELS: Final = "Qwen3-32B", "Qwen3-235B-A22B", "DeepSeek-V3"
DEVICES: Final = 1, 2, 4, 8, 16, 32, 64, 128, 256, 512
STEPS: Final = {f"decode of {count}": cost.decode(count, 1024) for count in (1, 8, 64, 256)} | {
    "prefill of 8192": cost.prefill(8192)
}

app = command_line.application()


@app.command(help=command_line.help_text(__doc__))
def main(small: command_line.Small = False, out: command_line.Out = None) -> None:
    """Predicts."""
    single, several = (json.loads((RESULTS / name).read_text()) for name in SOURCES.values())
    machine = cost.fitted(single, several)
    models, devices = (("tiny",), (1, 2, 4)) if small else (MODELS, DEVICES)
    rows = cost.predictions(machine, models, STEPS, devices)
    content = provenance.heading("python benchmarks/cost.py") | {
        "sources": SOURCES,
        "machine": dataclasses.asdict(machine),
        "errors": cost.errors(machine, single, several),
        "steps": {label: dataclasses.asdict(step) for label, step in STEPS.items()},
        "predictions": rows,
        "fastest": cost.fastest(rows),
    }
    for table in cost.tables(content):
        Console().print(table)
    if out is not None:
        provenance.write(out, content)


if __name__ == "__main__":
    app()

"""How much memory a host needs to load a checkpoint into the devices of a mesh, beside what the devices hold.

    python benchmarks/loading.py --out benchmarks/results/loading-cpu.json

Devices are simulated, and checkpoints are sparse files of zeros: the shape of Qwen3-32B has 66 GB of them. Where
weights are "deleted", each leaves its device as soon as it is there, so that a machine can load more than it has memory
for. Files that are mapped count apart: the system takes their memory back when it needs it.

`--small` takes seconds.
"""

from rich.console import Console

from detjax.bench import command_line, loading, provenance

app = command_line.application()


@app.command(help=command_line.help_text(__doc__))
def main(small: command_line.Small = False, out: command_line.Out = None) -> None:
    """Loads checkpoints in processes of their own, and watches their memory."""

    def report(row: dict) -> None:
        command_line.print_line(f"{row['preset']}, {row['layers']} layers: {row['seconds']:.1f} s")

    result = loading.measured(loading.SMALL if small else loading.LOADS, "python benchmarks/loading.py", report)
    Console().print(loading.table(result["rows"]))
    if out is not None:
        provenance.write(out, result)


if __name__ == "__main__":
    app()

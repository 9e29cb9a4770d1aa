"""Matrix products on an H200: time against XLA's and PyTorch's, and whether a row keeps its bits.

    python benchmarks/matmul.py --out benchmarks/results/matmul-h200.json

Every linear layer of `detjax.bench.shapes`, bfloat16, weights [N, K], at every number of tokens. XLA's dot is compiled
with JAX's default options, so XLA has autotuned it. Times are medians over rounds in which all take turns, and weights
are rotated so that they come from memory. Two pictures are written beside the JSON file.

`--small` takes a CPU seconds, on the portable backend. The exit code is 1 if bits differ; slow cells do not change it.
"""

import os
import time
from typing import Annotated, Any

# PyTorch needs memory beside JAX.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import typer

import detjax
from detjax.bench import command_line, provenance, rivals
from detjax.bench.matmul import pictures, suite, tables
from detjax.bench.matmul.cases import full_sizes, small_sizes
from detjax.bench.shapes import MODELS, TOKENS

app = command_line.application()


@app.command(help=command_line.help_text(__doc__))
def main(
    model: command_line.Models = None,
    tokens: command_line.Tokens = None,
    bits: Annotated[bool, typer.Option("--bits/--skip-bits", help="Compare bits too.")] = True,
    torch: command_line.Torch = True,
    small: command_line.Small = False,
    out: command_line.Out = None,
) -> None:
    start = time.perf_counter()
    with command_line.bad_parameters():
        models = command_line.check_names("--model", model, MODELS)
    sizes = small_sizes() if small else full_sizes(models, tokens or TOKENS)
    plan = suite.Plan(sizes, bits, torch and not small and rivals.torch_is_installed())
    note = {"note": command_line.ON_A_CPU} if small else {}

    def save(content: dict[str, Any]) -> None:
        if out is not None:
            provenance.write(out, content | note)

    with detjax.use_backend("portable" if small else "hopper"):
        content = suite.run(plan, save)
    tables.show(content)
    if out is not None:
        device = content["fingerprint"]["device_kind"]
        pictures.draw_over_tokens(content["cells"], device, out.with_name(f"{out.stem}-over-tokens.png"))
        pictures.draw_cells(content["cells"], device, out.with_name(f"{out.stem}-cells.png"))
    command_line.print_line(f"{time.perf_counter() - start:.0f} s; written to {out or 'no file'}")
    if bits and content["bits"]["differences"]:
        raise command_line.fail("different bits\n" + "\n".join(content["bits"]["differences"][:20]))


if __name__ == "__main__":
    app()

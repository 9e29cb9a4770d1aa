"""In how many steps XLA's own dot walks through K on TPUs, by the number of tokens: compiled by libtpu, nothing is run.

    PYTHONPATH=.libtpu JAX_PLATFORMS=cpu python benchmarks/tpu_dots.py [--output benchmarks/results/tpu-dots.json]

`make test-tpu` puts libtpu into .libtpu. Each step's products are summed inside the matrix unit and added to those of
the steps before, so another number of steps is another order of addition, and in general other bits. The steps are read
from `iteration_bounds` in the `window_config` that the compiler leaves in its program; where it has no window of
weights, the dot is on the vector unit. A plot of the same name is written beside the JSON.
"""

import argparse
import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
from rich.console import Console
from rich.table import Table

from detjax.bench.deviceless import TPU_CHIPS, compiled_for
from detjax.contract import TPU_K_STEP

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TOKENS = (1, 8, 64, 512, 4096)
K, N = 14336, 4096


def steps_of_k(chip: str, tokens: int) -> int | None:
    """Steps in which the matrix unit meets K; None: the dot is on the vector unit."""

    def dot(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)

    shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((tokens, K), (K, N)))
    text = compiled_for(chip, dot, *shapes).as_text()
    windows = [json.loads(found) for found in re.findall(r'"window_config":(\{.*?\})', text)]
    on_matrix_unit = [window for window in windows if window["kernel_window_bounds"]]
    if not on_matrix_unit:
        return None
    (window,) = on_matrix_unit
    *_, steps = window["iteration_bounds"]
    return int(steps)


def plot(steps: dict[str, dict[str, int | None]], file: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for index, (chip, of) in enumerate(steps.items()):
        for place, tokens in enumerate(map(str, TOKENS)):
            x, count = place + (index - 1.5) * 0.19, of[tokens]
            axes.bar(x, count or 0, 0.17, color=f"C{index}", label=chip if place == 0 else None)
            axes.text(x, (count or 0) + 0.4, "vector unit" if count is None else count, ha="center", va="bottom",
                      fontsize=7, rotation=90 if count is None else 0)  # fmt: skip
    axes.axhline(K // TPU_K_STEP, color="black", linewidth=1, linestyle="--", label="detjax, any number of tokens")
    axes.set_xticks(range(len(TOKENS)), [f"M = {tokens}" for tokens in TOKENS])
    axes.set_ylabel("steps of K")
    axes.set_title(f"XLA's own dot, [M, {K}] x [{K}, {N}], bfloat16: compiled, not run", fontsize=10)
    axes.legend(fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)
    axes.set_ylim(0, 34)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps of K in XLA's own dot, for TPUs that are not there.")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON; a plot is written beside it")
    output = parser.parse_args().output
    steps = {chip: {str(tokens): steps_of_k(chip, tokens) for tokens in TOKENS} for chip in TPU_CHIPS}
    table = Table("chip", *(f"M = {tokens}" for tokens in TOKENS), title=f"Steps of K = {K}, N = {N}")
    for chip, of in steps.items():
        table.add_row(chip, *("vector unit" if count is None else str(count) for count in of.values()))
    Console().print(table)
    if output is not None:
        of_release = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}
        shapes: dict[str, Any] = {"K": K, "N": N, "dtype": "bfloat16", "detjax_steps": K // TPU_K_STEP}
        command = "python benchmarks/tpu_dots.py"
        output.write_text(
            json.dumps({"command": command, **shapes, "steps": steps, "versions": of_release}, indent=1) + "\n"
        )
        plot(steps, output.with_suffix(".png"))


if __name__ == "__main__":
    main()

"""The number of K steps of XLA's own dot on TPUs, by number of tokens: compiled by libtpu, not executed.

    PYTHONPATH=.libtpu JAX_PLATFORMS=cpu python -m benchmarks tpu_dots --out benchmarks/results/tpu-dots.json

`make test-tpu` installs libtpu into .libtpu. The matrix unit sums each step's products, which are added to the previous
steps, so another number of steps means another order of addition, and in general different bits. The steps are read
from `iteration_bounds` in the `window_config` of the compiled program; a dot without a window of weights runs on the
vector unit. A plot of the same name is written next to the JSON.

`--small` compiles for one chip and two numbers of tokens.
"""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

from benchmarks import plots
from benchmarks.study import Result, Run
from detjax.bench import deviceless
from detjax.cli.options import UsageError
from detjax.contract import TPU_K_STEP

TOKENS = (1, 8, 64, 512, 4096)
K, N = 14336, 4096


def steps_of_k(chip: str, tokens: int) -> int | None:
    """Returns the number of the matrix unit's steps over K; None if the dot runs on the vector unit."""

    def dot(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)

    shapes = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((tokens, K), (K, N)))
    text = deviceless.compiled_for(chip, dot, *shapes).as_text()
    assert text is not None
    windows = [json.loads(window) for window in re.findall(r'"window_config":(\{.*?\})', text)]
    on_matrix_unit = [window for window in windows if window["kernel_window_bounds"]]
    if not on_matrix_unit:
        return None
    (window,) = on_matrix_unit
    return int(window["iteration_bounds"][-1])


def draw(content: dict[str, Any], file: Path) -> None:
    """Writes a PNG with a bar per chip and number of tokens."""
    figure = Figure(figsize=(7, 3.6), layout="constrained", dpi=150)
    axes, steps = figure.subplots(), content["steps"]
    tokens = list(next(iter(steps.values())))
    for index, (chip, counts) in enumerate(steps.items()):
        for place, count in enumerate(counts.values()):
            x = place + (index - (len(steps) - 1) / 2) * 0.19
            axes.bar(x, count or 0, 0.17, color=f"C{index}", label=chip if place == 0 else None)
            name, rotation = ("vector unit", 90) if count is None else (str(count), 0)
            axes.text(x, (count or 0) + 0.4, name, ha="center", va="bottom", fontsize=7, rotation=rotation)
    axes.axhline(K // TPU_K_STEP, color="black", linewidth=1, linestyle="--", label="detjax, any number of tokens")
    axes.set_xticks(range(len(tokens)), [f"M = {m}" for m in tokens])
    axes.set_ylabel("steps of K")
    axes.set_title(f"XLA's own dot, [M, {K}] x [{K}, {N}], bfloat16: compiled, not run", fontsize=10)
    axes.legend(fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)
    axes.set_ylim(0, 34)
    axes.spines[["top", "right"]].set_visible(False)
    plots.write_png(figure, file)


def study(run: Run) -> Result:
    chips, tokens = (["v5e"], (1, 8)) if run.small else (list(deviceless.TPU_CHIPS), TOKENS)
    try:
        steps = {chip: {str(m): steps_of_k(chip, m) for m in tokens} for chip in chips}
    except ModuleNotFoundError as error:
        raise UsageError(f"tpu_dots: {error}") from error
    return Result({"K": K, "N": N, "dtype": "bfloat16", "detjax_steps": K // TPU_K_STEP, "steps": steps})


PICTURES = {"": draw}

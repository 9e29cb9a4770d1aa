"""Writes `docs/idioms.md`: the ways of writing a model that `batch_invariant` accepts.

Run it as `python -m tools.idiom_table` after a change to `tests/invariant/idioms`. A test compares the file with this
tool's output, and others run each row.
"""

from itertools import groupby
from pathlib import Path
from typing import Final

from tests.invariant import idioms as idioms  # fills the registry
from tests.invariant.idioms import registry

FILE: Final = Path(__file__).resolve().parents[1] / "docs" / "idioms.md"

_TEXT: Final = """<!-- tools/idiom_table.py writes this file. -->

# What works, what is refused

[`detjax.batch_invariant`](your-model.md) takes models that know nothing of detjax. This page lists common ways to write
them, and the outcome of each. Every row is a test (`tests/invariant/idioms/`):

- **accepted**: on a CPU, the first row has the bits that it has alone in batches of 2, 3, 7 and 33, at three positions,
  and so has the gradient of its inputs, if there is one. Values and gradients are close to plain JAX.
- **refused**: `detjax.UnsafeFunction` names the operation and its line, before anything is computed.

An idiom that is not listed may well be accepted: `batch_invariant` follows the batch through whatever JAX traces. If
your model is refused, the message says why; [what is refused](your-model.md#what-is-refused) has the rules.

{tables}

## Transformations around it

| | |
|---|---|
{around}
"""

_AROUND: Final = {
    "`jax.jit`, `nnx.jit`, `detjax.jit`": (
        "works; [weights that change](your-model.md#weights-that-change) says which weights a program has"
    ),
    "`jax.grad`, `jax.value_and_grad`, `jax.vjp`, `nnx.grad`": (
        "works: [gradients](your-model.md#gradients), and [how a wrapped model trains](your-model.md#training)"
    ),
    "`jax.vmap`, `jax.lax.scan`": "works",
    "`jax.jvp`, `jax.linearize`, `jax.hessian`, a gradient of a gradient": (
        "raises: only first-order reverse mode is supported. Inside of the function all of them work"
    ),
}

_TABLE: Final = """## {group}

| idiom | | why, or what to use instead |
|---|---|---|
{rows}"""


def text() -> str:
    """Returns the file's text."""
    tables = []
    for group, members in groupby(sorted(registry.ALL.values(), key=_place), key=lambda idiom: idiom.group):
        rows = "\n".join(
            f"| {idiom.form} | {'accepted' if idiom.is_accepted else '**refused**'} | {idiom.remark} |"
            for idiom in members
        )
        tables.append(_TABLE.format(group=group, rows=rows))
    around = "\n".join(f"| {form} | {answer} |" for form, answer in _AROUND.items())
    return _TEXT.format(tables="\n\n".join(tables), around=around)


def _place(idiom: registry.Idiom) -> int:
    """The place of an idiom's group in the order of registration."""
    return list(dict.fromkeys(other.group for other in registry.ALL.values())).index(idiom.group)


if __name__ == "__main__":
    FILE.write_text(text())

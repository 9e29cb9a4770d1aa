"""Fusions, several steps in one kernel, that can be switched off by name."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

from detjax.runtime import backends, contexts

FUSIONS_VARIABLE: Final = "DETJAX_WITHOUT_FUSIONS"
"""The environment variable that switches fusions of a process off: their names, separated by commas."""


@dataclasses.dataclass(frozen=True)
class Fusion:
    """Several steps that one kernel computes.

    When a fusion is switched off, its steps are computed separately: either by other operations of the backend, or in
    plain JAX by the portable backend. If no bit of the results changes, no bit of the gradients does.

    Attributes:
        name: its name.
        operations: the operations that have it.
        fuses: the steps that share a kernel.
        steps: the separate steps.
        changes_bits_on: the backends on which bits may change. On all others under contract they do not.
        in_plain_jax: whether the portable backend computes the separate steps.
    """

    name: str
    operations: tuple[str, ...]
    fuses: str
    steps: str
    changes_bits_on: tuple[str, ...] = ()
    in_plain_jax: bool = False

    @property
    def bits(self) -> str:
        """The effect on bits of switching it off, for the table."""
        if not self.changes_bits_on:
            return "do not change"
        kept = ", ".join(name for name in backends.BACKENDS if name not in self.changes_bits_on)
        return f"do not change on {kept}; may change on {', '.join(self.changes_bits_on)}"


def _in_plain_jax(name: str, operations: tuple[str, ...], fuses: str) -> Fusion:
    """Returns a fusion whose separate steps the portable backend computes."""
    steps = "the contract in plain JAX, as on the portable backend"
    return Fusion(name, operations, fuses, steps, changes_bits_on=("hopper", "mma", "tpu"), in_plain_jax=True)


FUSIONS: Final[Mapping[str, Fusion]] = {
    fusion.name: fusion
    for fusion in (
        Fusion(
            "matmul_epilogue",
            ("matmul",),
            "a product, bias, activation, gate, soft cap and residual, in the accumulator",
            "a float32 product for each weight, then one pass for the rest",
            # A TPU kernel and XLA may compute exp and tanh with different instructions.
            changes_bits_on=("tpu",),
        ),
        Fusion(
            "grouped_matmul_epilogue",
            ("grouped_matmul",),
            "products with the weights of experts, bias, activation and gate, in the accumulator",
            "a float32 product for each weight, then one pass for the rest",
            changes_bits_on=("tpu",),
        ),
        Fusion(
            "rms_norm_residual",
            ("rms_norm",),
            "the sum with a residual and its norm",
            "add, then rms_norm",
        ),
        Fusion(
            "rms_norm_codes",
            ("rms_norm", "matmul"),
            "a norm and the codes of its result, for products with fp8 weights and activations in blocks",
            "rms_norm, then the quantization of its rows",
        ),
        Fusion(
            "qk_rope",
            ("qk_rope",),
            "the norms of queries and keys and their rotation; the same for gradients",
            "rms_norm and rope, for queries and for keys",
        ),
        Fusion(
            "qk_rope_append_kv",
            ("qk_rope_append_kv",),
            "qk_rope, and keys and values written to their pages",
            "qk_rope, then a scatter",
        ),
        Fusion(
            "attention_dequantize",
            ("attention",),
            "dequantization of pages when attention reads them",
            "dequantize_kv of all pages, then attention",
        ),
        Fusion(
            "sampling_logprobs",
            ("sampling_logprobs",),
            "temperature and log_softmax of the tokens' logits",
            "one pass over the logits for the temperature, log_softmax, then a gather",
        ),
        Fusion(
            "token_logprobs",
            ("token_logprobs", "token_logprobs_and_gradients"),
            "the head's product, log_softmax and a gather in chunks; the same for gradients, with logits recomputed or "
            "shared",
            "matmul, log_softmax and a gather, each for all tokens",
        ),
        _in_plain_jax(
            "sample",
            ("sample",),
            "noise, temperature, the choice of a token and its logprob, in one pass over the logits",
        ),
        _in_plain_jax(
            "softmax",
            ("softmax", "log_softmax", "logsumexp"),
            "maximum, exponentials and their sum, in one pass over a row",
        ),
        _in_plain_jax(
            "attention",
            ("attention", "ragged_attention"),
            "scores, masks, softmax and the sum of values, and their gradients",
        ),
        _in_plain_jax(
            "gated_delta_rule",
            ("gated_delta_rule",),
            "the products, decays and updates of a chunk, and the state",
        ),
    )
}
"""All fusions by name. A single step of a kernel, such as a norm, is not a fusion."""

_IN_PLAIN_JAX: Final = {
    operation: fusion.name for fusion in FUSIONS.values() if fusion.in_plain_jax for operation in fusion.operations
}


def unfused() -> tuple[str, ...]:
    """Returns the sorted names of switched-off fusions, from `without_fusions` or else `DETJAX_WITHOUT_FUSIONS`.

    Raises:
        ValueError: `DETJAX_WITHOUT_FUSIONS` has an unknown name.
    """
    chosen: tuple[str, ...] | None = contexts.chosen_fusions.value
    if chosen is not None:
        return chosen
    text = os.environ.get(FUSIONS_VARIABLE)
    if not text:
        return ()
    names = [name.strip() for name in text.split(",")]
    return _sorted(names, f"environment variable {FUSIONS_VARIABLE}")


def is_unfused(name: str) -> bool:
    """Returns whether a fusion is switched off. This is False on the stock backend, where XLA decides about fusions."""
    return name in unfused() and backends.backend() != backends.STOCK


def serving_backend(operation: str) -> str:
    """Returns the backend of an operation: the current one, or "portable" if its fusion is switched off in plain
    JAX."""
    name = _IN_PLAIN_JAX.get(operation)
    return "portable" if name is not None and is_unfused(name) else backends.backend()


def unfused_with_other_bits() -> tuple[str, ...]:
    """Returns the names of switched-off fusions that may change bits on the current backend."""
    serving = backends.backend()
    return tuple(name for name in unfused() if serving in FUSIONS[name].changes_bits_on)


@contextlib.contextmanager
def without_fusions(*names: str) -> Iterator[None]:
    """Switches further fusions off within the context; `FUSIONS` names and describes them.

    The choice is part of JAX's compilation cache key, like the backend.

    Raises:
        ValueError: a name is unknown.

    Example:
        >>> x = jnp.linspace(-1.0, 1.0, 8)[None]
        >>> fused = ops.softmax(x)
        >>> with detjax.without_fusions("softmax"):
        ...     separate = ops.softmax(x)
        ...
        >>> bool(jnp.allclose(fused, separate))
        True
    """
    with contexts.chosen_fusions(_sorted((*unfused(), *names), "without_fusions")):
        yield


def _sorted(names: Any, source: str) -> tuple[str, ...]:
    for name in names:
        if name not in FUSIONS:
            raise ValueError(f"{source}: {name!r} is not a fusion; accepted: {', '.join(FUSIONS)}")
    return tuple(sorted(set(names)))

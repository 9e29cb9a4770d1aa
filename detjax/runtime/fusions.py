"""The fusions that can be switched off by name: operations that take several steps in one kernel."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax

from detjax.runtime import backends

FUSIONS_VARIABLE: Final = "DETJAX_WITHOUT_FUSIONS"
"""The environment variable that switches fusions of a process off: their names, with commas between them."""


@dataclasses.dataclass(frozen=True)
class Fusion:
    """Several steps that one kernel takes.

    A fusion that is switched off has its steps taken one after another, in one of two ways: by further operations of
    the backend that serves, or in plain JAX, which is how the portable backend computes the operation. Where no bit of
    the results changes, none of the gradients does.

    Attributes:
        name: what it is switched off by.
        operations: the operations that have it.
        fuses: the steps that share a kernel.
        steps: what takes them otherwise.
        changes_bits_on: the backends on which bits may change. On all others under contract they do not.
        in_plain_jax: whether the portable backend computes the operations instead.
    """

    name: str
    operations: tuple[str, ...]
    fuses: str
    steps: str
    changes_bits_on: tuple[str, ...] = ()
    in_plain_jax: bool = False

    @property
    def bits(self) -> str:
        """What switching it off does to bits, as the table says it."""
        if not self.changes_bits_on:
            return "do not change"
        kept = ", ".join(name for name in backends.BACKENDS if name not in self.changes_bits_on)
        return f"do not change on {kept}; may change on {', '.join(self.changes_bits_on)}"


_KERNELS: Final = ("hopper", "tpu")
_PLAIN: Final = "the contract in plain JAX, as on the portable backend"

FUSIONS: Final[Mapping[str, Fusion]] = {
    fusion.name: fusion
    for fusion in (
        Fusion(
            "matmul_epilogue",
            ("matmul",),
            "a product, bias, activation, gate, soft cap and residual, in the accumulator",
            "a product in float32 for each weight, then one pass over them for all that follows",
            # A TPU's kernel and XLA may compute exp and tanh by other instructions.
            changes_bits_on=("tpu",),
        ),
        Fusion(
            "grouped_matmul_epilogue",
            ("grouped_matmul",),
            "products with the weights of experts, bias, activation and gate, in the accumulator",
            "a product in float32 for each weight, then one pass over them for all that follows",
            changes_bits_on=("tpu",),
        ),
        Fusion(
            "rms_norm_residual",
            ("rms_norm",),
            "the sum with a residual and its norm",
            "add, then rms_norm",
        ),
        Fusion(
            "qk_rope",
            ("qk_rope",),
            "the norms of queries and keys and their rotation; likewise its gradient",
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
            "quantized pages turned into numbers where attention reads them",
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
            "the head's product, log_softmax and a gather in chunks; likewise the gradients, for which logits are "
            "computed again, or at once",
            "matmul, log_softmax and a gather, each for all tokens",
        ),
        Fusion(
            "sample",
            ("sample",),
            "noise, temperature, the choice of a token and its logprob, in one pass over the logits",
            _PLAIN,
            _KERNELS,
            in_plain_jax=True,
        ),
        Fusion(
            "softmax",
            ("softmax", "log_softmax", "logsumexp"),
            "largest number, exponentials and their sum, in one pass over a row",
            _PLAIN,
            _KERNELS,
            in_plain_jax=True,
        ),
        Fusion(
            "attention",
            ("attention", "ragged_attention"),
            "scores, masks, softmax and the sum of values, and the gradients of all",
            _PLAIN,
            _KERNELS,
            in_plain_jax=True,
        ),
        Fusion(
            "gated_delta_rule",
            ("gated_delta_rule",),
            "the products, decays and updates of a chunk, and the state",
            _PLAIN,
            _KERNELS,
            in_plain_jax=True,
        ),
    )
}
"""All fusions by name. What a kernel does in one step, such as a norm, is no fusion."""

chosen_fusions = jax.make_user_context(None)

_IN_PLAIN_JAX: Final = {
    operation: fusion.name for fusion in FUSIONS.values() if fusion.in_plain_jax for operation in fusion.operations
}


def separated() -> tuple[str, ...]:
    """Returns the names of the fusions that are switched off, sorted.

    They are those of `without_fusions`, else those of `DETJAX_WITHOUT_FUSIONS`.

    Raises:
        ValueError: `DETJAX_WITHOUT_FUSIONS` names no fusion.
    """
    chosen: tuple[str, ...] | None = chosen_fusions.value
    if chosen is not None:
        return chosen
    text = os.environ.get(FUSIONS_VARIABLE)
    if not text:
        return ()
    names = [name.strip() for name in text.split(",")]
    return _sorted(names, f"environment variable {FUSIONS_VARIABLE}")


def is_unfused(name: str) -> bool:
    """Returns whether a fusion is switched off. On the stock backend none is, as XLA fuses there what it likes."""
    return name in separated() and backends.backend() != backends.STOCK


def serving_backend(operation: str) -> str:
    """Returns the backend that computes an operation: the one that serves, unless its fusion is switched off."""
    name = _IN_PLAIN_JAX.get(operation)
    return "portable" if name is not None and is_unfused(name) else backends.backend()


def unfused_with_other_bits() -> tuple[str, ...]:
    """Returns the names of the fusions that are switched off and whose bits may thereby change where we are."""
    serving = backends.backend()
    return tuple(name for name in separated() if serving in FUSIONS[name].changes_bits_on)


@contextlib.contextmanager
def without_fusions(*names: str) -> Iterator[None]:
    """Switches fusions off within the context, beside those that are off already; `FUSIONS` names and describes them.

    The choice is part of JAX's compilation cache key, as the backend is.

    Raises:
        ValueError: no fusion has one of these names.

    Example:
        >>> x = jnp.linspace(-1.0, 1.0, 8)[None]
        >>> together = ops.softmax(x)
        >>> with detjax.without_fusions("softmax"):
        ...     apart = ops.softmax(x)
        ...
        >>> bool(jnp.allclose(together, apart))
        True
    """
    with chosen_fusions(_sorted((*separated(), *names), "without_fusions")):
        yield


def _sorted(names: Any, source: str) -> tuple[str, ...]:
    for name in names:
        if name not in FUSIONS:
            raise ValueError(f"{source}: {name!r} is no fusion of this release; accepted: {', '.join(FUSIONS)}")
    return tuple(sorted(set(names)))

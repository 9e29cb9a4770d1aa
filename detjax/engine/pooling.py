"""Pooling in place of generation: the options of a request, and the results of a step."""

import dataclasses
from typing import Any, Literal, NamedTuple, get_args

import jax
import numpy as np
from jaxtyping import Float32

from detjax.engine.field_error import FieldError
from detjax.models import DecoderConfig
from detjax.models.parts.pooling import PooledRows, PoolingOptions

type Vectors = Float32[np.ndarray, "W"] | Float32[np.ndarray, "T W"]
"""The result of a request: one vector, or one for each token of the prompt."""
Task = Literal["embed", "classify", "token_embed", "token_classify"]
"""The result of a model that pools: an embedding or scores of classes, of the prompt or of each of its tokens."""


@dataclasses.dataclass(frozen=True)
class Pooling:
    """The options of a request to a model that pools.

    Attributes:
        task: the result. Default: the model's, for the whole prompt.
        is_scored: whether an embedding is normalized, or logits become scores. Default: the checkpoint says so.
        dimensions: the length of the embedding, for models whose embeddings may be cut. Default: all.

    Example:
        >>> detjax.engine.Pooling("embed", dimensions=256).dimensions
        256
    """

    task: Task | None = None
    is_scored: bool | None = None
    dimensions: int | None = None

    @property
    def is_of_tokens(self) -> bool:
        """True if each token of the prompt has a result."""
        return self.task in ("token_embed", "token_classify")

    def resolved(self, name: str, config: DecoderConfig) -> "Pooling":
        """Returns the options with all defaults filled in; `name` is the request's name in errors.

        Raises:
            ValueError: the model does not have such results.
        """
        options = config.pooling
        if options is None:
            raise FieldError(f"{name} asks for pooling and the model generates; accepted: one that pools", "pooling")
        tasks = tasks_of(options)
        if self.task not in (None, *tasks):
            raise FieldError(f"{name}: task is {self.task!r}; accepted: {', '.join(tasks)}, as the model has", "task")
        if self.dimensions is not None:
            self._check_dimensions(name, options, config.hidden_size)
        is_scored = options.normalized if options.gives_embeddings else True
        return Pooling(
            tasks[0] if self.task is None else self.task,
            is_scored if self.is_scored is None else self.is_scored,
            config.hidden_size if self.dimensions is None else self.dimensions,
        )

    def _check_dimensions(self, name: str, options: PoolingOptions, width: int) -> None:
        known, given = options.dimensions, self.dimensions
        assert given is not None
        if not options.gives_embeddings or (known is None and given != width):
            accepted = "null" if not options.gives_embeddings else f"{width}, as embeddings of this model are not cut"
        elif known and given not in (*known, width):
            accepted = ", ".join(map(str, known))
        elif not 1 <= given <= width:
            accepted = f"1 to {width}"
        else:
            return
        raise FieldError(f"{name}: dimensions is {given}; accepted: {accepted}", "dimensions")


def tasks_of(options: PoolingOptions) -> tuple[Task, ...]:
    """Returns the tasks of a model, the default one first."""
    ends = "embed" if options.gives_embeddings else "classify"
    return tuple(task for task in get_args(Task) if task.endswith(ends))


def needs_all_rows(pooling: Pooling, options: PoolingOptions) -> bool:
    """Returns whether a result depends on the hidden states of all tokens, so that cached pages do not help."""
    return pooling.is_of_tokens or options.method != "last"


def pooled_rows(wanted: "list[Pooling | None]", count: int) -> PooledRows:
    """Returns the options of `count` results on the host, given the options of the first ones."""
    is_scored, dimensions = np.zeros(count, bool), np.zeros(count, np.int32)
    for row, pooling in enumerate(wanted):
        if pooling is not None:
            is_scored[row], dimensions[row] = bool(pooling.is_scored), pooling.dimensions or 0
    return PooledRows(is_scored, dimensions)


class PooledBatch(NamedTuple):
    """The results of some rows, on the device and then on the host."""

    rows: Any

    def start_copy(self) -> "PooledBatch":
        """Starts copying the results to the host, and returns them."""
        self.rows.copy_to_host_async()
        return self

    def read(self) -> "PooledBatch":
        """Waits for the results and returns them on the host."""
        return PooledBatch(np.asarray(jax.device_get(self.rows)))

    def at(self, row: int, pooling: Pooling) -> Float32[np.ndarray, "W"]:
        """Returns a row of the result of `read`."""
        width = pooling.dimensions if pooling.task in ("embed", "token_embed") else None
        return self.rows[row, :width].copy()

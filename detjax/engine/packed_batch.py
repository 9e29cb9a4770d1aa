"""The batch of a step on the device: what changes with each step is in two arrays."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from detjax.engine.batch import BatchShape, DraftedRows, StepBatch
from detjax.engine.packed import Packed
from detjax.models.adapters.pool import SlotArrays
from detjax.models.decoder import ImageRows
from detjax.operands.kv_pages import Queries
from detjax.operands.pytrees import array_dataclass
from detjax.operands.sampling_arrays import Arrays, LogitAdjustments, SamplingArrays


class LayerArrays(NamedTuple):
    """The arrays of a `StepBatch` that the layers read, without images and adapters."""

    token: Int32[Arrays, "N"]
    held: Int32[Arrays, "decodes"]
    queries: Queries
    last_row: Int32[Arrays, "R"]
    steps: Int32[Arrays, "decodes"]


class RowArrays(NamedTuple):
    """The arrays of a `StepBatch` that sampling reads, without adjustments. Layers of all sizes share their shapes."""

    slot: Int32[Arrays, "R"]
    sampling: SamplingArrays
    drafted: DraftedRows | None


@array_dataclass
@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """The arrays of a step, as programs take them. Fields that are not named here are as in `StepBatch`.

    Attributes:
        layers: what the layers read.
        rows: what sampling reads; None for the layers.
        adjustments: large, and the same as long as a step has the same sequences.
        adapters: not among `layers`, which have the same layout with and without adapters: a drafter's model has none.
        is_text: whether programs get nothing but text: neither slots nor coordinates of the queries.
    """

    layers: Packed[LayerArrays]
    rows: Packed[RowArrays] | None = None
    adjustments: Packed[LogitAdjustments] | None = None
    adapters: Packed[Int32[Arrays, "requests"]] | None = None
    images: ImageRows | None = None
    pool: SlotArrays | None = None
    is_text: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def on_host(cls, batch: StepBatch) -> "PackedBatch":
        """Packs a batch on the host."""
        # Steps and runs have one layout.
        steps = np.zeros(batch.held.shape, np.int32) if batch.steps is None else batch.steps
        layers = LayerArrays(batch.token, batch.held, batch.queries, batch.last_row, steps)
        rows = RowArrays(batch.slot, batch.sampling, batch.drafted)
        adjustments, adapters = batch.adjustments, batch.adapters
        return cls(
            layers=Packed.on_host(layers),
            rows=Packed.on_host(rows),
            adjustments=None if adjustments is None else Packed.on_host(adjustments),
            adapters=None if adapters is None else Packed.on_host(adapters),
            images=batch.images,
            pool=batch.pool,
        )

    @property
    def shape(self) -> BatchShape:
        """The shape that the step's programs are compiled for."""
        return BatchShape.from_arrays(self.layers.layout.tree)

    def for_layers(self) -> "PackedBatch":
        """Returns the batch without what only sampling needs: one program of the layers serves all kinds of it."""
        return dataclasses.replace(self, rows=None, adjustments=None)

    def for_runs(self) -> "PackedBatch":
        """Returns the batch without adjustments, which no sequence of a run has."""
        return dataclasses.replace(self, adjustments=None)

    def for_text(self) -> "PackedBatch":
        """Returns the batch for a smaller model without adjustments, adapters, images and states in slots."""
        return PackedBatch(self.layers, self.rows, is_text=True)

    def unpacked(self) -> StepBatch:
        """Returns the batch of arrays, for tracing in a program. Without `rows`, it has none for sampling."""
        return self._batch(lambda part: part.unpacked())

    def read(self) -> StepBatch:
        """Waits for the batch and returns it on the host."""
        return self._batch(lambda part: part.read())

    def _batch(self, read: Callable[[Packed[Any]], Any]) -> StepBatch:
        layers = read(self.layers)
        queries = layers.queries
        if self.is_text:
            queries = dataclasses.replace(queries, slots=None, coordinates=None)
        nothing: Any = None
        adjustments, adapters = (None if x is None else read(x) for x in (self.adjustments, self.adapters))
        rows = RowArrays(nothing, nothing, None) if self.rows is None else read(self.rows)
        return StepBatch(
            token=layers.token,
            held=layers.held,
            queries=queries,
            last_row=layers.last_row,
            slot=rows.slot,
            sampling=rows.sampling,
            adjustments=adjustments,
            images=self.images,
            adapters=adapters,
            pool=self.pool,
            steps=layers.steps,
            drafted=rows.drafted,
        )


type Batch = StepBatch | PackedBatch
"""The arrays of a step as programs take them, each by itself or packed."""

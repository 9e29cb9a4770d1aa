"""Makes functions of a batch, whoever wrote them, compute each row independently of the batch.

Read `transform` first, then `places` and `batch_axis`, which trace the rows through a program, then
`interpreter`, which runs it.
"""

from detjax.invariant.refusals import TracedForBatchWarning as TracedForBatchWarning
from detjax.invariant.refusals import UnsafeFunction as UnsafeFunction
from detjax.invariant.refusals import UnsafeFunctionWarning as UnsafeFunctionWarning
from detjax.invariant.transform import batch_invariant as batch_invariant

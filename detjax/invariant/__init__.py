"""Functions of a batch whose rows do not depend on the batch, whoever wrote them."""

from detjax.invariant.refusals import TracedForBatchWarning as TracedForBatchWarning
from detjax.invariant.refusals import UnsafeFunction as UnsafeFunction
from detjax.invariant.refusals import UnsafeFunctionWarning as UnsafeFunctionWarning
from detjax.invariant.transform import batch_invariant as batch_invariant

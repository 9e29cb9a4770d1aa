"""Matrix multiplication on Hopper GPUs: `plan.py` chooses the schedule, `kernel.py` runs it."""

from detjax.pallas.hopper.matmul.kernel import backward as backward
from detjax.pallas.hopper.matmul.kernel import forward as forward

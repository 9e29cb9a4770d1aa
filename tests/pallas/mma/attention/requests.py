"""Requests whose attention the kernel on `mma.sync` computes."""

import functools
from typing import Any

import numpy as np

import detjax
from detjax.pallas.mma import attention as mma_attention
from tests.support.attention_requests import Requests


class MmaRequests(Requests):
    """Requests whose attention the kernel on `mma.sync` computes."""

    kernels = mma_attention

    def decode(self, start: np.ndarray, tokens: int, schedule: Any = None) -> list[np.ndarray]:
        forward = functools.partial(
            mma_attention.forward, masking=self.masking, with_normalizers=False, schedule=schedule
        )
        return self.rows_of_requests(detjax.jit(forward)(self.operands(start, tokens))[0], start)

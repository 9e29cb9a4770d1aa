"""Backends' matrix products as functions of arrays."""

from collections.abc import Callable
from typing import Any

from detjax.operands.products import NO_SUMS, GroupedOperands, MatmulOperands


def matmul_call(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A backend's `forward` of x, w, bias and residual."""
    return lambda *arrays: forward(MatmulOperands(*arrays), **options)


def grouped_matmul_call(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A backend's `forward` of x, w, bias and the groups' sizes."""
    return lambda *arrays: forward(GroupedOperands(*arrays), **options)


def matmul_gradients(backward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A backend's `backward` of x, w, bias, the result's gradient, and sums."""
    return lambda x, w, bias, dy, *sums: backward(MatmulOperands(x, w, bias), dy, sums or NO_SUMS, **options)


def grouped_matmul_gradients(backward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A backend's `backward` of the operands, the result's gradient, and sums."""
    return lambda *arrays: backward(GroupedOperands(*arrays[:5]), arrays[5], arrays[6:] or NO_SUMS, **options)

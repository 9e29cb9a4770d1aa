"""The error of attention and of its rivals against float64."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import detjax
from benchmarks import rivals
from benchmarks.rivals import CUDNN, OURS, TOKAMAX
from benchmarks.studies.attention import inputs
from benchmarks.studies.attention.cases import BF16, Sizes, prefill_case
from benchmarks.studies.attention.programs import paged_attention
from detjax import ops
from detjax.bench.failures import reason


def measure_accuracy(sizes: Sizes) -> dict[str, Any]:
    """Returns the relative error, by Frobenius norm, of a causal prefill."""
    case = prefill_case(sizes, sizes.accuracy_tokens, 1, sizes.head_dim)
    q, (k, v) = inputs.query_array(case), inputs.contiguous_sets(case)[0]
    want = exact(*(np.asarray(x[0], np.float64) for x in (q, k, v)))
    paged = q, ops.in_pages(k), ops.in_pages(v), inputs.queries_of(case)
    runs: dict[str, Callable[[], jax.Array]] = {
        OURS: lambda: detjax.jit(paged_attention)(*paged),
        CUDNN: lambda: jax.jit(rivals.cudnn(True))(q, k, v),
        TOKAMAX: lambda: jax.jit(rivals.tokamax(True))(q, k, v),
    }
    errors: dict[str, float] = {}
    missing: dict[str, str] = {}
    for name, run in runs.items():
        try:
            errors[name] = relative_error(np.asarray(run()[0], np.float64), want)
        except Exception as failure:
            missing[name] = reason(failure)
    errors["rounding of the exact result"] = relative_error(np.asarray(want.astype(BF16), np.float64), want)
    return case.fields() | {"relative_error": errors, "missing": missing}


def relative_error(computed: np.ndarray, exact: np.ndarray) -> float:
    """Returns the norm of the error over the norm of the exact numbers."""
    return float(np.linalg.norm(computed - exact) / np.linalg.norm(exact))


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Returns causal attention [T, H, K] of one request, in float64."""
    tokens, heads, width = q.shape
    group = heads // k.shape[1]
    hidden = np.triu(np.ones((tokens, tokens), bool), 1)
    out = np.empty_like(q)
    for head in range(heads):
        s = q[:, head] @ k[:, head // group].T / math.sqrt(width)
        s[hidden] = -np.inf
        p = np.exp(s - s.max(axis=1, keepdims=True))
        out[:, head] = p / p.sum(axis=1, keepdims=True) @ v[:, head // group]
    return out

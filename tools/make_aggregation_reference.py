"""Writes `tests/fixtures/aggregation.npz`: sums of experts' results by torch, in the orders of transformers.

    pip install torch==2.13.0        (Python 3.11)
    python tools/make_aggregation_reference.py

detjax itself does not need torch: its tests read the file. It has experts' results, weights and experts' ids in
descending order of weights, and the sums of transformers 5.23's eager and grouped implementations, with weights in
float32 and rounded to bfloat16. bfloat16 arrays are stored as uint16.
"""

import sys
from pathlib import Path

try:
    import numpy as np
    import torch
except ImportError as error:
    sys.exit(f"make_aggregation_reference: {error.name} is not installed for {sys.executable}; install torch 2.13.0")

TOKENS, EXPERTS, CHOSEN, WIDTH = 48, 16, 8, 40
FILE = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "aggregation.npz"


def eager(y: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Adds experts in sequence, each to its tokens' sums."""
    total = torch.zeros(len(y), y.shape[-1], dtype=y.dtype)
    for expert in range(EXPERTS):
        token, rank = torch.where(ids == expert)
        total.index_add_(0, token, (y[token, rank] * weights[token, rank, None]).to(y.dtype))
    return total


def grouped(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Adds all experts of a token at once."""
    return (y * weights[..., None]).sum(dim=1).to(y.dtype)


def bits(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.uint16).numpy()


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(TOKENS, CHOSEN, WIDTH, generator=generator).to(torch.bfloat16)
    scores = torch.softmax(2 * torch.randn(TOKENS, EXPERTS, generator=generator), dim=-1)
    weights, ids = torch.topk(scores, CHOSEN, dim=-1)
    narrow = weights.to(torch.bfloat16)
    np.savez(
        FILE,
        y=bits(y),
        weights=weights.numpy(),
        ids=ids.numpy().astype(np.int32),
        hf_eager=bits(eager(y, ids, narrow)),
        hf_eager_float32=bits(eager(y, ids, weights)),
        hf_grouped=bits(grouped(y, narrow)),
        finalize=bits(grouped(y, weights)),
    )
    print(f"{FILE}: {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

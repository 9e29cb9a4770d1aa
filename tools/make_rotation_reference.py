"""Writes `tests/fixtures/rotation.npz`: partially rotated heads by transformers, with YaRN's frequencies.

    pip install torch==2.13.0 transformers==5.23.0        (Python 3.11)
    python tools/make_rotation_reference.py

detjax itself needs neither: its tests read the file. It has heads in float32, positions, and for each of `CASES` the
heads rotated by Qwen3-Next's code in transformers.
"""

import sys
from pathlib import Path

try:
    import numpy as np
    import torch
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
except ImportError as error:
    sys.exit(f"make_rotation_reference: {error.name} is not installed for {sys.executable}; see the file's text")

FILE = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "rotation.npz"
HEAD_DIM, TURNING, POSITIONS = 48, 24, (0, 1, 2, 31, 32, 100, 1000)
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64}
CASES = {
    "yarn": YARN,
    "fractional_ends": YARN | {"truncate": False, "beta_fast": 4.0},
    "factor": YARN | {"attention_factor": 1.25},
    "mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
}


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(len(POSITIONS), 2, HEAD_DIM, generator=generator)
    arrays = {"heads": heads.numpy(), "positions": np.array(POSITIONS, np.int32)}
    for name, parameters in CASES.items():
        share = {"partial_rotary_factor": TURNING / HEAD_DIM}
        config = Qwen3NextConfig(head_dim=HEAD_DIM, max_position_embeddings=512, rope_parameters=parameters | share)
        cos, sin = qwen3_next.Qwen3NextRotaryEmbedding(config)(heads, torch.tensor([POSITIONS]))
        q, _ = qwen3_next.apply_rotary_pos_emb(heads[None], heads[None], cos, sin, unsqueeze_dim=2)
        arrays[name] = q[0].numpy()
    np.savez(FILE, **arrays)
    print(f"{FILE}: {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

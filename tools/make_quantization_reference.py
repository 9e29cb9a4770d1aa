"""Writes `tests/fixtures/quantization.npz`: quantized weights, dequantized by other libraries.

    pip install torch==2.13.0 transformers==5.23.0 compressed-tensors==0.15.0        (Python 3.11)
    python tools/make_quantization_reference.py

detjax itself needs none of them: its tests read the file. transformers dequantizes blocks of fp8: by its loader if the
blocks fill the matrix, and by its backward pass if the last ones are smaller. compressed-tensors, which transformers
uses, packs and dequantizes groups of int4. bfloat16 arrays are stored as uint16.
"""

import sys
from pathlib import Path

try:
    import numpy as np
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from transformers.integrations import finegrained_fp8
except ImportError as error:
    sys.exit(f"make_quantization_reference: {error.name} is not installed for {sys.executable}; see the file's text")

FILE = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "quantization.npz"


def bits(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.uint16).numpy()


def fp8(generator: torch.Generator) -> dict[str, np.ndarray]:
    arrays = {}
    for name, shape, block in (("whole", (24, 40), 8), ("experts", (3, 16, 24), 8), ("ragged", (21, 37), 8)):
        rows, columns = shape[-2:]
        grid = (*shape[:-2], -(-rows // block), -(-columns // block))
        codes = (100 * torch.randn(shape, generator=generator)).to(torch.float8_e4m3fn)
        scales = torch.rand(grid, generator=generator) + 0.01
        if name == "ragged":
            result = finegrained_fp8._dequantize_fp8_weight(codes, scales, [block, block], torch.float32)
            arrays["fp8_ragged_values"] = result.numpy()
        else:
            result = finegrained_fp8.Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
            arrays[f"fp8_{name}_values"] = bits(result)
        arrays |= {f"fp8_{name}_codes": codes.view(torch.uint8).numpy(), f"fp8_{name}_scales": scales.numpy()}
    return arrays


def int4(generator: torch.Generator) -> dict[str, np.ndarray]:
    arrays = {}
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    for name, shape, group in (("whole", (6, 96), 32), ("ragged", (5, 36), 12)):
        weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
        weight = torch.randn(shape, generator=generator).to(torch.bfloat16)
        scale = (weight.float().unflatten(-1, (-1, group)).abs().amax(-1) / 7.5).to(torch.bfloat16)
        packed = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        arrays |= {
            f"int4_{name}_codes": packed["weight_packed"].numpy(),
            f"int4_{name}_scales": bits(packed["weight_scale"]),
            f"int4_{name}_shape": packed["weight_shape"].numpy(),
            f"int4_{name}_values": bits(compressor.decompress(packed, scheme)["weight"].to(torch.bfloat16)),
        }
    return arrays


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    np.savez(FILE, **fp8(generator), **int4(generator))
    print(f"{FILE}: {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

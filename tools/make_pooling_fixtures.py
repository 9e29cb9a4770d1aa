"""Writes the tiny checkpoints of `tests/fixtures/pooling/`, models that pool, each with the outputs of transformers.

    pip install torch==2.13.0 transformers==5.24.0        (Python 3.11)
    python tools/make_pooling_fixtures.py

detjax itself needs none of them: tests read this tool's files. A fixture's folder has its `config.json` and, for
embeddings, the files of Sentence Transformers and of a tokenizer, which this tool reads and never writes. It adds
random weights and `reference.npz`, in float32 from the stored weights:

    tokens    int32 [T]      random
    hidden    float32 [T, D] the normalized hidden states of the last layer, of a model of embeddings
    logits    float32 [T, L] the logits of the classes at each token, of the other models

On one kind of CPU, with the versions above, the files come out the same byte for byte.
"""

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import safetensors.torch
import torch
import transformers

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "pooling"
TOKENS = 163
"""More than one block of 128 keys."""
MAX_FLOAT64_DIFFERENCE = 1e-4
PROCESS_REWARD = "Qwen2ForProcessRewardModel"
"""A class that transformers does not have: a head of two layers on Qwen2."""


class WithHead(torch.nn.Module):
    """A model without a head, and the head of a published reward model."""

    def __init__(self, model: torch.nn.Module, classes: int) -> None:
        super().__init__()
        width = model.config.hidden_size
        self.model = model
        self.score = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, classes)
        )


def made(raw: dict) -> torch.nn.Module:
    """Returns the network of a `config.json` in float32."""
    config = transformers.CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    (architecture,) = raw["architectures"]
    if architecture.endswith("ForSequenceClassification"):
        return transformers.AutoModelForSequenceClassification.from_config(config, **options).eval()
    model = transformers.AutoModel.from_config(config, **options)
    return (WithHead(model, 2) if architecture == PROCESS_REWARD else model).eval()


def fill(model: torch.nn.Module, stored: torch.dtype, generator: torch.Generator) -> None:
    """Draws every parameter, rounded to the dtype that it will be stored in."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            value = 1 + 0.25 * noise
        elif name.endswith("bias"):
            value = 0.4 * noise
        elif name.endswith("embed_tokens.weight"):
            value = 0.25 * noise
        else:
            gain = 1.8 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.3
            value = gain * parameter.shape[-1] ** -0.5 * noise
        parameter.copy_(value.to(stored))


def results(model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the arrays of `reference.npz` but the tokens."""
    if not hasattr(model, "score"):
        return {"hidden": model(tokens[None], use_cache=False).last_hidden_state[0]}
    hidden = model.model(tokens[None], use_cache=False).last_hidden_state
    logits = model.score(hidden)[0]
    if not isinstance(model, WithHead):
        pooled = model(tokens[None], use_cache=False).logits[0]
        assert torch.allclose(pooled, logits[-1], atol=1e-6), "transformers takes the last token"
    return {"logits": logits}


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    for seed, folder in enumerate(sorted(path for path in FIXTURES.iterdir() if path.is_dir())):
        raw = json.loads((folder / "config.json").read_text())
        generator = torch.Generator().manual_seed(seed)
        stored, model = getattr(torch, raw["dtype"]), made(raw)
        fill(model, stored, generator)
        tokens = torch.randint(0, raw["vocab_size"], (TOKENS,), generator=generator)
        arrays = results(model, tokens)
        exact = results(model.double(), tokens)
        for name, x in arrays.items():
            if (difference := (exact[name] - x).abs().max().item()) > MAX_FLOAT64_DIFFERENCE:
                sys.exit(f"{folder.name}: float64 moves {name} by {difference:.1e}")
        tensors = {name: x.to(stored).contiguous() for name, x in model.state_dict().items()}
        safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        as_numpy = {name: x.float().numpy() for name, x in arrays.items()}
        np.savez_compressed(folder / "reference.npz", tokens=tokens.numpy().astype(np.int32), **as_numpy)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{folder.name}: {size:,} bytes")


if __name__ == "__main__":
    main()

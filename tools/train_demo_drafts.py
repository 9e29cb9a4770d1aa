"""Trains the two drafts of the demo's checkpoint on texts that the checkpoint writes itself: an EAGLE-3 head and a
smaller model.

    python tools/train_demo_drafts.py detjax/demo/checkpoint --eagle3 detjax/demo/eagle3 --model detjax/demo/draft_model

The head is trained as in EAGLE-3 (Li et al. 2025): it sees the checkpoint's hidden states for its first guess and its
own for further ones, and learns the checkpoint's probabilities. The smaller model learns them too. Every batch of texts
is new, so neither can learn texts by heart.

Needs torch and transformers. Takes about 15 minutes on a CPU core. The seed is fixed, and torch's CPU operations repeat
on the same kind of machine.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

try:
    import torch
    import torch.nn.functional as F
    from safetensors.torch import save_file
    from torch import nn
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
except ImportError as error:
    sys.exit(f"train_demo_drafts: {error}; install the packages that it needs: pip install torch transformers")

SEED = 0
WINDOW, BATCH = 128, 16
LEARNING_RATE, WARMUP = 3e-3, 20
TEXTS, PASSES = 256, 2
"""Texts that are written at a time, and how often each is read."""
GUESSES, DECAY = 3, 0.8
"""Guesses that the head learns to chain, and the weight of each one's loss relative to the guess before it."""
DRAFT_VOCABULARY = 448
"""The number of tokens that the head can guess, the most frequent ones in the first texts."""
HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
MODEL = {
    "hidden_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 96,
    "tie_word_embeddings": True,
}
MAX_BYTES = 1_000_000


@torch.no_grad()
def written(target: Qwen3ForCausalLM, count: int) -> torch.Tensor:
    """Returns texts of `WINDOW` tokens that the checkpoint samples at temperature 1 from the beginning of a passage."""
    start = torch.full((count, 1), target.config.eos_token_id)
    options = {"max_new_tokens": WINDOW - 1, "min_new_tokens": WINDOW - 1, "do_sample": True, "top_k": 0, "top_p": 1.0}
    return target.generate(start, attention_mask=torch.ones_like(start), **options)


class Head(nn.Module):
    """An EAGLE-3 head whose parameters have the names of its checkpoint."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner, heads, kv_heads, columns = (
            HEAD[key] for key in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        )

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        def norm() -> LlamaRMSNorm:
            return LlamaRMSNorm(width, eps=HEAD["rms_norm_eps"])

        attention = {"q_proj": linear(2 * width, heads * columns), "o_proj": linear(heads * columns, width)}
        attention |= {name: linear(2 * width, kv_heads * columns) for name in ("k_proj", "v_proj")}
        mlp = {name: linear(width, inner) for name in ("gate_proj", "up_proj")} | {"down_proj": linear(inner, width)}
        norms = {name: norm() for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
        self.fc, self.norm, self.lm_head = linear(3 * width, width), norm(), linear(width, DRAFT_VOCABULARY)
        self.midlayer = nn.ModuleDict({"self_attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp), **norms})

    def guesses(self, features: torch.Tensor, embedded: torch.Tensor) -> list[torch.Tensor]:
        """Returns the logits of each guess of a chain; row `j` of each guesses the token after `embedded[:, j]`.

        In the chain's first guess, row `j` sees features `j`. In guess `s`, it sees the hidden states of row `j - 1`
        in the guess before, and attends to rows up to `j - s` of the first guess and to one row of each later guess.
        """
        layer, hidden = self.midlayer, self.fc(features)
        keys, values, logits = [], [], []
        for guess in range(GUESSES):
            if guess:
                hidden = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
            x = torch.cat([layer["input_layernorm"](embedded), layer["hidden_norm"](hidden)], dim=-1)
            attention = layer["self_attn"]
            q, k, v = (self._by_head(attention[name](x)) for name in ("q_proj", "k_proj", "v_proj"))
            q, k = self._rotated(q), self._rotated(k)
            repeats = q.shape[1] // k.shape[1]
            keys.append(k.repeat_interleave(repeats, 1))
            values.append(v.repeat_interleave(repeats, 1))
            o = self._attended(q, keys, values).transpose(1, 2).flatten(2)
            hidden = hidden + attention["o_proj"](o)
            y, mlp = layer["post_attention_layernorm"](hidden), layer["mlp"]
            hidden = hidden + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))
            logits.append(self.lm_head(self.norm(hidden)))
        return logits

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, HEAD["head_dim"])).transpose(1, 2)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        columns = HEAD["head_dim"]
        angles = torch.arange(x.shape[2])[:, None] * HEAD["rope_theta"] ** (-torch.arange(0, columns, 2) / columns)
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _attended(self, q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
        guess, rows = len(keys) - 1, torch.arange(q.shape[2])
        scores = q @ keys[0].transpose(-1, -2)
        scores = scores.masked_fill(rows[None] > rows[:, None] - guess, -1e9)
        shifts = [guess - number for number in range(1, guess + 1)]
        later = [(q * _shifted(k, shift)).sum(-1, keepdim=True) for k, shift in zip(keys[1:], shifts, strict=True)]
        shares = (torch.cat([scores, *later], dim=-1) * HEAD["head_dim"] ** -0.5).softmax(-1)
        o = shares[..., : len(rows)] @ values[0]
        for number, (v, shift) in enumerate(zip(values[1:], shifts, strict=True)):
            o = o + shares[..., len(rows) + number, None] * _shifted(v, shift)
        return o


def _shifted(x: torch.Tensor, shift: int) -> torch.Tensor:
    """Returns rows such that row `j` is row `j - shift` of `x`."""
    return F.pad(x, (0, 0, shift, 0))[:, :, : x.shape[2]]


def head_loss(head: Head, target: Qwen3ForCausalLM, tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns the weighted mean cross entropy of the guesses with the checkpoint's probabilities."""
    with torch.no_grad():
        output = target(input_ids=tokens, output_hidden_states=True, use_cache=False)
        layers = len(output.hidden_states) - 1
        depths = sorted((2, layers // 2, layers - 3))
        features = torch.cat([output.hidden_states[depth] for depth in depths], dim=-1)[:, :-1]
        embedded = target.model.embed_tokens(tokens[:, 1:])
        wanted = output.logits.softmax(-1)[:, 1:][..., ids]
    loss = torch.zeros(())
    for guess, logits in enumerate(head.guesses(features, embedded)):
        # The first rows of a later guess have no row before them to chain.
        entropy = -(wanted * logits.log_softmax(-1)).sum(-1)[:, guess:]
        loss = loss + DECAY**guess * entropy.mean()
    return loss


def model_loss(model: Qwen3ForCausalLM, target: Qwen3ForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross entropy of the smaller model with the checkpoint's probabilities."""
    with torch.no_grad():
        wanted = target(input_ids=tokens, use_cache=False).logits.softmax(-1)
    return -(wanted * model(input_ids=tokens, use_cache=False).logits.log_softmax(-1)).sum(-1).mean()


def fit(target: Qwen3ForCausalLM, head: Head, model: Qwen3ForCausalLM, ids: torch.Tensor, steps: int) -> None:
    """Trains the head and the smaller model together, on the same texts."""
    parameters = [{"params": list(part.parameters()), "weight_decay": 0.01} for part in (head, model)]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps, pct_start=min(0.5, WARMUP / steps)
    )
    started = time.monotonic()
    unread: list[torch.Tensor] = []
    for step in range(steps):
        if not unread:
            texts = written(target, TEXTS)
            unread = [part for _ in range(PASSES) for part in texts[torch.randperm(TEXTS)].split(BATCH)]
        tokens = unread.pop()
        losses = head_loss(head, target, tokens, ids), model_loss(model, target, tokens)
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        for part in (head, model):
            torch.nn.utils.clip_grad_norm_(part.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step + 1 == steps:
            head_entropy, entropy = (loss.item() for loss in losses)
            seconds = time.monotonic() - started
            print(
                f"step {step + 1} of {steps}: head {head_entropy:.3f}, model {entropy:.3f}, {seconds:.0f} s", flush=True
            )


def save_head(head: Head, target: Qwen3ForCausalLM, ids: torch.Tensor, out: Path) -> None:
    """Writes the head's checkpoint in bfloat16, without an embedding: the target's serves."""
    vocabulary, width = target.config.vocab_size, target.config.hidden_size
    is_drafted = torch.zeros(vocabulary, dtype=torch.bool)
    is_drafted[ids] = True
    tensors = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in head.state_dict().items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors | {"d2t": ids - torch.arange(len(ids)), "t2d": is_drafted}, out / "model.safetensors")
    (out / "model.safetensors").chmod(0o644)
    config = HEAD | {
        "hidden_size": width,
        "vocab_size": vocabulary,
        "draft_vocab_size": len(ids),
        "max_position_embeddings": target.config.max_position_embeddings,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def save_model(model: Qwen3ForCausalLM, checkpoint: Path, out: Path) -> None:
    """Writes the smaller model in bfloat16, with the configuration files and the tokenizer of the checkpoint."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(checkpoint / name, out / name)
    tensors = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    config = json.loads((checkpoint / "config.json").read_text())
    config |= MODEL | {"layer_types": ["full_attention"] * MODEL["num_hidden_layers"]}
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Trains both drafts and writes their checkpoints."""
    parser = argparse.ArgumentParser(description="Train the drafts of the demo's checkpoint.")
    parser.add_argument("checkpoint", type=Path, help="the checkpoint of detjax demo")
    parser.add_argument("--eagle3", type=Path, required=True, help="the head's directory, created if missing")
    parser.add_argument("--model", type=Path, required=True, help="the smaller model's directory, created if missing")
    parser.add_argument("--steps", type=int, default=1600, help="steps of training (default: 1600)")
    arguments = parser.parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # results would depend on their number
    target = Qwen3ForCausalLM.from_pretrained(arguments.checkpoint, dtype=torch.float32).eval()
    target.generation_config.eos_token_id = None  # it separates passages here, and does not end a text
    counts = torch.bincount(written(target, TEXTS).flatten(), minlength=target.config.vocab_size)
    ids = counts.argsort(descending=True, stable=True)[:DRAFT_VOCABULARY].sort().values
    print(f"{counts[ids].sum() / counts.sum():.3f} of the tokens in its texts can be guessed by the head", flush=True)
    head = Head(target.config.hidden_size)
    model = Qwen3ForCausalLM(Qwen3Config(**(target.config.to_dict() | MODEL | {"layer_types": None})))
    fit(target, head, model, ids, arguments.steps)
    save_head(head, target, ids, arguments.eagle3)
    save_model(model, arguments.checkpoint, arguments.model)
    files = [file for folder in (arguments.eagle3, arguments.model) for file in sorted(folder.iterdir())]
    print(*(f"{file.stat().st_size:9,d} bytes  {file}" for file in files), sep="\n")
    if (total := sum(file.stat().st_size for file in files)) > MAX_BYTES:
        sys.exit(f"train_demo_drafts: the drafts hold {total:,d} bytes, over {MAX_BYTES:,d}; make them smaller")


if __name__ == "__main__":
    main()

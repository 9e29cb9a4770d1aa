"""Trains the small language model of `detjax demo` and writes it as a Hugging Face checkpoint.

    python tools/train_demo.py shakespeare.txt --out DIR

The checkpoint in `detjax/demo/checkpoint` learned from 1.1 MB of Shakespeare's plays (public domain; the selection
known as "tinyshakespeare": speeches, each headed by its speaker and a colon, a blank line between two). Any UTF-8 text
of this form and of about this size will do.

Needs torch, transformers and tokenizers. Takes under 3 minutes on one NVIDIA H200, about 4 hours on a CPU core. Torch's
seed is fixed, but neither its GPU kernels nor the random merges of the tokenizer repeat: another run gives an equally
good model, but not the same file.
"""

import argparse
import copy
import json
import math
import sys
import time
from pathlib import Path

try:
    import torch
    import torch.nn.functional as F
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
except ImportError as error:
    sys.exit(f"train_demo: {error}; install the packages that it needs: pip install torch transformers tokenizers")

MODEL = {
    "vocab_size": 1024,
    "hidden_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 448,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
}
WINDOW, BATCH, STEPS, WARMUP, EVALUATE_EVERY = 256, 64, 3000, 150, 100
LEARNING_RATE, WEIGHT_DECAY, DROPOUT = 2e-3, 0.1, 0.15
# BPE-dropout (Provilkov et al., 2020): the share of merges skipped at random in the training text. Without it a model
# of this size starts to memorize 1 MB of text after some 700 steps.
MERGE_DROPOUT = 0.1
SEED = 0

END = "<|endoftext|>"
# Speeches between two END. Together they are longer than a window, so the model cannot count them: a sampled
# continuation ends after a speech with a chance of about 1 in 8.
SPEECHES_PER_PASSAGE = 8
MAX_CHECKPOINT_BYTES = 2_900_000
PROMPTS = ("ROMEO:", "First Citizen:\nBefore we proceed", "KING RICHARD III:\nNow", "O, what a", "My lord, I")
# Keys with which save_pretrained describes the machine and its own release, not the model.
VOLATILE_KEYS = {
    "config.json": ("transformers_version", "_name_or_path"),
    "generation_config.json": ("transformers_version", "_from_model_config"),
    "tokenizer_config.json": ("backend", "is_local", "local_files_only", "name_or_path"),
}


def read_passages(path: Path) -> list[str]:
    """Returns the text's passages of `SPEECHES_PER_PASSAGE` speeches, in order.

    Raises:
        SystemExit: the file cannot be read as UTF-8 text, or is too short to learn from.
    """
    try:
        speeches = path.read_text(encoding="utf-8").strip().split("\n\n")
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"train_demo: cannot read {path} ({error}); give a plain text file in UTF-8")
    if len(speeches) < (least := 100 * SPEECHES_PER_PASSAGE):
        sys.exit(f"train_demo: {path} holds {len(speeches)} speeches between blank lines; give at least {least}")
    starts = range(0, len(speeches), SPEECHES_PER_PASSAGE)
    return ["\n\n".join(speeches[i : i + SPEECHES_PER_PASSAGE]) for i in starts]


def train_tokenizer(passages: list[str]) -> Tokenizer:
    """Returns a byte-level BPE tokenizer: `END` as token 0, the 256 bytes, and merges learned from `passages`.

    Raises:
        SystemExit: the text has too few pairs to merge for the model's vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MODEL["vocab_size"],
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(passages, trainer)
    if (size := tokenizer.get_vocab_size()) != MODEL["vocab_size"]:
        sys.exit(f"train_demo: the text yields {size} of {MODEL['vocab_size']} tokens; give a longer text")
    return tokenizer


def encode(tokenizer: Tokenizer, passages: list[str], device: str) -> torch.Tensor:
    """Returns the token ids of all passages in one row, with `END` after each."""
    end = tokenizer.token_to_id(END)
    return torch.tensor([i for e in tokenizer.encode_batch(passages) for i in (*e.ids, end)], device=device)


def build_model(end: int) -> Qwen3ForCausalLM:
    """Returns a newly initialized Qwen3 with dropout on the embedding and on each block's output."""
    model = Qwen3ForCausalLM(Qwen3Config(**MODEL, bos_token_id=None, eos_token_id=end, pad_token_id=end))

    # Qwen3 has no residual dropout; hooks leave the saved weights and config free of it.
    def drop(module, _, output):
        return F.dropout(output, DROPOUT, training=module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)
    return model


def next_token_loss(model: Qwen3ForCausalLM, windows: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross entropy, in nats per token, of windows' tokens given the preceding ones."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: Qwen3ForCausalLM, tokens: torch.Tensor) -> float:
    """Returns the nats per token over all non-overlapping windows of `tokens`; leaves the model in evaluation mode."""
    model.eval()
    windows = tokens.unfold(0, WINDOW + 1, WINDOW)
    losses = [next_token_loss(model, part) * len(part) for part in windows.split(BATCH)]
    return (sum(losses) / len(windows)).item()


def learning_rate_share(step: int) -> float:
    """Returns the share of `LEARNING_RATE` after `step` steps: linear warmup, then cosine decay to 0."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def fit(tokenizer: Tokenizer, train: list[str], held_out: list[str], device: str) -> Qwen3ForCausalLM:
    """Trains a model, and returns it, on the CPU, at its lowest validation loss."""
    torch.manual_seed(SEED)
    windows_at = torch.Generator().manual_seed(SEED)
    model = build_model(tokenizer.token_to_id(END)).to(device)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_share)
    merge_less = Tokenizer.from_str(tokenizer.to_str())
    merge_less.model.dropout = MERGE_DROPOUT
    held_out_tokens = encode(tokenizer, held_out, device)
    positions = torch.arange(WINDOW + 1)
    best, best_weights, started = math.inf, {}, time.monotonic()
    for step in range(STEPS):
        if step % EVALUATE_EVERY == 0:
            tokens = encode(merge_less, train, device)
        model.train()
        starts = torch.randint(len(tokens) - WINDOW, (BATCH, 1), generator=windows_at)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = next_token_loss(model, tokens[(starts + positions).to(device)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % EVALUATE_EVERY == 0:
            validation = validation_loss(model, held_out_tokens)
            losses = f"train {loss.item():.3f}, validation {validation:.3f} nats/token"
            print(f"step {step + 1} of {STEPS}: {losses}, {time.monotonic() - started:.0f} s on {device}", flush=True)
            if validation < best:
                best, best_weights = validation, copy.deepcopy(model.state_dict())
    model.load_state_dict(best_weights)
    return model.cpu().eval()


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Writes the bfloat16 checkpoint and its tokenizer to `out`.

    Raises:
        SystemExit: the directory came out larger than `MAX_CHECKPOINT_BYTES`.
    """
    model.to(torch.bfloat16).save_pretrained(out)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        model_max_length=MODEL["max_position_embeddings"],
        # Otherwise transformers 4 makes token_type_ids, which Qwen3 refuses.
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(out)
    for name, volatile in VOLATILE_KEYS.items():
        kept = {k: v for k, v in json.loads((out / name).read_text()).items() if k not in volatile}
        if name == "tokenizer_config.json":
            # transformers 5 writes the name of its own base class, which transformers 4 cannot load.
            kept["tokenizer_class"] = "PreTrainedTokenizerFast"
        (out / name).write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
    sizes = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
    print(*(f"{size:9,d} bytes  {name}" for name, size in sizes.items()), sep="\n")
    if (total := sum(sizes.values())) > MAX_CHECKPOINT_BYTES:
        sys.exit(f"train_demo: {out} holds {total:,d} bytes, over {MAX_CHECKPOINT_BYTES:,d}; make the model smaller")


def show(out: Path, held_out: list[str]) -> None:
    """Loads the checkpoint with transformers, and prints its validation loss and greedy continuations of `PROMPTS`."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    tokens = encode(tokenizer.backend_tokenizer, held_out, "cpu")
    loss = validation_loss(model, tokens)
    per_byte = loss * len(tokens) / sum(len(passage.encode()) for passage in held_out)
    print(f"{model.num_parameters():,d} parameters; validation {loss:.3f} nats/token, {per_byte:.3f} nats/byte")
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        continued = model.generate(**ids, do_sample=False, max_new_tokens=64)[0]
        print(f"--- {prompt!r}\n{tokenizer.decode(continued)}")


def main() -> None:
    """Trains on the first 90% of the passages, chooses the checkpoint by the last 10%, saves it and shows its text."""
    parser = argparse.ArgumentParser(description="Train the model of `detjax demo` on Shakespeare's plays.")
    parser.add_argument("text", type=Path, help="plain text: speeches with blank lines between them, about 1 MB")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint's directory, created if missing")
    arguments = parser.parse_args()
    passages = read_passages(arguments.text)
    train, held_out = passages[: len(passages) * 9 // 10], passages[len(passages) * 9 // 10 :]
    tokenizer = train_tokenizer(train)
    model = fit(tokenizer, train, held_out, "cuda" if torch.cuda.is_available() else "cpu")
    save(model, tokenizer, arguments.out)
    show(arguments.out, held_out)


if __name__ == "__main__":
    main()

"""Trains the small policy included in detjax from random weights, in a few minutes on two CPU cores.

    python tools/train_policy.py --out DIR

It wrote the policy in `detjax/rl/checkpoint`. The weights are a function of the environment's fingerprint, which is
printed with their SHA-256. `detjax.rl.runs.recipe.DIGESTS` has the known digests; the exit code is 1 if the weights
differ from them. No option changes a bit.
"""

import argparse
import sys
import time
from pathlib import Path

import detjax
from detjax.rl.runs import recipe
from detjax.rl.runs.policy import DIFFICULTIES
from detjax.rl.trainer.microbatches import Packed
from detjax.rl.trainer.step import Plan


def main() -> int:
    """Trains, evaluates and writes the policy."""
    parser = argparse.ArgumentParser(description="Train the small policy for the verifiable tasks.")
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint's directory, created if missing")
    parser.add_argument("--microbatch-tokens", type=int, default=256, help="tokens per microbatch")
    parser.add_argument("--devices", type=int, default=1, help="devices that share a step")
    arguments = parser.parse_args()
    start = time.monotonic()
    plan = Plan(Packed(arguments.microbatch_tokens), devices=arguments.devices)
    model, tokenizer = recipe.train(plan, report=lambda line: print(line, flush=True))
    digest = recipe.save(model, tokenizer, arguments.out)
    print(f"trained in {time.monotonic() - start:.0f} s")
    for temperature in (1.0, 0.0):
        shares = recipe.solved_shares(model, tokenizer, samples=4 if temperature else 1, temperature=temperature)
        text = ", ".join(f"{name}:{DIFFICULTIES[name]} {share:.0%}" for name, share in shares.items())
        print(f"solved at temperature {temperature:g}: {text}")
    fingerprint = detjax.fingerprint().digest
    print(f"{digest}  model.safetensors, fingerprint {fingerprint}")
    known = recipe.DIGESTS.get(fingerprint)
    if known not in (None, digest):
        print(f"accepted: {known}, the known digest for this environment")
    return int(known not in (None, digest))


if __name__ == "__main__":
    sys.exit(main())

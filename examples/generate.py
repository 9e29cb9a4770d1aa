"""Completions, and their bits alone and in a batch.

python examples/generate.py [CHECKPOINT]
"""

import sys

import detjax
from detjax.demo import CHECKPOINT

PROMPTS = ["ROMEO:\n", "To be, or not to be", "KING RICHARD III:\n"]


def main() -> None:
    """Prints completions, and whether the first one is the same without the others."""
    model, tokenizer = detjax.models.load(sys.argv[1] if len(sys.argv) > 1 else CHECKPOINT, progress=False)
    params = detjax.SamplingParams(max_tokens=16, temperature=0.8, top_p=0.95, seed=7)
    together = detjax.generate(model, PROMPTS, params, tokenizer=tokenizer)
    for prompt, generation in zip(PROMPTS, together, strict=True):
        print(repr(prompt + (generation.completions[0].text or "")))
    alone = detjax.generate(model, PROMPTS[:1], params, tokenizer=tokenizer)
    # Completions contain tokens and exact float32 logprobs, so they are equal only if every bit is.
    print("the first one has the same bits alone:", alone[0] == together[0])


if __name__ == "__main__":
    main()

"""Verifies answers of a model by one forward pass each, without generating again.

python examples/verify_answers.py [CHECKPOINT]
"""

import dataclasses
import sys

import detjax
from detjax.demo import CHECKPOINT

PROMPTS = ["ROMEO:\n", "JULIET:\n"]


def main() -> None:
    """Verifies two answers, and altered copies of one."""
    model, tokenizer = detjax.models.load(sys.argv[1] if len(sys.argv) > 1 else CHECKPOINT, progress=False)
    params = detjax.SamplingParams(max_tokens=16, temperature=0.8, seed=7)
    origin = detjax.audit.Origin.here(model, tokenizer)  # digests of the environment and of the model
    answers = [
        transcript
        for generation in detjax.generate(model, PROMPTS, params, tokenizer=tokenizer)
        for transcript in detjax.audit.transcripts_of(generation, params, origin)
    ]
    first = answers[0]
    other = (first.tokens[3] + 1) % model.config.vocab_size
    altered = {
        "another seed": dataclasses.replace(first, sampling=dataclasses.replace(params, seed=8)),
        "another token": dataclasses.replace(first, tokens=(*first.tokens[:3], other, *first.tokens[4:]), text=None),
    }
    verdicts = detjax.verify(model, [*answers, *altered.values()], tokenizer)
    names = [*(f"answer to {prompt!r}" for prompt in PROMPTS), *altered]
    for name, verdict in zip(names, verdicts, strict=True):
        print(f"{name}: {verdict}")


if __name__ == "__main__":
    main()

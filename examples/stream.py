"""An engine that streams tokens to several tasks at once, while one of them leaves early.

python examples/stream.py [CHECKPOINT]
"""

import asyncio
import sys

import detjax
from detjax.demo import CHECKPOINT

PROMPTS = ["ROMEO:\n", "JULIET:\n", "NURSE:\n"]


async def text_of(engine: detjax.Engine, prompt: str, most: int) -> str:
    """Returns the text of an answer's first `most` tokens; leaving the loop cancels the rest."""
    params = detjax.SamplingParams(max_tokens=16, temperature=0.8, seed=7)
    pieces = []
    async for token in engine.stream(detjax.Request(prompt, params)):
        pieces.append(token.text or "")
        if len(pieces) == most:
            break
    return "".join(pieces)


async def main() -> None:
    """Prints three concurrent answers, and whether one of them is the same alone."""
    model, tokenizer = detjax.models.load(sys.argv[1] if len(sys.argv) > 1 else CHECKPOINT, progress=False)
    with detjax.Engine(model, tokenizer, max_samples=4, token_budget=64, max_length=64) as engine:
        texts = await asyncio.gather(
            text_of(engine, PROMPTS[0], 16), text_of(engine, PROMPTS[1], 16), text_of(engine, PROMPTS[2], 4)
        )
        for prompt, text in zip(PROMPTS, texts, strict=True):
            print(repr(prompt + text))
        print("the first one is the same alone:", await text_of(engine, PROMPTS[0], 16) == texts[0])


if __name__ == "__main__":
    asyncio.run(main())

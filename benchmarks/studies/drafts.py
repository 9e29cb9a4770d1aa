"""The guesses that count when the demo's checkpoint continues verses of Shakespeare, for each kind of draft.

    python -m benchmarks drafts --out benchmarks/results/drafts-cpu.json

Every step asks for the same number of guesses, so shares do not depend on the engine's rule for this number. For each
temperature and kind of draft, the result has the number of drafts that steps verified, the share of guesses that
counted at each position of a draft, and the number of tokens that a sequence got in a step with a draft. It also has
the number of answers with other bits than without drafts.

`--small` runs a few verses in seconds.
"""

import functools
from collections.abc import Iterator
from typing import Any, Final

from benchmarks.study import Result, Run
from detjax import demo
from detjax.engine import (
    BatchShapes,
    EngineConfig,
    Request,
    SamplingParams,
    SamplingVariant,
    Sequence,
    SpeculativeConfig,
    StepLoop,
    StepLoopConfig,
)
from detjax.engine.drafts.drafting import Drafting
from detjax.engine.drafts.loading import load_guesser
from detjax.engine.request_reader import RequestReader
from detjax.models import Decoder, Tokenizer, load

VERSES: Final = (
    "ROMEO:\nBut, soft! what light through yonder window breaks?\n",
    "JULIET:\nO Romeo, Romeo! wherefore art thou Romeo?\n",
    "GLOUCESTER:\nNow is the winter of our discontent\n",
    "KING RICHARD III:\nA horse! a horse! my kingdom for a horse!\n",
    "HENRY BOLINGBROKE:\nO, who can hold a fire in his hand\n",
    "JOHN OF GAUNT:\nThis royal throne of kings, this scepter'd isle,\n",
    "KING RICHARD II:\nLet us sit upon the ground\nAnd tell sad stories of the death of kings;\n",
    "PROSPERO:\nOur revels now are ended. These our actors,\n",
    "MIRANDA:\nO, wonder!\nHow many goodly creatures are there here!\n",
    "MENENIUS:\nThere was a time when all the body's members\nRebell'd against the belly,\n",
    "First Citizen:\nBefore we proceed any further, hear me speak.\n",
    "CORIOLANUS:\nYou common cry of curs! whose breath I hate\n",
    "ISABELLA:\nO, it is excellent\nTo have a giant's strength;\n",
    "LEONTES:\nToo hot, too hot!\n",
    "PETRUCHIO:\nI come to wive it wealthily in Padua;\n",
    "DUKE VINCENTIO:\nThe miserable have no other medicine\nBut only hope:\n",
)
TEMPERATURES: Final = 0.0, 0.7, 1.0
GUESSES: Final = 4
"""Guesses of each draft."""
TOKENS: Final = 96
"""Tokens of each answer."""
KINDS: Final = {
    "ngram": SpeculativeConfig(method="ngram", num_speculative_tokens=GUESSES),
    "draft_model": SpeculativeConfig(method="draft_model", model=str(demo.DRAFT_MODEL), num_speculative_tokens=GUESSES),
    "eagle3": SpeculativeConfig(method="eagle3", model=str(demo.EAGLE3), num_speculative_tokens=GUESSES),
}


def _loop(model: Decoder, tokenizer: Tokenizer, speculative: SpeculativeConfig | None, slots: int) -> StepLoop:
    config = StepLoopConfig(
        shapes=BatchShapes.for_chunks(
            slots, 64, mixes=True, drafts=0 if speculative is None else GUESSES, decodes_guesses=True
        ),
        num_pages=3 * slots,
        pages_per_sequence=3,
        variants=(SamplingVariant(False, 0),),
        speculative=speculative,
    )
    guesser = None if speculative is None else load_guesser(speculative, model, tokenizer)
    loop = StepLoop.for_model(model, config, guesser=guesser)
    if loop.drafting is not None:
        vocabulary = model.config.vocab_size
        loop.drafting = Drafting(loop.drafting.drafter, GUESSES, vocabulary, lambda sequences, acceptance: GUESSES)
    return loop


def _answers(loop: StepLoop, reader: RequestReader, requests: list[Request]) -> tuple[list[Sequence], list[int]]:
    """Returns the answers, and the numbers of guesses that counted in each draft that a step verified."""
    drafts = list[int]()
    drafting = loop.drafting
    if drafting is not None:
        note = drafting.note

        def noted(sequence: Sequence, proposed: int, accepted: int) -> None:
            if proposed == GUESSES:
                drafts.append(accepted)
            note(sequence, proposed, accepted)

        drafting.note = noted
    samples = [one for request in requests for one in reader.samples_of("drafts", request, is_streamed=False)]
    for sample in samples:
        loop.submit(sample)
    while not loop.is_idle:
        loop.step()
    return samples, drafts


def _measured(model: Decoder, tokenizer: Tokenizer, verses: int, tokens: int) -> Iterator[dict[str, Any]]:
    reader = RequestReader(model, tokenizer, EngineConfig(max_length=model.config.max_positions))
    loop_of = functools.partial(_loop, model, tokenizer, slots=verses)
    for temperature in TEMPERATURES:
        params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=0, ignore_eos=True)
        requests = [Request(verse, params) for verse in VERSES[:verses]]
        plain, _ = _answers(loop_of(None), reader, requests)
        for kind, speculative in KINDS.items():
            samples, drafts = _answers(loop_of(speculative), reader, requests)
            pairs = zip(samples, plain, strict=True)
            accepted = [sum(count > position for count in drafts) for position in range(GUESSES)]
            yield {
                "temperature": temperature,
                "kind": kind,
                "drafts": len(drafts),
                "share_counted": [round(count / max(len(drafts), 1), 4) for count in accepted],
                "tokens_per_step": round(1 + sum(accepted) / max(len(drafts), 1), 3),
                "answers_with_other_bits": sum(one.completion() != other.completion() for one, other in pairs),
            }


def study(run: Run) -> Result:
    model, tokenizer = load(demo.CHECKPOINT, progress=False)
    assert tokenizer is not None
    verses, tokens = (2, 8) if run.small else (len(VERSES), TOKENS)
    results = list(_measured(model, tokenizer, verses, tokens))
    content = {"verses": verses, "tokens": tokens, "guesses": GUESSES, "results": results}
    different = sum(result["answers_with_other_bits"] for result in results)
    return Result(content, f"{different} answers have other bits with drafts" if different else "")

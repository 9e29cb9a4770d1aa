"""The experiment's result as text, table and JSON."""

import dataclasses
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from detjax.demo.experiment import Request, Result, Tally, common_prefix
from detjax.models import Tokenizer


def verdict_on_stock(tally: Tally) -> str:
    """Describes stock XLA's answers in one sentence."""
    if len(tally.counts) > 1:
        return (
            f"Stock XLA gave {len(tally.counts)} different answers to one question at temperature 0. Which one came "
            "depended on the load."
        )
    if not tally.reproduced:
        return (
            f"Stock XLA gave one answer this time, but with {tally.bit_patterns} different sets of logprob bits: no "
            "token was close enough to a tie. Another --prompt or a larger --max-tokens may show more."
        )
    return (
        "Stock XLA gave one answer with one set of logprob bits: on this device and with this model these loads made "
        "no difference."
    )


def verdict_on_detjax(tally: Tally) -> str:
    """Describes detjax's answers in one sentence."""
    if tally.reproduced:
        times = f"{tally.asks} of {tally.asks} times"
        return f"detjax gave one answer regardless of the load, {times}, with the same bits in all logprobs."
    return (
        f"detjax broke its promise: {counted(len(tally.counts), 'answer')}, {counted(tally.bit_patterns, 'set')} of "
        "logprob bits. Please report this with the fingerprint and the output of --json."
    )


def as_text(tokens: tuple[int, ...], tokenizer: Tokenizer | None) -> str:
    """Returns the tokens' text, or their ids without a tokenizer."""
    return " ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens)


def report(result: Result, question: Request, tokenizer: Tokenizer | None) -> RenderableType:
    """Renders the table, the two texts of each divergence, and the verdicts."""
    rows = (("stock XLA", result.stock, result.stock_seconds), ("detjax", result.detjax, result.detjax_seconds))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("unique\ncompletions", "most\nfrequent", "unique\nlogprobs", "first\ndivergence", "\nseconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, tally, seconds in rows:
        divergence = "none" if tally.divergence is None else f"after {counted(tally.divergence.position, 'token')}"
        commonest = f"{tally.commonest} of {tally.asks}"
        table.add_row(name, str(len(tally.counts)), commonest, str(tally.bit_patterns), divergence, f"{seconds:.1f}")
    texts = [_sides(name, tally, question, tokenizer) for name, tally, _ in rows if tally.divergence is not None]
    verdicts = (
        Text(verdict_on_stock(result.stock)),
        Text(verdict_on_detjax(result.detjax), style="green" if result.detjax.reproduced else "bold red"),
    )
    return Group(table, *texts, "", *verdicts)


def _sides(name: str, tally: Tally, question: Request, tokenizer: Tokenizer | None) -> RenderableType:
    """Renders two completions side by side, with a mark at the first difference."""
    divergence = tally.divergence
    assert divergence is not None
    pair = divergence.one, divergence.other
    texts = [as_text(tokens, tokenizer) for tokens in pair]
    common = common_prefix(*texts) if tokenizer else len(as_text(divergence.one[: divergence.position], None))
    panels = [
        Panel(
            Text.assemble(
                (as_text(question.prompt, tokenizer), "dim"),
                "" if tokenizer else " ",
                text[:common],
                ("▶", "bold red"),
                (text[common:], "bold"),
            ),
            title=f"{name}: {dict(tally.counts)[tokens]} of {tally.asks}",
        )
        for tokens, text in zip(pair, texts, strict=True)
    ]
    side_by_side = Table.grid(expand=True)
    for _ in panels:
        side_by_side.add_column(ratio=1)
    side_by_side.add_row(*panels)
    return side_by_side


def as_json(result: Result, question: Request, tokenizer: Tokenizer | None, **setting: Any) -> dict[str, Any]:
    """Returns the result as JSON: `setting`, all completions with their counts, and the fingerprint."""

    def numerics(tally: Tally, seconds: float) -> dict[str, Any]:
        divergence = tally.divergence
        return {
            "unique_completions": len(tally.counts),
            "unique_logprob_bits": tally.bit_patterns,
            "first_divergence": None if divergence is None else divergence.position,
            "seconds": round(seconds, 3),
            "completions": [
                {"count": count, "text": tokenizer and tokenizer.decode(tokens), "tokens": tokens}
                for tokens, count in tally.counts
            ],
        }

    return {
        **setting,
        "prompt": tokenizer and tokenizer.decode(question.prompt),
        "prompt_tokens": question.prompt,
        "max_tokens": question.max_tokens,
        "asks": result.stock.asks,
        "batches": result.loads,
        "stock": numerics(result.stock, result.stock_seconds),
        "detjax": numerics(result.detjax, result.detjax_seconds),
        "fingerprint": dataclasses.asdict(result.fingerprint) | {"digest": result.fingerprint.digest},
    }


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Returns a number with its noun: "1 token", "2 tokens"."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"

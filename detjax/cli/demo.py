"""Ask one question many times at temperature 0 under changing load, and count the answers of stock XLA and of detjax.

The exit code is 1 if detjax gives more than one answer.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from detjax import models
from detjax.cli.files import opened, write_json, written_at_the_end
from detjax.cli.loading import JSON_FILE, Backend, Loading
from detjax.cli.options import Fields, Option, command
from detjax.demo import CHECKPOINT, DEFAULT_MAX_TOKENS, experiment, histogram, report
from detjax.runtime import backends

_SMALL_MODEL = Loading(model=CHECKPOINT)
_LOADING = Fields(
    Loading,
    without=("tensor_parallel", "expert_parallel", "chat_template", "template_date"),
    options={"model": Option(default="a small model that ships with detjax")},
)


@command
def demo(
    *,
    loading: Annotated[Loading, _LOADING] = _SMALL_MODEL,
    prompt: str | None = None,
    asks: int = 1000,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    seed: int = 0,
    output: Path = Path("demo.png"),
    json_file: Annotated[Path | None, JSON_FILE] = None,
    backend: Backend = None,
) -> int:
    """Runs the demonstration.

    Args:
        prompt: the question. Default: a line of Shakespeare.
        asks: number of repetitions of the question.
        max_tokens: maximum number of tokens in an answer.
        seed: seed for the random loads.
        output: write the histogram to this PNG.
        json_file: write all completions and the fingerprint to this file.
    """
    if output.suffix.lower() != ".png":
        raise ValueError(f"--output is {str(output)!r}; accepted: names that end in .png")
    contender = experiment.contender(backend)
    with contextlib.ExitStack() as files:
        png = files.enter_context(written_at_the_end("--output", output))
        json_part = opened(files, "--json", json_file)
        decoder, tokenizer = models.load(loading.model, dtype=loading.dtype)
        question = experiment.pose(decoder, tokenizer, prompt, max_tokens, seed)
        loads = experiment.draw_loads(decoder, tokenizer, question, asks, seed)
        Console(stderr=True, highlight=False).print(
            f"One question, asked {asks} times in {len(loads)} batches of 1 to {experiment.LARGEST_BATCH} requests, on "
            f"{backends.device_name()}, in {decoder.dtype.name}",
            markup=False,
        )
        with _progress({"stock": "stock XLA", "detjax": f"detjax ({contender})"}, asks) as advance:
            result = experiment.compare(decoder, loads, contender, advance)

        console = Console(highlight=False)
        console.print(report.report(result, question, tokenizer))
        histogram.draw_histogram(result, tokenizer, png)
        if json_part is not None:
            name = "the checkpoint that ships with detjax" if loading.model == CHECKPOINT else str(loading.model)
            setting = {"model": name, "dtype": decoder.dtype.name, "seed": seed}
            write_json(json_part, report.as_json(result, question, tokenizer, **setting))

    console.print(f"Fingerprint {result.fingerprint.digest}. Histogram: {output}", markup=False, soft_wrap=True)
    return int(not result.detjax.reproduced)


@contextlib.contextmanager
def _progress(names: dict[str, str], asks: int) -> Iterator[Callable[[str, int], None]]:
    """Yields a function that advances the bar of one of `names` on stderr. A bar appears when it first advances."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True, highlight=False)) as bars:
        tasks = {}

        def advance(numerics: str, answers: int) -> None:
            if numerics not in tasks:
                tasks[numerics] = bars.add_task(names[numerics], total=asks)
            bars.advance(tasks[numerics], answers)

        yield advance

"""The command line: `detjax demo`, `detjax generate`, `detjax serve`, `detjax fingerprint`."""

import contextlib
import dataclasses
import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from detjax import backends, compilation, engine, fingerprints, models
from detjax.contract import KV_BLOCK
from detjax.demo import CHECKPOINT, DEFAULT_MAX_TOKENS
from detjax.options import KVQuantization
from detjax.version import __version__

_EXPECTED_ERRORS = (ValueError, NotImplementedError, OSError, compilation.EnvironmentContradiction)
"""What a user can bring about. It ends in one line; everything else is a defect and ends in a traceback."""

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

_Model = Annotated[Path, typer.Option(metavar="DIR", help="Directory with a Hugging Face checkpoint.")]
_DType = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="float32, bfloat16 or float16.", show_default="the checkpoint's own"),
]
_KVCacheDType = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Quantize the KV cache: {', '.join(get_args(KVQuantization))}.",
        show_default="the model's dtype",
    ),
]
_Backend = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Backend to force: {', '.join((*backends.BACKENDS, backends.STOCK))}.",
        show_default=f"{backends.BACKEND_VARIABLE}, else the best for this device",
    ),
]


def _integer(text: str) -> int:
    return _number(int, text, "an integer")


def _real(text: str) -> float:
    return _number(float, text, "a number")


def _number[N](kind: Callable[[str], N], text: str, accepted: str) -> N:
    try:
        return kind(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is given; accepted: {accepted}") from None


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except _EXPECTED_ERRORS as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"detjax {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """LLM inference in JAX whose bits do not depend on who else is in the batch."""


@app.command()
@_plain_errors()
def demo(
    model: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Directory with a Hugging Face checkpoint.",
            show_default="a small one that comes with detjax",
        ),
    ] = CHECKPOINT,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The question.", show_default="a line of Shakespeare")
    ] = None,
    asks: Annotated[int, typer.Option(metavar="N", parser=_integer, help="How often it is asked.")] = 1000,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", parser=_integer, help="Tokens of an answer at most.")
    ] = DEFAULT_MAX_TOKENS,
    dtype: _DType = None,
    seed: Annotated[int, typer.Option(metavar="N", parser=_integer, help="Draws the loads.")] = 0,
    output: Annotated[Path, typer.Option(metavar="FILE", help="Where the histogram goes.")] = Path("demo.png"),
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Where all completions go, with the fingerprint.", show_default="nowhere"
        ),
    ] = None,
    backend: _Backend = None,
) -> None:
    """Ask one question at temperature 0 under changing load, with stock XLA and with detjax, and count the answers.

    Ends with code 1 if detjax gave more than one.
    """
    from detjax.demo import experiment, histogram, report  # matplotlib takes a second that other commands need not wait

    if output.suffix.lower() != ".png":
        raise ValueError(f"--output is {str(output)!r}; accepted: names that end in .png")
    contender = experiment.contender(backend)
    with contextlib.ExitStack() as files:
        png = files.enter_context(_file_at_the_end("--output", output))
        json_part = json_file and files.enter_context(_file_at_the_end("--json", json_file))
        decoder, tokenizer = models.load(model, dtype=dtype)
        question = experiment.pose(decoder, tokenizer, prompt, max_tokens, seed)
        loads = experiment.draw_loads(decoder, tokenizer, question, asks, seed)

        errors = Console(stderr=True, highlight=False)
        errors.print(
            f"One question, asked {asks} times in {len(loads)} batches of 1 to {experiment.LARGEST_BATCH} requests, on "
            f"{backends.device_name()}, in {decoder.dtype.name}",
            markup=False,
        )
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=errors) as bars:
            names = {"stock": "stock XLA", "detjax": f"detjax ({contender})"}
            tasks = {}

            def advance(numerics: str, answers: int) -> None:
                if numerics not in tasks:
                    tasks[numerics] = bars.add_task(names[numerics], total=asks)
                bars.advance(tasks[numerics], answers)

            result = experiment.compare(decoder, loads, contender, advance)

        console = Console(highlight=False)
        console.print(report.report(result, question, tokenizer))
        histogram.draw_histogram(result, tokenizer, png)
        if json_part is not None:
            name = "the checkpoint that comes with detjax" if model == CHECKPOINT else str(model)
            setting = {"model": name, "dtype": decoder.dtype.name, "seed": seed}
            written = report.as_json(result, question, tokenizer, **setting)
            json_part.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")

    console.print(f"Fingerprint {result.fingerprint.digest}. Histogram: {output}", markup=False, soft_wrap=True)
    if not result.detjax.reproduced:
        raise typer.Exit(1)


@app.command()
@_plain_errors()
def generate(
    model: _Model,
    prompt: Annotated[list[str], typer.Option(metavar="TEXT", help="A prompt; may be repeated. -: standard input.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is what a user says; apply the chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(metavar="N", parser=_integer, help="Tokens to generate at most.")] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="X", parser=_real, help="0 takes the likeliest token.", show_default="the checkpoint's, else 0"
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            metavar="N", parser=_integer, help="Tokens kept; 0: all.", show_default="the checkpoint's, else 0"
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="X", parser=_real, help="Probability of the tokens kept.", show_default="the checkpoint's, else 1"
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            parser=_real,
            help="Share of the likeliest token's probability, from which on tokens are kept.",
            show_default="the checkpoint's, else 0",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", parser=_integer, help="0 to 2^64 - 1.")] = 0,
    n: Annotated[int, typer.Option("--n", metavar="N", parser=_integer, help="Samples of each prompt.")] = 1,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Ends a completion, and is cut off; may be repeated.")
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=_integer,
            help="Print each token with its logprob and with the N likeliest tokens.",
            show_default="do not",
        ),
    ] = None,
    dtype: _DType = None,
    kv_cache_dtype: _KVCacheDType = None,
    backend: _Backend = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: texts, tokens, logprobs and the fingerprint.")
    ] = False,
) -> None:
    """Print completions of the prompts. The same prompt and seed give the same bits in any company."""
    fields: dict[str, Any] = {"max_tokens": max_tokens, "seed": seed, "n": n, "stop": tuple(stop or ())}
    fields |= {"top_logprobs": logprobs or 0}
    choices = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    fields |= {name: value for name, value in choices.items() if value is not None}
    engine.SamplingParams(**fields)  # before minutes are spent on loading
    quantization = _quantization(kv_cache_dtype)
    texts = _with_standard_input(prompt)
    with backends.use_backend(backend):
        fingerprint = fingerprints.fingerprint()
        decoder, tokenizer = _load(model, dtype)
        prompts = texts
        if chat:
            conversations = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
            prompts = [tokenizer.encode(conversation, add_special_tokens=False) for conversation in conversations]
        sampling = engine.SamplingParams.recommended(decoder, **fields)
        generations = engine.generate(
            decoder,
            prompts,
            sampling,
            tokenizer=tokenizer,
            kv_cache_dtype=quantization,
            progress=sys.stderr.isatty(),
        )
    if as_json:
        found = [_as_json(*pair) for pair in zip(texts, generations, strict=True)]
        typer.echo(json.dumps({"generations": found, "fingerprint": _fields(fingerprint)}, indent=2))
        return
    several = len(texts) * n > 1
    for number, (text, generation) in enumerate(zip(texts, generations, strict=True)):
        for sample, completion in enumerate(generation.completions):
            if several:
                typer.echo(f"=== prompt {number + 1} of {len(texts)}, sample {sample + 1} of {n}: {text!r}")
            typer.echo(completion.text)
            if logprobs is not None:
                _print_logprobs(completion, tokenizer)


@app.command()
@_plain_errors()
def serve(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="Directory with a Hugging Face checkpoint.")],
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where it listens; 0.0.0.0: everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", parser=_integer, help="0: any that is free.")] = 8000,
    name: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The model's name for clients.", show_default="the directory's"),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="DETJAX_API_KEY",
            help="What clients have to send; may be repeated. Others see a command line, not its environment.",
            show_default="nothing",
        ),
    ] = None,
    dtype: _DType = None,
    kv_cache_dtype: _KVCacheDType = None,
    backend: _Backend = None,
    max_samples: Annotated[
        int, typer.Option(metavar="N", parser=_integer, help="Samples computed at the same time.")
    ] = 64,
    token_budget: Annotated[int, typer.Option(metavar="N", parser=_integer, help="Tokens of a step at most.")] = 512,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", parser=_integer, help="Tokens of a prompt and its answer at most.", show_default="the model's"
        ),
    ] = None,
    pages: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=_integer,
            help=f"Pages of the KV cache, {KV_BLOCK} tokens each.",
            show_default="what is needed, as far as there is memory",
        ),
    ] = None,
    prefix_cache: Annotated[
        bool, typer.Option("--prefix-cache/--no-prefix-cache", help="Keep pages for prompts that begin alike.")
    ] = True,
    top_logprobs: Annotated[
        int, typer.Option(metavar="N", parser=_integer, help="The most that a request may ask for.")
    ] = 20,
    max_queue: Annotated[
        int, typer.Option(metavar="N", parser=_integer, help="Samples that may wait; more are answered 429.")
    ] = 1024,
    max_body: Annotated[int, typer.Option(metavar="BYTES", parser=_integer, help="Of a request.")] = 8 << 20,
    request_seconds: Annotated[float, typer.Option(metavar="X", parser=_real, help="That an answer may take.")] = 600,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", parser=_real, help="For requests on their way when it is told to stop.")
    ] = 30,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where compiled programs are kept. Who can write to it can run programs here.",
            show_default="detjax in the user's cache",
        ),
    ] = None,
    compilation_cache: Annotated[
        bool, typer.Option("--compilation-cache/--no-compilation-cache", help="Keep compiled programs.")
    ] = True,
) -> None:
    """Serve a model over HTTP, in OpenAI's terms; the page at / shows what it promises. Ctrl-C ends it."""
    try:
        from detjax import server
    except ModuleNotFoundError as error:
        raise ValueError(f"detjax serve needs {error.name}: pip install 'detjax[server]'") from error
    settings = server.Settings(
        name or model.resolve().name,
        api_keys=tuple(api_key or ()),
        max_on_their_way=max_samples + max_queue,
        max_body=max_body,
        request_seconds=request_seconds,
    )
    quantization = _quantization(kv_cache_dtype)
    if max_queue < 0 or grace < 0:
        raise ValueError(f"--max-queue is {max_queue}, --grace is {grace:g}; accepted: 0 and more")
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    with contextlib.closing(server.bound_socket(host, port)) as own, backends.use_backend(backend):
        decoder, tokenizer = _load(model, dtype)
        options = {"max_samples": max_samples, "token_budget": token_budget, "max_tokens": max_tokens, "pages": pages}
        options |= {"prefix_cache": prefix_cache, "top_logprobs": top_logprobs, "kv_cache_dtype": quantization}
        with engine.Engine(decoder, tokenizer, **options) as one:
            app = server.create_app(one, decoder, tokenizer, settings)
            cache = (cache_dir or _user_cache()) if compilation_cache else None
            one.warm_up(progress=sys.stderr.isatty(), cache=cache)
            address, port = own.getsockname()[:2]
            address = f"[{address}]" if ":" in address else address
            ready = f"{settings.name} on http://{address}:{port}, fingerprint {app.state.fingerprint}"
            server.Server(app, grace=grace).serve_on(own, lambda: errors.print(ready, markup=False))


@app.command()
@_plain_errors()
def fingerprint(backend: _Backend = None) -> None:
    """Print what bits depend on besides request and weights, as JSON."""
    with backends.use_backend(backend):
        typer.echo(json.dumps(_fields(fingerprints.fingerprint()), indent=2))


def _load(model: Path, dtype: str | None) -> tuple[models.Decoder, models.Tokenizer]:
    decoder, tokenizer = models.load(model, dtype=dtype)
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer.json; accepted: a checkpoint with one, as prompts are texts here")
    return decoder, tokenizer


def _quantization(name: str | None) -> KVQuantization | None:
    if name not in (None, *get_args(KVQuantization)):
        accepted = ", ".join(get_args(KVQuantization))
        raise ValueError(f"--kv-cache-dtype is {name!r}; accepted: {accepted}")
    return cast(KVQuantization | None, name)


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "detjax"


@contextlib.contextmanager
def _file_at_the_end(option: str, path: Path) -> Iterator[Path]:
    """A file that becomes `path` if all goes well; it is made at once, so that nobody works for a file that cannot be.

    Raises:
        ValueError: it cannot.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        partial = path.with_name(f".{path.name}.partial")
        partial.touch()
    except OSError as error:
        raise ValueError(
            f"{option} is {str(path)!r}, where no file can be written ({error.strerror}); accepted: the name of a "
            "file in a directory that exists and is writable"
        ) from error
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _with_standard_input(prompts: list[str]) -> list[str]:
    """The prompts, "-" replaced by what standard input holds, less its last line break."""
    if prompts.count("-") > 1:
        raise ValueError("--prompt is - more than once; accepted: once, as there is one standard input")
    return [sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt for prompt in prompts]


def _print_logprobs(completion: engine.Completion, tokenizer: models.Tokenizer) -> None:
    for token, logprob, top in zip(completion.tokens, completion.logprobs, completion.top_logprobs, strict=True):
        likeliest = [f"{tokenizer.decode([other])!r} {value:.6f}" for other, value in top]
        typer.echo("\t".join([str(token), repr(tokenizer.decode([token])), f"{logprob:.6f}", *likeliest]))


def _as_json(prompt: str, generation: engine.Generation) -> dict[str, Any]:
    completions = [
        {
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "tokens": completion.tokens,
            # A double holds a float32 exactly, so reading these gives the bits back.
            "logprobs": completion.logprobs,
            "top_logprobs": [
                [{"token": token, "logprob": value} for token, value in top] for top in completion.top_logprobs
            ],
        }
        for completion in generation.completions
    ]
    return {"prompt": prompt, "prompt_tokens": generation.prompt_tokens, "completions": completions}


def _fields(fingerprint: fingerprints.Fingerprint) -> dict[str, Any]:
    return dataclasses.asdict(fingerprint) | {"digest": fingerprint.digest}

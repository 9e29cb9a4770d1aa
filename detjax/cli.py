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
    model: options.DemoModel = CHECKPOINT,
    prompt: options.Question = None,
    asks: options.Asks = 1000,
    max_tokens: options.MaxTokens = DEFAULT_MAX_TOKENS,
    dtype: options.DType = None,
    seed: options.LoadSeed = 0,
    output: options.HistogramFile = Path("demo.png"),
    json_file: options.JsonFile = None,
    backend: options.Backend = None,
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
    model: options.Model,
    prompt: options.Prompts,
    chat: options.Chat = False,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = 0,
    n: options.Samples = 1,
    stop: options.Stop = None,
    logprobs: options.Logprobs = None,
    dtype: options.DType = None,
    kv_cache_dtype: options.KVCacheDType = None,
    backend: options.Backend = None,
    as_json: options.AsJson = False,
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
    model: options.ModelArgument,
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    name: options.Name = None,
    api_key: options.ApiKeys = None,
    dtype: options.DType = None,
    kv_cache_dtype: options.KVCacheDType = None,
    backend: options.Backend = None,
    max_samples: options.MaxSamples = 64,
    token_budget: options.TokenBudget = 512,
    max_length: options.MaxLength = None,
    pages: options.NumPages = None,
    prefix_cache: options.PrefixCache = True,
    top_logprobs: options.TopLogprobs = 20,
    max_queue: options.MaxQueue = 1024,
    max_body: options.MaxBody = 8 << 20,
    request_seconds: options.RequestSeconds = 600,
    grace: options.Grace = 30,
    cache_dir: options.CacheDir = None,
    compilation_cache: options.CompilationCache = True,
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
        config = engine.EngineConfig(
            max_samples=max_samples,
            token_budget=token_budget,
            max_length=max_length,
            num_pages=pages,
            prefix_cache=prefix_cache,
            kv_cache_dtype=quantization,
            top_logprobs=top_logprobs,
        )
        with engine.Engine(decoder, tokenizer, config) as one:
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

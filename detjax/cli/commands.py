"""The command line: `detjax demo`, `detjax generate`, `detjax train`, `detjax serve`, `detjax verify`,
`detjax certify`, `detjax divergence`, `detjax trace`, `detjax bisect`, `detjax fingerprint`."""

import contextlib
import dataclasses
import datetime
import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from detjax import audit, engine, models
from detjax.audit.bisection import bisect as bisection
from detjax.audit.bisection import targets, traces
from detjax.audit.certification import certify as certificates
from detjax.audit.certification import fusion_table
from detjax.audit.comparison import compare as comparisons
from detjax.cli import options as cli_options
from detjax.demo import CHECKPOINT, DEFAULT_MAX_TOKENS
from detjax.invariant.arguments import NoArray
from detjax.models.configuration.json_object import read_file
from detjax.models.vision.frame_sampling import FrameSampling
from detjax.models.vision.image_files import read_pixels
from detjax.models.vision.prompt_images import ImageReader
from detjax.models.vision.video_files import read_frames, read_video
from detjax.operands.options import KVQuantization
from detjax.runtime import backends, compilation, fingerprints
from detjax.version import __version__

_EXPECTED_ERRORS = (ValueError, NotImplementedError, OSError, compilation.EnvironmentContradiction, NoArray)
"""Errors that a user can cause. They end in one line; all others are defects and end in a traceback."""

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """A context whose expected errors end the command with one line on stderr and code 2."""
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
    """LLM inference in JAX whose bits do not depend on the other requests in a batch."""


@app.command()
@_plain_errors()
def demo(
    model: cli_options.DemoModel = CHECKPOINT,
    prompt: cli_options.Question = None,
    asks: cli_options.Asks = 1000,
    max_tokens: cli_options.MaxTokens = DEFAULT_MAX_TOKENS,
    dtype: cli_options.DType = None,
    seed: cli_options.LoadSeed = 0,
    output: cli_options.HistogramFile = Path("demo.png"),
    json_file: cli_options.JsonFile = None,
    backend: cli_options.Backend = None,
) -> None:
    """Ask one question at temperature 0 under changing load, with stock XLA and with detjax, and count the answers.

    The exit code is 1 if detjax gave more than one answer.
    """
    from detjax.demo import experiment, histogram, report  # matplotlib takes a second, which other commands do not need

    if output.suffix.lower() != ".png":
        raise ValueError(f"--output is {str(output)!r}; accepted: names that end in .png")
    contender = experiment.contender(backend)
    with contextlib.ExitStack() as files:
        png = files.enter_context(_file_written_at_the_end("--output", output))
        json_part = _opened(files, "--json", json_file)
        decoder, tokenizer = models.load(model, dtype=dtype)
        question = experiment.pose(decoder, tokenizer, prompt, max_tokens, seed)
        loads = experiment.draw_loads(decoder, tokenizer, question, asks, seed)
        Console(stderr=True, highlight=False).print(
            f"One question, asked {asks} times in {len(loads)} batches of 1 to {experiment.LARGEST_BATCH} requests, on "
            f"{backends.device_name()}, in {decoder.dtype.name}",
            markup=False,
        )
        with _demo_progress({"stock": "stock XLA", "detjax": f"detjax ({contender})"}, asks) as advance:
            result = experiment.compare(decoder, loads, contender, advance)

        console = Console(highlight=False)
        console.print(report.report(result, question, tokenizer))
        histogram.draw_histogram(result, tokenizer, png)
        if json_part is not None:
            name = "the checkpoint that comes with detjax" if model == CHECKPOINT else str(model)
            setting = {"model": name, "dtype": decoder.dtype.name, "seed": seed}
            content = report.as_json(result, question, tokenizer, **setting)
            _write_json(json_part, content)

    console.print(f"Fingerprint {result.fingerprint.digest}. Histogram: {output}", markup=False, soft_wrap=True)
    if not result.detjax.reproduced:
        raise typer.Exit(1)


@app.command()
@_plain_errors()
def generate(
    model: cli_options.Model,
    prompt: cli_options.Prompts,
    chat: cli_options.Chat = False,
    image: cli_options.Images = None,
    video: cli_options.Videos = None,
    fps: cli_options.FramesPerSecond = None,
    template_date: cli_options.TemplateDate = None,
    max_tokens: cli_options.MaxTokens = 128,
    temperature: cli_options.Temperature = None,
    top_k: cli_options.TopK = None,
    top_p: cli_options.TopP = None,
    min_p: cli_options.MinP = None,
    seed: cli_options.Seed = 0,
    n: cli_options.Samples = 1,
    stop: cli_options.Stop = None,
    logprobs: cli_options.Logprobs = None,
    dtype: cli_options.DType = None,
    kv_cache_dtype: cli_options.KVCacheDType = None,
    backend: cli_options.Backend = None,
    tensor_parallel: cli_options.TensorParallel = 1,
    expert_parallel: cli_options.ExpertParallel = 1,
    as_json: cli_options.AsJson = False,
) -> None:
    """Print completions of the prompts. The same prompt and seed give the same bits whatever else is computed."""
    fields: dict[str, Any] = {"max_tokens": max_tokens, "seed": seed, "n": n, "stop": tuple(stop or ())}
    fields |= {"top_logprobs": logprobs or 0}
    overrides = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    fields |= {name: value for name, value in overrides.items() if value is not None}
    engine.SamplingParams(**fields)  # refuses bad values before loading takes minutes
    quantization = _quantization(kv_cache_dtype)
    texts, images = _with_standard_input(prompt), [_pixels(file) for file in image or ()]
    if fps is not None and not video:
        raise ValueError(f"--fps is {fps} and there is no --video; accepted: --fps with --video")
    with backends.use_backend(backend):
        backends.check_device()
        fingerprint = fingerprints.fingerprint()
        decoder, tokenizer = _load(model, dtype, template_date, tensor_parallel, expert_parallel)
        reader = ImageReader(decoder.config, decoder.image_options, decoder.video_options)
        sampling_of_frames = reader.sampling.changed(fps)
        videos = [_video(path, sampling_of_frames) for path in video or ()]
        prompts = texts
        if chat:
            shown = [{"type": "image"}] * len(images) + [{"type": "video"}] * len(videos)
            contents = [[*shown, {"type": "text", "text": text}] if shown else text for text in texts]
            conversations = [tokenizer.apply_chat_template([{"role": "user", "content": one}]) for one in contents]
            prompts = [tokenizer.encode(conversation, add_special_tokens=False) for conversation in conversations]
        sampling = engine.SamplingParams.recommended(decoder, **fields)
        generations = engine.generate(
            decoder,
            prompts,
            sampling,
            images=[[*images, *videos]] * len(texts),
            tokenizer=tokenizer,
            kv_cache_dtype=quantization,
            progress=sys.stderr.isatty(),
        )
    if as_json:
        content = [_generation_json(text, generation) for text, generation in zip(texts, generations, strict=True)]
        typer.echo(json.dumps({"generations": content, "fingerprint": _fingerprint_json(fingerprint)}, indent=2))
        return
    for number, (text, generation) in enumerate(zip(texts, generations, strict=True), 1):
        for sample, completion in enumerate(generation.completions, 1):
            if len(texts) * n > 1:
                typer.echo(f"=== prompt {number} of {len(texts)}, sample {sample} of {n}: {text!r}")
            typer.echo(completion.text)
            if logprobs is not None:
                _print_logprobs(completion, tokenizer)


@app.command()
@_plain_errors()
def train(
    directory: cli_options.RunDirectory,
    task: cli_options.Tasks,
    kind: cli_options.Kind = "supervised",
    model: cli_options.StartModel = None,
    layers: cli_options.Layers = 2,
    width: cli_options.Width = 128,
    dtype: cli_options.TrainDType = "bfloat16",
    steps: cli_options.Steps = 100,
    prompts: cli_options.PromptsOfStep = 64,
    samples: cli_options.SamplesOfPrompt = 8,
    max_tokens: cli_options.MaxTokens = 32,
    temperature: cli_options.RolloutTemperature = 1.0,
    learning_rate: cli_options.LearningRate = 1e-3,
    estimator: cli_options.Estimator = "grpo",
    correction: cli_options.Correction = "none",
    kv_cache_dtype: cli_options.SamplerKVCacheDType = None,
    seed: cli_options.Seed = 0,
    microbatch_tokens: cli_options.MicrobatchTokens = 1024,
    devices: cli_options.TrainDevices = 1,
    save_every: cli_options.SaveEvery = 50,
    backend: cli_options.Backend = None,
) -> None:
    """Train a model on verifiable tasks. A run that is started again goes on where it was saved, to the same bytes."""
    from detjax.rl.runs import (
        command as training_command,  # optax and orbax take a second, which other commands do not need
    )

    options = training_command.TrainingOptions(
        directory=directory,
        tasks=tuple(task),
        kind=kind,
        model=model,
        layers=layers,
        width=width,
        dtype=dtype,
        steps=steps,
        prompts=prompts,
        samples=samples,
        max_tokens=max_tokens,
        temperature=temperature,
        learning_rate=learning_rate,
        estimator=estimator,
        correction=correction,
        kv_cache_dtype=kv_cache_dtype,
        seed=seed,
        microbatch_tokens=microbatch_tokens,
        devices=devices,
        save_every=save_every,
    )
    with backends.use_backend(backend):
        backends.check_device()
        digest = training_command.train(options)
    typer.echo(f"model {digest}, fingerprint {fingerprints.fingerprint().digest}")


@app.command()
@_plain_errors()
def serve(
    model: cli_options.ModelArgument,
    dtype: cli_options.DType = None,
    backend: cli_options.Backend = None,
    tensor_parallel: cli_options.TensorParallel = 1,
    expert_parallel: cli_options.ExpertParallel = 1,
    data_parallel: cli_options.DataParallel = 1,
    replica_seconds: cli_options.ReplicaSeconds = 30,
    host: cli_options.Host = "127.0.0.1",
    port: cli_options.Port = 8000,
    name: cli_options.Names = None,
    tls_certificate: cli_options.TLSCertificate = None,
    tls_key: cli_options.TLSKey = None,
    api_key: cli_options.ApiKeys = None,
    allowed_host: cli_options.AllowedHosts = None,
    allowed_origin: cli_options.AllowedOrigins = None,
    chat_template: cli_options.ChatTemplate = None,
    template_date: cli_options.TemplateDate = None,
    max_queue: cli_options.MaxQueue = 1024,
    max_body: cli_options.MaxBody = 8 << 20,
    image_directory: cli_options.ImageDirectory = None,
    unseeded: cli_options.Unseeded = "random",
    request_seconds: cli_options.RequestSeconds = 600,
    text_seconds: cli_options.TextSeconds = 30,
    max_samples: cli_options.MaxSamples = 64,
    token_budget: cli_options.TokenBudget = 512,
    max_length: cli_options.MaxLength = None,
    num_pages: cli_options.NumPages = None,
    kv_cache_dtype: cli_options.KVCacheDType = None,
    prefix_cache: cli_options.PrefixCache = True,
    snapshot_bytes: cli_options.SnapshotBytes = 4 << 30,
    snapshot_tokens: cli_options.SnapshotTokens = 512,
    runs_of: cli_options.RunsOf = None,
    separate_prefixes: cli_options.SeparatePrefixes = False,
    top_logprobs: cli_options.TopLogprobs = 20,
    max_connections: cli_options.MaxConnections = 4096,
    header_seconds: cli_options.HeaderSeconds = 10,
    idle_seconds: cli_options.IdleSeconds = 30,
    write_seconds: cli_options.WriteSeconds = 30,
    max_unsent: cli_options.MaxUnsent = 64 << 20,
    grace: cli_options.Grace = 30,
    access_log: cli_options.AccessLog = True,
    log_level: cli_options.LogLevel = "info",
    log_format: cli_options.LogFormat = "text",
    cache_dir: cli_options.CacheDir = None,
    compilation_cache: cli_options.CompilationCache = True,
    certify: cli_options.Certify = False,
) -> None:
    """Serve a model over HTTP with OpenAI's API; the page at / shows that answers repeat. Ctrl-C ends it.

    The exit code is 70 if the engine fails, so that a supervisor can start the server again.
    """
    try:
        from detjax import server
    except ModuleNotFoundError as error:
        raise ValueError(f"detjax serve needs {error.name}: pip install 'detjax[server]'") from error
    if max_queue < 0:
        raise ValueError(f"--max-queue is {max_queue}; accepted: 0 and more")
    if data_parallel < 1:
        raise ValueError(f"--data-parallel is {data_parallel}; accepted: 1 and more")
    if data_parallel > 1 and certify:
        raise ValueError(
            f"--certify is given and --data-parallel is {data_parallel}; accepted: one of them. Certify a server of "
            "one engine first, whose programs are those of every replica"
        )
    names = name or [model.resolve().name]
    settings = server.Settings(
        names[0],
        more_names=tuple(names[1:]),
        api_keys=_api_keys(api_key),
        separate_prefixes=separate_prefixes,
        max_in_flight=data_parallel * max_samples + max_queue,
        max_body=max_body,
        request_seconds=request_seconds,
        text_seconds=text_seconds,
        max_unsent=max_unsent,
        allowed_hosts=None if allowed_host is None else tuple(allowed_host),
        allowed_origins=tuple(allowed_origin or ()),
        image_directory=image_directory,
        unseeded=cast(Any, unseeded),
    )
    config = engine.EngineConfig(
        max_samples=max_samples,
        token_budget=token_budget,
        max_length=max_length,
        num_pages=num_pages,
        prefix_cache=prefix_cache,
        snapshot_bytes=snapshot_bytes,
        snapshot_tokens=snapshot_tokens,
        kv_cache_dtype=_quantization(kv_cache_dtype),
        top_logprobs=top_logprobs,
        runs_of=runs_of,
    )
    connections = server.ConnectionSettings(
        grace=grace,
        max_connections=max_connections,
        header_seconds=header_seconds,
        idle_seconds=idle_seconds,
        write_seconds=write_seconds,
        certificate=tls_certificate,
        key=tls_key,
    )
    log = server.LogSettings(level=cast(Any, log_level), format=cast(Any, log_format), access=access_log)
    template = None if chat_template is None else _chat_template(chat_template)
    cache = _prepared_cache(cache_dir) if compilation_cache else None
    server.tls_context(connections)  # a certificate that cannot be used is reported before loading takes minutes
    with (
        contextlib.closing(server.bound_socket(host, port)) as bound,
        backends.use_backend(backend),
        server.logging_to_stderr(log),
    ):
        settings = server.protected(settings, bound)
        with contextlib.ExitStack() as held:
            if data_parallel > 1:
                options = server.ReplicaOptions(
                    model,
                    dtype=dtype,
                    backend=backend,
                    tensor_parallel=tensor_parallel,
                    expert_parallel=expert_parallel,
                    chat_template=template,
                    template_date=template_date,
                    config=config,
                    cache=cache,
                )
                replicas = server.ProcessReplicas(options, data_parallel, log=log, silence=replica_seconds)
                held.enter_context(contextlib.closing(replicas))
                held.enter_context(server.no_accelerator())  # the replicas have their devices by now
                app = server.app_of_replicas(replicas, settings)
                texts = held.enter_context(contextlib.closing(app.state.texts))
                texts.start()
            else:
                backends.check_device()
                decoder, tokenizer = _load(model, dtype, template_date, tensor_parallel, expert_parallel)
                if template is not None:
                    tokenizer = tokenizer.with_chat_template(template)
                running = held.enter_context(engine.Engine(decoder, tokenizer, config))
                if certify:
                    _certify_programs(decoder, running)
                app = server.create_app(running, decoder, tokenizer, settings)
                texts = held.enter_context(contextlib.closing(app.state.texts))
                texts.start()  # they load the tokenizer while programs are compiled
                running.warm_up(progress=sys.stderr.isatty(), cache=cache, in_background=True)
            ready = f"{settings.name} on {server.url(bound, connections)}, fingerprint {app.state.fingerprint}"
            console = Console(stderr=True, highlight=False, soft_wrap=True)
            code = server.Server(app, connections).serve_on(bound, lambda: console.print(ready, markup=False))
    if code:
        raise typer.Exit(code)


@app.command()
@_plain_errors()
def verify(
    file: cli_options.TranscriptsFile,
    model: cli_options.Model,
    dtype: cli_options.DType = None,
    chat_template: cli_options.ChatTemplate = None,
    template_date: cli_options.TemplateDate = None,
    json_file: cli_options.VerdictsFile = None,
    backend: cli_options.Backend = None,
    tensor_parallel: cli_options.TensorParallel = 1,
    expert_parallel: cli_options.ExpertParallel = 1,
) -> None:
    """Check whether answers are, bit for bit, what the model answers: by one forward pass over prompt and answer.

    The exit code is 1 if an answer is refused.
    """
    template = None if chat_template is None else _chat_template(chat_template)
    with contextlib.ExitStack() as files, backends.use_backend(backend):
        backends.check_device()
        json_part = _opened(files, "--json", json_file)
        decoder, tokenizer = _load(model, dtype, template_date, tensor_parallel, expert_parallel)
        if template is not None:
            tokenizer = tokenizer.with_chat_template(template)
        transcripts = audit.read_transcripts(file, tokenizer)
        given = list(transcripts.values())
        verdicts = audit.verify(decoder, given, tokenizer, progress=sys.stderr.isatty())
        by_place = dict(zip(transcripts, verdicts, strict=True))
        if json_part is not None:
            content = [{"place": place, **dataclasses.asdict(verdict)} for place, verdict in by_place.items()]
            _write_json(json_part, content)
    refused = {place: verdict for place, verdict in by_place.items() if not verdict.is_verified}
    for place, verdict in refused.items():
        typer.echo(f"{place}: {verdict}")
    typer.echo(f"{len(verdicts) - len(refused)} of {len(verdicts)} answers are verified")
    if refused:
        raise typer.Exit(1)


def _print_fusions(wanted: bool) -> None:
    if wanted:
        # As wide as its cells where nobody looks at a terminal, so that no program has to join lines.
        Console(highlight=False, width=None if sys.stdout.isatty() else 300).print(fusion_table.table())
        raise typer.Exit


@app.command()
@_plain_errors()
def certify(
    function: cli_options.CertifiedFunction,
    args: cli_options.CertifiedArguments,
    batch_axes: cli_options.BatchAxes = "0",
    out_axes: cli_options.OutAxes = "0",
    batch_sizes: cli_options.BatchSizes = "1,2,3,8,17",
    require: cli_options.Required = "observed",
    json_file: cli_options.CertificateFile = None,
    backend: cli_options.Backend = None,
    fusions: Annotated[
        bool,
        typer.Option(
            "--fusions",
            help="Print which kernels take several steps, how to switch that off, and whether bits change; then end.",
            callback=_print_fusions,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Certify that the rows of a function do not depend on their batch: by reading its program, and by running it.

    The exit code is 1 if the function is refuted, or if less is certified than --require asks for.
    """
    outcomes = {outcome.value: outcome for outcome in (audit.Outcome.PROVEN, audit.Outcome.OBSERVED)}
    if require not in outcomes:
        raise ValueError(f"--require is {require!r}; accepted: {', '.join(outcomes)}")
    axes = targets.axes_of("--batch-axes", batch_axes), targets.axes_of("--out-axes", out_axes)
    sizes = targets.sizes_of("--batch-sizes", batch_sizes)
    with contextlib.ExitStack() as files, backends.use_backend(backend):
        json_part = _opened(files, "--json", json_file)
        fn, arguments = targets.named_object("MODULE:FUNCTION", function), targets.named_object("--args", args)
        if not callable(fn):
            raise ValueError(f"MODULE:FUNCTION is {function!r}, which is {type(fn).__name__}; accepted: functions")
        arguments = arguments() if callable(arguments) else arguments
        if not isinstance(arguments, (tuple, list)):
            raise ValueError(f"--args is {args!r}, which is {type(arguments).__name__}; accepted: a tuple of arguments")
        certificate = audit.certify(fn, arguments, *axes, batch_sizes=sizes)
        if json_part is not None:
            _write_json(json_part, certificate.as_dict())
    Console(highlight=False).print(certificates.report(certificate))
    if not certificate.outcome.is_at_least(outcomes[require]):
        raise typer.Exit(1)


@app.command()
@_plain_errors()
def divergence(
    first: cli_options.FirstLogprobs,
    second: cli_options.SecondLogprobs,
    as_json: cli_options.DivergenceAsJson = False,
) -> None:
    """Measure how far the logprobs of two engines are apart, beside the thresholds that practitioners use.

    The exit code is 1 if a threshold is not kept.
    """
    comparison = audit.compare(audit.read_logprobs(first), audit.read_logprobs(second))
    if as_json:
        typer.echo(json.dumps(comparison.as_dict(), indent=2))
    else:
        Console(highlight=False).print(comparisons.table(comparison))
    if comparison.beyond():
        raise typer.Exit(1)


@app.command()
@_plain_errors()
def trace(
    function: cli_options.TracedFunction, out: cli_options.TraceFile, backend: cli_options.Backend = None
) -> None:
    """Run a function with a digest of what each of its equations gives, for detjax bisect."""
    with backends.use_backend(backend), _file_written_at_the_end("--out", out) as part:
        backends.check_device()
        made = traces.traced(function)
        made.save(part)
    typer.echo(f"{len(made.entries)} arrays, {sum(x.nbytes for x in made.digests)} bytes of digests")


@app.command()
@_plain_errors()
def bisect(
    first: cli_options.FirstTrace,
    second: cli_options.SecondTrace,
    rows: cli_options.ComparedRows = None,
    isolate: cli_options.Isolate = False,
    json_file: cli_options.BisectionFile = None,
    plot: cli_options.DriftPlot = None,
    backend: cli_options.Backend = None,
) -> None:
    """Find the first equation whose results differ between two runs, and how the difference grows behind it.

    The exit code is 1 if they differ.
    """
    with contextlib.ExitStack() as files, backends.use_backend(backend):
        json_part = _opened(files, "--json", json_file)
        png = _opened(files, "--plot", plot)
        runs = [
            audit.Trace.load(Path(place)) if Path(place).is_file() else traces.traced(place)
            for place in (first, second)
        ]
        result = audit.bisect(*runs, rows=rows, isolate=isolate)
        if json_part is not None:
            _write_json(json_part, result.as_dict())
        if png is not None:
            from detjax.audit.bisection import drift_plot  # matplotlib takes a second, which other commands do not need

            drift_plot.draw(result, png)
    typer.echo(result)
    console = Console(highlight=False)
    if result.first is not None:
        console.print(bisection.drift_table(result))
    if result.isolated is not None:
        console.print(bisection.isolation_table(result.isolated))
    if result.first is not None or result.hidden:
        raise typer.Exit(1)


@app.command()
@_plain_errors()
def fingerprint(backend: cli_options.Backend = None) -> None:
    """Print, as JSON, what bits depend on besides the request and the weights."""
    with backends.use_backend(backend):
        typer.echo(json.dumps(_fingerprint_json(fingerprints.fingerprint()), indent=2))


def _certify_programs(decoder: models.Decoder, running: engine.Engine) -> None:
    """Says on stderr that no program of an engine leaves a bit to the compiler, or ends the command with code 1."""
    programs = running.programs()
    console = Console(stderr=True, highlight=False)
    risks = audit.engine_risks(decoder, programs)
    for purpose, unproven in risks.items():
        console.print(purpose, certificates.risk_table(unproven))
    kept = len(programs) - len(risks)
    console.print(f"certified: {kept} of {len(programs)} programs compute all numbers under contract")
    if risks:
        raise typer.Exit(1)


@contextlib.contextmanager
def _demo_progress(names: dict[str, str], asks: int) -> Iterator[Callable[[str, int], None]]:
    """Bars on stderr, one for each of `names`, and the function that advances one of them. A bar shows on first use."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True, highlight=False)) as bars:
        tasks = {}

        def advance(numerics: str, answers: int) -> None:
            if numerics not in tasks:
                tasks[numerics] = bars.add_task(names[numerics], total=asks)
            bars.advance(tasks[numerics], answers)

        yield advance


def _load(
    model: Path, dtype: str | None, template_date: datetime.date | None, tensor: int, expert: int
) -> tuple[models.Decoder, models.Tokenizer]:
    """The model, shared by `tensor * expert` devices, and its tokenizer.

    Its chat templates are told that today is `template_date`, if one is given.

    Raises:
        ValueError: the checkpoint has no tokenizer, or there are fewer devices.
    """
    decoder, tokenizer = models.load(model, dtype=dtype, mesh=models.mesh_of(tensor, expert))
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer.json; accepted: a checkpoint with one, because prompts are text")
    return decoder, tokenizer if template_date is None else tokenizer.with_template_date(template_date)


def _quantization(name: str | None) -> KVQuantization | None:
    """Checks the value of --kv-cache-dtype."""
    if name not in (None, *get_args(KVQuantization)):
        accepted = ", ".join(get_args(KVQuantization))
        raise ValueError(f"--kv-cache-dtype is {name!r}; accepted: {accepted}")
    return cast(KVQuantization | None, name)


def _api_keys(given: list[str] | None) -> tuple[str, ...]:
    """The keys of the command line, else the one of the environment. An empty one is kept, so that it is refused."""
    if given:
        return tuple(given)
    variable = os.environ.get(cli_options.API_KEY_VARIABLE)
    return () if variable is None else (variable,)


def _chat_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ValueError(
            f"--chat-template is {str(path)!r}, which cannot be read ({reason}); accepted: a file with a Jinja template"
        ) from error


def _prepared_cache(directory: Path | None) -> Path:
    """The directory of compiled programs, which is made if it is not there.

    Raises:
        ValueError: the directory cannot be made or written to, or others can write to it.
    """
    try:
        directory = directory or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "detjax"
        engine.prepare_cache(directory)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        raise ValueError(
            f"{error}. Choose another directory with --cache-dir, or compile at every start with --no-compilation-cache"
        ) from error
    return directory


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _file_written_at_the_end(option: str, path: Path) -> Iterator[Path]:
    """A temporary file that replaces `path` when the context ends without an error.

    It is created at once, so that a path that cannot be written is reported before the work begins.

    Raises:
        ValueError: the path cannot be written; the message calls it `option`.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        partial = path.with_name(f".{path.name}.partial")
        partial.touch()
    except OSError as error:
        raise ValueError(
            f"{option} is {str(path)!r}, which cannot be written ({error.strerror}); accepted: a file in a "
            "directory that exists and is writable"
        ) from error
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _opened(files: contextlib.ExitStack, option: str, path: Path | None) -> Path | None:
    """The temporary file of an option that may be left out; see `_file_written_at_the_end`."""
    return None if path is None else files.enter_context(_file_written_at_the_end(option, path))


def _pixels(file: Path) -> np.ndarray:
    """The pixels of an image's file."""
    return read_pixels(f"--image {str(file)!r}", read_file(file))


def _video(path: Path, sampling: FrameSampling) -> models.Video:
    """The frames of a video that the model is to see: of an animation, or the images of a directory by their names."""
    name = f"--video {str(path)!r}"
    if path.is_dir():
        return read_frames(name, [read_file(file) for file in sorted(path.iterdir()) if file.is_file()], sampling)
    return read_video(name, read_file(path), sampling)


def _with_standard_input(prompts: list[str]) -> list[str]:
    """The prompts. Standard input, less its last line break, takes the place of "-"."""
    if prompts.count("-") > 1:
        raise ValueError("--prompt is - more than once; accepted: once, because there is one standard input")
    return [sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt for prompt in prompts]


def _print_logprobs(completion: engine.Completion, tokenizer: models.Tokenizer) -> None:
    """Prints a line for each token: id, text, logprob, and the likeliest tokens in its place."""
    for token, logprob, top in zip(completion.tokens, completion.logprobs, completion.top_logprobs, strict=True):
        likeliest = [f"{tokenizer.decode([candidate])!r} {value:.6f}" for candidate, value in top]
        typer.echo("\t".join([str(token), repr(tokenizer.decode([token])), f"{logprob:.6f}", *likeliest]))


def _generation_json(prompt: str, generation: engine.Generation) -> dict[str, Any]:
    completions = [
        {
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "tokens": completion.tokens,
            # A double holds a float32 exactly, so a reader gets the same bits.
            "logprobs": completion.logprobs,
            "top_logprobs": [
                [{"token": token, "logprob": value} for token, value in top] for top in completion.top_logprobs
            ],
        }
        for completion in generation.completions
    ]
    return {"prompt": prompt, "prompt_tokens": generation.prompt_tokens, "completions": completions}


def _fingerprint_json(fingerprint: fingerprints.Fingerprint) -> dict[str, Any]:
    return dataclasses.asdict(fingerprint) | {"digest": fingerprint.digest}

"""The types of the command line's options, with their help texts. Commands share them and choose the defaults."""

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import typer

from detjax.contract import KV_BLOCK
from detjax.operands.options import KVQuantization
from detjax.runtime import backends

LOG_LEVELS: Final = ("debug", "info", "warning", "error")
"""Names of severities, as `detjax.server.LogSettings` takes them. The server's packages may not be installed."""
LOG_FORMATS: Final = ("text", "json")
"""Names of formats of the log, likewise."""


def _integer(text: str) -> int:
    return _number(int, text, "an integer")


def _real(text: str) -> float:
    return _number(float, text, "a number")


def _date(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is given; accepted: a date, such as 2026-01-31") from None


def _number[N](kind: Callable[[str], N], text: str, accepted: str) -> N:
    """Parses a number. Typer's own parsers do not say what is accepted."""
    try:
        return kind(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is given; accepted: {accepted}") from None


def _count(help_text: str, show_default: bool | str = True, metavar: str = "N", panel: str | None = None) -> Any:
    return typer.Option(
        metavar=metavar, parser=_integer, help=help_text, show_default=show_default, rich_help_panel=panel
    )


def _quantity(help_text: str, show_default: bool | str = True, metavar: str = "X", panel: str | None = None) -> Any:
    return typer.Option(metavar=metavar, parser=_real, help=help_text, show_default=show_default, rich_help_panel=panel)


def _seconds(help_text: str, panel: str) -> Any:
    return _quantity(help_text, metavar="SECONDS", panel=panel)


# --- the model and how it is run -------------------------------------------------------------------------------------

_CHECKPOINT_HELP = "Directory with a Hugging Face checkpoint."

Model = Annotated[Path, typer.Option(metavar="DIR", help=_CHECKPOINT_HELP)]
DemoModel = Annotated[
    Path, typer.Option(metavar="DIR", help=_CHECKPOINT_HELP, show_default="a small one that comes with detjax")
]
ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL_DIR", help=_CHECKPOINT_HELP)]
DType = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Compute in float32, bfloat16 or float16.",
        show_default="the checkpoint's dtype",
    ),
]
TensorParallel = Annotated[
    int, typer.Option(metavar="N", help="Share the model among N devices. No bit depends on their number.")
]
ExpertParallel = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Share the experts of each layer among N groups of devices, --tensor-parallel devices each. No bit "
        "depends on their number.",
    ),
]
DataParallel = Annotated[
    int,
    _count(
        "Engines, each with the whole model in a process and on devices of its own, behind this one address. No bit "
        "depends on their number.",
        panel="Replicas",
    ),
]
ReplicaSeconds = Annotated[
    float,
    _seconds(
        "Time without a sign of life, or of one step of its engine, after which a replica is started again.", "Replicas"
    ),
]
KVCacheDType = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Quantize the KV cache: {', '.join(get_args(KVQuantization))}.",
        show_default="the model's dtype",
    ),
]
SamplerKVCacheDType = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Quantize the KV cache of rollouts alone: {', '.join(get_args(KVQuantization))}.",
        show_default="the model's dtype",
    ),
]
Backend = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Use this backend: {', '.join((*backends.BACKENDS, backends.STOCK))}.",
        show_default=f"{backends.BACKEND_VARIABLE}, else the best for this device",
    ),
]

# --- prompts and sampling --------------------------------------------------------------------------------------------

Prompts = Annotated[
    list[str], typer.Option("--prompt", metavar="TEXT", help="A prompt; repeat it for several. - reads standard input.")
]
Question = Annotated[
    str | None,
    typer.Option("--prompt", metavar="TEXT", help="The question.", show_default="a line of Shakespeare"),
]
Chat = Annotated[bool, typer.Option("--chat", help="Treat the prompt as a user's message: apply the chat template.")]
Images = Annotated[
    list[Path] | None,
    typer.Option(
        "--image",
        metavar="FILE",
        help="Show an image to a model with a vision tower; may be repeated. With --chat it stands before the prompt, "
        "else the prompt has the tokens of images in their places.",
    ),
]
Videos = Annotated[
    list[Path] | None,
    typer.Option(
        "--video",
        metavar="FILE",
        help="Show a video to a model with a vision tower; may be repeated. FILE is an animation (WEBP, PNG or GIF) or "
        "a directory with images, which are the frames in the order of their names. Videos stand behind images.",
    ),
]
FramesPerSecond = Annotated[
    float | None,
    typer.Option(
        "--fps",
        metavar="X",
        parser=_real,
        help="Frames of a second of videos that the model sees; of a directory, those that it has.",
        show_default="the checkpoint's, else 2",
    ),
]
TemplateDate = Annotated[
    datetime.date | None,
    typer.Option(
        metavar="DATE",
        parser=_date,
        help="Tell chat templates that this is today, YYYY-MM-DD. It is part of the fingerprint.",
        show_default="no date",
    ),
]
MaxTokens = Annotated[int, _count("Tokens to generate at most.")]
Temperature = Annotated[float | None, _quantity("0 takes the likeliest token.", "the checkpoint's, else 0")]
TopK = Annotated[int | None, _count("Keep the N likeliest tokens; 0: all.", "the checkpoint's, else 0")]
TopP = Annotated[
    float | None, _quantity("Keep the likeliest tokens whose probability reaches X.", "the checkpoint's, else 1")
]
MinP = Annotated[
    float | None,
    _quantity("Keep tokens of at least X times the likeliest one's probability.", "the checkpoint's, else 0"),
]
Seed = Annotated[int, _count("Seed of the random choices, 0 to 2^64 - 1.")]
Samples = Annotated[int, typer.Option("--n", metavar="N", parser=_integer, help="Samples of each prompt.")]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="End a completion before this text; repeat it for several."),
]
Logprobs = Annotated[int | None, _count("Print each token with its logprob and the N likeliest tokens.", "do not")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON: texts, tokens, logprobs and the fingerprint.")]

# --- training --------------------------------------------------------------------------------------------------------

RunDirectory = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="Directory of the run: its states, its log and, at the end, its model."),
]
Kind = Annotated[
    str,
    typer.Option(
        metavar="KIND", help="supervised: train right answers; reinforcement: train the policy's own rollouts."
    ),
]
Tasks = Annotated[
    list[str],
    typer.Option("--task", metavar="NAME:DIFFICULTY", help="A task, such as addition:2; repeat it for several."),
]
StartModel = Annotated[
    Path | None,
    typer.Option("--model", metavar="DIR", help="Begin with this checkpoint.", show_default="random weights"),
]
Layers = Annotated[int, _count("Layers of a model with random weights.")]
Width = Annotated[int, _count("Width of a model with random weights, a multiple of 32.")]
TrainDType = Annotated[str, typer.Option(metavar="NAME", help="Compute in float32, bfloat16 or float16.")]
Steps = Annotated[int, _count("Steps of the run.")]
PromptsOfStep = Annotated[int, typer.Option("--prompts", metavar="N", parser=_integer, help="Prompts of a step.")]
SamplesOfPrompt = Annotated[int, typer.Option("--samples", metavar="N", parser=_integer, help="Rollouts of a prompt.")]
RolloutTemperature = Annotated[float, typer.Option("--temperature", metavar="X", parser=_real, help="Of rollouts.")]
LearningRate = Annotated[float, _quantity("Step size of AdamW.")]
Estimator = Annotated[str, typer.Option(metavar="NAME", help="Advantages: grpo, rloo or reinforce.")]
Correction = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Importance weights: none, token_truncated, sequence_truncated or sequence_masked.",
    ),
]
MicrobatchTokens = Annotated[int, _count("Tokens of a packed microbatch, a multiple of 16. No bit depends on it.")]
TrainDevices = Annotated[
    int, typer.Option("--devices", metavar="N", parser=_integer, help="Devices that share a batch.")
]
SaveEvery = Annotated[int, _count("Steps between two saved states.")]

# --- the demonstration -----------------------------------------------------------------------------------------------

Asks = Annotated[int, _count("How often the question is asked.")]
LoadSeed = Annotated[int, _count("Seed of the loads.")]
HistogramFile = Annotated[Path, typer.Option("--output", metavar="FILE", help="Write the histogram to this PNG.")]
TranscriptsFile = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="Transcripts, or a server's responses with receipts: one in each line, or a list."
    ),
]
VerdictsFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all verdicts here.", show_default="nowhere")
]
FirstLogprobs = Annotated[
    Path,
    typer.Argument(
        metavar="A", help="Logprobs of one engine: of detjax, vLLM, SGLang or OpenAI's API, one answer in each line."
    ),
]
SecondLogprobs = Annotated[
    Path, typer.Argument(metavar="B", help="Logprobs of another engine: of the same requests, in the same order.")
]
DivergenceAsJson = Annotated[bool, typer.Option("--json", help="Print JSON with all numbers.")]
CertifiedFunction = Annotated[
    str, typer.Argument(metavar="MODULE:FUNCTION", help="A function of a batch, or a module of Flax.")
]
CertifiedArguments = Annotated[
    str, typer.Option("--args", metavar="MODULE:NAME", help="Its arguments: a tuple, or a function that returns one.")
]
BatchAxes = Annotated[
    str,
    typer.Option(metavar="JSON", help="The axis of rows in each argument, null where all rows share one: [null, 0]."),
]
OutAxes = Annotated[str, typer.Option(metavar="JSON", help="The axis of rows in the results.")]
BatchSizes = Annotated[str, typer.Option(metavar="N,N", help="How many rows the batches have that are run.")]
Required = Annotated[str, typer.Option(metavar="OUTCOME", help="What has to be certified: proven or observed.")]
CertificateFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the certificate here.", show_default="nowhere")
]
TracedFunction = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        help="A function without parameters that returns (fn, args) or (fn, args, options of trace_digests).",
    ),
]
TraceFile = Annotated[Path, typer.Option("--out", metavar="FILE", help="Write the trace to this file.")]
FirstTrace = Annotated[
    str, typer.Argument(metavar="A", help="A trace, or MODULE:FUNCTION as detjax trace takes it, which shows values.")
]
SecondTrace = Annotated[str, typer.Argument(metavar="B", help="Another one, to be compared with the first.")]
ComparedRows = Annotated[
    tuple[int, int] | None,
    typer.Option(
        metavar="I J",
        help="Compare row I of the first run with row J of the second.",
        show_default="all rows of batches of one size",
    ),
]
Isolate = Annotated[
    bool, typer.Option("--isolate", help="Also run each layer of B with the inputs that it had in A. Needs functions.")
]
BisectionFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result here.", show_default="nowhere")
]
DriftPlot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw how the difference grows, as PNG.", show_default="do not"),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Write all completions and the fingerprint here.", show_default="nowhere"
    ),
]

# --- the server ------------------------------------------------------------------------------------------------------

_ADDRESS, _CLIENTS, _CONNECTIONS = "Address and names", "Clients", "Connections"
_ENGINE, _LOG, _PROGRAMS = "Engine", "Log", "Compiled programs"

API_KEY_VARIABLE: Final = "DETJAX_API_KEY"
"""The environment variable with the key that clients need, where the command line names none."""

Host = Annotated[
    str,
    typer.Option(metavar="ADDRESS", help="Listen on this address; 0.0.0.0: on all.", rich_help_panel=_ADDRESS),
]
Port = Annotated[int, _count("Listen on this port; 0: any that is free.", panel=_ADDRESS)]
Names = Annotated[
    list[str] | None,
    typer.Option(
        "--name",
        metavar="TEXT",
        help="What clients call the model; repeat it for several names.",
        show_default="the directory's name",
        rich_help_panel=_ADDRESS,
    ),
]
TLSCertificate = Annotated[
    Path | None,
    typer.Option(
        "--tls-certificate",
        metavar="FILE",
        help="Serve HTTPS with this certificate, in PEM format.",
        show_default="HTTP",
        rich_help_panel=_ADDRESS,
    ),
]
TLSKey = Annotated[
    Path | None,
    typer.Option(
        "--tls-key",
        metavar="FILE",
        help="The certificate's private key.",
        show_default="in the certificate's file",
        rich_help_panel=_ADDRESS,
    ),
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Use this chat template, written in Jinja.",
        show_default="the checkpoint's",
        rich_help_panel=_CLIENTS,
    ),
]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        help="Require this key of clients; repeat it for several. Other users can see a command line, but not its "
        f"environment: without this option the key is that of {API_KEY_VARIABLE}.",
        show_default="no key",
        rich_help_panel=_CLIENTS,
    ),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-host",
        metavar="HOST",
        help="Serve requests that name this host; repeat it for several. *.example.com: all below it; *: all.",
        show_default="localhost, when listening on it without a key; else all",
        rich_help_panel=_CLIENTS,
    ),
]
AllowedOrigins = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-origin",
        metavar="ORIGIN",
        help="Let web pages of this origin, such as https://example.com, use the server from browsers; repeat it for "
        "several. *: all.",
        show_default="none",
        rich_help_panel=_CLIENTS,
    ),
]
MaxSamples = Annotated[int, _count("Samples computed at the same time.", panel=_ENGINE)]
TokenBudget = Annotated[int, _count("Tokens of a step at most.", panel=_ENGINE)]
MaxLength = Annotated[
    int | None, _count("Tokens of a prompt and its answer at most.", "the model's limit", panel=_ENGINE)
]
RunsOf = Annotated[
    int | None,
    _count(
        "Samples at most for which the device computes four tokens at a time while no request waits; 0: one at a time.",
        "64 on GPUs, 0 elsewhere",
        panel=_ENGINE,
    ),
]
NumPages = Annotated[
    int | None,
    _count(
        f"Pages of the KV cache, of {KV_BLOCK} tokens each.", "what is needed, as far as there is memory", panel=_ENGINE
    ),
]
PrefixCache = Annotated[
    bool,
    typer.Option(
        "--prefix-cache/--no-prefix-cache", help="Keep pages for prompts that begin alike.", rich_help_panel=_ENGINE
    ),
]
SnapshotBytes = Annotated[
    int,
    typer.Option(
        "--snapshot-bytes",
        metavar="BYTES",
        help="Host memory at most for snapshots, which models with linear attention need for prompts that begin alike.",
        rich_help_panel=_ENGINE,
    ),
]
SnapshotTokens = Annotated[
    int,
    typer.Option(
        "--snapshot-tokens",
        metavar="N",
        help="How many tokens a snapshot must spare those who go on from it. Fewer are sooner computed than copied.",
        rich_help_panel=_ENGINE,
    ),
]
SeparatePrefixes = Annotated[
    bool,
    typer.Option(
        "--separate-prefixes/--shared-prefixes",
        help="Keep pages for clients of each API key apart, so that no client can tell by time what others sent.",
        rich_help_panel=_CLIENTS,
    ),
]
TopLogprobs = Annotated[int, _count("The most of the likeliest tokens that a request may ask for.", panel=_ENGINE)]
MaxQueue = Annotated[int, _count("Samples that may wait; further requests get status 429.", panel=_CLIENTS)]
MaxBody = Annotated[int, _count("Bytes of a request at most.", metavar="BYTES", panel=_CLIENTS)]
ImageDirectory = Annotated[
    Path | None,
    typer.Option(
        "--image-directory",
        metavar="DIRECTORY",
        help="Requests may name the files of this directory as images and videos.",
        show_default="images come with requests alone",
        rich_help_panel=_CLIENTS,
    ),
]
Unseeded = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="The seed of requests that give none: random draws one for each prompt, and the answer says it; fixed "
        "takes 0, so that the same request has the same answer.",
        rich_help_panel=_CLIENTS,
    ),
]
RequestSeconds = Annotated[float, _seconds("Time that an answer may take.", _CLIENTS)]
TextSeconds = Annotated[
    float, _seconds("CPU time that the chat template and the tokenizer may take for a request.", _CLIENTS)
]
Grace = Annotated[
    float,
    _seconds(
        "Time that requests in flight have when the server is told to stop; a second signal ends it.", _CONNECTIONS
    ),
]
MaxConnections = Annotated[int, _count("Open connections at most.", panel=_CONNECTIONS)]
HeaderSeconds = Annotated[
    float, _seconds("Time that a client may take until a request's headers are complete.", _CONNECTIONS)
]
IdleSeconds = Annotated[float, _seconds("Time that a connection stays open between two requests.", _CONNECTIONS)]
WriteSeconds = Annotated[
    float, _seconds("Time in which a client has to read 16 KiB of an answer that waits for it.", _CONNECTIONS)
]
MaxUnsent = Annotated[
    int, _count("Bytes of streams that may wait for slow clients.", metavar="BYTES", panel=_CONNECTIONS)
]
AccessLog = Annotated[
    bool, typer.Option("--access-log/--no-access-log", help="Log a line for each request.", rich_help_panel=_LOG)
]
LogLevel = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"Log messages of this severity or more: {', '.join(LOG_LEVELS)}.",
        rich_help_panel=_LOG,
    ),
]
LogFormat = Annotated[
    str,
    typer.Option(metavar="NAME", help=f"Log as {' or '.join(LOG_FORMATS)}, an object a line.", rich_help_panel=_LOG),
]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Keep compiled programs here. Nobody else may be able to write to it.",
        show_default="detjax in the user's cache",
        rich_help_panel=_PROGRAMS,
    ),
]
Certify = Annotated[
    bool,
    typer.Option(
        "--certify",
        help="Before serving, check that no program leaves a bit to the compiler; the exit code is 1 if one does.",
        rich_help_panel=_PROGRAMS,
    ),
]
CompilationCache = Annotated[
    bool,
    typer.Option(
        "--compilation-cache/--no-compilation-cache", help="Keep compiled programs.", rich_help_panel=_PROGRAMS
    ),
]

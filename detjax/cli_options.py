"""The types of the command line's options, with their help texts. Commands share them and choose the defaults."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from detjax import backends
from detjax.contract import KV_BLOCK
from detjax.options import KVQuantization


def _integer(text: str) -> int:
    return _number(int, text, "an integer")


def _real(text: str) -> float:
    return _number(float, text, "a number")


def _number[N](kind: Callable[[str], N], text: str, accepted: str) -> N:
    """Parses a number. Typer's own parsers do not say what is accepted."""
    try:
        return kind(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is given; accepted: {accepted}") from None


def _count(help_text: str, show_default: bool | str = True, metavar: str = "N") -> Any:
    return typer.Option(metavar=metavar, parser=_integer, help=help_text, show_default=show_default)


def _quantity(help_text: str, show_default: bool | str = True, metavar: str = "X") -> Any:
    return typer.Option(metavar=metavar, parser=_real, help=help_text, show_default=show_default)


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
KVCacheDType = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Quantize the KV cache: {', '.join(get_args(KVQuantization))}.",
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

# --- the demonstration -----------------------------------------------------------------------------------------------

Asks = Annotated[int, _count("How often the question is asked.")]
LoadSeed = Annotated[int, _count("Seed of the loads.")]
HistogramFile = Annotated[Path, typer.Option("--output", metavar="FILE", help="Write the histogram to this PNG.")]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Write all completions and the fingerprint here.", show_default="nowhere"
    ),
]

# --- the server ------------------------------------------------------------------------------------------------------

Host = Annotated[str, typer.Option(metavar="ADDRESS", help="Listen on this address; 0.0.0.0: on all.")]
Port = Annotated[int, _count("Listen on this port; 0: any that is free.")]
Name = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="What clients call the model.", show_default="the directory's name"),
]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        envvar="DETJAX_API_KEY",
        help="Require this key of clients; repeat it for several. Other users can see a command line, but not its "
        "environment.",
        show_default="no key",
    ),
]
MaxSamples = Annotated[int, _count("Samples computed at the same time.")]
TokenBudget = Annotated[int, _count("Tokens of a step at most.")]
MaxLength = Annotated[int | None, _count("Tokens of a prompt and its answer at most.", "the model's limit")]
NumPages = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=_integer,
        help=f"Pages of the KV cache, of {KV_BLOCK} tokens each.",
        show_default="what is needed, as far as there is memory",
    ),
]
PrefixCache = Annotated[
    bool, typer.Option("--prefix-cache/--no-prefix-cache", help="Keep pages for prompts that begin alike.")
]
TopLogprobs = Annotated[int, _count("The most of the likeliest tokens that a request may ask for.")]
MaxQueue = Annotated[int, _count("Samples that may wait; further requests get status 429.")]
MaxBody = Annotated[int, _count("Bytes of a request at most.", metavar="BYTES")]
RequestSeconds = Annotated[float, _quantity("Seconds that an answer may take.")]
Grace = Annotated[
    float, _quantity("Seconds that requests in flight have when the server is told to stop.", metavar="SECONDS")
]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Keep compiled programs here. Whoever can write to it can run programs in this process.",
        show_default="detjax in the user's cache",
    ),
]
CompilationCache = Annotated[
    bool, typer.Option("--compilation-cache/--no-compilation-cache", help="Keep compiled programs.")
]

"""How long it takes to verify transcripts, beside how long it took to generate them.

    python benchmarks/verify.py --out benchmarks/results/verify-h200.json

An engine of Qwen3-8B's shape answers 1000 requests, greedy, sampled, filtered and with penalties: all at once, 64 at a
time and 4 at a time. `detjax.verify` checks the transcripts by one forward pass over prompts and answers, and refuses
each of them with another token, another bit of a logprob, or another prompt. Times of generation include prefills.

`--small` takes a CPU seconds, and minutes with `--requests 1000`. The exit code is 1 if a verdict is wrong, or if runs
have other bits.
"""

import dataclasses
from typing import Annotated, Any, cast

import typer

from detjax import backends
from detjax.bench import command_line, presets, provenance, verify
from detjax.options import KVQuantization

app = command_line.application()
_DEFAULT = verify.Sizes()


@app.command(help=command_line.help_text(__doc__))
def main(
    preset: Annotated[
        str, typer.Option(metavar="NAME", help=f"The model's shape: {', '.join(presets.MODELS)}.")
    ] = _DEFAULT.preset,
    layers: Annotated[
        int | None, typer.Option(min=1, help="The number of layers.", show_default="the preset's own")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The number of requests.",
            show_default=f"{_DEFAULT.requests}; {verify.SMALL.requests} with --small",
        ),
    ] = None,
    prompt: Annotated[
        tuple[int, int], typer.Option(min=1, help="Tokens of the shortest and of the longest prompt.")
    ] = _DEFAULT.prompt,
    output: Annotated[
        tuple[int, int], typer.Option(min=1, help="The fewest and the most tokens of an answer.")
    ] = _DEFAULT.output,
    at_once: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Requests that are generated at the same time; repeatable.", show_default="1000 64 4"),
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="All requests are greedy.")] = False,
    kv_cache_dtype: Annotated[str | None, typer.Option(metavar="NAME", help="Quantize the KV cache.")] = None,
    small: command_line.Small = False,
    out: command_line.Out = None,
) -> None:
    with command_line.bad_parameters():
        command_line.check_names("--preset", [preset], presets.MODELS)
        cache = cast(KVQuantization | None, kv_cache_dtype)
        sizes = verify.SMALL if small else verify.Sizes(preset, layers, prompt=prompt, output=output)
        given = {"requests": requests, "at_once": None if at_once is None else tuple(at_once)}
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        sizes = dataclasses.replace(sizes, mixed=sizes.mixed and not greedy, kv_cache_dtype=cache, **chosen)
        result = verify.measured(sizes, "python benchmarks/verify.py")
    verified = result["verified"]
    command_line.print_line(
        f"{verified['transcripts']} transcripts, {result['prompt_tokens']} prompt and {result['generated_tokens']} "
        f"generated tokens: verified in {verified['seconds']:.2f} s, {verified['refused']} refused"
    )
    for count, run in result["generated"].items():
        command_line.print_line(
            f"generated {count} at a time: {run['seconds']:.2f} s; the verification takes "
            f"{run['verified_in_this_share']:.1%} of it"
        )
    for kind, count in result["altered"]["refused"].items():
        command_line.print_line(f"with another {kind}: {count} of {verified['transcripts']} refused")
    if out is not None:
        note = {"note": command_line.ON_A_CPU} if small and backends.backend() == "portable" else {}
        provenance.write(out, result | note)
    if messages := verify.problems(result):
        raise command_line.fail("; ".join(messages))


if __name__ == "__main__":
    app()

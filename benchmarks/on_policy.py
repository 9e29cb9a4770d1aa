"""Logprobs of sampled tokens from the engine and from the trainer: how many bits are unequal.

    python benchmarks/on_policy.py --out benchmarks/results/on-policy-h200.json

The engine samples 65,536 tokens for mixed requests: temperatures 0, 0.6, 1 and 1.5, with and without filters, prompts
of many lengths that share prefixes, two samples each, prefilled in chunks beside others' decodes. The trainer computes
the logprobs of the same tokens, of the model and of the distributions that they were drawn from, on packed rows.

`--small` takes a CPU seconds. The exit code is 1 if a bit is unequal. Under `DETJAX_BACKEND=stock`, it has to be.
"""

import dataclasses
from typing import Annotated

import typer

from detjax import backends
from detjax.bench import command_line, on_policy, presets, provenance

app = command_line.application()


@app.command(help=command_line.help_text(__doc__))
def main(
    preset: Annotated[
        str, typer.Option(metavar="NAME", help=f"The model's shape: {', '.join(presets.MODELS)}.")
    ] = on_policy.Sizes.preset,
    layers: Annotated[
        int | None, typer.Option(min=1, help="The number of layers.", show_default="the preset's own")
    ] = None,
    packed: Annotated[bool, typer.Option("--packed/--rows", help="How the trainer lays sequences out.")] = True,
    small: command_line.Small = False,
    out: command_line.Out = None,
) -> None:
    with command_line.bad_parameters():
        command_line.check_names("--preset", [preset], presets.MODELS)
    sizes = on_policy.SMALL if small else on_policy.Sizes(preset, layers)
    sizes = dataclasses.replace(sizes, is_packed=packed)
    results = on_policy.compared(sizes)
    for name, result in results.items():
        command_line.print_line(f"{name}: {result}")
    if out is not None:
        heading = provenance.heading("python benchmarks/on_policy.py") | {"sizes": dataclasses.asdict(sizes)}
        note = {"note": command_line.ON_A_CPU} if small and backends.backend() == "portable" else {}
        provenance.write(out, heading | note | {"results": results})
    if unequal := {name: result["unequal_tokens"] for name, result in results.items() if result["unequal_tokens"]}:
        raise command_line.fail(f"sampler and trainer have unequal bits: {unequal}")


if __name__ == "__main__":
    app()

# ruff: noqa: E501 (prose)
"""The pages of benchmarks, rendered from benchmarks/results/*.json: no number on them is typed."""

import functools
import io
import json
import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any, Final

import matplotlib
from matplotlib.figure import Figure

from benchmarks import goals
from benchmarks.expressions import RESULTS, sources

ON_POLICY: Final = tuple(
    f"on-policy{name}-h200" for name in ("", "-8b", "-experts", "-sinks", "-latents", "-hybrid", "-stock")
)
"""The results that compare the trainer's logprobs with the sampler's; the last one is the negative control."""
COLORS: Final = ("#2a7f8e", "#d1603d", "#e0a83e", "#8a79b5", "#8c8c8c")

Row = list[Any]


@functools.cache
def result(name: str) -> Any:
    """Returns a result file's content."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Returns a table in Markdown."""
    lines = [list(head), ["---"] * len(list(head)), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def seconds(value: float | None) -> str:
    """Returns a duration with the unit that suits it and three digits."""
    if value is None:
        return ""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1 or unit == "µs":
            return f"{_digits(value * factor)} {unit}"
    return ""


def _digits(value: float, digits: int = 3) -> str:
    if not math.isfinite(value):
        return str(value)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{decimals}f}"


def ratio(value: float | None) -> str:
    """Returns a ratio with two decimals."""
    return "" if value is None else f"{value:.2f}"


def share(value: float) -> str:
    """Returns a share as percents."""
    return f"{100 * value:.1f}%"


def source(*names: str) -> str:
    """Returns where numbers come from: file, device, versions, date and command, as the files say them."""
    rows = []
    for name in names:
        content = result(name)
        fingerprint = content.get("fingerprint", {})
        versions = content.get("versions", {})
        rows.append(
            (
                f"[`{name}.json`](../../benchmarks/results/{name}.json)",
                fingerprint.get(
                    "device_kind",
                    content.get("device", {}).get("kind", "CPU")
                    if isinstance(content.get("device"), dict)
                    else "see the file",
                ),
                fingerprint.get("contract_version", ""),
                versions.get("jax", fingerprint.get("jax", "")),
                content.get("created", "")[:10],
                f"`{content['command']}`" if isinstance(content.get("command"), str) else "",
            )
        )
    return "**Sources**\n\n" + table(("file", "device", "contract", "jax", "date", "command"), rows)


def _geometric_mean(values: Iterable[float]) -> float:
    return statistics.geometric_mean(list(values))


def _serving() -> str:
    rows = []
    for name in ("serve-h200", "serve-stock-h200"):
        content = result(name)
        for run, figures in content["runs"].items():
            rows.append(
                (
                    content["numerics"],
                    run,
                    seconds(figures["seconds"]),
                    f"{figures['generated_tokens']:,}",
                    f"{figures['generated_tokens_per_second']:,.0f}",
                    seconds(figures["percentiles"]["latency"]["p95"]),
                    f"`{figures['digest'][:8]}`",
                )
            )
    one = []
    for name in ("serve-one-h200", "serve-one-stock-h200"):
        content = result(name)
        times = [run["percentiles"]["time_per_token"]["p50"] for run in content["runs"].values()]
        one.append(
            (
                content["numerics"],
                len(times),
                seconds(min(times)),
                seconds(statistics.median(times)),
                seconds(max(times)),
                len({run["digest"] for run in content["runs"].values()}),
            )
        )
    ready = result("ready-h200")["seconds"]
    structured = result("structured-h200")["speeds"]
    answers = result("structured-answers-h200")["answers"]
    return "\n".join(
        (
            "# Serving",
            "",
            "The engine with the shape of Qwen3-8B in bfloat16 and random weights, at temperature 0. Runs have the same requests in "
            "different orders; the last one mixes them with others, some of which are cancelled. Equal digests are equal "
            "tokens and logprobs of all answers, bit for bit.\n",
            "## Many requests at once\n",
            table(
                (
                    "numerics",
                    "run",
                    "all answers after",
                    "generated tokens",
                    "tokens a second",
                    "95% of latencies within",
                    "digest of the answers",
                ),
                rows,
            ),
            "![Serving: time to first token and time per token](../../benchmarks/results/serve-h200.png)\n",
            "## One request at a time\n",
            table(
                ("numerics", "runs", "fastest, a token", "median, a token", "slowest, a token", "different answers"),
                one,
            ),
            "## From the start of the process until requests are taken\n",
            table(
                ("", "weights are there", "takes requests", "all programs are there"),
                (
                    (name, *(seconds(times[key]) for key in ("model", "ready", "complete")))
                    for name, times in ready.items()
                ),
            ),
            "## Answers that follow a schema\n",
            table(
                ("requests at once", "tokens a second", "without a constraint", "ratio"),
                (
                    (
                        row["requests"],
                        f"{row['tokens_per_second']:,.0f}",
                        f"{row['unconstrained']:,.0f}",
                        share(row["ratio"]),
                    )
                    for row in structured
                ),
            ),
            f"Of {answers['schemas']} answers to random schemas, {answers['valid']} were valid; {len(answers['differing'])} had other bits in a crowd.\n",
            source(
                "serve-h200",
                "serve-stock-h200",
                "serve-one-h200",
                "serve-one-stock-h200",
                "ready-h200",
                "structured-h200",
                "structured-answers-h200",
            ),
        )
    )


def _matmul() -> str:
    content = result("matmul-h200")
    by_linear: dict[str, list[dict[str, Any]]] = {}
    for cell in content["cells"]:
        by_linear.setdefault(f"{cell['n']} × {cell['k']}: {', '.join(cell['linears'])}", []).append(cell)
    bits = content["bits"]
    return "\n".join(
        (
            "# Matrix products",
            "",
            "Linear layers of Qwen3 and Llama in bfloat16, for 1 to 8192 tokens in a call. Weights come from memory, not "
            "from a cache. Ratios are speed over the rival: above 1, detjax is faster.\n",
            table(
                ("rival", "products", "geometric mean", "lowest"),
                (
                    (
                        rival,
                        len(content["cells"]),
                        f"{mean:.3f}",
                        f"{min(cell['ratios'][rival] for cell in content['cells']):.3f}",
                    )
                    for rival, mean in content["summary"]["geometric_means"].items()
                ),
            ),
            "![Speed over XLA by tokens in a call](../../benchmarks/results/matmul-h200-over-tokens.png)\n",
            "## By layer\n",
            table(
                ("N × K and layers", "over XLA, mean", "lowest", "over torch, mean", "lowest"),
                (
                    (
                        name,
                        ratio(_geometric_mean(cell["ratios"]["xla"] for cell in cells)),
                        ratio(min(cell["ratios"]["xla"] for cell in cells)),
                        ratio(_geometric_mean(cell["ratios"]["torch"] for cell in cells)),
                        ratio(min(cell["ratios"]["torch"] for cell in cells)),
                    )
                    for name, cells in by_linear.items()
                ),
            ),
            "![Speed over XLA by layer and tokens](../../benchmarks/results/matmul-h200-cells.png)\n",
            "## With an epilogue\n",
            table(
                ("product", "tokens", "detjax", "XLA", "ratio"),
                (
                    (
                        cell["case"],
                        cell["m"],
                        seconds(cell["seconds"]["detjax"]),
                        seconds(cell["seconds"]["xla"]),
                        ratio(cell["ratios"]["xla"]),
                    )
                    for cell in content["epilogues"]
                ),
            ),
            "## Bits\n",
            f"{bits['anchor_rows']:,} anchor rows, {bits['schedules']} schedules and {bits['repeats']:,} repeated runs were compared; "
            f"{len(bits['differences'])} differed.\n",
            source("matmul-h200"),
        )
    )


def _rows() -> str:
    content = result("norms-h200")
    return "\n".join(
        (
            "# Norms, softmax and sampling",
            "",
            'Operations on rows. "Share of a copy" is the bandwidth of a device copy of as many bytes that the operation '
            "reaches; the last column is speed over XLA's own operation.\n",
            table(
                ("operation", "rows", "detjax", "a copy", "XLA", "share of a copy", "over XLA", "same bits"),
                (
                    (
                        row["case"],
                        row["rows"],
                        seconds(row["seconds"]["hopper"]),
                        seconds(row["seconds"]["copy"]),
                        seconds(row["seconds"]["stock"]),
                        share(row["seconds"]["copy"] / row["seconds"]["hopper"]),
                        ratio(row["seconds"]["stock"] / row["seconds"]["hopper"]),
                        "yes"
                        if row.get("same_bits_over_rows", True) and row.get("same_bits_over_runs", True)
                        else "no",
                    )
                    for row in content["results"]
                ),
            ),
            source("norms-h200"),
        )
    )


def _attention() -> str:
    content, quantized, bits = (
        result("attention-h200"),
        result("attention-quantized-h200"),
        result("attention-bits-h200")["bits"],
    )

    def times(row: dict[str, Any], what: str) -> Row:
        measured = row["seconds"][what]
        return [
            row["case"],
            row["head_dim"],
            seconds(measured.get("detjax")),
            seconds(measured.get("cudnn")),
            ratio(row["ratios"][what].get("cudnn")),
        ]

    return "\n".join(
        (
            "# Attention",
            "",
            "bfloat16, causal, keys and values in pages of 128 tokens, against cuDNN's attention on contiguous arrays. Cases "
            "are requests × tokens. Ratios are speed over cuDNN.\n",
            "## Prefill\n",
            table(
                ("case", "head size", "detjax", "cuDNN", "ratio", "TFLOP/s"),
                ([*times(row, "kernels"), row["teraflops"]["detjax"]] for row in content["prefill"]),
            ),
            "## Decode\n",
            table(
                ("case", "head size", "detjax", "cuDNN", "ratio", "GB/s"),
                (
                    [*times(row, "kernels"), row["gigabytes_per_second"]["kernels"]["detjax"]]
                    for row in content["decode"]
                ),
            ),
            "![Attention's speed over cuDNN's](../../benchmarks/results/attention-h200-prefill-decode.png)\n",
            "## Gradients\n",
            table(
                ("case", "head size", "detjax", "cuDNN", "ratio", "TFLOP/s"),
                ([*times(row, "backward"), row["teraflops"]["detjax"]] for row in content["backward"]),
            ),
            "## Quantized pages in decode\n",
            table(
                ("case", "bfloat16", "int8", "fp8_e4m3", "q4_0", "int8 over bfloat16", "fp8", "q4_0 "),
                (
                    [
                        row["case"],
                        *(seconds(row["seconds"]["kernels"][key]) for key in ("detjax", "int8", "fp8_e4m3", "q4_0")),
                        *(
                            ratio(row["seconds"]["kernels"]["detjax"] / row["seconds"]["kernels"][key])
                            for key in ("int8", "fp8_e4m3", "q4_0")
                        ),
                    ]
                    for row in quantized["quantized"]
                ),
            ),
            "## Latents\n",
            "Latent attention with the shape of DeepSeek-V3. Cases are requests × cached tokens, and queries of each. A copy of the "
            "cache reads it once and writes it once.\n",
            table(
                ("case", "detjax", "a copy", "TFLOP/s"),
                (
                    [
                        row["case"],
                        *(seconds(row["seconds"]["kernels"][key]) for key in ("detjax", "copy")),
                        row["teraflops"]["detjax"],
                    ]
                    for row in result("attention-latents-h200")["latents"]
                ),
            ),
            "## Bits\n",
            f"{sum(bits['tokens'].values()):,} tokens were compared in {len(bits['tokens'])} ways, with {bits['repeats']:,} repeated runs and "
            f"{bits['options']} combinations of options; {len(bits['differences'])} differed.\n",
            source("attention-h200", "attention-quantized-h200", "attention-latents-h200", "attention-bits-h200"),
        )
    )


def _experts() -> str:
    content = result("experts-h200")
    rivals = ("tokamax, mosaic", "ragged dot", "dense")
    delta, *times = result("delta-rule-h200")["results"]
    aggregations = {name: result(f"aggregation-{name}")["results"] for name in ("tiny-cpu", "h200")}
    sizes = result("aggregation-h200")["sizes"]
    return "\n".join(
        (
            "# Experts and the delta rule",
            "",
            "Both projections of a layer's experts, device time. The last column is detjax's time over that of the fastest rival: below 1, detjax is faster.\n",
            table(
                ("model", "tokens", "detjax", *rivals, "over the fastest", "same bits alone"),
                (
                    (
                        row["model"],
                        row["tokens"],
                        seconds(row["seconds"]["detjax"]),
                        *(seconds(row["seconds"].get(rival)) for rival in rivals),
                        ratio(row["over_the_best_rival"]),
                        "yes" if row["same_bits_alone"] else "no",
                    )
                    for row in content["results"]
                ),
            ),
            f"## Delta rule\n\nBits on an H200 with the shape of {delta['model']}, {delta['tokens']} tokens:\n",
            table(
                ("compared", "same bits"),
                ((name, "yes" if same else "no") for name, same in delta["same_bits"].items()),
            ),
            "Device time against plain XLA. Its decode reads and writes the state at every token; its prefill cuts chunks where a call begins.\n",
            table(
                ("part", "size", "detjax", "XLA", "detjax over XLA"),
                (
                    (
                        row["part"],
                        f"{row['requests']} in a step" if "requests" in row else f"{row['tokens']} tokens",
                        seconds(row["seconds"]["detjax"]),
                        seconds(row["seconds"].get("recurrence", row["seconds"].get("chunked"))),
                        ratio(row["seconds_over_the_rival"]),
                    )
                    for row in times
                ),
            ),
            f"## Other aggregations\n\nHow far other ways to add experts are from the contract: with a tiny checkpoint on a CPU, and with {sizes['layers']} "
            f"layers of the shape of {sizes['preset']} on an H200.\n",
            table(
                (
                    "aggregation",
                    "CPU: k3",
                    "unequal tokens",
                    "same likeliest token",
                    "H200: k3",
                    "unequal tokens ",
                    "same likeliest token ",
                ),
                (
                    (
                        f"`{rows[0]['aggregation']}`",
                        *(
                            cell
                            for row in rows
                            for cell in (
                                f"{row['k3']:.1e}" if row["k3"] else "0",
                                share(row["unequal_share"]),
                                share(row["top_1_agreement"]),
                            )
                        ),
                    )
                    for rows in zip(*aggregations.values(), strict=True)
                ),
            ),
            source(
                "experts-h200", "expert-schedules-h200", "delta-rule-h200", "aggregation-tiny-cpu", "aggregation-h200"
            ),
        )
    )


def _training() -> str:
    content = result("training-h200")
    policies = []
    for name in ON_POLICY:
        measured = result(name)["results"]["model"]
        policies.append(
            (
                name.removesuffix("-h200"),
                result(name)["sizes"]["preset"],
                result(name)["sizes"]["layers"] or "all",
                f"{measured['tokens']:,}",
                f"{measured['unequal_tokens']:,}",
            )
        )
    tunix = result("tunix-cpu")["results"]
    return "\n".join(
        (
            "# Training",
            "",
            "## A step\n",
            table(("", "a step"), ((name, seconds(value)) for name, value in content["steps"]["seconds"].items())),
            "## Gradients by operation\n",
            table(
                ("operation", "detjax", "stock", "detjax over stock"),
                (
                    (
                        row["name"],
                        seconds(row["seconds"]["detjax"]),
                        seconds(row["seconds"]["stock"]),
                        ratio(row["over_stock"]),
                    )
                    for row in content["gradients"]
                ),
            ),
            "## The sampler's logprobs and the trainer's\n",
            table(("run", "shape", "layers", "tokens", "with other bits"), policies),
            "## Whole runs of reinforcement learning\n",
            "![Reward, greedy score, k3, gradient norm and entropy](../../benchmarks/results/true-on-policy-h200.png)\n",
            "## Tunix' learners\n",
            table(
                ("learner", "numerics", "dtype", "tokens", "with other bits", "largest difference"),
                (
                    (
                        row["learner"],
                        row["numerics"],
                        row["dtype"],
                        f"{row['tokens']:,}",
                        f"{row['unequal_tokens']:,}",
                        f"{row['largest_difference']:.2g}",
                    )
                    for row in tunix
                ),
            ),
            source(
                "training-h200",
                *ON_POLICY,
                "true-on-policy-h200",
                "true-on-policy-cpu",
                "tunix-cpu",
            ),
        )
    )


def _demo() -> str:
    rows = []
    for name in ("demo-cpu", "demo-h200"):
        content = result(name)
        for numerics in ("stock", "detjax"):
            measured = content[numerics]
            rows.append(
                (
                    content["fingerprint"]["device_kind"],
                    numerics,
                    content["asks"],
                    measured["unique_completions"],
                    measured["unique_logprob_bits"],
                    ", ".join(f"{completion['count']}" for completion in measured["completions"]),
                )
            )
    portable = []
    for name in ("portable-cpu", "portable-h200"):
        content = result(name)
        portable.append((content["fingerprint"]["device_kind"], ratio(content["geometric_mean"])))
    return "\n".join(
        (
            "# One question, a thousand times",
            "",
            "`detjax demo` asks one question at temperature 0 in batches of changing size.\n",
            table(
                (
                    "device",
                    "numerics",
                    "asked",
                    "different completions",
                    "different sets of logprob bits",
                    "how often each came",
                ),
                rows,
            ),
            "![How often each completion came on a CPU](../../benchmarks/results/demo-cpu.png)\n",
            "![How often each completion came on an H200](../../benchmarks/results/demo-h200.png)\n",
            "## The portable backend\n\nTime over XLA's own operations, geometric mean of operations and a small model:\n",
            table(("device", "time over XLA"), portable),
            source("demo-cpu", "demo-h200", "portable-cpu", "portable-h200"),
        )
    )


def _devices() -> str:
    run = result("run-h200")
    rows = [
        (
            row["operation"],
            row["name"],
            seconds(row["seconds"]["median"]),
            seconds(row["stock_seconds"]["median"]),
            ratio(row["stock_seconds"]["median"] / row["seconds"]["median"]),
        )
        for row in run["rows"]
        if row.get("seconds") and row.get("stock_seconds")
    ]
    chips = ("v5e", "v5p", "v6e", "tpu7x")
    compiled = {
        chip: {(row["operation"], row["name"]): row for row in result(f"compile-{chip}")["rows"]} for chip in chips
    }

    def memory(row: dict[str, Any] | None) -> str:
        if not row or not row.get("memory"):
            return "does not fit"
        return f"{row['memory']['argument'] / 2**30:.2f} + {row['memory']['temp'] / 2**30:.2f}"

    models = [key for key in compiled["v5p"] if "step" in key[0] or "model" in key[0] or "decoder" in key[0]]
    return "\n".join(
        (
            "# Every operation, on every device",
            "",
            "`python -m detjax.bench run --out FILE` measures each operation and whole steps on whatever device there is; `compare` puts such files side by side.\n",
            "## NVIDIA H200\n",
            table(("operation", "case", "detjax", "stock", "speed over stock"), rows),
            "## TPUs, by their compiler\n",
            "No TPU has run detjax yet. libtpu's compiler needs none; it says how much memory a program takes, in GiB: held + temporary.\n",
            table(
                ("operation", "case", *chips),
                ((*key, *(memory(compiled[chip].get(key)) for chip in chips)) for key in models),
            ),
            "![Steps of K in XLA's own dot on four TPUs](../../benchmarks/results/tpu-dots.png)\n",
            source("run-h200", "run-small-cpu", "run-small-h200", *(f"compile-{chip}" for chip in chips)),
        )
    )


def _soak() -> str:
    parts = [
        "# Attacks on the server",
        "",
        "`make soak` attacks real servers from outside. Each attack has bars that it must meet. The attacks disk, "
        "mutations and reproductions are no longer in the repository.\n",
    ]
    for attack in ("load", "kills", "disk", "mutations", "reproductions"):
        content = result(f"soak-{attack}-cpu")
        parts += [
            f"## {attack}\n",
            f"{len(content['bars'])} bars, of which {len(content['missed'])} were missed, in {seconds(content['seconds'])}.\n",
            table(
                ("bar", "accepted", "met"),
                (
                    (
                        bar["name"].replace("|", "/"),
                        str(bar["accepted"]).replace("|", "/"),
                        "yes" if bar["is_met"] else "no",
                    )
                    for bar in content["bars"]
                ),
            ),
        ]
    return "\n".join(parts)


def _peers() -> str:
    content = result("peer-vllm-h200")
    rows = [
        (
            engine["name"],
            ", ".join(f"{1000 * value:.2f}" for value in engine["one_request_seconds_per_token"]),
            ", ".join(f"{value:.2f}" for value in engine["seconds"]) or "–",
            ", ".join(f"{value:.2f}" for value in engine["seconds_with_logprobs"]) or "–",
            engine["different_answers"],
            f"{engine['ready_seconds']:.0f}",
        )
        for engine in content["engines"]
    ]
    mesh = content["tensor_parallel"]
    return "\n".join(
        (
            "# Beside vLLM, on one H200",
            "",
            f"{content['conditions']}\n",
            table(
                (
                    "engine",
                    "one request: ms a token",
                    "1000 requests: s",
                    "with logprobs: s",
                    "different answers of all orders",
                    "seconds until ready",
                ),
                rows,
            ),
            "![Seconds for 1000 requests and milliseconds a token](peers.svg#only-light)![Seconds for 1000 requests and milliseconds a token](peers-dark.svg#only-dark)\n",
            "## Tensor parallelism on 4 H200s\n",
            f"{mesh['conditions']}\n",
            table(
                ("", "TP 1", "TP 2", "TP 4", "bits of TP 1"),
                (
                    (
                        row["name"],
                        *(f"{1000 * row['seconds'][size]:.1f} ms" for size in ("1", "2", "4")),
                        "kept" if row["keeps_bits"] else "lost",
                    )
                    for row in mesh["rows"]
                ),
            ),
            "[Compared with](../compared.md) says what the others promise. `python -m benchmarks peer_vllm` repeats the measurement where vLLM is installed.\n",
            source("peer-vllm-h200"),
        )
    )


TOPICS: Final[dict[str, Callable[[], str]]] = {
    "demo": _demo,
    "serving": _serving,
    "peers": _peers,
    "matmul": _matmul,
    "rows": _rows,
    "attention": _attention,
    "experts": _experts,
    "training": _training,
    "devices": _devices,
    "soak": _soak,
}


def _goals() -> str:
    return table(
        ("goal", "value", "bar", "met", "results"),
        (
            (
                goal.meaning,
                goal.shown(goal.value),
                goal.shown_bar,
                "yes" if goal.is_met else "no",
                ", ".join(f"[{name}](../../benchmarks/results/{name})" for name in sources(goal.expression)),
            )
            for goal in goals.read()
        ),
    )


@functools.cache
def pages() -> dict[str, str]:
    """Returns every page of benchmarks, by its address on the site. The first lists them and all result files."""
    topics = {f"benchmarks/{name}.md": page() for name, page in TOPICS.items()}
    listed = "\n".join(
        f"- [{text.splitlines()[0].removeprefix('# ')}]({name.removeprefix('benchmarks/')})"
        for name, text in topics.items()
    )
    files = "\n".join(
        f"- [{file.name}](../../benchmarks/results/{file.name})" for file in sorted(RESULTS.glob("*.json"))
    )
    index = (
        "# Benchmarks\n\nA script made each page from the result files when this site was built: nobody typed a number. The file of "
        f"each result says which command measured it, on which device, with which versions.\n\n{listed}\n\n"
        "## Performance goals\n\n`python -m benchmarks goals` compares the results with the goals of the project, and fails where one is missed.\n\n"
        f"{_goals()}\n## Result files\n\n{files}\n"
    )
    return {"benchmarks/index.md": index, **topics}


@functools.cache
def plots() -> dict[str, str]:
    """Returns the plots that pages of benchmarks show, by their addresses, in SVG for light and for dark pages."""
    content = result("peer-vllm-h200")["engines"]
    names = [engine["short"] for engine in content]
    images = {}
    for suffix, ink in (("", "#222222"), ("-dark", "#dddddd")):
        with matplotlib.rc_context(
            {
                "text.color": ink,
                "axes.labelcolor": ink,
                "xtick.color": ink,
                "ytick.color": ink,
                "axes.edgecolor": ink,
                "font.size": 9,
                "svg.hashsalt": "peers",
                "axes.spines.top": False,
                "axes.spines.right": False,
            }
        ):
            figure = Figure(figsize=(7, 2.6), layout="constrained")
            for axes, key, factor, title in zip(
                figure.subplots(1, 2),
                ("seconds_with_logprobs", "one_request_seconds_per_token"),
                (1, 1000),
                ("1000 requests with logprobs, s", "one request, ms a token"),
                strict=True,
            ):
                for place, engine in enumerate(content):
                    values = [factor * value for value in engine[key]]
                    axes.barh(place, statistics.median(values), color=COLORS[place], height=0.6)
                    axes.plot(values, [place] * len(values), ".", color=ink, markersize=4)
                axes.set_yticks(range(len(names)), names)
                axes.invert_yaxis()
                axes.set_title(title, loc="left", fontsize=9)
            file = io.StringIO()
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
            images[f"benchmarks/peers{suffix}.svg"] = file.getvalue()
    return images

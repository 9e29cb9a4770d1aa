"""vLLM under the load of `python -m detjax.bench serve`: the same requests, in the same orders.

    pip install vllm==0.26.0        # in a separate environment, together with this repository
    python -m benchmarks peer_vllm --model Qwen3-8B --out vllm.json
    VLLM_BATCH_INVARIANT=1 python -m benchmarks peer_vllm --model Qwen3-8B --out vllm-invariant.json

The model is a directory with a configuration and a tokenizer; weights are random. The result has the seconds of each
order, with and without logprobs, the seconds per token of one request, and a digest of each run's answers. The other
side of the comparison is

    python -m detjax.bench serve --preset Qwen3-8B --orders 3 --max-samples 1024 --token-budget 8192 --max-length 384

`--small` only draws the requests and prints their sizes, without vLLM.
"""

import hashlib
import os
import random
import statistics
import time
from typing import Annotated, Any

import numpy as np

from benchmarks.study import Result, Run
from detjax.bench import presets, serve
from detjax.cli.options import Option, UsageError
from detjax.engine import Request

CROWD = serve.Workload(1000, (16, 256), (90, 110))
ALONE = serve.Workload(1, (1024, 1024), (200, 200))
ORDERS, REPEATS = 3, 5


def _digest(outputs: list[Any]) -> str:
    """Returns the SHA-256 of all tokens and logprob bits, in the requests' order."""
    hashed = hashlib.sha256()
    for output in outputs:
        completion = output.outputs[0]
        hashed.update(np.asarray(completion.token_ids, np.int64).tobytes())
        if completion.logprobs is not None:
            pairs = zip(completion.token_ids, completion.logprobs, strict=True)
            hashed.update(np.asarray([chosen[token].logprob for token, chosen in pairs], np.float32).tobytes())
    return hashed.hexdigest()


def _run(engine: Any, requests: list[Request], order: list[int], *, logprobs: bool) -> dict[str, Any]:
    """Returns the seconds of a run, and the digest of its answers in the order of `requests`."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    prompts = [{"prompt_token_ids": list(requests[index].prompt)} for index in order]
    sampling = [
        SamplingParams(
            temperature=0.0,
            max_tokens=requests[index].sampling.max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0 if logprobs else None,
        )
        for index in order
    ]
    start = time.perf_counter()
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    by_request = dict(zip(order, outputs, strict=True))
    return {"seconds": seconds, "digest": _digest([by_request[index] for index in range(len(requests))])}


def _measured(model: str, vocabulary: int) -> dict[str, Any]:
    """Returns the times and digests of all runs."""
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    start = time.perf_counter()
    engine = LLM(
        model=model,
        load_format="dummy",
        dtype="bfloat16",
        enable_prefix_caching=False,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        max_model_len=2048,
        seed=0,
    )
    ready = time.perf_counter() - start
    crowd, alone = CROWD.draw(vocabulary), ALONE.draw(vocabulary)
    orders = [
        random.Random(number).sample(range(len(crowd)), len(crowd)) if number else list(range(len(crowd)))
        for number in range(ORDERS)
    ]
    _run(engine, crowd, orders[0], logprobs=True)  # triggers lazy compilation and graph capture
    runs = {
        name: [_run(engine, crowd, order, logprobs=logprobs) for order in orders]
        for name, logprobs in (("with logprobs", True), ("without logprobs", False))
    }
    # The time per token excludes the first token's.
    one, first = [], [Request(alone[0].prompt, alone[0].sampling.__class__(max_tokens=1, ignore_eos=True))]
    for _ in range(REPEATS):
        whole = _run(engine, alone, [0], logprobs=True)["seconds"]
        prefill = _run(engine, first, [0], logprobs=True)["seconds"]
        one.append((whole - prefill) / (alone[0].sampling.max_tokens - 1))
    return {
        "ready_after_seconds": ready,
        "runs": runs,
        "one_request_seconds_per_token": one,
        "median_seconds_per_token": statistics.median(one),
        "different_answers": len({run["digest"] for run in runs["with logprobs"]}),
    }


def study(
    run: Run,
    *,
    model: Annotated[str | None, Option("A directory with config.json and a tokenizer, or a model's name.")] = None,
) -> Result:
    vocabulary = presets.MODELS["Qwen3-8B"]["vocab_size"]
    requests = CROWD.draw(vocabulary)
    result: dict[str, Any] = {
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "generated_tokens": sum(request.sampling.max_tokens for request in requests),
        "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1",
    }
    if not run.small:
        if model is None:
            raise UsageError("--model is missing; accepted: a directory with config.json and a tokenizer")
        result["vllm"] = _measured(model, vocabulary)
    return Result(result)

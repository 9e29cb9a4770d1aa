"""GRPO with a server as the sampler: separate requests, weights by HTTP, and the bits of a loop in one process.

    python examples/train_over_http.py --compare

starts `detjax serve`, trains, trains again in this process, and compares all numbers of all steps. With `--url URL` it
uses a server that is running, whose control key is in the environment variable DETJAX_CONTROL_KEY.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import secrets
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from flax import nnx

import detjax
from detjax import models
from detjax.models import Decoder, Tokenizer
from detjax.operands.options import Distribution
from detjax.rl import functional
from detjax.rl.policy_gradients import advantages
from detjax.rl.rollouts import Rollout, prompt_seeds, rollouts, seed_of
from detjax.rl.runs.policy import CHECKPOINT
from detjax.rl.tasks import TASKS
from detjax.rl.trainer.losses import ClippedRatio
from detjax.rl.trainer.microbatches import Packed
from detjax.rl.trainer.optimizers import adamw

TASK, DIFFICULTY, PROMPTS, SAMPLES, MAX_TOKENS = TASKS["addition"], 2, 2, 4, 6
DRAWN = Distribution(temperature=1.0)  # what tokens are drawn from, and what the loss takes logprobs of
SIZES: dict[str, Any] = {
    "max_samples": 4,
    "token_budget": 16,
    "max_length": 64,
}  # of the engine; no bit depends on them


class Sampler(Protocol):
    """An engine, wherever it is."""

    def update(self, model: Decoder) -> None:
        """Replaces its weights."""

    def rollouts(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Rollout]:
        """Returns a rollout for each prompt and seed."""
        ...


class Server:
    """The engine of a server."""

    def __init__(self, url: str, key: str, tokenizer: Tokenizer) -> None:
        self._url, self._key, self._tokenizer = url, key, tokenizer
        self._model = self._send("GET", "/v1/models")["data"][0]["id"]

    def update(self, model: Decoder) -> None:
        """Sends all weights as a safetensors file, and checks which weights the server has then."""
        self._verifier = detjax.audit.Verifier(model, self._tokenizer)
        self._origin = detjax.audit.Origin.here(model, self._tokenizer)
        with tempfile.TemporaryDirectory() as folder:
            models.save(model, Path(folder) / "new", max_shard_bytes=sys.maxsize)
            file = Path(folder) / "new" / "model.safetensors"
            headers = {"Authorization": f"Bearer {self._key}", "Content-Length": str(file.stat().st_size)}
            with file.open("rb") as content:
                updated = self._send("PUT", "/weights?mode=wait", content, headers)
        assert updated["digest"] == self._origin.model, "the server has other weights than it was sent"

    def rollouts(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Rollout]:
        """Sends all requests at once, and verifies one of the answers."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            transcripts = list(pool.map(self._ask, prompts, seeds))
        # Equal digests of the environment and of the model promise equal bits ...
        assert {transcript.origin for transcript in transcripts} == {self._origin}
        # ... and a forward pass shows them.
        (verdict,) = self._verifier.verify(transcripts[:1])
        assert verdict.is_verified, verdict
        return [Rollout.from_transcript(transcript) for transcript in transcripts]

    def _ask(self, prompt: Sequence[int], seed: int) -> detjax.audit.Transcript:
        drawn = dataclasses.asdict(DRAWN)  # said in full, because a checkpoint may have other defaults
        body = {"model": self._model, "prompt": list(prompt), "seed": seed, "max_tokens": MAX_TOKENS, **drawn}
        body |= {"sampling_logprobs": True, "receipt": True}
        content = json.dumps(body).encode()
        answer = self._send("POST", "/v1/completions", content, {"Content-Type": "application/json"})
        (transcript,) = detjax.audit.transcripts_in(answer, self._tokenizer)
        return transcript

    def _send(self, method: str, path: str, content: Any = None, headers: dict[str, str] | None = None) -> Any:
        request = urllib.request.Request(self._url + path, content, headers or {}, method=method)
        with urllib.request.urlopen(request) as response:
            return json.load(response)


class InProcess:
    """An engine in this process."""

    def __init__(self, engine: detjax.Engine) -> None:
        self._engine = engine

    def update(self, model: Decoder) -> None:
        """Gives the engine the model's arrays; nothing is copied."""
        self._engine.update_weights(nnx.state(model))

    def rollouts(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Rollout]:
        """Returns a rollout for each prompt and seed."""
        sampling = detjax.SamplingParams(MAX_TOKENS, sampling_logprobs=True, **dataclasses.asdict(DRAWN))
        return [rollout for (rollout,) in rollouts(self._engine, prompts, sampling, seeds)]


class Step(NamedTuple):
    """The numbers of a step, for a comparison of all bits."""

    tokens: list[list[int]]
    logprobs: list[bytes]
    rewards: list[list[float]]
    loss: float
    norm: float
    digest: str


def train(sampler: Sampler, model: Decoder, tokenizer: Tokenizer, steps: int) -> Iterator[Step]:
    """Trains a model, and yields the numbers of each step. At the end, the sampler has the trained weights."""
    training = functional.Training(model, adamw(1e-4), ClippedRatio(), distribution=DRAWN)
    state = training.init(nnx.state(model))
    sampler.update(model)
    for step in range(steps):
        examples = [TASK.example(0, step * PROMPTS + number, DIFFICULTY) for number in range(PROMPTS)]
        prompts = [tokenizer.encode(example.prompt) for example in examples for _ in range(SAMPLES)]
        sampled = sampler.rollouts(prompts, prompt_seeds(seed_of(0, step), len(prompts)))

        groups = [sampled[first : first + SAMPLES] for first in range(0, len(sampled), SAMPLES)]
        pairs = list(zip(examples, groups, strict=True))
        rewards = np.array([[TASK.reward(example, one.text) for one in group] for example, group in pairs])
        weights = (advantages.grpo(rewards) / sum(len(one.completion) for one in sampled)).reshape(-1)

        shares = zip(sampled, weights, strict=True)
        batch = [one.sample(np.full(len(one.completion), weight, np.float32)) for one, weight in shares]
        loss, gradients, logprobs = training.loss_and_gradients(state.params, batch, microbatch=Packed(tokens=128))
        for one, trained in zip(sampled, logprobs, strict=True):
            assert trained.tobytes() == one.sampling_logprobs.tobytes()  # not close: the same bits ...
            assert (np.exp(trained - one.sampling_logprobs) == 1).all()  # ... so the importance ratio is 1
        state, norm = training.update(state, gradients)

        trained_model = training.network.with_weights(training.network.weights(state.params))
        sampler.update(trained_model)
        yield Step(
            [one.completion.tolist() for one in sampled],
            [one.sampling_logprobs.tobytes() for one in sampled],
            rewards.tolist(),
            loss,
            float(norm),
            models.digest(trained_model, tokenizer),
        )


@contextlib.contextmanager
def started(checkpoint: Path, key: str) -> Iterator[str]:
    """A server while the context is open, at a free port. Yields its address."""
    sizes = [part for name, size in SIZES.items() for part in (f"--{name.replace('_', '-')}", str(size))]
    command = [sys.executable, "-m", "detjax", "serve", str(checkpoint), "--dtype", "bfloat16", "--port", "0", *sizes]
    command += ["--log-level", "warning"]
    environment = os.environ | {"DETJAX_CONTROL_KEY": key}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            ready = process.stderr.readline()  # "NAME on URL, fingerprint ..."
            assert " on http" in ready, ready + process.stderr.read()
            yield ready.partition(" on ")[2].partition(",")[0]
        finally:
            process.terminate()


def main() -> None:
    """Trains over HTTP, and if asked to in this process, too."""
    parser = argparse.ArgumentParser(description="GRPO with a server as the sampler.")
    parser.add_argument("checkpoint", type=Path, nargs="?", default=CHECKPOINT)
    parser.add_argument("--url", help="a server that has a control key; default: start one")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--compare", action="store_true", help="train in this process, too, and compare all bits")
    given = parser.parse_args()
    key = os.environ.get("DETJAX_CONTROL_KEY") or secrets.token_hex()
    model, tokenizer = models.load(given.checkpoint, dtype="bfloat16", progress=False)
    assert tokenizer is not None
    steps: list[Step] = []
    with contextlib.nullcontext(given.url) if given.url else started(given.checkpoint, key) as url:
        for step in train(Server(url, key, tokenizer), model, tokenizer, given.steps):
            numbers = f"reward {np.mean(step.rewards):.3f}, norm {step.norm:.3f}, weights {step.digest[:12]}"
            print(f"step {len(steps)}: {numbers}", flush=True)
            steps.append(step)
    if given.compare:
        with detjax.Engine(model, tokenizer, **SIZES) as engine:
            in_process = list(train(InProcess(engine), model, tokenizer, given.steps))
        assert in_process == steps, [one == two for one, two in zip(in_process, steps, strict=True)]
        print(f"{len(steps)} steps have the same bits in this process")


if __name__ == "__main__":
    main()

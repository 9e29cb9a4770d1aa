"""The engine: requests from any threads and tasks, batched continuously, each answered as if it were alone."""

import asyncio
import atexit
import contextlib
import dataclasses
import functools
import gc
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import jax
from flax import nnx
from jaxtyping import Array, PyTree
from rich.console import Console
from rich.progress import track

from detjax import backends
from detjax.contract import KV_BLOCK
from detjax.engine.compilation_cache import compilation_cache
from detjax.engine.core import Core
from detjax.engine.device import Device
from detjax.engine.inputs import Shapes, Slots
from detjax.engine.pages import PagePool
from detjax.engine.request import Generation, Request, Token, encoded, end_tokens
from detjax.engine.sample import Sample
from detjax.engine.scheduler import Scheduler, Step
from detjax.models import Decoder, Tokenizer
from detjax.models.cache import empty_pages
from detjax.ops.quantized_kv import check_kind
from detjax.options import KVQuantization

_SHARE_OF_FREE_MEMORY: Final = 0.9
_PAGES_WITHOUT_A_GPU: Final = 1 << 30
"""Bytes of the cache at most, where the device does not say what it has."""


class EngineClosed(RuntimeError):
    """The engine was closed, or has failed, before the request was answered."""


class _Job:
    """A request on its way."""

    def __init__(self, samples: list[Sample], on_token: Callable[[Token], None] | None) -> None:
        self.samples = samples
        self.future: Future[Generation] = Future()
        self._on_token = on_token
        self._unfinished = len(samples)

    def tell(self, token: Token) -> None:
        """Passes on a token, and what came of the request with its last one."""
        if self._on_token is not None:
            self._on_token(token)
        self._unfinished -= token.finish_reason is not None
        if not self._unfinished:
            completions = tuple(sample.completion() for sample in self.samples)
            self.settle(Generation(self.samples[0].prompt, completions, self.samples[0].scored_prompt()))

    def settle(self, outcome: Generation | BaseException) -> None:
        """The request's end, unless it was cancelled."""
        if self.future.set_running_or_notify_cancel():
            if isinstance(outcome, BaseException):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)


class Engine:
    """Generates for any number of requests at the same time, in a thread of its own, until it is closed.

    A request's tokens and logprobs are the same in every bit whatever else the engine is busy with, in whichever order
    requests come, and however they are cut into steps; whether their prompts' pages were in the cache already; and
    whether they were computed twice because pages had run out.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None = None,
        *,
        max_samples: int = 64,
        token_budget: int = 512,
        max_tokens: int | None = None,
        pages: int | None = None,
        prefix_cache: bool = True,
        kv_cache_dtype: KVQuantization | None = None,
        top_logprobs: int = 20,
    ) -> None:
        """An engine that takes requests. `warm_up` compiles what it needs beforehand; else the first requests wait.

        Of the arguments `kv_cache_dtype` alone changes bits.

        Args:
            model: the decoder.
            tokenizer: needed for texts and stop strings.
            max_samples: that are computed at the same time; more of them wait.
            token_budget: tokens of a step at most, of prompts and of samples that go on.
            max_tokens: of a request, prompt and samples included; default: the model's max_position_embeddings.
            pages: of the cache, `contract.KV_BLOCK` tokens each; default: what all samples could need, or what fits
                into 90% of the device's free memory.
            prefix_cache: keep pages for requests that begin with the same tokens.
            kv_cache_dtype: as `generate` has it.
            top_logprobs: the most that a request may ask for.

        Raises:
            ValueError: an argument is out of range, or the pages do not hold one request of `max_tokens`.
        """
        config = model.config
        longest = config.max_positions if max_tokens is None else max_tokens
        accepted = {
            "max_samples": (max_samples, max_samples >= 1, "at least 1"),
            "token_budget": (token_budget, token_budget >= 1, "at least 1"),
            "max_tokens": (longest, 2 <= longest <= config.max_positions, f"2 to {config.max_positions}, the model's"),
            "top_logprobs": (top_logprobs, 0 <= top_logprobs <= config.vocab_size, f"0 to {config.vocab_size}"),
        }
        for name, (given, holds, what) in accepted.items():
            if not holds:
                raise ValueError(f"Engine: {name} is {given}; accepted: {what}")
        if kv_cache_dtype is not None:
            check_kind("Engine", kv_cache_dtype, config.head_dim)
        of_one = -(-(longest - 1) // KV_BLOCK)
        if pages is None:
            pages = max(of_one, min(max_samples * of_one, _fitting(model, kv_cache_dtype)))
        if pages < of_one:
            raise ValueError(
                f"Engine: pages is {pages}; accepted: at least {of_one}, for one request of {longest} tokens. "
                "Give more pages, or a lower max_tokens."
            )
        # Not the model: its weights may be exchanged.
        self._config, self._defaults, self._tokenizer = config, model.generation_defaults, tokenizer
        self._longest, self._top = longest, top_logprobs
        self._kv_cache_dtype: KVQuantization | None = kv_cache_dtype
        self._shapes = Shapes(max_samples, token_budget)
        self._slots = Slots(max_samples, of_one)
        self._device = Device(
            model, pages=pages, slots=max_samples, top_logprobs=top_logprobs, kv_cache_dtype=kv_cache_dtype
        )
        scheduler = Scheduler(PagePool(pages, keeps_prefixes=prefix_cache), self._shapes.limits)
        self._core = Core(scheduler, self._shapes, self._slots, self._device)

        # All that follows belongs to the engine's thread, which is given what to do by way of the inbox.
        self._jobs: dict[Sample, _Job] = {}
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._open = threading.Lock()
        self._backend = backends.backend()
        self._thread = threading.Thread(target=self._work, name="detjax-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a program that ends while the device computes may crash

    def warm_up(self, *, progress: bool = False, cache: Path | None = None) -> None:
        """Compiles every program that steps may need, the engine being idle.

        Python's garbage collector no longer looks through what there is then: what programs were traced to are many
        objects, and a step would wait for it.

        Args:
            progress: shows a bar on stderr.
            cache: a directory whose programs need not be compiled again, and where those are left that it lacks.
                Whoever can write to it can run programs here.

        Raises:
            OSError: the directory cannot be made or written to.
            RuntimeError: the engine is busy.
        """
        self._refuse_listeners()

        def compile_all() -> None:
            self._check_idle("warm_up")
            console = Console(stderr=True)
            bar = functools.partial(track, description="compiling", console=console, disable=not progress)
            steps = [self._slots.inputs(Step((), ()), shape) for shape in self._shapes]
            with compilation_cache(cache):
                self._device.warm_up(steps, lambda programs, count: bar(programs, total=count))
            gc.collect()
            gc.freeze()

        self._call(compile_all).result()

    # --- requests -----------------------------------------------------------------------------------------------------

    def generate(self, requests: Iterable[Request]) -> list[Generation]:
        """Returns a generation per request, in their order; each is the same in every bit as if it were alone.

        Raises:
            ValueError: a request cannot be served; none of them is begun then.
            EngineClosed: the engine was closed meanwhile, or has failed.
        """
        self._refuse_listeners()
        with self._started(requests) as jobs:
            return [job.future.result() for job in jobs]

    async def generate_async(self, requests: Iterable[Request]) -> list[Generation]:
        """`generate` for a task, which may be cancelled, and its requests with it.

        Raises:
            ValueError: a request cannot be served; none of them is begun then.
            EngineClosed: the engine was closed meanwhile, or has failed.
        """
        with self._started(requests) as jobs:
            return [await asyncio.wrap_future(job.future) for job in jobs]

    def submit(self, request: Request, on_token: Callable[[Token], None] | None = None) -> "Future[Generation]":
        """Returns at once what will hold the request's generation. To cancel it is to cancel the request.

        Args:
            request: joins those on their way.
            on_token: called with each token in the engine's thread, which waits for it. What it raises ends the
                request, and comes out of the future.

        Raises:
            ValueError: the request cannot be served.
            EngineClosed: the engine was closed, or has failed; also out of the future.
        """
        job = self._job("the request", request, on_token)
        self._start([job])
        return job.future

    async def stream(self, request: Request) -> AsyncIterator[Token]:
        """Yields the tokens of a request's samples as they come. Leaving the loop cancels what is left of it.

        Raises:
            ValueError: the request cannot be served.
            EngineClosed: the engine was closed meanwhile, or has failed.
        """
        async with contextlib.aclosing(self.stream_all([request])) as tokens:
            async for _, token in tokens:
                yield token

    async def stream_all(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, Token]]:
        """Yields the tokens of several requests as they come, each with its request's number, as `stream` does.

        Raises:
            ValueError: a request cannot be served; none of them is begun then.
            EngineClosed: the engine was closed meanwhile, or has failed.
        """
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[tuple[int, Token | None]] = asyncio.Queue()

        def tell(number: int, token: Token | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens any more
                loop.call_soon_threadsafe(news.put_nowait, (number, token))

        with self._started(requests, tell) as jobs:
            for number, job in enumerate(jobs):
                job.future.add_done_callback(functools.partial(lambda number, _: tell(number, None), number))
            unanswered = len(jobs)
            while unanswered:
                number, token = await news.get()
                if token is not None:
                    yield number, token
                    continue
                jobs[number].future.result()
                unanswered -= 1

    @contextlib.contextmanager
    def _started(
        self, requests: Iterable[Request], on_token: Callable[[int, Token], None] | None = None
    ) -> Iterator[list[_Job]]:
        """The requests on their way, and cancelled where they are left before their end."""
        jobs = [
            self._job(f"request {number}", request, on_token and functools.partial(on_token, number))
            for number, request in enumerate(requests)
        ]
        self._start(jobs)
        try:
            yield jobs
        finally:
            for job in jobs:
                job.future.cancel()

    def _job(self, name: str, request: Request, on_token: Callable[[Token], None] | None = None) -> _Job:
        return _Job(self._samples(name, request, is_streamed=on_token is not None), on_token)

    def _samples(self, name: str, request: Request, *, is_streamed: bool = False) -> list[Sample]:
        params = request.sampling
        prompt = encoded(name, self._config, request.prompt, params, self._tokenizer)
        if len(prompt) + params.max_tokens > self._longest:
            raise ValueError(
                f"{name} has {len(prompt)} tokens and asks for {params.max_tokens} more; accepted: {self._longest} in "
                "all, the engine's max_tokens. Lower the request's max_tokens, cut the prompt, or raise the engine's."
            )
        if params.top_logprobs > self._top:
            raise ValueError(
                f"{name}: top_logprobs is {params.top_logprobs}; accepted: up to {self._top}, the engine's top_logprobs"
            )
        samples: list[Sample] = []
        for index in range(params.n):
            of_sample = params if index == 0 else dataclasses.replace(params, prompt_logprobs=False)
            leader = samples[0] if samples else None
            ends = end_tokens(self._defaults, params)
            samples.append(Sample(prompt, index, of_sample, ends, self._tokenizer, leader, is_streamed=is_streamed))
        return samples

    def _start(self, jobs: list[_Job]) -> None:
        def submit() -> None:
            for job in jobs:
                if not job.future.cancelled():
                    for sample in job.samples:
                        self._jobs[sample] = job
                        self._core.scheduler.submit(sample)

        self._call(submit)
        for job in jobs:
            job.future.add_done_callback(functools.partial(self._cancel, job))

    def _cancel(self, job: _Job, future: "Future[Generation]") -> None:
        if future.cancelled():
            with contextlib.suppress(EngineClosed):
                self._call(functools.partial(self._drop, job))

    # --- weights, and the end -----------------------------------------------------------------------------------------

    def update_weights(self, params: PyTree[Array]) -> None:
        """Goes on with other weights, as a trainer has them, and forgets all prefixes in the cache.

        Args:
            params: what `nnx.split(model)[1]` or `nnx.state(model)` gives, of the same shapes and dtypes.

        Raises:
            RuntimeError: requests are on their way: with which of the weights they were answered could not be said.
            ValueError: the weights do not fit the model.
        """
        self._refuse_listeners()

        def update() -> None:
            self._check_idle("update_weights")
            _check_weights(self._device.state, params)
            self._device.state = params
            self._core.scheduler.pool.forget_prefixes()

        self._call(update).result()

    def forget_prefixes(self) -> None:
        """Makes the engine compute every prompt anew, whatever it has in its cache; no bit depends on it.

        Raises:
            EngineClosed: the engine was closed, or has failed.
        """
        self._refuse_listeners()
        self._call(self._core.scheduler.pool.forget_prefixes).result()

    def close(self) -> None:
        """Ends the engine; requests on their way fail with `EngineClosed`."""
        atexit.unregister(self.close)
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether requests are taken: it was not closed, and has not failed."""
        return self._failure is None

    @property
    def max_tokens(self) -> int:
        """Of a request, prompt and samples included."""
        return self._longest

    @property
    def kv_cache_dtype(self) -> KVQuantization | None:
        """How keys and values are quantized in the cache; of the engine's settings the only one that bits depend on."""
        return self._kv_cache_dtype

    @property
    def running(self) -> int:
        """Samples that have a slot."""
        return len(self._core.scheduler.running)

    @property
    def waiting(self) -> int:
        """Samples that wait for a slot."""
        return len(self._core.scheduler.waiting)

    @property
    def pages(self) -> int:
        """Of the cache."""
        return self._core.scheduler.pool.pages

    @property
    def pages_in_use(self) -> int:
        """Pages of the cache that requests on their way refer to."""
        return self._core.scheduler.pool.in_use

    @property
    def preemptions(self) -> int:
        """How often a sample's pages have been taken away since the engine was made."""
        return self._core.scheduler.preemptions

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _call(self, fn: Callable[[], Any]) -> "Future[Any]":
        """What `fn()` returns or raises, once the engine's thread has called it between two steps."""
        future: Future[Any] = Future()
        with self._open:
            if self._failure is not None:
                raise EngineClosed(f"Engine: {self._failure}") from self._failure
            self._inbox.put((fn, future))
        return future

    def _refuse_listeners(self) -> None:
        """Raises where what follows waits for the engine's thread, and is called in it."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "Engine: a listener waits for the engine, which waits for the listener; accepted in on_token: submit"
            )

    def _check_idle(self, name: str) -> None:
        if self._jobs:
            raise RuntimeError(
                f"Engine.{name}: {len(self._jobs)} samples are on their way; accepted: none. Wait for them, or cancel "
                "them."
            )
        while not self._core.is_idle:  # a step too many of a sample that has ended
            self._core.step()

    def _work(self) -> None:
        try:
            # What was chosen where the engine was made; a choice of backend is each thread's own.
            with backends.use_backend(self._backend):
                while self._do_what_is_asked():
                    for sample, token in self._core.step():
                        job = self._jobs.get(sample)
                        if token.finish_reason is not None:
                            self._jobs.pop(sample, None)
                        if job is not None:
                            self._tell(job, token)
        except BaseException as error:
            self._end(error)
        else:
            self._end(EngineClosed("it was closed"))

    def _tell(self, job: _Job, token: Token) -> None:
        try:
            job.tell(token)
        except BaseException as error:  # of whoever listens
            self._drop(job)
            job.settle(error)

    def _drop(self, job: _Job) -> None:
        for sample in job.samples:
            if self._jobs.pop(sample, None) is not None:
                self._core.scheduler.cancel(sample)

    def _do_what_is_asked(self) -> bool:
        """Empties the inbox, and waits for something in it if there is nothing else to do; False: the engine ends."""
        while True:
            try:
                item = self._inbox.get(block=self._core.is_idle)
            except queue.Empty:
                return True
            if item is None:
                return False
            _run(*item)

    def _end(self, error: BaseException) -> None:
        with self._open:
            self._failure = error
        closed = EngineClosed(f"Engine: {error}")
        closed.__cause__ = error
        for job in dict.fromkeys(self._jobs.values()):
            job.settle(closed)
        self._jobs.clear()
        while not self._inbox.empty():
            if (item := self._inbox.get()) is not None:
                item[1].set_exception(closed)


def _run(fn: Callable[[], Any], future: "Future[Any]") -> None:
    try:
        future.set_result(fn())
    except BaseException as error:
        future.set_exception(error)


def _fitting(model: Decoder, kv_cache_dtype: KVQuantization | None) -> int:
    """Pages that fit into the device's memory."""
    pages = nnx.eval_shape(lambda: [empty_pages(model.config, 1, model.dtype, kv_cache_dtype) for _ in range(2)])
    of_page = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages))
    memory = jax.local_devices()[0].memory_stats() or {}
    free = _PAGES_WITHOUT_A_GPU
    if "bytes_limit" in memory:
        free = int((memory["bytes_limit"] - memory["bytes_in_use"]) * _SHARE_OF_FREE_MEMORY)
    return max(1, free // of_page)


def _check_weights(old: PyTree[Array], new: PyTree[Array]) -> None:
    expected, found = (
        {jax.tree_util.keystr(path): (leaf.shape, leaf.dtype) for path, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (old, new)
    )
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"Engine.update_weights: {name} is {found.get(name, 'missing')}; accepted: "
                f"{expected.get(name, 'no such weight')}"
            )

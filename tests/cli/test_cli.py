"""The command line: what it prints, where, and what it answers to bad input."""

import contextlib
import dataclasses
import datetime
import itertools
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import PIL.Image
import pytest

import detjax
from detjax import SamplingParams, audit, engine, models, server
from detjax.cli import app, main
from detjax.demo import CHECKPOINT, experiment
from detjax.runtime import fingerprints
from detjax.server.http import logs as server_logs
from tests.support import commands, towers
from tests.support.commands import Result
from tests.support.one_layer import one_layer

FIXTURES = Path(__file__).parents[1] / "fixtures"


def run(*arguments: object, **options: Any) -> Result:
    return commands.run(main, *arguments, **options)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that comes with detjax, cut to one layer."""
    small, tokenizer = one_layer(CHECKPOINT, seed=0)
    path = tmp_path_factory.mktemp("checkpoint") / "small"
    models.save(small, path, tokenizer=tokenizer)
    return path


def error(result: Result) -> str:
    """The one line that an expected error prints."""
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, "detjax 0.1.0\n")


def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "detjax", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=FIXTURES.parents[1], check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "detjax 0.1.0\n", "")


@pytest.mark.parametrize(
    ("typed", "completed"), [("detjax gen", "generate"), ("detjax generate --kv", "--kv-cache-dtype")]
)
def test_shells_complete_commands_and_options(typed: str, completed: str) -> None:
    state = f"COMP_WORDS=({typed}); COMP_CWORD={typed.count(' ')}; _detjax"
    script = f'{app.generate_completion(shell="bash")}\n{state}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [completed]


def test_a_command_whose_packages_are_not_installed_says_what_to_install() -> None:
    program = (
        "import importlib.util as util; found = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'starlette' else found(name, *rest)\n"
        "from detjax.cli import main; main(['serve', 'model', '--port', '0'])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: detjax serve needs starlette: pip install 'detjax[server]'\n"


def test_help_names_the_commands() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("demo", "generate", "fingerprint"):
        assert command in result.stdout


def test_fingerprint_is_json_with_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = json.loads(run("fingerprint").stdout)
    fingerprint = fingerprints.fingerprint()
    assert printed == dataclasses.asdict(fingerprint) | {"digest": fingerprint.digest}
    assert json.loads(run("fingerprint", "--backend", "stock").stdout)["backend"] == "stock"
    monkeypatch.setenv("DETJAX_BACKEND", "stock")
    assert json.loads(run("fingerprint").stdout)["backend"] == "stock"
    assert json.loads(run("fingerprint", "--backend", "portable").stdout)["backend"] == "portable"
    assert json.loads(run("fingerprint", "--backend", "mma").stdout)["backend"] == "mma"


def test_generate_prints_the_text_alone(checkpoint: Path) -> None:
    result = run("generate", "--model", checkpoint, "--prompt", "ROMEO:", "--max-tokens", 5)
    model, tokenizer = models.load(checkpoint, progress=False)
    (expected,) = detjax.generate(model, ["ROMEO:"], SamplingParams(max_tokens=5), tokenizer=tokenizer)
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{expected.completions[0].text}\n", "")


class Generating:
    """Stands in for the engine's `generate`: keeps what it is given, and answers each sample with two tokens.

    Attributes:
        given: the arguments of the last call, by name.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: dict[str, Any] = {}
        monkeypatch.setattr(engine, "generate", self._generate)

    def _generate(self, model: Any, prompts: Any, sampling: Any, **options: Any) -> list[engine.Generation]:
        self.given = {"model": model, "prompts": prompts, "sampling": sampling} | options
        top = (((40, -0.5), (41, -1.0)),) * 2
        completions = tuple(
            engine.Completion((40, 41), (-0.5, -1.25), top, f"text {sample}", "stop") for sample in range(sampling.n)
        )
        return [engine.Generation((5, 6), completions)] * len(prompts)


@pytest.fixture
def generating(monkeypatch: pytest.MonkeyPatch) -> Generating:
    return Generating(monkeypatch)


def test_the_options_of_generate_reach_the_engine(checkpoint: Path, generating: Generating) -> None:
    ran = run("generate", "--model", checkpoint, "--prompt", "ROMEO:")
    assert (ran.exit_code, ran.stdout, ran.stderr) == (0, "text 0\n", "")
    model = generating.given.pop("model")
    assert model.dtype == "bfloat16"
    tokenizer = generating.given.pop("tokenizer")
    assert tokenizer.encode("x") == models.load(checkpoint, progress=False)[1].encode("x")
    silent = {"prompts": ["ROMEO:"], "sampling": SamplingParams(), "images": [[]], "kv_cache_dtype": None}
    assert generating.given == silent | {"progress": False, "speculative": None}
    for option, field, value in (
        ("--max-tokens", "max_tokens", 7),
        ("--temperature", "temperature", 0.5),
        ("--top-k", "top_k", 3),
        ("--top-p", "top_p", 0.25),
        ("--min-p", "min_p", 0.125),
        ("--seed", "seed", 2**64 - 1),
        ("--n", "n", 3),
        ("--logprobs", "top_logprobs", 2),
    ):
        assert run("generate", "--model", checkpoint, "--prompt", "x", option, value).exit_code == 0
        assert generating.given["sampling"] == dataclasses.replace(SamplingParams(), **{field: value}), option
    run("generate", "--model", checkpoint, "--prompt", "x", "--stop", "a", "--stop", "bc")
    assert generating.given["sampling"] == SamplingParams(stop=("a", "bc"))
    for quantized in ("int8", "fp8_e4m3", "q4_0"):
        run("generate", "--model", checkpoint, "--prompt", "x", "--kv-cache-dtype", quantized)
        assert generating.given["kv_cache_dtype"] == quantized
    run("generate", "--model", checkpoint, "--prompt", "x", "--dtype", "float32")
    assert generating.given["model"].dtype == "float32"


def test_generate_heads_each_of_several_texts(checkpoint: Path, generating: Generating) -> None:
    options = ("generate", "--model", checkpoint, "--prompt", "ROMEO:", "--prompt", "-")
    result = run(*options, "--n", 2, "--logprobs", 2, text="JULIET:\nO\n")
    scored = "40\t'I'\t-0.500000\t'I' -0.500000\t'J' -1.000000\n41\t'J'\t-1.250000\t'I' -0.500000\t'J' -1.000000\n"
    tokenizer = generating.given["tokenizer"]
    scored = scored.replace("'I'", repr(tokenizer.decode([40]))).replace("'J'", repr(tokenizer.decode([41])))
    assert generating.given["prompts"] == ["ROMEO:", "JULIET:\nO"]
    assert result.stdout == "".join(
        f"=== prompt {prompt} of 2, sample {sample} of 2: {text!r}\ntext {sample - 1}\n{scored}"
        for prompt, text in enumerate(("ROMEO:", "JULIET:\nO"), 1)
        for sample in (1, 2)
    )
    plain = run(*options, text="O\n\n")
    assert generating.given["prompts"] == ["ROMEO:", "O\n"]
    heads = [line for line in plain.stdout.splitlines() if line.startswith("===")]
    assert heads == ["=== prompt 1 of 2, sample 1 of 1: 'ROMEO:'", "=== prompt 2 of 2, sample 1 of 1: 'O\\n'"]
    alone = run("generate", "--model", checkpoint, "--prompt", "x", "--logprobs", 0)
    assert alone.stdout == f"text 0\n{scored}"


def test_generate_writes_every_field_of_its_json(checkpoint: Path, generating: Generating) -> None:
    options = ("--prompt", "x", "--prompt", "y", "--n", 2, "--logprobs", 2, "--json")
    printed = json.loads(run("generate", "--model", checkpoint, *options).stdout)
    top = [[{"token": 40, "logprob": -0.5}, {"token": 41, "logprob": -1.0}]] * 2
    completion = {"finish_reason": "stop", "tokens": [40, 41], "logprobs": [-0.5, -1.25], "top_logprobs": top}
    completions = [{"text": f"text {sample}"} | completion for sample in range(2)]
    fingerprint = fingerprints.fingerprint()
    assert printed == {
        "generations": [{"prompt": text, "prompt_tokens": [5, 6], "completions": completions} for text in "xy"],
        "fingerprint": dataclasses.asdict(fingerprint) | {"digest": fingerprint.digest},
    }


def test_generate_writes_json_that_holds_the_bits(checkpoint: Path) -> None:
    arguments = ("--max-tokens", 4, "--temperature", 0.8, "--top-k", 9, "--seed", 5, "--logprobs", 2)
    result = run("generate", "--model", checkpoint, "--prompt", "ROMEO:", *arguments, "--json")
    printed = json.loads(result.stdout)
    model, tokenizer = models.load(checkpoint, progress=False)
    params = SamplingParams(max_tokens=4, temperature=0.8, top_k=9, seed=5, top_logprobs=2)
    (expected,) = detjax.generate(model, ["ROMEO:"], params, tokenizer=tokenizer)
    (completion,) = printed["generations"][0]["completions"]
    assert printed["generations"][0]["prompt_tokens"] == list(expected.prompt_tokens)
    assert completion["tokens"] == list(expected.completions[0].tokens)
    assert tuple(completion["logprobs"]) == expected.completions[0].logprobs
    assert [len(top) for top in completion["top_logprobs"]] == [2] * 4
    assert printed["fingerprint"]["digest"] == fingerprints.fingerprint().digest


def test_chat_wraps_the_prompt_in_the_template(generating: Generating) -> None:
    assert run("generate", "--model", FIXTURES / "qwen3", "--prompt", "Hello", "--chat").exit_code == 0
    _, tokenizer = models.load(FIXTURES / "qwen3", progress=False)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    assert generating.given["prompts"] == [tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "nowhere"), "'nowhere' is not a directory; accepted: a directory with a Hugging Face checkpoint"),
        (("--max-tokens", 0), "max_tokens is 0; accepted: at least 1"),
        (("--temperature", "nan"), "temperature is nan; accepted: 0, or 1e-30 to 1e30"),
        (("--top-p", 2), "top_p is 2.0; accepted: "),
        (("--seed", -1), "seed is -1; accepted: "),
        (("--logprobs", -1), "top_logprobs is -1; accepted: "),
        (("--stop", ""), "stop is ('',); accepted: "),
        (("--backend", "cuda"), "'cuda' is not a backend; accepted: hopper, mma, tpu, portable, stock"),
        (("--dtype", "int8"), "int8"),
        (("--tensor-parallel", 1000), "tensor is 1000 and expert is 1; accepted: "),
        (("--kv-cache-dtype", "int4"), "--kv-cache-dtype is 'int4'; accepted: int8, fp8_e4m3, q4_0"),
        (
            ("--speculative-config", '{"method": "ngram", "k": 2}'),
            "speculative has the key 'k' with the value 2; accepted",
        ),
        (
            ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 0}'),
            "num_speculative_tokens is 0; acc",
        ),
        (("--prompt", ""), "prompt 1 has no tokens; accepted: a prompt of at least one token"),
        (("--prompt", "-", "--prompt", "-"), "--prompt is - more than once; accepted: once"),
        (("--max-tokens", 10_000), "asks for 10000 more; accepted: 512 in all"),
        (("--chat",), "no chat template"),
        (("--model", FIXTURES / "mistral"), "has no tokenizer.json; accepted: a checkpoint with one"),
    ],
)
def test_generate_refuses_bad_input_in_one_line(checkpoint: Path, arguments: tuple, message: str) -> None:
    assert message in error(run("generate", "--model", checkpoint, "--prompt", "ROMEO:", *arguments, text="O"))


@pytest.fixture(scope="module")
def model_of_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "model"
    models.save(towers.model("qwen2_5_vl-tiny"), path, tokenizer=towers.character_tokenizer())
    PIL.Image.fromarray(towers.images("qwen2_5_vl-tiny")[1]).save(path / "image.png")
    return path


def test_generate_shows_images(model_of_images: Path, generating: Generating) -> None:
    file = model_of_images / "image.png"
    options = ("generate", "--model", model_of_images, "--image", file, "--image", file)
    run(*options, "--prompt", "<vs><img><ve>Hi", "--prompt", "y")
    assert generating.given["prompts"] == ["<vs><img><ve>Hi", "y"]
    expected = towers.images("qwen2_5_vl-tiny")[1]
    assert [len(shown) for shown in generating.given["images"]] == [2, 2]
    for shown in itertools.chain(*generating.given["images"]):
        np.testing.assert_array_equal(shown, expected)
    run(*options, "--prompt", "Hi", "--chat")
    tokens = towers.character_tokenizer().encode("user:<vs><img><ve><vs><img><ve>Hi;")
    assert generating.given["prompts"] == [tokens]


def test_generate_shows_videos(model_of_images: Path, tmp_path: Path, generating: Generating) -> None:
    """The frames are some of an animation, and all images of a directory, in the order of their names."""
    frames = np.repeat(np.arange(0, 240, 24, dtype=np.uint8), 16 * 24 * 3).reshape(10, 16, 24, 3)
    pictures = [PIL.Image.fromarray(frame) for frame in frames]
    file, folder = tmp_path / "video.webp", tmp_path / "frames"
    (folder / "a folder").mkdir(parents=True)
    pictures[0].save(file, save_all=True, append_images=pictures[1:], duration=100, lossless=True)
    for number in (7, 0, 5, 2):
        pictures[number].save(folder / f"{number}.png")
    options = ("generate", "--model", model_of_images, "--prompt", "Hi", "--chat")
    tokens = towers.character_tokenizer().encode("user:<vs><img><ve><vs><video><ve>Hi;")
    for video, fps, rate in (
        (file, (), 4.0),
        (folder, ("--fps", 4), 4.0),
        (folder, (), 2.0),
        (folder, ("--fps", 0.5), 0.5),
    ):
        assert run(*options, "--video", video, *fps, "--image", model_of_images / "image.png").exit_code == 0
        ((image, shown),) = generating.given["images"]
        np.testing.assert_array_equal(image, towers.images("qwen2_5_vl-tiny")[1])
        np.testing.assert_array_equal(shown.frames, frames[[0, 2, 5, 7]])
        assert shown.fps == rate
        assert generating.given["prompts"] == [tokens]


def test_frames_of_a_second_are_those_of_a_video(model_of_images: Path) -> None:
    printed = error(run("generate", "--model", model_of_images, "--prompt", "Hi", "--fps", 2))
    assert "--fps is 2.0 and there is no --video; accepted: --fps with --video" in printed


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("nowhere.png", "nowhere.png is missing"),
        (__file__, "cannot be read as an image; accepted: PNG, JPEG"),
        (None, "prompt 0 has 0 places for images, which are tokens 100 or 101"),
    ],
)
def test_images_that_generate_cannot_show_are_refused(image: str | None, message: str, model_of_images: Path) -> None:
    file = image or model_of_images / "image.png"
    assert message in error(run("generate", "--model", model_of_images, "--prompt", "Hi", "--image", file))


def test_an_unknown_backend_in_the_environment_is_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DETJAX_BACKEND", "cuda")
    assert "DETJAX_BACKEND: 'cuda' is not a backend" in error(run("fingerprint"))


def test_an_environment_that_contradicts_the_contract_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    message = error(run("generate", "--model", checkpoint, "--prompt", "ROMEO:"))
    assert "XLA_FLAGS has --xla_cpu_enable_fast_math=true; the contract needs false" in message


@pytest.mark.parametrize("arguments", [("--max-tokens", "many"), ("--no-such-option",), ("--top-k", 1.5)])
def test_unknown_options_and_words_for_numbers_are_usage_errors(arguments: tuple) -> None:
    result = run("generate", "--model", "x", "--prompt", "y", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert str(arguments[-1]) in result.stderr


def test_an_interruption_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "load", interrupted)
    result = run("generate", "--model", "x", "--prompt", "y")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "")


class Serving:
    """Stands in for the engine and the server, and keeps what `detjax serve` gave them."""

    config: engine.EngineConfig
    settings: server.Settings
    cache: Path | None
    connections: server.ConnectionSettings
    log: server.LogSettings
    tokenizer: models.Tokenizer
    exit_code = 0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine, "Engine", self._engine)
        monkeypatch.setattr(server, "create_app", self._app)
        monkeypatch.setattr(server, "Server", self._server)
        monkeypatch.setattr(server, "logging_to_stderr", self._log_to)

    @contextlib.contextmanager
    def _engine(self, model: object, tokenizer: models.Tokenizer, config: engine.EngineConfig) -> Iterator["Serving"]:
        self.config, self.tokenizer = config, tokenizer
        yield self

    def _log_to(self, log: server.LogSettings) -> contextlib.AbstractContextManager[None]:
        self.log = log
        return server_logs.logging_to_stderr(log)

    def programs(self) -> list[object]:
        return [SimpleNamespace(purpose="layers")]

    def warm_up(self, *, progress: bool, cache: Path | None, in_background: bool, compilers: engine.Compilers) -> None:
        self.cache = cache

    def _app(self, engine: object, model: object, tokenizer: object, settings: server.Settings) -> SimpleNamespace:
        self.settings = settings
        texts = SimpleNamespace(start=lambda: None, close=lambda: None)
        return SimpleNamespace(state=SimpleNamespace(fingerprint="the-fingerprint", texts=texts))

    def _server(self, app: object, connections: server.ConnectionSettings) -> "Serving":
        self.connections = connections
        return self

    def serve_on(self, bound: socket.socket, on_ready: Callable[[], None]) -> int:
        on_ready()
        return self.exit_code


LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def test_the_options_of_replicas_reach_them(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serving, given = Serving(monkeypatch), list[tuple[object, ...]]()

    def start(*arguments: object, **options: object) -> SimpleNamespace:
        given.append((*arguments, options))
        return SimpleNamespace(close=lambda: given.append(("closed",)))

    monkeypatch.setattr(server, "ProcessReplicas", start)
    monkeypatch.setattr(server, "app_of_replicas", lambda _, settings: serving._app(None, None, None, settings))
    template = tmp_path / "template"
    template.write_text("{{ messages }}")
    options = (
        *("--data-parallel", 3, "--replica-seconds", 7, "--tensor-parallel", 2, "--expert-parallel", 4),
        *("--dtype", "float32", "--backend", "portable", "--chat-template", template, "--template-date", "2026-01-31"),
        *("--max-samples", 5, "--max-queue", 1, "--cache-dir", tmp_path / "cache", "--log-level", "error"),
        *("--hf-overrides", '{"is_matryoshka": true}'),
    )
    options += ("--lora-modules", "a=x/a", '{"name": "b", "path": "x/b"}', "--max-lora-rank", 8)
    options += ("--lora-modules", "c=x/c")
    assert run("serve", checkpoint, "--port", 0, *options).exit_code == 0
    expected = server.ReplicaOptions(
        checkpoint,
        dtype="float32",
        backend="portable",
        tensor_parallel=2,
        expert_parallel=4,
        chat_template="{{ messages }}",
        template_date=datetime.date(2026, 1, 31),
        overrides={"is_matryoshka": True},
        config=engine.EngineConfig(max_samples=5, max_loras=3, max_lora_rank=8),
        cache=tmp_path / "cache",
        adapters={name: Path(f"x/{name}") for name in "abc"},
    )
    assert given == [(expected, 3, {"log": server.LogSettings(level="error"), "silence": 7.0}), ("closed",)]
    assert serving.settings.max_in_flight == 3 * 5 + 1


def test_the_options_of_serve_reach_the_engine_and_the_server(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = Serving(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    defaults = run("serve", checkpoint, "--port", 0)
    assert (defaults.exit_code, defaults.stdout) == (0, "")
    assert re.fullmatch(r"small on http://127\.0\.0\.1:[1-9]\d*, fingerprint the-fingerprint\n", defaults.stderr)
    assert serving.config == engine.EngineConfig()
    assert serving.settings == server.Settings("small", max_in_flight=64 + 1024, allowed_hosts=LOOPBACK)
    assert (serving.cache, serving.connections) == (tmp_path / "detjax", server.ConnectionSettings())
    assert serving.log == server.LogSettings()

    options = (
        *("--host", "127.0.0.1", "--port", 0, "--name", "it", "--name", "its", "--api-key", "one", "--api-key", "two"),
        *("--kv-cache-dtype", "int8", "--max-samples", 3, "--token-budget", 16, "--max-length", 100, "--runs-of", 6),
        *("--num-pages", 2, "--no-prefix-cache", "--top-logprobs", 4, "--max-queue", 5, "--max-body", 99),
        *(
            "--request-seconds",
            7,
            "--text-seconds",
            8,
            "--grace",
            1.5,
            "--no-compilation-cache",
            "--max-pending-bytes",
            10,
        ),
        *("--max-connections", 11, "--header-seconds", 12, "--idle-seconds", 13, "--write-seconds", 14),
        *("--no-access-log", "--log-level", "error", "--log-format", "json"),
        *("--allowed-origin", "https://a.example", "--allowed-origin", "https://b.example"),
        *("--image-directory", tmp_path),
        *("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}'),
    )
    assert run("serve", checkpoint, *options).exit_code == 0
    assert serving.config == engine.EngineConfig(
        max_samples=3,
        token_budget=16,
        max_length=100,
        num_pages=2,
        prefix_cache=False,
        kv_cache_dtype="int8",
        top_logprobs=4,
        runs_of=6,
        speculative=engine.SpeculativeConfig(method="mtp", model=str(checkpoint), num_speculative_tokens=2),
    )
    assert serving.settings == server.Settings(
        "it",
        more_names=("its",),
        api_keys=("one", "two"),
        max_in_flight=8,
        max_body=99,
        request_seconds=7,
        text_seconds=8,
        max_pending_bytes=10,
        allowed_origins=("https://a.example", "https://b.example"),
        image_directory=tmp_path,
    )
    assert serving.cache is None
    assert serving.connections == server.ConnectionSettings(
        grace=1.5, max_connections=11, header_seconds=12, idle_seconds=13, write_seconds=14
    )
    assert serving.log == server.LogSettings(level="error", format="json", access=False)


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        ((), LOOPBACK),
        (("--host", "::1"), LOOPBACK),
        (("--host", "127.0.0.2"), (*LOOPBACK, "127.0.0.2")),
        (("--host", "0.0.0.0"), None),
        (("--api-key", "k"), None),
        (("--allowed-host", "a.example"), ("a.example", *LOOPBACK)),
        (("--allowed-host", "a.example", "--host", "0.0.0.0"), ("a.example",)),
    ],
)
def test_serve_accepts_the_hosts_of_its_own_machine_where_nobody_needs_a_key(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, options: tuple, hosts: tuple | None
) -> None:
    serving = Serving(monkeypatch)
    result = run("serve", checkpoint, "--port", 0, "--no-compilation-cache", *options)
    assert result.exit_code == 0
    assert serving.settings.allowed_hosts == hosts
    warns = "can use the server without a key" in result.stderr
    assert warns == ("0.0.0.0" in options)


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_a_device_that_cannot_be_used_is_named(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("serve", "nowhere", "--port", 0, "--no-compilation-cache")
    if command == "generate":
        arguments = ("generate", "--model", "nowhere", "--prompt", "x")
    assert "the backend is 'tpu', which serves TPUs; this device is cpu:0" in error(run(*arguments, "--backend", "tpu"))
    monkeypatch.setenv("DETJAX_BACKEND", "hopper")
    assert "the backend is 'hopper', which serves GPUs" in error(run(*arguments))
    monkeypatch.delenv("DETJAX_BACKEND")
    with jax.transfer_guard("disallow"):
        assert "JAX_TRANSFER_GUARD is 'disallow', so no weights can reach the device" in error(run(*arguments))


@pytest.mark.parametrize(
    ("given", "accepted"), [("key", ("key",)), (None, ()), ("", None), ("two words", None), ("tab\t", None)]
)
def test_the_environments_key_is_one_key_or_an_error(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, accepted: tuple | None
) -> None:
    serving = Serving(monkeypatch)
    monkeypatch.delenv("DETJAX_API_KEY", raising=False)
    if given is not None:
        monkeypatch.setenv("DETJAX_API_KEY", given)
    result = run("serve", checkpoint, "--port", 0, "--no-compilation-cache")
    if accepted is None:
        assert "DETJAX_API_KEY) is empty or has white space" in error(result)
        assert not given or given not in result.stderr
    else:
        assert serving.settings.api_keys == accepted
        assert run("serve", checkpoint, "--port", 0, "--no-compilation-cache", "--api-key", "other").exit_code == 0
        assert serving.settings.api_keys == ("other",)


def test_the_servers_exit_code_is_that_of_the_command(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Serving(monkeypatch).exit_code = 70
    assert run("serve", checkpoint, "--port", 0, "--no-compilation-cache").exit_code == 70


def test_serve_certifies_the_engines_programs(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Serving(monkeypatch)
    arguments = ("serve", checkpoint, "--port", 0, "--no-compilation-cache", "--certify")
    risk = audit.Risk(
        audit.Role.CHOSEN, "dot_general", "adds products", "model.py:7", ((2, 3), (3, 4)), ("float32",) * 2
    )
    for unproven, code, says in (({}, 0, "certified: 1 of 1 programs"), ({"layers": (risk,)}, 1, "model.py:7")):
        monkeypatch.setattr(audit, "engine_risks", lambda model, programs, unproven=unproven: unproven)
        result = run(*arguments)
        assert result.exit_code == code
        assert says in result.stderr
        assert ("fingerprint the-fingerprint" in result.stderr) == (code == 0)


def test_serve_takes_a_chat_template(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = Serving(monkeypatch)
    template = tmp_path / "template.jinja"
    arguments = ("serve", checkpoint, "--port", 0, "--no-compilation-cache", "--chat-template", template)
    assert "--chat-template is " in error(run(*arguments))
    template.write_text("{% if %}")
    assert "chat template 'default' is damaged" in error(run(*arguments))
    template.write_text("{{ messages[0].content }}!")
    assert run(*arguments).exit_code == 0
    assert serving.tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "x!"
    assert serving.tokenizer.encode("x") == models.load(checkpoint, progress=False)[1].encode("x")


def test_chat_templates_are_told_the_date_of_the_command_line(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ strftime_now('%d %B %Y') }}")
    serving = Serving(monkeypatch)
    options = ("--port", 0, "--no-compilation-cache", "--chat-template", template, "--template-date", "2026-01-31")
    assert run("serve", checkpoint, *options).exit_code == 0
    assert serving.tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "31 January 2026"

    def refused(_: object, prompts: list[list[int]], *__: object, **___: object) -> None:
        raise ValueError(f"the prompts are {prompts}")

    monkeypatch.setattr(engine, "generate", refused)
    model, tokenizer = models.load(checkpoint, progress=False)
    models.save(model, tmp_path / "dated", tokenizer=tokenizer.with_chat_template(template.read_text()))
    arguments = ("generate", "--model", tmp_path / "dated", "--prompt", "x", "--chat")
    assert "strftime_now is undefined" in error(run(*arguments))
    prompt = tokenizer.encode("31 January 2026", add_special_tokens=False)
    assert f"the prompts are {[prompt]}" in error(run(*arguments, "--template-date", "2026-01-31"))
    result = run(*arguments, "--template-date", "31.1.2026")
    assert result.exit_code == 2 and "accepted: a date" in result.stderr


def test_what_serve_cannot_do_here_is_said_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*arguments: object, **options: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(models, "load", load)
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nonexistent")
    off = "--no-compilation-cache"
    for arguments, says in (
        (("--grace", "inf", off), "grace is inf; accepted: 0 to "),
        (("--grace", "nan", off), "grace is nan; accepted: 0 to "),
        (("--request-seconds", "inf", off), "request_seconds is inf; accepted: more than 0"),
        (("--max-connections", "0", off), "max_connections is 0; accepted: at least 1"),
        (("--log-level", "loud", off), "level is 'loud'; accepted: debug, info, warning, error"),
        (("--log-format", "xml", off), "format is 'xml'; accepted: text, json"),
        (("--allowed-origin", "a.example", off), "allowed_origins is ('a.example',); accepted: origins such as"),
        (("--allowed-host", "a.example:80", off), "allowed_hosts is ('a.example:80',); accepted: host names"),
        (("--tls-key", "key.pem", off), "accepted: a key with a certificate"),
        (("--tls-certificate", "nothing.pem", off), "the TLS certificate 'nothing.pem' cannot be used (No such file"),
        (("--backend", "hopper", off), "the backend is 'hopper', which serves GPUs of compute capability 9.0"),
        ((), "'/proc/nonexistent/detjax', cannot be made (No such file or directory)"),
        ((), "Choose another directory with --cache-dir, or compile at every start with --no-compilation-cache"),
        (("--cache-dir", open_to_all), "can be written by other users (mode 777, which chmod go-w changes)"),
    ):
        assert says in error(run("serve", tmp_path, "--port", 0, *arguments)), arguments


def test_demo_reports_both_numerics_and_writes_its_files(checkpoint: Path, tmp_path: Path) -> None:
    result = run(
        *("demo", "--model", checkpoint, "--asks", 7, "--max-tokens", 3, "--seed", 1),
        *("--output", tmp_path / "demo.png", "--json", tmp_path / "demo.json"),
    )
    assert result.exit_code == 0
    assert "7 of 7" in result.stdout
    assert "detjax gave one answer regardless of the load" in result.stdout
    assert "asked 7 times" in result.stderr and "7/7" in result.stderr
    printed = json.loads((tmp_path / "demo.json").read_text())
    assert (printed["asks"], printed["dtype"], printed["detjax"]["unique_logprob_bits"]) == (7, "bfloat16", 1)
    assert sum(completion["count"] for completion in printed["stock"]["completions"]) == 7
    assert printed["fingerprint"]["digest"] in result.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.json", "demo.png"]


def test_demo_with_several_answers_of_detjax_ends_with_code_1(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = experiment.Tally((((1, 2), 2), ((1, 3), 1)), bit_patterns=2)
    result = experiment.Result(1, broken, 1.0, broken, 1.0, fingerprints.fingerprint())
    monkeypatch.setattr(experiment, "compare", lambda *arguments: result)
    ended = run("demo", "--model", checkpoint, "--output", tmp_path / "demo.png")
    assert ended.exit_code == 1
    assert "detjax broke its promise" in ended.stdout
    assert (tmp_path / "demo.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--output", "nowhere/demo.png"),
            "--output is 'nowhere/demo.png', which cannot be written (No such file",
        ),
        (("--output", "directory.png"), "--output is 'directory.png', which cannot be written (Is a directory)"),
        (("--output", "demo.jpg"), "--output is 'demo.jpg'; accepted: names that end in .png"),
        (("--json", "nowhere/demo.json"), "--json is 'nowhere/demo.json', which cannot be written"),
        (("--model", "nowhere"), "'nowhere' is not a directory"),
        (("--asks", 0), "asks is 0; accepted: at least 1"),
        (("--max-tokens", 600), "max_tokens is 600; accepted: 1 to "),
        (("--prompt", ""), "the prompt is empty"),
        (
            ("--backend", "stock"),
            "the backend is 'stock', the baseline of the demo; accepted: hopper, mma, tpu, portable",
        ),
        (("--backend", "cuda"), "'cuda' is not a backend"),
        (("--dtype", "int8"), "int8"),
    ],
)
def test_demo_says_what_is_wrong_before_it_asks_and_leaves_nothing(
    arguments: tuple, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(*arguments: object) -> None:
        raise AssertionError("the experiment was begun")

    monkeypatch.setattr(experiment, "compare", compare)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "directory.png").mkdir()
    assert message in error(run("demo", *arguments))
    assert [path.name for path in tmp_path.iterdir()] == ["directory.png"]


def test_a_demo_that_fails_leaves_the_files_of_the_last_one(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "compare", compare)
    output = tmp_path / "demo.png"
    output.write_bytes(b"the last one")
    assert run("demo", "--model", checkpoint, "--output", output).exit_code == 130
    assert output.read_bytes() == b"the last one"
    assert list(tmp_path.iterdir()) == [output]

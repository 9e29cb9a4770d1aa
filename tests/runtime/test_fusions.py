"""The switches of fusions: names, contexts, the environment variable, and what knows of them."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import detjax
from detjax import ops
from detjax.cli import main
from detjax.engine.launcher import LauncherThread
from detjax.runtime import compilation, fusions
from detjax.runtime.compilation import ExecutionChoices
from tests.support import commands
from tests.support.small_loops import small_model


@pytest.fixture(autouse=True)
def no_choice_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (fusions.FUSIONS_VARIABLE, "DETJAX_BACKEND"):
        monkeypatch.delenv(variable, raising=False)


def test_contexts_add_names_and_give_them_back() -> None:
    with detjax.without_fusions("qk_rope"):
        with detjax.without_fusions("attention", "qk_rope"):
            assert fusions.unfused() == ("attention", "qk_rope")
        assert fusions.unfused() == ("qk_rope",)
    assert fusions.unfused() == ()


def test_the_environment_variable_holds_until_a_context_adds_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fusions.FUSIONS_VARIABLE, "qk_rope, softmax")
    assert fusions.unfused() == ("qk_rope", "softmax")
    with detjax.without_fusions("sample"):
        assert fusions.unfused() == ("qk_rope", "sample", "softmax")


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="without_fusions: 'rope' is not a fusion; accepted: matmul_ep"):
        with detjax.without_fusions("rope"):
            pass
    monkeypatch.setenv(fusions.FUSIONS_VARIABLE, "all")
    with pytest.raises(ValueError, match="environment variable DETJAX_WITHOUT_FUSIONS: 'all' is not a fusion"):
        fusions.unfused()


@pytest.mark.parametrize("choose", ["context", "variable"])
def test_the_choice_is_part_of_the_compilation_caches_key(choose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []

    @detjax.jit
    def program(x: jax.Array) -> jax.Array:
        traced.append(fusions.unfused())
        return ops.rms_norm(x, jnp.ones(8), eps=1e-6, residual=x)[0]

    def run(*names: str) -> None:
        if choose == "context":
            with detjax.without_fusions(*names):
                program(jnp.ones((2, 8)))
        else:
            monkeypatch.setenv(fusions.FUSIONS_VARIABLE, ",".join(names))
            program(jnp.ones((2, 8)))

    for names in ((), ("rms_norm_residual",), (), ("rms_norm_residual",)):
        run(*names)
    assert traced == [(), ("rms_norm_residual",)]


def test_stock_operations_have_no_fusions_to_switch_off() -> None:
    x = jnp.ones((2, 8))

    def program(x: jax.Array) -> jax.Array:
        return ops.rms_norm(x, jnp.ones(8), eps=1e-6, residual=x)[0]

    with detjax.use_backend("stock"):
        fused = str(jax.make_jaxpr(program)(x))
        with detjax.without_fusions(*fusions.FUSIONS):
            assert str(jax.make_jaxpr(program)(x)) == fused


def test_an_engines_threads_have_the_choices_of_the_one_that_made_them() -> None:
    with detjax.without_fusions("sample"):
        thread = LauncherThread()
    assert thread.submit(fusions.unfused).result() == ("sample",)
    thread.close()
    seen = []
    with detjax.without_fusions("sample"), detjax.use_backend("stock"), compilation.chained(True):
        choices = ExecutionChoices.here()

    def work() -> None:
        with choices.apply():
            seen.append((detjax.backend(), fusions.unfused(), compilation.is_chained()))

    other = threading.Thread(target=work)
    other.start()
    other.join()
    assert seen == [("stock", ("sample",), True)]
    assert ExecutionChoices.here() == ExecutionChoices("portable", (), False)


def test_the_fingerprint_names_the_fusions_whose_bits_may_change() -> None:
    plain = detjax.fingerprint()
    with detjax.without_fusions("attention", "qk_rope"):
        assert detjax.fingerprint() == plain
        with detjax.use_backend("hopper"):
            assert detjax.fingerprint().separated_fusions == '["attention"]'
    with detjax.use_backend("hopper"):
        assert detjax.fingerprint().separated_fusions == "[]"


CHANGES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "matmul_epilogue": (("matmul",), ("tpu",)),
    "grouped_matmul_epilogue": (("grouped_matmul",), ("tpu",)),
    "rms_norm_residual": (("rms_norm",), ()),
    "rms_norm_codes": (("rms_norm", "matmul"), ()),
    "qk_rope": (("qk_rope",), ()),
    "qk_rope_append_kv": (("qk_rope_append_kv",), ()),
    "attention_dequantize": (("attention",), ()),
    "sampling_logprobs": (("sampling_logprobs",), ()),
    "token_logprobs": (("token_logprobs", "token_logprobs_and_gradients"), ()),
    "sample": (("sample",), ("hopper", "mma", "tpu")),
    "softmax": (("softmax", "log_softmax", "logsumexp"), ("hopper", "mma", "tpu")),
    "attention": (("attention", "ragged_attention"), ("hopper", "mma", "tpu")),
    "gated_delta_rule": (("gated_delta_rule",), ("hopper", "mma", "tpu")),
}
"""Operations, and backends on which bits may change. Fingerprints depend on these, so they are written out twice."""


def test_these_fusions_change_bits_on_these_backends() -> None:
    assert {name: (one.operations, one.changes_bits_on) for name, one in fusions.FUSIONS.items()} == CHANGES
    for backend in ("hopper", "mma", "tpu", "portable", "stock"):
        with detjax.use_backend(backend), detjax.without_fusions(*CHANGES):
            changing = sorted(name for name, (_, backends) in CHANGES.items() if backend in backends)
            assert fusions.unfused_with_other_bits() == tuple(changing)


def test_operations_whose_steps_are_plain_jax_are_served_by_the_portable_backend() -> None:
    in_plain_jax = {"sample", "softmax", "attention", "gated_delta_rule"}
    for name, (operations, _) in CHANGES.items():
        for operation in operations:
            with detjax.use_backend("hopper"):
                assert fusions.serving_backend(operation) == "hopper"
                with detjax.without_fusions(name):
                    expected = "portable" if name in in_plain_jax else "hopper"
                    assert fusions.serving_backend(operation) == expected
                    assert fusions.is_unfused(name)
            with detjax.use_backend("stock"), detjax.without_fusions(name):
                assert fusions.serving_backend(operation) == "stock" and not fusions.is_unfused(name)
    with detjax.use_backend("hopper"), detjax.without_fusions("softmax"):
        assert fusions.serving_backend("attention") == "hopper" and not fusions.is_unfused("attention")


def test_an_engine_answers_without_fusions_in_the_same_bits() -> None:
    sampling = detjax.SamplingParams(max_tokens=3, temperature=1.0, seed=4)

    def answer() -> detjax.Completion:
        return detjax.generate(small_model(), [[1, 2, 3]], sampling, prefill_chunk=1)[0].completions[0]

    fused = answer()
    with detjax.without_fusions(*fusions.FUSIONS):
        separated = answer()
    assert separated.tokens == fused.tokens
    assert np.float32(separated.logprobs).tobytes() == np.float32(fused.logprobs).tobytes()


def test_the_command_prints_the_table() -> None:
    with detjax.without_fusions("softmax"):
        done = commands.run(main, "certify", "--fusions")
    assert done.exit_code == 0, done.output
    for fusion in fusions.FUSIONS.values():
        assert fusion.name in done.output
    lines = [line for line in done.output.splitlines() if "│ softmax " in line]
    assert len(lines) == 1 and "may change on hopper, mma, tpu" in lines[0] and "off │" in lines[0]
    assert "do not change" in next(line for line in done.output.splitlines() if "rms_norm_residual" in line)

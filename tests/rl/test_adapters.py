"""Training of an adapter: only its factors change, with the bits that an engine samples with."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import detjax
from detjax.models import AdapterConfig, Decoder, adapter_of, new_adapter, read_adapter, save_adapter, with_adapter
from detjax.models.network import split
from detjax.rl.functional import Training
from detjax.rl.policy_gradients.policy_gradient import supervised_samples
from detjax.rl.runs.command import TrainingOptions, train
from detjax.rl.runs.log import RunLog
from detjax.rl.tasks.pairs import Pairs
from detjax.rl.trainer.losses import LogLikelihood
from detjax.rl.trainer.microbatches import Packed, Rows
from detjax.rl.trainer.optimizers import adamw
from detjax.rl.trainer.step import Plan
from detjax.rl.trainer.trainer import Trainer
from tests.support.adapters import FIXTURE, LINEAR
from tests.support.bits import assert_same_bits, same_bits
from tests.support.simulated_devices import ALL_HOLD, run_on_devices

CONFIG = AdapterConfig(rank=3, alpha=5.0, targets=tuple(LINEAR), rank_pattern={"v_proj": 8})
SAMPLES = supervised_samples([([1, 2, 3], [4, 5, 6, 7]), ([6], [7, 8, 9]), ([5, 5], [1, 2])])


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def base(request: pytest.FixtureRequest) -> Decoder:
    return detjax.models.load(FIXTURE, dtype=request.param, progress=False)[0]


def trainer(base: Decoder, layout: Any = None, optimizer: Any = None, devices: int = 1) -> Trainer:
    policy, plan = with_adapter(base, new_adapter(base, CONFIG)), Plan(layout or Packed(tokens=32), 2, devices)
    return Trainer(policy, optimizer or adamw(1e-2), LogLikelihood(), plan)


@pytest.fixture(scope="module")
def trained(base: Decoder) -> Trainer:
    """A trainer after two steps."""
    one = trainer(base)
    for _ in range(2):
        one.step(SAMPLES)
    return one


def test_devices_that_share_the_batch_train_an_adapter_with_the_bits_of_one() -> None:
    run_on_devices(__name__, devices=2)


def main() -> None:
    """Trains an adapter on one and on two devices."""
    model = detjax.models.load(FIXTURE, dtype="float32", progress=False)[0]
    one, two = (trainer(model, devices=devices) for devices in (1, 2))
    for _ in range(2):
        for some in (one, two):
            some.step(SAMPLES)
    assert_same_bits(*(jax.tree.map(np.asarray, some.weights) for some in (one, two)))
    # A device that has no part of a weight would be sent it at every step.
    assert {len(x.devices()) for x in jax.tree.leaves(two.weights)} == {2}
    print(ALL_HOLD)


def test_a_new_adapter_has_the_bits_of_the_base_model_and_training_changes_it_alone(
    base: Decoder, trained: Trainer
) -> None:
    plain = Trainer(base, optax.sgd(0.0), LogLikelihood(), Plan(Packed(tokens=32), shards=2))
    assert_same_bits(trainer(base).logprobs(SAMPLES), plain.logprobs(SAMPLES))
    assert not same_bits(trained.logprobs(SAMPLES), plain.logprobs(SAMPLES))
    for before, after in zip(plain.weights, trained.weights, strict=True):
        assert_same_bits(getattr(after, "value", after), before)
    fixed = [master for master, one in zip(*trained.state, strict=True) if one is None]
    assert fixed and max(master.size for master in fixed) <= 2 * 512
    both = sum(np.mean(one) for one in trained.logprobs(SAMPLES)), sum(np.mean(one) for one in plain.logprobs(SAMPLES))
    assert both[0] > both[1]


def test_the_trainers_logprobs_have_the_bits_of_the_samplers_next_to_other_adapters(
    base: Decoder, trained: Trainer, tmp_path: Path
) -> None:
    adapter = adapter_of(trained.model, CONFIG)
    save_adapter(adapter, tmp_path / "saved")
    again = read_adapter(tmp_path / "saved")
    assert again.digest == adapter.digest
    options: dict[str, Any] = {"max_samples": 3, "token_budget": 32, "max_length": 32, "max_loras": 2}
    with detjax.Engine(base, max_lora_rank=40, **options) as engine:
        engine.load_adapter("policy", again)
        engine.load_adapter("other", new_adapter(base, CONFIG, seed=1))
        sampling = detjax.SamplingParams(max_tokens=6, temperature=1.0, seed=3)
        names = ("policy", "other", None)
        requests = [detjax.Request([1, 2, 3, 4], sampling, adapter=name) for name in names]
        answers = engine.generate(requests)
    completion = answers[0].completions[0]
    (sample,) = supervised_samples([(answers[0].prompt_tokens, completion.tokens)])
    assert_same_bits(trained.logprobs([sample])[0], np.asarray(completion.logprobs, np.float32))
    assert answers[1].completions[0].logprobs != completion.logprobs


def test_no_bit_of_an_adapters_gradients_depends_on_microbatches(base: Decoder, trained: Trainer) -> None:
    other = trainer(base, Rows(sequences=1, length=16))
    for _ in range(2):
        other.step(SAMPLES)
    assert_same_bits(jax.tree.leaves(other.weights), jax.tree.leaves(trained.weights))


def test_the_pure_functions_train_and_sample_with_an_adapter(base: Decoder, trained: Trainer) -> None:
    policy = with_adapter(base, new_adapter(base, CONFIG))
    training = Training(policy, adamw(1e-2), LogLikelihood(), shards=2)
    params = training.network.state(split(policy)[1])
    state = training.init(params)
    for _ in range(2):
        result = training.loss_and_gradients(state.params, SAMPLES, microbatch=Packed(tokens=32))
        state, _ = training.update(state, result.gradients)
    assert_same_bits(jax.tree.leaves(training.network.weights(state.params)), jax.tree.leaves(trained.weights))
    options: dict[str, Any] = {"max_samples": 2, "token_budget": 32, "max_length": 32, "max_loras": 1}
    with detjax.Engine(base, **options) as engine:
        rollout = training.rollout_function(engine, max_tokens=4, samples=2)
        sampled = rollout(state.params, [[1, 2, 3]], 7)
    samples = supervised_samples([([1, 2, 3], tokens) for tokens in sampled.tokens[0]])
    assert_same_bits(trained.logprobs(samples), [np.asarray(one) for one in sampled.logprobs[0]])


def test_a_command_trains_an_adapter_on_a_file(tmp_path: Path) -> None:
    lines = [{"prompt": f"{n}+{n}=", "completion": str(2 * n)} for n in range(5)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options: dict[str, Any] = {"tasks": ("sft",), "data": data, "prompts": 3, "save_every": 1, "microbatch_tokens": 64}
    options |= {"lora_rank": 4, "lora_targets": ("q_proj", "down_proj"), "width": 32, "layers": 1, "learning_rate": 0.1}
    whole = train(TrainingOptions(directory=tmp_path / "whole", steps=3, **options))
    adapter = read_adapter(tmp_path / "whole" / "adapter")
    assert adapter.digest.hex() == whole and any(np.any(one.b) for one in adapter.factors.values())
    with pytest.raises(ValueError, match="--data"):
        train(TrainingOptions(directory=tmp_path / "no", steps=1, **(options | {"data": None})))
    with pytest.raises(ValueError, match="--lora-rank is 0"):
        train(TrainingOptions(directory=tmp_path / "no", steps=1, **(options | {"lora_rank": 0})))
    data.write_text('{"prompt": "1"}')
    with pytest.raises(ValueError, match=r"data\.jsonl:1 has \['prompt'\]"):
        train(TrainingOptions(directory=tmp_path / "no", steps=1, **options))


def test_a_pass_over_a_file_has_every_pair_once_in_an_order_of_its_own() -> None:
    pairs = Pairs(tuple((str(n), "x") for n in range(7)), "")
    first, second = (pairs.chosen(0, range(7 * epoch, 7 * epoch + 7)) for epoch in range(2))
    assert sorted(first) == sorted(second) == sorted(pairs.pairs) and first != second
    assert pairs.chosen(0, [8]) == second[1:2] and pairs.chosen(1, range(7)) != first


def test_a_stopped_training_of_an_adapter_continues_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}=", "completion": str(n)}) + "\n" for n in range(5)))
    options: dict[str, Any] = {"tasks": ("sft",), "data": data, "prompts": 3, "save_every": 1, "microbatch_tokens": 64}
    options |= {"lora_rank": 4, "lora_targets": ("q_proj", "down_proj"), "width": 32, "layers": 1, "learning_rate": 0.1}
    whole = train(TrainingOptions(directory=tmp_path / "whole", steps=3, **options))
    trained, write = list[int](), RunLog.write

    def stopped(log: RunLog, step: int, metrics: Any) -> None:
        trained.append(step)
        if trained == [0, 1]:
            raise KeyboardInterrupt
        write(log, step, metrics)

    monkeypatch.setattr(RunLog, "write", stopped)
    with pytest.raises(KeyboardInterrupt):
        train(TrainingOptions(directory=tmp_path / "cut", steps=3, **options))
    assert not (tmp_path / "cut" / "adapter").exists()
    assert train(TrainingOptions(directory=tmp_path / "cut", steps=3, **options)) == whole
    assert trained == [0, 1, 1, 2]


if __name__ == "__main__":
    main()

"""The model of what steps on many devices cost: what is counted, what is fitted, and what follows from it."""

import dataclasses
import itertools
import math
from typing import Any

import pytest

from detjax.bench import cost, presets
from detjax.bench.shapes import Widths
from detjax.bench.step_work import Gather, Product, Work, preset_work, work
from detjax.contract import SOFTMAX_BLOCK

MACHINE = cost.Machine(
    start=3e-6,
    memory=4e12,
    keys=3e12,
    flops=7e14,
    attention_flops=5e14,
    latency={"logarithm": (8e-6, 11e-6), "number": (13e-6, 5e-6)},
)
ONE_LAYER = dataclasses.replace(presets.config("Qwen3-8B", 1), vocab_size=36 * SOFTMAX_BLOCK)
"""Four devices have as many blocks of the vocabulary each."""


# What is counted.


def test_a_device_alone_has_all_weights_and_gathers_nothing() -> None:
    alone = work(ONE_LAYER, 1)
    widths = Widths.from_config(ONE_LAYER)
    matrices = sum(n * k for n, k in widths.linears.values()) + widths.vocabulary * widths.hidden
    norms = 3 * widths.hidden + 2 * ONE_LAYER.head_dim
    assert alone.weight_bytes == 2 * (matrices + norms)
    assert alone.gathers == () and len(alone.products) == 5
    assert sum(one.outputs * one.inputs for one in alone.products) == sum(n * k for n, k in widths.linears.values())
    assert alone.key_bytes == 2 * 2 * widths.keys


def test_a_device_of_four_gathers_four_times_a_layer_and_twice_more() -> None:
    quarter, widths = work(ONE_LAYER, 4), Widths.from_config(ONE_LAYER)
    sizes = [widths.queries / 4, widths.hidden / 4, widths.mlp / 4, widths.hidden / 4]
    # The rows of embeddings travel whole, because any device may have a token's.
    assert quarter.gathers == (
        Gather(2 * widths.hidden),
        *[Gather(2 * int(size)) for size in sizes],
        Gather(4 * widths.vocabulary // 4, "answers"),
    )
    assert quarter.key_bytes == work(ONE_LAYER, 1).key_bytes // 4
    assert 4 * sum(one.outputs for one in quarter.products) == sum(one.outputs for one in work(ONE_LAYER, 1).products)


def test_pieces_that_devices_have_in_common_are_gathered_from_each_of_them() -> None:
    few, many = work(ONE_LAYER, 8), work(ONE_LAYER, 64)
    heads = ONE_LAYER.heads  # 32, so that two of 64 devices have the same one
    assert 8 * few.gathers[1].bytes == 2 * heads * ONE_LAYER.head_dim
    assert 64 * many.gathers[1].bytes == 2 * 2 * heads * ONE_LAYER.head_dim


def test_experts_that_no_token_chooses_are_not_read() -> None:
    experts = [Product(outputs=64, inputs=10, experts=8, chosen=2)]
    base = Work(2, 1, tuple(experts), (), 0, 0, 0, 0, 0, 0)
    reads = [cost.cost(MACHINE, "outputs", "number", base, base, cost.decode(n, 1)).weights for n in (1, 2, 1000)]
    assert reads[0] == pytest.approx(2 * 2 * 64 * 10)
    assert reads[1] == pytest.approx(2 * (8 * (1 - 0.75**2)) * 64 * 10)
    assert reads[2] == pytest.approx(2 * 8 * 64 * 10)


# What it costs.


def test_hosts_exchange_by_the_network_and_devices_of_one_by_their_links() -> None:
    assert MACHINE.gather_seconds(1e6, 4) == pytest.approx(3e6 / MACHINE.link)
    assert MACHINE.gather_seconds(1e6, 512) == pytest.approx(504e6 / (8 * MACHINE.network))
    assert MACHINE.gather_seconds(1e6, 512) > 511e6 / MACHINE.link


def test_latency_grows_with_the_logarithm_or_the_number_of_devices() -> None:
    assert MACHINE.exchange_latency(8, "logarithm") == pytest.approx(8e-6 + 3 * 11e-6)
    assert MACHINE.exchange_latency(8, "number") == pytest.approx(13e-6 + 7 * 5e-6)
    assert MACHINE.exchange_latency(1, "number") == 0


def test_the_usual_cut_exchanges_half_as_often_and_fewer_bytes() -> None:
    quarter, alone, step = work(ONE_LAYER, 4), work(ONE_LAYER, 1), cost.decode(8, 100)
    outputs, usual = (cost.cost(MACHINE, cut, "number", quarter, alone, step) for cut in cost.CUTS)
    assert (outputs.exchanges, usual.exchanges) == (6, 4)
    hidden, vocabulary = ONE_LAYER.hidden_size, ONE_LAYER.vocab_size
    # Three all-reduces, each of which moves every number twice, and the logits.
    assert usual.gathered == pytest.approx(3 / 4 * 8 * (3 * 2 * 2 * hidden + 4 * vocabulary))
    assert usual.gathered < outputs.gathered
    assert usual.weights == pytest.approx(outputs.weights)
    assert outputs.seconds == pytest.approx(outputs.compute + outputs.latency + outputs.transfer)


def test_a_prompt_pays_for_half_of_its_pairs_and_one_answer() -> None:
    step = cost.prefill(100)
    assert (step.pairs, step.kept, step.answers) == (5000, 100, 1)
    assert (cost.decode(4, 100).pairs, cost.decode(4, 100).kept) == (400, 400)


def measurements(machine: cost.Machine, growth: cost.Growth) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a machine would have measured."""
    rows = []
    for name, (n, k) in Widths.from_config(presets.config("Qwen3-8B")).linears.items():
        for m in (1, 4096):
            seconds = machine.start + (2 * n * k / machine.memory if m == 1 else 2 * m * n * k / machine.flops)
            rows.append({"operation": "matmul", "name": f"Qwen3-8B {name}, M={m}", "seconds": {"median": seconds}})
    keys = machine.start + 64 * 1024 * 2 * 8 * 128 * 2 / machine.keys
    pairs = machine.start + 4096**2 / 2 * 4 * 32 * 128 / machine.attention_flops
    rows += [
        {"operation": "attention_decode", "name": "Qwen3-8B, 64 × 1024 keys", "seconds": {"median": keys}},
        {"operation": "attention_prefill", "name": "Qwen3-8B, 1 × 4096 tokens", "seconds": {"median": pairs}},
    ]
    steps = []
    for cut, devices in itertools.product(cost.CUTS, (2, 4)):
        works = preset_work("Qwen3-8B", devices), preset_work("Qwen3-8B", 1)
        seconds = cost.cost(machine, cut, growth, works[0], works[1], cost.decode(3, 128)).seconds
        steps.append({"cut": cut, "kernels": "stock", "requests": 3, "devices": devices, "seconds": seconds})
    return {"rows": rows}, {"steps": steps}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("growth", cost.GROWTHS)
def test_fitting_finds_the_machine_that_was_measured(growth: cost.Growth) -> None:
    single, several = measurements(MACHINE, growth)
    fitted = cost.fitted(single, several)
    for name in ("start", "memory", "keys", "flops", "attention_flops"):
        assert getattr(fitted, name) == pytest.approx(getattr(MACHINE, name), rel=1e-6)
    assert fitted.latency[growth] == pytest.approx(MACHINE.latency[growth], rel=1e-6)
    if growth == "logarithm":
        assert max(row["size"] for row in cost.errors(fitted, single, several)) < 1e-6


# What follows.


def test_devices_that_cannot_hold_the_model_are_left_out() -> None:
    steps = {"a": cost.decode(1, 10)}
    small = dataclasses.replace(MACHINE, capacity=preset_work("tiny", 2).weight_bytes / 0.85)
    assert [row["devices"] for row in cost.predictions(small, ["tiny"], steps, (1, 2, 4))] == [2, 4]
    many = dataclasses.replace(small, capacity=preset_work("tiny", 2).weight_bytes / 0.85)
    assert cost.predictions(many, ["tiny"], {"a": cost.decode(10_000, 10)}, (1, 2)) == []


def test_the_fastest_step_is_that_of_least_time_for_each_cut() -> None:
    seconds = {1: (5.0, 5.0), 2: (4.0, 3.0), 4: (4.5, 2.0)}
    rows = []
    for devices, times in seconds.items():
        cuts = {cut: {"seconds": dict.fromkeys(cost.GROWTHS, time)} for cut, time in zip(cost.CUTS, times, strict=True)}
        rows.append({"model": "m", "step": "s", "devices": devices, **cuts})
    (row,) = cost.fastest(rows)
    assert row["fewest"] == 1 and math.isclose(row["number"]["ratio"], 2.0)
    assert row["logarithm"]["outputs"] == {"devices": 2, "seconds": 4.0}
    assert row["logarithm"]["usual"] == {"devices": 4, "seconds": 2.0}

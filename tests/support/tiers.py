"""The tiers of the tests: a marker set from each test's path, and the optimizations with which XLA compiles.

`pytest -m engine` runs a tier, and imports no other test. Tests of numerics check the code that XLA generates, so their
programs are compiled with all of XLA's optimizations. The others are compiled with none, which would take most of
their time.
"""

import functools
import os
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import jax
import pytest
from jax._src import compiler  # JAX has no public way to change a compiler option of all programs after its start

TESTS: Final = Path(__file__).resolve().parents[1]

TIERS: Final = {
    "numerics": ("contract", "invariant", "models", "ops", "portable"),
    "kernels": ("operands", "pallas/hopper", "pallas/mma", "runtime", "stock"),
    "engine": ("audit", "bench", "benchmarks", "demo", "engine", "rl"),
    "service": ("cli", "docs", "mutants", "server", "tools", "test_bits.py", "test_docstrings.py"),
    "tpu": ("pallas/tpu",),
}
"""Folders and files of `tests` by tier. Every test is in one of them."""

FAST: Final = tuple(
    f"{folder}/{name}"
    for folder, names in {
        "audit": (
            "test_comparison.py",
            "test_divergence.py",
            "test_replay.py",
            "test_transcripts.py",
            "test_trials.py",
        ),
        "bench": ("test_bits.py", "test_provenance.py", "test_serve.py", "test_timing.py", "test_tune.py"),
        "benchmarks": ("test_display.py", "test_expressions.py", "test_goals.py", "test_results.py"),
        "cli": ("test_files.py", "test_options.py"),
        "contract": ("test_constants.py",),
        "demo": ("test_experiment.py",),
        "docs": ("test_project_files.py",),
        "engine": (
            "test_batch.py",
            "test_config.py",
            "test_program_cache.py",
            "test_sampling_params.py",
            "test_sequence.py",
            "test_step_programs.py",
            "test_validation.py",
            "test_waiting_queue.py",
        ),
        "invariant": ("test_sizes.py",),
        "models": (
            "test_frame_sampling.py",
            "test_images.py",
            "test_tokenizer.py",
            "test_video_files.py",
            "test_videos.py",
        ),
        "mutants": ("test_lists.py",),
        "operands": ("test_options.py", "test_rounding.py"),
        "ops": ("test_errors.py",),
        "rl": (
            "test_advantages.py",
            "test_characters.py",
            "test_corrections.py",
            "test_expression.py",
            "test_log.py",
            "test_losses.py",
            "test_microbatches.py",
            "test_recipe.py",
            "test_run_loop.py",
            "test_run_state.py",
            "test_tasks.py",
            "test_verifiers.py",
        ),
        "runtime": ("test_backends.py", "test_jax_options.py"),
        "server": (
            "test_conversations.py",
            "test_guard.py",
            "test_json_pieces.py",
            "test_logs.py",
            "test_lost_replicas.py",
            "test_operations.py",
            "test_ray_application.py",
            "test_replica_choice.py",
            "test_request_fields.py",
            "test_settings.py",
            "test_statuses.py",
            "test_text_routes.py",
            "test_text_worker.py",
        ),
        "tools": (
            "test_case_sampling.py",
            "test_check_types.py",
            "test_field_table.py",
            "test_figures.py",
            "test_fixture_table.py",
            "test_idiom_table.py",
            "test_lint_prose.py",
            "test_measure.py",
            "test_set_address.py",
            "test_site.py",
            "test_soak.py",
            "test_tiers.py",
            "test_workflows.py",
        ),
    }.items()
    for name in names
)
"""Folders and files without large programs, which `make check` runs: the marker `fast`."""

LONG: Final = (
    "audit/test_certificates.py::test_an_engines_programs_are_under_contract_and_stock_ones_are_not",
    "audit/test_certificates.py::test_models_of_detjax_are_proven_by_construction",
    "audit/test_verification.py::test_honest_transcripts_are_verified_in_any_order",
    "audit/test_verification.py::test_other_parameters_are_refused_and_a_seed_that_does_not_matter_is_not",
    "audit/test_verification.py::test_other_parameters_are_refused_wherever_they_give_another_answer",
    "audit/test_verification.py::test_what_is_altered_is_refused_without_a_digest",
    "benchmarks/test_adapted_products.py",
    "benchmarks/test_draft_bits.py::test_a_guess_that_is_taken_unverified_is_found_and_a_later_call_continues",
    "benchmarks/test_draft_bits.py::test_a_wide_round_runs_many_sequences_at_a_time_and_compiles_nothing",
    "benchmarks/test_draft_bits.py::test_processes_answer_different_rounds_and_all_of_them_count",
    "benchmarks/test_studies.py::test_a_study_runs_with_small_sizes",
    "engine/test_blocks.py::test_rows_with_adapters_are_computed_at_once_and_others_in_blocks",
    "engine/test_blocks.py::test_steps_in_blocks_have_the_same_bits_and_need_no_program_at_a_later_start",
    "engine/test_continued_requests.py::test_the_rest_has_the_bits_of_an_unbroken_run",
    "engine/test_draft_heads.py::test_each_guess_is_the_head_s_own_and_changes_no_bit",
    "engine/test_draft_programs.py",
    "engine/test_drafts.py::test_generate_and_an_engine_give_the_same_completions_with_a_draft_model",
    "engine/test_drafts.py::test_guesses_change_no_bit_of_requests_that_restrict_their_tokens",
    "engine/test_images.py::test_an_engine_gives_a_request_the_same_answer_in_a_crowd",
    "engine/test_pooling.py::test_every_number_of_devices_gives_the_bits_of_one",
    "engine/test_program_compiler.py::test_closing_a_loop_ends_what_is_still_compiled",
    "engine/test_program_compiler.py::test_programs_of_a_process_have_the_same_bits_and_the_next_start_compiles_none",
    "engine/test_program_compiler.py::test_programs_of_threads_are_kept_too",
    "engine/test_program_compiler.py::test_steps_take_larger_programs_until_theirs_are_there",
    "engine/test_program_compiler.py::test_where_a_process_fails_this_one_compiles_what_is_essential_and_nothing_else",
    "engine/test_program_compiler.py::test_without_processes_nothing_is_left_for_later",
    "engine/test_prompt_scores.py::test_an_answer_has_the_score_that_it_was_drawn_with",
    "engine/test_quantized_drafts.py",
    "engine/test_rest.py::test_sleep_frees_the_memory_of_an_engine_that_alone_has_its_model",
    "engine/test_runs.py::test_devices_that_share_a_model_have_runs_with_the_bits_of_one",
    "engine/test_shared_model.py::test_devices_that_share_a_model_have_the_bits_of_one_whoever_compiles_their_programs",
    "engine/test_state_schedules.py::test_random_schedules_change_no_bit",
    "models/test_adapters.py::test_devices_that_share_a_model_change_no_bit_of_adapters",
    "models/test_adapters.py::test_modules_to_save_replace_weights_and_untie_the_head",
    "models/test_drafts.py::test_a_layer_that_predicts_further_tokens_has_the_logits_of_its_formulas",
    "models/test_gemma4.py::test_training_has_the_bits_of_prefill_and_gradients_of_keys_come_from_layers_without_any",
    "models/test_gemma4.py::test_two_devices_give_the_bits_of_one_and_read_their_own_heads_pages",
    "models/test_heads.py::test_every_number_of_devices_gives_the_bits_of_one",
    "models/test_kimi_k25.py::test_a_clip_has_the_same_rows_in_every_pack",
    "models/test_kimi_k25.py::test_a_conversation_with_a_video_has_the_tokens_and_the_continuation_of_transformers",
    "models/test_kimi_k25.py::test_an_engine_gives_a_conversation_the_same_answer_in_a_crowd",
    "models/test_processes.py",
    "models/test_quantized_models.py::test_devices_share_quantized_weights",
    "models/test_quantized_models.py::test_engine_and_trainer_have_the_same_bits",
    "models/test_qwen3_next.py::test_a_cache_goes_back_with_the_same_bits_or_not_at_all",
    "models/test_qwen3_vl.py::test_an_engines_programs_are_under_contract",
    "models/test_shared_vocabulary.py::test_tokens_and_logprobs_have_the_bits_of_one_device",
    "ops/test_processes.py",
    "pallas/hopper/attention/test_attention.py::test_no_product_meets_a_sum_in_the_kernels",
    "pallas/hopper/attention/test_backward.py::test_gradients_are_those_of_the_portable_backend",
    "pallas/hopper/test_adapters.py::test_gradients_of_an_adapter_of_all_rows_have_the_bits_of_the_contract",
    "pallas/hopper/test_adapters.py::test_rows_without_adapters_have_sums_and_no_first_products",
    "pallas/hopper/test_adapters.py::test_sums_and_first_products_share_stages_without_races",
    "pallas/hopper/test_adapters.py::test_the_kernel_of_an_adapter_has_the_bits_of_separate_products",
    "pallas/hopper/test_adapters.py::test_the_kernel_of_rows_with_adapters_has_the_bits_of_separate_products",
    "pallas/hopper/test_adapters.py::test_the_kernel_of_sums_and_first_products_has_the_bits_of_separate_kernels",
    "pallas/hopper/test_codes_matmul.py::test_products_of_the_study_lower_for_cuda",
    "pallas/hopper/test_decoder.py::test_a_request_is_the_same_anywhere_in_a_batch",
    "pallas/hopper/test_decoder.py::test_no_bit_depends_on_what_gives_the_codes",
    "pallas/hopper/test_decoder.py::test_rows_of_a_decoder_with_codes_are_proven_separate",
    "pallas/hopper/test_delta_rule.py::test_decode_verify_steps_and_prefill_have_the_bits_of_the_contract",
    "pallas/hopper/test_delta_rule.py::test_dropped_tokens_leave_no_trace",
    "pallas/hopper/test_fragments.py::test_emitted_code_widens_every_code_at_its_place",
    "pallas/hopper/test_grouped_gradients.py::test_kept_sums_give_the_gradients_that_sums_computed_again_give",
    "pallas/hopper/test_packed_matmul.py::test_kernels_compile_for_an_h200_and_nothing_spills",
    "pallas/hopper/test_ptxas.py",
    "pallas/hopper/test_quantized_matmul.py::test_a_gradient_takes_the_sums_of_codes_and_does_not_depend_on_other_rows",
    "pallas/hopper/test_quantized_matmul.py::test_a_row_of_an_expert_has_the_bits_of_its_own_product",
    "pallas/hopper/test_quantized_matmul.py::test_products_are_the_contracts_and_rows_do_not_depend_on_each_other",
    "pallas/hopper/test_rope_append.py::test_gradients_have_the_bits_of_the_separate_steps",
    "pallas/mma/attention/test_phases.py::test_the_forward_pass_of_training_has_the_bits_of_decode",
    "pallas/mma/attention/test_ptxas.py",
    "pallas/mma/test_decoder.py",
    "pallas/mma/test_matmul.py::test_two_warpgroups_that_share_stages_give_the_same_bits",
    "pallas/mma/test_ptxas.py",
    "rl/test_adapters.py::test_devices_that_share_the_batch_train_an_adapter_with_the_bits_of_one",
    "rl/test_adapters.py::test_the_pure_functions_train_and_sample_with_an_adapter",
    "rl/test_compilation_ahead.py::test_layers_of_a_decoder_share_all_kernels",
    "rl/test_drafted_rollouts.py",
    "rl/test_families.py::test_a_request_gets_the_same_answer_alone_and_in_a_crowd_and_the_trainer_its_logprobs",
    "rl/test_families.py::test_microbatches_padding_and_packing_change_no_gradient",
    "rl/test_functional.py::test_steps_are_those_of_the_trainer_whatever_the_microbatches_are",
    "rl/test_images.py::test_a_step_has_the_samplers_bits_in_every_layout_and_leaves_the_tower",
    "rl/test_images.py::test_the_trainer_has_the_logprobs_of_the_sampler_and_sees_which_image_is_whose",
    "rl/test_loop_examples.py",
    "rl/test_run.py::test_a_run_that_is_killed_and_resumed_ends_with_the_same_bytes",
    "rl/test_training.py::test_devices_that_share_batch_and_state_change_no_bit",
    "rl/test_training.py::test_two_steps_have_the_same_bits_for_every_layout",
    "rl/test_training_command.py::test_a_policy_learns_from_its_rollouts",
    "rl/test_training_command.py::test_two_runs_that_are_cut_up_differently_give_one_model",
    "rl/test_training_processes.py",
    "runtime/test_equal_fingerprints.py::test_all_harmless_options_and_variables_together_change_no_bit",
    "runtime/test_equal_fingerprints.py::test_each_harmless_option_changes_no_bit",
    "runtime/test_equal_fingerprints.py::test_processes_with_equal_fingerprints_have_equal_bits",
    "server/test_bodies.py::test_bodies_of_eight_megabytes_cost_a_small_multiple_of_it",
    "server/test_control.py::test_sleep_gives_back_the_memory_of_weights_and_cache",
    "server/test_load.py::test_many_streams_have_the_bits_of_requests_alone",
    "server/test_process.py::test_a_process_that_is_killed_leaves_nothing_that_stops_the_next",
    "server/test_process_replicas.py::test_a_server_survives_its_replicas_and_none_of_them_survives_it",
    "server/test_process_replicas.py::test_a_stream_goes_on_when_its_process_is_killed_or_stuck",
    "server/test_sampled_answers.py::test_the_importance_ratio_to_a_trainer_is_one",
    "server/test_weight_updates.py::test_every_answer_in_a_crowd_is_verified_with_the_weights_that_it_names",
)
"""Tests that take many seconds: the marker `long`. `make test` leaves them to `make test-long`, and CI runs both."""

UNOPTIMIZED: Final = "--xla_backend_optimization_level=0"
_FULL_LEVEL: Final = 3
"""XLA's default."""

_can_switch: Final = os.environ.get("XLA_FLAGS") == UNOPTIMIZED
_is_optimized = False


def tier_of(path: Path) -> str | None:
    """Returns the tier of a file or of a folder that has no other tier's tests."""
    return next((tier for tier, parts in TIERS.items() if _is_in(path, parts)), None)


@functools.cache  # thousands of tests ask for a few hundred files
def _is_in(path: Path, parts: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(TESTS / part) for part in parts)


def is_long(node: str) -> bool:
    """Returns whether a test, by its id or the id of one of its cases, is in `LONG`."""
    name = node.removeprefix("tests/").partition("[")[0]
    return name in LONG or name.partition("::")[0] in LONG


def _is_above(path: Path, parts: tuple[str, ...]) -> bool:
    return any((TESTS / part).is_relative_to(path) for part in parts)


def pytest_configure(config: pytest.Config) -> None:
    for tier, parts in TIERS.items():
        config.addinivalue_line("markers", f"{tier}: the tier of {', '.join(parts)}")
    config.addinivalue_line("markers", "fast: compiles no large program; `make check` runs it")
    config.addinivalue_line("markers", "long: takes many seconds; `make test-long` runs it, and so does CI")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if _is_in(collection_path, TIERS["tpu"]) and find_spec("libtpu") is None:
        return True  # `make test-tpu` installs it
    chosen = config.getoption("markexpr")
    parts = {"fast": FAST, "long": tuple(name.partition("::")[0] for name in LONG)}.get(chosen) or TIERS.get(chosen)
    if parts is None or _is_in(collection_path, parts) or _is_above(collection_path, parts):
        return None
    return collection_path.is_relative_to(TESTS) or None


def pytest_itemcollected(item: pytest.Item) -> None:
    if {"fast", "long"} & {mark.name for mark in item.own_markers}:
        # `make check` and `make test-long` collect the files of the lists alone, so no run would have this test.
        raise pytest.UsageError(f"{item.nodeid} is marked fast or long; accepted: an entry of tiers.FAST or tiers.LONG")
    if (tier := tier_of(item.path)) is not None:
        item.add_marker(tier)
    if _is_in(item.path, FAST):
        item.add_marker("fast")
    if is_long(item.nodeid):
        item.add_marker("long")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A process drops its programs where it switches to other optimizations, so it switches once.
    items.sort(key=lambda item: tier_of(item.path) != "numerics")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _optimize(tier_of(item.path) == "numerics")
    return (yield)


def _optimize(value: bool) -> None:
    """Switches the optimizations of this process, and of those that it starts from now on."""
    global _is_optimized
    if value != _is_optimized and _can_switch:
        _is_optimized = value
        os.environ["XLA_FLAGS"] = "" if value else UNOPTIMIZED
        jax.clear_caches()


def _compiled(*args: Any, _compile: Any = compiler.compile_or_get_cached, **kwargs: Any) -> Any:
    if _is_optimized:
        options = kwargs.get("compile_options") or args[3]
        options.executable_build_options.debug_options.xla_backend_optimization_level = _FULL_LEVEL
    return _compile(*args, **kwargs)


compiler.compile_or_get_cached = _compiled

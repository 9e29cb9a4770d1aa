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
            "test_deadlines.py",
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
    "audit/test_bisection.py::test_a_defect_is_found_in_its_layer",
    "audit/test_bisection.py::test_a_process_can_end_before_its_traced_run",
    "audit/test_bisection.py::test_a_sound_function_has_no_difference",
    "audit/test_bisection.py::test_digests_that_share_a_kernel_are_those_of_each_array",
    "audit/test_bisection.py::test_what_depends_on_the_batch_is_found_in_its_layer",
    "audit/test_certificates.py::test_an_engines_programs_are_under_contract_and_stock_ones_are_not",
    "audit/test_certificates.py::test_models_of_detjax_are_proven_by_construction",
    "audit/test_verification.py::test_another_weight_is_refused_by_its_digest_and_by_its_bits",
    "audit/test_verification.py::test_four_bits_of_a_cache_are_those_of_the_answer",
    "audit/test_verification.py::test_honest_transcripts_are_verified_in_any_order",
    "audit/test_verification.py::test_no_verdict_depends_on_sizes_and_neighbours",
    "audit/test_verification.py::test_other_parameters_are_refused_and_a_seed_that_does_not_matter_is_not",
    "audit/test_verification.py::test_other_parameters_are_refused_wherever_they_give_another_answer",
    "audit/test_verification.py::test_reports_of_likeliest_tokens_and_sampling_logprobs_are_checked",
    "audit/test_verification.py::test_the_first_token_that_could_not_have_been_produced_is_named",
    "audit/test_verification.py::test_what_is_altered_is_refused_without_a_digest",
    "benchmarks/test_adapted_products.py",
    "benchmarks/test_draft_bits.py::test_a_guess_that_is_taken_unverified_is_found_and_a_later_call_continues",
    "benchmarks/test_draft_bits.py::test_a_wide_round_runs_many_sequences_at_a_time_and_compiles_nothing",
    "benchmarks/test_draft_bits.py::test_processes_answer_different_rounds_and_all_of_them_count",
    "benchmarks/test_repeated_layers.py::test_repetitions_have_the_same_bits",
    "benchmarks/test_studies.py::test_a_study_runs_with_small_sizes",
    "benchmarks/test_studies.py::test_models_are_arguments_of_programs",
    "benchmarks/test_studies.py::test_random_programs",
    "benchmarks/test_studies.py::test_rivals_of_the_delta_rule_compute_the_rule",
    "benchmarks/test_study_parts.py::test_every_way_of_cutting_a_request_is_compared",
    "cli/test_cli.py::test_demo_reports_both_numerics_and_writes_its_files",
    "cli/test_cli.py::test_generate_prints_the_text_alone",
    "contract/test_delta_rule.py::test_outputs_are_those_of_the_contract",
    "demo/test_drafts.py::test_the_head_guesses_the_checkpoint_s_likeliest_token_on_a_verse",
    "docs/test_pages.py::test_an_example_runs_and_prints_what_it_shows",
    "docs/test_pages.py::test_the_blocks_of_a_page_run_as_written",
    "engine/test_adapters.py::test_an_engine_of_a_model_with_an_adapter_serves_modules_to_save",
    "engine/test_adapters.py::test_answers_are_those_of_the_model_and_the_base_requests_those_of_an_engine_without_adapters",
    "engine/test_adapters.py::test_requests_with_different_adapters_and_without_one_have_the_bits_that_they_have_alone",
    "engine/test_adapters.py::test_runs_of_decodes_compute_each_row_with_its_adapter",
    "engine/test_adjusted_logits.py::test_adjusted_requests_alone_and_together_have_the_same_bits",
    "engine/test_adjusted_logits.py::test_logprobs_are_those_of_the_model_before_the_adjustments",
    "engine/test_adjusted_logits.py::test_no_token_ends_a_sample_before_it_has_min_tokens",
    "engine/test_adjusted_logits.py::test_the_bits_are_those_of_generate_in_chunks_of_any_size",
    "engine/test_blocks.py::test_a_drafter_learns_the_same_of_rows_in_blocks",
    "engine/test_blocks.py::test_a_loop_that_has_slept_computes_blocks_again",
    "engine/test_blocks.py::test_blocks_are_computed_until_the_programs_of_all_layers_are_there",
    "engine/test_blocks.py::test_blocks_that_nothing_has_to_wait_for_are_not_compiled",
    "engine/test_blocks.py::test_prefills_of_many_rows_are_computed_in_blocks_with_the_same_bits",
    "engine/test_blocks.py::test_rows_with_adapters_are_computed_at_once_and_others_in_blocks",
    "engine/test_blocks.py::test_steps_in_blocks_have_the_same_bits_and_need_no_program_at_a_later_start",
    "engine/test_constrained_generation.py::test_answers_have_the_same_bits_in_a_crowd",
    "engine/test_constrained_generation.py::test_every_answer_is_what_its_constraint_asks_for",
    "engine/test_constrained_generation.py::test_generate_answers_as_the_engine_does",
    "engine/test_constrained_generation.py::test_no_answer_depends_on_when_its_masks_are_there",
    "engine/test_continued_requests.py::test_the_rest_has_the_bits_of_an_unbroken_run",
    "engine/test_draft_heads.py::test_each_guess_is_the_head_s_own_and_changes_no_bit",
    "engine/test_draft_programs.py",
    "engine/test_drafts.py::test_a_draft_model_with_the_same_weights_is_always_right",
    "engine/test_drafts.py::test_generate_and_an_engine_give_the_same_completions_with_a_draft_model",
    "engine/test_drafts.py::test_guesses_change_no_bit_of_requests_that_restrict_their_tokens",
    "engine/test_drafts.py::test_prompt_lookup_changes_no_bit",
    "engine/test_engine.py::test_a_prompts_logprobs_are_those_of_the_training_forward",
    "engine/test_engine.py::test_answers_and_streams_say_how_many_tokens_of_the_prompt_were_in_the_cache",
    "engine/test_engine.py::test_order_and_a_warm_prefix_cache_do_not_matter",
    "engine/test_engine.py::test_preempted_requests_have_the_same_bits",
    "engine/test_engine.py::test_requests_alone_and_together_have_the_same_bits",
    "engine/test_engine.py::test_stock_xla_fails_the_test_of_requests_alone_and_together",
    "engine/test_engine.py::test_the_bits_are_those_of_generate",
    "engine/test_engine.py::test_warming_up_compiles_every_program_side_by_side_and_nothing_is_compiled_after_it",
    "engine/test_generate.py::test_a_sample_depends_on_seed_and_index",
    "engine/test_generate.py::test_a_stop_token_ends_the_sample_and_stays_in_it",
    "engine/test_generate.py::test_calls_of_one_size_compile_two_programs_of_the_layers_and_one_that_samples",
    "engine/test_generate.py::test_prompt_logprobs_are_those_of_the_training_forward_in_chunks_of_any_size",
    "engine/test_generate.py::test_requests_alone_and_together_have_the_same_bits",
    "engine/test_images.py::test_an_engine_gives_a_request_the_same_answer_in_a_crowd",
    "engine/test_images.py::test_frames_have_places_of_their_own_where_the_prompt_says_their_times",
    "engine/test_images.py::test_greedy_continuations_are_those_of_transformers",
    "engine/test_images.py::test_greedy_continuations_of_a_video_are_those_of_transformers",
    "engine/test_images.py::test_no_image_waits_for_a_program_after_warming_up",
    "engine/test_images.py::test_one_token_stands_for_an_image",
    "engine/test_images.py::test_prompts_with_other_images_share_no_pages_with_them",
    "engine/test_images.py::test_the_times_of_frames_are_written_as_by_transformers",
    "engine/test_images.py::test_videos_of_equal_frames_share_no_pages_with_slower_ones",
    "engine/test_pooling.py::test_a_preempted_sequence_starts_over_with_the_same_bits",
    "engine/test_pooling.py::test_a_reranker_scores_pairs_by_two_logits_of_the_language_model",
    "engine/test_pooling.py::test_a_result_is_the_same_alone_and_together_in_any_chunks_and_from_the_cache",
    "engine/test_pooling.py::test_every_number_of_devices_gives_the_bits_of_one",
    "engine/test_pooling.py::test_every_program_is_compiled_in_advance",
    "engine/test_pooling.py::test_other_families_pool_too",
    "engine/test_program_compiler.py::test_closing_a_loop_ends_what_is_still_compiled",
    "engine/test_program_compiler.py::test_programs_of_a_process_have_the_same_bits_and_the_next_start_compiles_none",
    "engine/test_program_compiler.py::test_programs_of_threads_are_kept_too",
    "engine/test_program_compiler.py::test_steps_take_larger_programs_until_theirs_are_there",
    "engine/test_program_compiler.py::test_where_a_process_fails_this_one_compiles_what_is_essential_and_nothing_else",
    "engine/test_program_compiler.py::test_without_processes_nothing_is_left_for_later",
    "engine/test_prompt_scores.py::test_an_answer_has_the_score_that_it_was_drawn_with",
    "engine/test_prompt_scores.py::test_scores_have_the_same_bits_in_a_crowd",
    "engine/test_prompt_scores.py::test_the_likeliest_tokens_are_those_of_the_distribution",
    "engine/test_quantized_drafts.py",
    "engine/test_reasoning_budget.py::test_receipts_hold_the_budget",
    "engine/test_reasoning_budget.py::test_the_closing_mark_comes_after_the_budget_and_the_tokens_before_it_keep_their_bits",
    "engine/test_rest.py::test_an_abort_leaves_a_beginning_of_the_answer_and_other_requests_alone",
    "engine/test_rest.py::test_requests_that_were_frozen_or_put_to_sleep_have_the_same_bits",
    "engine/test_rest.py::test_sleep_frees_the_memory_of_an_engine_that_alone_has_its_model",
    "engine/test_runs.py::test_constraints_are_computed_step_by_step_among_others",
    "engine/test_runs.py::test_devices_that_share_a_model_have_runs_with_the_bits_of_one",
    "engine/test_runs.py::test_runs_of_samples_that_end_at_any_length_have_the_bits_of_single_steps",
    "engine/test_runs.py::test_samples_that_need_more_between_two_steps_are_computed_step_by_step_among_others",
    "engine/test_sampling_logprobs.py::test_a_program_of_one_request_gives_the_same_bits",
    "engine/test_sampling_logprobs.py::test_preempted_requests_have_the_same_bits",
    "engine/test_sampling_logprobs.py::test_requests_alone_and_in_a_crowd_have_the_same_bits",
    "engine/test_sampling_logprobs.py::test_stock_xla_fails_the_test_of_engine_and_trainer",
    "engine/test_sampling_logprobs.py::test_the_engine_reports_the_bits_that_a_trainer_computes_from_whole_sequences",
    "engine/test_scheduler.py::test_ten_thousand_random_schedules_change_no_token_and_leak_no_page",
    "engine/test_shared_model.py::test_devices_that_share_a_model_have_the_bits_of_one_whoever_compiles_their_programs",
    "engine/test_shared_snapshots.py::test_two_devices_restore_a_slot_by_programs_compiled_in_advance",
    "engine/test_state_schedules.py::test_random_schedules_change_no_bit",
    "engine/test_text_stream.py::test_any_text_is_told_and_ended_as_defined",
    "engine/test_token_masks.py::test_answers_keep_the_rules",
    "engine/test_token_masks.py::test_generate_and_resumed_requests_give_the_same_answers",
    "engine/test_watchdog.py::test_a_lost_device_ends_the_engine_with_a_message",
    "engine/test_watchdog.py::test_a_thread_that_returns_after_all_delivers_nothing",
    "engine/test_watchdog.py::test_its_process_ends_without_waiting_for_the_devices",
    "invariant/test_cutting.py::test_models_have_the_bits_of_those_traced_for_one_row",
    "invariant/test_functions.py::test_on_accelerators_no_compiler_chooses_among_zeros_of_both_signs",
    "invariant/test_layers.py::test_layers_are_replaced_in_place",
    "invariant/test_layers.py::test_linen_layers_work_within_a_model_that_trains",
    "invariant/test_meshes.py::test_rows_on_several_devices_have_the_bits_of_one",
    "invariant/test_meshes.py::test_rows_that_devices_exchange_are_refused",
    "invariant/test_meshes.py::test_weights_do_not_depend_on_how_many_devices_train_them",
    "invariant/test_mixed_rows.py::test_sorted_tokens_have_the_bits_that_they_have_alone",
    "invariant/test_models.py::test_a_row_has_the_bits_that_it_has_alone",
    "invariant/test_models.py::test_numbers_are_close_to_the_original",
    "invariant/test_operations.py::test_a_trace_has_the_results_of_operations_and_finds_what_differs_after_them",
    "invariant/test_operations.py::test_rows_of_a_function_with_operations_are_those_alone",
    "invariant/test_patterns.py::test_no_part_of_a_transformer_runs_in_a_loop_over_rows",
    "invariant/test_random_programs.py::test_no_proof_of_a_random_program_is_false",
    "invariant/test_recurrent.py::test_a_recurrent_networks_rows_have_the_bits_that_they_have_alone",
    "invariant/test_recurrent.py::test_attention_decodes_with_a_cache_that_is_an_argument_with_rows",
    "models/test_adapters.py::test_a_row_with_an_adapter_has_the_bits_that_it_has_alone_and_the_values_of_a_merged_model",
    "models/test_adapters.py::test_devices_that_share_a_model_change_no_bit_of_adapters",
    "models/test_adapters.py::test_modules_to_save_replace_weights_and_untie_the_head",
    "models/test_blocks.py::test_blocks_compute_what_all_layers_do",
    "models/test_decoder.py::test_a_quantized_cache_gives_the_same_bits_in_every_batch_and_in_chunks",
    "models/test_decoder.py::test_a_request_is_the_same_in_every_batch_and_slot",
    "models/test_decoder.py::test_chunks_and_decode_give_the_bits_of_prefill",
    "models/test_decoder.py::test_gradients_of_the_model_are_those_of_plain_jax",
    "models/test_decoder.py::test_stock_xla_fails_the_tests_of_batches_and_of_chunks",
    "models/test_decoder.py::test_the_training_forward_gives_the_bits_of_prefill",
    "models/test_decoder.py::test_vmap_of_the_model_gives_the_bits_of_the_model",
    "models/test_decoder.py::test_what_the_neighbours_have_in_the_cache_does_not_matter",
    "models/test_drafts.py::test_a_layer_that_predicts_further_tokens_has_the_logits_of_its_formulas",
    "models/test_drafts.py::test_a_residual_stream_is_what_a_shorter_decoder_ends_with",
    "models/test_drafts.py::test_guesses_chain_the_hidden_states_before_the_last_norm",
    "models/test_engines.py::test_a_request_has_the_answer_of_the_training_forward_alone_and_together",
    "models/test_expert_mesh.py::test_devices_with_different_experts_give_the_bits_of_one",
    "models/test_gemma4.py::test_a_layer_without_keys_reads_another_layers_pages_and_has_no_memory",
    "models/test_gemma4.py::test_chunks_decode_and_batches_have_the_bits_of_prefill",
    "models/test_gemma4.py::test_training_has_the_bits_of_prefill_and_gradients_of_keys_come_from_layers_without_any",
    "models/test_gemma4.py::test_two_devices_give_the_bits_of_one_and_read_their_own_heads_pages",
    "models/test_gpt_oss.py::test_sequences_at_once_and_one_after_another_give_one_sum_of_sinks",
    "models/test_gpt_oss.py::test_the_gradient_of_sinks_goes_on_from_their_sum",
    "models/test_heads.py::test_chunks_give_the_logits_of_one_call_among_other_requests",
    "models/test_heads.py::test_every_number_of_devices_gives_the_bits_of_one",
    "models/test_kimi_k25.py::test_a_clip_has_the_same_rows_in_every_pack",
    "models/test_kimi_k25.py::test_a_conversation_with_a_video_has_the_tokens_and_the_continuation_of_transformers",
    "models/test_kimi_k25.py::test_an_engine_gives_a_conversation_the_same_answer_in_a_crowd",
    "models/test_kimi_k25.py::test_clips_have_the_patches_and_rows_of_the_reference",
    "models/test_kimi_k25.py::test_images_have_the_continuation_of_transformers",
    "models/test_latent_attention.py::test_values_and_gradients_are_those_of_the_expanded_form",
    "models/test_lazy_parameter.py::test_a_host_holds_less_than_a_layer_beyond_the_devices_weights",
    "models/test_mesh.py::test_every_number_of_devices_gives_the_bits_of_one",
    "models/test_new_family.py::test_its_decode_gives_the_bits_of_prefill",
    "models/test_parts.py::test_rows_of_experts_belong_to_the_sequences_of_their_tokens_and_padding_to_none",
    "models/test_processes.py",
    "models/test_quantized_models.py::test_a_row_does_not_depend_on_its_batch",
    "models/test_quantized_models.py::test_devices_share_quantized_weights",
    "models/test_quantized_models.py::test_engine_and_trainer_have_the_same_bits",
    "models/test_qwen3_next.py::test_a_cache_goes_back_with_the_same_bits_or_not_at_all",
    "models/test_qwen3_vl.py::test_an_engines_programs_are_under_contract",
    "models/test_qwen3_vl.py::test_devices_that_share_a_model_give_the_bits_of_one",
    "models/test_qwen3_vl.py::test_rows_join_the_outputs_of_the_first_layers_at_their_tokens_alone",
    "models/test_shared_vocabulary.py::test_tokens_and_logprobs_have_the_bits_of_one_device",
    "models/test_towers.py::test_chunks_that_cut_images_give_the_bits_of_prefill",
    "models/test_towers.py::test_stock_xla_fails_the_test_of_packs",
    "ops/test_accumulated_weights.py::test_no_chunk_of_the_logprobs_of_tokens_changes_a_bit",
    "ops/test_adapters.py::test_gradients_of_the_factors_are_close_to_those_of_a_merged_weight_and_the_weight_has_none",
    "ops/test_adapters.py::test_rows_of_experts_have_their_tokens_adapters",
    "ops/test_adapters.py::test_rows_with_adapters_of_many_ranks_have_the_bits_that_they_have_alone",
    "ops/test_attention.py::test_a_request_gives_the_same_bits_in_any_batch_slot_and_pages",
    "ops/test_attention.py::test_requests_packed_into_one_array_have_the_bits_of_each_alone",
    "ops/test_attention_mask.py::test_chunks_with_their_rows_of_the_mask_have_the_bits_of_the_whole",
    "ops/test_attention_mask.py::test_each_request_and_head_has_the_bits_of_its_own_mask_alone",
    "ops/test_attention_mask.py::test_gradients_have_the_bits_of_the_options_that_mask_alike",
    "ops/test_attention_mask.py::test_vmap_gives_the_bits_of_each",
    "ops/test_collectives.py::test_sums_over_devices_are_those_of_the_axis_as_tree",
    "ops/test_composition.py::test_a_whole_block_in_one_program_gives_the_bits_of_its_operations",
    "ops/test_delta_rule.py::test_calls_of_other_lengths_are_other_programs_with_the_same_bits",
    "ops/test_delta_rule.py::test_gradients_are_those_of_the_recurrence",
    "ops/test_delta_rule.py::test_gradients_depend_on_neither_padding_nor_packing_nor_neighbours",
    "ops/test_delta_rule.py::test_packed_requests_have_the_bits_of_rectangular_ones",
    "ops/test_delta_rule.py::test_the_batch_slots_their_old_contents_and_neighbours_of_nan_change_no_bit",
    "ops/test_experts.py::test_a_token_depends_on_itself_alone",
    "ops/test_experts.py::test_aggregations_of_transformers_have_the_bits_of_torch",
    "ops/test_experts.py::test_gradients_are_those_of_float64_and_rows_depend_on_themselves_alone",
    "ops/test_grouped_matmul.py::test_gradients_are_those_of_float64",
    "ops/test_key_columns.py::test_packed_queries_have_the_gradients_of_rectangular_ones",
    "ops/test_key_columns.py::test_the_gradient_of_a_column_is_rounded_once",
    "ops/test_key_columns.py::test_the_gradient_of_a_column_is_that_of_the_key_plus_that_of_the_value",
    "ops/test_noise.py::test_the_noise_of_given_ids_is_that_of_the_whole_vocabulary_and_of_numpy",
    "ops/test_packed.py::test_each_request_has_the_bits_it_has_alone",
    "ops/test_packed_gradients.py::test_attention_gives_the_gradients_of_each_request_whatever_stands_in_rows_of_nobody",
    "ops/test_packed_gradients.py::test_sequences_in_one_row_have_the_gradients_of_sequences_in_rows_of_their_own",
    "ops/test_processes.py",
    "ops/test_quantized_kv.py::test_attention_has_the_bits_of_what_the_pages_are_read_as",
    "ops/test_quantized_matmul.py::test_a_row_of_an_expert_has_the_bits_of_its_own_product",
    "ops/test_quantized_matmul.py::test_the_gradient_is_that_of_the_widened_weight",
    "ops/test_rope_append.py::test_gradients_have_the_bits_of_the_three_steps",
    "ops/test_row_functions.py::test_gradients_of_a_part_of_a_request_are_those_of_the_whole",
    "ops/test_row_functions.py::test_gradients_of_weights_do_not_depend_on_microbatches",
    "ops/test_sampling.py::test_at_temperature_1_without_filters_they_are_the_logprobs",
    "ops/test_sampling.py::test_logprobs_are_the_models_own_in_the_bits_of_log_softmax",
    "ops/test_sampling.py::test_sampling_has_no_gradient",
    "ops/test_sampling.py::test_sampling_logprobs_have_the_bits_of_log_softmax",
    "ops/test_token_logprobs.py::test_they_are_those_of_sampling_and_their_gradients_those_of_float64",
    "pallas/hopper/attention/test_attention.py::test_no_product_meets_a_sum_in_the_kernels",
    "pallas/hopper/attention/test_backward.py::test_gradients_are_those_of_the_portable_backend",
    "pallas/hopper/attention/test_backward.py::test_gradients_with_a_mask_are_those_of_the_portable_backend",
    "pallas/hopper/attention/test_contract.py::test_decode_has_the_bits_of_the_contract",
    "pallas/hopper/attention/test_contract.py::test_heads_of_any_number_and_width_decode_to_the_bits_of_the_contract",
    "pallas/hopper/attention/test_contract.py::test_prefill_has_the_bits_of_the_contract",
    "pallas/hopper/attention/test_contract.py::test_quantized_pages_prefill_to_the_bits_of_what_they_are_read_as",
    "pallas/hopper/attention/test_contract.py::test_ragged_queries_have_the_bits_of_the_contract",
    "pallas/hopper/attention/test_contract.py::test_wide_keys_have_values_of_any_width",
    "pallas/hopper/attention/test_contract.py::test_wide_rows_have_the_bits_of_the_contract_in_every_schedule",
    "pallas/hopper/attention/test_latent.py::test_a_split_decode_has_the_bits_of_the_contract",
    "pallas/hopper/attention/test_latent.py::test_narrow_latents_are_right",
    "pallas/hopper/attention/test_latent.py::test_verify_steps_prefill_and_ragged_queries_have_the_bits_of_the_contract",
    "pallas/hopper/attention/test_packed_gradients.py::test_gradients_of_packed_queries_lower",
    "pallas/hopper/attention/test_packed_gradients.py::test_no_packing_changes_a_gradient",
    "pallas/hopper/attention/test_tiles.py::test_a_mask_that_is_shorter_than_the_cache_hides_the_rest",
    "pallas/hopper/attention/test_tiles.py::test_rows_between_packed_requests_are_not_written",
    "pallas/hopper/test_adapters.py::test_an_adapter_of_all_rows_has_the_bits_that_it_has_among_others",
    "pallas/hopper/test_adapters.py::test_gradients_of_an_adapter_of_all_rows_have_the_bits_of_the_contract",
    "pallas/hopper/test_adapters.py::test_rows_that_are_not_sorted_have_the_products_of_sorted_rows",
    "pallas/hopper/test_adapters.py::test_rows_with_different_adapters_have_the_bits_that_they_have_alone",
    "pallas/hopper/test_adapters.py::test_rows_without_adapters_have_sums_and_no_first_products",
    "pallas/hopper/test_adapters.py::test_sums_and_first_products_share_stages_without_races",
    "pallas/hopper/test_adapters.py::test_the_kernel_of_an_adapter_adds_gradients_of_rows",
    "pallas/hopper/test_adapters.py::test_the_kernel_of_an_adapter_has_the_bits_of_separate_products",
    "pallas/hopper/test_adapters.py::test_the_kernel_of_rows_with_adapters_has_the_bits_of_separate_products",
    "pallas/hopper/test_adapters.py::test_the_kernel_of_sums_and_first_products_has_the_bits_of_separate_kernels",
    "pallas/hopper/test_codes_matmul.py::test_a_row_of_an_expert_has_the_bits_of_its_own_product",
    "pallas/hopper/test_codes_matmul.py::test_products_of_the_study_lower_for_cuda",
    "pallas/hopper/test_convolution.py::test_calls_cut_anywhere_have_the_bits_of_the_portable_program",
    "pallas/hopper/test_convolution.py::test_every_schedule_gives_the_same_bits",
    "pallas/hopper/test_convolution.py::test_only_calls_in_which_no_token_overwrites_what_another_one_reads_write_in_the_kernel",
    "pallas/hopper/test_decoder.py::test_a_request_is_the_same_anywhere_in_a_batch",
    "pallas/hopper/test_decoder.py::test_latent_attention_multiplies_all_heads_by_one_kernel_and_no_step_loops",
    "pallas/hopper/test_decoder.py::test_no_bit_depends_on_what_gives_the_codes",
    "pallas/hopper/test_decoder.py::test_rows_of_a_decoder_with_codes_are_proven_separate",
    "pallas/hopper/test_delta_rule.py::test_decode_verify_steps_and_prefill_have_the_bits_of_the_contract",
    "pallas/hopper/test_delta_rule.py::test_dropped_tokens_leave_no_trace",
    "pallas/hopper/test_delta_rule.py::test_heads_of_all_widths_are_right",
    "pallas/hopper/test_delta_rule.py::test_packed_requests_slots_and_their_old_contents_change_no_bit",
    "pallas/hopper/test_emitted_code.py::test_emitted_code_chooses_and_places_as_the_separate_operations",
    "pallas/hopper/test_expert_choice.py::test_the_operation_has_the_bits_and_the_gradients_of_its_steps",
    "pallas/hopper/test_fragments.py::test_emitted_code_widens_every_code_at_its_place",
    "pallas/hopper/test_fusions.py::test_bits_of_attention_change_in_plain_jax",
    "pallas/hopper/test_fusions.py::test_no_bit_changes_where_other_kernels_take_the_steps",
    "pallas/hopper/test_fusions.py::test_no_bit_of_gradients_changes",
    "pallas/hopper/test_fusions.py::test_plain_jax_gives_the_same_numbers_but_for_roundings",
    "pallas/hopper/test_gradients.py::test_gradients_of_heads_are_those_of_the_separate_steps",
    "pallas/hopper/test_gradients.py::test_gradients_of_norms_depend_on_neither_neighbours_nor_microbatches",
    "pallas/hopper/test_gradients.py::test_sums_of_products_continue",
    "pallas/hopper/test_gradients.py::test_the_sums_of_an_epilogue_are_kept",
    "pallas/hopper/test_grouped_gradients.py::test_kept_sums_give_the_gradients_that_sums_computed_again_give",
    "pallas/hopper/test_grouped_gradients.py::test_microbatches_and_padding_are_schedules",
    "pallas/hopper/test_grouped_gradients.py::test_sums_have_the_bits_of_the_portable_program",
    "pallas/hopper/test_grouped_gradients.py::test_the_gradient_of_a_row_has_the_bits_of_its_experts_matmul",
    "pallas/hopper/test_grouped_matmul.py::test_clamped_rows_have_the_bits_of_their_experts_matmul_and_the_numbers_of_float64",
    "pallas/hopper/test_grouped_matmul.py::test_each_row_has_the_bits_of_its_experts_matmul",
    "pallas/hopper/test_matmul.py::test_gradients_are_those_of_float64",
    "pallas/hopper/test_norm.py::test_every_schedule_of_heads_gives_the_same_bits",
    "pallas/hopper/test_norm.py::test_operations_reach_the_kernels_and_have_gradients",
    "pallas/hopper/test_packed_matmul.py::test_codes_give_the_bits_of_widened_weights",
    "pallas/hopper/test_packed_matmul.py::test_gradients_are_the_gradients_with_widened_weights",
    "pallas/hopper/test_packed_matmul.py::test_kernels_compile_for_an_h200_and_nothing_spills",
    "pallas/hopper/test_packed_matmul.py::test_operations_multiply_codes_and_rows_do_not_depend_on_each_other",
    "pallas/hopper/test_ptxas.py",
    "pallas/hopper/test_quantized_matmul.py::test_a_gradient_takes_the_sums_of_codes_and_does_not_depend_on_other_rows",
    "pallas/hopper/test_quantized_matmul.py::test_a_row_of_an_expert_has_the_bits_of_its_own_product",
    "pallas/hopper/test_quantized_matmul.py::test_products_are_the_contracts_and_rows_do_not_depend_on_each_other",
    "pallas/hopper/test_rope_append.py::test_every_schedule_writes_the_same_bits",
    "pallas/hopper/test_rope_append.py::test_gradients_have_the_bits_of_the_separate_steps",
    "pallas/hopper/test_rope_append.py::test_vmap_gives_the_bits_of_each",
    "pallas/hopper/test_rope_append.py::test_what_is_in_the_pages_stays",
    "pallas/hopper/test_sampling.py::test_blocks_of_a_vocabulary_that_devices_share_give_the_token_and_its_logprob",
    "pallas/hopper/test_sampling.py::test_engines_give_the_logprobs_of_given_tokens_that_the_sampler_gives",
    "pallas/hopper/test_sampling.py::test_every_schedule_gives_the_same_bits_and_rows_do_not_meet",
    "pallas/hopper/test_sampling.py::test_logprobs_have_the_bits_of_log_softmax",
    "pallas/hopper/test_sampling.py::test_samplers_lower_for_cuda",
    "pallas/hopper/test_sampling.py::test_the_public_operation_samples_and_gives_the_logprobs_of_its_own_samples",
    "pallas/hopper/test_sampling.py::test_the_temperature_divides_the_logits",
    "pallas/hopper/test_sampling.py::test_ties_go_to_the_lowest_id_and_nan_counts_as_the_largest",
    "pallas/hopper/test_sampling.py::test_tokens_are_those_of_the_portable_backend",
    "pallas/hopper/test_softmax.py::test_every_schedule_gives_the_same_bits",
    "pallas/hopper/test_softmax.py::test_every_schedule_of_logsumexp_gives_the_same_bits",
    "pallas/hopper/test_softmax.py::test_sums_for_gradients_have_the_same_bits_in_every_schedule_and_for_a_row_alone",
    "pallas/hopper/test_softmax.py::test_the_public_operations_and_their_gradients_run_on_these_kernels",
    "pallas/mma/attention/test_attention.py::test_a_fault_gives_other_bits",
    "pallas/mma/attention/test_attention.py::test_decode_has_the_bits_of_the_contract",
    "pallas/mma/attention/test_attention.py::test_heads_of_any_number_decode_to_the_bits_of_the_contract",
    "pallas/mma/attention/test_attention.py::test_more_than_a_group_of_blocks_at_once_are_merged_in_order",
    "pallas/mma/attention/test_attention.py::test_packed_queries_of_any_width_have_the_bits_of_the_contract",
    "pallas/mma/attention/test_attention.py::test_quantized_pages_have_the_bits_of_what_they_are_read_as",
    "pallas/mma/attention/test_phases.py::test_the_forward_pass_of_training_has_the_bits_of_decode",
    "pallas/mma/attention/test_ptxas.py",
    "pallas/mma/test_decoder.py",
    "pallas/mma/test_grouped_matmul.py::test_each_row_and_its_gradients_have_the_bits_of_its_experts_matmul",
    "pallas/mma/test_matmul.py::test_a_running_sum_does_not_show_where_microbatches_begin",
    "pallas/mma/test_matmul.py::test_gradients_have_the_right_numbers_and_follow_no_batch",
    "pallas/mma/test_matmul.py::test_schedules_and_layouts_give_the_same_bits_and_the_right_numbers",
    "pallas/mma/test_matmul.py::test_the_kept_sums_are_the_ones_that_the_epilogue_consumed",
    "pallas/mma/test_matmul.py::test_two_warpgroups_that_share_stages_give_the_same_bits",
    "pallas/mma/test_ptxas.py",
    "pallas/mma/test_rows.py::test_threads_that_read_for_themselves_give_the_bits_of_the_copy_engine",
    "pallas/mma/test_tcgen05.py::test_the_product_compiles_and_nothing_spills",
    "portable/test_optimizers.py::test_no_program_around_a_step_changes_its_bits",
    "portable/test_optimizers.py::test_the_step_of_an_element_does_not_depend_on_the_array_around_it",
    "rl/test_adapters.py::test_a_command_trains_an_adapter_on_a_file",
    "rl/test_adapters.py::test_a_new_adapter_has_the_bits_of_the_base_model_and_training_changes_it_alone",
    "rl/test_adapters.py::test_devices_that_share_the_batch_train_an_adapter_with_the_bits_of_one",
    "rl/test_adapters.py::test_no_bit_of_an_adapters_gradients_depends_on_microbatches",
    "rl/test_adapters.py::test_the_pure_functions_train_and_sample_with_an_adapter",
    "rl/test_adapters.py::test_the_trainers_logprobs_have_the_bits_of_the_samplers_next_to_other_adapters",
    "rl/test_compilation_ahead.py::test_every_program_of_a_step_is_compiled_ahead_and_never_again",
    "rl/test_compilation_ahead.py::test_gradients_as_functions_compile_ahead_too",
    "rl/test_compilation_ahead.py::test_layers_of_a_decoder_share_all_kernels",
    "rl/test_compilation_ahead.py::test_steps_of_known_shapes_compile_nothing_ahead",
    "rl/test_drafted_rollouts.py",
    "rl/test_families.py::test_a_request_gets_the_same_answer_alone_and_in_a_crowd_and_the_trainer_its_logprobs",
    "rl/test_families.py::test_microbatches_padding_and_packing_change_no_gradient",
    "rl/test_functional.py::test_no_function_changes_what_it_is_given",
    "rl/test_functional.py::test_rollouts_are_functions_of_params_prompts_and_seed",
    "rl/test_functional.py::test_steps_are_those_of_the_trainer_whatever_the_microbatches_are",
    "rl/test_functional.py::test_the_value_of_a_clipped_ratio_is_the_one_whose_gradient_is_computed",
    "rl/test_images.py::test_a_step_has_the_samplers_bits_in_every_layout_and_leaves_the_tower",
    "rl/test_images.py::test_images_that_are_not_those_of_the_prompt_are_refused",
    "rl/test_images.py::test_the_trainer_has_the_logprobs_of_the_sampler_and_sees_which_image_is_whose",
    "rl/test_loop_examples.py",
    "rl/test_rewards.py::test_rewards_do_not_depend_on_the_group",
    "rl/test_rollouts.py::test_a_receipt_holds_the_rollout_of_an_engine",
    "rl/test_run.py::test_a_run_of_policy_gradients_has_no_unequal_bit_at_any_step",
    "rl/test_run.py::test_a_run_that_is_killed_and_resumed_ends_with_the_same_bytes",
    "rl/test_run.py::test_scores_are_logprobs_and_entropies_of_completions_in_any_layout",
    "rl/test_run.py::test_the_trainer_sees_the_bits_of_the_distribution_that_was_drawn_from",
    "rl/test_run.py::test_the_trainer_sees_the_samplers_bits_after_every_step",
    "rl/test_sample_checks.py::test_samples_by_hand_that_were_drawn_at_temperature_0_are_refused",
    "rl/test_training.py::test_a_state_that_is_not_donated_stays_as_it_is",
    "rl/test_training.py::test_a_weight_that_is_not_trained_has_no_gradient_and_no_decay",
    "rl/test_training.py::test_an_update_in_one_pass_has_the_bits_of_its_steps",
    "rl/test_training.py::test_devices_that_share_batch_and_state_change_no_bit",
    "rl/test_training.py::test_gradients_are_those_of_the_loss_as_it_is_written",
    "rl/test_training.py::test_gradients_that_are_averaged_step_by_step_depend_on_the_microbatches",
    "rl/test_training.py::test_stock_gradients_depend_on_the_microbatches",
    "rl/test_training.py::test_sums_are_updated_where_they_lie_without_a_second_copy",
    "rl/test_training.py::test_two_steps_have_the_same_bits_for_every_layout",
    "rl/test_training_command.py::test_a_policy_learns_from_its_rollouts",
    "rl/test_training_command.py::test_samplers_of_other_numerics_are_seen_by_the_trainer",
    "rl/test_training_command.py::test_two_runs_that_are_cut_up_differently_give_one_model",
    "rl/test_training_processes.py",
    "rl/test_tunix_adapter.py::test_padded_rows_have_the_logits_of_their_tokens_alone",
    "rl/test_update_groups.py::test_more_layers_take_no_more_compilation",
    "rl/test_update_groups.py::test_the_norm_adds_leaves_in_their_order_whatever_the_rounds_are",
    "runtime/test_contexts.py::test_no_module_makes_a_context_variable_after_the_first_trace",
    "runtime/test_environment.py::test_flags_that_were_removed_after_xla_read_them_are_in_the_fingerprint",
    "runtime/test_equal_fingerprints.py::test_all_harmless_options_and_variables_together_change_no_bit",
    "runtime/test_equal_fingerprints.py::test_each_harmless_option_changes_no_bit",
    "runtime/test_equal_fingerprints.py::test_processes_with_equal_fingerprints_have_equal_bits",
    "runtime/test_fusions.py::test_an_engine_answers_without_fusions_in_the_same_bits",
    "server/test_adapters.py::test_an_adapter_is_a_model_with_its_own_answers_fingerprint_and_receipts",
    "server/test_adapters.py::test_each_of_several_engines_has_the_adapters",
    "server/test_adapters.py::test_receipts_of_adapters_are_verified_with_the_adapter_that_answered",
    "server/test_api.py::test_a_chat_may_take_all_the_room_there_is",
    "server/test_api.py::test_a_completion_is_the_engines",
    "server/test_api.py::test_prompts_are_texts_or_tokens_one_or_several",
    "server/test_api.py::test_the_checkpoints_settings_hold_where_a_request_is_silent",
    "server/test_bad_requests.py::test_nothing_makes_the_server_fail",
    "server/test_bodies.py::test_bodies_of_eight_megabytes_cost_a_small_multiple_of_it",
    "server/test_connections.py::test_a_second_signal_ends_the_process_at_once_and_tells_clients",
    "server/test_control.py::test_a_pause_that_keeps_requests_freezes_them_and_changes_no_bit",
    "server/test_control.py::test_a_pause_that_waits_lets_requests_finish_and_holds_new_ones",
    "server/test_control.py::test_sleep_gives_back_the_memory_of_weights_and_cache",
    "server/test_load.py::test_many_streams_have_the_bits_of_requests_alone",
    "server/test_page.py::test_digests_are_those_of_sha_256",
    "server/test_process.py::test_a_process_that_is_killed_leaves_nothing_that_stops_the_next",
    "server/test_process_replicas.py::test_a_replica_that_cannot_start_is_said",
    "server/test_process_replicas.py::test_a_server_survives_its_replicas_and_none_of_them_survives_it",
    "server/test_process_replicas.py::test_a_stream_goes_on_when_its_process_is_killed_or_stuck",
    "server/test_process_replicas.py::test_concurrent_requests_have_the_answers_of_one_engine_from_both_replicas",
    "server/test_receipts.py::test_receipts_of_every_endpoint_are_verified",
    "server/test_sampled_answers.py::test_a_receipt_with_a_field_changed_is_refused",
    "server/test_sampled_answers.py::test_all_endpoints_report_the_same_logprobs",
    "server/test_sampled_answers.py::test_processed_logprobs_agree_with_their_receipts",
    "server/test_sampled_answers.py::test_the_importance_ratio_to_a_trainer_is_one",
    "server/test_tools.py::test_strict_tools_and_content_of_a_form_are_kept_where_the_answer_is_free",
    "server/test_weight_updates.py::test_every_answer_in_a_crowd_is_verified_with_the_weights_that_it_names",
    "server/test_weight_updates.py::test_new_weights_do_not_see_pages_of_old_ones",
    "tools/test_run_notebooks.py::test_a_notebook_that_prints_something_else_fails_the_command",
    "tools/test_run_notebooks.py::test_what_cells_print_is_kept_if_it_is_asked_for",
)
"""Tests that take many seconds: the marker `long`. `make test` leaves them to `make test-long`. CI runs both, and on a
slow machine as many of the long ones as its time allows."""

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

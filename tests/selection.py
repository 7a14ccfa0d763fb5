"""Which tests ``make test`` leaves to ``make test-slow``.  This is the one place that decides.

``SLOW`` names tests by file and function, or whole files.  Its values say what stays in ``make test`` all the same: a
cell stays while it is the first with one of its keys (the first of each drafter, say), and without keys none stays.
``pytest.mark.slow`` on a test does the same as a row without keys.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

Key = Callable[[pytest.Item], Hashable]
ROOT = Path(__file__).parent


def parameter(*names: str) -> Key:
    """The values of some parameters."""
    return lambda item: tuple(str(parameters(item).get(name)) for name in names)


def parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def drafter(item: pytest.Item) -> Hashable:
    """The drafter of a cell of the exactness matrix, whose id is ``drafter.case`` or ``drafter.case.verifier``."""
    found = re.search(r"(\w+)\.", item.callspec.id if hasattr(item, "callspec") else "")
    return found[1] if found else item.name


def rule(item: pytest.Item) -> Hashable:
    """The verifier of a pair of the matrix."""
    return parameters(item)["pair"].verifier


def once(item: pytest.Item) -> Hashable:
    """The first cell alone."""
    return True


SLOW: dict[str, Sequence[Key]] = {
    "exactness/test_fake_device.py::test_every_drafter": [parameter("seeded")],
    "exactness/test_fake_device.py::test_every_verifier": [once],
    "exactness/test_graph_steps.py::test_every_drafter": [drafter],
    "exactness/test_matrix.py::test_a_race_writes_what_plain_decoding_writes": [drafter, rule],
    "exactness/test_matrix.py::test_greedy_in_a_ragged_batch": [drafter],
    "exactness/test_matrix.py::test_greedy_in_other_precisions_and_alone": [parameter("dtype", "batch")],
    "exactness/test_matrix.py::test_greedy_under_every_verifier": [drafter],
    "exactness/test_matrix.py::test_sampled_distribution_while_the_drafter_learns": [drafter],
    "exactness/test_matrix.py::test_the_distribution_is_exactly_the_targets": [rule],
    "exactness/test_matrix.py::test_the_first_samples_are_the_same_alone": [drafter],
    "exactness/test_mixed_load.py::test_every_request_of_a_random_mix_writes_what_it_writes_alone": [drafter],
    "exactness/test_planted_errors.py::test_every_cell_sees_draws_from_something_else_than_q": [once],
    "exactness/test_planted_errors.py::test_every_cell_sees_scores_of_the_wrong_node": [once],
    "exactness/test_planted_errors.py::test_planted_errors_are_seen_by_the_sampled_cell": [],
    "exactness/test_seeds.py::test_every_controller_leaves_the_text_of_the_seed": [
        parameter("controller"),
        parameter("drafter"),
    ],
    "exactness/test_seeds.py::test_every_drafter_writes_the_text_of_the_seed": [drafter, parameter("batch")],
    "exactness/test_state.py::test_caches_equal_a_fresh_prefill_after_every_round": [drafter],
    "exactness/test_state.py::test_joining_and_leaving_requests_change_nothing": [drafter],
    "exactness/test_state.py::test_proposals_keep_to_the_budget": [drafter],
    "exactness/test_state.py::test_the_context_may_be_filled_to_the_last_token": [drafter, parameter("temperature")],
    "exactness/test_tenants.py::test_drafts_after_a_kept_text_are_those_after_a_text_that_was_read": [once],
    "exactness/test_tenants.py::test_nothing_of_one_tenant_is_drafted_for_another": [once],
    "exactness/test_trained_target.py::test_greedy_under_every_verifier": [rule],
    "exactness/test_trained_target.py::test_the_distribution_is_exactly_the_targets": [once],
    # Many requests at once: every kind of trouble, every controller.
    "methods/controllers/test_auto.py::test_auto_finds_the_best_and_never_loses": [parameter("batch")],
    "methods/controllers/test_controllers.py::test_controllers_keep_the_distribution": [once],
    "engine/test_background.py::test_seeds_hold_in_the_middle_of_32": [parameter("controller")],
    "engine/test_isolation.py::test_a_poisoned_request_ends_alone": [parameter("name")],
    # Processes, clusters, searches and pages that run every command.
    "cli/test_cli_batch.py::test_a_killed_run_goes_on": [],
    "cli/test_cli_drafters.py::test_a_datastore_fits_by_its_tokenizer": [],
    "cli/test_tune_tree.py::test_a_tree_for_a_draft_model": [],
    "docs/test_howto.py::test_commands_run": [],
    "docs/test_howto.py::test_python_runs": [once],
    "docs/test_make_readme.py::test_the_parts_are_real": [],
    "docs/test_pages.py::test_the_reference_has_every_command_and_name": [],
    "docs/test_pages.py::test_the_site_loads_nothing_from_elsewhere": [],
    "docs/test_tutorial.py::test_every_block_prints_what_the_page_says": [],
    "server/test_hostile.py::test_hostile_requests": [],
    "server/test_lifecycle.py::test_a_second_signal_ends_at_once": [],
    "server/test_lifecycle.py::test_what_takes_longer_than_the_drain_ends_with_an_error": [],
    "server/cluster/test_scale_ray.py": [],
    "server/test_speculative.py::test_whoever_drafts_the_answer_is_plain_decodings": [parameter("method")],
    "test_examples.py::test_the_first_drafter_of_the_page_runs_alone": [],
    "test_examples.py::test_example_runs": [],
    "methods/drafters/test_shared_vocab.py::test_networks_of_other_tokenizers": [once],
    "test_zoo.py::test_trained_drafters_guess_for_the_built_in_target": [once],
    # Model families: all of them for trees, state and the lean forward, one for the rest.
    "models/test_architectures.py": [once],
    "models/test_architectures.py::test_commit_then_continue_is_a_fresh_prefill": [parameter("loaded")],
    "models/test_architectures.py::test_tree_logits_are_those_of_its_paths": [parameter("loaded")],
    "models/cache/test_pool.py::test_rows_equal_fresh_prefills_whatever_comes_grows_and_goes": [parameter("lean")],
    "models/test_bitwise.py": [once, parameter("lean")],
    "models/other/test_branches.py::test_every_node_sees_its_own_path": [once],
    "models/test_encoder_decoder.py::test_heads_on_the_decoder_draft": [once],
    "models/test_every_family.py": [once],
    "models/forward/test_graphs.py::test_a_session_of_any_shapes": [parameter("recorder")],
    "models/forward/test_graphs.py::test_other_families_pass_the_check": [once],
    "models/network/test_layers.py::test_a_whole_forward_goes_on_where_the_window_ended": [parameter("name")],
    "models/network/test_layers.py::test_exits_have_the_hidden_states_of_the_whole_forward": [parameter("name")],
    "models/forward/test_lean.py::test_lean_is_the_public_forward": [parameter("name")],
    "models/forward/test_lean_families.py::test_a_planted_fault_is_refused": [parameter("name")],
    "models/forward/test_lean_families.py::test_bitwise_bits_do_not_depend_on_the_tree": [parameter("dtype")],
    "models/forward/test_lean_families.py::test_families_are_covered_in_the_dtypes_that_models_come_in": [once],
    "models/forward/test_lean_families.py::test_lean_is_the_public_forward": [parameter("name")],
    "models/forward/test_lean_heads.py::test_a_head_follows_weights_that_change": [
        parameter("name"),
        parameter("change"),
    ],
    "models/linear/test_packing.py::test_every_layout_multiplies": [parameter("layout", "dtype")],
    "models/linear/test_packing.py::test_fused_projections_take_the_place_of_layers": [
        parameter("name"),
        parameter("layout"),
    ],
    "models/test_memory.py::test_nothing_grows_over_ten_thousand_tokens": [],
    "models/linear/test_packing.py::test_there_is_never_a_second_copy_of_all_weights": [],
    "models/linear/test_packing.py::test_in_blocks_a_rows_bits_do_not_depend_on_the_other_rows": [
        parameter("layout", "dtype")
    ],
    "models/test_sequential.py::test_chain_logits_and_taps_are_the_plain_ones": [once],
    "models/test_sequential.py::test_trees_are_refused_by_the_name_of_the_layer": [once],
    "models/variants/test_sparse.py::test_a_subset_is_the_target_with_the_other_slots_masked": [parameter("name")],
    "models/variants/test_sparse.py::test_a_text_within_the_budget_is_the_target": [parameter("name")],
    "models/test_stateful.py::test_capability_is_found_by_trial": [parameter("name")],
    "models/test_stateful.py::test_planted_faults_are_caught": [parameter("fault")],
    "models/test_stateful_decoding.py::test_greedy_text_is_that_of_plain_decoding_and_of_transformers": [once],
    "models/test_stateful_decoding.py::test_sampled_text_of_a_seed_is_that_of_plain_decoding": [once],
    # Statistics and negative controls of single drafters and rules; what is slow besides.
    "lab/bench/test_arms.py::test_llama_cpp_says_the_same": [once],
    "lab/bench/test_gpu_benchmark.py::test_a_dry_run_on_a_cpu": [],
    "lab/bench/test_inflate.py::test_zoo_drafters": [],
    "cli/test_cli_drafters.py::test_folders": [],
    "cli/test_cli_memory.py::test_freed_memory_is_used_again": [],
    "cli/test_cli_parity.py::test_a_planted_error_fails": [],
    "cli/test_cli_tune.py::test_the_search_finds_a_planted_optimum": [],
    "cli/test_tune_tree.py::test_from_prompts_to_a_tree_that_is_filled": [],
    "methods/controllers/test_specdec_pp.py::test_the_distribution_is_kept": [once],
    "methods/drafters/test_bpd.py::test_lossy_rules_from_exact_to_everything": [once],
    "methods/drafters/test_early_exit.py::test_families_write_what_they_write_alone": [once],
    "methods/drafters/test_jacobi.py::test_sampled_distribution": [once],
    "methods/drafters/test_jump.py::test_families_write_what_they_write_alone": [once],
    "methods/drafters/test_jump.py::test_the_distribution_is_the_one_that_was_drawn_from": [once],
    "methods/drafters/test_kangaroo.py::test_an_adapter_that_adds_nothing_is_an_early_exit": [once],
    "methods/drafters/test_kangaroo.py::test_families_write_what_they_write_alone": [once],
    "methods/drafters/test_layer_skip.py::test_argmax_drafts_under_a_soft_distribution_are_caught": [],
    "methods/drafters/test_native_mtp.py::test_greedy_text_is_that_of_plain_decoding": [once],
    "models/native/test_native_attention.py::test_bfloat16_text_with_drafts_is_that_of_plain_decoding": [once],
    "methods/drafters/test_native_mtp.py::test_hybrid_targets_draft_chains_with_their_own_head": [once],
    "methods/drafters/test_online.py::test_acceptance_rises_on_a_stationary_stream": [],
    "methods/drafters/test_online.py::test_mistakes_are_the_recovered_tokens_with_the_distribution_before_them": [once],
    "methods/drafters/test_retokenize.py::test_networks_of_other_tokenizers": [once],
    "methods/drafters/test_shared_vocab.py::test_planted_mistakes_are_caught": [],
    "methods/drafters/test_shared_vocab.py::test_the_builtin_draft_model_drafts_as_the_model_drafter": [],
    "methods/drafters/test_swift.py::test_the_distribution_with_a_shared_search": [],
    "exactness/test_matrix.py::test_sampled_distribution_with_the_engines_own_numbers": [once],
    "exactness/test_mixed_load.py::test_mixes_find_planted_mistakes": [once],
    "exactness/test_planted_coupled_errors.py::test_the_right_code_has_the_targets_distribution": [once],
    "exactness/test_planted_coupled_errors.py::test_the_right_code_writes_what_plain_decoding_writes": [once],
    "exactness/test_planted_errors.py::test_right_cells_pass": [once],
    "exactness/test_tenants.py::test_hidden_states_of_a_prompt_are_kept_with_it": [once],
    "models/linear/test_packing.py::test_a_refused_lean_forward_leaves_the_weights_as_they_were": [],
    "models/test_vocabularies.py::test_the_distribution_is_the_targets": [once],
    "server/test_lifecycle.py::test_a_log_that_nobody_reads_stops_nothing": [],
    "server/test_lifecycle.py::test_what_cannot_start_says_so_in_one_line": [],
    "server/cluster/test_scale.py::test_a_unary_call_survives_its_replica": [once],
    "server/test_without_asserts.py": [],
    "loading/test_devices.py::test_drafts_run_where_the_target_runs": [],
    "loading/test_llama_cpp_loading.py::test_drafters_change_nothing": [once],
    "server/grammar/test_grammar.py::test_the_output_fits_and_is_plain_decodings": [once],
    "test_hub.py::test_sampled_output_has_the_distribution_of_generate": [once],
    "test_optimized.py": [],
    "test_zoo.py::test_the_target_that_was_trained_for_early_exits": [],
    "lab/plan/test_coupled_theory.py::test_formulas_agree_with_simulated_races": [],
    "training/test_boost.py::test_the_command_and_the_ready_spec": [],
    "methods/verifiers/test_coupled.py::test_how_often_the_first_candidate_is_accepted": [once],
    "methods/verifiers/test_coupled.py::test_pairs_of_tokens_follow_the_target_whatever_was_drafted": [],
    "methods/verifiers/test_coupled.py::test_the_winner_has_the_targets_distribution": [once],
    "methods/verifiers/test_coupled_example.py::test_the_engine_accepts_that_often": [],
    "exactness/test_fake_device.py::test_plain_decoding": [once],
    "engine/test_isolation.py::test_memory_that_is_full_in_a_forward_costs_one_request": [parameter("step")],
    "engine/test_isolation.py::test_memory_that_is_full_while_a_cache_grows_leaves_the_others_right": [once],
    "engine/test_isolation.py::test_memory_that_is_full_for_a_moment_costs_nobody_anything": [once],
    "models/test_sequential.py::test_plain_decoding_is_that_of_transformers": [once],
    "methods/drafters/test_lookahead.py::test_greedy_output_is_that_of_plain_decoding": [once],
    "methods/drafters/test_lookahead.py::test_sampled_distribution": [once],
    "lab/plan/test_coupled_theory.py::test_a_simulation_notices_a_wrong_formula": [],
    "methods/controllers/test_controllers.py::test_a_controller_that_picks_drafters_keeps_the_distribution": [once],
    "methods/verifiers/test_verify_paths.py::test_pairs_of_tokens_follow_the_target": [],
    "cli/test_cli_parity.py::test_a_rule_that_changes_the_output_fails": [once],
    "cli/test_cli_parity.py::test_a_planted_error_of_seeded_text_fails": [],
    "methods/drafters/test_early_exit.py::test_layers_run_in_a_round": [once],
    "core/test_noise.py::test_neighbours_are_independent": [once],
    "methods/drafters/test_coupled_drafts.py::test_a_draft_model_that_is_the_target_is_always_right": [once],
    "methods/verifiers/test_hierarchy.py::test_three_levels_keep_the_targets_distribution": [once],
    "methods/drafters/test_sparse_kv.py::test_the_sparse_cache_is_what_it_should_be_after_every_round": [once],
    "engine/test_reading.py::test_probabilities_of_a_prompt_equal_those_of_one_forward": [once],
    "models/test_vocabularies.py::test_checkpoints_of_other_widths_draft": [once],
    "models/other/test_parallel.py": [],
    "methods/verifiers/test_identities.py::test_at_temperature_0_every_rule_is_the_greedy_walk": [
        parameter("name", "kind")
    ],
    "engine/test_prefixes.py::test_a_chat_reads_only_what_is_new": [once],
    "methods/drafters/test_kangaroo.py::test_layers_run_in_a_round": [once],
    "methods/drafters/test_quantized.py::test_the_text_is_that_of_plain_decoding": [once],
    "methods/drafters/test_jacobi.py::test_greedy_output_is_that_of_plain_decoding": [once],
    "exactness/test_tenants.py::test_a_tenant_learns_from_itself": [once],
    "exactness/test_tenants.py::test_every_drafter_that_shares_is_among_the_tested": [],
    "exactness/test_adversaries.py::test_a_prompt_of_one_token": [once],
    "exactness/test_adversaries.py::test_eos_inside_a_draft": [once],
    "methods/verifiers/test_coupled.py::test_winners_of_consecutive_positions_are_independent": [],
    "methods/drafters/test_bpd.py::test_lossy_rules_are_refused_unless_allowed": [once],
    "methods/drafters/test_online.py::test_labels_one_position_off_teach_nothing": [],
    "server/test_page_people.py::test_page_on_the_real_server": [],
    "loading/test_llama_cpp_loading.py::test_verifiers_sample": [once],
    "exactness/test_seeds.py::test_in_float32_too": [once],
    "methods/controllers/test_stopping_rules.py::test_rules_keep_the_distribution": [once],
    "core/test_noise.py::test_the_numbers_are_exponential": [once],
    "methods/drafters/test_shared_vocab.py::test_missing_parts_are_named": [once],
    "methods/drafters/test_coupled_drafts.py::test_dynamic_trees": [once],
    "methods/drafters/test_quantized.py::test_acceptance_on_the_builtin_target": [],
    "exactness/test_adversaries.py::test_duplicate_siblings_under_every_rule": [once],
    "lab/bench/test_inflate.py::test_bfloat16_greedy_tokens_of_the_builtin_model": [],
    "methods/verifiers/test_verify_together.py::test_verdicts_of_a_batch_are_those_of_its_requests": [
        parameter("name")
    ],
    # What took longest of all that was left (2026-11).
    "training/test_train_progress.py::test_a_terminated_training_says_where_it_goes_on": [],
    "server/test_starts.py::test_nobody_need_read_stderr": [],
    "server/test_counters.py::test_every_counter_against_500_requests": [],
    "models/native/test_native.py::test_processes_may_compile_at_once": [],
    "models/native/test_native.py::test_a_cache_that_cannot_be_written_is_no_error": [],
    "models/native/test_native.py::test_products_are_rounded_once": [],
    "methods/drafters/test_eight_bits.py::test_training_stores_8_bits_where_that_is_asked_for": [],
    "methods/drafters/test_dflash2.py::test_chains_have_the_product_of_q_as_their_distribution": [],
    "server/test_returned_memory.py::test_bodies_of_two_megabytes_leave_nothing_behind": [],
    "cli/test_cli_tune_all.py::test_folders_and_a_profile_offer_drafters": [],
    "server/test_served_graphs.py::test_the_ladder_is_captured_before_the_first_request": [],
    "training/test_train_specdec_pp.py::test_from_two_models_to_a_controller": [],
    "training/test_hybrid.py::test_from_a_llama_to_a_checkpoint_with_its_own_head": [],
    "training/test_train_drafter.py::test_features_from_disk_are_the_features": [],
    "server/test_speculative.py::test_a_draft_model_learns_while_it_serves_and_is_saved": [],
    "server/test_hardening.py::test_an_unread_answer_keeps_its_place": [],
    "training/formats/test_acceptance.py::test_drafts_that_fail_in_long_texts": [],
    "cli/test_tune_tree.py::test_bad_input": [],
    "loading/test_quantize.py::test_the_front_door_and_draft_models": [],
    "engine/test_transfers.py::test_rounds_of_six_read_no_more_than_rounds_of_one": [once],
    "engine/test_transfers.py::test_graphed_rounds_send_one_tensor_for_every_forward": [once],
    "engine/test_transfers.py::test_logits_that_are_not_finite_end_their_own_request": [once],
    "engine/test_draft_texts.py::test_in_a_conversation_drafters_read_what_is_new": [once],
    "engine/test_hidden_states.py::test_texts_are_plain_decodings_when_drafting_comes_and_goes": [once],
    "test_mps.py::test_the_built_in_model_loads_and_writes_as_on_the_cpu": [once],
    "test_mps.py::test_every_precision_is_checked_at_load": [once],
    "test_threads.py::test_transformers_own_generate_beside_ours": [once],
    "test_threads.py::test_one_llm_from_several_threads": [once],
    "test_threads.py::test_the_hook_from_several_threads": [once],
    "methods/drafters/test_dspark.py::test_chains_by_enumeration": [],
    "methods/drafters/test_saturation.py::test_the_text_is_the_targets_own": [once],
    "methods/drafters/test_saturation.py::test_a_token_that_is_never_saturated_exits_last": [once],
    "methods/drafters/test_ahead.py::test_texts_are_those_of_plain_decoding": [once],
    "methods/drafters/test_native_drafts.py::test_texts_of_a_batch_are_those_of_plain_decoding": [once],
    "methods/drafters/test_target_states.py::test_texts_are_exact_with_and_without_states": [once],
    "methods/controllers/test_auto.py::test_auto_knows_what_plain_decoding_costs_when_nothing_evicts_the_target": [
        once
    ],
    "methods/controllers/test_auto.py::test_a_first_answer_loses_next_to_nothing": [once],
    "models/native/test_native.py::test_a_damaged_library_is_made_again": [],
    "models/native/test_native_attention.py::test_so_are_those_of_other_families": [once],
    "models/forward/test_checks.py::test_a_sound_lean_forward_passes_on_real_statistics": [once],
    "models/network/test_rotary.py::test_rows_on_both_sides_of_the_border_in_one_batch_read_in_chunks": [once],
    "models/cache/test_host.py::test_drafts_over_a_cold_cache_change_no_text": [once],
    "models/cache/test_pool.py::test_a_long_text_among_short_ones_costs_what_its_tokens_need": [once],
    "models/test_changed.py::test_the_next_text_is_that_of_the_changed_network": [once],
    "models/forward/test_eager_devices.py::test_rounds_on_a_device_make_no_cudnn_plans": [once],
    "lab/tune/test_search.py::test_a_search_keeps_to_its_budget": [once],
    "exactness/test_tenants.py::test_heads_read_a_long_text_in_pieces_and_none_without_drafts": [once],
    "server/grammar/test_grammar.py::test_the_grammar_wins_over_the_least_length": [once],
    "server/test_tools.py::test_forced_calls_are_valid": [once],
    "server/test_hardening.py::test_who_does_not_read_is_cut_off": [once],
    "loading/test_quantize.py::test_speculation_keeps_the_quantised_targets_text": [once],
    "models/gguf/test_gguf_folders.py::test_texts_are_the_folders": [once],
    "training/formats/test_pard_folders.py::test_pard_2_comes_with_its_projection": [once],
    "models/forward/test_checks.py::test_a_planted_fault_is_caught_in_bfloat16": [
        parameter("fault"),
        parameter("name"),
    ],
    "training/formats/test_round_trips.py::test_there_and_back": [once],
    "exactness/test_declared_traits.py::test_who_learns_says_so": [once],
    "training/formats/test_not_imported.py::test_the_command_is_named_and_works": [once],
    "exactness/test_trained_target.py::test_greedy": [once],
    "training/formats/test_acceptance.py::test_every_kind": [once],
    "training/formats/test_acceptance.py::test_layer_ids_that_are_off_by_one": [once],
    "training/formats/test_drafters_as_models.py::test_a_drafter_of_another_project_as_model": [once],
    "training/formats/test_wrong_values.py::test_every_key": [once],
    "training/formats/test_bad_checkpoints.py::test_another_target": [once],
    "training/test_chat_data.py::test_from_chats_to_a_drafter": [once],
    "models/forward/test_native_forward.py::test_quantised_weights_are_multiplied_in_it": [once],
    "engine/test_logprobs.py::test_every_output_token_has_its_own": [once],
    "engine/test_conditional.py::test_the_engine_draws_from_the_distribution": [],
    "server/test_counters.py::test_a_predictions_tokens_count_once": [once],
    "server/test_starts.py::test_the_log_names_how_it_runs": [],
    "server/test_page_race.py::test_race_can_be_seen_again": [],
    "server/test_page_race.py::test_race_ends_undecided_after_twelve_pairs": [],
    "methods/drafters/test_dflash.py::test_chains_are_drawn_from_what_they_carry": [],
    "methods/drafters/test_pard.py::test_chains_are_drawn_from_what_they_carry": [],
    "methods/drafters/test_staged.py::test_tokens_below_a_sibling_are_drawn_for_that_one": [],
    "methods/drafters/test_ahead.py::test_the_race_is_guessed_more_often_than_the_rest": [],
    "methods/drafters/test_quantized.py::test_drafts_take_activations_of_as_many_bits_as_they_are_told": [once],
    "exactness/test_planted_coupled_errors.py::test_noise_of_11_bits_is_caught": [],
    "exactness/test_planted_coupled_errors.py::test_a_race_in_float16_is_caught": [],
    "lab/plan/test_coupled_theory.py::test_what_the_theory_page_says_of_its_picture": [],
    "lab/parity/test_parity_seeds.py::test_other_draws_of_a_drafter_change_no_coupled_text_but_that_of_other_rules": [],
    "lab/tune/test_search.py::test_half_of_the_best_go_on": [],
    "lab/tune/test_search.py::test_a_network_and_a_copier_make_a_router": [],
    "docs/test_simulator.py::test_trees_are_those_of_plan": [],
    "cli/test_cli_tune_all.py::test_elsewhere_a_profile_warns_and_works": [],
    "cli/test_cli_tune_all.py::test_the_profile_is_read_by_other_commands": [],
    "cli/test_cli_parity.py::test_sampling_options_reach_the_checks": [],
    "loading/test_devices.py::test_a_draft_model_stays_where_it_was_asked_for": [],
    "models/native/test_native.py::test_the_library_is_compiled_once": [],
    "models/test_memory.py::test_the_counter_sees_a_kept_tensor": [],
    "test_threads.py::test_wrapped_twice_and_used_at_once": [],
    # Many cases of one kind: the first of each stays.
    "lab/parity/test_parity_checks.py::test_wrong_drafters_are_caught_by_the_distribution_alone": [once],
    "lab/parity/test_parity_checks.py::test_a_right_drafter_passes_every_check": [once],
    "lab/parity/test_parity_checks.py::test_a_corrupted_cache_is_caught": [once],
    "lab/plan/test_planner.py::test_pictures_of_all_sorts": [once],
    "server/test_memory_limits.py::test_the_start_says_how_many_run_at_once": [once],
    "server/test_memory_limits.py::test_a_limit_that_nobody_named_is_cut_to_what_fits": [once],
    "server/test_page_chat.py::test_an_error_is_one_line_and_loses_nothing": [once],
    "server/test_page_race.py::test_race_repeats_until_the_interval_excludes_one": [once],
    "server/test_speculative.py::test_a_request_names_its_drafter": [once],
    "server/grammar/test_language.py::test_outputs_are_strings_whatever_drafts": [once],
    "loading/test_outside_drafters.py::test_a_broken_rule_ends_its_request_and_no_other": [
        parameter("proposal", "words")
    ],
    "loading/test_not_finite.py::test_import_names_tensor_and_file": [parameter("method", "format", "name")],
    "models/gguf/test_gguf_families.py::test_quantised_files_are_their_numbers": [parameter("kind"), parameter("name")],
    "models/test_joined.py::test_texts_of_a_batch_are_those_of_texts_alone": [once],
    "models/test_encoder_decoder.py::test_drafts_change_no_greedy_text": [once],
    "models/test_sequential.py::test_chains_run_where_the_cache_can_be_rolled_back": [once],
    "models/forward/test_native_forward.py::test_native_is_the_lean_forward": [parameter("name"), parameter("level")],
    "models/forward/test_native_block_net.py::test_a_block_says_what_its_network_says": [
        parameter("case"),
        parameter("level"),
    ],
    "models/linear/test_packed_loading.py::test_products_of_a_packed_draft_model_are_compiled_when_it_is_loaded": [
        once
    ],
    "exactness/test_adversaries.py::test_extreme_distributions": [parameter("drafter"), parameter("p", "q")],
    "exactness/test_few_tokens.py::test_a_distribution_over_all_tokens_is_caught": [once],
    "exactness/test_trained_target.py::test_the_batch_changes_no_sample": [once],
    "engine/test_transfers.py::test_rules_that_ask_for_more_are_served_on_the_host": [once],
    "engine/test_draft_texts.py::test_texts_do_not_grow_faster_than_they_are_read": [once],
    "engine/test_shared_engine.py::test_both_at_once": [once],
    "engine/test_reading.py::test_outputs_do_not_depend_on_the_piece": [parameter("name"), parameter("chunk")],
    "methods/drafters/test_stopped_trees.py::test_every_rule_shortens_what_constant_drafts": [
        parameter("rule"),
        parameter("family"),
    ],
    "methods/drafters/test_chosen_tokens.py::test_drafters_that_take_it": [parameter("spec")],
    "methods/drafters/test_paying_sizes.py::test_trees_are_large_where_rows_are_free_and_small_where_they_are_not": [
        once
    ],
    "methods/verifiers/test_hierarchy.py::test_a_chain_has_the_draft_models_distribution": [
        parameter("inner"),
        parameter("budget"),
    ],
    "test_zoo.py::test_trained_drafters_are_refused_by_the_updated_target": [once],
    "docs/test_pages.py::test_old_addresses_lead_to_pages": [],
    "lab/plan/test_theory_engine.py::test_the_measured_mean_acceptance_length_is_equation_1": [],
    "training/test_boost.py::test_a_series_of_another_target_is_not_taken_up": [],
    "server/test_hardening.py::test_of_many_unread_answers_the_oldest_is_cut": [],
    "server/test_served_graphs.py::test_a_ladder_that_does_not_fit_turns_graphs_off_and_serves": [],
    "server/test_exactness.py::test_llama_cpp_cannot_be_bitwise_and_the_start_says_so": [],
    # Training: every recipe from text to a drafter, and one run that is broken off.
    "training/test_boost.py::test_a_broken_off_stage_goes_on": [],
    "training/test_boost.py::test_later_models_learn_what_earlier_ones_miss": [],
    "training/test_boost.py::test_nothing_left_ends_the_series": [],
    "training/test_distill.py::test_a_killed_run_resumes_to_the_same_bits": [once],
    "training/test_distill.py::test_alignment_rises": [once],
    "training/test_optimizers.py::test_a_run_that_is_resumed_ends_with_the_same_bits": [],
    "training/test_train_drafter.py::test_from_text_to_a_drafter": [once],
    "training/test_train_drafter.py::test_a_joint_run_resumes_to_the_same_bits": [],
    "training/test_train_drafter.py::test_a_killed_run_resumes_to_the_same_bits": [once],
    "training/test_train_drafter.py::test_a_killed_update_resumes_to_the_same_bits": [],
    "training/test_train_drafter.py::test_a_low_rank_update_of_the_target": [once],
    "training/test_train_drafter.py::test_early_exits_get_better": [],
    "training/test_train_drafter.py::test_training_lowers_the_loss_and_guesses_better": [once],
    "training/test_train_lm.py::test_a_killed_run_resumes_to_the_same_bits": [once],
    "training/test_train_specdec_pp.py::test_a_killed_run_resumes_to_the_same_bits": [],
    "training/test_train_specdec_pp.py::test_a_trained_head_beats_the_best_constant": [once],
}


def name_of(item: pytest.Item) -> tuple[str, str]:
    """The file, relative to this folder, and ``file::function``."""
    file = str(item.path.relative_to(ROOT)) if item.path.is_relative_to(ROOT) else str(item.path)
    return file, f"{file}::{item.originalname if isinstance(item, pytest.Function) else item.name}"


def slow(items: Iterable[pytest.Item], table: dict[str, Sequence[Key]] = SLOW) -> Iterable[pytest.Item]:
    """Those of the collected tests that ``make test`` leaves out."""
    seen: set[Hashable] = set()
    for item in items:
        file, function = name_of(item)
        row = function if function in table else file
        if row not in table:
            continue
        keys = [(function, index, key(item)) for index, key in enumerate(table[row])]
        if seen.issuperset(keys):
            yield item
        seen.update(keys)


def in_other_parts(items: Iterable[pytest.Item], part: str) -> set[pytest.Item]:
    """The slow ones of marked tests that belong to other parts than ``I/N``: by a hash of their names, so that N runs
    with I from 1 to N have run each of them once.

    Raises:
        pytest.UsageError: ``part`` is not such a pair.
    """
    numbers = re.fullmatch(r"(\d+)/(\d+)", part)
    if numbers is None or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise pytest.UsageError(f"--slow-part takes I/N with I from 1 to N, such as 1/2, not {part!r}")
    mine, parts = int(numbers[1]) - 1, int(numbers[2])
    slow_ones = (item for item in items if item.get_closest_marker("slow") is not None)
    return {item for item in slow_ones if zlib.crc32(item.nodeid.encode()) % parts != mine}

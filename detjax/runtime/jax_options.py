"""JAX's own options (`jax.config`): refused ones, ones in the fingerprint, and ones that change no bit.

Options that can change the results of a program are in the fingerprint (`HASHED`). JAX recompiles a program when such
an option changes, so a fingerprint taken next to a call has the options of the call. JAX does not notice changes of
some other options, such as `jax_disable_most_optimizations`, and would reuse a program compiled with another value.
These are refused (`REFUSED`). Options in no table, such as new ones of a later JAX, are in the fingerprint with their
values, so that equal fingerprints still promise equal bits.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import jax


@dataclasses.dataclass(frozen=True)
class Refused:
    """An option with a required value.

    Attributes:
        accepted: the value, which is JAX's default.
        reason: the effect of other values; a clause in the error.
    """

    accepted: bool | int | str
    reason: str


_OTHER_CODE: Final = "programs would be compiled to other code, and JAX would not notice changes of the option"

REFUSED: Final[Mapping[str, Refused]] = {
    "jax_disable_jit": Refused(False, "operations would run uncompiled and with other bits"),
    "jax_threefry_partitionable": Refused(True, "weights drawn from a seed would depend on their layout"),
    "jax_disable_most_optimizations": Refused(False, _OTHER_CODE.replace("code", "bits")),
    "jax_compiler_enable_remat_pass": Refused(True, _OTHER_CODE),
    "jax_optimization_level": Refused("UNKNOWN", _OTHER_CODE),
    "jax_memory_fitting_level": Refused("O2", _OTHER_CODE),
    "jax_enable_pgle": Refused(False, "JAX would recompile programs after profiling, to other code each time"),
    "jax_compilation_cache_expect_pgle": Refused(
        False, "JAX would load programs that were recompiled after profiling, to other code each time"
    ),
    "jax_xla_profile_version": Refused(0, "the compiler would read a profile that is not in the fingerprint"),
    "jax_share_binary_between_hosts": Refused(False, "programs would be compiled by another host, for its processor"),
    "jax_pallas_poison_buffers": Refused(
        False, "kernels would see differently initialized memory, and JAX would not notice changes of the option"
    ),
}
"""Options with a required value. `compilation.check_environment` reads them before every call."""

HASHED: Final[Mapping[str, Any]] = {
    # Numbers: types, precision, random bits.
    "jax_enable_x64": False,
    "jax_explicit_x64_dtypes": "warn",
    "jax_default_matmul_precision": None,
    "jax_random_seed_offset": 0,
    "jax_threefry_gpu_kernel_lowering": False,
    "jax_softmax_custom_jvp": False,
    "jax_use_hlo_logistic_lowering": None,
    # Translation of functions to programs.
    "check_vma": False,
    "eager_constant_folding": False,
    "jax_auto_pcast": True,
    "jax_custom_jvp3": False,
    "jax_custom_vjp3": False,
    "jax_embedded_constants_max_bytes": 32,
    "jax_error_checking_behavior_divide": "ignore",
    "jax_error_checking_behavior_nan": "ignore",
    "jax_error_checking_behavior_oob": "ignore",
    "jax_pallas_enable_debug_checks": False,
    "jax_ragged_dot_use_gpu_pallas_triton_lowering": False,
    "jax_remat3": False,
    "jax_remat_barrier_no_cotangents": False,
    "jax_remove_size_one_mesh_axis_from_type": False,
    "jax_scan3": False,
    "jax_use_direct_linearize": True,
    "jax_use_emit_pipeline_primitive": False,
    "jax_use_shardy_partitioner": True,
    "jax_use_simplified_jaxpr_constants": False,
    # Devices. JAX reads these once, when it makes its first array.
    "jax_backend_target": "",
    "jax_mock_gpu_topology": "",
    "jax_pjrt_client_create_options": None,
    "jax_xla_backend": "",
    "mock_num_gpu_processes": 0,
}
"""Options that are in the fingerprint if they differ from these values, the defaults of JAX 0.11."""

HARMLESS: Final[Mapping[str, tuple[str, ...]]] = {
    reason: tuple(names.split())
    for reason, names in {
        "It controls logs, messages and dumps, and the recorded source of programs.": """
            jax_captured_constants_report_frames jax_captured_constants_warn_bytes
            jax_compiler_detailed_logging_min_ops jax_debug_log_modules jax_distributed_debug
            jax_dump_ir_modes jax_dump_ir_to jax_explain_cache_misses
            jax_hlo_source_file_canonicalization_regex jax_include_debug_info_in_dumps
            jax_include_full_tracebacks_in_locations jax_log_checkpoint_residuals jax_log_compiles
            jax_logging_level jax_pallas_verbose_errors jax_pprint_use_color
            jax_send_traceback_to_runtime jax_source_url_schema jax_traceback_filtering
            jax_traceback_in_locations_limit jax_tracer_error_num_traceback_frames
        """,
        "It decides what is an error. Results without errors are the same.": """
            jax_allow_f16_reductions jax_array_garbage_collection_guard jax_check_static_indices
            jax_check_tracer_leaks jax_debug_infs jax_debug_key_reuse
            jax_debug_leaked_clients_on_clear_backends jax_debug_nans jax_disable_bwd_checks
            jax_disable_vmap_shmap_error jax_disallow_mesh_context_manager jax_enable_checks
            jax_legacy_prng_key jax_mosaic_allow_hlo jax_mutable_array_checks jax_no_execution
            jax_no_tracing jax_numpy_dtype_promotion jax_numpy_rank_promotion
            jax_raise_on_ppermute_sort_diff jax_thread_guard jax_transfer_guard
            jax_transfer_guard_device_to_device jax_transfer_guard_device_to_host
            jax_transfer_guard_host_to_device
        """,
        "It decides where compiled programs are cached. The cache key has their text, options and device.": """
            jax_compilation_cache_check_contents jax_compilation_cache_dir
            jax_compilation_cache_include_metadata_in_key jax_compilation_cache_max_size
            jax_enable_compilation_cache jax_persistent_cache_enable_xla_caches
            jax_persistent_cache_min_compile_time_secs jax_persistent_cache_min_entry_size_bytes
            jax_raise_persistent_cache_errors jax_remove_custom_partitioning_ptr_from_cache_key
        """,
        "It belongs to a feature that no program of detjax uses.": """
            jax2tf_associative_scan_reductions jax2tf_default_native_serialization
            jax_bcoo_cusparse_lowering jax_experimental_unsafe_xla_runtime_errors
            jax_export_calling_convention_version jax_export_deserialize_expired_versions
            jax_export_ignore_forward_compatibility jax_ragged_dot_use_ragged_dot_instruction
            jax_serialization_version jax_use_magma
        """,
        "It chooses JAX's default random generator. The noise of samples has its own.": """
            jax_default_prng_impl jax_enable_custom_prng
        """,
        "It chooses the range of JAX's Gumbel noise. The noise of samples is not JAX's.": """
            jax_high_dynamic_range_gumbel
        """,
        "It numbers the barriers of kernels that wait for other devices. No kernel of detjax does.": """
            jax_pallas_auto_assign_collective_ids jax_pallas_auto_assign_collective_ids_limit
        """,
        "It configures recompilation after profiling, which is refused.": """
            jax_pgle_aggregation_percentile jax_pgle_profiling_runs
        """,
        "It chooses devices. The fingerprint names the kind of device.": """
            jax_cuda_visible_devices jax_default_device jax_num_cpu_devices jax_oneapi_visible_devices
            jax_platform_name jax_platforms jax_rocm_visible_devices jax_sort_devices_by_process_index
        """,
        "It controls transfers of arrays, or connects processes and hosts.": """
            jax_check_proxy_envs jax_cpu_collectives_implementation jax_cpu_enable_async_dispatch
            jax_cpu_get_global_topology_timeout_minutes jax_cpu_get_local_topology_timeout_minutes
            jax_cross_host_transfer_socket_address jax_cross_host_transfer_timeout_seconds
            jax_cross_host_transfer_transfer_size jax_cross_host_transport_addresses
            jax_distributed_verify_secure_credentials jax_enable_preemption_service
            jax_enable_recoverability jax_force_dcn_cross_host_transfers jax_mtls_ca_file
            jax_mtls_cert_file jax_mtls_key_file jax_mtls_peer_uri_prefix
            jax_share_binary_between_hosts_timeout_ms jax_use_cpp_shard_args jax_use_rgv3
        """,
        "It belongs to JAX's own tests, whose modules register it on import.": """
            exclude_test_targets jax_num_generated_cases jax_skip_slow_tests jax_test_dut
            jax_test_num_threads jax_test_with_persistent_compilation_cache max_cases_sampling_retries
            test_targets
        """,
    }.items()
}
"""Options that change no bit, by reason. Tests change those that can be changed in a process, and compare bits."""

_HARMLESS_NAMES: Final = frozenset(name for names in HARMLESS.values() for name in names)


def refusals() -> Iterator[str]:
    """Yields an error for each option of `REFUSED` with another value."""
    for name, read, accepted in _refused_options():
        value = read()
        if value != accepted:
            yield (
                f"the JAX option {name} is {value}; accepted: {accepted}, because {REFUSED[name].reason}. Call "
                f"jax.config.update({name!r}, {accepted!r}), and unset the environment variable {name.upper()}."
            )


@functools.cache
def _refused_options() -> tuple[tuple[str, Callable[[], Any], bool | int | str], ...]:
    """Returns the refused options that this JAX has: name, function that reads the value, accepted value."""
    return tuple(
        (name, _reader(name), refused.accepted) for name, refused in REFUSED.items() if name in jax.config.values
    )


def _reader(name: str) -> Callable[[], Any]:
    """Returns the function that reads an option. Only options with a context manager are attributes."""
    is_attribute = hasattr(type(jax.config), name)
    return functools.partial(getattr, jax.config, name) if is_attribute else functools.partial(jax.config.read, name)


def values() -> dict[str, Any]:
    """Returns the options in the fingerprint with their values.

    These are options of `HASHED` that differ from the value there, and all options that are in no table.
    """
    options = {name: _plain(value) for name, value in jax.config.values.items()}
    others = {name: value for name, value in options.items() if name not in REFUSED and name not in _HARMLESS_NAMES}
    return {name: value for name, value in sorted(others.items()) if name not in HASHED or value != HASHED[name]}


def _plain(value: Any) -> Any:
    """Converts the value of an option for JSON."""
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, Mapping):
        return {str(key): str(item) for key, item in sorted(value.items())}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)

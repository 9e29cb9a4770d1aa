"""Quantized weights as `config.json` describes them: the scheme of each module, checked against the stored tensors."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from detjax.models.checkpoint import matrix_formats
from detjax.models.checkpoint.matrix_arrays import E4M3, POWERS_OF_TWO, StoredMatrix
from detjax.models.checkpoint.quantization import BlockFormat
from detjax.models.checkpoint.quantization_schemes import Activations, Scheme, Targets, targeted
from detjax.models.checkpoint.weight_files import StoredTensor
from detjax.models.configuration.json_object import CheckpointError, JsonObject
from detjax.operands.quantized_weight import E2M1

KEY: Final = "quantization_config"
_FLOATS: Final = "F32", "BF16", "F16"
_BYTES: Final = np.arange(256, dtype=np.uint8)
_ENDS: Final = (
    *(".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_shape"),
    *(".weight_zero_point", ".weight_g_idx", ".weight_global_scale", ".input_global_scale", ".input_scale"),
    *(".qweight", ".qzeros", ".scales", ".g_idx"),
)
"""The ends of names of tensors that quantized modules have, in addition to the weight."""
_CODES: Final = ("F8_E4M3", "U8")
"""The dtypes of quantized tensors that are named like plain weights."""
_LINEAR: Final = re.compile(r".*\.(q|k|v|o|qkv|gate|up|down|gate_up|q_a|q_b|kv_b)_proj")
"""Modules that are linear in every family."""


@dataclasses.dataclass(frozen=True)
class StoredFormats:
    """The formats of a checkpoint's quantized weights.

    Attributes:
        method: `quant_method`.
        source: the file that describes them.
        groups: the schemes, with the modules that each is for.
        ignored: modules that are not quantized.
        is_complete: whether every linear module is quantized or ignored.
    """

    method: str
    source: str
    groups: tuple[tuple[Targets, Scheme], ...]
    ignored: Targets = dataclasses.field(default_factory=lambda: Targets(()))
    is_complete: bool = True

    def read(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Returns the tensors; a `StoredMatrix` of the plain tensor's name replaces those that a quantized module has.

        Raises:
            CheckpointError: a tensor is missing or does not match its module's scheme, or the lists of modules do not
                agree with the tensors.
        """
        first = self.groups[0][1]
        if self.method == "mxfp4" and isinstance(first.matrix_format, BlockFormat):
            return first.matrix_format.dequantized(stored, first)
        by_module: dict[str, dict[str, str]] = {}
        for name, tensor in stored.items():
            end = next((end for end in _ENDS if name.endswith(end)), None)
            if end is None and name.endswith(".weight") and tensor.format in _CODES:
                end = ".weight"
            if end is not None:
                by_module.setdefault(name.removesuffix(end), {})[end] = name
        for module, names in by_module.items():  # codes of another dtype are refused with the module's scales
            if f"{module}.weight" in stored:
                names.setdefault(".weight", f"{module}.weight")
        plain = dict(stored)
        for module, names in by_module.items():
            parts = {end: plain.pop(name) for end, name in names.items()}
            plain[f"{module}.weight"] = self._matrix(module, parts)
        if self.is_complete:
            self._check_plain(plain)
        return plain

    def _matrix(self, module: str, parts: dict[str, StoredTensor]) -> StoredMatrix:
        end, present = next(iter(parts.items()))
        stored_module = present.name.removesuffix(end)
        if self.ignored.matches_name(stored_module):
            raise CheckpointError(
                f"{present.file}: tensor {present.name!r} is quantized, but {self.source} lists {stored_module} among "
                f"the modules that are not; accepted: a list that agrees with the tensors"
            )
        scheme = targeted(self.groups, stored_module)
        if scheme is None:
            raise CheckpointError(
                f"{present.file}: tensor {present.name!r} is quantized, but no group of {self.source} has "
                f"{stored_module} among its targets; accepted: targets that agree with the tensors"
            )
        chosen = scheme.matrix_format
        if isinstance(chosen, BlockFormat) and (".weight_g_idx" in parts):
            chosen = matrix_formats.packed_int4(chosen.block[1], symmetric=True)
        if scheme.activations == "fp4" and self.method == "modelopt" and ".input_scale" not in parts:
            scheme = dataclasses.replace(scheme, activations=None)
        if isinstance(chosen, BlockFormat):
            known = {f".weight{end}" for end in chosen.endings}
        else:
            known = set(chosen.formats)
        surplus = [part.name for end, part in parts.items() if end not in known]
        if surplus:
            raise CheckpointError(
                f"{present.file}: tensor {surplus[0]!r} is surplus, as {self.source} describes {stored_module} "
                f"({chosen.name}); accepted: {', '.join(sorted(stored_module + end for end in known))}"
            )
        if isinstance(chosen, BlockFormat):
            parts = {end.removeprefix(".weight"): part for end, part in parts.items()}
        return chosen.matrix(f"{module}.weight", parts, scheme)

    def _check_plain(self, plain: Mapping[str, StoredTensor]) -> None:
        """Raises if a module is plain that should be quantized."""
        for tensor in plain.values():
            module = tensor.name.removesuffix(".weight")
            if isinstance(tensor, StoredMatrix) or module == tensor.name or not _LINEAR.fullmatch(module):
                continue
            if targeted(self.groups, module) is not None and not self.ignored.matches_name(module):
                raise CheckpointError(
                    f"{tensor.file}: tensor {tensor.name!r} is plain, but {self.source} does not list {module} among "
                    "the modules that are not quantized; accepted: a list that agrees with the tensors"
                )


def stored_formats(file: JsonObject) -> StoredFormats | None:
    """Returns the formats of quantized weights in a `config.json`; None: all weights are plain.

    The checkpoint's tensors determine which weights are quantized.

    Raises:
        CheckpointError: a format is not supported.
    """
    described = file.object(KEY)
    if described is None:
        return None
    method = described.get("quant_method")
    if method not in list(_READERS):
        raise described.error("quant_method", f"{', '.join(_READERS)}; other quantizations are not supported")
    return _READERS[method](described)


def _all_linear(scheme: Scheme) -> tuple[tuple[Targets, Scheme], ...]:
    return ((Targets(("Linear",), ("Linear",)), scheme),)


def _names(described: JsonObject, key: str) -> tuple[str, ...]:
    """Returns a list of names of modules, empty if it is missing."""
    value = described.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise described.error(key, "a list of names of modules")
    for name in value:
        if name.startswith("re:"):
            try:
                re.compile(name.removeprefix("re:"))
            except re.error:
                raise described.error(
                    key, "a list of names of modules, or valid regular expressions after re:"
                ) from None
    return tuple(value)


def _refuse_present(described: JsonObject, *keys: str) -> None:
    """Raises if a key has a value that is not empty."""
    for key in keys:
        if described.get(key) not in (None, {}, [], False):
            raise described.error(key, "null; anything else is not supported")


# --- MXFP4 ------------------------------------------------------------------------------------------------------------

_BIAS: Final = 127
"""Subtracted from stored exponents."""
_NAN: Final = 255
"""The exponent that stands for NaN."""


def _powers_of_two(scales: StoredTensor) -> np.ndarray:
    """Returns scales that are stored as exponents."""
    exponents = scales.read()
    if (exponents == _NAN).any():
        raise CheckpointError(
            f"{scales.file}: tensor {scales.name!r} holds {_NAN}, which is NaN in MXFP4; accepted: exponents from 0 "
            f"to {_NAN - 1}"
        )
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS)


def _nibbles(numbers: np.ndarray) -> np.ndarray:
    """Returns the two numbers of each byte, the low four bits first, given the numbers of four bits."""
    return np.stack([numbers[_BYTES & 15], numbers[_BYTES >> 4]], axis=-1)


_MXFP4: Final = BlockFormat(
    name="MXFP4",
    codes="_blocks",
    scales="_scales",
    code_format="U8",
    scale_formats=("U8",),
    numbers=_nibbles(E2M1),
    block=(1, 32),
    row_axes=2,
    transposed=True,
    read_scales=_powers_of_two,
    kind="e2m1",
    scale_table=POWERS_OF_TWO,
)
"""Groups of 32 four-bit numbers that share a power of two (Open Compute Project 2023), outputs being rows.

The plain tensors have inputs as rows. bfloat16 and float32 hold the values exactly.
"""


# --- fp8 --------------------------------------------------------------------------------------------------------------


def fp8_blocks(block: tuple[int, int], scales: str) -> BlockFormat:
    """Returns blocks of e4m3 numbers (DeepSeek-AI 2024, section 3.3). The scales are factors."""
    return BlockFormat(
        name="fp8",
        codes="",
        scales=scales,
        code_format="F8_E4M3",
        scale_formats=(*_FLOATS, "F8_E8M0"),
        numbers=E4M3[:, None],
        block=block,
    )


def _read_fp8(described: JsonObject) -> StoredFormats:
    described.choice("fmt", "e4m3", ("e4m3",))
    ignored = Targets((*_names(described, "modules_to_not_convert"), *_names(described, "ignored_layers")))
    if described.get("activation_scheme") == "static" and described.get("weight_block_size") is None:
        scheme = Scheme(matrix_formats.fp8(is_static=True), "static")
        return StoredFormats("fp8", described.source, _all_linear(scheme), ignored)
    described.choice("activation_scheme", "dynamic", ("dynamic",))
    if described.get("weight_block_size") is None:
        scheme = Scheme(matrix_formats.fp8(is_static=False), "batch")
        return StoredFormats("fp8", described.source, _all_linear(scheme), ignored)
    block = _block(described, "weight_block_size")
    scheme = Scheme(fp8_blocks(block, "_scale_inv"), "group")
    return StoredFormats("fp8", described.source, _all_linear(scheme), ignored)


def _block(described: JsonObject, key: str) -> tuple[int, int]:
    block = described.get(key)
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise described.error(key, "a list of the rows and the columns of a block, such as [128, 128]")
    return block[0], block[1]


# --- compressed-tensors -----------------------------------------------------------------------------------------------

_CT_FORMATS: Final = {
    ("int", 4): ("pack-quantized",),
    ("float", 8): ("float-quantized", "naive-quantized"),
    ("float", 4): ("nvfp4-pack-quantized", "mxfp4-pack-quantized"),
}
"""The accepted formats by the type and the bits of weights."""


def _read_compressed_tensors(described: JsonObject) -> StoredFormats:
    """Reads groups of modules, each with a format of its own."""
    accepted = tuple(name for names in _CT_FORMATS.values() for name in names)
    described.choice("format", accepted[0], (*accepted, "mixed-precision"))
    described.choice("quantization_status", "compressed", ("compressed", "frozen"))
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if described.get(key) not in (None, {}):
            raise described.error(key, "null; anything else is not supported")
    groups = described.object("config_groups")
    if groups is None:
        raise described.error("config_groups", "an object that describes the quantization of weights")
    read = tuple(_read_group(described, groups, name) for name in groups.raw)
    ignored = Targets(_names(described, "ignore"))
    return StoredFormats("compressed-tensors", described.source, read, ignored)


def _read_group(described: JsonObject, groups: JsonObject, name: str) -> tuple[Targets, Scheme]:
    """Returns the targets and the scheme of an object of `config_groups`."""
    group = groups.object(name)
    weights = None if group is None else group.object("weights")
    if group is None or weights is None:
        raise groups.error(name, "an object whose weights describe a quantization")
    if group.get("output_activations") is not None:
        raise group.error("output_activations", "null; quantized outputs are not supported")
    targets = _names(group, "targets") or ("Linear",)
    for target in targets:
        if not target.startswith("re:") and "." not in target and target[:1].isupper() and target != "Linear":
            raise group.error("targets", "Linear, names of modules, or regular expressions after re:")
    weights.choice("type", "int", ("int", "float"))
    kind = (weights.get("type") or "int", weights.integer("num_bits"))
    if kind not in _CT_FORMATS:
        accepted = sorted(bits for other, bits in _CT_FORMATS if other == kind[0])
        raise weights.error("num_bits", " or ".join(map(str, accepted)))
    holder = group if group.get("format") is not None else described
    stated = holder.choice("format", _CT_FORMATS[kind][0], _CT_FORMATS[kind])
    if weights.get("dynamic") not in (None, False):
        raise weights.error("dynamic", "false")
    inputs = group.object("input_activations")
    scheme = {"int": _int4_scheme, "float": _float_scheme}[kind[0]](group, weights, inputs, stated)
    return Targets(targets, ("Linear",)), scheme


def _int4_scheme(group: JsonObject, weights: JsonObject, inputs: JsonObject | None, stated: str) -> Scheme:
    del stated
    if inputs is not None:
        raise group.error("input_activations", "null; quantized activations are not supported with integers")
    weights.choice("strategy", "group", ("group", "channel"))
    weights.choice("actorder", "static", ("static", "weight", "group"))
    symmetric = weights.boolean("symmetric", True)
    size = weights.integer("group_size") if weights.get("strategy") != "channel" else None
    return Scheme(int4_blocks(size) if symmetric and size else matrix_formats.packed_int4(size, symmetric=symmetric))


def int4_blocks(group: int) -> BlockFormat:
    """Returns groups of symmetric four-bit integers along rows, eight in 32 bits, as compressed-tensors packs them."""
    return BlockFormat(
        name="pack-quantized",
        codes="_packed",
        scales="_scale",
        shape="_shape",
        code_format="I32",
        scale_formats=_FLOATS,
        numbers=_nibbles(np.arange(-8, 8, dtype=np.float32)),
        block=(1, group),
        kind="int4",
    )


def _float_scheme(group: JsonObject, weights: JsonObject, inputs: JsonObject | None, stated: str) -> Scheme:
    """Returns the scheme of floating-point numbers of 8 or 4 bits."""
    if not weights.boolean("symmetric", True):
        raise weights.error("symmetric", "true")
    if weights.get("actorder") is not None:
        raise weights.error("actorder", "null")
    if weights.integer("num_bits") == 4:
        dtype, size = ("F8_E4M3", 16) if stated.startswith("nvfp4") else ("U8", 32)
        if weights.integer("group_size", size) != size:
            raise weights.error("group_size", str(size))
        strategies = ("tensor_group", "group")
        weights.choice("strategy", strategies[0], strategies)
        matrix_format = matrix_formats.packed_fp4(dtype, has_inputs=inputs is not None)
        return Scheme(matrix_format, None if inputs is None else "fp4")
    strategy = weights.choice("strategy", "tensor", ("tensor", "channel", "block"))
    block = _block(weights, "block_structure") if strategy == "block" else None
    activations = None if inputs is None else _activations(inputs, block)
    if block is not None:
        return Scheme(fp8_blocks(block, "_scale"), activations)
    return Scheme(matrix_formats.fp8(is_static=activations == "static"), activations)


def _activations(inputs: JsonObject, block: tuple[int, int] | None) -> Activations:
    """Returns the scales of quantized activations, which must be e4m3 numbers."""
    inputs.choice("type", "int", ("float",))
    if inputs.get("type") != "float" or inputs.integer("num_bits") != 8:
        raise inputs.error("num_bits" if inputs.get("type") == "float" else "type", "float of 8 bits")
    if not inputs.boolean("symmetric", True):
        raise inputs.error("symmetric", "true")
    is_dynamic = inputs.boolean("dynamic", False)
    if block is not None:
        inputs.choice("strategy", "group", ("group",))
        if inputs.integer("group_size", block[1]) != block[1] or not is_dynamic:
            raise inputs.error("group_size", f"{block[1]}, as the weights' blocks have, with dynamic true")
        return "group"
    strategy = inputs.choice("strategy", "tensor", ("tensor", "token"))
    if strategy == "token":
        if not is_dynamic:
            raise inputs.error("dynamic", "true, as a static scale cannot belong to a token")
        return "row"
    return "batch" if is_dynamic else "static"


# --- GPTQ, AWQ, ModelOpt ----------------------------------------------------------------------------------------------


def _four_bits(described: JsonObject, key: str = "bits") -> None:
    if described.get(key) != 4:
        raise described.error(key, "4")


def _group_size(described: JsonObject) -> int | None:
    """Returns the size of a group; None: all columns, which files write as -1."""
    return None if described.get("group_size") == -1 else described.integer("group_size")


def _read_gptq(described: JsonObject) -> StoredFormats:
    _four_bits(described)
    _refuse_present(described, "dynamic", "is_marlin_format", "lm_head")
    described.choice("pack_dtype", "int32", ("int32",))
    key = "checkpoint_format" if described.get("checkpoint_format") is not None else "format"
    version = described.choice(key, "gptq", ("gptq", "gptq_v2"))
    matrix_format = matrix_formats.gptq(
        _group_size(described),
        symmetric=described.boolean("sym", False),
        first_version=version == "gptq",
        ordered=described.boolean("desc_act", False),
    )
    return StoredFormats("gptq", described.source, _all_linear(Scheme(matrix_format)), is_complete=False)


def _read_awq(described: JsonObject) -> StoredFormats:
    _four_bits(described)
    version = described.get("version")
    if version is not None and str(version).lower() != "gemm":
        raise described.error("version", "gemm; other versions lay codes out in other orders")
    if not described.boolean("zero_point", True):
        raise described.error("zero_point", "true")
    matrix_format = matrix_formats.awq(_group_size(described), has_zeros=True)
    ignored = Targets(_names(described, "modules_to_not_convert"))
    return StoredFormats("awq", described.source, _all_linear(Scheme(matrix_format)), ignored)


def _read_modelopt(described: JsonObject) -> StoredFormats:
    _refuse_present(described, "kv_cache_scheme", "kv_cache_quant_algo")
    algorithm = described.choice("quant_algo", "", ("FP8", "NVFP4"))
    if not algorithm:
        raise described.error("quant_algo", "FP8, NVFP4")
    ignored = Targets((*_names(described, "ignore"), *_names(described, "exclude_modules")))
    if algorithm == "FP8":
        scheme = Scheme(matrix_formats.fp8(is_static=True), "static")
    else:
        size = described.integer("group_size", 16)
        scheme = Scheme(matrix_formats.modelopt_nvfp4(size, has_inputs=False), "fp4")
    return StoredFormats("modelopt", described.source, _all_linear(scheme), ignored)


_READERS: Final[Mapping[str, Callable[[JsonObject], StoredFormats]]] = {
    "mxfp4": lambda described: StoredFormats("mxfp4", described.source, _all_linear(Scheme(_MXFP4))),
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed_tensors,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "modelopt": _read_modelopt,
}

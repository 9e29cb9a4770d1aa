"""`load`: a checkpoint, and adapters that its rows may have."""

import os
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh
from jaxtyping import DTypeLike

from detjax.models.adapters.adapter import read_adapter
from detjax.models.adapters.adapter_set import AdapterSet
from detjax.models.checkpoint.loading import load_checkpoint
from detjax.models.checkpoint.quantization_schemes import Quantized
from detjax.models.decoder import Decoder
from detjax.models.text.tokenizer import Tokenizer


def load(
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    progress: bool | None = None,
    mesh: Mesh | None = None,
    overrides: Mapping[str, Any] | None = None,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    quantized: Quantized = "computed",
) -> tuple[Decoder, Tokenizer | None]:
    """Returns the model in the Hugging Face directory `path`, and its tokenizer or None.

    All files are checked before the first parameter is read. If `config.json` ties the embeddings but the files
    hold a different `lm_head.weight`, the latter is used, with a warning, as in transformers. Model-related files that
    are not read, such as weights in other formats, are named in a warning. Of a multimodal model whose `config.json`
    describes no vision tower, the text model is read.

    A checkpoint says whether its model generates or pools: it pools if its architecture has a head for classes, or if
    the directory has the modules of Sentence Transformers.

    Args:
        path: a directory with `config.json` and `model.safetensors`, or shards of it with their index; optionally
            `generation_config.json`, `preprocessor_config.json` for images, `video_preprocessor_config.json` for
            videos, `tokenizer.json`, `tokenizer_config.json` and a chat template.
        dtype: the dtype of the weights: float32, bfloat16 or float16, rounded to nearest even. Default: the dtype that
            `config.json` names, else the embedding's stored dtype.
        progress: whether to draw a progress bar on stderr. Default: if stderr is a terminal.
        mesh: devices that share the model, with the axes "tensor" and "expert" or one of them; see `sharded`.
            Parameters go from the file to the devices one at a time, so no device and no process holds the whole model.
            Default: a single device.
        overrides: keys of `config.json` with the values to read instead, such as vLLM's `classifier_from_token`.
        adapters: folders of adapters that peft saved, by the names that `model(tokens, adapter=name)` takes. A row
            without an adapter has the bits of the model; the base model's weights are never changed.
        quantized: the reading of quantized weights. "computed": weights stay in the checkpoint's codes, and products
            quantize activations where it says so; "weights": they stay in codes, and activations are plain; "widened":
            they become plain weights. The last two have the same bits, and so has the first one without quantized
            activations.

    Raises:
        CheckpointError: `path` is not a directory, or it has an adapter; a file is missing, damaged or not fetched; the
            architecture or an option is not supported; a tensor is missing, surplus, misshapen, of another dtype, or
            beyond the range of `dtype`; an adapter does not fit the model.
        ValueError: `dtype` or `quantized` is not supported, or the mesh has another axis or no device of this process.
    """
    read = {name: read_adapter(folder) for name, folder in (adapters or {}).items()}
    options: dict[str, Any] = {"dtype": dtype, "progress": progress, "mesh": mesh, "overrides": overrides}
    model, tokenizer = load_checkpoint(path, **options, quantized=quantized)
    if read:
        model.adapters = AdapterSet(model, read)
    return model, tokenizer

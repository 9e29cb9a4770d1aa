"""`load`: a checkpoint, and adapters that its rows may have."""

import os
from collections.abc import Mapping
from typing import Any

from detjax.models.adapters.adapter import read_adapter
from detjax.models.adapters.adapter_set import AdapterSet
from detjax.models.checkpoint import loading
from detjax.models.decoder import Decoder
from detjax.models.text.tokenizer import Tokenizer


def load(
    path: str | os.PathLike[str],
    *,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    **options: Any,
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
        adapters: folders of adapters that peft saved, by the names that `model(tokens, adapter=name)` takes. A row
            without an adapter has the bits of the model; the base model's weights are never changed.
        options: `dtype`, the dtype of the weights, float32, bfloat16 or float16, rounded to nearest even (default: the
            dtype that `config.json` names, else the embedding's stored dtype); `mesh`, the devices that share the
            model, with the axes "tensor" and "expert" or one of them, see `sharded` (default: one device); `progress`,
            whether to draw a progress bar on stderr (default: if it is a terminal); `overrides`, keys of `config.json`
            with the values to read instead; `quantized`, the reading of quantized weights; and further options of
            `detjax.models.checkpoint.loading.load`.

    Raises:
        CheckpointError: `path` is not a directory, or it has an adapter; a file is missing, damaged or not fetched; the
            architecture or an option is not supported; a tensor is missing, surplus, misshapen, of another dtype, or
            beyond the range of `dtype`; an adapter does not fit the model.
        ValueError: `dtype` is not supported, or the mesh has another axis or no device of this process.
    """
    read = {name: read_adapter(folder) for name, folder in (adapters or {}).items()}
    model, tokenizer = loading.load(path, **options)
    if read:
        model.adapters = AdapterSet(model, read)
    return model, tokenizer

"""Write a checkpoint in which an adapter is merged into its base model: another model, with other bits.

The new directory appears only if the command succeeds. Serve the adapter itself (`detjax serve --lora-modules`) where
its answers have to keep their bits.
"""

from pathlib import Path

from detjax import models
from detjax.cli.options import command


@command
def merge(
    model: Path,
    adapter: Path,
    out: Path,
    /,
    *,
    dtype: str | None = None,
) -> None:
    """Merges an adapter.

    Args:
        model: directory of the base model.
        adapter: directory of an adapter of peft's.
        out: the new directory; nothing may exist there.
        dtype: data type of the weights: float32, bfloat16 or float16. Default: the checkpoint's.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists; accepted: a path that does not exist")
    decoder, tokenizer = models.load(model, dtype=dtype, quantized="widened")
    models.save(models.merged(decoder, models.read_adapter(adapter)), out, tokenizer=tokenizer)
    print(f"{out}: another model, whose answers have other bits than {model} with {adapter}")

"""Check bit for bit that answers come from the model, with one forward pass over prompt and answer.

The exit code is 1 if it refuses an answer.
"""

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Annotated

from detjax import audit
from detjax.cli.files import opened, write_json
from detjax.cli.loading import JSON_FILE, LORA_MODULES, Backend, Loading, lora_adapters
from detjax.cli.options import Fields, command
from detjax.runtime import backends


@command
def verify(
    file: Path,
    /,
    *,
    loading: Annotated[Loading, Fields(Loading)],
    lora_modules: Annotated[tuple[str, ...], LORA_MODULES] = (),
    json_file: Annotated[Path | None, JSON_FILE] = None,
    backend: Backend = None,
) -> int:
    """Verifies transcripts.

    Args:
        file: transcripts, or responses of a server with receipts, one per line or as a JSON list.
        lora_modules: adapter as NAME=PATH, or as a JSON object with name and path; its answers are verified, too.
        json_file: write all verdicts to this file.
    """
    template, adapters = loading.template(), lora_adapters(lora_modules)
    with contextlib.ExitStack() as files, backends.use_backend(backend):
        backends.check_device()
        json_part = opened(files, "--json", json_file)
        decoder, tokenizer = loading.load(template, adapters)
        transcripts = audit.read_transcripts(file, tokenizer)
        verdicts = audit.verify(decoder, list(transcripts.values()), tokenizer, progress=sys.stderr.isatty())
        by_place = dict(zip(transcripts, verdicts, strict=True))
        if json_part is not None:
            content = [{"place": place, **dataclasses.asdict(verdict)} for place, verdict in by_place.items()]
            write_json(json_part, content)
    refused = {place: verdict for place, verdict in by_place.items() if not verdict.is_verified}
    for place, verdict in refused.items():
        print(f"{place}: {verdict}")
    print(f"{len(verdicts) - len(refused)} of {len(verdicts)} answers are verified")
    return int(bool(refused))

"""Certify that the rows of a function's result do not depend on the batch, by analyzing its program and by running it.

The exit code is 1 if the function is refuted, or certified at a lower level than --require asks for.
"""

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console

from detjax import audit
from detjax.audit.bisection import targets
from detjax.audit.certification import certify as certificates
from detjax.audit.certification import fusion_table
from detjax.cli.files import opened, write_json
from detjax.cli.loading import JSON_FILE, Backend
from detjax.cli.options import command
from detjax.runtime import backends


@command
def certify(
    function: str | None = None,
    /,
    *,
    args: str | None = None,
    batch_axes: str = "0",
    out_axes: str = "0",
    batch_sizes: str = "1,2,3,8,17",
    require: Literal["proven", "observed"] = "observed",
    json_file: Annotated[Path | None, JSON_FILE] = None,
    backend: Backend = None,
    fusions: bool = False,
) -> int:
    """Certifies a function.

    Args:
        function: MODULE:FUNCTION, a function of a batch or a Flax module.
        args: MODULE:NAME, the function's arguments: a tuple, or a function that returns one.
        batch_axes: batch axis of each argument, as JSON, with null for arguments that all rows share: [null, 0].
        out_axes: batch axis of each result, as JSON.
        batch_sizes: batch sizes to run.
        require: minimum level of the certificate.
        json_file: write the certificate to this file.
        fusions: list the fused kernels, how to disable each, and whether that changes bits; then exit.
    """
    if fusions:
        # Piped output is wide enough for its cells, so that no program has to rejoin lines.
        Console(highlight=False, width=None if sys.stdout.isatty() else 300).print(fusion_table.table())
        return 0
    if function is None or args is None:
        raise ValueError("MODULE:FUNCTION or --args is missing; accepted: both, or --fusions")
    axes = targets.axes_of("--batch-axes", batch_axes), targets.axes_of("--out-axes", out_axes)
    sizes = targets.sizes_of("--batch-sizes", batch_sizes)
    with contextlib.ExitStack() as files, backends.use_backend(backend):
        json_part = opened(files, "--json", json_file)
        fn, arguments = targets.named_object("MODULE:FUNCTION", function), targets.named_object("--args", args)
        if not callable(fn):
            raise ValueError(f"MODULE:FUNCTION is {function!r}, which is {type(fn).__name__}; accepted: functions")
        arguments = arguments() if callable(arguments) else arguments
        if not isinstance(arguments, (tuple, list)):
            raise ValueError(f"--args is {args!r}, which is {type(arguments).__name__}; accepted: a tuple of arguments")
        certificate = audit.certify(fn, arguments, *axes, batch_sizes=sizes)
        if json_part is not None:
            write_json(json_part, certificate.as_dict())
    Console(highlight=False).print(certificates.report(certificate))
    return int(not certificate.outcome.is_at_least(audit.Outcome(require)))

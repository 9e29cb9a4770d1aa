"""Run a function and record a digest of every equation's result, for detjax bisect."""

from pathlib import Path

from detjax.audit.bisection import traces
from detjax.cli.files import written_at_the_end
from detjax.cli.loading import Backend
from detjax.cli.options import command
from detjax.runtime import backends


@command
def trace(function: str, /, *, out: Path, backend: Backend = None) -> None:
    """Writes a trace.

    Args:
        function: MODULE:FUNCTION, a function without parameters that returns (fn, args) or (fn, args, options of
            trace_digests).
        out: write the trace to this file.
    """
    with backends.use_backend(backend), written_at_the_end("--out", out) as part:
        backends.check_device()
        result = traces.traced(function)
        result.save(part)
    print(f"{len(result.entries)} arrays, {sum(x.nbytes for x in result.digests)} bytes of digests")

"""The table of `detjax certify --fusions`: the kernels' fusions, and the effect of switching them off on bits."""

from rich.table import Column, Table

from detjax.runtime.fusions import FUSIONS, FUSIONS_VARIABLE, unfused


def table() -> Table:
    """Returns a table with a row for each fusion."""
    columns = "name", "operations", "fuses", "switched off, computed by", "bits", "now"
    result = Table(
        *(Column(name, overflow="fold") for name in columns),
        caption=f"Switch off with detjax.without_fusions(NAME, ...), or for a process with {FUSIONS_VARIABLE}=NAME,...",
    )
    off = unfused()
    for fusion in FUSIONS.values():
        operations = ", ".join(f"ops.{name}" for name in fusion.operations if name != "ragged_attention")
        result.add_row(
            fusion.name, operations, fusion.fuses, fusion.steps, fusion.bits, "off" if fusion.name in off else "on"
        )
    return result

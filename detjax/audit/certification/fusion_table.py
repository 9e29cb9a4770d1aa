"""The table of `detjax certify --fusions`: what kernels fuse, and what switching it off does to bits."""

from rich.table import Column, Table

from detjax.runtime.fusions import FUSIONS, FUSIONS_VARIABLE, separated


def table() -> Table:
    """Returns a row for each fusion: its name, its operations, the steps it fuses, what takes them otherwise, bits."""
    columns = "name", "operations", "fuses", "switched off, computed by", "bits", "now"
    made = Table(
        *(Column(name, overflow="fold") for name in columns),
        caption=f"Switch off with detjax.without_fusions(NAME, ...), or for a process with {FUSIONS_VARIABLE}=NAME,...",
    )
    off = separated()
    for fusion in FUSIONS.values():
        operations = ", ".join(f"ops.{name}" for name in fusion.operations if name != "ragged_attention")
        made.add_row(
            fusion.name, operations, fusion.fuses, fusion.steps, fusion.bits, "off" if fusion.name in off else "on"
        )
    return made

"""Products with quantized activations on Hopper: the bits of their kernels, and what e4m3 instructions change.

    python -m benchmarks fp8_products --out benchmarks/results/fp8-products-h200.json

The kernel that quantizes rows must have the bits of plain JAX and of NumPy, and so must a norm that gives the codes of
its result. The kernel of codes must have the same bits by several plans, for a row alone and among others, for an
expert and a single weight, and as a product for each block, whose operands are exchanged. The error of its sums against
float64 must lie within what the matrix unit's sums allow. Exit code 1 otherwise.

The matrix unit adds the products of 128 columns of e4m3 numbers, given to it as bfloat16, as float16 and as e4m3 codes.
The result says what share of the sums differs from bfloat16's, how large the errors are against float64, relative to
the sum of magnitudes, and how many operations a second each dtype reaches. It also says what share of the sums of
codes differs with exchanged operands, and with fewer columns of an instruction. The products of a layer of Qwen3-8B are
timed for 1 to 4096 rows, with quantized activations and plainly.

`--small` compares the sums in Pallas' interpreter, without times and without the kernels.

`--part widths` launches the chosen plan, and the best plan of each size of tiles, 20 times for 1 to 4096 rows of the
widths of models, with groups of 128 columns and with scales by rows, among rows that are larger, zero or NaN. The
result has the counts of compared numbers, and of those that differ from the product of a few rows at a time.

`--part repeats` runs layers of Qwen3-8B's widths 100 times for each of several numbers of rows, their products right
after one another, and names the first product with other bits than in the first run.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Final

from benchmarks import repeated_products
from benchmarks import study as options
from benchmarks.studies.fp8_products.products import (
    compared_experts,
    compared_norms,
    compared_products,
    compared_rows,
    product_cases,
)
from benchmarks.studies.fp8_products.repeats import repeated_layers
from benchmarks.studies.fp8_products.speeds import times
from benchmarks.studies.fp8_products.sums import compared, different_with_codes, drawn_numbers, speed
from benchmarks.studies.fp8_products.widths import wide_groups
from benchmarks.study import Result, Run
from detjax.bench import command_line

PARTS: Final = ("bits", "sums", "repeats", "widths", "seconds")
"""The parts of the study; without a choice all but the launches at the widths of models, and their repetitions."""


def study(run: Run, *, part: Annotated[list[str], options.names(PARTS)]) -> Result:
    parts = set(part or PARTS) - (set() if part else {"widths", "repeats"})
    # The interpreter has the sums alone.
    parts &= {"sums"} if run.small else parts
    same: dict[str, bool] = {}
    differences: dict[str, list[str]] = {}
    sums: dict[str, Any] = {}
    speeds: dict[str, float] = {}
    seconds: dict[str, Any] = {}
    widths: dict[str, Any] = {}
    content = {
        "same_bits": same,
        "widths": widths,
        "differences": differences,
        "sums": sums,
        "operations_per_second": speeds,
        "seconds": seconds,
    }

    def note(comparisons: Iterator[tuple[str, list[str]]]) -> None:
        for name, faults in comparisons:
            same[name] = not faults
            command_line.print_line(f"{name}: {'; '.join(faults) if faults else 'same bits'}")
            if faults:
                differences[name] = faults
            run.save(content)

    if "bits" in parts:
        note(compared_rows())
        note(compared_norms())
        note(compared_products(product_cases()))
        note(compared_experts())
    if "repeats" in parts:
        note(repeated_layers())
    for name, numbers in (drawn_numbers(2 if run.small else 132) if "sums" in parts else {}).items():
        sums[name] = compared(*numbers, small=run.small)
        if not run.small:
            sums[name]["codes, different"] = different_with_codes(*numbers)
        command_line.print_line(f"{name}: {sums[name]}")
        run.save(content)
    for dtype in ("bfloat16", "float16", "float8_e4m3fn") if "sums" in parts and not run.small else ():
        speeds[dtype] = speed(dtype)
        command_line.print_line(f"{dtype}: {speeds[dtype]:.3g} operations a second")
        run.save(content)
    if "widths" in parts:
        repeated_products.compare(run, content, widths, wide_groups())
    for name, by_rows in times() if "seconds" in parts else ():
        seconds[name] = by_rows
        command_line.print_line(f"{name}: {by_rows}")
        run.save(content)
    different = [name for name, is_same in same.items() if not is_same]
    different += repeated_products.problems(widths) if widths else []
    return Result(content, f"bits of products differ: {'; '.join(different)}" if different else "")

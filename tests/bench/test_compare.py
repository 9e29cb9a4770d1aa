"""Results side by side: promises that are kept or broken, distances, and files of other origin."""

import copy
import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from detjax.bench import compare, report, results
from detjax.bench import compile as compiling
from detjax.bench import run as running
from detjax.bench.__main__ import main
from detjax.bench.peaks import PEAKS
from detjax.runtime.fingerprints import Fingerprint
from tests.support import commands

FINGERPRINT = Fingerprint(1, "0.1", "portable", "a CPU", "none", "0.11.2", "0.11.2", "cpu", *["{}"] * 6)
OTHER = dataclasses.replace(FINGERPRINT, backend="hopper", device_kind="NVIDIA H200", driver="580")
X = np.linspace(-2, 2, 200, dtype=np.float32)


def row(name: str, *outputs: np.ndarray, **changes: Any) -> dict[str, Any]:
    seconds = {"median": 2e-5, "spread": 0.1, "rounds": [2e-5, 2.1e-5]}
    fields = {"operation": "matmul", "name": name, "arguments": ["float32[9]"], "bytes": 100, "flops": 10, "inputs": 5}
    fields |= {"seconds": seconds, "stock_seconds": seconds, "speed_over_stock": 1.5, "share_of_peak": 0.25}
    fields |= {"error": {"max_absolute": 1e-3, "relative": 1e-4, "elements": 9}, "same_bits_again": True}
    return fields | {"outputs": [results.output(x) for x in outputs]} | changes


def save(file: Path, *rows: dict[str, Any], fingerprint: Fingerprint = FINGERPRINT, kind: Any = "measured") -> Path:
    device = {"kind": fingerprint.device_kind, "platform": "gpu" if fingerprint.driver != "none" else "cpu"}
    peak = PEAKS.get(fingerprint.device_kind)
    header = results.Header(kind, "python -m detjax.bench run", fingerprint, device, peak, {"small": True})
    results.write(file, header, rows)
    return file


def compiled(file: Path, *names: str) -> Path:
    fingerprint = dataclasses.replace(FINGERPRINT, device_kind="TPU v5 lite", backend="stock")
    memory = {"argument": 3000, "temp": 1 << 20}
    base = {"operation": "matmul", "arguments": ["float32[9]"], "bytes": 100, "flops": 10, "cost": {}}
    rows = [base | {"name": name, "memory": memory, "compile_seconds": 1.0} for name in names]
    return save(file, *rows, fingerprint=fingerprint, kind="compiled")


def invoke(*arguments: Path | str) -> Any:
    return commands.run(main, "compare", *arguments, env={"COLUMNS": "250"})


def nudged(x: np.ndarray, index: int, by: int) -> np.ndarray:
    words = x.view(np.int32).copy()
    words[index] += by
    return words.view(np.float32)


def test_equal_fingerprints_with_equal_bits_keep_the_promise(tmp_path: Path) -> None:
    result = invoke(*(save(tmp_path / f"{i}.json", row("a", X), row("b", X[:3])) for i in range(2)))
    assert result.exit_code == 0, result.output
    assert "All 2 results that must have equal bits are equal" in result.output
    assert "equal to A, promised" in result.output and "All fingerprints are equal" in result.output


@pytest.mark.parametrize("index", [0, 100, 199])
def test_one_bit_that_was_promised_breaks_it(tmp_path: Path, index: int) -> None:
    files = [save(tmp_path / "a.json", row("a", X)), save(tmp_path / "b.json", row("a", nudged(X, index, 1)))]
    result = invoke(*files)
    assert result.exit_code == 1
    assert "1 of 1 results that must have equal bits differ" in result.output
    assert "NOT EQUAL to A: " in result.output


def test_among_several_results_the_one_with_different_bits_is_named(tmp_path: Path) -> None:
    one, other = row("a", X), row("a", X + 1)
    files = [
        save(tmp_path / "0", one),
        save(tmp_path / "1", row("a", X * 3), fingerprint=OTHER),
        save(tmp_path / "2", row("a", X * 3), fingerprint=OTHER),
        save(tmp_path / "3", other),
    ]
    result = compare.compare(files)
    assert [(bits.first, bits.second) for _, bits in result.broken] == [("A", "D")]
    assert [(bits.first, bits.second, bits.promised) for bits in result.lines[0].bits] == [
        ("A", "B", False),
        ("B", "C", True),
        ("A", "D", True),
    ]


def test_stock_promises_nothing(tmp_path: Path) -> None:
    stock = dataclasses.replace(FINGERPRINT, backend="stock")
    files = [save(tmp_path / f"{i}", row("a", X + i), fingerprint=stock) for i in range(2)]
    assert invoke(*files).exit_code == 0
    assert "No two results must have equal bits" in compare.compare(files).verdict


def test_results_of_different_devices_are_a_distance_apart(tmp_path: Path) -> None:
    tokens = np.arange(4, dtype=np.int32)
    files = [
        save(tmp_path / "a", row("a", X, tokens)),
        save(tmp_path / "b", row("a", nudged(X, 199, -3), tokens * 2), fingerprint=OTHER),
    ]
    result = invoke(*files)
    assert result.exit_code == 0
    assert "3 ulp, 3 different tokens from A" in result.output
    assert "Fingerprints differ in: backend, device_kind, driver" in result.output


def test_bits_that_differ_where_no_number_is_kept_do_not_pass_for_equal(tmp_path: Path) -> None:
    many = np.ones(1000, np.float32)
    files = [save(tmp_path / "a", row("a", many)), save(tmp_path / "b", row("a", nudged(many, 1, 1)))]
    ((_, bits),) = compare.compare(files).pairs
    assert bits.broken and bits.text == "NOT EQUAL to A: 0 ulp in the samples"


def test_ulps_are_counted_across_zero_and_within_every_dtype() -> None:
    def distance(dtype: Any, a: list[float], b: list[float]) -> int | None:
        words = [results.output(np.asarray(x, dtype))["sample"] for x in (a, b)]
        return compare.ulps(*words, np.dtype(dtype).name)  # pyright: ignore[reportCallIssue]

    tiny = float(np.finfo(np.float32).smallest_subnormal)
    assert distance(np.float32, [0.0, 1.0], [-0.0, 1.0]) == 0
    assert distance(np.float32, [tiny], [-tiny]) == 2
    assert distance(np.float32, [1.0, 5.0], [1.0 + 2**-23, 5.0]) == 1
    assert distance(np.float16, [-1.0], [-1.0 - 2**-10]) == 1
    assert distance(np.float32, [np.nan, np.inf], [np.nan, np.inf]) == 0
    assert distance(np.float32, [np.nan], [1.0]) is None
    assert distance(np.float32, [], []) == 0
    assert compare.ulps(["3f80", "bf80"], ["3f82", "bf80"], "bfloat16") == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arguments": ["float32[8]"]}, "A and B have arguments of different shapes"),
        ({"inputs": 6}, "A and B have different inputs"),
        ({"outputs": [results.output(X[:3])]}, "A and B have results of different shapes or dtypes"),
        ({"failed": "NotImplementedError: no kernels", "refused": True}, "B: NotImplementedError: no kernels"),
        ({"name": "c"}, "not in B"),
    ],
)
def test_what_cannot_be_compared_is_named_with_the_reason(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    files = [save(tmp_path / "a", row("a", X), row("b", X)), save(tmp_path / "b", row("a", X), row("b", X) | change)]
    result = compare.compare(files)
    assert result.missing[reason] == ["matmul b"]
    assert [line.name for line, _ in result.pairs] == ["a"]
    assert f"Not compared, {reason}: matmul b" in invoke(*files).output


def test_what_was_compiled_is_not_taken_for_measured(tmp_path: Path) -> None:
    files = [save(tmp_path / "a", row("a", X)), compiled(tmp_path / "b", "a")]
    result = invoke(*files)
    assert result.exit_code == 0 and "compiled, not measured" in result.output
    comparison = compare.compare(files)
    assert list(comparison.measured) == ["A"] and not comparison.pairs
    assert comparison.verdict == "No two results can be compared bit by bit"
    assert "compiled; 1.05 MB" in report.html(comparison)


def test_the_report_needs_no_other_file_and_shows_the_comparison(tmp_path: Path) -> None:
    files = [
        save(tmp_path / "a.json", row("<a>", X), row("b", X)),
        save(tmp_path / "b.json", row("<a>", X), row("b", X + 1)),
        save(tmp_path / "c.json", row("<a>", X), fingerprint=OTHER),
        compiled(tmp_path / "d.json", "b"),
    ]
    out, folder = tmp_path / "report.html", tmp_path / "plots"
    result = invoke(*files, "--html", out, "--plots", folder)
    assert result.exit_code == 1, result.output  # the report of a broken promise is written too
    html = out.read_text()
    assert "1 of 2 results that must have equal bits differ" in html and "matmul b: A and B" in html
    assert "&lt;a&gt;" in html and "<a>" not in html
    assert "H200" in html and "compiled, not measured" in html and "prefers-color-scheme: dark" in html
    assert html.count("<svg") == 3
    assert not re.search(r"(src|href)=.(?!#)", html) and "url(http" not in html and "<script" not in html
    # The same results make the same report.
    assert report.html(compare.compare(files)) == html
    names = {"compare-share.png", "compare-over-stock.png", "compare-error.png"}
    assert {file.name for file in folder.iterdir()} == names
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in folder.iterdir())


def change(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content | fields


def change_row(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content | {"rows": [content["rows"][0] | fields]}


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda content: {key: value for key, value in content.items() if key != name}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda _: [1, 2], "is a JSON list"),
        (lambda _: {"workload": {}, "runs": {}}, "is a result of `python -m detjax.bench serve`"),
        (lambda _: {"x": 1, "y": 2}, "another JSON file, with the keys 'x', 'y'"),
        (change(version=2), "has version 2 of the format; accepted: version 1"),
        (change(kind="guessed"), "is of kind 'guessed'; accepted: measured, compiled"),
        (without("rows"), "is damaged: rows is missing"),
        (without("fingerprint"), "is damaged: fingerprint is missing"),
        (change(fingerprint={"jax": "1"}), "is damaged: its fingerprint lacks ['backend'"),
        (change(rows=[3]), "is damaged: row 1 is 3"),
        (change(peak={"chip": "x"}), "is damaged: flops of peak is missing"),
        (lambda content: content | {"rows": content["rows"] * 2}, "is damaged: row 2 repeats matmul | a"),
        (change_row(seconds=None), "is damaged: seconds of matmul | a is None"),
        (change_row(seconds={"median": 1.0, "spread": 0.0, "rounds": [-1.0]}), "seconds are [-1.0]"),
        (change_row(outputs=[{"sha256": "z" * 64}]), "the sha256"),
        (
            change_row(outputs=[results.output(X) | {"sample": ["0", "xy"]}]),
            "is damaged: matmul | a: its sample is not hexadecimal",
        ),
    ],
)
def test_files_of_other_origin_are_refused_by_name(tmp_path: Path, changed: Any, message: str) -> None:
    good = save(tmp_path / "good.json", row("a", X))
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(changed(copy.deepcopy(json.loads(good.read_text())))))
    result = invoke(good, bad)
    assert result.exit_code == 2
    assert str(bad) in result.output and message in result.output and "accepted: " in result.output


def test_files_that_are_no_json_are_refused_by_name(tmp_path: Path) -> None:
    good = save(tmp_path / "good.json", row("a", X))
    text = good.read_bytes()
    cut, empty, binary = (tmp_path / name for name in ("cut", "empty", "binary"))
    cut.write_bytes(text[: len(text) // 2])
    empty.write_bytes(b"")
    binary.write_bytes(b"\x89PNG\xff\xfe\x00")
    messages = {
        cut: "is not JSON, or was truncated",
        empty: "is empty",
        binary: "is not text",
        tmp_path / "none": "No such file",
        tmp_path: "Is a directory",
    }
    for file, message in messages.items():
        result = invoke(good, file)
        assert result.exit_code == 2 and f"{file}" in result.output and message in result.output, result.output
    alone = invoke(good)
    assert alone.exit_code == 2 and "1 files; accepted: 2 to 26" in alone.output


def test_results_of_releases_that_recorded_no_commit_can_be_read(tmp_path: Path) -> None:
    file = save(tmp_path / "a.json", row("a", X))
    content = json.loads(file.read_text())
    commit = content.pop("commit")
    assert results.read(file).commit == commit
    file.write_text(json.dumps(content))
    assert results.read(file).commit is None


def test_a_result_with_a_different_bit_in_its_second_output_is_not_equal(tmp_path: Path) -> None:
    files = [save(tmp_path / "a", row("a", X, X)), save(tmp_path / "b", row("a", X, nudged(X, 7, 1)))]
    ((_, bits),) = compare.compare(files).pairs
    assert bits.broken and not bits.equal


SHIPPED = sorted(
    file
    for file in (Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json")
    if file.name.startswith(("run-", "compile-"))
)


def test_every_result_that_ships_can_be_compared_and_older_ones_promise_nothing() -> None:
    assert len(SHIPPED) >= 7
    result = invoke(*SHIPPED)
    assert result.exit_code == 0, result.output
    comparison = compare.compare(SHIPPED)
    assert comparison.pairs and len(comparison.measured) == 3
    older = [label for label, one in comparison.results.items() if one.unrecorded]
    assert older
    for label in older:
        assert f"{label} is older: its release did not record" in result.output


def test_equal_fingerprints_with_fields_that_were_not_recorded_promise_no_equal_bits(tmp_path: Path) -> None:
    """The case of recorded fields is the control."""
    recorded = dataclasses.replace(
        FINGERPRINT, jax_options="{}", xla_options="0", libraries="{}", separated_fusions="[]"
    )
    for fingerprint, broken in ((recorded, 1), (dataclasses.replace(recorded, libraries="not recorded"), 0)):
        files = [save(tmp_path / f"{i}", row("a", X + i), fingerprint=fingerprint) for i in range(2)]
        assert len(compare.compare(files).broken) == broken
        content = json.loads(files[0].read_text())
        del content["fingerprint"]["xla_options"]
        files[0].write_text(json.dumps(content))
        assert not compare.compare([files[0], files[0]]).broken
        assert "xla_options" in results.read(files[0]).unrecorded


def test_tables_are_160_columns_wide_where_they_are_redirected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    result = commands.run(main, "compare", *SHIPPED[-2:])
    assert result.exit_code == 0, result.output
    assert 80 < max(map(len, result.output.splitlines())) <= 160
    monkeypatch.setenv("COLUMNS", "100")
    result = commands.run(main, "compare", *SHIPPED[-2:])
    assert max(len(line) for line in result.output.splitlines() if "µs" in line) <= 100


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_tables_fit_the_width_and_break_no_word(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    printed = commands.run(main, "compare", *SHIPPED[-2:]).output
    table = printed[: printed.index("Fingerprints")].splitlines()
    assert max(map(len, table)) <= columns
    words = {word for line in table for word in line.split()}
    shown = {word for line in compare.compare(SHIPPED[-2:]).lines for word in (line.operation, *line.name.split())}
    assert shown <= words
    content = json.loads(SHIPPED[0].read_text()), json.loads((SHIPPED[0].parent / "run-h200.json").read_text())
    for made, (one, columns_left_out) in zip(content, ((compiling, "by compiler"), (running, "GB/s")), strict=True):
        console = Console(width=columns, file=io.StringIO())
        console.print(one.table(made))
        lines = console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]
        assert max(map(len, lines)) <= columns
        assert all(any(f"  {row['name']} " in line for line in lines) for row in made["rows"])
        # What is left out is said after the table, in as many lines as it takes.
        notice = " ".join(lines).partition("Not shown:")[2]
        assert bool(notice) == (columns < 160), lines[-1]
        assert columns > 80 or columns_left_out in notice


def test_times_that_were_disturbed_are_shown_with_a_warning(tmp_path: Path) -> None:
    quiet, disturbed = row("a", X), row("b", X)
    disturbed["seconds"] |= {"spread": 3.48}
    files = [save(tmp_path / "a", quiet, disturbed), save(tmp_path / "b", quiet)]
    comparison = compare.compare(files)
    (warning,) = comparison.warnings
    assert warning.startswith("Warning (A): rounds of 1 of 2 cases") and "b over 348%" in warning
    output = invoke(*files, "--html", str(tmp_path / "report.html")).output
    assert "±348%" in output and "Warning (A)" in output
    assert "Warning (A)" in (tmp_path / "report.html").read_text()
    assert "Warning" not in invoke(files[1], files[1]).output

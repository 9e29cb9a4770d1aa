"""An emulator of PTX, for kernels of one CTA whose threads work with registers, shared memory and arrays of words.

    kernel, = kernels(text)
    kernel.run([x, y])  # arrays of 4-byte words, which the kernel changes
    kernel.run([x, y], cta=(1, 2))  # another CTA of the grid

Each thread of a CTA has registers. The threads at the lowest instruction take it together, so that threads meet again
after a branch. Memory that nobody wrote holds `POISON`. What a kernel may not do raises an AssertionError: leave an
array; read what another thread wrote, or replace what it read or wrote, before a barrier at which both waited; or let
the threads of a warp shuffle numbers at different places.

The hardware's approximations, such as `ex2` and `rcp`, are NumPy's: numbers that follow from them have other last bits.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np

POISON: Final = 0xDEADBEEF
"""The content of a word in shared memory that nobody wrote."""
_WARP: Final = 32
_SPACE: Final = 1 << 32
"""Bytes between the addresses of arrays. Shared memory is at address 0."""

type Threads = np.ndarray
"""A number, or a truth value, of each thread."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction, as in `@!%p1 st.global.b32 [%rd1+4], %r1`."""

    name: str
    operands: tuple[str, ...]
    guard: str = ""
    """A predicate's name, following "!" if it must be false."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel's instructions, and the index that each label stands for."""

    name: str
    threads: int
    parameters: tuple[str, ...]
    code: tuple[Instruction, ...]
    labels: Mapping[str, int]

    def run(
        self, arrays: Sequence[np.ndarray], cta: tuple[int, int] = (0, 0), *, approximate_divisor: float | None = None
    ) -> np.ndarray:
        """Runs a CTA of the grid, which changes the arrays: one of 4-byte words for each parameter.

        Divisions by `approximate_divisor` may be approximations. Returns the words that are then in shared memory.
        """
        assert len(arrays) == len(self.parameters), f"{self.name} has {len(self.parameters)} parameters"
        for array in arrays:
            assert array.itemsize == 4 and array.flags.c_contiguous
        running = _Cta(self, [array.reshape(-1).view(np.uint32) for array in arrays], cta, approximate_divisor)
        running.run()
        return running.memory[0]


def kernels(text: str) -> list[Kernel]:
    """Returns the kernels of a PTX module."""
    entries = re.split(r"^\.visible \.entry ", text, flags=re.MULTILINE)[1:]
    return [_parsed(entry[: entry.index("\n}")]) for entry in entries]


def _parsed(text: str) -> Kernel:
    head, _, body = text.partition("\n{\n")
    (threads,) = re.findall(r"\.(?:maxntid|reqntid) (\d+), 1, 1", head)
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in re.split(r"[;\n]", re.sub(r"//.*", "", body)):
        statement = line.strip().strip("{} ") if line.strip()[:1] in ("{", "}") else line.strip()  # a scope's ends
        if label := re.fullmatch(r"(\S+):", statement):
            labels[label[1]] = len(code)
        elif statement and not statement.startswith("."):
            guard, name, operands = re.fullmatch(r"(?:@(\S+)\s+)?(\S+)\s*(.*)", statement).groups()  # pyright: ignore[reportOptionalMemberAccess]
            separate = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", operands)
            code.append(Instruction(name, tuple(separate), guard or ""))
    return Kernel(head[: head.index("(")], int(threads), tuple(re.findall(r"\S+_param_\d+", head)), tuple(code), labels)


_COMPARISONS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}
_SHIFTS: Final = {"shl": np.left_shift, "shr": np.right_shift}
_ARITHMETIC: Final[Mapping[str, Callable[..., Any]]] = {
    "cvta": lambda x: x,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mad": lambda x, y, z: x * y + z,
    "fma": lambda x, y, z: np.float64(x) * y + z,  # rounded twice: exact for numbers of few bits
    "div": np.divide,  # correctly rounded
    "abs": np.abs,
    "neg": np.negative,
    "min": np.minimum,  # of numbers that are not NaN, or with .NaN
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "popc": np.bitwise_count,
    "ex2": np.exp2,
    "rcp": np.reciprocal,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "bfe": lambda x, start, length: (x >> start) & ((np.uint32(1) << length) - np.uint32(1)),
}


_PAIRS: Final = {"bf16x2": ml_dtypes.bfloat16, "f16x2": np.float16, "e4m3x2": ml_dtypes.float8_e4m3fn}
_LARGEST_E4M3: Final = 448


def _type_of(name: str) -> np.dtype:
    if name == "pred":
        return np.dtype(bool)
    if name == "bf16":
        return np.dtype(ml_dtypes.bfloat16)
    kind = {"b": "u", "u": "u", "s": "i", "f": "f"}[name[0]]
    return np.dtype(f"{kind}{int(name[1:]) // 8}")


class _Accesses:
    """The last access to each word of an array, of one kind: its thread, and the thread's period."""

    def __init__(self, words: int) -> None:
        self.thread, self.period = np.full(words, -1), np.zeros(words, np.int64)


class _Cta:
    """A CTA that runs."""

    def __init__(
        self, kernel: Kernel, arrays: list[np.ndarray], cta: tuple[int, int], approximate_divisor: float | None
    ) -> None:
        self.kernel, self.approximate_divisor = kernel, approximate_divisor
        self.memory = [np.full(228 * 256, POISON, np.uint32), *arrays]
        self.registers: dict[str, Threads] = {"%tid.x": np.arange(kernel.threads, dtype=np.uint32)}
        for axis, number in zip("xy", cta, strict=True):
            self.registers[f"%ctaid.{axis}"] = np.full(kernel.threads, number, np.uint32)
        self.next = np.zeros(kernel.threads, np.int64)
        """The next instruction of each thread."""
        self.barrier = np.full(kernel.threads, -1)
        """The barrier at which a thread waits, or -1."""
        self.vote = np.zeros(kernel.threads, bool)
        """The predicate that a thread brought to its last barrier that combines them."""
        self.period = np.ones(kernel.threads, np.int64)
        """A number for each thread, which rises at barriers."""
        self.seen = np.zeros((kernel.threads, kernel.threads), np.int64)
        """For each thread the last period of each other one that ended before a barrier of both."""
        self.reads, self.writes = ([_Accesses(len(memory)) for memory in self.memory] for _ in range(2))

    def run(self) -> None:
        """Runs all instructions of all threads."""
        end = len(self.kernel.code)
        with np.errstate(all="ignore"):
            while (self.next < end).any():
                is_ready = (self.barrier < 0) & (self.next < end)
                assert is_ready.any(), f"{self.kernel.name}: all threads wait at barriers {set(self.barrier.tolist())}"
                place = self.next[is_ready].min()
                taken = is_ready & (self.next == place)
                self.next[taken] += 1
                self.step(self.kernel.code[place], taken)

    def step(self, instruction: Instruction, taken: Threads) -> None:
        """Runs an instruction in the threads that take it."""
        if guard := instruction.guard:
            predicate = self.registers[guard.removeprefix("!")]
            taken = taken & (~predicate if guard.startswith("!") else predicate)
        if not taken.any():
            return
        name, *options = re.split(r"::|\.", instruction.name)
        run = getattr(self, f"_{name}", None)
        if run is not None:
            run(taken, options, *instruction.operands)
        elif name in _ARITHMETIC:
            target, *operands = instruction.operands
            self.set(target, taken, self._computed(name, options, operands))
        else:
            raise NotImplementedError(
                f"ptx: {instruction.name} {', '.join(instruction.operands)}; add it to _ARITHMETIC"
            )

    def _computed(self, name: str, options: list[str], operands: list[str]) -> Threads:
        if (pair := _PAIRS.get(options[-1])) is not None:
            # Products and sums of such numbers are exact in float32, or rounded there so that nothing is rounded twice.
            numbers = [self.get(operand, np.uint32).view(pair).astype(np.float32) for operand in operands]
            return np.asarray(_ARITHMETIC[name](*numbers)).astype(pair).view(np.uint32)
        dtype = _type_of(options[-1])
        assert name not in ("min", "max") or dtype.kind != "f" or "NaN" in options
        values = [self.get(operand, dtype) for operand in operands]
        is_rounded = name != "div" or "rn" in options or (values[1] == self.approximate_divisor).all()
        assert is_rounded, f"{self.kernel.name}: a division is not correctly rounded: {options}"
        if "wide" in options or "hi" in options:
            values = [value.astype(f"{dtype.kind}{2 * dtype.itemsize}") for value in values]
        if "hi" in options:
            return (np.asarray(_ARITHMETIC[name](*values)) >> (8 * dtype.itemsize)).astype(dtype)
        return np.asarray(_ARITHMETIC[name](*values)).astype(values[0].dtype)

    # --- registers ------------------------------------------------------------------------------------------------

    def get(self, operand: str, dtype: Any) -> Threads:
        """Returns an operand's value in all threads: a register, a number, or the address of shared memory."""
        dtype = np.dtype(dtype)
        if operand.startswith("%"):
            return self.registers[operand].view(dtype)
        if operand.startswith("0f"):
            return np.full(self.kernel.threads, int(operand[2:], 16), np.uint32).view(dtype)
        value = 0 if "shmem" in operand else int(operand, 0)
        kind = np.dtype(f"u{dtype.itemsize}") if dtype.kind == "f" else dtype
        return np.full(self.kernel.threads, value % 2 ** (8 * kind.itemsize), np.uint64).astype(kind).view(dtype)

    def set(self, register: str, taken: Threads, values: Threads) -> None:
        """Sets a register of some threads."""
        bits = values if values.dtype == bool else values.view(f"u{values.itemsize}")
        if bits.dtype in (np.uint8, np.uint16):  # a load extends to the register
            bits = bits.astype(np.uint16 if register.startswith("%rs") else np.uint32)
        if bits.dtype == np.uint32 and register.startswith("%rd"):
            bits = values.astype(np.int64).view(np.uint64) if values.dtype.kind == "i" else bits.astype(np.uint64)
        before = self.registers.get(register)
        self.registers[register] = bits.copy() if before is None else np.where(taken, bits, before)

    def _selp(self, taken: Threads, options: list[str], target: str, *operands: str) -> None:
        yes, no = (self.get(operand, _type_of(options[-1])) for operand in operands[:2])
        self.set(target, taken, np.where(self.registers[operands[2]], yes, no))

    def _setp(self, taken: Threads, options: list[str], target: str, *operands: str) -> None:
        self.set(target, taken, _COMPARISONS[options[0]](*(self.get(x, _type_of(options[-1])) for x in operands)))

    def _mov(self, taken: Threads, options: list[str], target: str, source: str) -> None:
        dtype = _type_of(options[-1])
        if source.startswith("{"):
            low, high = (self.get(half, np.uint16).astype(np.uint32) for half in re.findall(r"[^{},\s]+", source))
            self.set(target, taken, low | high << np.uint32(16))
            return
        if not target.startswith("{"):
            self.set(target, taken, self.get(source, dtype))
            return
        low, high = re.findall(r"[^{},\s]+", target)
        halves = self.get(source, np.uint32).view(np.uint16).reshape(-1, 2)
        for place, register in enumerate((low, high)):
            if register != "_":
                self.set(register, taken, halves[:, place].copy())

    def _prmt(self, taken: Threads, options: list[str], target: str, low: str, high: str, selector: str) -> None:
        pairs = np.stack([self.get(low, np.uint32), self.get(high, np.uint32)], axis=1).view(np.uint8)
        places = self.get(selector, np.uint32)[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 15
        assert (places[taken] < 8).all()
        chosen = np.take_along_axis(pairs, (places % 8).astype(np.intp), axis=1)
        self.set(target, taken, chosen.view(np.uint32).reshape(-1))

    def _lop3(self, taken: Threads, options: list[str], target: str, *operands: str) -> None:
        *sources, table = operands
        bits = [self.get(source, np.uint32) for source in sources]
        result = np.zeros_like(bits[0])
        for place in range(8):
            if int(table, 0) >> place & 1:
                chosen = [x if place >> (2 - i) & 1 else ~x for i, x in enumerate(bits)]
                result |= chosen[0] & chosen[1] & chosen[2]
        self.set(target, taken, result)

    def _cvt(self, taken: Threads, options: list[str], target: str, *sources: str) -> None:
        to, source = options[-2:]
        if to in _PAIRS and source in _PAIRS:
            assert (to, source) == ("f16x2", "e4m3x2")  # exact
            codes = self.get(sources[0], np.uint16).view(_PAIRS[source])
            self.set(target, taken, codes.astype(_PAIRS[to]).view(np.uint32))
        elif to in _PAIRS:
            # The first operand is the upper half.
            numbers = np.stack([self.get(operand, _type_of(source)) for operand in sources[::-1]], axis=1)
            assert "rn" in options and (to == "e4m3x2") == ("satfinite" in options)
            held = np.clip(numbers, -_LARGEST_E4M3, _LARGEST_E4M3) if to == "e4m3x2" else numbers
            pairs = held.astype(_PAIRS[to])
            self.set(target, taken, pairs.view(f"u{2 * pairs.itemsize}").reshape(-1))
        else:
            number = self.get(sources[0], _type_of(source))
            are_integers = [dtype.kind in "iu" for dtype in (_type_of(to), number.dtype)]
            is_exact = _type_of(to).itemsize > number.itemsize or "rn" in options
            assert all(are_integers) or (is_exact and not any(are_integers))
            self.set(target, taken, number.astype(_type_of(to)))

    def _shift(self, taken: Threads, options: list[str], target: str, *operands: str, name: str) -> None:
        dtype = _type_of(options[-1])
        places = self.get(operands[1], np.uint32)
        assert (places[taken] < 8 * dtype.itemsize).all()
        self.set(target, taken, _SHIFTS[name](self.get(operands[0], dtype), places.astype(dtype)))

    _shl = functools.partialmethod(_shift, name="shl")
    _shr = functools.partialmethod(_shift, name="shr")

    # --- memory ---------------------------------------------------------------------------------------------------

    def _words(self, taken: Threads, operand: str, space: str, unit: int = 4) -> tuple[int, np.ndarray, np.ndarray]:
        """Returns the number of the array that an address is in, and for each thread the word and the byte in it."""
        base, _, offset = operand.strip("[]").partition("+")
        address = self.get(base, np.uint64 if base.startswith("%rd") or "shmem" in base else np.uint32)[taken]
        address = address.astype(np.int64) + int(offset or 0)
        (number,) = {*(address // _SPACE).tolist()}
        assert (number == 0) == (space == "shared"), f"{self.kernel.name}: {operand} is not in {space} memory"
        index, size = address % _SPACE // 4, len(self.memory[number])
        assert index.max() < size, f"{self.kernel.name}: {operand} leaves an array"
        assert not (address % unit).any(), f"{self.kernel.name}: {operand} is not a multiple of {unit} bytes"
        return number, index, address % 4

    def _read(self, taken: Threads, number: int, index: np.ndarray) -> np.ndarray:
        """Returns words of an array."""
        assert self._follows(self.writes[number], taken, index).all(), f"{self.kernel.name}: a thread reads too early"
        self._log(self.reads[number], taken, index)
        return self.memory[number][index]

    def _write(self, taken: Threads, number: int, index: np.ndarray, words: np.ndarray) -> None:
        """Writes words of an array. Threads may write the same word if they write the same to it."""
        follows = self._follows(self.writes[number], taken, index) & self._follows(self.reads[number], taken, index)
        memory = self.memory[number]
        assert (follows | (memory[index] == words)).all(), f"{self.kernel.name}: a thread writes too early"
        memory[index] = words
        assert (memory[index] == words).all(), f"{self.kernel.name}: threads write different numbers to a word"
        self._log(self.writes[number], taken, index)

    def _follows(self, accesses: _Accesses, taken: Threads, index: np.ndarray) -> Threads:
        """Returns whether the last accesses to words were before a barrier of their threads and the ones here."""
        thread, other = np.flatnonzero(taken), accesses.thread[index]
        return (other < 0) | (other == thread) | (self.seen[thread, other] >= accesses.period[index])

    def _log(self, accesses: _Accesses, taken: Threads, index: np.ndarray) -> None:
        accesses.thread[index], accesses.period[index] = np.flatnonzero(taken), self.period[taken]

    def _ld(self, taken: Threads, options: list[str], target: str, address: str) -> None:
        if options[0] == "param":
            number = self.kernel.parameters.index(address.strip("[]"))
            self.set(target, taken, np.full(self.kernel.threads, _SPACE * (number + 1), np.uint64))
            return
        registers, size = re.findall(r"%\w+", target), _type_of(options[-1]).itemsize
        space = "shared" if options[0] == "shared" else "global"
        number, index, byte = self._words(taken, address, space, len(registers) * size)
        for place, register in enumerate(registers):
            values = np.zeros(self.kernel.threads, f"u{size}")
            first = byte + place * size
            words = self._read(taken, number, index + first // 4)
            values[taken] = words >> (8 * (first % 4)).astype(np.uint32) if size < 4 else words
            self.set(register, taken, values)

    def _st(self, taken: Threads, options: list[str], address: str, source: str) -> None:
        words = re.findall(r"[^{},\s]+", source)
        assert _type_of(options[-1]).itemsize == 4
        number, index, _ = self._words(taken, address, options[0], 4 * len(words))
        for place, word in enumerate(words):
            self._write(taken, number, index + place, self.get(word, np.uint32)[taken])

    def _red(self, taken: Threads, options: list[str], address: str, source: str) -> None:
        assert options == ["shared", "or", "b32"]
        number, index, _ = self._words(taken, address, "shared")
        # Threads need not wait for one another, so this is not checked as a write.
        np.bitwise_or.at(self.memory[number], index, self.get(source, np.uint32)[taken])
        self._log(self.writes[number], taken, index)

    # --- threads --------------------------------------------------------------------------------------------------

    def _bra(self, taken: Threads, options: list[str], label: str) -> None:
        self.next[taken] = self.kernel.labels[label]

    def _ret(self, taken: Threads, options: list[str]) -> None:
        self.next[taken] = len(self.kernel.code)

    def _fence(self, taken: Threads, options: list[str]) -> None:
        """Does nothing: all writes are seen at once."""

    def _bar(self, taken: Threads, options: list[str], *operands: str) -> None:
        """Waits. With `red.or.pred` all threads of the barrier learn whether any of them brought a true predicate."""
        assert options in (["sync"], ["red", "or", "pred"])
        target, *rest = operands if "red" in options else ("", *operands)
        barrier, threads, vote = (*rest, "", "")[:3]
        numbers = self.get(barrier, np.uint32)
        self.barrier[taken] = numbers[taken]
        if vote:
            self.vote[taken] = self.registers[vote][taken]
        for number in np.unique(numbers[taken]):
            is_waiting, expected = self.barrier == number, int(threads or self.kernel.threads)
            assert is_waiting.sum() <= expected, (
                f"{self.kernel.name}: {is_waiting.sum()} threads are at barrier {number}"
            )
            if is_waiting.sum() == expected:
                if vote:
                    assert np.ptp(self.next[is_waiting]) == 0, f"{self.kernel.name}: threads vote on different things"
                    self.set(target, is_waiting, np.full_like(self.vote, self.vote[is_waiting].any()))
                self.barrier[is_waiting] = -1
                seen = self.seen[is_waiting].max(axis=0)
                self.seen[is_waiting] = np.where(is_waiting, self.period, seen)
                self.period[is_waiting] += 1

    def _warps(self, values: Threads, taken: Threads) -> np.ndarray:
        """Returns the values by warp. All threads of a warp must be here."""
        whole = taken.reshape(-1, _WARP)
        assert (whole.all(axis=1) == whole.any(axis=1)).all(), f"{self.kernel.name}: threads of a warp are not here"
        return values.reshape(-1, _WARP)

    def _elect(self, taken: Threads, options: list[str], target: str, mask: str) -> None:
        lane = self._warps(self.registers["%tid.x"] % np.uint32(_WARP), taken).reshape(-1)
        number, predicate = target.split("|")
        self.set(number, taken, np.zeros_like(lane))
        self.set(predicate, taken, lane == 0)

    def _shfl(self, taken: Threads, options: list[str], target: str, *operands: str) -> None:
        source, distance = operands[0], int(operands[1])
        assert (options[1], int(operands[2]), operands[3]) in {("up", 0, "-1"), ("bfly", 31, "-1"), ("idx", 31, "-1")}
        lane = np.arange(_WARP)
        chosen = {
            "up": np.where(lane < distance, lane, lane - distance),
            "bfly": lane ^ distance,
            "idx": 0 * lane + distance,
        }
        values = self._warps(self.get(source, np.uint32), taken)
        self.set(target, taken, values[:, chosen[options[1]]].reshape(-1))

    def _redux(self, taken: Threads, options: list[str], target: str, source: str, mask: str) -> None:
        dtype = _type_of(options[-1])
        values = self._warps(self.get(source, dtype), taken)
        reduced = {"max": np.max, "min": np.min, "add": np.sum}[options[1]](values, axis=1).astype(dtype)
        self.set(target, taken, np.repeat(reduced, _WARP))

"""The cache of compiled programs: whole files only, of the same programs and of the same fingerprint."""

import dataclasses
import errno
import fcntl
import functools
import importlib.metadata
import os
from pathlib import Path
from typing import Any

import jax
import pytest

import detjax
from detjax.engine import prepare_cache, program_cache
from detjax.engine.program import Parameters
from detjax.engine.program_cache import ProgramCache
from detjax.engine.step_programs import StepPrograms
from detjax.models.network import split
from tests.support.small_loops import VARIANTS, small_loop, small_model

KEY = ("_note_seen", 1024)


@functools.cache
def programs() -> StepPrograms:
    return small_loop(VARIANTS[2:]).programs()


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*.program"))


def test_what_was_stored_is_found_by_another_cache(tmp_path: Path) -> None:
    ProgramCache(tmp_path, programs()).store(KEY, b"a program")
    assert ProgramCache(tmp_path, programs()).load(KEY) == b"a program"
    assert ProgramCache(tmp_path, small_loop(VARIANTS[2:]).programs()).load(KEY) == b"a program"
    other = next(key for key in programs().by_key() if key != KEY)
    assert ProgramCache(tmp_path, programs()).load(other) is None
    assert [path.name for path in tmp_path.rglob(".*")] == []


def test_each_fingerprint_has_its_own_programs(tmp_path: Path) -> None:
    for backend in ("portable", "stock"):
        with detjax.use_backend(backend):
            cache = ProgramCache(tmp_path, programs())
            assert cache.load(KEY) is None
            cache.store(KEY, backend.encode())
    assert len(list(tmp_path.iterdir())) == 2


def test_a_name_depends_on_all_that_the_program_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = programs()
    (variant,) = ours.variants
    changed = {
        "the weights": dataclasses.replace(ours, parameters=Parameters(ours.parameters.weights[1:])),
        "the network": dataclasses.replace(ours, network=split(small_model().layers[0])[0]),
        "the state": dataclasses.replace(ours, state=ours.state[1:]),
        "the batches": dataclasses.replace(ours, batches=ours.batches[:1]),
    }
    before = program_cache._names(ours)
    layers = {key: name for key, name in before.items() if key[0] == "_forward"}  # pyright: ignore[reportIndexIssue]
    for what, programs_ in changed.items():
        names = program_cache._names(programs_)
        same = set(names.values()) & set(layers.values())
        assert len(same) == (1 if what == "the batches" else 0), what
    assert len(set(before.values())) == len(before)
    other = dataclasses.replace(ours, variants=(variant._replace(filtered=False),))
    assert len(set(program_cache._names(other).values()) - set(before.values())) == 1


def test_a_name_depends_on_each_part_of_a_network_alone() -> None:
    """Two networks differ in one part only where a developer changes how models are split, which a name must show."""
    ours = programs()
    network, weights = ours.network, ours.parameters.weights
    other = split(small_model().layers[0])[0]
    parts: dict[str, Any] = {
        "graph": other.graph,
        "tree": other.tree,
        "paths": (network.paths[0][:-1], *network.paths[1:]),
        "order": network.order[::-1],
    }
    changed = [dataclasses.replace(ours, network=dataclasses.replace(network, **{name: parts[name]})) for name in parts]
    first = weights[0]
    for shape, dtype in (((*first.shape[:-1], first.shape[-1] + 1), first.dtype), (first.shape, "float16")):
        one = jax.ShapeDtypeStruct(shape, dtype)
        changed.append(dataclasses.replace(ours, parameters=Parameters((one, *weights[1:]))))
    names = [name for some in (ours, *changed) for name in program_cache._names(some).values()]
    assert len({*names}) == len(names) == 7 * len(ours.by_key())


def test_a_name_depends_on_the_shapes_the_dtypes_and_the_structure_of_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = programs()
    (key, program), *_ = ours.by_key().items()
    array = jax.ShapeDtypeStruct((3,), "int32")
    arguments: list[tuple[Any, ...]] = [
        (array,),
        (jax.ShapeDtypeStruct((4,), "int32"),),
        (jax.ShapeDtypeStruct((3,), "uint32"),),
        ((array,),),
        ([array],),
        (array, None),
        (None, array),
    ]
    names = []
    for some in arguments:
        monkeypatch.setattr(StepPrograms, "by_key", lambda _, some=some: {key: program._replace(args=some)})
        names.append(program_cache._names(ours)[key])
    monkeypatch.setattr(StepPrograms, "by_key", lambda _: {"another key": program._replace(args=arguments[0])})
    names.append(program_cache._names(ours)["another key"])
    assert len({*names}) == len(names) == 8


def test_a_name_depends_on_the_fusions_that_are_switched_off() -> None:
    """Also where no bit depends on them, so that the fingerprint is the same: the programs are others."""
    plain, digest = program_cache._names(programs()), detjax.fingerprint().digest
    every = {*plain.values()}
    for names in (("qk_rope",), ("rms_norm_residual",), ("qk_rope", "rms_norm_residual")):
        with detjax.without_fusions(*names):
            assert detjax.fingerprint().digest == digest
            others = program_cache._names(programs())
        assert others.keys() == plain.keys() and not every & {*others.values()}
        every |= {*others.values()}
    assert program_cache._names(programs()) == plain


def test_a_name_depends_on_this_packages_files_and_on_the_libraries_that_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine").mkdir()
    monkeypatch.setattr(program_cache, "__file__", str(tmp_path / "engine" / "program_cache.py"))
    one, two = tmp_path / "one.py", tmp_path / "engine" / "two.py"

    def digest() -> str:
        return program_cache._sources.__wrapped__()

    one.write_text("a = 1\n")
    two.write_text("b = 2\n")
    digests = [digest()]
    for path, text in ((one, "a = 2\n"), (two, "b = 3\n"), (one, "a = 2\nb")):
        path.write_text(text)
        digests.append(digest())
    one.rename(tmp_path / "three.py")
    digests.append(digest())
    version = importlib.metadata.version
    for library in ("flax", "jaxtyping"):
        monkeypatch.setattr(
            importlib.metadata, "version", lambda name, library=library: version(name) + "x" * (name == library)
        )
        digests.append(digest())
    assert len({*digests}) == 7
    monkeypatch.undo()
    (tmp_path / "notes.txt").write_text("no source")
    before = program_cache._names(programs())
    monkeypatch.setattr(program_cache, "_sources", lambda: "other files")
    assert not {*program_cache._names(programs()).values()} & {*before.values()}


def test_programs_of_a_network_with_unknown_classes_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_cache, "_OWN_PACKAGES", {"flax"})
    cache = ProgramCache(tmp_path, programs())
    cache.store(KEY, b"a program")
    cache.remove(KEY)
    assert cache.load(KEY) is None
    assert not files(tmp_path)


@pytest.mark.parametrize("content", [b"", b"short", None])
def test_a_file_that_is_not_whole_is_removed(tmp_path: Path, content: bytes | None) -> None:
    cache = ProgramCache(tmp_path, programs())
    cache.store(KEY, b"a program")
    (file,) = files(tmp_path)
    file.write_bytes(file.read_bytes()[:-1] if content is None else content)
    assert cache.load(KEY) is None
    assert not files(tmp_path)
    cache.store(KEY, b"a program")
    assert cache.load(KEY) == b"a program"


def test_files_of_ended_processes_are_removed_and_those_of_running_ones_stay(tmp_path: Path) -> None:
    ProgramCache(tmp_path, programs())
    (directory,) = tmp_path.iterdir()
    ended, alive, treasure = directory / ".unpublished-1", directory / ".unpublished-2", tmp_path / "treasure"
    for file in (ended, alive, treasure):
        file.write_bytes(b"half")
    (directory / ".unpublished-3").symlink_to(treasure)
    with open(alive, "r+b") as written:
        fcntl.flock(written, fcntl.LOCK_EX)
        ProgramCache(tmp_path, programs())
        assert (ended.exists(), alive.exists(), treasure.read_bytes()) == (False, True, b"half")


def test_an_interrupted_process_leaves_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    cache = ProgramCache(tmp_path, programs())
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.store(KEY, b"a program")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_full_disk_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = ProgramCache(tmp_path, programs())
    cache.report_failures()
    assert not caplog.messages
    monkeypatch.setattr(os, "replace", full)
    cache.store(KEY, b"a program")
    cache.store(KEY, b"a program")
    cache.report_failures()
    (message,) = caplog.messages
    assert message.startswith("2 of the compiled programs could not be written")
    assert message.endswith("are compiled again at the next start; the first one: No space left on device")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in (0o770, 0o707, 0o1777):
        tmp_path.chmod(mode)
        with pytest.raises(OSError, match=f"{tmp_path}.* can be written by other users .mode {mode:o}.*accepted:"):
            ProgramCache(tmp_path, programs())
    tmp_path.chmod(0o755)
    prepare_cache(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: mode != os.W_OK | os.X_OK)
        with pytest.raises(OSError, match=f"{tmp_path}.* cannot be written; accepted: "):
            prepare_cache(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file.* cannot be made \(.*\); accepted: "):
        prepare_cache(tmp_path / "file")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(OSError, match=r"belongs to user .* this process to user 12345; accepted: "):
            prepare_cache(tmp_path)
    before = os.umask(0)
    try:
        prepare_cache(tmp_path / "new" / "cache")
    finally:
        os.umask(before)
    assert (tmp_path / "new" / "cache").stat().st_mode & 0o777 == 0o700

"""The cache that .ci/run keeps between runs (.ci/cache.py): results of compilers, none of which another
source, flag or compiler finds."""
from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sqlite3
import types
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import ROOT
from tinygrad_nv import cache as caches
from tinygrad_nv.ptx import assemble
from tinygrad_nv.runtime.cpu.clang import ToolchainCompiler
from tinygrad_nv.toolchain import find_compiler

KERNEL = ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry made() {{\n  {}ret;\n}}\n"


@pytest.fixture
def ci() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("ci_cache", ROOT / ".ci/cache.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fill(place: Path) -> None:
    """Makes a cache directory as a run leaves it."""
    for name in ("tinygrad_nv/cubin/a.json", "tinygrad_nv/zig-1/o/b", "tinygrad_nv/tinygrad_nv.key",
                 "tinygrad_nv/cpu.json", "tinygrad_nv/schedules.json", "tinygrad_nv/steps/c.xz",
                 "tinygrad_nv/tokens/d", "tinygrad/tinygrad_nv.key", "huggingface/e"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(name)
    with contextlib.closing(sqlite3.connect(place / "tinygrad/cache.db")) as opened:
        for table in ("compile_clang_x_22", "compile_tinygrad_nv_ptx_6_22", "nv_program_3_22", "beam_22"):
            opened.execute(f"CREATE TABLE {table} (key text, val blob)")
            opened.execute(f"INSERT INTO {table} VALUES ('a', 'b')")
        opened.commit()


def files(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}


def test_only_what_compilers_made_is_kept(ci: types.ModuleType, tmp_path: Path):
    """No program of ours, nothing that was tuned, measured, captured or downloaded."""
    fill(tmp_path / "run")
    (tmp_path / "kept").mkdir()
    ci.main("take", tmp_path / "kept", tmp_path / "first")
    assert not (tmp_path / "first").exists()
    for _ in range(2): ci.main("keep", tmp_path / "run", tmp_path / "kept")
    ci.main("take", tmp_path / "kept", tmp_path / "next")
    assert files(tmp_path / "next") == {"tinygrad_nv/cubin/a.json", "tinygrad_nv/zig-1/o/b",
                                        "tinygrad_nv/tinygrad_nv.key", "tinygrad/tinygrad_nv.key",
                                        "tinygrad/cache.db"}
    with contextlib.closing(sqlite3.connect(tmp_path / "next/tinygrad/cache.db")) as opened:
        assert opened.execute("SELECT name FROM sqlite_master").fetchall() == [("compile_clang_x_22",)]
        assert opened.execute("SELECT * FROM compile_clang_x_22").fetchall() == [("a", "b")]


def test_what_writes_results_is_part_of_the_name(ci: types.ModuleType, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch):
    """Results of a changed writer are not served; three folders stay, and none above the limit."""
    for each in ci.WRITERS:
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / each, tmp_path / each)
    monkeypatch.setattr(ci, "ROOT", tmp_path)
    fill(tmp_path / "run")
    kept = tmp_path / "kept"
    (kept / "compilers").mkdir(parents=True)
    found = []
    for time, each in enumerate(ci.WRITERS[:5]):
        (tmp_path / each).write_text("changed")
        ci.keep(tmp_path / "run", kept)
        found.append(ci.place(kept))
        os.utime(found[-1], (time, time))
    assert len(set(found)) == 5
    assert set(kept.iterdir()) == {kept / "compilers", *found[2:]}
    monkeypatch.setattr(ci, "LIMIT", 10)
    ci.keep(tmp_path / "run", kept)
    assert not found[-1].exists()


def test_ptxas_is_asked_again_for_another_source_flag_or_version(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_CACHE_DIR", str(tmp_path))
    cubins = caches.folder("cubin")

    def made(text: str, flags: tuple[str, ...] = ()) -> int:
        assemble.assemble(KERNEL.format(text), "sm_90a", flags)
        return len(list(cubins.iterdir()))
    assert (made(""), made(""), made("bar.sync 0; "), made("", ("-O1",))) == (1, 1, 2, 3)
    version = assemble.version
    monkeypatch.setattr(assemble, "version", lambda program: version(program) + " of another day")
    assert (made(""), made("")) == (4, 4)


def test_clang_has_a_table_for_each_compiler_and_command():
    found = find_compiler()
    keys = {ToolchainCompiler(["x86_64", arch], compiler).cachekey for arch in ("x86-64-v2", "x86-64-v3")
            for compiler in (found, replace(found, identity="ziglang-another"))}
    assert len(keys - {None}) == 4

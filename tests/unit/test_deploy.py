"""The cache that .ci/run keeps between runs (.ci/cache.py): results of compilers, none of which another
source, flag or compiler finds. Files that other programs read: containers, dashboards, workflows,
recipes. What they name is there."""
from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.support import ROOT
from tinygrad_nv import cache as caches
from tinygrad_nv import cli
from tinygrad_nv.ptx import assemble
from tinygrad_nv.runtime.cpu.clang import ToolchainCompiler
from tinygrad_nv.server.metrics import Metrics
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


DEPLOY = ROOT / "deploy"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
LISTS = [".pre-commit-config.yaml", "justfile", ".ci/nightly",
         *(str(each.relative_to(ROOT)) for each in WORKFLOWS)]
FIELDS = ("running", "waiting", "kv_used", "preempted", "prefix_queries", "prefix_hits", "prompt_tokens",
          "generated_tokens", "steps")


def read_yaml(path: str) -> Any: return yaml.safe_load((ROOT / path).read_text())


def served() -> set[str]:
    """Returns the samples of /metrics, by the names that queries have."""
    stats = SimpleNamespace(**dict.fromkeys(FIELDS, 1), adapters=None)
    metrics = Metrics("a", 100, lambda: stats)
    metrics.success.labels("a", "stop").inc()
    metrics.http_requests.labels("GET", "/health", "200").inc()
    return set(re.findall(r"(?m)^(tinygrad_nv:\w+)", metrics.text().decode()))


def test_the_dashboard_asks_for_metrics_that_a_server_has():
    text = (DEPLOY / "grafana" / "dashboards" / "serving.json").read_text()
    board = json.loads(text)
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"tinygrad_nv:\w+", query)}
    assert len(queries) >= 15
    assert asked <= served()
    assert set(re.findall(r"tinygrad_nv:\w+", text)) <= served()
    assert "tinygrad_nv:num_requests" not in served()
    sources = read_yaml("deploy/grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {each["uid"] for each in sources}


def test_services_mount_files_that_are_there_and_call_each_other_by_name():
    services = read_yaml("deploy/compose.yaml")["services"]
    mounts = [each.split(":")[0] for service in services.values() for each in service["volumes"]]
    files = [each for each in mounts if each.startswith("./")]
    assert len(files) == 3
    assert all((DEPLOY / each).exists() for each in files)
    ports = [each for service in services.values() for each in service.get("ports", ())]
    assert all(each.startswith("127.0.0.1:") for each in ports)
    scraped = read_yaml("deploy/prometheus.yml")["scrape_configs"][0]["static_configs"][0]["targets"]
    assert [each.split(":")[0] for each in scraped] == ["server"]
    provider, = read_yaml("deploy/grafana/provisioning/dashboards/serving.yaml")["providers"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]
    assert read_yaml("deploy/compose.cuda.yaml")["services"].keys() <= services.keys()
    assert "server" in cli.parse_arguments(["serve", *services["server"]["command"]]).allowed_hosts


def test_the_image_is_made_of_files_that_the_build_sees():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    seen = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert set(copied) == seen
    assert all((ROOT / name).exists() for name in copied)
    targets = {line.split()[-1] for line in lines if line.startswith("FROM ")}
    built = read_yaml("deploy/compose.cuda.yaml")["services"]["server"]["build"]["target"]
    assert {built, "cpu"} <= targets
    entry = json.loads(next(line for line in lines if line.startswith("ENTRYPOINT ")).partition(" ")[2])
    assert cli.parse_arguments([*entry[1:], "/model"]).host == "0.0.0.0"


@pytest.mark.parametrize("name", LISTS)
def test_scripts_that_recipes_run_are_there(name: str):
    text = (ROOT / name).read_text()
    paths = re.findall(r"(?<![\w./-])(?:bench|tests|\.ci|requirements|deploy)/[\w./-]+\b(?!\{|_)", text)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_use_actions_of_a_major_version(path: Any):
    jobs = read_yaml(str(path))["jobs"].values()
    steps = [step for job in jobs for step in job["steps"]]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step)
    assert all("run" in step or "uses" in step for step in steps)
    pythons = [each for job in jobs for each in job.get("strategy", {}).get("matrix", {}).get("python", ())]
    assert pythons == (["3.11", "3.12", "3.13"] if path.stem == "wheel" else [])


def test_the_script_that_tries_wheels_is_one():
    for name in ("run", "nightly", "wheel"):
        subprocess.run(["bash", "-n", str(ROOT / ".ci" / name)], check=True)
    hooks = [hook for repo in read_yaml(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert [hook["id"] for hook in hooks] == ["ruff", "mypy", "words"]
    assert all(shlex.split(hook["entry"])[0] in ("ruff", "mypy", "python") for hook in hooks)

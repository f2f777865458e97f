"""Files that other programs read: containers, dashboards, workflows, recipes. What they name is there."""
from __future__ import annotations

import json
import re
import shlex
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.support import ROOT
from tinygrad_nv import cli
from tinygrad_nv.server.metrics import Metrics

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

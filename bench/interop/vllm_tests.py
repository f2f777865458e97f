"""Runs vLLM's own tests for its entry points at this server and at vLLM's, and compares.

    python bench/interop/vllm_tests.py PATH [--only test_chat …] [--models DIR] [--resume]

PATH is vLLM 0.32.0 with its tests: a checkout, or the unpacked source distribution. A test that passes at
vLLM's server and does not pass at this one is a difference; the exit code is 1 when there is one that
bench/interop/vllm_known.json does not list, with its reason and the words it fails in. Tests that fail at
vLLM's own server are not run at this one: many ask for what a model of 135M weights does not know.

The tests run as they are, in vLLM's environment for CPUs, which is made where there is none
(tinygrad_nv.benchmarks.vllm_environment). Whatever model they name is SmolLM2-135M-Instruct with trained
weights, by a hub's cache of links; for Qwen3's, tokens of its vocabulary that nothing uses are called
<think> and <tool_call>. vllm_server_plugin.py starts this server where they start `vllm serve`, with the
same arguments. Outcomes are noted in bench/results/cache/vllm_tests (peer_tests.py): --resume runs what is
missing there. A call takes one to two hours on two cores.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.interop.peer_tests import PYTEST, Run, compare, exit_with, run_files
from bench.lib.measure import RESULTS, save
from bench.serving.vllm_models import write_adapters, write_model
from tinygrad_nv import cache
from tinygrad_nv.benchmarks.vllm_environment import VERSION, environment, interpreter

KNOWN = Path(__file__).parent / "vllm_known.json"
PACKAGES = ("pytest==9.2.0", "pytest-asyncio==1.5.0", "tblib==3.2.2")      # which vLLM's tests import
FILES = (
    "openai/chat_completion/test_batched_chat_completions", "openai/chat_completion/test_chat",
    "openai/chat_completion/test_chat_completion", "openai/chat_completion/test_chat_echo",
    "openai/chat_completion/test_chat_logit_bias_validation",
    "openai/chat_completion/test_completion_with_function_calling",
    "openai/chat_completion/test_enable_force_include_usage",
    "openai/chat_completion/test_include_reasoning", "openai/chat_completion/test_logprob_token_ids",
    "openai/chat_completion/test_root_path", "openai/completion/test_completion",
    "openai/completion/test_prompt_validation", "openai/completion/test_token_in_token_out",
    "openai/models/test_models", "openai/responses/test_basic", "openai/responses/test_errors",
    "openai/responses/test_function_call", "openai/responses/test_simple", "openai/responses/test_stateful",
    "openai/responses/test_structured_output", "openai/test_chunked_prompt", "openai/test_return_token_ids",
    "openai/test_return_tokens_as_ids", "anthropic/test_messages",
    "generate/generative_scoring/test_generative_scoring_e2e",
    "scale_out/token_in_token_out/test_serving_tokens", "serve/instrumentator/test_basic",
    "serve/instrumentator/test_metrics", "serve/instrumentator/test_orca_metrics",
    "serve/instrumentator/test_uds", "serve/lora/test_lora_adapters", "serve/tokenize/test_tokenization",
    "launchers/test_shutdown")
QWEN3 = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B")
OTHERS = ("Qwen/Qwen2-1.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct",
          "HuggingFaceH4/zephyr-7b-beta", "facebook/opt-125m", "openai-community/gpt2",
          "hmellor/tiny-random-LlamaForCausalLM", "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
          "meta-llama/Llama-3.2-1B")
ADAPTERS = ("charent/self_cognition_Alice", "Jackmin108/Qwen3-0.6B-Meow-LoRA", "typeof/zephyr-7b-beta-lora",
            "Jackmin108/Qwen3-0.6B-Woof-LoRA", "jekunz/smollm-135m-lora-fineweb-faroese",
            "peft-internal-testing/opt-125m-dummy-lora")
RENAMED = {"<gh_stars>": "<think>", "<issue_start>": "</think>", "<issue_comment>": "<tool_call>",
           "<issue_closed>": "</tool_call>"}
POSITIONS = 40960
REVISION = "0" * 40


# **** what the tests meet ****

def link_model(hub: Path, name: str, target: Path) -> None:
    """Puts a directory into a hub's cache under a repository's name."""
    folder = hub / f"models--{name.replace('/', '--')}"
    for each in ("refs", "snapshots"): (folder / each).mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(REVISION)
    (link := folder / "snapshots" / REVISION).unlink(missing_ok=True)
    link.symlink_to(target.resolve())


def write_variant(model: Path, out: Path) -> None:
    """Makes a model whose tokenizer has names for reasoning and calls in place of ones that nothing uses, and
    whose context is as long as Qwen3's."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for file in model.iterdir(): (out / file.name).symlink_to(file.resolve())
    text = (model / "tokenizer.json").read_text()
    for before, after in RENAMED.items(): text = text.replace(before, after)
    changed = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": POSITIONS}
    for name, content in (("tokenizer.json", text), ("config.json", json.dumps(changed))):
        (out / name).unlink()
        (out / name).write_text(content)


def make_hub(models: Path, hub: Path) -> None:
    """Makes the hub's cache that the tests and both servers read."""
    plain = write_model("smollm2-135m", models)
    adapters = list(write_adapters(plain).values())
    write_variant(plain, thinks := hub / "thinks")
    for name in QWEN3: link_model(hub, name, thinks)
    for name in OTHERS: link_model(hub, name, plain)
    for i, name in enumerate(ADAPTERS): link_model(hub, name, adapters[i % len(adapters)])


def install_packages() -> Path:
    """Returns the folder of the packages that the tests import and vLLM does not, which is made once."""
    folder = cache.folder("environments") / f"vllm-tests-{VERSION}-{'-'.join(PACKAGES).replace('==', '-')}"
    if not folder.exists():
        unfinished = folder.with_name("vllm-tests-unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        subprocess.run([interpreter(), "-m", "pip", "install", "--quiet", "--no-warn-conflicts", "--target",
                        unfinished, *PACKAGES], check=True)
        unfinished.rename(folder)
    return folder


def start(tests: Path, hub: Path, packages: Path, file: str, side: str
          ) -> tuple[list[str], dict[str, str], Path]:
    """Command, environment and folder of a process that runs a file's tests."""
    python = interpreter()
    env = environment(1) | {
        "HF_HUB_CACHE": str(hub), "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(packages)])}
    if side == "ours":
        env["SERVE"] = json.dumps([sys.executable, "-m", "tinygrad_nv", "serve", "--metrics-prefix", "vllm"])
        env["SERVE_PYTHONPATH"] = str(Path(__file__).parents[2])
    return [str(python), *PYTEST, "-p", "vllm_server_plugin", "--rootdir", str(tests), file], env, tests


def find_files(tests: Path, names: Sequence[str]) -> list[str]:
    """Paths of FILES, of those whose name is in `names` where there are any."""
    places = (f"tests/entrypoints/{each}.py" for each in FILES)
    return [place for place in places if (tests / place).exists()
            and (not names or Path(place).stem in names)]


def main() -> None:
    """Runs the tests at both servers; the exit code is 1 when something differs that is not listed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path, help=f"vLLM {VERSION} with its tests")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=(), help="files by name, as test_chat")
    parser.add_argument("--models", type=Path, default=RESULTS / "cache" / "models", help="where models are")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one test (default 300)")
    parser.add_argument("--logs", type=Path, default=RESULTS / "cache" / "vllm_tests",
                        help="where outcomes go")
    parser.add_argument("--resume", action="store_true", help="keep the outcomes that are there")
    parser.add_argument("--dry", action="store_true", help="print only")
    args = parser.parse_args()
    if not (args.path / "tests" / "entrypoints").is_dir():
        parser.error(f"{args.path} has no folder tests/entrypoints; expected: vLLM {VERSION} with its tests")
    if not args.resume: shutil.rmtree(args.logs, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        tests, hub = Path(folder) / "run", Path(folder) / "hub"
        tests.mkdir()
        for each in ("tests", "examples"): (tests / each).symlink_to((args.path / each).resolve())
        make_hub(args.models, hub)
        if not (files := find_files(tests, args.only)):
            parser.error(f"no test file is called {', '.join(args.only)}; they are: "
                         f"{', '.join(Path(each).name for each in FILES)}")
        run = Run("ours", "vllm", args.logs.resolve(), args.timeout,
                  partial(start, tests, hub, install_packages()), json.loads(KNOWN.read_text()), start_s=300,
                  quick=True, judge_first=True)
        run_files(run, files)
        text, record = compare(run, files)
    print(text)
    if not args.dry: save("vllm_tests", {"vllm": VERSION, "model": "SmolLM2-135M-Instruct", **record})
    exit_with(run, record)


if __name__ == "__main__": main()

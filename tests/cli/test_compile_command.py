"""`tinygrad-nv compile` and `bundle`: a model as one file, which answers without a compiler as its directory
does with one."""
from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.bundle.bundle_case import flips, forged, manifest_of
from tinygrad_nv import LLM, SamplingParams
from tinygrad_nv.bundle.container import open_bundle
from tinygrad_nv.bundle.manifest import canonical
from tinygrad_nv.errors import BundleError, ConfigError

LIMITS = ("--max-num-seqs", "1", "--max-num-batched-tokens", "16", "--max-model-len", "64")
PROMPT = ("--prompt-ids", "5,6,7,8,9,10,11,12,13", "--max-tokens", "12", "--temperature", "0", "--json",
          "--device", "CPU")
# no process can be started, nothing is compiled, nothing is scheduled, and what would do so is not loaded
ALONE = """
import subprocess, sys
def refuse(*args, **kwargs): raise SystemExit(f"a process: {args}")
subprocess.Popen.__init__ = refuse
import tinygrad.schedule, tinygrad.tensor
from tinygrad.engine import realize
from tinygrad_nv.runtime.cpu import clang
def compiled(*args): raise SystemExit(f"compiled: {args}")
def scheduled(*args, **kwargs): raise SystemExit(f"scheduled: {args}")
clang.ToolchainCompiler.compile = clang.ClangRenderer.compiler = compiled
realize.compile_linear = scheduled
tinygrad.schedule.create_linear_with_vars = tinygrad.tensor.create_linear_with_vars = scheduled
from tinygrad_nv import cli
code = cli.main(sys.argv[1:])
unused = ("patterns", "tile.language", "tile.templates", "quant", "models.llama", "models.weights",
          "models.gguf.")
loaded = [name for name in sys.modules if name.startswith(tuple(f"tinygrad_nv.{each}" for each in unused))]
families = [name for name in sys.modules if name.startswith("tinygrad_nv.models.families.")]
if loaded or len(families) > 2: raise SystemExit(f"loaded: {loaded} {families}")
sys.exit(code)
"""


def alone(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", ALONE, *map(str, arguments)], capture_output=True, text=True,
                          check=False, env={**os.environ, **variables})


@pytest.fixture(scope="module")
def bundle(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compiled") / "tiny.tnv"
    from tinygrad_nv import cli
    assert cli.main(["compile", str(tiny), "-o", str(path), "--threads", "2", *LIMITS]) == 0
    return path


def tokens(text: str) -> Any:
    found = json.loads(text)
    return found["token_ids"], found["finish_reason"]


def test_the_answer_is_that_of_the_directory(command: Any, tiny: Path, bundle: Path, tmp_path: Path) -> None:
    wanted = tokens(command("generate", tiny, *PROMPT).succeeded().out)
    done = alone("generate", bundle, *PROMPT, NV_CACHE_DIR=str(tmp_path), CACHEDB=str(tmp_path / "c.db"))
    assert done.returncode == 0, done.stderr
    assert tokens(done.stdout) == wanted


def test_many_requests_and_sampling(tiny: Path, bundle: Path) -> None:
    prompts = [{"prompt_token_ids": [3 + i, 4, 5 + i] * (1 + i)} for i in range(5)]
    params = [SamplingParams(max_tokens=9, temperature=0 if i % 2 else 0.8, seed=i, top_k=5 if i == 2 else 0,
                             repetition_penalty=1.3 if i == 4 else 1.0) for i in range(5)]
    with LLM(tiny, device="CPU", max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64) as llm:
        wanted = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
    with LLM(bundle, device="CPU") as llm:
        found = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
        assert llm.compilations_after_ready() == 0
    assert found == wanted


def test_a_run_of_a_bundle_is_repeated(command: Any, bundle: Path, tmp_path: Path) -> None:
    command("generate", bundle, *PROMPT[:-3], "--device", "CPU", "--record", tmp_path / "a.log").succeeded()
    texts = {json.loads(line)["text"] for line in (tmp_path / "a.log").read_text().splitlines()[1:-1]}
    assert len(texts) > 5
    assert command("replay", tmp_path / "a.log").succeeded().out.startswith("repeated bit for bit")


def test_inspect_verify_diff_extract(command: Any, tiny: Path, bundle: Path, tmp_path: Path) -> None:
    text = command("bundle", "inspect", bundle, "--steps").succeeded().out
    for words in ("kind", "model", "max-num-seqs", "steps", "embedding", "step 1 tokens"):
        assert words in text
    assert "as they were written" in command("bundle", "verify", bundle).succeeded().out
    assert command("bundle", "diff", bundle, bundle).succeeded().out == ""
    command("bundle", "extract", bundle, "-o", tmp_path / "x").succeeded()
    assert (tmp_path / "x" / "model" / "config.json").read_bytes() == (tiny / "config.json").read_bytes()
    assert not (tmp_path / "x" / "weights").exists()
    command("bundle", "extract", bundle, "-o", tmp_path / "x").refused("is there")


@pytest.mark.parametrize(("options", "words"), [
    (("--dtype", "bfloat16"), "--dtype bfloat16"), (("--max-model-len", "4096"), "--max-model-len 4096"),
    (("--quantization", "fp8"), "--quantization fp8"), (("--n", "9"), "--max-num-seqs 9")])
def test_more_than_it_was_compiled_for(command: Any, bundle: Path, options: tuple[str, ...],
                                       words: str) -> None:
    command("generate", bundle, *PROMPT[:2], *options, "--device", "CPU").refused(words, "expected:",
                                                                                  "to fix:")


def test_deterministic_is_part_of_what_it_was_compiled_for(command: Any, bundle: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NV_DETERMINISTIC", "0")
    command("generate", bundle, *PROMPT, "--deterministic").refused("was compiled without", "--deterministic")


@pytest.mark.parametrize(("name", "change", "words"), [
    ("manifest", lambda m: m["about"]["options"].update(page_size=-1), "page_size = -1"),
    ("manifest", lambda m: m["about"]["options"].update(page_size=1 << 40), "no memory"),
    ("manifest", lambda m: m["about"]["options"].update(max_num_seqs=None), "max_num_seqs = None"),
    ("manifest", lambda m: m["about"]["options"].update(new=1), "a field 'new', which this format has not"),
    ("manifest", lambda m: m["about"]["options"].update(speculative="draft:/x:3"), "speculative = draft:/x"),
    ("manifest", lambda m: m["about"]["options"].pop("quantization"), "has no quantization"),
    ("set.json", lambda s: s.update(pages=1 << 40), "no memory for its weights, and 1099511627776 pages"),
    ("set.json", lambda s: s.update(pages=-1), "pages = -1"),
    ("set.json", lambda s: s.update(settings={"NV_DETERMINISTIC": []}), "NV_DETERMINISTIC = []"),
    ("set.json", lambda s: s["parts"].update(rope="x" * 300_000), "has no part xxx"),
    ("set.json", lambda s: s.update(name="other"), "is of other")])
def test_forged_bundles_of_models(bundle: Path, name: str, change: Any, words: str) -> None:
    """Every hash fits."""
    opened = open_bundle(bundle)
    own = name if name == "manifest" else next(each for each in opened.parts if each.endswith(name))
    found = manifest_of(bundle) if name == "manifest" else opened.json(own)
    change(found)
    with pytest.raises(BundleError) as raised: LLM(forged(bundle, own, canonical(found)), device="CPU")
    assert words in str(raised.value)
    assert len(str(raised.value)) < 2000


def test_a_bundle_keeps_its_weights_while_it_sleeps(bundle: Path) -> None:
    prompt, params = {"prompt_token_ids": [3, 4, 5]}, SamplingParams(max_tokens=4, temperature=0)
    with LLM(bundle, device="CPU") as llm:
        before = llm.generate(prompt, params)[0].outputs[0].token_ids
        with pytest.raises(ConfigError, match="those of a bundle"): llm.sleep(2)
        llm.sleep(1)
        llm.wake_up()
        assert llm.generate(prompt, params)[0].outputs[0].token_ids == before


def test_flips_in_a_model(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(bundle, tmp_path / "x.tnv"))
    flips(copy, random.Random(2).sample(range(8 * copy.stat().st_size), 40))
    with copy.open("r+b") as file:
        opened = open_bundle(copy)
        part = next(each for each in opened.manifest.parts if each.name.startswith("weights/"))
        file.seek(opened.start + part.offset + 5)
        file.write(b"\xff\xfe")
    with pytest.raises(BundleError, match=f"{part.name} is damaged"): LLM(copy, device="CPU")


@pytest.mark.slow
def test_ten_thousand_flips(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(bundle, tmp_path / "x.tnv"))
    flips(copy, random.Random(3).sample(range(8 * copy.stat().st_size), 10_000))


@pytest.mark.slow
def test_weights_by_reference_and_equal_builds(command: Any, tiny: Path, bundle: Path,
                                               tmp_path: Path) -> None:
    made = tmp_path / "r.tnv"
    command("compile", tiny, "-o", made, "--threads", "2", "--weights", "reference", *LIMITS).succeeded()
    referred = [each for each in open_bundle(made).manifest.parts if each.ranges]
    assert sum(each.nbytes for each in referred) > 0.9 * sum(
        each.stat().st_size for each in tiny.glob("*.safetensors"))
    wanted = tokens(command("generate", bundle, *PROMPT).succeeded().out)
    assert tokens(command("generate", made, *PROMPT).succeeded().out) == wanted
    command("generate", made, *PROMPT, "--weights", tmp_path).refused("refers to", "--weights DIR")
    # of another build, in a process of its own, all else is the same
    one, other = (open_bundle(path).parts for path in (bundle, made))
    assert {name: each.sha256 for name, each in one.items()} == {
        name: each.sha256 for name, each in other.items()}


@pytest.mark.slow
def test_equal_builds_are_equal_bytes(command: Any, tiny: Path, bundle: Path, tmp_path: Path) -> None:
    command("compile", tiny, "-o", tmp_path / "b.tnv", "--threads", "2", *LIMITS).succeeded()
    assert (tmp_path / "b.tnv").read_bytes() == bundle.read_bytes()


@pytest.mark.slow
def test_sets_for_gpus(command: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "g.tnv"
    command("compile", tiny, "-o", made, "--arch", "sm_90a,sm_80,cpu", "--max-num-seqs", "1",
            "--max-num-batched-tokens", "16", "--max-model-len", "64").succeeded()
    rows = open_bundle(made).json("sm_90a/programs.json")
    assert all("cubin" in row for row in rows)
    wanted = tokens(command("generate", tiny, *PROMPT).succeeded().out)
    for arch in ("sm_90a", "sm_80", "sm_89"):
        done = alone("generate", made, *PROMPT[:-2], "--device", "EMU", EMU_ARCH=arch, EMU_CHECK="0")
        assert done.returncode == 0, done.stderr
        assert tokens(done.stdout) == wanted


@pytest.mark.parametrize(("options", "words"), [
    (("--arch", "sm_70"), "--arch sm_70"), (("--arch", ""), "--arch ''"), (("--threads", "0"), "--threads 0"),
    (("--sign-key", "none.pem"), "none.pem")])
def test_orders_that_cannot_be(command: Any, tiny: Path, tmp_path: Path, options: tuple[str, ...],
                               words: str) -> None:
    command("compile", tiny, "-o", tmp_path / "x.tnv", *options).refused(words, "expected:")
    assert not (tmp_path / "x.tnv").exists()


def test_what_has_no_bundle(command: Any, tmp_path: Path, tiny: Path) -> None:
    command("compile", tmp_path / "none", "-o", tmp_path / "x.tnv").refused("is no directory")
    command("generate", tiny, *PROMPT, "--require-signed", "k.pub").refused("is no bundle")


def test_a_model_that_makes_embeddings_has_no_bundle(command: Any, make_model: Any, tmp_path: Path) -> None:
    model = make_model("BertModel")
    command("compile", model, "-o", tmp_path / "x.tnv", *LIMITS).refused("makes embeddings")


@pytest.mark.slow
@pytest.mark.parametrize(("cls_name", "config", "options"), [
    ("Gemma2ForCausalLM", {"sliding_window": 16}, ()), ("MixtralForCausalLM", {"num_local_experts": 4}, ()),
    ("LlamaForCausalLM", {}, ("--quantization", "int8")),
    ("LlamaForCausalLM", {}, ("--dtype", "bfloat16", "--kv-cache-dtype", "fp8")),
    ("LlamaForCausalLM", {"tie_word_embeddings": True}, ("--dtype", "bfloat16")),
    ("Qwen3ForCausalLM", {}, ("--speculative", "ngram:3"))])
def test_other_models(command: Any, make_model: Any, tmp_path: Path, cls_name: str, config: dict[str, Any],
                      options: tuple[str, ...]) -> None:
    model, made = make_model(cls_name, **config), tmp_path / "x.tnv"
    command("compile", model, "-o", made, "--threads", "2", *LIMITS, *options).succeeded()
    given = dict(zip((each.removeprefix("--").replace("-", "_") for each in options[::2]), options[1::2],
                     strict=True))
    prompts = [{"prompt_token_ids": [3 + i, 4, 5 + i] * (1 + 4 * i)} for i in range(3)]
    params = SamplingParams(max_tokens=12, temperature=0)
    with LLM(model, device="CPU", max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64,
             **given) as llm:
        wanted = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
    with LLM(made, device="CPU") as llm:
        assert [each.outputs[0].token_ids for each in llm.generate(prompts, params)] == wanted
        assert llm.compilations_after_ready() == 0

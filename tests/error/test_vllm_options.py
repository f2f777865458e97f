"""Options of `vllm serve`: each is taken, or refused with what holds instead; others suggest the nearest."""
from __future__ import annotations

import argparse
import json

import pytest

from tinygrad_nv import cli
from tinygrad_nv.cli import vllm_options
from tinygrad_nv.engine import vllm_arguments as engine
from tinygrad_nv.engine.vllm_arguments import from_vllm

# those of adapters are left out; =: with a value
TEXT = """
host= port= uds= uvicorn-log-level= disable-uvicorn-access-log allow-credentials allowed-origins=
allowed-methods= allowed-headers= api-key= chat-template= chat-template-content-format=
trust-request-chat-template response-role= ssl-keyfile= ssl-certfile= ssl-ca-certs= enable-ssl-refresh
ssl-cert-reqs= root-path= middleware= return-tokens-as-token-ids disable-frontend-multiprocessing
enable-request-id-headers enable-auto-tool-choice exclude-tools-when-tool-choice-none tool-call-parser=
tool-parser-plugin= tool-server= log-config-file= max-log-len= disable-fastapi-docs
enable-prompt-tokens-details enable-server-load-tracking enable-force-include-usage
enable-tokenizer-info-endpoint enable-log-outputs enable-log-deltas h11-max-incomplete-event-size=
h11-max-header-count= log-error-stack headless api-server-count= config= default-chat-template-kwargs=
disable-access-log-for-endpoints= data-parallel-start-rank= data-parallel-rank= data-parallel-rpc-port=
data-parallel-address= data-parallel-backend= data-parallel-hybrid-lb data-parallel-external-lb
data-parallel-size-local= runner= convert= task= tokenizer= tokenizer-mode= trust-remote-code dtype= seed=
hf-config-path= allowed-local-media-path= allowed-media-domains= revision= code-revision= rope-scaling=
rope-theta= tokenizer-revision= max-model-len= quantization= enforce-eager max-logprobs= logprobs-mode=
disable-sliding-window disable-cascade-attn skip-tokenizer-init enable-prompt-embeds served-model-name=
disable-async-output-proc config-format= hf-token= hf-overrides= pooler-config= logits-processor-pattern=
generation-config= override-generation-config= enable-sleep-mode model-impl= logits-processors=
io-processor-plugin= load-format= download-dir= safetensors-load-strategy= model-loader-extra-config=
ignore-patterns= use-tqdm-on-load pt-load-map-location= reasoning-parser= guided-decoding-backend=
guided-decoding-disable-fallback guided-decoding-disable-any-whitespace structured-outputs-config=
distributed-executor-backend= pipeline-parallel-size= tensor-parallel-size= data-parallel-size=
decode-context-parallel-size= enable-expert-parallel enable-eplb eplb-config= expert-placement-strategy=
all2all-backend= enable-dbo max-parallel-loading-workers= ray-workers-use-nsight disable-custom-all-reduce
worker-cls= worker-extension-cls= block-size= gpu-memory-utilization= kv-cache-memory-bytes= swap-space=
kv-cache-dtype= num-gpu-blocks-override= enable-prefix-caching prefix-caching-hash-algo= cpu-offload-gb=
calculate-kv-scales kv-sharing-fast-prefill mamba-cache-dtype= mamba-ssm-cache-dtype= mamba-block-size=
kv-offloading-size= kv-offloading-backend= limit-mm-per-prompt= enable-mm-embeds media-io-kwargs=
mm-processor-kwargs= mm-processor-cache-gb= mm-encoder-tp-mode= interleave-mm-strings skip-mm-profiling
video-pruning-rate= speculative-config= show-hidden-metrics-for-version= otlp-traces-endpoint=
collect-detailed-traces= kv-cache-metrics cudagraph-metrics max-num-batched-tokens= max-num-seqs=
max-num-partial-prefills= max-long-partial-prefills= long-prefill-token-threshold= cuda-graph-sizes=
num-lookahead-slots= scheduler-delay-factor= preemption-mode= num-scheduler-steps= multi-step-stream-outputs
scheduling-policy= enable-chunked-prefill disable-chunked-mm-input scheduler-cls=
disable-hybrid-kv-cache-manager async-scheduling stream-interval= kv-transfer-config= kv-events-config=
compilation-config= attention-backend= additional-config= disable-log-stats enable-log-requests
disable-log-requests nnodes= node-rank= master-addr= master-port=
"""
NAMES = TEXT.split()


def parsed(*words: str) -> argparse.Namespace:
    return cli.parser().parse_args(vllm_options.normal(["serve", *words]))


def test_every_option_is_known():
    options = cli.parser().parse_args(["serve"]).command._option_string_actions
    for name in NAMES:
        action = options["--" + name.rstrip("=")]
        assert (action.nargs == 0) == (not name.endswith("=")), name


def test_every_argument_of_llm_is_an_option():
    options = cli.parser().parse_args(["serve"]).command._option_string_actions
    for name in {*engine.FIXED, *engine.NO_EFFECT, *engine.RENAMED}:
        assert "--" + name.replace("_", "-") in options, name


def test_values_that_hold_are_taken(capsys: pytest.CaptureFixture[str]):
    for name, (accepted, _) in (vllm_options.FIXED | engine.FIXED).items():
        for value in accepted:
            if value is None: continue
            option = "--" + name.replace("_", "-")
            words = [option if value else "--no-" + option[2:]] if isinstance(value, bool) else [
                option, value if isinstance(value, str) else json.dumps(value)]
            assert from_vllm(parsed(*words).vllm, frozenset({"tokenizer"})) == {}, words


def test_what_llm_is_given():
    found = parsed("--enforce-eager", "DIR", "--block_size=32", "--runner", "pooling", "--speculative-config",
                   '{"method": "ngram", "num_speculative_tokens": 3}', "--no-enable-log-requests",
                   "--kv_cache_memory_bytes", "1000", "-tp", "1", "--max-logprobs", "5")
    assert (str(found.model), found.max_logprobs) == ("DIR", 5)
    assert from_vllm(found.vllm, frozenset()) == {
        "page_size": 32, "task": "embed", "speculative": "ngram:3", "kv_cache_bytes": 1000}
    assert [parsed("--max-logprobs", each).max_logprobs for each in ("-1", "21", "0")] == [20, 20, 0]
    assert parsed("--api-key", "a", "b", "--api_key", "c").api_key == ["a", "b", "c"]
    assert vllm_options.normal(["serve", "--", "--a_b"]) == ["serve", "--", "--a_b"]
    assert vllm_options.normal(["generate", "--a_b"]) == ["generate", "--a-b"]
    assert vllm_options.normal(["doctor", "--a_b"]) == ["doctor", "--a_b"]


def test_a_field_of_an_option():
    """vLLM's parser takes them, too."""
    assert vllm_options.normal([
        "serve", "--hf_overrides.rope_scaling.factor", "2", "M", "--port=1.5", "--hf-overrides.a-b=text",
        "--hf-overrides.rope-scaling.type=yarn", "--x.y", "--z.w", "--", "--a.b"]) == [
        "serve", "M", "--port=1.5", "--hf-overrides",
        '{"rope_scaling": {"factor": 2, "type": "yarn"}, "a_b": "text"}', "--x", '{"y": true}',
        "--z", '{"w": true}', "--", "--a.b"]
    parsed("--structured-outputs-config.backend", "xgrammar", "--structured-outputs-config.disable_fallback")


@pytest.mark.parametrize("given", ['{"backend": "outlines"}', '{"disable_any_whitespace": false}', "{}"])
def test_which_library_enforces_structure_makes_no_difference(given: str):
    parsed("--structured-outputs-config", given, "--guided-decoding-backend", "xgrammar")
    assert from_vllm({"structured_outputs_config": json.loads(given)}, frozenset()) == {}


def test_the_model_has_an_option(command):
    """As with vLLM, it may be named either way."""
    for words in (["/nowhere/m"], ["--model", "/nowhere/m"], ["/nowhere/m", "--model", "/nowhere/m"]):
        command("serve", *words).refused("/nowhere/m")
    command("serve", "/nowhere/a", "--model", "/nowhere/b").refused(
        "MODEL is /nowhere/a, and --model is /nowhere/b", "expected: one of them", "leave one out")


@pytest.mark.parametrize(("words", "found"), [
    (["--max-modl-len", "5"], "--max-modl-len; did you mean --max-model-len?"),
    (["--tensor_paralel_size=2"], "did you mean --tensor-parallel-size?"),
    (["--zzzz"], "unrecognized arguments: --zzzz\n"),
    (["--data-parallel-external-lb"], "--data-parallel-external-lb is true, and rank 0 gives requests to"),
    (["--structured-outputs-config.disable_any_whitespace", "true"], "llguidance enforces structured output"),
    (["--load-format", "dummy"], '--load-format is "dummy", and weights are safetensors or GGUF files; '),
    (["--no-enable-chunked-prefill"], "--enable-chunked-prefill is false, and long prompts are computed in"),
    (["--collect-detailed-traces", "all"], '--collect-detailed-traces is "all", and a trace is a span'),
    (["--max-logprobs", "-2"], "'-2' is not a whole number, or -1")])
def test_others_are_refused(words: list[str], found: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended: cli.main(["serve", *words])
    assert ended.value.code == 2
    assert found in capsys.readouterr().err

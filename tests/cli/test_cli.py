"""What the commands do when all is well, and how they end when a terminal, a pipe or a person interferes."""
from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from tinygrad_nv import cli
from tinygrad_nv.cli import doctor
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.models.quantised import repack_folder

REPORT = {"prompt_token_ids", "token_ids", "text", "finish_reason", "seed", "ttft_s", "tokens_per_s",
          "weight_gb_per_s", "peak_host_bytes", "device"}
IDS = ("--prompt-ids", "5,6,7")
GREEDY = ("--temperature", 0)
MODULE = (sys.executable, "-m", "tinygrad_nv")
DRAWN = ("--temperature", 1, "--top-p", 0.95)


def report(command, directory: Path, *arguments: object) -> dict:
    """The one object that --json prints."""
    lines = command("generate", directory, "--json", *arguments).succeeded().out.splitlines()
    assert len(lines) == 1
    return json.loads(lines[0])


@pytest.fixture(scope="module")
def greedy_ids(tiny: Path) -> list[int]:
    """Eight greedy tokens after `IDS`, end tokens ignored."""
    done = LLM(tiny).complete([5, 6, 7], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    return list(done.token_ids)


# **** generate ****

def test_json_is_one_object_with_the_answer_and_its_figures(command, tiny: Path):
    made = report(command, tiny, "Once upon a time", "--max-tokens", 6, "--seed", 7, "--ignore-eos")
    assert set(made) == REPORT
    assert made["prompt_token_ids"][0] == 0, "the tokenizer puts <|bos|> first"
    assert len(made["token_ids"]) == 6
    assert made["finish_reason"] == "length"
    assert made["seed"] == 7
    assert made["device"].startswith("CPU")
    assert min(made["ttft_s"], made["tokens_per_s"], made["weight_gb_per_s"]) > 0
    assert made["peak_host_bytes"] > 10 << 20


def test_text_is_the_prompt_and_its_continuation_and_figures_go_to_stderr(command, tiny: Path):
    """Options may stand between the model and the prompt, and a prompt may begin with a dash after --."""
    request = (tiny, *GREEDY, "--max-tokens", 6, "--ignore-eos")
    expected = json.loads(command("generate", *request, "--json", "--", "-5 foxes").succeeded().out)
    outcome = command("generate", *request, "--", "-5 foxes").succeeded()
    assert outcome.out == f"-5 foxes{expected['text']}\n"
    assert outcome.err.startswith("[6 tokens · first after ")
    assert "tokens/s" in outcome.err
    assert "GB/s of weights" in outcome.err


def test_the_same_seed_gives_the_same_text_and_another_one_another(command, tiny: Path):
    def draw(*seed: object) -> dict: return report(command, tiny, *IDS, *DRAWN, "--max-tokens", 12, *seed)
    first = draw()
    assert draw("--seed", first["seed"])["token_ids"] == first["token_ids"], "the seed taken is reported"
    assert draw("--seed", first["seed"] + 1)["token_ids"] != first["token_ids"]


def test_a_temperature_float32_cannot_divide_by_is_greedy(command, tiny: Path, greedy_ids: list[int]):
    made = report(command, tiny, *IDS, "--temperature", "1e-46", "--max-tokens", 8, "--ignore-eos")
    assert made["token_ids"] == greedy_ids


def test_a_stop_string_ends_the_text_before_itself(command, tiny: Path):
    request = ("Once upon", *GREEDY, "--max-tokens", 24, "--ignore-eos")
    text = report(command, tiny, *request)["text"]
    stop = text[5:7]
    made = report(command, tiny, *request, "--stop", "never said", "--stop", stop)
    assert made["finish_reason"] == "stop"
    assert made["text"] == text[:text.index(stop)]


def test_end_tokens_of_generation_config_stop_and_can_be_ignored(command, spoil, greedy_ids: list[int]):
    end = greedy_ids[3]
    directory = spoil("generation_config.json", eos_token_id=[299, end])
    made = report(command, directory, *IDS, *GREEDY, "--max-tokens", 8)
    assert made["token_ids"] == greedy_ids[:greedy_ids.index(end) + 1]
    assert made["finish_reason"] == "stop"
    assert report(command, directory, *IDS, *GREEDY, "--max-tokens", 8, "--ignore-eos"
                  )["token_ids"] == greedy_ids


def test_sampling_defaults_are_those_of_generation_config(command, tiny: Path, spoil):
    request = (*IDS, "--seed", 3, "--max-tokens", 8)
    directory = spoil("generation_config.json", do_sample=True, temperature=1.0, top_p=0.95)
    made = report(command, directory, *request)
    assert made["token_ids"] == report(command, tiny, *request, *DRAWN)["token_ids"]


def test_the_answer_fills_the_context_and_ends(command, tiny: Path):
    made = report(command, tiny, *IDS, *GREEDY, "--max-model-len", 8, "--ignore-eos", "--max-tokens", 100)
    assert len(made["token_ids"]) == 5
    assert made["finish_reason"] == "length"


def test_a_pickled_checkpoint_gives_the_same_answer(command, copy: Path, greedy_ids: list[int]):
    arrays = load_file(copy / "model.safetensors")
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    tensors["model.norm.weight"] = torch.nn.Parameter(tensors["model.norm.weight"])
    (copy / "model.safetensors").unlink()
    torch.save(tensors, copy / "pytorch_model.bin")
    assert report(command, copy, *IDS, *GREEDY, "--max-tokens", 8, "--ignore-eos")["token_ids"] == greedy_ids


# **** chat, doctor, explain ****

def test_chat_answers_every_line_until_the_input_ends(command, tiny: Path):
    outcome = command("chat", tiny, "--max-tokens", 3, *GREEDY, "--system", "Be kind.",
                      stdin="hello\n\n  \nagain\n").succeeded()
    assert outcome.out.count("\n\n") == 2, "empty lines are no questions"
    assert outcome.err == ""


def test_chat_forgets_its_oldest_exchanges_when_the_context_is_full(command, tiny: Path):
    question = "hello " * 25
    outcome = command("chat", tiny, "--max-tokens", 3, *GREEDY, "--system", "Be kind.", "--ignore-eos",
                      stdin=f"{question}\n" * 6).succeeded()
    assert outcome.out.count("\n\n") == 6
    assert "forgot the oldest 1 exchange(s)" in outcome.err


def test_doctor_lists_what_there_is(command):
    outcome = command("doctor").succeeded()
    states = {line.split("  ")[0]: line for line in outcome.out.splitlines() if not line.startswith(" ")}
    assert set(states) <= {"ok", "missing", "broken"}
    for subject in ("python", "tinygrad", "device", "C compiler", "ptxas", "NVRTC", "NVIDIA driver"):
        assert any(subject in line for line in outcome.out.splitlines()), subject


def test_doctor_says_what_is_kept_of_repacked_weights(command, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(repack_folder, "root", lambda: tmp_path)
    monkeypatch.setattr(repack_folder, "GB", 1000)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0000.layer").write_bytes(bytes(1500))
    kept = f"1.5 of 7 GB (NV_REPACK_CACHE), models: 1, in {tmp_path}"
    for setting, words in (("7", kept), ("0", "not kept: NV_REPACK_CACHE=0")):
        monkeypatch.setenv("NV_REPACK_CACHE", setting)
        assert doctor._check_repacked().what == words


def test_doctor_reports_what_it_could_not_look_at(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ptxas").write_text("not a program")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    outcome = command("doctor").succeeded()
    broken = [line for line in outcome.out.splitlines() if line.startswith("broken")]
    assert [line for line in broken if "ptxas" in line and "PermissionError" in line]


def test_explain_prints_a_table_of_kernels(command, tiny: Path):
    lines = command("explain", tiny).succeeded().out.split("\n\n")[0].splitlines()
    assert lines[0].split() == ["kernel", "template", "device", "isa", "parts", "flops", "bytes", "predicted",
                                "why"]
    assert len(lines) > 10
    assert lines[-1].split()[1:3] == ["in", "all"]
    assert int(lines[-1].split()[0]) == counted(lines[1:-1])


def counted(lines: list[str]) -> int:
    """Kernels in a table, in which layers that are equal are one: "7 kernels × 2:" stands before those."""
    total = 0
    for line in lines:
        if (block := re.match(r"(\d+) kernels × (\d+):", line.strip())) is not None:
            total += int(block[1]) * (int(block[2]) - 1)
        elif (one := re.search(r"× (\d+)\s", line)) is not None: total += int(one[1])
        else: total += 1
    return total


# **** as a process: encodings, pipes, interrupts ****

def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", **changes}


@pytest.mark.slow
def test_characters_latin_1_lacks_are_escaped(tiny: Path):
    done = subprocess.run([*MODULE, "generate", str(tiny), "é→", "--max-tokens", "1"], capture_output=True,
                          env=environment(PYTHONIOENCODING="latin-1"), check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"\xe9\\u2192")
    assert b"Traceback" not in done.stderr


@pytest.mark.slow
def test_characters_ascii_lacks_are_escaped_in_messages(tmp_path: Path):
    done = subprocess.run([*MODULE, "generate", f"{tmp_path}/é→", "hello"], capture_output=True,
                          env=environment(PYTHONIOENCODING="ascii"), check=False)
    assert done.returncode == 2
    assert b"no such directory: " in done.stderr
    assert b"/\\xe9\\u2192\n" in done.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("redirection", "code", "said"), [
    ("| head -c 1", 0, b"h"), ("<&- >&-", 0, b""), ("--json | true", 0, b""), (">/dev/full", 2, b"")])
def test_an_output_that_goes_away_ends_quietly(tiny: Path, redirection: str, code: int, said: bytes):
    line = f'set -o pipefail; "$0" -m tinygrad_nv generate "$1" hello --max-tokens 3 {redirection}'
    done = subprocess.run(["bash", "-c", line, sys.executable, str(tiny)], capture_output=True,
                          env=environment(), check=False)
    assert done.returncode == code, done.stderr
    assert done.stdout == said
    for word in (b"Traceback", b"Exception ignored", b"BrokenPipe"): assert word not in done.stderr
    assert (b"the system refused: [Errno 28]" in done.stderr) == (code == 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arguments", [["generate", "/nowhere", "hello"], ["chat", "/nowhere"]])
def test_an_error_in_a_process_is_its_message_and_code(arguments: list[str]):
    done = subprocess.run([*MODULE, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL,
                          check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tinygrad-nv: no such directory: /nowhere\n  expected: ")
    assert len(done.stderr.splitlines()) == 3


class Chat:
    """`chat` under a pseudo-terminal."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process, self.terminal, self.seen = process, terminal, b""

    def read_until(self, condition, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition(self.seen):
            ready, _, _ = select.select([self.terminal], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"nothing more within {seconds} s: {self.seen!r}"
            assert self.read(), f"ended: {self.seen!r}"

    def write(self, text: bytes) -> None: os.write(self.terminal, text)

    def interrupt(self, seconds: float = 60) -> int:
        """Ctrl-C, then reads what is left; the exit code."""
        self.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running after {seconds} s: {self.seen!r}"
            if select.select([self.terminal], [], [], 0.1)[0]: self.read()
        while select.select([self.terminal], [], [], 0)[0] and self.read(): pass
        return self.process.returncode

    def read(self) -> bool:
        """Whether there was something to read."""
        try: more = os.read(self.terminal, 4096)
        except OSError: return False  # Linux says EIO when the other side has closed
        self.seen += more
        return more != b""


@contextmanager
def chat(directory: Path, *options: str) -> Iterator[Chat]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen([*MODULE, "chat", str(directory), *options], stdin=theirs, stdout=theirs,
                               stderr=theirs, start_new_session=True, env=environment(TERM="dumb"),
                               preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
    os.close(theirs)
    try: yield Chat(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.slow
def test_interrupt_at_the_prompt_ends_the_chat(tiny: Path):
    with chat(tiny, "--max-tokens", "2") as talk:
        talk.read_until(lambda seen: seen.endswith(b"> "))
        time.sleep(0.3)  # a signal between printing a prompt and reading the answer would interrupt neither
        assert talk.interrupt() == 0
        assert b"Traceback" not in talk.seen


def test_interrupt_stops_an_answer_and_keeps_the_conversation(make_model: Callable[..., Path],
                                                              tmp_path: Path):
    """The answer is far from its end: some 4,000 tokens, of which the first few have come. (Markdown comes in
    blocks, perhaps all with the last.) What came stays in the conversation, which goes on."""
    directory, file = make_model(max_position_embeddings=4096), tmp_path / "talk.json"
    with chat(directory, "--max-tokens", "4000", "--ignore-eos", "--no-markdown") as talk:
        def after(typed: bytes, words: bytes) -> bytes:
            begun = len(talk.seen)
            talk.write(typed)
            talk.read_until(lambda seen: words in seen[begun:])
            return talk.seen[begun:]
        talk.read_until(lambda seen: seen.endswith(b"> "))
        assert f"{directory.name} on CPU" in talk.seen.decode()
        assert "/help lists commands, /bye ends" in talk.seen.decode()
        begun = len(talk.seen)
        talk.write(b"hello\n")
        talk.read_until(lambda seen: len(seen) > begun + 12)
        assert b"[stopped; the text so far stays" in after(b"\x03", b"conversation]\r\n> ")
        time.sleep(0.2)     # readline loses a signal that comes between its prompt and its wait for a key
        after(b"\x03", b"ends the chat]\r\n> ")       # one that was meant for the answer
        shown = after(b"/max-tokens 3\nagain\n", b" ms]\r\n> ").decode(errors="replace")
        assert re.search(r"\[3 tokens · [\d.]+ tokens/s · first after \d+ ms\]", shown)
        after(f"/save {file}\n".encode(), b"4 messages in")
        talk.write(b"/bye\n")
        assert talk.process.wait(60) == 0
        assert b"Traceback" not in talk.seen
    question, partial, *_ = json.loads(file.read_text())["messages"]
    assert question == {"role": "user", "content": "hello"}
    assert len(partial["content"]) > 0


@pytest.mark.slow
def test_chat_survives_bytes_that_are_no_text(tiny: Path):
    done = subprocess.run([*MODULE, "chat", str(tiny), "--max-tokens", "2"], input=b"\xff\xfe hi\n",
                          capture_output=True, env=environment(PYTHONUTF8="1"), check=False)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr



def test_versions(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended: cli.main(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(r"tinygrad_nv \d+\.\d+\.\d+ tinygrad 0\.14\.0\n", capsys.readouterr().out)

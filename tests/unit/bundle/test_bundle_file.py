"""The file of a bundle: what is written is read, what is changed is refused by name, memory is bounded.
Every field with values that it cannot have, whose hashes and digests fit, is refused in words. Weights
that lie in a checkpoint's files as they lie in memory are found."""
from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import subprocess
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor

import tinygrad_nv
from tests.support.bundle.bundle_case import check_all, flips, forged, manifest_of, with_part
from tinygrad_nv import LLM
from tinygrad_nv.bundle import container
from tinygrad_nv.bundle.container import (
    CHUNK,
    FORMAT,
    HEAD,
    HEADER,
    PAGE,
    Bundle,
    Source,
    digest,
    is_bundle,
    open_bundle,
    write_bundle,
)
from tinygrad_nv.bundle.manifest import ALIGNMENT, FileRange, canonical
from tinygrad_nv.bundle.report import inspect
from tinygrad_nv.engine.bundled import capture
from tinygrad_nv.engine.bundled.capture import bytes_of
from tinygrad_nv.errors import BundleError

PARTS = {"model/config.json": b'{"a": 1}', "cpu-avx2/code": bytes(range(256)) * 5,
         "weights/x": b"\x07" * 1000, "weights/none": b""}


def written(path: Path, parts: dict[str, bytes] | None = None, **more: Any) -> Path:
    sources = [Source(name, data) for name, data in (PARTS if parts is None else parts).items()]
    write_bundle(path, "model", {"sets": [], "options": {"n": 1}}, sources, **more)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path: return written(tmp_path / "a.tnv")


def test_what_is_written_is_read(file: Path, tmp_path: Path) -> None:
    bundle = open_bundle(file)
    assert {name: bundle.read(name) for name in bundle.parts} == PARTS
    bundle.verify()
    assert bundle.manifest.about["options"] == {"n": 1}
    assert file.read_bytes() == written(tmp_path / "b.tnv").read_bytes()
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []
    assert all(each.offset % ALIGNMENT == 0 for each in bundle.manifest.parts)


def test_the_hash_of_a_part_is_as_documented() -> None:
    data = os.urandom(2 * CHUNK + 12345)
    chunks = [hashlib.sha256(data[at:at + CHUNK]).digest() for at in range(0, len(data), CHUNK)]
    assert digest(data) == hashlib.sha256(b"".join(chunks)).digest()


def test_a_flipped_bit_is_refused_by_name(file: Path) -> None:
    size = 8 * file.stat().st_size
    head = list(range(8 * HEADER))
    flips(file, head + random.Random(0).sample(range(size), 1500))


def test_a_file_that_ends_early_or_late(file: Path) -> None:
    whole = file.read_bytes()
    for size in [*range(0, 200), *random.Random(1).sample(range(len(whole)), 200)]:
        file.write_bytes(whole[:size])
        with pytest.raises(BundleError): check_all(file)
    file.write_bytes(whole + b"\0")
    with pytest.raises(BundleError, match="as its manifest says"): check_all(file)


def rewritten(file: Path, change: Callable[[Any], None], version: tuple[int, int] = (1, 0)) -> Path:
    """The file with another manifest, whose hash fits: what a forger would write."""
    data = file.read_bytes()
    _, _, _, size, _ = HEAD.unpack_from(data)
    found, parts = json.loads(data[HEADER:HEADER + size]), data[open_bundle(file).start:]
    change(found)
    made = canonical(found)
    head = HEAD.pack(container.MAGIC, *version, len(made), 0)
    whole = head + hashlib.sha256(head + made).digest() + made
    target = file.with_name("forged.tnv")
    target.write_bytes(whole + bytes(-len(whole) % PAGE) + parts)
    return target


NAMES = ("../x", "/etc/x", "a/../b", "a//b", "", ".x", "a/.b", "a\\b", "a\0b", "C:x", "ü", "x" * 500, "a/")


@pytest.mark.parametrize("name", NAMES)
def test_names_that_are_no_names(file: Path, name: str) -> None:
    with pytest.raises(BundleError, match="names a part"):
        open_bundle(rewritten(file, lambda found: found["parts"][0].update(name=name)))


FORGED: dict[str, Callable[[Any], object]] = {
    "huge": lambda m: m["parts"][1].update(bytes=1 << 60),
    "negative": lambda m: m["parts"][1].update(bytes=-1),
    "offset": lambda m: m["parts"][1].update(offset=1 << 60),
    "overlap": lambda m: m["parts"][1].update(offset=0),
    "twice": lambda m: m["parts"].append(m["parts"][0]),
    "a float": lambda m: m["parts"][1].update(bytes=1.5),
    "true": lambda m: m["parts"][1].update(bytes=True),
    "hash": lambda m: m["parts"][1].update(sha256="0" * 63 + "g"),
    "another hash": lambda m: m["parts"][1].update(sha256="0" * 64),
    "no list": lambda m: m.update(parts={}),
    "no about": lambda m: m.pop("about"),
    "kind": lambda m: m.update(kind="program"),
    "ranges": lambda m: m["parts"][1].update(ranges=[["../x", 0, m["parts"][1]["bytes"]]]),
    "folder": lambda m: m["parts"][1].update(ranges=[["a/x", 0, m["parts"][1]["bytes"]]]),
    "ranges' sizes": lambda m: m["parts"][1].update(ranges=[["x", 0, 7]]),
    "no ranges": lambda m: m["parts"][1].update(ranges=[]),
    "nothing": lambda m: m.clear(),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_manifests_that_cannot_be(file: Path, change: Callable[[Any], object]) -> None:
    forged = rewritten(file, lambda found: (change(found), None)[1])
    tracemalloc.start()
    try:
        with pytest.raises(BundleError): check_all(forged)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally: tracemalloc.stop()


def test_a_manifest_that_is_deep_or_large(file: Path) -> None:
    data = b"[" * 100_000
    head = HEAD.pack(container.MAGIC, 1, 0, len(data), 0)
    file.write_bytes(head + hashlib.sha256(head + data).digest() + data)
    with pytest.raises(BundleError, match="no JSON"): open_bundle(file)
    file.write_bytes(HEAD.pack(container.MAGIC, 1, 0, 1 << 62, 0) + bytes(32))
    with pytest.raises(BundleError, match="a manifest of"): open_bundle(file)


def test_versions(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ((1, FORMAT[1] + 1), (2, 0), (0, 9)):
        with pytest.raises(BundleError, match=f"has format {version[0]}.{version[1]}"):
            open_bundle(rewritten(file, lambda found: None, version))
    monkeypatch.setattr(container, "FORMAT", (1, 3))
    check_all(rewritten(file, lambda found: None, (1, 2)))      # of an older minor format


def test_what_is_no_bundle(tmp_path: Path) -> None:
    for data in (b"", b"hello", b"PK\x03\x04" + bytes(100), container.MAGIC):
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(BundleError, match="is no bundle"): open_bundle(tmp_path / "x")
    with pytest.raises(BundleError, match="cannot be read"): open_bundle(tmp_path / "none")
    with pytest.raises(BundleError, match="cannot be read"): open_bundle(tmp_path)


# **** references ****

def referring(folder: Path) -> Bundle:
    (folder / "w.bin").write_bytes(bytes(range(200)) * 3)
    ranges = (FileRange("w.bin", 10, 100), FileRange("w.bin", 300, 50))
    content = b"".join((bytes(range(200)) * 3)[each.offset:each.offset + each.nbytes] for each in ranges)
    write_bundle(folder / "r.tnv", "model", {"sets": [], "weights": str(folder)},
                 [Source("a", b"1"), Source("weights/w", b"", ranges, 150, digest(content).hex()),
                  Source("b", b"2")])
    bundle = open_bundle(folder / "r.tnv")
    assert bundle.read("weights/w") == content
    return bundle


def test_parts_in_other_files(tmp_path: Path) -> None:
    bundle = referring(tmp_path)
    assert (bundle.read("a"), bundle.read("b")) == (b"1", b"2")
    bundle.verify()
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(BundleError, match=r"refers to .*w\.bin"):
        open_bundle(bundle.path, weights=other).read("weights/w")
    (other / "w.bin").write_bytes(bytes(200))
    with pytest.raises(BundleError, match="ends after"): open_bundle(bundle.path, weights=other).verify()
    (other / "w.bin").write_bytes(bytes(600))
    with pytest.raises(BundleError, match=r"weights/w \(in w\.bin\) is damaged"):
        open_bundle(bundle.path, weights=other).read("weights/w")


# **** signatures ****

@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    key = Ed25519PrivateKey.generate()
    private, public = tmp_path / "key.pem", tmp_path / "key.pub"
    private.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def test_signatures(file: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    private, public = keys
    signed = written(tmp_path / "signed.tnv", sign_key=private)
    open_bundle(signed, public).verify()
    open_bundle(signed).verify()
    with pytest.raises(BundleError, match="is not signed"): open_bundle(file, public)
    other = tmp_path / "other"
    other.mkdir()
    made = subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", other / "k.pem"],
                          check=False, capture_output=True)
    if made.returncode == 0:    # what the error tells a user to run
        subprocess.run(["openssl", "pkey", "-in", other / "k.pem", "-pubout", "-out", other / "k.pub"],
                       check=True, capture_output=True)
        open_bundle(written(other / "x.tnv", sign_key=other / "k.pem"), other / "k.pub").verify()
        with pytest.raises(BundleError, match="is signed by the key"): open_bundle(signed, other / "k.pub")


def test_a_signature_of_something_else(file: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    """A signature block of another file, behind a manifest whose hash fits."""
    private, public = keys
    signed = written(tmp_path / "signed.tnv", {"a": b"1"}, sign_key=private).read_bytes()
    size = HEAD.unpack_from(signed)[3]
    block = signed[HEADER + size:HEADER + size + 96]
    data = file.read_bytes()
    manifest = data[HEADER:HEADER + HEAD.unpack_from(data)[3]]
    head = HEAD.pack(container.MAGIC, 1, 0, len(manifest), 96)
    whole = head + hashlib.sha256(head + manifest + block).digest() + manifest + block
    forged = tmp_path / "forged.tnv"
    forged.write_bytes(whole + bytes(-len(whole) % PAGE) + data[open_bundle(file).start:])
    open_bundle(forged).verify()
    with pytest.raises(BundleError, match="a signature of something else"): open_bundle(forged, public)


def test_flips_of_a_signed_file(keys: tuple[Path, Path], tmp_path: Path) -> None:
    private, public = keys
    signed = written(tmp_path / "signed.tnv", {"a": b"1"}, sign_key=private)
    end = HEADER + HEAD.unpack_from(signed.read_bytes())[3] + 96
    flips(signed, list(range(8 * (end - 96), 8 * end, 3)), lambda path: open_bundle(path, public).verify())


def test_matrices_that_are_joined_are_pieces(tiny: Path) -> None:
    with LLM(tiny, device="CPU") as llm:
        found = capture.find_ranges(llm.model, tiny)
        at = llm.model.blocks[0].attention.qkv.weight.uop.buffer  # type: ignore[union-attr]
        key = id(at.base), at.offset, at.nbytes
        content = bytes_of(at)
        assert len(capture.confirm(found[key], tiny, content)) == 3
        changed = bytearray(content)
        changed[-1] ^= 1
        assert capture.confirm(found[key], tiny, memoryview(changed)) == []


def test_another_dtype_is_not_referred_to(tiny: Path) -> None:
    with LLM(tiny, "bfloat16", device="CPU") as llm: assert capture.find_ranges(llm.model, tiny) == {}


# as text of JSON: some are values that no writer of JSON makes
VALUES = (
    "null", "true", "-1", "0", "1.5", "1e308", "NaN", "-Infinity", '"x"', '""', "[]", "{}", "[[]]", "[null]",
    '{"a":1}', str(1 << 31), str(1 << 47), str(1 << 63), str(1 << 200), "9" * 3000, "-" + "9" * 3000,
    "9" * 5000,
    f'"{"a" * 300_000}"', '"\\ud800"', '"\\u0000"', '"\xff\xfe"', '"../x"', '"/etc/passwd"', "[" * 100_000,
    "[" * 900 + "]" * 900, '{"a":' * 400 + "1" + "}" * 400, "[" + "0," * 99_999 + "0]", '{"a":1,"a":2}')
MARK = "@@"


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    w = Tensor(np.arange(12, dtype=np.float32).reshape(3, 4)).realize()
    path = tmp_path_factory.mktemp("bundled") / "f.tnv"
    x = Tensor.ones(2, 3).contiguous()
    tinygrad_nv.compile(lambda x: {"a": (x @ w).relu(), "b": x.sum()}, x).save(path)
    return path


def places(found: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values; of a long list those of the first and the last."""
    yield at
    keys = [*found] if isinstance(found, dict) else range(len(found)) if isinstance(found, list) else ()
    for key in keys if len(keys) < 16 else (keys[0], keys[-1]): yield from places(found[key], (*at, key))


def put(found: Any, at: tuple[Any, ...], value: str | None) -> bytes:
    """JSON with another value there, or without it."""
    made = found = copy.deepcopy(found)
    for key in at[:-1]: made = made[key]
    if not at: found = MARK
    elif value is None: del made[at[-1]]
    else: made[at[-1]] = MARK
    return json.dumps(found).replace(f'"{MARK}"', value or "").encode("latin-1")


def check(file: Path) -> str:
    """What is said of a bundle; "" of one that is loaded."""
    begun, said = time.perf_counter(), ""
    for use in (tinygrad_nv.load, lambda file: inspect(open_bundle(file), True)):
        try: use(file)
        except BundleError as error:
            said = str(error)
            assert len(said.encode()) < 3000, said[:500]
    assert time.perf_counter() - begun < 5
    return said


@pytest.mark.parametrize("name", ["manifest", "set.json", "programs.json", "steps/0.json"])
def test_every_field_with_values_that_it_cannot_have(bundled: Path, name: str) -> None:
    """A few values for each field: across all fields every value comes many times."""
    bundle, draw, refused, tried = open_bundle(bundled), random.Random(name), 0, 0
    own = name if name == "manifest" else next(each for each in bundle.parts if each.endswith(name))
    found = manifest_of(bundled) if name == "manifest" else bundle.json(own)
    for at in places(found):
        for value in (*draw.sample(VALUES, 2), *([None] if at else [])):
            refused += bool(check(forged(bundled, own, put(found, at, value))))
            tried += 1
    assert refused > 0.6 * tried


@pytest.mark.parametrize(("name", "at", "value", "words"), [
    ("manifest", ("extra",), "1", "a field 'extra', which this format has not"),
    ("manifest", ("about", "extra"), "1", "a field 'extra', which this format has not"),
    ("manifest", ("parts", 0, "extra"), "1", "a field 'extra', which this format has not"),
    ("manifest", ("about", "sets", 0), '"../x"', "has a set '../x'"),
    ("manifest", ("about", "weights"), "[]", "weights: str"),
    ("set.json", ("extra",), "1", "a field 'extra'"),
    ("set.json", ("outputs", 0), f'[[{1 << 47}],"f32"]', "has an argument"),
    ("set.json", ("outputs", 0), f'[[{1 << 33}],"f32"]', "bytes of output.0"),
    ("set.json", ("inputs", 0), '[[0],"f32"]', "has an argument"),
    ("set.json", ("memory", "output.0"), "9" * 3000, "bytes of output.0"),
    ("set.json", ("native",), f'["{"b" * 300_000}"]', "this one lacks bbb"),
    ("set.json", ("tree",), "-1", "has a structure"),
    ("set.json", ("tree",), "true", "tree: int or dict"),
    ("set.json", ("name",), '"cpu-x"', "is of cpu-x"),
    ("set.json", ("steps", "call", 1), '"00"', "another hash than its set says"),
    ("programs.json", (0, "extra"), "1", "a field 'extra'"),
    ("programs.json", (0, "code"), "[1,200]", "begins with no header"),
    ("programs.json", (0, "code", 1), "100", "sections behind its end"),
    ("programs.json", (0, "globals"), "[]", "or lacks one"),
    ("programs.json", (0, "grid", 0), str(1 << 40), "its grid is (1099511627776, 1, 1)"),
    ("programs.json", (0, "grid", 0), "0", "its grid is (0, 1, 1)"),
    ("programs.json", (0, "name"), "null", "name = None"),
    ("steps/0.json", ("places", 0, 1), "9" * 3000, "no size: 999"),
    ("steps/0.json", ("places", 0, 0), f'"{"a" * 300_000}"', "no memory has the name"),
    ("steps/0.json", ("places",), "NaN", "no number of JSON")])
def test_what_is_said_of_a_field(bundled: Path, name: str, at: tuple[Any, ...], value: str,
                                 words: str) -> None:
    bundle = open_bundle(bundled)
    own = name if name == "manifest" else next(each for each in bundle.parts if each.endswith(name))
    found = manifest_of(bundled) if name == "manifest" else bundle.json(own)
    assert words in check(forged(bundled, own, put(found, at, value)))


def test_flips_and_truncations(bundled: Path) -> None:
    whole, draw = bundled.read_bytes(), random.Random(3)
    changed = [bytes(whole[:at]) for at in draw.sample(range(len(whole)), 40)]
    for bit in draw.sample(range(8 * len(whole)), 80):
        changed.append(whole[:bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1:])
    file = bundled.with_name("changed.tnv")
    for each in changed:
        file.write_bytes(each)
        with pytest.raises(BundleError): open_bundle(file).verify()


def test_code_that_is_no_object(bundled: Path) -> None:
    """tinygrad runs what is no ELF as it is, and trusts the sizes of what is one."""
    bundle = open_bundle(bundled)
    for name in ("code", "pool"):
        own = next(each for each in bundle.parts if each.endswith(f"/{name}"))
        data = bundle.read(own)
        for change in (b"\xc3" * len(data), data[:4] + b"\1" + data[5:], data[:40] + b"\xff" * 8 + data[48:],
                       data[:60] + b"\xff\xff" + data[62:], data[:20]):
            assert check(with_part(bundled, own, change)) != "", (name, change[:64])


def test_what_is_no_regular_file(bundled: Path, tmp_path: Path) -> None:
    """Nothing waits for a FIFO, or reads a device: of the bundle, or of weights that it refers to."""
    os.mkfifo(fifo := tmp_path / "fifo")
    for path in (fifo, Path("/dev/zero"), tmp_path, Path("a\0b")):
        assert not is_bundle(path)
        with pytest.raises(BundleError, match="cannot be read"): open_bundle(path)
    for folder, name in ((tmp_path, "fifo"), (Path("/dev"), "zero"), (Path("a\0b"), "x"), (tmp_path, "none")):
        found = manifest_of(bundled)
        part = next(each for each in found["parts"] if each["name"].startswith("weights/"))
        del part["offset"]
        part.update(ranges=[[name, 0, 1 << 50]], bytes=1 << 50)
        found["about"]["weights"] = str(folder)
        data = json.dumps(found).encode()
        assert check(forged(bundled, "manifest", data, without=part["name"])) != ""

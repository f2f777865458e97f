"""Every field of a bundle with values that it cannot have, whose hashes and digests fit: refused in words."""
from __future__ import annotations

import copy
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor

import tinygrad_nv
from tests.support.bundle.bundle_case import forged, manifest_of, with_part
from tinygrad_nv.bundle.container import is_bundle, open_bundle
from tinygrad_nv.bundle.report import inspect
from tinygrad_nv.errors import BundleError

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

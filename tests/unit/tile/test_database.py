"""The schedule database: what is stored is found again, by every process; what is broken is left out."""
from __future__ import annotations

import json
import multiprocessing
import warnings
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.dtype import dtypes

from bench.lib.specs import attention as emitted_attention
from bench.lib.specs import pack_sequences, with_fp8_scales
from tinygrad_nv.errors import NVError, ScheduleError, SpecError
from tinygrad_nv.tile import database
from tinygrad_nv.tile.attention import dense as attention
from tinygrad_nv.tile.attention.spec import Band
from tinygrad_nv.tile.clock import How
from tinygrad_nv.tile.database import Entry
from tinygrad_nv.tile.decode import dense as decode
from tinygrad_nv.tile.expression import Apply, Constant, Load, Position, Sum, gelu, gelu_tanh, silu, walk
from tinygrad_nv.tile.gemm.dense import MAJORS, TYPES, WORDS, dense
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Gemv, Mma, Wgmma
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.spec_json import spec_from_json, spec_to_json
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

SPEC = dense(64, 64, 256)
FAST = Mma().block(64, 64)


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NV_SCHEDULES", str(tmp_path / "schedules.json"))
    return tmp_path / "schedules.json"


def entry(spec: GemmSpec = SPEC, schedule: GemmSchedule = FAST, arch: str = "sm_80") -> Entry:
    return Entry(spec, arch, database.toolchain(), schedule, 1e-5)


# **** specs as JSON ****

BIAS = Load(0, dtypes.bfloat16, 0, 1)
SUM = Sum().cast(dtypes.bfloat16)
EPILOGUES = [SUM, silu(Sum()).cast(dtypes.bfloat16), gelu(SUM + BIAS),
             gelu_tanh(SUM) + Load(0, dtypes.bfloat16, 64, 1, (0,), 5),
             *(Apply("where", (condition, SUM, Constant(float(value), SUM.dtype)), SUM.dtype)
               for condition, value in ((Position("m") < Position("n"), "-inf"), (Position(0) < 3, "nan")))]


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_a_spec_survives_json(epilogue):
    spec = replace(dense(16, 24, 32, batch=(4,), symbolic=True), epilogue=epilogue)
    again = spec_from_json(json.loads(json.dumps(spec_to_json(spec), allow_nan=False)))
    assert repr(again) == repr(spec)     # not ==, as a constant may be nan
    assert json.dumps(spec_to_json(again)) == json.dumps(spec_to_json(spec))


@given(st.sampled_from(tuple(TYPES)), st.tuples(*[st.integers(1, 300)] * 3), st.sampled_from(MAJORS),
       st.lists(st.integers(1, 4), max_size=3).map(tuple), st.lists(st.sampled_from(WORDS), max_size=3),
       st.booleans())
@settings(deadline=None, max_examples=60)
def test_any_spec_survives_json(dtype, extents, majors, batch, words, symbolic):
    out = "f32" if words else ""
    spec = dense(*extents, dtype, out, majors, batch, "+".join(words), symbolic)
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


OTHERS = {"attention": attention.dense(2, 8, 512, 64, causal=True, kv_heads=2),
          "gradient": attention.gradient(attention.dense(1, 4, 128, 128, "f16", layout="BSHD")),
          "decode": decode.dense(4, 8, 1000, 128, kv_heads=2),
          "e4m3": decode.dense(4, 8, 64, 64, kv_dtype="e4m3"),
          "window": replace(attention.dense(1, 1, 64, 64), band=Band(-15, 0), kept=200, lse=True,
                            symbolic=("s_q", "s_kv")),
          "ragged": pack_sequences(emitted_attention(64, 64, 64, bshd=True), (100, 100)),
          "scaled": with_fp8_scales(emitted_attention(64, 64, 64), 32)}


@pytest.mark.parametrize("name", OTHERS)
def test_specs_of_other_families_survive_json(name: str):
    spec = OTHERS[name]
    data = json.loads(json.dumps(spec_to_json(spec), allow_nan=False))
    assert spec_from_json(data) == spec
    for spoiled in ({**data, "kind": "NormSpec"}, {**data, "more": 1}, {**data, "kind": 3},
                    {key: value for key, value in data.items() if key not in ("q", "forward")},
                    {**data, ("d" if "d" in data else "deterministic"): "64"}):
        with pytest.raises(SpecError): spec_from_json(spoiled)


def test_parts_survive_json():
    spec = dense(16, 24, 32, epilogue="gate")
    again = spec_from_json(spec_to_json(spec))
    assert again == spec
    assert sorted(node.part for node in walk(again.epilogue) if isinstance(node, Sum)) == [0, 1]


def test_a_node_used_twice_is_written_once():
    x = Sum()
    for _ in range(12): x = x + x
    spec = replace(dense(16, 16, 16), epilogue=x.cast(dtypes.bfloat16))
    assert len(spec_to_json(spec)["epilogue"]) == 14
    assert len(spec_from_json(spec_to_json(spec)).epilogue.args) == 1


def test_what_is_no_spec_is_refused():
    good = spec_to_json(SPEC)
    for spoiled in ({**good, "m": "64"}, {**good, "m": True}, {**good, "a": 3}, {**good, "batch": [2]},
                    {**good, "epilogue": []},
                    {**good, "epilogue": [{"kind": "cast", "dtype": "f32", "args": [0]}]},
                    {**good, "out": {**good["out"], "dtype": "f7"}}, {**good, "m": 0}, [], None, "spec",
                    {key: value for key, value in good.items() if key != "tf32"}):
        with pytest.raises(SpecError): spec_from_json(spoiled)


# **** entries ****

def test_what_is_stored_is_found(file):
    assert database.lookup(SPEC, "sm_80") is None
    database.store([entry()])
    assert database.lookup(SPEC, "sm_80") == FAST
    assert database.lookup(dense(64, 64, 256), "sm_80") == FAST       # an equal spec
    assert database.lookup(SPEC, "sm_90a") is None
    assert database.lookup(dense(64, 64, 257), "sm_80") is None
    database.store([entry(schedule=FAST.stages(4)), entry(dense(8, 8, 8))])
    assert database.lookup(SPEC, "sm_80") == FAST.stages(4)
    assert len(database.entries()) == 2
    assert [path.name for path in file.parent.iterdir() if "tmp" in path.name or ".json." in path.name] \
        == ["schedules.json.lock"]


def test_another_toolchain_has_other_winners(monkeypatch):
    database.store([entry()])
    monkeypatch.setattr(database, "toolchain", lambda kind="gpu": "ptxas V99.0")
    assert database.lookup(SPEC, "sm_80") is None
    database.store([entry(schedule=FAST.stages(5))])
    assert database.lookup(SPEC, "sm_80") == FAST.stages(5)
    assert len(database.entries()) == 2


def test_the_file_is_read_again_when_another_process_wrote_it(file):
    database.store([entry()])
    assert database.lookup(SPEC, "sm_80") == FAST
    file.write_text(database.dump([entry(schedule=FAST.stages(6))]))
    assert database.lookup(SPEC, "sm_80") == FAST.stages(6)
    file.unlink()
    assert database.lookup(SPEC, "sm_80") is None


def _store(number: int) -> None:
    for i in range(6): database.store([entry(dense(16 + number, 16 + i, 16))])


def test_processes_that_write_at_once_lose_nothing():
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_store, args=(number,)) for number in range(3)]
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 3
    assert len(database.entries()) == 18


def test_the_default_place_is_the_cache_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("NV_SCHEDULES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert database.path() == tmp_path / "tinygrad_nv" / "schedules.json"
    database.store([entry()])
    assert database.lookup(SPEC, "sm_80") == FAST
    assert database.clear() == 1
    assert database.clear() == 0
    assert database.lookup(SPEC, "sm_80") is None


def test_looking_is_quick():
    database.store([entry(dense(16, 16, 16 + i)) for i in range(200)])
    database.lookup(SPEC, "sm_80")
    import time
    start = time.perf_counter()
    for _ in range(50): database.lookup(SPEC, "sm_80")
    assert (time.perf_counter() - start) / 50 < 2e-3


def test_an_export_is_a_database(file):
    database.store([entry()])
    text = file.read_text()
    assert database.parse(text, file) == [entry()]
    assert database.dump(database.entries()) == text


def test_entries_that_are_none_are_refused():
    good = entry().to_json()
    for spoiled in ({**good, "arch": "sm_10"}, {**good, "seconds": -1}, {**good, "seconds": "1"},
                    {**good, "how": "estimated"}, {**good, "schedule": {"template": 3}},
                    {**good, "spec": None}, {}, None, 3):
        with pytest.raises(NVError): Entry.from_json(spoiled)


def test_no_warning_without_a_file(file):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert database.lookup(SPEC, "sm_80") is None
        assert database.entries() == []
    assert not file.exists()
    assert replace(entry(), seconds=2.0).key == entry().key


# **** how a time is known ****

def known(how: How, schedule: GemmSchedule, gpu: str = "") -> Entry:
    return replace(entry(schedule=schedule, arch="sm_90a"), how=how, gpu=gpu)


def test_what_is_measured_is_taken_before_what_is_modelled_and_that_before_what_is_counted():
    h100, h200 = (GPU("sm_90a", 132, model=name) for name in ("h100", "h200"))
    database.store([known("counted", FAST)])
    assert database.lookup(SPEC, "sm_90a", h100) == FAST
    database.store([known("modelled", FAST.stages(4), "h100"), known("modelled", FAST.stages(5), "h200")])
    assert database.lookup(SPEC, "sm_90a", h100) == FAST.stages(4)
    assert database.lookup(SPEC, "sm_90a", h200) == FAST.stages(5)
    assert database.lookup(SPEC, "sm_90a", replace(h100, model="h800")) == FAST     # of neither
    assert database.lookup(SPEC, "sm_90a", replace(h100, model="")) == FAST
    database.store([known("measured", FAST.stages(2))])
    database.store([known("modelled", FAST.stages(4), "h100"), known("counted", FAST)])
    for gpu in (h100, h200, GPU("sm_90a")): assert database.lookup(SPEC, "sm_90a", gpu) == FAST.stages(2)
    database.store([known("measured", FAST.stages(6), "h200"), known("measured", FAST.stages(3), "h800")])
    assert database.lookup(SPEC, "sm_90a", h200) == FAST.stages(6)      # the GPU by its name first
    assert [each.provenance for each in database.entries()] == ["counted", "modelled for h100",
                                                              "modelled for h200", "measured",
                                                              "measured on h200", "measured on h800"]
    assert database.parse(database.dump(database.entries()), Path("x")) == database.entries()


def test_one_that_is_not_legal_leaves_its_place_to_the_next(monkeypatch):
    monkeypatch.setattr(database, "_noted", set())
    database.store([known("counted", FAST), known("measured", Mma().block(100, 64))])
    with pytest.warns(database.ScheduleWarning, match="block_m=100"):
        assert database.lookup(SPEC, "sm_90a") == FAST


def test_a_modelled_entry_names_its_gpu_and_a_counted_one_has_none():
    data = known("modelled", FAST, "h100").to_json()
    assert data["gpu"] == "h100"
    assert "gpu" not in known("measured", FAST).to_json()
    for spoiled in ({**data, "gpu": ""}, {**data, "gpu": 3}, {**data, "how": "counted"},
                    {**data, "throttled": 1}, {**data, "driver": None}, {**data, "commit": "x" * 300}):
        with pytest.raises(ScheduleError): Entry.from_json(spoiled)


def test_a_measurement_is_taken_on_the_same_gpu_then_on_a_sibling_then_the_model():
    h100, h200 = (GPU("sm_90a", 132, model=name) for name in ("h100", "h200"))
    own = replace(known("measured", FAST.stages(2), "h100"), driver="580.1", commit="abc", throttled=True)
    sibling = known("measured", FAST.stages(5), "h800")
    database.store([known("modelled", FAST.stages(3), "h200"), sibling, known("modelled", FAST, "h100")])
    assert [database.lookup(SPEC, "sm_90a", gpu) for gpu in (h100, h200)] == [FAST.stages(5)] * 2
    database.store([own])
    assert database.find_winner(SPEC, "sm_90a", h100) == own == Entry.from_json(own.to_json())
    assert own.provenance == "measured on h100, throttled"
    database.clear()
    database.store([own, known("modelled", FAST, "h200")])
    assert database.lookup(SPEC, "sm_90a", h200) == FAST.stages(2)
    free = replace(own, throttled=False, seconds=2 * own.seconds)
    assert database.merge([free]) == (0, 1)         # what was not throttled counts, though it is slower
    assert database.merge([own]) == (0, 0)


def test_a_decode_has_one_winner_for_any_number_of_requests():
    one, many = (decode.dense(batch, 8, 4096, 128, kv_heads=2) for batch in (1, 32))
    gpu = GPU("sm_90a", 132)
    schedule, kept = TABLE.choose(many, gpu).stages(2), database.tuning_key(many)
    database.store([Entry(kept, "sm_90a", database.toolchain(), schedule, 1e-4, "measured")])
    assert TABLE.choose(one, gpu) == TABLE.choose(many, gpu) == schedule
    assert TABLE.choose(decode.dense(1, 8, 4096, 64, kv_heads=2), gpu) != schedule


# **** entries of older versions, and of other templates ****

OLD = {"block_m": 128, "block_n": 128, "block_k": 32, "warps_m": 2, "warps_n": 2, "depth": 3, "cluster_m": 1,
       "cluster_n": 1, "splits": 1, "stream": False, "mode": "cooperative", "group": 8, "swap": False,
       "swizzle_width": ""}  # each schedule once had all of them


@pytest.mark.parametrize(("template", "said", "schedule"), [
    ("mma", {"block_m": 64, "depth": 5, "splits": 3, "swap": True},
     Mma().block(64, 128).stages(5).split(3).swap_operands()),
    ("wgmma", {"block_k": 64, "warps_m": 12, "warps_n": 1, "cluster_m": 2, "mode": "pingpong",
               "swizzle_width": "64B"}, Wgmma().stages(3).cluster(2).pingpong().swizzle("64B")),
    ("wgmma", {"block_n": 256, "block_k": 64, "warps_m": 12, "warps_n": 1, "stream": True},
     Wgmma().block(128, 256).stages(3).stream_k()),
    ("gemv", {"block_m": 16, "block_n": 32, "block_k": 512, "warps_m": 4, "warps_n": 1, "splits": 2},
     Gemv().columns(32).k(512).warps(4).split(2)),
    ("gemv", {"warps_m": 4, "warps_n": 2}, Gemv())])
def test_what_an_older_version_wrote_is_read(template: str, said: dict[str, object], schedule: GemmSchedule):
    data = {**entry().to_json(), "schedule": {"template": template, **OLD, **said}}
    read = Entry.from_json(json.loads(json.dumps(data)))
    assert read.schedule == schedule
    assert Entry.from_json(json.loads(json.dumps(read.to_json()))) == read


@pytest.mark.parametrize(("schedule", "words"), [
    ({"template": "mma", **OLD, "stream": True}, "stream=True is of another template than mma"),
    ({"template": "mma", "cluster_m": 2}, "cluster_m=2 is of another template than mma"),
    ({"template": "mma", "mode": "pingpong"}, "mode='pingpong' is of another template than mma"),
    ({"template": "wgmma", **OLD}, "warps_n=2 is of another template than wgmma"),
    ({"template": "gemv", "swizzle_width": "64B"}, "swizzle_width='64B' is of another template than gemv"),
    ({"template": "gemv", "cluster_n": 2}, "cluster_n=2 is of another template than gemv"),
    ({"template": "mma", "stages": 3}, "stages=3 is of another template than mma"),
    ({"template": "mma", "depth": "3"}, "depth='3' of mma"),
    ({"template": "wgmma", "stream": 1}, "stream=1 of"),
    ({"template": "flash"}, "template 'flash'"), ({"block_m": 128}, "'block_m': 128"), ([], "[]")])
def test_what_is_no_schedule_of_its_template_is_refused_by_the_field(schedule: object, words: str):
    with pytest.raises(ScheduleError) as error: Entry.from_json({**entry().to_json(), "schedule": schedule})
    assert words in error.value.found


def test_an_entry_has_the_fields_of_its_template():
    for schedule in (Mma(), Wgmma(), Gemv()):
        said = entry(schedule=schedule).to_json()["schedule"]
        assert set(said) == {"template", *(field.name for field in fields(schedule))}

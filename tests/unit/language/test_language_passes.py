"""The passes by which programs become kernels: what they print is what the build does, and docs/language.md
shows it."""
from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from tinygrad import Tensor, dtypes

from tests.support.language.programs import PROGRAMS
from tinygrad_nv.cpu.language.show import show_kernel
from tinygrad_nv.errors import ConfigError, RequestError
from tinygrad_nv.explain import explain
from tinygrad_nv.language import *
from tinygrad_nv.language import KTile, OTile, bf16, cdiv, f32, kernel, tile
from tinygrad_nv.language.inspection import find_target
from tinygrad_nv.language.passes import NAMES, show_passes
from tinygrad_nv.numerics import verify
from tinygrad_nv.tile.language.passes import watch

PAGE = Path(__file__).parents[3] / "docs" / "language.md"
HEAD = re.compile(r"^// \d+ (\w+): .*\n", re.M)


@kernel
def matmul(a: KTile["M", "K", bf16], b: KTile["K", "N", bf16]) -> OTile["M", "N", f32]:
    T = tile.context()
    acc = tile.zeros((T.m, T.n), f32)
    for k in tile.range_k(a.shape, T.k): acc = tile.dot(a[T.m, k], b[k, T.n], acc)
    return acc


@kernel
def causal(q: KTile["H", "S", "D", bf16], k: KTile["H", "S", "D", bf16]) -> OTile["H", "S", "D", bf16]:
    T = tile.context()
    queries, acc = q[T.m, :], tile.zeros((T.m, q.shape[-1]), f32)
    m, l = tile.full((T.m,), -INF), tile.zeros((T.m,), f32)
    for n in tile.range_n(k.shape, 64):
        keys = k[n, :]
        scores = tile.dot(queries, tile.transpose(keys))
        tile.mask_causal(scores, tile.row_index(), tile.col_index(n))
        p, m_new, l_new = tile.softmax_online(scores)
        acc, m, l = tile.softmax_accumulate(acc, m, l, p, keys, m_new, l_new)
    return tile.cast(acc / l[:, None], bf16)


def operands(m: int = 256, n: int = 256, k: int = 512) -> tuple[Tensor, Tensor]:
    return Tensor.empty(m, k, dtype=bf16), Tensor.empty(k, n, dtype=bf16)


def sections(text: str) -> dict[str, str]:
    """The texts of all passes, by name."""
    words = HEAD.split(text)
    return dict(zip(words[1::2], words[2::2], strict=True))


# **** what is printed is what is built ****

@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "cpu"])
def test_the_last_pass_prints_the_kernel_and_the_first_ones_its_program(arch: str):
    given, target = operands(), find_target(arch)
    made = matmul.build_for(arch, 0, *given)()
    found = sections(matmul.passes(*given, arch=arch))
    assert tuple(found) == NAMES[target.kind]
    text, = (each.text for each in made.kernels)
    last = show_kernel(text) if arch == "cpu" else text
    remarks = "// for %8: %14 waited for in the next iteration\n" * (arch == "sm_90a")
    assert found[NAMES[target.kind][-1]].rstrip() == (remarks + last).rstrip()
    assert found["trace"].rstrip() == str(matmul.program(*given)).rstrip()
    for name in found:
        only = matmul.passes(*given, only=name, arch=arch)
        assert found[name].strip() in (only, "no change")


def test_the_device_of_the_tensors_is_the_target():
    given = [each.to("CPU") for each in operands()]
    assert tuple(sections(matmul.passes(*given))) == NAMES["cpu"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case.name)
@pytest.mark.parametrize("arch", ["sm_90a", "cpu"])
def test_programs_of_users_print_all_passes(arch: str, case: Any):
    """Each is followed to its kernel, and every operation and every loop is in the tables of passes."""
    def follow(one: Any, *args: Any, **constants: Any) -> Any:
        made = one.build_for(arch, 0, *args, **constants)()
        text = one.passes(*args, arch=arch, only=NAMES[find_target(arch).kind][-1], **constants)
        assert (show_kernel(made.kernels[0].text) if arch == "cpu" else made.kernels[0].text).rstrip() in text
        raise Followed
    with pytest.raises(Followed): case.got("CPU", follow)


class Followed(Exception):
    """The kernel has been looked at."""


def test_a_kernel_whose_masks_end_its_loop():
    """The trace shows the mask of every block, masks the branch of those at the edge and the loop's end."""
    q = Tensor.empty(2, 256, 64, dtype=bf16)
    found = sections(causal.passes(q, q, arch="sm_80"))
    assert " = if " not in found["trace"]
    assert " = if " in found["masks"]
    assert "[fn=min]" in found["masks"]


def test_promises_are_printed_and_then_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_DEBUG", "1")

    @verify.numerics(bounded=(-10, 10))
    def twice(x: Any) -> Any: return x * 2

    @kernel(grid=lambda N: (cdiv(N, 64),))
    def double(x: KTile["N", f32], out: OTile["N", f32]):
        rows = tile.block(tile.program_id(0) * 64, 64)
        out[rows] = twice(x[rows])
    found = sections(double.passes(Tensor.empty(100), arch="cpu"))
    assert "  promise %" in found["trace"]
    assert found["masks"].strip() == "no change"
    assert "  promise %" not in found["promises"]


def test_passes_of_what_cannot_be_end_with_the_reason():
    big = matmul.with_schedule(matmul.chosen.block(128, 256, 128).warps(8).stages(3))
    found = sections(big.passes(*operands(512, 512, 1024), arch="sm_90a"))
    assert found["ptx"].startswith("refused: 295936 B of shared memory")
    assert tuple(found) == NAMES["gpu"]
    many = sections(matmul.with_schedule(matmul.chosen.warps(3)).passes(*operands(), arch="sm_80"))
    assert tuple(many)[-1] == "check"
    assert many["check"].strip() == "refused: 3 warps: a kernel has 1, 2, 4, 8, 16 or 32"


# **** templates ****

def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).cast(x.dtype) * w


def test_templates_that_are_programs_print_what_they_build():
    x, w = Tensor.empty(64, 1024, dtype=dtypes.bfloat16), Tensor.empty(1024, dtype=dtypes.bfloat16)
    lowering = explain(rms_norm(x, w))
    record, = lowering.kernels
    found = sections(record.passes())
    assert tuple(found) == NAMES["cpu"]
    assert found["c"].rstrip() == show_kernel(record.source).rstrip()
    assert lowering.passes("places").startswith("// kernel 1 of 1: ")
    assert lowering.passes("places", 1).endswith(record.passes("places"))


def test_a_sum_in_two_launches_prints_both():
    from tinygrad_nv.tile.column_sum.program import PROGRAMS as SUMS
    from tinygrad_nv.tile.column_sum.spec import ColumnSumSpec
    from tinygrad_nv.tile.expression import Load
    from tinygrad_nv.tile.language.passes import passes_of
    from tinygrad_nv.tile.template import GPU
    from tinygrad_nv.tile.templates import TABLE
    spec = ColumnSumSpec(4096, 256, Load(0, dtypes.float32, 256, 1), dtypes.float32)
    gpu = GPU("sm_90a")
    schedule = TABLE.choose(spec, gpu)
    found = passes_of(lambda: TABLE.build(spec, schedule, gpu))
    assert [program.name for program, _ in found] == [SUMS[0].name] * 2
    assert all(tuple(each.name for each in made) == NAMES["gpu"] for _, made in found)
    text = show_passes(lambda: TABLE.build(spec, schedule, gpu), "roles")
    assert [line for line in text.splitlines() if line.startswith("//")] == \
        ["// launch 1 of 2: column_sum", "// launch 2 of 2: column_sum"]


def test_a_kernel_of_a_user_in_a_graph_is_found_again():
    given = [each.to("CPU").realize() for each in (Tensor.ones(64, 64, dtype=bf16), Tensor.ones(64, 64,
                                                                                                dtype=bf16))]
    lowering = explain(matmul(*given))
    assert "program matmul(" in lowering.passes("trace")


# **** what cannot be ****

def test_unknown_passes_are_named_with_those_that_there_are():
    with pytest.raises(RequestError, match=r"pass 'sass'(.|\n)*all, or one of source, (.|\n)*ptx \(GPU\)"):
        matmul.passes(*operands(), only="sass", arch="sm_80")
    with pytest.raises(RequestError, match=r"pass 'ptx' of a kernel without it(.|\n)*source, .*, c"):
        matmul.passes(*operands(), only="ptx", arch="cpu")
    with pytest.raises(ConfigError, match="arch='sm_70'"): matmul.passes(*operands(), arch="sm_70")


def test_a_kernel_that_is_no_program_has_no_passes():
    x = Tensor.empty(256, 256, dtype=dtypes.bfloat16)
    lowering = explain(x @ x)
    with pytest.raises(RequestError, match="is no program of the tile language"): lowering.passes("trace", 1)
    assert lowering.passes("trace") == "no kernel that is a program"
    with pytest.raises(RequestError, match="pass 'nothing'"): lowering.passes("nothing")


def test_a_watch_ends_with_its_block():
    with watch() as seen: matmul.build_for("sm_80", 0, *operands(64, 64, 64))()
    count = len(seen)
    matmul.build_for("sm_80", 0, *operands(64, 64, 128))()
    assert len(seen) == count > 0


# **** docs/language.md ****

def test_the_page_shows_what_passes_print(tmp_path: Path):
    """Each excerpt of the section: its lines, in order, with … for those left out."""
    _, _, rest = PAGE.read_text().partition("## How a program becomes a kernel\n")
    section, _, _ = rest.partition("\n## ")
    code, = re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)
    (tmp_path / "page.py").write_text("from tinygrad_nv.language import *\n" + code)
    spec = importlib.util.spec_from_file_location("page", tmp_path / "page.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(page := importlib.util.module_from_spec(spec))
    printed = {kind: sections(page.rms_norm.passes(page.x, page.weight, arch=arch))
               for kind, arch in (("gpu", "sm_90a"), ("cpu", "cpu"))}
    shown = set[str]()
    for block in re.findall(r"^```text\n(.*?)^```", section, re.M | re.S):
        (head, text), = sections(block).items()
        kind = "gpu" if head in NAMES["gpu"] else "cpu"
        assert block.startswith(f"// {NAMES[kind].index(head) + 1} {head}: ")
        left = printed[kind][head]
        for part in filter(None, re.split(r"^…\n", text, flags=re.M)):
            assert part in left, f"{head} does not print\n{part}"
            left = left.partition(part)[2]
        shown.add(head)
    without_change = {"masks", "promises", "check"}
    assert shown == {*NAMES["gpu"], *NAMES["cpu"]} - without_change
    assert all(printed["gpu"][name].strip() == "no change" for name in ("masks", "promises"))

"""What is said of a trace that cannot be written, of a second timeline, and of NVTX without its package."""
import sys

import pytest

from tinygrad_nv import timeline
from tinygrad_nv.errors import ConfigError, RequestError
from tinygrad_nv.runtime.observe import ranges


def test_a_directory_that_does_not_exist(tmp_path):
    path = tmp_path / "none" / "trace.json"
    with pytest.raises(RequestError) as caught, timeline(path): raise AssertionError("not reached")
    assert caught.value.found == f"a trace cannot be written to {path}: No such file or directory"
    assert caught.value.expected == "a file in a directory that exists and can be written"
    assert caught.value.fix == "name another file"
    assert not ranges.tracking()


def test_a_directory_in_place_of_a_file(tmp_path):
    with pytest.raises(RequestError) as caught, timeline(tmp_path): raise AssertionError("not reached")
    assert caught.value.found == f"a trace cannot be written to {tmp_path}: Is a directory"


def test_the_command_line_says_so_before_anything_is_loaded(command, tmp_path):
    command("generate", "--trace", tmp_path / "none" / "t.json", "Once").refused(
        "a trace cannot be written to", "No such file or directory", "to fix:   name another file")


def test_one_timeline_at_a_time():
    def nested() -> None:
        with timeline(): raise AssertionError("not reached")
    with timeline(), pytest.raises(RequestError) as caught: nested()
    assert str(caught.value).splitlines() == [
        "a timeline inside a timeline", "  expected: one at a time", "  to fix:   end the other first"]
    with timeline(): pass


def test_nvtx_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.setenv("NV_NVTX", "1")
    with pytest.raises(ConfigError) as caught: ranges.enable_nvtx()
    assert caught.value.found == "NV_NVTX=1 without the package nvtx"
    assert caught.value.expected == "nvtx, which makes the ranges"
    assert caught.value.fix == "pip install nvtx, or unset NV_NVTX"
    assert not ranges.tracking()

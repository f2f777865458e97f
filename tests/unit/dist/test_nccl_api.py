"""The binding against NCCL itself, where its wheel is installed: what can be asked without a driver."""
from __future__ import annotations

import ctypes

import pytest

from tinygrad_nv.dist.transports import nccl_api
from tinygrad_nv.errors import DistError


def test_the_configuration_is_laid_out_as_in_the_header():
    """nccl.h, ncclConfig_t: 4-byte fields behind the size, a pointer, and a last field."""
    config = nccl_api.Config
    assert [getattr(config, name).offset for name, _ in config._fields_] == [0, 8, 12, 16, 20, 24, 28, 32, 40]
    made = config.make()
    assert (made.size, made.magic, made.blocking) == (ctypes.sizeof(config), 0xcafebeef, 0)


def test_the_library():
    pytest.importorskip("nvidia.nccl", reason="needs the wheel nvidia-nccl-cu13")
    nccl = nccl_api.real()
    assert nccl.version >= nccl_api.LOWEST_VERSION
    assert [name for name in nccl_api.FUNCTIONS if not hasattr(nccl.library, name)] == []
    assert len({nccl.unique_id() for _ in range(2)}) == 2


def test_an_old_library_is_refused():
    class Old:
        def ncclGetVersion(self, version):
            version._obj.value = 21701
            return 0
    with pytest.raises(DistError, match=r"NCCL 2\.17\.1\n.*NCCL 2\.18\.0 or later"): nccl_api.NCCL(Old())


def test_where_there_is_none(monkeypatch):
    monkeypatch.setattr(nccl_api, "_paths", lambda: ["no-libnccl.so"])
    with pytest.raises(DistError, match=r"NCCL cannot be loaded: no-libnccl\.so"):
        nccl_api.real.__wrapped__()

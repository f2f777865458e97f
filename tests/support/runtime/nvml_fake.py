"""A pynvml that answers from a table, with the real one's constants and errors."""
from __future__ import annotations

import types
from typing import Any

import pynvml

UUIDS = ("GPU-aaaa", "GPU-bbbb")
BUSES = ("00000000:0A:00.0", "00000000:0B:00.0")


class FakeNVML(types.ModuleType):
    """Two GPUs; a field in `refused` answers with that error. `joules` is the energy counter of both."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.__dict__.update({name: value for name, value in vars(pynvml).items()
                              if name.startswith(("NVML_", "NVMLError"))})
        self.refused: dict[str, int] = {}
        self.joules, self.mhz, self.milliwatts, self.reasons, self.asked = 100.0, 1980, 350_000, 0, 0

    def _answer(self, name: str, value: Any) -> Any:
        self.asked += 1
        if name in self.refused: raise pynvml.NVMLError(self.refused[name])
        return value

    def nvmlInit(self) -> None: self._answer("init", None)

    def nvmlDeviceGetCount(self) -> int: return len(UUIDS)

    def _found(self, names: tuple[str, ...], name: str) -> int:
        if name not in names: raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return names.index(name)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if not 0 <= index < len(UUIDS): raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int: return self._found(UUIDS, uuid)

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> int:
        return self._found(tuple(each[4:] for each in BUSES), bus)

    def nvmlDeviceGetUUID(self, gpu: int) -> str: return UUIDS[gpu]

    def nvmlDeviceGetName(self, gpu: int) -> bytes: return b"NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetClockInfo(self, gpu: int, kind: int) -> int:
        name = {pynvml.NVML_CLOCK_SM: "sm", pynvml.NVML_CLOCK_MEM: "memory"}[kind]
        return int(self._answer(name, self.mhz if name == "sm" else 2619))

    def nvmlDeviceGetFieldValues(self, gpu: int, fields: list[int]) -> list[Any]:
        assert fields == [pynvml.NVML_FI_DEV_POWER_INSTANT]
        value = types.SimpleNamespace(nvmlReturn=self.refused.get("instant", 0),
                                      value=types.SimpleNamespace(uiVal=self.milliwatts))
        return [value]

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        return int(self._answer("power", self.milliwatts // 2))  # another figure, to tell the two apart

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        return self._answer("bytes", types.SimpleNamespace(used=(gpu + 1) << 30))

    def nvmlDeviceGetTemperature(self, gpu: int, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return int(self._answer("temperature", 61))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: int) -> int:
        return int(self._answer("reasons", self.reasons))

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: int) -> float:
        return float(self._answer("energy", self.joules * 1e3))

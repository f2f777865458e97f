"""CUDA's error codes, by their names in cudaError_t and CUresult, whose numbers agree but for a few."""
from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """cudaError_t; CUresult has the same numbers."""
    SUCCESS = 0
    INVALID_VALUE = 1
    MEMORY_ALLOCATION = 2
    INVALID_CONFIGURATION = 9
    INVALID_SYMBOL = 13
    INVALID_DEVICE_POINTER = 17
    INVALID_MEMCPY_DIRECTION = 21
    INVALID_DEVICE_FUNCTION = 98
    INVALID_DEVICE = 101
    INVALID_KERNEL_IMAGE = 200
    DEVICE_UNINITIALIZED = 201
    NO_KERNEL_IMAGE_FOR_DEVICE = 209
    UNSUPPORTED_LIMIT = 215
    INVALID_PTX = 218
    FILE_NOT_FOUND = 301
    INVALID_RESOURCE_HANDLE = 400
    ILLEGAL_STATE = 401
    SYMBOL_NOT_FOUND = 500
    NOT_READY = 600
    ILLEGAL_ADDRESS = 700
    LAUNCH_OUT_OF_RESOURCES = 701
    LAUNCH_TIMEOUT = 702
    ASSERT = 710
    HOST_MEMORY_ALREADY_REGISTERED = 712
    HARDWARE_STACK_ERROR = 714
    ILLEGAL_INSTRUCTION = 715
    MISALIGNED_ADDRESS = 716
    LAUNCH_FAILURE = 719
    NOT_SUPPORTED = 801
    STREAM_CAPTURE_UNSUPPORTED = 900
    STREAM_CAPTURE_INVALIDATED = 901
    STREAM_CAPTURE_MERGE = 902
    STREAM_CAPTURE_UNMATCHED = 903
    STREAM_CAPTURE_UNJOINED = 904
    STREAM_CAPTURE_ISOLATION = 905
    STREAM_CAPTURE_IMPLICIT = 906
    CAPTURED_EVENT = 907
    STREAM_CAPTURE_WRONG_THREAD = 908
    GRAPH_EXEC_UPDATE_FAILURE = 910
    INVALID_CLUSTER_SIZE = 912
    UNKNOWN = 999


class CudaError(Exception):
    """A function of the API returns this; `why` in words, where the code does not tell. `refused`: a GPU
    would have done it."""

    def __init__(self, status: Status, why: str = "", refused: bool = False) -> None:
        super().__init__(status.name)
        self.status, self.why, self.refused = status, why, refused


# what CUresult calls otherwise
DRIVER = {Status.MEMORY_ALLOCATION: "OUT_OF_MEMORY", Status.DEVICE_UNINITIALIZED: "INVALID_CONTEXT",
          Status.INVALID_KERNEL_IMAGE: "INVALID_IMAGE",
          Status.NO_KERNEL_IMAGE_FOR_DEVICE: "NO_BINARY_FOR_GPU",
          Status.INVALID_RESOURCE_HANDLE: "INVALID_HANDLE", Status.SYMBOL_NOT_FOUND: "NOT_FOUND",
          Status.LAUNCH_FAILURE: "LAUNCH_FAILED"}
# in words of ours, where the name does not say it
WORDS = {Status.SUCCESS: "no error", Status.MEMORY_ALLOCATION: "out of memory",
         Status.NOT_SUPPORTED: "operation not supported by the emulated GPU",
         Status.ILLEGAL_ADDRESS: "an illegal memory access was encountered",
         Status.LAUNCH_FAILURE: "unspecified launch failure"}


def runtime_name(error: int) -> str:
    """cudaErrorInvalidValue and its kind."""
    if error not in list(Status): return "unrecognized error code"
    if error == Status.SUCCESS: return "cudaSuccess"
    return "cudaError" + "".join(word.capitalize() for word in Status(error).name.split("_"))


def driver_name(error: int) -> str:
    """CUDA_ERROR_INVALID_VALUE and its kind."""
    if error not in list(Status): return "unrecognized error code"
    if error == Status.SUCCESS: return "CUDA_SUCCESS"
    return "CUDA_ERROR_" + DRIVER.get(Status(error), Status(error).name)


def describe(error: int) -> str:
    """Returns a few words for an error."""
    if error not in list(Status): return "unrecognized error code"
    return WORDS.get(Status(error), Status(error).name.lower().replace("_", " "))

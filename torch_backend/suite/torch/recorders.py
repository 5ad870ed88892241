"""What a device runs, recorded and run again without Python: CUDA graphs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch


def is_recording() -> bool:
    """Whether what this thread starts on a device is only recorded, to run later and again."""
    return not torch.compiler.is_compiling() and _is_capturing()


def _is_capturing() -> bool:
    # What is not initialized captures nothing, and may be a build for CUDA where there is no driver.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class BrokenRecording(RuntimeError):
    """CUDA refused what was to be recorded, and is not as it was."""


class CUDAGraphs:
    """Graphs of one device that share their memory, and a stream to run in what is to be recorded."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None

    def forget(self) -> None:
        """Share no memory with the graphs so far."""
        self._pool = None

    def run(self, body: Callable[[], Any]) -> Any:
        """What `body` returns, run where it would be recorded: autograd remembers streams."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                return body()
        finally:
            current.wait_stream(self._stream)

    def watched(self, body: Callable[[], Any]) -> tuple[Any, str]:
        """(what `body` returns, what makes the host wait in it or ''): that cannot be recorded.

        Others' threads should not make the host wait meanwhile.
        """
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                torch.cuda.set_sync_debug_mode("warn")
                found = body()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        waits = ""
        for one in caught:
            if "synchronizing CUDA operation" in str(one.message):
                waits = waits or f"{one.filename}, line {one.lineno}"
            elif "Synchronization debug mode" not in str(one.message):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        return found, waits

    def record(self, body: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """(what runs it again, what `body` returned): its tensors, which each run fills anew.

        Nothing has run yet.

        Raises:
            BrokenRecording: the process should go no further.
        """
        graph, found, error = torch.cuda.CUDAGraph(), None, None
        device, before = torch.cuda.current_device(), torch.cuda.current_stream(self._stream.device)
        # Other threads, of data loaders, may go on with what recording forbids.
        recording = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # if `body` raises
                with recording:
                    try:
                        found = body()
                    except Exception as raised:
                        error = raised
        except Exception as broken:
            self._pool = None
            torch.cuda.set_stream(before)
            torch.cuda.set_device(device)
            with contextlib.suppress(Exception):
                graph.reset()
            raise BrokenRecording(str(error or broken)) from (error or broken)
        if error is not None:
            raise error
        self._pool = graph.pool()
        return graph.replay, found


RECORDERS: dict[str, Callable[[torch.device], Any]] = {"cuda": CUDAGraphs}  # by type of device

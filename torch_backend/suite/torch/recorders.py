"""What a device runs, recorded and run again without Python: CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch


def is_recorded() -> bool:
    """Whether what this thread starts on a device is only recorded, to run later and again."""
    return not torch.compiler.is_compiling() and _is_capturing()


def _is_capturing() -> bool:
    # What is not initialized captures nothing, and may be a build for CUDA where there is no driver.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class CUDAGraphs:
    """Graphs of one device that share their memory, and a stream to run in what is to be recorded."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None

    def run(self, body: Callable[[], Any]) -> Any:
        """What `body` returns, run where it would be recorded: autograd remembers streams."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            found = body()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return found

    def record(self, body: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """(what runs it again, what `body` returned): its tensors, which each run fills anew.

        Nothing has run yet.
        """
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # beside a body's own error
            # Other threads, of data loaders, may go on with what recording forbids.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                found = body()
        self._pool = graph.pool()
        return graph.replay, found


RECORDERS: dict[str, Callable[[torch.device], Any]] = {"cuda": CUDAGraphs}  # by type of device

"""Processes that stay and run functions as the ranks of a process group: for tests of many processes."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

STALLED = 20.0  # seconds after which a collective gives up


class Crew:
    """Up to `size` processes. A function runs on some of them as one group, of gloo or of NCCL."""

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size, self.backend = size, backend
        self._context = multiprocessing.get_context("spawn")
        self._members: list[tuple[Any, Connection]] = []
        self._ready: list[Connection] = []

    def run(
        self, function: Callable[..., Any], world: int, *args: Any, fails: bool = False
    ) -> list[Any]:
        """What `function(*args)`, of a module's top level, returns on every rank of a new world.

        With `fails` an error is returned instead of raised, as its text; None for a process that died.
        """
        while len(self._members) < self.size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, self.backend), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        for _, connection in self._members:
            if connection not in self._ready and connection.poll(300):
                connection.recv()  # it has imported what it needs
                self._ready.append(connection)
        folder = tempfile.mkdtemp()
        chosen = self._members[:world]
        for rank, (_, connection) in enumerate(chosen):
            where = function.__module__, function.__qualname__
            connection.send((rank, world, os.path.join(folder, "store"), *where, args))
        results: list[Any] = []
        errors = []
        for process, connection in chosen:
            try:
                fine, result = connection.recv() if connection.poll(300) else (False, "no answer")
            except EOFError:
                fine, result = False, None
            results.append(result)
            if not fine:
                errors.append(result)
            if (not fine and not process.is_alive()) or result == "no answer":
                process.kill()
                self._members = [m for m in self._members if m[0] is not process]
        shutil.rmtree(folder, ignore_errors=True)  # a store removes its file when it is collected
        if errors and not fails:
            raise AssertionError("\n".join(str(error) for error in errors))
        return results

    def close(self) -> None:
        for process, connection in self._members:
            connection.close()
            process.join(5)
            process.kill()


def _serve(connection: Connection, backend: str) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if backend == "gloo":  # on the CPU, also where a GPU is at hand
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    connection.send("ready")
    while True:
        try:
            rank, world, store, module, name, args = connection.recv()
        except EOFError:
            return
        try:
            function: Any = importlib.import_module(module)
            dist.init_process_group(
                backend,
                init_method=f"file://{store}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=STALLED),
            )
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", category=DeprecationWarning)
                for part in name.split("."):
                    function = getattr(function, part)
                answer = True, function(*args)
        except BaseException as error:
            answer = False, f"rank {rank}: {error!r}\n{traceback.format_exc()}"
        finally:
            # The group must outlive every DistributedDataParallel, whose Reducer would destroy it with
            # the GIL held, for which gloo's threads wait when they drop their last tensors.
            gc.collect()
            time.sleep(0.02)
            if dist.is_initialized():
                dist.destroy_process_group()
        connection.send(answer)

"""Processes that stay up between tests, each one rank, joined by gloo."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

WORLD_SIZES = (2, 4, 8)
_LARGEST = max(WORLD_SIZES)


class WorkerError(AssertionError):
    """A job raised on some rank; holds the traceback, and the exceptions of all ranks."""

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = errors


class Workers:
    """``max(WORLD_SIZES)`` processes; a job of R ranks runs on the first R."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "hypothesis", "ops.moe_comm_gpu.torch_backend"])
        self._folder = tempfile.TemporaryDirectory(prefix="moe_workers_")
        store = os.path.join(self._folder.name, "store")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(_LARGEST):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, job: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], timeout_s: float = 120) -> list[Any]:
        """``job(rank, group, *arguments[rank])`` on every rank, as many as there are arguments.

        Raises:
            WorkerError: a rank raised, or did not answer in time.
        """
        ranks = len(arguments)
        for rank, args in enumerate(arguments):
            self._pipes[rank].send((job, ranks, args))
        results: dict[int, Any] = {}
        errors: dict[int, tuple[BaseException, str]] = {}
        while len(results) + len(errors) < ranks:
            waiting = {self._pipes[rank]: rank for rank in range(ranks) if rank not in results and rank not in errors}
            ready = wait(list(waiting), timeout=3 if errors else timeout_s)
            if not ready:
                self.stop()
                if errors:
                    break
                raise WorkerError(f"no answer from ranks {sorted(waiting.values())} within {timeout_s} s", {})
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    ok, value = pipe.recv()
                except EOFError:
                    self.stop()
                    raise WorkerError(f"the process of rank {rank} died", {}) from None
                (results if ok else errors)[rank] = value
        if errors:
            text = "\n".join(f"rank {rank}:\n{trace}" for rank, (_, trace) in sorted(errors.items()))
            raise WorkerError(text, {rank: error for rank, (error, _) in errors.items()})
        return [results[rank] for rank in range(ranks)]

    def stop(self) -> None:
        """Ends the processes; the next :func:`workers` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()
        workers.cache_clear()


@functools.cache
def workers() -> Workers:
    """The processes of this test run, started on first use."""
    made = Workers()
    atexit.register(made.stop)
    return made


def _serve(rank: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=_LARGEST, timeout=timedelta(seconds=120)
    )
    groups = {size: dist.new_group(range(size)) for size in WORLD_SIZES}
    groups[1] = None
    while True:
        try:
            job, ranks, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, job(rank, groups[ranks], *arguments)))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test process reports it
            pipe.send((False, (_picklable(error), traceback.format_exc())))


def _picklable(error: BaseException) -> BaseException:
    error.__cause__ = error.__context__ = None
    try:
        import pickle

        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error

"""Starts the processes of an emulation on this machine: for tests, benches and demonstrations."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from ops.moe_comm_gpu.emulation.processes import DEFAULT_HEAP_BYTES, EmulatedRuntime, create_heap_file


def run_processes(
    n_pes: int,
    function: Callable[[EmulatedRuntime], Any],
    *,
    heap_bytes: int = DEFAULT_HEAP_BYTES,
    limit_s: float = 120.0,
    **options: Any,
) -> list[Any]:
    """Calls ``function`` in ``n_pes`` forked processes, each with its runtime; returns the results by rank.

    Args:
        n_pes: number of ranks.
        function: what each rank does; its result has to be picklable.
        heap_bytes: size of each rank's symmetric heap.
        limit_s: when to give up on the whole run.
        options: further arguments of :class:`EmulatedRuntime`.

    Raises:
        Exception: the first error of a rank, with its traceback and rank in the notes.
        TimeoutError: a rank did not end within ``limit_s``.
    """
    path = create_heap_file(n_pes, heap_bytes)
    context = multiprocessing.get_context("fork")  # seconds faster than importing everything in each process
    ends = [context.Pipe(duplex=False) for _ in range(n_pes)]
    processes = [
        context.Process(target=_rank, args=(rank, n_pes, path, function, options, ends[rank][1]), daemon=True)
        for rank in range(n_pes)
    ]
    try:
        for process, (_, sender) in zip(processes, ends, strict=True):
            process.start()
            sender.close()
        return _collect([receiver for receiver, _ in ends], limit_s)
    finally:
        for process in processes:
            process.join(timeout=1.0)
            if process.is_alive():
                process.kill()
                process.join()
        if os.path.exists(path):
            os.unlink(path)


def _collect(receivers: list[Connection], limit_s: float) -> list[Any]:
    """Each rank's result; raises the first error that arrives."""
    results: dict[int, Any] = {}
    deadline = time.monotonic() + limit_s
    while len(results) < len(receivers):
        open_ends: dict[Any, int] = {r: i for i, r in enumerate(receivers) if i not in results}
        ready = wait(list(open_ends), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(open_ends.values())} did not end within {limit_s:g} s")
        for receiver in ready:
            rank = open_ends[receiver]
            try:
                result, error = pickle.loads(receivers[rank].recv_bytes())
            except EOFError:
                raise RuntimeError(f"the process of rank {rank} ended without a result") from None
            if error is not None:
                raise error
            results[rank] = result
    return [results[rank] for rank in range(len(receivers))]


def _rank(
    rank: int,
    n_pes: int,
    path: str,
    function: Callable[[EmulatedRuntime], Any],
    options: dict[str, Any],
    sender: Connection,
) -> None:
    """The life of one process."""
    import torch

    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    try:
        message = pickle.dumps((function(EmulatedRuntime(rank, n_pes, path, **options)), None))
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        error.add_note(f"rank {rank}:\n{traceback.format_exc()}")
        message = _pickled_error(error)
    sender.send_bytes(message)


def _pickled_error(error: BaseException) -> bytes:
    try:
        message = pickle.dumps((None, error))
        pickle.loads(message)
    except Exception:  # noqa: BLE001 - an error that does not survive pickling is told in words
        return pickle.dumps((None, RuntimeError("".join(traceback.format_exception(error)))))
    return message

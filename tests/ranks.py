"""N processes that wait for functions to run, each one rank of a gloo process group."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

TIME_LIMIT = timedelta(seconds=20)  # of one collective
GRACE = 8  # seconds that the other ranks get after the first error


class Ranks:
    """A pool of ranks. After an error it is stopped, since its ranks may be out of step."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.fsdp"])
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, f"{self.folder.name}/rendezvous", theirs, list(sys.path))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``function(*arguments)`` returns on each rank, in their order.

        Raises:
            AssertionError: with the traceback of every rank that failed or did not come back.
        """
        for pipe in self.pipes:
            pipe.send((function, arguments))
        waiting = dict(enumerate(self.pipes))
        results, errors = {}, {}
        deadline = time.monotonic() + 110
        while waiting and time.monotonic() < deadline:
            for pipe in multiprocessing.connection.wait(list(waiting.values()), timeout=0.2):
                rank = self.pipes.index(pipe)
                del waiting[rank]
                try:
                    good, result = pipe.recv()
                except EOFError:
                    good, result = False, "the process died"
                (results if good else errors)[rank] = result
                if not good:
                    deadline = min(deadline, time.monotonic() + GRACE)
        errors |= dict.fromkeys(waiting, "did not come back in time")
        if errors:
            self.stop()
            raise AssertionError(
                "\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(errors.items()))
            )
        return [results[rank] for rank in range(len(self.pipes))]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


def _serve(rank: int, size: int, rendezvous: str, pipe: Any, path: list[str]) -> None:
    sys.path[:] = path
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group(
        "gloo", rank=rank, world_size=size, init_method=f"file://{rendezvous}", timeout=TIME_LIMIT
    )
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))

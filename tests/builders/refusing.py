"""Memory that refuses moves, and an executor that runs work only on request."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.memory.protocol import Location, ManagedMemoryError


class RefusingMemory(EmulatedMemory):
    """Refuses moves to ``refused`` after the next ``left`` ones. ``ends_process``: fails as after a kernel error."""

    refused: Location | None = None
    left = 0
    ends_process = False

    def place(self, managed, spans, location):
        if location is self.refused:
            self.left -= 1
            if self.left < 0:
                raise ManagedMemoryError("place", managed.name, spans[0], "injected", ends_process=self.ends_process)
        super().place(managed, spans, location)


class Later(Executor):
    def __init__(self) -> None:
        self.tasks: list[Callable[[], None]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 -- like a thread's future, it raises when asked for the result
                future.set_exception(error)

        self.tasks.append(run)
        return future

    def run(self) -> None:
        """Runs everything submitted so far."""
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            task()

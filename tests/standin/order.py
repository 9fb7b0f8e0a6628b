"""Computes the happens-before order of logged operations: which one completes before which starts under any timing, as streams,
events and host waits guarantee. Reads a log that ``STANDIN_LOG_ORDER`` makes complete.

Each operation (kernel, copy, fill, prefetch or graph launch) is one step of its stream. A vector clock says how many steps of
each stream are complete. Each stream has one, each event has one as of its last record, and each host thread has one for what
it has waited for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

Call = Mapping[str, Any]
Clock = dict[str, int]

OPERATIONS = {
    "cudaLaunchKernel",
    "cuLaunchKernel",
    "library",
    "cudaMemcpy",
    "cudaMemcpyAsync",
    "cudaMemset",
    "cudaMemsetAsync",
    "cudaMemPrefetchAsync",
    "cudaGraphLaunch",
}


class Order:
    """The order of operations that one process's logged calls imply. Calls are distinguished by identity.

    Streams are assumed to be non-blocking, as torch's are: they do not wait for the default stream, nor it for them. A graph
    launch (``cudaGraphLaunch``) is one operation, and captured calls are none. With ``graph``, only what that graph captured
    counts.
    """

    def __init__(self, calls: Sequence[Call], graph: int = 0):
        if len({call.get("pid") for call in calls}) > 1:
            raise ValueError("the calls are from several processes; an order covers one")
        self._graph = graph
        self._calls = calls  # kept alive, so that identities stay unique
        self._streams: dict[str, Clock] = defaultdict(dict)
        self._events: dict[str, Clock] = defaultdict(dict)
        self._threads: dict[int, Clock] = defaultdict(dict)
        self._steps: dict[int, tuple[str, int]] = {}
        self._before: dict[int, Clock] = {}
        for call in calls:
            if call["result"] == 0:
                self._follow(call)

    def happens_before(self, first: Call, second: Call) -> bool:
        """Whether ``first`` completes before ``second`` starts under any timing."""
        stream, step = self._steps[self._operation(first)]
        return self._before[self._operation(second)].get(stream, 0) >= step

    def _operation(self, call: Call) -> int:
        if id(call) not in self._steps:
            raise ValueError(f"not an operation of this log, or one that failed or was captured: {call}")
        return id(call)

    def _follow(self, call: Call) -> None:
        name, host = call["call"], self._threads[call.get("thread", 0)]
        captured = (0 if name == "cudaGraphLaunch" else call.get("graph", 0)) != self._graph
        if name in OPERATIONS and not captured:
            self._add(call, host)
        elif name == "cudaEventRecord":
            self._events[call["event"]] = {} if captured else self._submitted(call["stream"], host).copy()
        elif name == "cudaStreamWaitEvent" and not captured:
            advance(self._submitted(call["stream"], host), self._events[call["event"]])
        elif name in ("cudaEventSynchronize", "cudaEventQuery"):
            advance(host, self._events[call["event"]])
        elif name in ("cudaStreamSynchronize", "cudaStreamQuery"):
            advance(host, self._streams[call["stream"]])
        elif name == "cudaDeviceSynchronize":
            for stream in self._streams.values():
                advance(host, stream)

    def _submitted(self, stream: str, host: Clock) -> Clock:
        """Returns the clock of a stream for work submitted now: after everything that the host has waited for."""
        advance(self._streams[stream], host)
        return self._streams[stream]

    def _add(self, call: Call, host: Clock) -> None:
        clock = self._submitted(call["stream"], host)
        self._before[id(call)] = clock.copy()
        clock[call["stream"]] = clock.get(call["stream"], 0) + 1
        self._steps[id(call)] = (call["stream"], clock[call["stream"]])
        if call.get("waits"):
            advance(host, clock)


def advance(clock: Clock, other: Clock) -> None:
    for stream, steps in other.items():
        clock[stream] = max(clock.get(stream, 0), steps)

"""Requests to a running server."""

from __future__ import annotations

import http.client
import os
import queue
import re
import threading
import urllib.error
import urllib.request

import msgspec

from sglang_uvm_offload.residency.status import OffloadStatus

INFO_PATH, STATUS_PATH = "/server_info", "/expert_offload"
MAX_BYTES = 64 << 20
MAX_REASON_BYTES = 4096
TIMEOUT_SECONDS = 30
"""For the whole request, from the DNS lookup to the last byte."""
API_KEY = "SGLANG_UVM_OFFLOAD_API_KEY"
"""The environment variable with the server's ``--api-key``. A flag would show the key in the process list."""
NO_OFFLOADING = "this server does not offload experts: it needs sglang-uvm-offload installed, and --expert-offload-num-resident"


class _Refusal(msgspec.Struct):
    error: str


class SourceError(ValueError):
    """The source cannot be used; the message names it and the reason."""


def is_url(source: str) -> bool:
    return re.match("https?://", source, re.IGNORECASE) is not None


def fetched(source: str, path: str) -> bytes:
    """What the server at the URL ``source``, which may end with ``path``, answers to ``GET path``. Raises ``SourceError``; its
    cause is an ``HTTPError`` for any status but 200."""
    url = source if source.endswith(path) else source.rstrip("/") + path
    request = _request(url, source)
    answer: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
    # On a thread that may be abandoned: socket timeouts apply to each read, and a DNS lookup has none.
    threading.Thread(target=_fetch, args=(request, answer), daemon=True).start()
    try:
        found = answer.get(timeout=TIMEOUT_SECONDS)
    except queue.Empty:
        found = TimeoutError()
    if isinstance(found, Exception):
        raise SourceError(f"{source}{_why(found, path)}") from found
    if len(found) > MAX_BYTES:
        raise SourceError(f"{source}: larger than {MAX_BYTES >> 20} MiB, too large for statistics")
    return found


def _request(url: str, source: str) -> urllib.request.Request:
    try:
        request = urllib.request.Request(url)
    except ValueError as error:
        raise SourceError(f"{source} does not answer: {error}") from error
    if key := os.environ.get(API_KEY):
        if not re.fullmatch("[!-~]+", key):  # http.client's error would show the key
            raise SourceError(f"{source}: {API_KEY} is not an API key: it has characters that an HTTP header cannot hold")
        request.add_unredirected_header("Authorization", f"Bearer {key}")  # never sent to another server
    return request


def _fetch(request: urllib.request.Request, answer: queue.SimpleQueue[bytes | Exception]) -> None:
    """Put the answer (at most ``MAX_BYTES`` + 1 bytes of it) or the exception."""
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            data = response.read(MAX_BYTES + 1)
        if len(data) <= MAX_BYTES and response.length:  # bytes are missing; ``read`` does not raise
            raise http.client.IncompleteRead(data, response.length)
        answer.put(data)
    except urllib.error.HTTPError as error:
        error.msg = _with_reason(error)
        answer.put(error)
    except Exception as error:  # noqa: BLE001 -- of any type, for a malformed address or answer; the waiting thread reports it
        answer.put(error)


def _with_reason(error: urllib.error.HTTPError) -> str:
    """The HTTP phrase, followed by the ``error`` of the body where it has one."""
    try:
        reason = msgspec.json.decode(error.read(MAX_REASON_BYTES), type=_Refusal).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OSError, http.client.HTTPException):
        return error.msg
    return error.msg if reason == error.msg else f"{error.msg}: {reason}"


def _why(error: Exception, path: str) -> str:
    """Why there is no answer, to append to the address."""
    if isinstance(error, urllib.error.HTTPError):
        hint = f": give its API key in the environment variable {API_KEY}" if error.code in (401, 403) else ""
        return f": {path} answers {error.code} {error.reason}{hint}"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception):
        return _why(error.reason, path)
    if isinstance(error, TimeoutError):
        return f" does not answer within {TIMEOUT_SECONDS} seconds"
    if isinstance(error, http.client.IncompleteRead | http.client.RemoteDisconnected):
        return " does not answer: the connection closed before the answer was complete"
    if isinstance(error, http.client.HTTPException) and not isinstance(error, http.client.InvalidURL):
        return " does not answer in HTTP"
    reason = error.reason if isinstance(error, urllib.error.URLError) else getattr(error, "strerror", None) or error
    return f" does not answer: {reason}"


def status_of(answer: bytes) -> OffloadStatus:
    """The answer to ``GET /expert_offload``. Raises ``ValueError`` or ``RecursionError`` for anything else."""
    status = msgspec.json.decode(answer, type=OffloadStatus)
    for rank in status.ranks:
        rank.check()
    return status

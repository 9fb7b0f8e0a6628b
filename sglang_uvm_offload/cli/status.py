"""The ``status`` command: where a running server's experts are and how they are used, once or again and again."""

from __future__ import annotations

import argparse
import sys
import time
import urllib.error

from sglang_uvm_offload.cli.server import API_KEY, NO_OFFLOADING, STATUS_PATH, SourceError, fetched, is_url, status_of
from sglang_uvm_offload.cli.terminal import Frames, complain, say
from sglang_uvm_offload.report.status_table import Look, status_line, status_table

PERIOD_SECONDS = 2.0
"""From an answer to the next request: ranks answer between two steps."""
NOT_FOUND, BUSY = 404, 503


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="URL",
        help="URL of a running server, such as http://127.0.0.1:30000; if it needs an API key, set "
        f"{API_KEY} in the environment",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--watch",
        action="store_true",
        help=f"ask every {PERIOD_SECONDS:g} seconds until Ctrl-C, and show what happened since the last answer; one line for "
        "each answer if the output is no terminal",
    )
    shown.add_argument("--json", action="store_true", help=f"print the answer of GET {STATUS_PATH}")


def run(args: argparse.Namespace) -> int:
    """Show the status. Returns 0, also after Ctrl-C; 1 if a watched server ends; 2 if there is no status."""
    try:
        answer, look = _look(args.source)
    except SourceError as error:
        complain(f"no status: {error}")
        return 2
    if args.json:
        say(answer.decode())
        return 0
    if not args.watch:
        say("\n".join(status_table(args.source, look, None)))
        return 0
    try:
        return _watch(args.source, look)
    except KeyboardInterrupt:
        if sys.stdout.isatty():  # which shows ^C
            say("")
        return 0


def _watch(source: str, look: Look) -> int:
    frames, before = Frames(), None
    in_place = sys.stdout.isatty()
    while True:
        if in_place:
            frames.show(status_table(source, look, before))
        else:
            say(status_line(look, before))
            sys.stdout.flush()
        before = look
        while look is before:
            time.sleep(PERIOD_SECONDS)
            try:
                _, look = _look(source)
            except SourceError as error:
                if not _may_pass(error):
                    complain(f"the server ended or stopped answering: {error}")
                    return 1


def _look(source: str) -> tuple[bytes, Look]:
    """The answer, and what it says. Raises ``SourceError``."""
    if not is_url(source):
        raise SourceError(f"{source}: not the URL of a server; did you mean http://{source}?")
    try:
        answer = fetched(source, STATUS_PATH)
    except SourceError as error:
        if _code(error) == NOT_FOUND:
            raise SourceError(f"{source}: {NO_OFFLOADING}") from error
        raise
    try:
        status = status_of(answer)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ``ValueError`` too
        raise SourceError(f"{source}: not the JSON of this version's {STATUS_PATH}: {error}") from error
    return answer, Look(status, time.localtime())


def _may_pass(error: SourceError) -> bool:
    """Whether the server may only be in a long step."""
    return isinstance(error.__cause__, TimeoutError) or _code(error) == BUSY


def _code(error: SourceError) -> int | None:
    """The HTTP status; None without an answer."""
    return error.__cause__.code if isinstance(error.__cause__, urllib.error.HTTPError) else None

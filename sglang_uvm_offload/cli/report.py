"""The ``report`` command: an HTML report on a server's statistics or a replay's results."""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import sys
import urllib.error
import urllib.request
from pathlib import Path

import msgspec

from sglang_uvm_offload.files import atomic as atomic_file
from sglang_uvm_offload.report.report_file import REPORT_FILE
from sglang_uvm_offload.report.source import ReplayResults, ServerInfo

MAX_BYTES = 64 << 20
TIMEOUT_SECONDS = 30


class SourceError(ValueError):
    """The source cannot be used; the message names it and the reason."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="URL of a running server, or a file with its /server_info or with the output of replay --json",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="REPORT.html", help="HTML file to write; needs no network")


def run(args: argparse.Namespace) -> int:
    """Write the report. Returns 0, or 2 if the source or the output file cannot be used."""
    if reason := atomic_file.refusal(args.out, REPORT_FILE):
        print(f"cannot report: --out {args.out}: {reason}", file=sys.stderr)
        return 2
    if importlib.util.find_spec("matplotlib") is None:
        print(
            "cannot report: charts need matplotlib: pip install matplotlib, or this package with its extra [report]",
            file=sys.stderr,
        )
        return 2
    try:
        report = report_of(args.source).encode("utf-8", errors="replace")
        atomic_file.replace(args.out, lambda file: file.write(report), REPORT_FILE)
    except SourceError as error:
        print(f"cannot report: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"cannot report: --out {args.out}: {error.strerror}", file=sys.stderr)
        return 2
    print(args.out)
    return 0


def report_of(source: str) -> str:
    """The report for a URL or a file. Raises ``SourceError``."""
    data = _fetched(source) if source.startswith(("http://", "https://")) else _read(source)
    try:
        keys = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).keys()
        if "results" in keys:
            from sglang_uvm_offload.report.replay_report import replay_report

            return replay_report(msgspec.json.decode(data, type=ReplayResults), source)
        if "internal_states" in keys:
            return _report_of_server(msgspec.json.decode(data, type=ServerInfo), source)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SourceError(f"{source}: not the JSON of this version's /server_info or replay --json: {error}") from error
    raise SourceError(f"{source}: not the JSON of /server_info (no internal_states), nor of replay --json (no results)")


def _report_of_server(info: ServerInfo, source: str) -> str:
    if not info.ranks:
        raise SourceError(
            f"{source}: this server does not offload experts: it needs sglang-uvm-offload installed, and "
            "--expert-offload-num-resident"
        )
    from sglang_uvm_offload.report.server_report import server_report

    return server_report(info, source)


def _fetched(source: str) -> bytes:
    url = source if source.endswith("/server_info") else source.rstrip("/") + "/server_info"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
            return _bounded(response.read(MAX_BYTES + 1), source)
    except urllib.error.HTTPError as error:
        hint = ": fetch it with the API key, save it to a file, and give that file" if error.code == 401 else ""
        raise SourceError(f"{source}: /server_info answers {error.code} {error.reason}{hint}") from error
    except urllib.error.URLError as error:
        raise SourceError(f"{source} does not answer: {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise SourceError(f"{source} does not answer: {error!r}") from error


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return _bounded(file.read(MAX_BYTES + 1), path)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error


def _bounded(data: bytes, source: str) -> bytes:
    if len(data) > MAX_BYTES:
        raise SourceError(f"{source}: more than {MAX_BYTES >> 20} MiB, too large for statistics")
    return data

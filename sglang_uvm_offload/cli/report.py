"""The ``report`` command, which writes an HTML report on a server's statistics or on a replay."""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path

import msgspec

from sglang_uvm_offload.cli.server import (
    API_KEY,
    INFO_PATH,
    MAX_BYTES,
    NO_OFFLOADING,
    STATUS_PATH,
    SourceError,
    fetched,
    is_url,
    status_of,
)
from sglang_uvm_offload.cli.terminal import complain, say
from sglang_uvm_offload.files import atomic as atomic_file
from sglang_uvm_offload.files import reading
from sglang_uvm_offload.files.kinds import mistaken
from sglang_uvm_offload.report.html import REPORT_FILE
from sglang_uvm_offload.report.source import ReplayResults, ServerInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="URL of a running server, or a file with its /server_info or with the output of replay --json; if the server "
        f"needs an API key, set {API_KEY} in the environment",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="REPORT.html", help="HTML file to write; needs no network")


def run(args: argparse.Namespace) -> int:
    """Write the report. Returns 0, or 2 if the source or the output file cannot be used."""
    if reason := atomic_file.refusal(args.out, REPORT_FILE):
        complain(f"cannot report: --out {args.out}: {reason}")
        return 2
    if importlib.util.find_spec("matplotlib") is None:
        complain("cannot report: charts need matplotlib: pip install matplotlib, or this package with its extra [report]")
        return 2
    try:
        report = report_of(args.source).encode("utf-8", errors="replace")
        atomic_file.replace(args.out, lambda file: file.write(report), REPORT_FILE)
    except SourceError as error:
        complain(f"cannot report: {error}")
        return 2
    except OSError as error:
        complain(f"cannot report: --out {args.out}: {error.strerror}")
        return 2
    say(args.out)
    return 0


def report_of(source: str) -> str:
    """The report for a URL or a file. Raises ``SourceError``."""
    from_server = is_url(source)
    if not from_server and (other := mistaken(source, "report")):
        raise SourceError(f"{source}: {other}")
    data = fetched(source, INFO_PATH) if from_server else _read(source)
    try:
        keys = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).keys()
        if "results" in keys:
            from sglang_uvm_offload.report.replay_report import replay_report

            return replay_report(msgspec.json.decode(data, type=ReplayResults), source)
        if "internal_states" in keys:
            info = msgspec.json.decode(data, type=ServerInfo)
            return _report_of_server(_with_all_ranks(info, source) if from_server else info, source)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SourceError(f"{source}: not the JSON of this version's /server_info or replay --json: {error}") from error
    raise SourceError(f"{source}: not the JSON of /server_info (no internal_states), nor of replay --json (no results)")


def _with_all_ranks(info: ServerInfo, source: str) -> ServerInfo:
    """``info`` with the status of every rank; as it is, where the server does not answer with that."""
    try:
        return msgspec.structs.replace(info, all_ranks=status_of(fetched(source.removesuffix(INFO_PATH), STATUS_PATH)))
    except (SourceError, ValueError, RecursionError):
        return info


def _report_of_server(info: ServerInfo, source: str) -> str:
    if not info.ranks:
        raise SourceError(f"{source}: {NO_OFFLOADING}")
    from sglang_uvm_offload.report.server_report import server_report

    return server_report(info, source)


def _read(path: str) -> bytes:
    try:
        return reading.read(path, MAX_BYTES)
    except OSError as error:
        hint = ""
        if isinstance(error, FileNotFoundError) and re.fullmatch(r"([\w.-]+|\[[\da-fA-F:]+\]):\d{1,5}(/.*)?", path):
            hint = f"; did you mean http://{path}?"
        raise SourceError(f"{path}: {error.strerror}{hint}") from error

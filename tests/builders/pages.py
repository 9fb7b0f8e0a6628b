"""Finds links, commands and flags in the documents, and parses them to find what is wrong."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NoReturn

import msgspec
from sglang.srt.server_args import ServerArgs

from sglang_uvm_offload.config import RequestedConfig
from sglang_uvm_offload.flags import ARGUMENTS, CONFIG, FLAGS, OPTIONS, PREFIX, FlagError, flag_name, spelled
from sglang_uvm_offload.plugin.operate.http_routes import _Command
from sglang_uvm_offload.requested_config import of_arguments, parse

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


class _Strict(argparse.ArgumentParser):
    """Raises ``ValueError`` instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def anchors(page: str) -> set[str]:
    """Returns a page's anchors, as GitHub derives them from headings: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ +(.+)$", page, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: str) -> list[str]:
    """Returns the targets of links and images, except web addresses."""
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", page) if not re.match(r"\w+:", link)]


def broken(link: str, page: Path) -> str | None:
    """Returns why a page's link is broken, or None."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return f"{link}: no such file"
    if anchor and anchor not in anchors(target.read_text()):
        return f"{link}: no such heading in {target.name}"
    return None


def commands(page: str) -> Iterator[list[str]]:
    """Yields the words of each command on a page: lines of code blocks, indented or fenced, without comments and with backslash
    continuations, and ``python -m MODULE ARGUMENTS`` in a sentence. Skips output, which is fenced as ``text`` or stands between
    the markers of generated text."""
    page = re.sub(r"^<!-- ([\w:]+) -->\n.*?^<!-- /\1 -->$", "", page, flags=re.M | re.S)
    fences = re.findall(r"^```([^\n]*)\n(.*?)^```", page, re.M | re.S)
    fenced = [body for language, body in fences if language != "text"]
    unfenced = re.sub(r"^```[^\n]*\n.*?^```", "", page, flags=re.M | re.S)
    indented = re.findall(r"(?:^ {4,}\S.*\n?)+", unfenced, re.M)
    inline = re.findall(r"`(python -m [\w.]+ [^`]*)`", unfenced)
    for line in re.sub(r"\\\n\s*", " ", "\n".join(indented + fenced + inline)).splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def kind(words: Sequence[str]) -> str:
    """Returns what a command runs: the program, and its subcommand if it has several. For a loop, what its body runs."""
    if words[0] == "for":
        return kind(words[words.index("do") + 1 :])
    several = {
        "sglang-uvm-offload": 2,
        "sglang": 2,
        "lm_eval": 2,
        "pip": 2,
        "bash": 2,
        "python": 3 if words[1:2] == ["-m"] else 2,
    }
    return " ".join(words[: several.get(words[0], 1)])


def of_kind(name: str) -> list[list[str]]:
    """Returns the commands of that kind on all pages, without duplicates."""
    found = {tuple(words) for page in PAGES for words in commands(page.read_text()) if kind(words) == name}
    return [list(words) for words in sorted(found)]


def launched(words: Sequence[str]) -> list[str] | None:
    """Returns the arguments of a command that launches SGLang, else None."""
    if words[0] == "sglang" and words[1:2] == ["serve"]:
        return list(words[2:])
    python = re.fullmatch(r"(.*/)?python[\d.]*", words[0])
    return list(words[3:]) if python and list(words[1:3]) == ["-m", "sglang.launch_server"] else None


def config_of_launch(arguments: Sequence[str]) -> tuple[argparse.Namespace, RequestedConfig | None]:
    """Returns SGLang's arguments and this plugin's config. An ellipsis stands for a model and offloading flags that the reader
    has already. Raises ``ValueError`` or ``FlagError``."""
    given = [argument for argument in arguments if argument != "..."]
    if len(given) < len(arguments):
        given += ["--model-path", "MODEL", *([] if flag_name("num_resident") in given else [flag_name("num_resident"), "8"])]
    parsed = _launch_parser().parse_args(given)
    return parsed, of_arguments({name: getattr(parsed, PREFIX + name) for name in (*FLAGS, CONFIG)})


@cache
def _launch_parser() -> argparse.ArgumentParser:
    parser = _Strict(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    for name, argument in ARGUMENTS.items():
        if spelled(name) not in parser._option_string_actions:  # SGLang has them once plugins are loaded
            kind = argument.kind
            parser.add_argument(spelled(name), type=kind.parser, choices=kind.choices, default=argument.default)
    return parser


def parse_subcommand(words: Sequence[str]) -> argparse.Namespace:
    """Parses ``plan MODEL ...`` with that subcommand's parser, and ``doctor``'s arguments after ``--`` as a launch."""
    name, *arguments = words
    parser = _Strict(allow_abbrev=False)
    importlib.import_module(f"sglang_uvm_offload.cli.{name}").add_arguments(parser)
    parsed = parser.parse_args(arguments)
    if name == "doctor" and parsed.launch and parsed.launch != ["..."]:
        config_of_launch(parsed.launch)
    return parsed


def flag_problems(name: str, value: str | None) -> list[str]:
    """Lists what is wrong with a flag in a sentence, and with the word after it if that is a value."""
    names = {spelled(each): each for each in (*FLAGS, CONFIG)}
    if name not in names:
        return [f"{name}: no such flag"]
    if value is None or value.isupper() or value.startswith(("-", "@", "...", "'")):
        return []
    if names[name] == CONFIG:
        return [] if value in OPTIONS else [f"{name} {value}: no such option"]
    try:
        parse({"num_resident": "8", names[name]: value})
    except FlagError as error:
        return [line for line in error.problems if ": must be " in line]
    return []


def parse_action(body: str) -> None:
    """Raises ``msgspec.ValidationError`` if ``/expert_offload`` does not accept this body."""
    msgspec.json.decode(body, type=_Command)

"""What the documents promise: their links, commands and flags, and parsers that say what is wrong with them."""

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
    """Raises ``ValueError`` where another parser ends the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def anchors(page: str) -> set[str]:
    """What ``#...`` may name in a page, as GitHub makes it of headings: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ +(.+)$", page, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: str) -> list[str]:
    """The targets of links and images that are no addresses on the web."""
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", page) if not re.match(r"\w+:", link)]


def broken(link: str, page: Path) -> str | None:
    """Why a link of a page leads nowhere, None if it leads somewhere."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return f"{link}: no such file"
    if anchor and anchor not in anchors(target.read_text()):
        return f"{link}: no such heading in {target.name}"
    return None


def commands(page: str) -> Iterator[list[str]]:
    """The words of each command of a page: of each line of its code blocks, indented or fenced, without comments and with the
    lines behind a backslash, and of ``python -m MODULE ARGUMENTS`` in a sentence. Output is no command: it is fenced as
    ``text``, or between the markers of what a script makes."""
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
    """What a command runs: the program, and what it is told to do where it has several things to do. Of a loop, its body."""
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
    """The commands of that kind on all pages, each once."""
    found = {tuple(words) for page in PAGES for words in commands(page.read_text()) if kind(words) == name}
    return [list(words) for words in sorted(found)]


def launched(words: Sequence[str]) -> list[str] | None:
    """The arguments of a command that launches SGLang, None if it does not."""
    if words[0] == "sglang" and words[1:2] == ["serve"]:
        return list(words[2:])
    python = re.fullmatch(r"(.*/)?python[\d.]*", words[0])
    return list(words[3:]) if python and list(words[1:3]) == ["-m", "sglang.launch_server"] else None


def config_of_launch(arguments: Sequence[str]) -> tuple[argparse.Namespace, RequestedConfig | None]:
    """SGLang's arguments and this plugin's config. An ellipsis stands for what the reader has already: a model, and offloading.
    Raises ``ValueError`` or ``FlagError``."""
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
        if spelled(name) not in parser._option_string_actions:  # in a process whose plugins are loaded they are SGLang's
            kind = argument.kind
            parser.add_argument(spelled(name), type=kind.parser, choices=kind.choices, default=argument.default)
    return parser


def parse_subcommand(words: Sequence[str]) -> argparse.Namespace:
    """``plan MODEL ...`` by the parser of that subcommand, and what a doctor is given behind ``--`` as a launch."""
    name, *arguments = words
    parser = _Strict(allow_abbrev=False)
    importlib.import_module(f"sglang_uvm_offload.cli.{name}").add_arguments(parser)
    parsed = parser.parse_args(arguments)
    if name == "doctor" and parsed.launch and parsed.launch != ["..."]:
        config_of_launch(parsed.launch)
    return parsed


def flag_problems(name: str, value: str | None) -> list[str]:
    """What is wrong with a flag that a sentence names, and with the value behind it, if it is one."""
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
    """Raises ``msgspec.ValidationError`` if a request to ``/expert_offload`` cannot have this body."""
    msgspec.json.decode(body, type=_Command)

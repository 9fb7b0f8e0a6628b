"""HTML around the charts: headings, tables and lists as a tree of elements, so that no text can become markup."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from xml.etree.ElementTree import Element, tostring

from sglang_uvm_offload.files import atomic as atomic_file
from sglang_uvm_offload.files import reading

GENERATOR = "sglang-uvm-offload"
DOCTYPE = "<!doctype html>"

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 900px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin: 2em 0 .3em } p { max-width: 46em; margin: .4em 0 }
table { border-collapse: collapse; margin: .8em 0; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid #ddd; padding: .2em .8em .2em 0; text-align: right; overflow-wrap: anywhere }
th { font-weight: 600 } th:first-child, td:first-child { text-align: left }
.facts td { text-align: left } .verdict { font-size: 1.1em; font-weight: 600 } .advice li { margin: .3em 0; max-width: 46em }
figure { margin: .5em 0 } figure > svg { max-width: 100%; height: auto }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The report may load nothing: it contains its styles and charts."""

Child = Element | str


def element(tag: str, *children: Child, **attributes: str) -> Element:
    """``element("p", "a < b", class_="note")``: ``_`` in a name becomes ``-``; a trailing one is dropped."""
    out = Element(tag, {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()})
    for child in children:
        if isinstance(child, Element):
            out.append(child)
        elif len(out):
            out[-1].tail = (out[-1].tail or "") + child
        else:
            out.text = (out.text or "") + child
    return out


def document(title: str, *body: Element) -> str:
    """A whole document that loads nothing."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="generator", content=GENERATOR),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width"),
        element("title", title),
        element("style", STYLE),
    )
    html = element("html", head, element("body", element("h1", title), *body), lang="en")
    return DOCTYPE + "\n" + tostring(html, encoding="unicode", method="html") + "\n"


def is_report(path: Path) -> bool:
    """Whether the file begins as this program's reports do: the head names the generator."""
    with reading.open_regular(path) as file:
        head = file.read(512)
    return head.startswith(DOCTYPE.encode()) and f'<meta name="generator" content="{GENERATOR}">'.encode() in head


REPORT_FILE = atomic_file.Kind("report", is_report)


def section(title: str, *body: Element) -> Element:
    return element("section", element("h2", title), *body)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Element:
    body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    return element("table", element("tr", *(element("th", cell) for cell in head)), *body)


def items(lines: Sequence[str]) -> Element:
    return element("ul", *(element("li", line) for line in lines), class_="advice")


def written() -> str:
    """The date and time of writing."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def facts(pairs: Sequence[tuple[str, str]]) -> Element:
    """A table of names and values."""
    rows = [element("tr", element("td", name), element("td", value)) for name, value in pairs]
    return element("table", *rows, class_="facts")

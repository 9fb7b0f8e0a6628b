"""HTML around the charts: headings, tables and lists, built as a tree of elements so that no text can become markup."""

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
:root { color-scheme: light }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff }
body { max-width: 880px; margin: 0 auto; padding: 1.5em 1em }
h1 { font-size: 1.5em; margin: 0 0 .6em } h2 { font-size: 1.2em; margin: 2.2em 0 .4em } p, li { max-width: 44em }
p { margin: .5em 0 } ul { padding-left: 1.2em } li { margin: .4em 0 } h1, p, li, .facts td + td { overflow-wrap: anywhere }
.headline { font-size: 1.2em; font-weight: 600; line-height: 1.4; border-left: 4px solid #0072b2; padding-left: .8em }
.alert { background: #fdf0e7; border-left: 4px solid #d55e00; padding: .6em .8em }
.table { overflow-x: auto; margin: .8em 0 } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid #ddd; padding: .3em 1.2em .3em 0; vertical-align: top }
th, td { text-align: right; white-space: nowrap }
th { font-weight: 600 } th:first-child, td:first-child, .facts td { text-align: left } .facts td + td { white-space: normal }
small { display: block; max-width: 32em; white-space: normal; font-size: .85em; color: #666 } td:has(small) { min-width: 13em }
td:last-child, th:last-child { padding-right: 0 }
figure { margin: .8em 0 } svg { display: block; max-width: 100%; height: auto } .narrow { display: none }
@media (max-width: 720px) {
  .wide { display: none } .narrow { display: block }
  .facts td { display: block; border: 0; padding: 0 } .facts td:first-child { font-size: .85em; color: #666; margin-top: .5em }
}
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
    """A complete document that loads nothing."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="generator", content=GENERATOR),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
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


def table(head: Sequence[str], rows: Sequence[Sequence[Child]]) -> Element:
    """A table that scrolls inside itself if the screen is too narrow. An empty ``head`` leaves the header row out."""
    body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    top = [element("tr", *(element("th", cell) for cell in head))] if head else []
    return element("div", element("table", *top, *body), class_="table", tabindex="0")


def explained(name: str, meaning: str) -> Element:
    """A name for a table's cell, with its meaning below it."""
    return element("span", name, element("small", meaning))


def items(lines: Sequence[str]) -> Element:
    return element("ul", *(element("li", line) for line in lines))


def folded(summary: str, *body: Element) -> Element:
    """A part that stays closed until the reader opens it."""
    return element("details", element("summary", summary), *body)


def written() -> str:
    """The current date and time, which the report shows."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def facts(pairs: Sequence[tuple[str, str]]) -> Element:
    """A table with a name and a value in each row."""
    rows = [element("tr", element("td", name), element("td", value)) for name, value in pairs]
    return element("table", *rows, class_="facts")

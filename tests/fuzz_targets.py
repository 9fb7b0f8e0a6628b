"""Fuzzing targets for everything that reads external input. A target runs one input and must accept it or refuse it with a
documented error.

No input may unpickle anything, write outside the target's folder, connect or start a process; an audit hook checks that. All
targets run in this process, without a server.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import struct
import sys
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import mutation
import numpy as np
from builders.managers import Rank, config
from builders.profiles import saved, some
from builders.reports import replayed, result
from builders.shapes import use_recorded
from builders.traces import guessing, trace
from numpy.lib import format as npy
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from sglang_uvm_offload.cli import report as report_cli
from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.cli.profile import describe
from sglang_uvm_offload.cli.server import API_KEY, SourceError
from sglang_uvm_offload.flags import ARGUMENTS, FlagError
from sglang_uvm_offload.plan import engine_shape
from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.plan.safetensors_header import CheckpointError, read_folder
from sglang_uvm_offload.plugin.operate import http_routes
from sglang_uvm_offload.plugin.operate.actions import Action
from sglang_uvm_offload.plugin.operate.metrics import Metrics
from sglang_uvm_offload.replay import room
from sglang_uvm_offload.replay.lookahead import foreseen
from sglang_uvm_offload.replay.simulator import replay
from sglang_uvm_offload.report import replay_report, server_report
from sglang_uvm_offload.report.html import element
from sglang_uvm_offload.requested_config import of_arguments
from sglang_uvm_offload.resident_ids import ResidentIds
from sglang_uvm_offload.routing.profile import Profile, ProfileError
from sglang_uvm_offload.routing.trace import Trace, TraceError

MODELS = Path(__file__).parent / "fixtures" / "models"
TRIES: dict[str, Callable[[random.Random, Path], bool]] = {}
"""Targets by name. Each runs one input, made with the given ``Random``, in its own empty folder and returns whether the input
was accepted. It raises whatever a user would see as a traceback, and ``AssertionError`` if the output is wrong."""


def target(try_one: Callable[[random.Random, Path], bool]) -> Callable[[random.Random, Path], bool]:
    TRIES[try_one.__name__] = try_one
    return try_one


class Forbidden(BaseException):
    """Raised for what no input may cause. Not an ``Exception``, so that no ordinary handler hides it."""


_watched: list[Path] = []


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if not _watched:
        return
    if event in ("pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "socket.connect"):
        raise Forbidden(f"{event} {args[:2]}")
    if event == "open" and isinstance(args[0], (str, bytes)) and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        path = Path(os.fsdecode(args[0])).absolute()
        if not any(path.is_relative_to(folder) for folder in _watched) and path != Path(os.devnull):
            raise Forbidden(f"{path} is opened for writing")


sys.addaudithook(_watch)


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Within the block, what no input may cause raises ``Forbidden``. Only files in ``folder`` may be written."""
    _watched.append(folder)
    try:
        yield
    finally:
        _watched.clear()


def run(name: str, seed: str, folder: Path) -> bool:
    """Runs one input of the target ``name``. Returns whether it was accepted."""
    with watched(folder):
        return TRIES[name](random.Random(f"{name} {seed}"), folder)


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def _expect_printable(said: str) -> None:
    _expect(all(line.isprintable() for line in said.split("\n")), f"control characters reach the terminal: {said!r}")


FIELDS = tuple(ARGUMENTS)
GOOD_FLAGS = (
    {"num_resident": "4", "resident_selection": "manual", "resident_ids": "0-2,3", "adapt": "off"},
    {"num_resident": 4, "prefetch": "speculative", "slots": "2", "config": {"stream_buffer_gb": 1.5, "stream_tokens": "inf"}},
    {"num_resident": "auto", "profile": "a.npz,b.npz", "config": {"save_profile": "c.npz", "tma": False}, "headroom_gb": 0.5},
    {"num_resident": "8", "config": {"warmup_tokens": 8}, "warmup_tokens": "8", "prefetch_num": "4", "trace": "t.npz"},
)


@target
def flags(chance: random.Random, folder: Path) -> bool:
    given = dict(chance.choice(GOOD_FLAGS))
    for _ in range(chance.randint(0, 3)):
        given[chance.choice(FIELDS)] = mutation.value(chance)
    if isinstance(given.get("config"), dict) and chance.random() < 0.5:
        text = mutation.document(given["config"], chance)
        (folder / "options.json").write_bytes(text)
        given["config"] = chance.choice((text.decode(errors="replace"), f"@{folder / 'options.json'}"))
    try:
        return of_arguments(given) is not None
    except FlagError as error:
        _expect(all(problem.startswith("--expert-offload-") for problem in error.problems or [""]), str(error))
        _expect_printable(str(error))
        return False


@target
def resident_ids(chance: random.Random, folder: Path) -> bool:
    if chance.random() < 0.5:
        text = mutation.damaged(chance.choice((b"0-63,70", b" 1, 2,,3-4 ", b"5")), chance).decode(errors="replace")
        if text.strip().startswith("@"):
            return False
    else:
        (folder / "ids.json").write_bytes(mutation.document([[0, 1], [5, 6, 7], []], chance))
        text = f"@{folder / 'ids.json'}"
    try:
        ids = ResidentIds.parse(text)
    except ValueError as error:
        _expect(len(str(error)) < 1000 + len(text), str(error))
        _expect_printable(str(error))
        return False
    ids.number_problems(2) + ids.expert_problems(6) + ids.layer_problems((3, 5))
    return True


@target
def profile(chance: random.Random, folder: Path) -> bool:
    path = saved(folder / "p.npz", some(seed=chance.randrange(3)))
    _damage_npz(path, chance)
    return _accepted(lambda: describe(Profile.load(path)), ProfileError)


@target
def routing_trace(chance: random.Random, folder: Path) -> bool:
    path = folder / "t.npz"
    made = trace([0, 2, 2, 3], [2, 2, 1, 2], experts=chance.choice((4, 300)))
    chance.choice((made, guessing(made))).save(path)
    _damage_npz(path, chance)

    def read() -> None:
        read = Trace.load(path)
        batch = chance.choice((1, 2, 4096))
        if room.needed(read, batch) < 1 << 20:
            replay(read, "first_n", 0.5, batch)
            if read.guesses is not None:
                foreseen(read, "first_n", 0.5, batch)

    return _accepted(read, (TraceError, ValueError))


def _accepted(read: Callable[[], object], refusals: type[Exception] | tuple[type[Exception], ...]) -> bool:
    try:
        read()
    except refusals as error:
        _expect_printable(str(error))
        return False
    return True


class _Planted:
    """An object for pickled object arrays. Unpickling it is forbidden."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.getcwd, ()


def _damage_npz(path: Path, chance: random.Random) -> None:
    if chance.random() < 0.4:
        path.write_bytes(mutation.damaged(path.read_bytes(), chance))
        return
    with np.load(path) as file:
        arrays = dict(file)
    members = {name: _npy(array) for name, array in arrays.items()}
    name = chance.choice(sorted(arrays))
    members[name] = _changed_array(name, arrays[name], chance)
    if chance.random() < 0.1:
        del members[chance.choice(sorted(members))]
    method = chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(path, "w", method) as archive:
        for member, content in members.items():
            archive.writestr(f"{member}.npy", content)


def _npy(array: np.ndarray, pickled: bool = False) -> bytes:
    file = io.BytesIO()
    npy.write_array(file, array, allow_pickle=pickled)
    return file.getvalue()


def _changed_array(name: str, array: np.ndarray, chance: random.Random) -> bytes:
    kind = chance.randrange(7)
    if name == "about" and kind < 5:
        return _npy(np.frombuffer(mutation.document(json.loads(array.tobytes()), chance), dtype=np.uint8))
    if kind == 0:
        return _npy(array.astype(chance.choice((np.float64, np.int8, np.uint64, np.complex128, "S3", "M8[s]", bool))))
    if kind == 1:
        return _npy(array.reshape(chance.choice(((-1,), (1, -1), (*array.shape, 1), array.shape[::-1]))))
    if kind == 2:
        return _npy(np.array([_Planted()], dtype=object), pickled=True)
    if kind == 3:  # a wrong header
        header = io.BytesIO()
        shape = tuple(chance.choice((0, 1, 2, 10**6, 10**12, -1)) for _ in range(chance.randint(0, 4)))
        npy.write_array_header_1_0(
            header, {"descr": chance.choice(("|O", "<i8", "|u1")), "fortran_order": False, "shape": shape}
        )
        return header.getvalue() + chance.choice((array.tobytes(), pickle.dumps(_Planted())))
    if kind == 4 and array.size:
        changed = array.copy().ravel()
        limits = np.iinfo(np.int8 if array.dtype == bool else array.dtype)
        changed[chance.randrange(changed.size)] = chance.choice((0, 1, limits.max, limits.min))
        return _npy(changed.reshape(array.shape))
    return mutation.damaged(_npy(array), chance)


def _configs() -> list[dict[str, Any]]:
    """Returns configs of released models, with few layers and experts so that a plan takes milliseconds."""
    out = []
    for file in sorted(MODELS.glob("*.json")):
        content = json.loads(file.read_text())
        whole = content.get("config", content)
        small = {"num_hidden_layers": 4, "n_routed_experts": 8, "num_experts": 8, "num_local_experts": 8}
        out.append({name: small.get(name, value) for name, value in whole.items()})
    return out


CONFIGS = _configs()


def _any_shape() -> Any:
    """Returns the same model shape for every config, without SGLang, which takes seconds for each."""
    use_recorded()
    line = msgspec.json.encode(shape_of(MODELS / "qwen3-235b-a22b.json"))
    answers: dict[str, Any] = {"_run": lambda asked: [line] * len(asked), "_check_known": lambda config: None}
    return mock.patch.multiple(engine_shape, **answers, _kept=lambda key: None, _keep=lambda key, line: None)


@target
def plan(chance: random.Random, folder: Path) -> bool:
    path = folder / "config.json"
    valid: Any = chance.choice(CONFIGS)
    path.write_bytes(mutation.document({"name": "m", "config": valid} if chance.random() < 0.3 else valid, chance))
    machine = chance.choice(("8xH20", "1x5090", "1xSPARK"))
    with _any_shape(), contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(["plan", str(path), "--machine", machine, *chance.choice(([], ["--json"], ["--slots", "auto"]))])
    said = out.getvalue() + err.getvalue()
    _expect_printable(said)
    assert (code == 2) == bool(err.getvalue()), err.getvalue()
    return code != 2


@target
def safetensors(chance: random.Random, folder: Path) -> bool:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    header |= {f"layers.{i}.w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [16 * i, 16 * i + 16]} for i in range(3)}
    text = mutation.document(header, chance) if chance.random() < 0.7 else json.dumps(header).encode()
    length = len(text) if chance.random() < 0.8 else chance.choice(mutation.LENGTHS)
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", length) + text + bytes(48))
    if chance.random() < 0.3:
        index = {"weight_map": {f"layers.{i}.w": "a.safetensors" for i in range(3)}}
        (folder / "model.safetensors.index.json").write_bytes(mutation.document(index, chance))
    return _accepted(lambda: read_folder(folder), CheckpointError)


class _Page(HTMLParser):
    """Records what a browser would run or load."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.handlers += [name for name, value in attrs if name.startswith("on") or "script" in (value or "").lower()]


WORDS_ONLY = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "section", "table", "tr", "th", "td", "ul", "li", "p"),
    *("figure", "div", "span", "small", "details", "summary"),
}


def _check_page(html: str) -> None:
    page = _Page()
    page.feed(html)
    assert page.tags <= WORDS_ONLY, f"tags {page.tags - WORDS_ONLY}"
    assert not page.handlers, page.handlers


@contextlib.contextmanager
def _without_charts() -> Iterator[None]:
    """Makes reports without charts: drawing takes a hundred times as long, and charts draw text as paths."""
    saved = [(module, name, getattr(module, name)) for module in (server_report, replay_report) for name in dir(module)]
    drawing = ("picture", "cell_map", "column_chart", "line_chart", "bar_chart")
    for module, name, _ in saved:
        if name in drawing:
            setattr(module, name, lambda *args, **named: element("figure"))
    try:
        yield
    finally:
        for module, name, value in saved:
            setattr(module, name, value)


def _statistics() -> dict[str, Any]:
    rank = Rank(config(resident_selection="first_n"), num_shared=1)
    for _ in range(20):
        rank.step([[0, 7, 8], [1, 6, 8]])
    return {"internal_states": [{"expert_offload": rank.status(), "ep_size": 2}], "model_path": mutation.MARKUP, "version": "v"}


SERVER_INFO = _statistics()
REPLAY = json.loads(json.dumps({"trace": mutation.MARKUP, "results": [result("adaptive"), result("lru")]}))
assert replayed(*REPLAY["results"])


@target
def page(chance: random.Random, folder: Path) -> bool:
    """Makes a page from /server_info or replay --json."""
    (folder / "source.json").write_bytes(mutation.document(chance.choice((SERVER_INFO, REPLAY)), chance))
    try:
        with _without_charts():
            html = report_cli.report_of(str(folder / "source.json"))
    except SourceError as error:
        _expect("\n" not in str(error), str(error))
        return False
    _check_page(html)
    return True


URLS = ("http://127.0.0.1:30000", "https://[::1]:30000/server_info", "HTTP://host.example/a?b#c", "http://user:key@host:1/")


@target
def url(chance: random.Random, folder: Path) -> bool:
    """Runs up to the connection, which is refused."""
    address = mutation.damaged(chance.choice(URLS).encode(), chance).decode(
        errors=chance.choice(("replace", "surrogateescape"))
    )
    key = {API_KEY: chance.choice(("", "s3cret", "s3cret\r\nHost: x", "s3cré"))}
    with mock.patch.dict(os.environ, key), mock.patch.object(urllib.request, "urlopen", _answer):
        return _reported(address)


def _reported(address: str) -> bool:
    try:
        report_cli.report_of(address)
    except SourceError as error:
        said = str(error)
        _expect("s3cr" not in said and "Error(" not in said, f"a key, or the repr of an exception: {said}")
        return "Connection refused" in said
    raise AssertionError("an answer without a server")


class _Refusing:
    """Replaces a connection: http.client parses the address and builds the request, and then nothing answers."""

    def __init__(self, *args: Any, **named: Any):
        raise ConnectionRefusedError(111, "Connection refused")


def _answer(request: urllib.request.Request, timeout: float) -> Any:
    import http.client

    connection = http.client.HTTPConnection(request.host, timeout=timeout)
    connection._create_connection = _Refusing  # type: ignore[attr-defined]
    connection.request(request.get_method(), request.selector, headers=dict(request.header_items()))


REGISTRY = CollectorRegistry()


def _metrics() -> tuple[Rank, Metrics]:
    rank = Rank(config(resident_selection="first_n"))
    return rank, Metrics(rank.manager, dict.fromkeys(("model_name", "tp_rank"), ""), dict, [], REGISTRY)


RANK, METRICS = _metrics()


@target
def metric_labels(chance: random.Random, folder: Path) -> bool:
    """Uses a model name, which a user chooses, as a label: a scrape must return it."""
    name = mutation.damaged(chance.choice((b"org/model", mutation.MARKUP.encode(), b'a"\\\n{}')), chance).decode(
        errors="replace"
    )
    METRICS.labels = {"model_name": name, "tp_rank": "0"}
    for metric in vars(METRICS).values():
        if isinstance(metric, MetricWrapperBase):
            metric.clear()
    RANK.step([[0, 7], [1, 7]])
    METRICS.publish()
    lines = generate_latest(REGISTRY).decode()
    ours = [line for line in lines.split("\n") if "sglang:expert_offload_resident_experts" in line]
    shown = {
        sample.labels["model_name"] for family in text_string_to_metric_families("\n".join(ours)) for sample in family.samples
    }
    assert shown == {name}
    return True


@target
def action_body(chance: random.Random, folder: Path) -> bool:
    """The body of ``POST /expert_offload``."""
    action = chance.choice(list(Action))
    body = json.dumps({"action": action}).encode()
    if chance.random() < 0.9:
        body = mutation.document({"action": action}, chance)
    try:
        return http_routes.action_in(body) in list(Action)
    except http_routes.Refused as refused:
        _expect(refused.status == 400, str(refused))
        return False

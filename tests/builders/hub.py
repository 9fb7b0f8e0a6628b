"""A stand-in for the Hugging Face Hub that serves checkpoints from folders to ``huggingface_hub``."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMIT = "c0" * 20
_FILE = re.compile(r"/(?P<id>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_API = re.compile(r"/api/models/(?P<id>[^/?]+/[^/?]+)(/revision/(?P<revision>[^/?]+))?(/tree/.*)?")


@dataclass
class Hub:
    """``models`` by id, or by ``id@revision`` for revisions other than ``main``."""

    models: Mapping[str, Path]
    url: str = ""
    fetched: list[tuple[str, int]] = field(default_factory=list)
    """Each requested file with the bytes that were sent."""
    dripping: str = ""
    """A file that is sent byte by byte, without end."""

    def env(self, home: Path) -> dict[str, str]:
        """Returns the environment of a process that uses this as the Hub, with its own cache."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}

    def bytes_of_weights(self) -> int:
        return sum(count for name, count in self.fetched if name.endswith(".safetensors"))

    def folder(self, name: str, revision: str | None) -> Path | None:
        if revision in (None, "main", COMMIT):
            return self.models.get(name)
        return self.models.get(f"{name}@{revision}")


def cached(cache: Path, name: str, folder: Path, revision: str = "main", files: str = "*") -> None:
    """Puts the folder's files that match ``files`` where a download of the model would."""
    entry, commit = cache / f"models--{name.replace('/', '--')}", hashlib.sha1(revision.encode()).hexdigest()
    (entry / "refs").mkdir(parents=True, exist_ok=True)
    (entry / "refs" / revision).write_text(commit)
    (entry / "snapshots" / commit).mkdir(parents=True)
    for path in folder.glob(files):
        (entry / "snapshots" / commit / path.name).symlink_to(path)


@contextmanager
def serving(models: Mapping[str, Path]) -> Iterator[Hub]:
    """Serves while the block runs."""
    hub = Hub(models)

    class Handler(_Handler):
        of = hub

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            server.shutdown()


class _Handler(http.server.BaseHTTPRequestHandler):
    of: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if match := _FILE.match(self.path):
            return self._file(match["id"], match["revision"], match["file"])
        if match := _API.match(self.path):
            return self._about(match["id"], match["revision"])
        return self._missing("RepoNotFound")

    def _missing(self, code: str) -> None:
        self._answer(404, b"{}", {"X-Error-Code": code, "X-Repo-Commit": COMMIT})

    def _about(self, name: str, revision: str | None) -> None:
        folder = self.of.folder(name, revision)
        if folder is None:
            return self._missing("RepoNotFound")
        files = [{"rfilename": path.name} for path in sorted(folder.iterdir())]
        about = {"id": name, "modelId": name, "sha": COMMIT, "siblings": files, "tags": [], "private": False}
        return self._answer(200, json.dumps(about).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str, revision: str, file: str) -> None:
        folder = self.of.folder(name, revision)
        if folder is None:
            return self._missing("RepoNotFound" if self.of.folder(name, None) is None else "RevisionNotFound")
        path = folder / file
        if not path.is_file():
            return self._missing("EntryNotFound")
        first, last, status = 0, path.stat().st_size - 1, 200
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last, status = int(asked[1]), min(last, int(asked[2] or last)), 206
        headers = {
            "ETag": f'"{hashlib.sha1(str(path).encode()).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        headers |= {"Content-Range": f"bytes {first}-{last}/{path.stat().st_size}"} if status == 206 else {}
        if self.command == "HEAD":
            return self._answer(status, b"", headers, length=last + 1 - first)
        with path.open("rb") as opened:
            opened.seek(first)
            body = opened.read(last + 1 - first)
        self.of.fetched.append((file, len(body)))
        if file == self.of.dripping:
            return self._drip()
        return self._answer(status, body, headers)

    def _drip(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(1 << 20))
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has ended
            while True:
                self.wfile.write(b" ")
                time.sleep(0.05)

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str], length: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body) if length is None else length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

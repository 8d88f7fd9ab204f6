"""A server on 127.0.0.1 that speaks the routes of the Hugging Face Hub which a download needs.

    GET  /api/models/USER/REPO                the repository's files
    HEAD, GET  /USER/REPO/resolve/main/FILE   302 to the store, with the file's ETag, size and commit
    GET  /store/ETAG                          the bytes, or those of a range

The store answers under another host name than the hub, as it does on the real one, so that what is sent to which
can be told apart. Routes and headers: what huggingface_hub asks for and reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

HUB, STORE = "127.0.0.1", "localhost"


class Seen(NamedTuple):
    """A request that came. `host` is HUB or STORE."""

    method: str
    host: str
    path: str
    token: str | None
    range: str | None


@dataclass
class Repository:
    """`token`: what a request must carry where it is private; a gated one lets everybody list its files.

    `error`: a status for every request.
    """

    files: dict[str, bytes]
    token: str | None = None
    is_gated: bool = False
    error: int | None = None

    @property
    def commit(self) -> str:
        """Changes with the files, as a commit does."""
        listing = sorted((file, hashlib.sha256(data).hexdigest()) for file, data in self.files.items())
        return hashlib.sha1(repr(listing).encode()).hexdigest()


@dataclass
class HubServer:
    """`cuts`: after how many bytes the store breaks off the next answers, one each. A context manager."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)

    def __enter__(self) -> HubServer:
        self._server = ThreadingHTTPServer((HUB, 0), _Handler)
        self._server.hub = self  # type: ignore[attr-defined]
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://{HUB}:{self.port}"

    def add(self, repo: str, files: dict[str, bytes], **options: Any) -> Repository:
        self.repositories[repo] = Repository(files, **options)
        return self.repositories[repo]

    def ranges(self) -> list[str | None]:
        """The ranges asked of the store, None for a whole file."""
        return [request.range for request in self.seen if request.host == STORE]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> HubServer:
        return self.server.hub  # type: ignore[attr-defined,no-any-return]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def _route(self) -> None:
        path = unquote(urlsplit(self.path).path)
        host = (self.headers["Host"] or "").partition(":")[0]
        token = (self.headers["Authorization"] or "").removeprefix("Bearer ") or None
        self.hub.seen.append(Seen(self.command, host, path, token, self.headers["Range"]))
        if path.startswith("/store/"):
            return self._send_stored(path.removeprefix("/store/"))
        name = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        repo = self.hub.repositories.get(name)
        if repo is None:
            return self._fail(404, "RepoNotFound", "Repository not found")
        if repo.error is not None:
            return self._fail(repo.error, None, "Scripted failure")
        is_listing = path.startswith("/api/models/")
        if repo.token is not None and token != repo.token and not (repo.is_gated and is_listing):
            if repo.is_gated:
                return self._fail(403, "GatedRepo", "Access to this model is restricted")
            if token is not None:
                return self._fail(401, None, "Invalid credentials in Authorization header")
            return self._fail(401, "RepoNotFound", "Repository not found")
        if is_listing:
            siblings = [{"rfilename": file} for file in repo.files]
            body = json.dumps({"id": name, "sha": repo.commit, "siblings": siblings}).encode()
            return self._send(200, body, {"Content-Type": "application/json"})
        return self._send_pointer(repo, path.removeprefix(f"/{name}/resolve/main/"))

    def _send_pointer(self, repo: Repository, file: str) -> None:
        if file not in repo.files:
            return self._fail(404, "EntryNotFound", "Entry not found")
        data = repo.files[file]
        etag = hashlib.sha256(data).hexdigest()
        headers = {
            "X-Repo-Commit": repo.commit,
            "X-Linked-Etag": f'"{etag}"',
            "X-Linked-Size": str(len(data)),
            "Location": f"http://{STORE}:{self.hub.port}/store/{etag}",
        }
        return self._send(302, b"", headers)

    def _send_stored(self, etag: str) -> None:
        stored = [item for repo in self.hub.repositories.values() for item in repo.files.items()]
        file, data = next(item for item in stored if hashlib.sha256(item[1]).hexdigest() == etag)
        headers = {"Content-Disposition": f'inline; filename="{os.path.basename(file)}";'}
        status = 200
        if self.headers["Range"]:
            start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            status, data = 206, data[start:]
        if self.command == "GET" and self.hub.cuts:
            self._send(status, data, headers, num_sent=self.hub.cuts.pop(0))
            self.close_connection = True
            return None
        return self._send(status, data, headers)

    def _fail(self, status: int, code: str | None, message: str) -> None:
        self._send(status, b"", ({"X-Error-Code": code} if code else {}) | {"X-Error-Message": message})

    def _send(self, status: int, body: bytes, headers: dict[str, str], num_sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:num_sent])

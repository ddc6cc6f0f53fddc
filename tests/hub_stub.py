"""A stand-in for the Hugging Face hub: its HTTP interface as far as uploading a data set needs it."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKENS = {"Bearer writer": 200, "Bearer reader": 403}


@dataclass
class Hub:
    """What it holds: files by branch; and what it was asked. `failures` are (part of a path, status, how
    often); status 0 ends the connection without an answer.
    """

    url: str = ""
    private: bool | None = None
    exists: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    objects: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    commits: list[list[str]] = field(default_factory=list)
    failures: list[list[Any]] = field(default_factory=list)

    def failure(self, path: str) -> int | None:
        for failing in self.failures:
            if failing[0] in path and failing[2] > 0:
                failing[2] -= 1
                return int(failing[1])
        return None

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        *_, last = path.split("/")
        if path.endswith("/repos/create"):
            asked = json.loads(body)
            assert (asked["organization"], asked["name"], asked["type"]) == ("me", "set", "dataset")
            if self.exists:
                return 409, {"error": "it exists", "url": f"{self.url}/datasets/me/set"}
            self.exists, self.private = True, asked.get("visibility") == "private"
            return 200, {"url": f"{self.url}/datasets/me/set"}
        if path == "/api/validate-yaml":
            assert json.loads(body)["content"].startswith("---\n")
            return 200, {"warnings": [], "errors": []}
        if path.startswith("/api/datasets/me/set/branch/"):
            self.branches.setdefault(last, {})
            return 200, {}
        if path.startswith("/api/datasets/me/set/preupload/"):
            return 200, {"files": [self._mode(last, f) for f in json.loads(body)["files"]]}
        if path == "/datasets/me/set.git/info/lfs/objects/batch":
            return 200, {"objects": [self._action(o) for o in json.loads(body)["objects"]]}
        if method == "PUT" and path.startswith("/lfs/"):
            assert hashlib.sha256(body).hexdigest() == last
            self.objects[last] = body
            self.uploads.append(last)
            return 200, {}
        if path.startswith("/api/datasets/me/set/commit/"):
            self._commit(last, body)
            return 200, {"commitUrl": f"{self.url}/datasets/me/set/commit/0", "commitOid": "0" * 40}
        if method == "GET" and path.startswith("/api/datasets/me/set"):
            return 200, {"id": "me/set", "sha": "0" * 40}
        return 404, {"error": f"{method} {path}"}

    def _mode(self, branch: str, file: dict[str, Any]) -> dict[str, Any]:
        path, is_lfs = file["path"], file["path"].endswith(".parquet")
        content, oid = self.branches[branch].get(path), None
        if content is not None:
            git = b"blob %d\0" % len(content) + content
            oid = (hashlib.sha256(content) if is_lfs else hashlib.sha1(git)).hexdigest()
        mode = "lfs" if is_lfs else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def _action(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if wanted["oid"] in self.objects:
            return wanted
        return wanted | {"actions": {"upload": {"href": f"{self.url}/lfs/{wanted['oid']}"}}}

    def _commit(self, branch: str, body: bytes) -> None:
        names = []
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "lfsFile":
                self.branches[branch][value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "file":
                self.branches[branch][value["path"]] = base64.b64decode(value["content"])
            else:
                assert line["key"] == "header"
                continue
            names.append(value["path"])
        self.commits.append(names)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub on a port of this machine."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def read_body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)

        def handle_any(self) -> None:
            body = self.read_body()
            path = self.path.partition("?")[0]
            hub.asked.append(f"{self.command} {path}")
            status, answer = hub.failure(path), None
            if status == 0:
                self.close_connection = True
                return
            if status is None and not path.startswith("/lfs/"):
                allowed = TOKENS.get(self.headers.get("Authorization", ""), 401)
                status = None if allowed == 200 else allowed
            if status is None:
                status, answer = hub.answer(self.command, path, body)
            content = json.dumps(answer or {"error": f"told to say {status}"}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = handle_any

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

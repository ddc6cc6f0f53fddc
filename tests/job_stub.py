"""A job server that is told what to answer, for what no real head can be made to do."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import ray

DROP = "drop"  # An answer: the connection is closed without one.


@dataclass
class Stub:
    """What is answered, and what was asked.

    Each list of answers is used up one by one; the last stays. An answer is what goes into the JSON, a
    status with a text, or DROP.
    """

    address: str = ""
    version: Any = field(default_factory=lambda: {"ray_version": ray.__version__})
    metadata: Any = (404, "not found")
    starts: list[Any] = field(default_factory=lambda: [{}])
    infos: list[Any] = field(
        default_factory=lambda: [{"status": "SUCCEEDED", "driver_exit_code": 0}]
    )
    logs: list[Any] = field(default_factory=lambda: [{"logs": ""}])
    requests: list[str] = field(default_factory=list)
    started: list[dict[str, Any]] = field(default_factory=list)
    packages: list[bytes] = field(default_factory=list)

    def answer(self, method: str, path: str, body: bytes) -> Any:
        self.requests.append(f"{method} {path}")
        if path == "/api/version":
            return self.version
        if path == "/api/v0/cluster_metadata":
            return self.metadata
        if path.startswith("/api/packages/"):
            if method == "PUT":
                self.packages.append(body)
            return {} if self.packages else (404, "no such package")
        if method == "POST" and path == "/api/jobs/":
            self.started.append(json.loads(body))
            answer = _next(self.starts)
            name = self.started[-1]["submission_id"]
            return {"job_id": name, "submission_id": name} if answer == {} else answer
        if path.endswith("/stop"):
            return {"stopped": True}
        if path.endswith("/logs"):
            return _next(self.logs)
        info = _next(self.infos)
        return {"type": "SUBMISSION", "entrypoint": "", **info} if isinstance(info, dict) else info


def _next(answers: list[Any]) -> Any:
    return answers.pop(0) if len(answers) > 1 else answers[0]


@contextmanager
def job_stub() -> Iterator[Stub]:
    """One that listens meanwhile."""
    stub = Stub()

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer = stub.answer(self.command, self.path, body)
            if answer == DROP:
                self.close_connection = True
                return
            status, text = answer if isinstance(answer, tuple) else (200, json.dumps(answer))
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = handle_any

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

"""A hub of our own: as much of the Hub's protocol as an upload needs, on this machine."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "x" * 30


class Hub(ThreadingHTTPServer):
    """Holds {repository: {path: bytes}}, and what large files were sent ahead of their commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.messages: list[str] = []
        self.large: dict[str, bytes] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""

    def answer(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def is_known(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self.answer({"error": "Invalid credentials"}, 401)
        return False

    def do_GET(self) -> None:
        if not self.is_known():
            return None
        if self.path == "/api/whoami-v2":
            return self.answer({"name": "me", "type": "user", "orgs": []})
        name = "/".join(self.path.removeprefix("/api/models/").split("?")[0].split("/")[:2])
        if name not in self.server.repositories:
            return self.answer({"error": "Repository not found"}, 404)
        files = [{"rfilename": path} for path in self.server.repositories[name]]
        return self.answer({"id": name, "modelId": name, "sha": "0" * 40, "siblings": files})

    def do_POST(self) -> None:
        body = self.read()
        if not self.is_known():
            return None
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if name in self.server.repositories:
                return self.answer({"error": "it is there", "url": f"{self.server.address}/{name}"}, 409)
            self.server.repositories[name] = {}
            self.server.private[name] = bool(asked.get("private")) or asked.get("visibility") == "private"
            return self.answer({"url": f"{self.server.address}/{name}", "id": name})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular"}
                | {"shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self.answer({"files": files})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                one | {"actions": {"upload": {"href": f"{self.server.address}/large/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        assert "/commit/" in self.path, self.path
        return self.commit("/".join(self.path.split("/")[3:5]), body)

    def commit(self, name: str, body: bytes) -> None:
        for line in body.splitlines():
            told = json.loads(line)
            value = told["value"]
            if told["key"] == "header":
                self.server.messages.append(value["summary"])
            elif told["key"] == "file":
                self.server.repositories[name][value["path"]] = base64.b64decode(value["content"])
            elif told["key"] == "lfsFile":
                self.server.repositories[name][value["path"]] = self.server.large[value["oid"]]
        self.answer({"commitUrl": f"{self.server.address}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40})

    def do_PUT(self) -> None:
        body = self.read()
        digest = self.path.rpartition("/")[2]
        assert hashlib.sha256(body).hexdigest() == digest
        self.server.large[digest] = body
        self.answer({})


@contextmanager
def running_hub() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()

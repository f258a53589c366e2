"""A Hugging Face hub on this machine: serves repositories from memory, and takes uploads."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40
Files = MutableMapping[str, bytes]
"""Contents by `datasets/OWNER/NAME/path`, or `OWNER/NAME/path` of a model."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: Files

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/")
        if path.startswith("api/"):
            self._facts(path.removeprefix("api/").removeprefix("models/"))
            return
        repo, _, name = path.partition("/resolve/")
        found = self.files.get(f"{repo}/{name.partition('/')[2]}")
        if found is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        else:
            etag = f'"{hashlib.sha256(found).hexdigest()}"'
            self._send(200, found, {"ETag": etag, "X-Repo-Commit": COMMIT})

    def do_POST(self) -> None:
        """Take what `upload_folder` sends; only of a client with a token, as the hub does."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        if not self.headers.get("Authorization"):
            self._send(401, b"{}", {})
        elif path == "/api/repos/create":
            asked = json.loads(body)
            self._json({"url": "/".join(filter(None, (asked.get("organization"), asked["name"])))})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            self._json({"files": [{"path": name, **mode} for name in names]})
        else:
            repo = path.removeprefix("/api/models/").partition("/commit/")[0]
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.files[f"{repo}/{line['value']['path']}"] = content
            host = f"http://{self.headers['Host']}"
            self._json({"commitUrl": f"{host}/{repo}/commit/{COMMIT}", "commitOid": COMMIT})

    def _facts(self, path: str) -> None:
        repo, _, folder = path.partition("/tree/")
        repo = repo.partition("/revision/")[0]
        own = {n[len(repo) + 1 :]: d for n, d in self.files.items() if n.startswith(f"{repo}/")}
        if not own:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "/tree/" in path:
            below = folder.partition("/")[2]
            self._json([_entry(n, d) for n, d in own.items() if n.startswith(below)])
        else:
            facts = {"id": repo.removeprefix("datasets/"), "sha": COMMIT}
            self._json({**facts, "siblings": [{"rfilename": name} for name in own]})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(path: str, data: bytes) -> dict[str, object]:
    digest = hashlib.sha256(data).hexdigest()
    lfs = {"oid": digest, "size": len(data), "pointerSize": 130}
    return {"type": "file", "path": path, "size": len(data), "oid": digest[:40], "lfs": lfs}


@contextmanager
def serving_hub(files: Files) -> Iterator[str]:
    """Serve these files; yield the address for `HF_ENDPOINT`."""
    handler = type("Handler", (_Handler,), {"files": files})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

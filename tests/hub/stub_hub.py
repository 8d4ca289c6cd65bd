"""A Hugging Face Hub in memory, spoken to over HTTP on loopback by the real client.

It knows what publishing and downloading need: accounts, repositories, branches, the preupload question, Git LFS
batches and uploads, commits, trees, pull requests, and files by revision. `fail` injects answers, each a number of
times. Errors repeat the request's Authorization header, as a careless proxy would, so that tests can search output for
the token.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

KNOWN_LICENSES = {"mit", "apache-2.0", "other", "cc-by-4.0"}
Files = dict[str, bytes]


@dataclass
class Repository:
    """`branches` maps a name (also `refs/pr/1`) to its commit, `commits` a commit to its files."""

    private: bool
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, Files] = field(default_factory=dict)
    pull_requests: list[dict[str, Any]] = field(default_factory=list)
    gated: bool = False

    def commit(self, branch: str, files: Files) -> str:
        digest = hashlib.sha1(f"{branch} {len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits[digest] = dict(files)
        self.branches[branch] = digest
        return digest

    def files(self, revision: str) -> Files | None:
        return self.commits.get(self.branches.get(revision, revision))


@dataclass
class Fault:
    """An answer to give instead: to `times` requests whose "METHOD path" matches."""

    pattern: str
    status: int
    message: str
    headers: dict[str, str]
    times: int


@dataclass
class StubHub:
    """State and address of the stub; `token` may write as `user`."""

    token: str
    user: str = "me"
    role: str = "write"
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: Files = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)

    def fail(self, pattern: str, status: int, message: str = "", times: int = 1, **headers: str) -> None:
        """Answer the next `times` matching requests with an error."""
        self.faults.append(Fault(pattern, status, message, headers, times))

    def add(self, name: str, files: Files, *, branch: str = "main", gated: bool = False) -> str:
        """Make a repository, or a new commit in it; returns the commit."""
        repository = self.repositories.setdefault(name, Repository(private=False))
        repository.gated = gated
        return repository.commit(branch, files)

    def files(self, name: str, branch: str = "main") -> Files:
        """The files of a branch."""
        files = self.repositories[name].files(branch)
        assert files is not None
        return files

    def start(self) -> Callable[[], None]:
        """Serve until the returned function is called."""
        hub = self

        class Handler(_Handler):
            stub = hub

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()

        def stop() -> None:
            server.shutdown()
            server.server_close()

        return stop


class _Handler(BaseHTTPRequestHandler):
    stub: StubHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._handle()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = self._read_chunks()
        parts = urlsplit(self.path)
        self.query = parse_qs(parts.query)
        line = f"{self.command} {unquote(parts.path)}"
        self.stub.requests.append(line)
        for fault in self.stub.faults:
            if fault.times > 0 and re.search(fault.pattern, line):
                fault.times -= 1
                self._error(fault.status, fault.message, fault.headers)
                return
        for pattern, method in _ROUTES:
            found = re.fullmatch(pattern, line)
            if found:
                getattr(self, method)(*found.groups())
                return
        self._error(404, f"the stub has no {line}")

    def _read_chunks(self) -> bytes:
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    # answers

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        told = f"{message} (request had Authorization: {self.headers.get('authorization')})"
        body = json.dumps({"error": told}).encode()
        extra = {"Content-Type": "application/json", "X-Error-Message": told, **(headers or {})}
        self._send(status, body, {name.replace("_", "-"): value for name, value in extra.items()})

    def _authorized(self) -> bool:
        if self.headers.get("authorization") == f"Bearer {self.stub.token}":
            return True
        self._error(401, "Invalid credentials in Authorization header")
        return False

    def _repository(self, name: str) -> Repository | None:
        repository = self.stub.repositories.get(name)
        if repository is None:
            self._error(404, "Repository not found", {"X-Error-Code": "RepoNotFound"})
        elif repository.gated and self.command in ("HEAD", "GET"):
            self._error(403, "Access is restricted", {"X-Error-Code": "GatedRepo"})
            return None
        return repository

    def _files(self, name: str, revision: str) -> Files | None:
        repository = self._repository(name)
        if repository is None:
            return None
        files = repository.files(revision)
        if files is None:
            self._error(404, "Invalid rev id", {"X-Error-Code": "RevisionNotFound"})
        return files

    # accounts and repositories

    def whoami(self) -> None:
        if self._authorized():
            token = {"displayName": "test", "role": self.stub.role}
            orgs = [{"name": "team", "roleInOrg": "write"}, {"name": "readers", "roleInOrg": "read"}]
            self._json({"type": "user", "name": self.stub.user, "orgs": orgs, "auth": {"accessToken": token}})

    def create(self) -> None:
        if not self._authorized():
            return
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or self.stub.user}/{asked['name']}"
        if name in self.stub.repositories:
            self._send(409, json.dumps({"error": "You already created it", "url": f"{self.stub.url}/{name}"}).encode(),
                       {"Content-Type": "application/json"})  # fmt: skip
            return
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        self.stub.repositories[name] = Repository(private)
        self.stub.repositories[name].commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"})
        self._json({"url": f"{self.stub.url}/{name}"})

    def branch(self, name: str, branch: str) -> None:
        if not self._authorized():
            return
        repository = self._repository(name)
        if repository is None:
            return
        if branch in repository.branches:
            self._error(409, "Reference already exists")
            return
        repository.commit(branch, repository.files("main") or {})
        self._json({})

    def validate(self) -> None:
        content = json.loads(self.body)["content"]
        metadata = yaml.safe_load(content.split("---")[1])
        if metadata.get("license") not in KNOWN_LICENSES:
            self._json({"errors": [{"message": f'"license" must be one of [{", ".join(KNOWN_LICENSES)}]'}]}, 400)
            return
        self._json({"errors": [], "warnings": []})

    # uploads

    def preupload(self, name: str, revision: str) -> None:
        if not self._authorized():
            return
        files = self._files(name, revision)
        if files is None:
            return
        answers = []
        for asked in json.loads(self.body)["files"]:
            large = _is_large(asked["path"])
            stored = files.get(asked["path"])
            oid = None if stored is None else hashlib.sha256(stored).hexdigest() if large else _git_sha1(stored)
            mode = "lfs" if large else "regular"
            answers.append({"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._json({"files": answers})

    def batch(self, name: str) -> None:
        if not self._authorized() or self._repository(name) is None:
            return
        objects = []
        for asked in json.loads(self.body)["objects"]:
            answer: dict[str, Any] = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.stub.objects:
                href = f"{self.stub.url}/lfs/{asked['oid']}?X-Signature=secret-signature"
                verify = {"href": f"{self.stub.url}/lfs-verify"}
                answer["actions"] = {"upload": {"href": href, "header": {}}, "verify": verify}
            objects.append(answer)
        self._json({"transfer": "basic", "objects": objects})

    def put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            self._error(400, "wrong content")
            return
        self.stub.objects[oid] = self.body
        self.stub.uploads.append(oid)
        self._send(200, b"", {})

    def verify(self) -> None:
        self._json({}, 200 if json.loads(self.body)["oid"] in self.stub.objects else 404)

    def commit(self, name: str, revision: str) -> None:
        if not self._authorized():
            return
        files = self._files(name, revision)
        if files is None:
            return
        files = dict(files)
        title = ""
        for line in self.body.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                title = value["summary"]
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.stub.objects[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        repository = self.stub.repositories[name]
        number = 0
        if self.query.get("create_pr"):
            number = len(repository.pull_requests) + 1
            revision = f"refs/pr/{number}"
            repository.pull_requests.append({"title": title, "num": number})
        commit = repository.commit(revision, files)
        answer = {"commitUrl": f"{self.stub.url}/{name}/commit/{commit}", "commitOid": commit, "hookOutput": ""}
        answer["pullRequestUrl"] = f"{self.stub.url}/{name}/discussions/{number}" if number else None  # type: ignore[assignment]
        self._json(answer)

    def discussions(self, name: str) -> None:
        repository = self._repository(name)
        if repository is None:
            return
        common = {"repo": {"name": name, "type": "model"}, "status": "open", "isPullRequest": True}
        common |= {"author": {"name": self.stub.user}, "createdAt": "2026-01-01T00:00:00.000Z"}
        listed = [{**common, **one} for one in repository.pull_requests]
        self._json({"discussions": listed, "count": len(listed), "start": 0})

    # reading

    def info(self, name: str, revision: str | None) -> None:
        repository = self._repository(name)
        files = None if repository is None else self._files(name, revision or "main")
        if repository is None or files is None:
            return
        commit = repository.branches.get(revision or "main", revision)
        siblings = [{"rfilename": file} for file in files]
        self._json({"id": name, "sha": commit, "private": repository.private, "siblings": siblings})

    def tree(self, name: str, revision: str) -> None:
        files = self._files(name, revision)
        if files is None:
            return
        listed = []
        for path, content in sorted(files.items()):
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": _git_sha1(content)}
            if _is_large(path):
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            listed.append(entry)
        self._json(listed)

    def resolve(self, name: str, revision: str, path: str) -> None:
        repository = self._repository(name)
        files = None if repository is None else self._files(name, revision)
        if repository is None or files is None:
            return
        commit = repository.branches.get(revision, revision)
        if path not in files:
            self._error(404, "Entry not found", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        etag = hashlib.sha256(files[path]).hexdigest() if _is_large(path) else _git_sha1(files[path])
        self._send(200, files[path], {"ETag": f'"{etag}"', "X-Repo-Commit": commit})


_NAME = r"([\w.-]+/[\w.-]+)"
_ROUTES = (
    ("GET /api/whoami-v2", "whoami"),
    ("POST /api/repos/create", "create"),
    ("POST /api/validate-yaml", "validate"),
    (rf"POST /api/models/{_NAME}/branch/(.+)", "branch"),
    (rf"POST /api/models/{_NAME}/preupload/(.+)", "preupload"),
    (rf"POST /api/models/{_NAME}/commit/(.+)", "commit"),
    (rf"GET /api/models/{_NAME}/discussions", "discussions"),
    (rf"GET /api/models/{_NAME}/tree/(.+?)/?", "tree"),
    (rf"GET /api/models/{_NAME}(?:/revision/(.+))?", "info"),
    (rf"POST /{_NAME}\.git/info/lfs/objects/batch", "batch"),
    ("PUT /lfs/([0-9a-f]{64})", "put"),
    ("POST /lfs-verify", "verify"),
    (rf"(?:HEAD|GET) /{_NAME}/resolve/((?:refs/pr/)?[^/]+)/(.+)", "resolve"),
)


def _is_large(path: str) -> bool:
    return path.endswith(".safetensors")


def _git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()

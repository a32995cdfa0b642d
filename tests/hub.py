"""A stand-in for the Hugging Face hub that speaks as much of its protocol as pushing and fetching a model takes."""

import base64
import hashlib
import json
import re
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
from serving import serving

TOKEN = "hf_of_nobody"


class Hub:
    """``commits``: {repository: [{path: content}]}, newest last. A commit's id is its number. Reading is free, writing
    takes TOKEN."""

    def __init__(self):
        self.commits, self.visibility = {}, {}

    def commit(self, repository, revision):
        """(id, files) of a branch's newest or a named one; None if there is none."""
        history = self.commits.get(repository, [])
        number = int(revision, 16) if re.fullmatch("[0-9a-f]{40}", revision) else len(history) * (revision == "main")
        return (f"{number:040x}", history[number - 1]) if 0 < number <= len(history) else None

    def handler(self):
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def answer(self, content, status=200, **headers):
                body = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in {"Content-Length": len(body), **headers}.items():
                    self.send_header(name.replace("_", "-"), str(value))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def missing(self, what):
                self.answer({"error": f"{what} not found"}, 404, X_Error_Code=f"{what}NotFound")

            def do_GET(self):
                path = unquote(urlsplit(self.path).path)
                api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?/?", path)
                file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
                repository, revision = (api[1], api[3] or "main") if api else (file[1], file[2])
                found = hub.commit(repository, revision)
                if found is None:
                    return self.missing("Revision" if repository in hub.commits else "Repo")
                sha, files = found
                if file:
                    content = files[file[3]]
                    etag = hashlib.sha1(content).hexdigest()
                    return self.answer(content, ETag=f'"{etag}"', X_Repo_Commit=sha)
                if api[2] != "tree":
                    return self.answer({"id": repository, "sha": sha})
                tree = [
                    {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for name, content in files.items()
                ]
                return self.answer(tree)

            do_HEAD = do_GET

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Transfer-Encoding") == "chunked":
                    body = b""
                    while size := int(self.rfile.readline(), 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    return self.answer({"error": "Invalid username or password."}, 401)
                path = unquote(urlsplit(self.path).path)
                if path == "/api/repos/create":
                    asked = json.loads(body)
                    repository = f"{asked['organization']}/{asked['name']}"
                    there = repository in hub.commits
                    hub.commits.setdefault(repository, [])
                    hub.visibility.setdefault(repository, asked.get("visibility"))
                    url = f"http://{self.headers['Host']}/{repository}"
                    return self.answer({"url": url}, 409 if there else 200)
                if path == "/api/validate-yaml":
                    return self.answer({"errors": [], "warnings": []})
                repository, action = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path).groups()
                if action == "preupload":
                    names = [file["path"] for file in json.loads(body)["files"]]
                    files = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
                    return self.answer({"files": files})
                lines = [json.loads(line) for line in body.splitlines()]
                new = {
                    line["value"]["path"]: base64.b64decode(line["value"]["content"])
                    for line in lines
                    if line["key"] == "file"
                }
                history = hub.commits[repository]
                history.append({**(history[-1] if history else {}), **new})
                sha, _ = hub.commit(repository, "main")
                url = f"http://{self.headers['Host']}/{repository}/commit/{sha}"
                return self.answer({"success": True, "commitOid": sha, "commitUrl": url})

        return Handler


@contextmanager
def local_hub(monkeypatch, cache):
    """Yields a Hub to which huggingface_hub turns, with the cache in this directory, logged in."""
    hub = Hub()
    with serving(hub.handler()) as url:
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        settings = {"ENDPOINT": url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False}
        for name, value in (settings | {"HF_HUB_CACHE": str(cache)}).items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub

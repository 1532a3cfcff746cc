"""An S3 server in this process, as much of one as tables in a bucket need; it is in trouble on request.

Objects, ranges, lists of version 2 in pages, deletes of many, multipart uploads, and the conditions of PutObject
(`If-None-Match: *`, `If-Match`; 412 where they do not hold), as Amazon documents them. Signatures are not checked.
Google's XML protocol is the same except for the condition, a number of the object's state
(`x-goog-if-generation-match`).
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from uuid import uuid4
from xml.sax.saxutils import escape, unescape

import pytest

from tracefit.inputs import buckets

NAME = "fleet"
PAGE = 100
"""Objects in one answer of a list: a small run takes several."""


@dataclass
class Bucket:
    """The objects of `s3://fleet`, what was asked of it, and what goes wrong.

    `google` is `gs://fleet`, the same objects. `trouble` takes the method and the key of a request and returns what
    goes wrong: `503` and `403` are answers; the connection ends amid the body (`torn`), before the work (`reset`),
    after it (`lost`) or amid the answer (`cut`). None means that nothing goes wrong.
    """

    url: str = f"s3://{NAME}"
    google: str = f"gs://{NAME}"
    objects: dict = field(default_factory=dict)
    uploads: dict = field(default_factory=dict)
    asked: list = field(default_factory=list)
    trouble: object = None
    lock: object = field(default_factory=threading.RLock)

    def names(self, prefix=""):
        with self.lock:
            return sorted(key.removeprefix(prefix) for key in self.objects if key.startswith(prefix))

    def age(self, hours):
        """Make every object older."""
        past = timedelta(hours=hours)
        self.objects = {key: (data, when - past) for key, (data, when) in self.objects.items()}

    def copy_of(self, folder, prefix):
        """Take the files of a folder."""
        for path in folder.rglob("*"):
            if path.is_file():
                name = f"{prefix}/{path.relative_to(folder).as_posix()}"
                self.objects[name] = path.read_bytes(), datetime.now(UTC)

    def named(self, prefix):
        """Return the names of the parts that a manifest names."""
        runs = json.loads(self.objects[f"{prefix}/manifest.json"][0])["runs"]
        return {
            f"{table}/run_id={run_id}/{part['name']}"
            for run_id, run in runs.items()
            for table, part in run["tables"].items()
        }

    def parts(self, prefix):
        """Return the names of the parts that are there."""
        return {name for name in self.names(f"{prefix}/") if name.endswith(".parquet")}


def _etag(data):
    return f'"{hashlib.md5(data).hexdigest()}"'  # noqa: S324 - what S3 takes


def _generation(when):
    return str(int(when.timestamp() * 1e6))


def _error(status, code):
    return status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode(), {}


class _Requests:
    """One method for each method of HTTP; each returns status, body and headers."""

    def __init__(self, bucket, key, query, headers, body):
        self.bucket, self.key, self.query, self.headers, self.body = bucket, key, query, headers, body

    def get(self):
        if not self.key:
            return self._list()
        if self.key not in self.bucket.objects:
            return _error(404, "NoSuchKey")
        data, when = self.bucket.objects[self.key]
        about = {"ETag": _etag(data), "Last-Modified": format_datetime(when, usegmt=True)}
        about["x-goog-generation"] = _generation(when)
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            return 200, data, about
        first = int(wanted[1]) if wanted[1] else max(len(data) - int(wanted[2]), 0)
        end = min(int(wanted[2]) + 1, len(data)) if wanted[1] and wanted[2] else len(data)
        return 206, data[first:end], about | {"Content-Range": f"bytes {first}-{end - 1}/{len(data)}"}

    head = get

    def put(self):
        if "uploadId" in self.query:
            self.bucket.uploads[self.query["uploadId"]][int(self.query["partNumber"])] = self.body
            return 200, b"", {"ETag": _etag(self.body)}
        there = self.bucket.objects.get(self.key)
        must_be, must_not = self.headers.get("If-Match"), self.headers.get("If-None-Match")
        state = self.headers.get("x-goog-if-generation-match")
        if (
            (must_not == "*" and there)
            or (must_be and (there is None or must_be != _etag(there[0])))
            or (state and state != (_generation(there[1]) if there else "0"))
        ):
            return _error(412, "PreconditionFailed")
        return self._stored(self.body)

    def _stored(self, data):
        self.bucket.objects[self.key] = data, datetime.now(UTC)
        return 200, b"", {"ETag": _etag(data)}

    def post(self):
        if "delete" in self.query:
            keys = re.findall(r"<Key>(.*?)</Key>", self.body.decode())
            for key in keys:
                self.bucket.objects.pop(unescape(key), None)
            text = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            return 200, f"<DeleteResult>{text}</DeleteResult>".encode(), {}
        if "uploads" in self.query:
            upload = uuid4().hex
            self.bucket.uploads[upload] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            return 200, text.encode(), {}
        parts = self.bucket.uploads.pop(self.query["uploadId"])
        data = b"".join(parts[number] for number in sorted(parts))
        self._stored(data)
        text = f"<CompleteMultipartUploadResult><ETag>{_etag(data)}</ETag></CompleteMultipartUploadResult>"
        return 200, text.encode(), {}

    def delete(self):
        self.bucket.uploads.pop(self.query.get("uploadId"), None)
        if "uploadId" not in self.query:
            self.bucket.objects.pop(self.key, None)
        return 204, b"", {}

    def _list(self):
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        after = self.query.get("continuation-token", self.query.get("start-after", ""))
        found, folders = [], []
        for key in self.bucket.names():
            if not key.startswith(prefix) or key <= after or (folders and key.startswith(folders[-1])):
                continue
            if delimiter and delimiter in (rest := key[len(prefix) :]):
                folder = prefix + rest.partition(delimiter)[0] + delimiter
                if folder > after:
                    folders.append(folder)
            else:
                found.append(key)
        page = sorted([*found, *folders])[:PAGE]
        more = len(found) + len(folders) > PAGE
        texts = [f"<IsTruncated>{str(more).lower()}</IsTruncated><KeyCount>{len(page)}</KeyCount>"]
        texts += [f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"] if more else []
        for name in page:
            if name in folders:
                texts.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
                continue
            data, when = self.bucket.objects[name]
            about = f"<Size>{len(data)}</Size><LastModified>{when:%Y-%m-%dT%H:%M:%S.000Z}</LastModified>"
            texts.append(f"<Contents><Key>{escape(name)}</Key>{about}<ETag>{_etag(data)}</ETag></Contents>")
        return 200, f"<ListBucketResult>{''.join(texts)}</ListBucketResult>".encode(), {}


def _server(bucket):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # headers and body together: apart, each answer waits 40 ms for an acknowledgement

        def log_message(self, *_):
            pass

        def serve(self):
            url = urlsplit(self.path)
            name, _, key = unquote(url.path).lstrip("/").partition("/")
            query = {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()}
            bucket.asked.append((self.command, key))
            trouble = bucket.trouble(self.command, key) if bucket.trouble else None
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length // 2 if trouble == "torn" else length)
            if trouble in ("503", "403"):
                code = {"503": "SlowDown", "403": "AccessDenied"}[trouble]
                answer = _error(int(trouble), code)
            elif name != NAME:
                answer = _error(404, "NoSuchBucket")
            elif trouble not in ("reset", "torn"):
                with bucket.lock:
                    request = _Requests(bucket, key, query, self.headers, body)
                    answer = getattr(request, self.command.lower())()
            if trouble in ("reset", "torn", "lost"):
                self.close_connection = True
                return
            status, content, headers = answer
            self.send_response(status)
            for field_name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(field_name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: len(content) // 2] if trouble == "cut" else content)
            self.close_connection = self.close_connection or trouble == "cut"

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve  # noqa: N815 - names of the library

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_):
            """Say nothing: a client that was killed is not an error of the server."""

    return Server(("127.0.0.1", 0), Handler)


@pytest.fixture
def serve():
    """Return a function that serves an empty bucket in this process and returns it with its endpoint."""
    servers = []

    def start():
        bucket = Bucket()
        server = _server(bucket)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return bucket, f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def bucket(serve, monkeypatch, tmp_path_factory):
    """Return an empty bucket that a server in this process serves, and name it in the environment."""
    bucket, endpoint = serve()
    google = {"gcs_base_url": endpoint, "disable_oauth": True}
    account = tmp_path_factory.mktemp("google") / "account.json"
    account.write_text(json.dumps(google | dict.fromkeys(("client_email", "private_key", "private_key_id"), "")))
    values = {
        "GOOGLE_SERVICE_ACCOUNT": str(account),
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "never shown",
        "AWS_REGION": "eu-west-1",
        "NO_PROXY": "127.0.0.1",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    buckets._opened.cache_clear()  # another server each time
    buckets._ANSWERED.clear()
    return bucket

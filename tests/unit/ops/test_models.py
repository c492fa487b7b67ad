"""Model files are fetched whole and checked, or not kept at all."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ops.cli.output import parse_size
from ops.models import local_models, pull, resolve
from prism_core.errors import ModelError

CONTENT = b"GGUF" + bytes(range(256)) * 64


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        return

    def do_GET(self) -> None:
        if not self.path.startswith("/short"):
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Length", "100000")
        self.end_headers()
        self.wfile.write(CONTENT)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRISM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "www"
    folder.mkdir()
    (folder / "good.gguf").write_bytes(CONTENT)
    (folder / "page.gguf").write_bytes(b"<html>not found</html>")
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder)))
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}"
    httpd.shutdown()
    httpd.server_close()


def test_a_url_is_fetched_once_and_then_found_by_its_short_name(home: Path, server: str) -> None:
    url = f"{server}/good.gguf#sha256={hashlib.sha256(CONTENT).hexdigest()}"
    path = pull(url)
    assert path.read_bytes() == CONTENT
    inode = path.stat().st_ino
    assert pull(url) == path
    assert path.stat().st_ino == inode
    assert resolve("good") == path
    assert [model.name for model in local_models()] == ["good"]


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("/good.gguf#sha256=" + "0" * 64, "expected 000"),
        ("/page.gguf", "begins with b'<htm'"),
        ("/missing.gguf", "File not found"),
        ("/short.gguf", "ended after"),
    ],
)
def test_a_bad_download_is_named_and_leaves_nothing_behind(home: Path, server: str, tail: str, expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        pull(server + tail)
    assert local_models() == []
    assert [p.name for p in (home / "models").iterdir() if not p.name.endswith(".lock")] == []


def test_a_name_is_not_silently_given_to_another_source(home: Path, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.gguf").write_bytes(CONTENT)
    pull(str(tmp_path / "a" / "same.gguf"))
    with pytest.raises(ModelError, match="is taken by"):
        pull(str(tmp_path / "b" / "same.gguf"))


def test_a_file_that_lost_bytes_since_it_was_pulled_does_not_count(home: Path, tmp_path: Path) -> None:
    source = tmp_path / "cut.gguf"
    source.write_bytes(CONTENT)
    path = pull(str(source))
    path.write_bytes(CONTENT[:100])
    assert local_models() == []


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("smollm2-135m", "prism models pull smollm2-135m"),
        ("smolm2-135m", "did you mean 'smollm2-135m'"),
        ("/no/such/file.gguf", "neither a file nor a pulled name"),
        ("", "is a directory"),
    ],
)
def test_an_unknown_model_is_refused_with_what_to_do(home: Path, model: str, expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        resolve(model or str(home.parent))


@pytest.mark.parametrize(("text", "size"), [("4096", 4096), ("32k", 32768), ("2G", 2 << 30), ("1MiB", 1 << 20)])
def test_human_sizes_are_powers_of_two(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5k", "1x", "0x10"])
def test_a_malformed_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)

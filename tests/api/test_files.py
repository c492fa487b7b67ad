"""`/v1/files` as OpenAI's client uses it, and as others misuse it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from broker.batch.ledger import part_of
from broker.batch.service import BatchService
from broker.batch.shelf import Shelf
from broker.keys import owner_of
from tests.api.door import Door
from tests.pool import Pool, wait_for

KEYS = ("alice-key", "bob-key")


@pytest.fixture(scope="module")
def keyed(toy_pool: Pool) -> Iterator[Door]:
    """A gateway with two keys and small limits, on the toy's shared folder."""
    with Door(toy_pool, api_keys=KEYS, max_file_bytes=100_000, max_owner_bytes=250_000, batch_runners=0) as door:
        yield door


def test_a_file_is_uploaded_listed_read_and_deleted(keyed: Door) -> None:
    client = keyed.openai(KEYS[0])
    made = client.files.create(file=("in.jsonl", b"one\ntwo\n"), purpose="batch")
    assert (made.filename, made.bytes, made.purpose, made.object, made.status) == (
        *("in.jsonl", 8, "batch", "file"),
        "processed",
    )
    assert made.expires_at is not None
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == b"one\ntwo\n"
    assert made.id in [file.id for file in client.files.list(purpose="batch")]
    gone = client.files.delete(made.id)
    assert (gone.id, gone.deleted) == (made.id, True)
    with pytest.raises(openai.NotFoundError, match="No such File"):
        client.files.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.files.delete(made.id)


def test_a_file_may_say_when_it_expires(keyed: Door) -> None:
    client = keyed.openai(KEYS[0])
    made = client.files.create(
        file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert made.expires_at == pytest.approx(made.created_at + 3600, abs=2)
    with pytest.raises(openai.BadRequestError, match="from 3600 to 2592000"):
        client.files.create(file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 5})
    client.files.delete(made.id)


def test_lists_come_in_pages_and_both_orders(keyed: Door) -> None:
    client = keyed.openai(KEYS[1])
    made = [client.files.create(file=(f"f{number}", b"x"), purpose="batch").id for number in range(5)]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == made
    assert [file.id for file in client.files.list(limit=3)] == made[::-1]
    page = client.files.list(limit=2, order="asc", after=made[1])
    assert ([file.id for file in page.data], page.has_more) == (made[2:4], True)
    assert client.files.list(purpose="vision").data == []
    for bad in ({"limit": 0}, {"limit": 10_001}, {"order": "up"}, {"after": "file-no"}):
        with pytest.raises(openai.BadRequestError):
            client.files.list(**bad)
    for name in made:
        client.files.delete(name)


def test_owners_see_only_their_own_files(keyed: Door) -> None:
    alice, bob = (keyed.openai(key) for key in KEYS)
    made = alice.files.create(file=("secret", b"mine"), purpose="batch")
    assert made.id not in [file.id for file in bob.files.list()]
    for call in (bob.files.retrieve, bob.files.delete, bob.files.content):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    with pytest.raises(openai.NotFoundError):
        bob.batches.create(input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert alice.files.content(made.id).read() == b"mine"
    alice.files.delete(made.id)


@pytest.mark.parametrize(
    "name", ["%2e%2e", "%2e", "file-", "file-../../etc/passwd", "..%2f..%2fid", "file-" + "A" * 25, "file-" + "a" * 26]
)
def test_ids_that_are_none_are_not_found_and_reach_no_path(keyed: Door, name: str) -> None:
    with keyed.http(KEYS[0]) as client:
        for path in (f"/v1/files/{name}", f"/v1/files/{name}/content"):
            assert client.get(path).status_code == 404
        assert client.delete(f"/v1/files/{name}").status_code in (404, 405)


def test_limits_of_a_file_and_of_a_key_hold_and_leave_nothing_behind(keyed: Door) -> None:
    client = keyed.openai(KEYS[0])
    with pytest.raises(openai.APIStatusError, match="limit of 100000 bytes") as caught:
        client.files.create(file=("big", b"x" * 100_001), purpose="batch")
    assert caught.value.status_code == 413
    made = [client.files.create(file=("f", b"x" * 100_000), purpose="batch").id for _ in range(3)]
    with pytest.raises(openai.APIStatusError, match="delete some") as caught:
        client.files.create(file=("f", b"x"), purpose="batch")
    assert caught.value.status_code == 413
    for name in made:
        client.files.delete(name)
    client.files.delete(client.files.create(file=("f", b"x"), purpose="batch").id)
    assert not list((Path(keyed.config.file_root) / "files").glob("*/.upload-*"))


def form(*parts: tuple[str, str | None, bytes], boundary: str = "b0") -> bytes:
    """A multipart body of (name, file name, content)."""
    out = b""
    for name, filename, content in parts:
        extra = f'; filename="{filename}"' if filename is not None else ""
        out += (
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n'.encode() + content + b"\r\n"
        )
    return out + f"--{boundary}--\r\n".encode()


FILE = ("file", "a.jsonl", b"x")
PURPOSE = ("purpose", None, b"batch")


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (form(PURPOSE), 400, "file is required"),
        (form(FILE), 400, "purpose is required"),
        (form(FILE, ("purpose", None, b"fine-tune")), 400, "purpose must be"),
        (form(FILE, PURPOSE, ("colour", None, b"red")), 400, "Unknown parameter: 'colour'"),
        (form(FILE, FILE, PURPOSE), 400, "one file only"),
        (form(FILE, ("purpose", None, b"b" * 5000)), 400, "longer than 1024"),
        (form(*[PURPOSE] * 20), 400, "more than 16 parts"),
        (form(FILE, PURPOSE)[:-10], 400, "multipart"),
        (b"", 400, "multipart"),
        (b"not a form at all", 400, "multipart"),
    ],
)
def test_forms_that_are_wrong_are_told_so(keyed: Door, body: bytes, status: int, text: str) -> None:
    headers = {"content-type": "multipart/form-data; boundary=b0"}
    with keyed.http(KEYS[0]) as client:
        answer = client.post("/v1/files", content=body, headers=headers)
    assert answer.status_code == status
    assert text in answer.json()["error"]["message"]


def test_a_file_name_is_only_ever_shown(keyed: Door) -> None:
    body = form(("file", "../../x/\\e\u202evil\u0000.jsonl", b"x"), PURPOSE)
    with keyed.http(KEYS[0]) as client:
        answer = client.post(
            "/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=b0"}
        ).json()
        assert "/" not in answer["filename"]
        assert answer["filename"].isprintable()
        assert client.get(f"/v1/files/{answer['id']}/content").content == b"x"
        client.delete(f"/v1/files/{answer['id']}")


def test_a_body_that_is_no_form_is_refused(keyed: Door) -> None:
    with keyed.http(KEYS[0]) as client:
        for kind in ("application/json", "multipart/form-data", "text/plain"):
            assert client.post("/v1/files", content=b"{}", headers={"content-type": kind}).status_code == 415


def test_a_web_page_of_elsewhere_cannot_upload(door: Door) -> None:
    headers = {"content-type": "multipart/form-data; boundary=b0", "origin": "https://elsewhere.example"}
    with door.http() as client:
        answer = client.post("/v1/files", content=form(FILE, PURPOSE), headers=headers)
        assert answer.status_code == 403
        own = client.post("/v1/files", content=form(FILE, PURPOSE), headers={**headers, "origin": door.url})
        assert own.status_code == 200
        client.delete(f"/v1/files/{own.json()['id']}")


def test_an_upload_whose_client_vanishes_or_stops_leaves_nothing(keyed: Door) -> None:
    uploads = Path(keyed.config.file_root) / "files"
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b0\r\n"
        f"Authorization: Bearer {KEYS[0]}\r\nContent-Length: 50000\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", keyed.server.port)) as client:
        client.sendall(head.encode() + form(FILE, PURPOSE)[:60])
        wait_for(lambda: list(uploads.glob("*/.upload-*")), "the upload to begin")
    wait_for(lambda: not list(uploads.glob("*/.upload-*")), "the upload to be dropped")


def test_a_growing_output_is_read_up_to_its_last_whole_line(keyed: Door) -> None:
    shelf = Shelf(Path(keyed.config.file_root))
    path = shelf.path(owner_of(KEYS[0]), "file-" + "0" * 26)
    with keyed.http(KEYS[0]) as client:
        for text, whole in (
            (b"", b""),
            (b"ab", b""),
            (b"a\nb", b"a\n"),
            (b"a" * 200_000 + b"\n" + b"b" * 100_000, None),
        ):
            part_of(path).write_bytes(text)
            answer = client.get(f"/v1/files/{path.name}/content")
            assert answer.status_code == 200
            assert answer.content == (text[:200_001] if whole is None else whole)
        assert client.get(f"/v1/files/{path.name}").json()["purpose"] == "batch_output"
    part_of(path).unlink()


def test_what_expired_and_what_a_crash_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    now = 1_000_000_000.0
    upload = shelf.upload("local")
    upload.write(b"x")
    old = upload.keep("old", "batch", int(now) - 1)
    upload = shelf.upload("local")
    fresh = upload.keep("fresh", "batch", int(now) + 1)
    needed = shelf.upload("local").keep("needed", "batch", int(now) - 1)
    left = shelf.upload("local")
    left._file.close()
    growing = part_of(shelf.path("local", "file-" + "0" * 26))
    growing.write_bytes(b"x\n")
    shelf.add_batch("local", "batch_" + "0" * 26, {"input_file_id": needed.id})
    for path in (left._path, growing):
        os.utime(path, (now - 90_000, now - 90_000))
    assert shelf.sweep(now) == 2
    assert {file.id for file in shelf.files("local")} == {fresh.id, needed.id}
    assert not shelf.path("local", old.id).exists()
    assert growing.exists()
    assert shelf.active() == [("local", "batch_" + "0" * 26)]


def test_a_gateway_with_another_folder_than_the_pools_says_so(toy_pool: Pool, door: Door, tmp_path: Path) -> None:
    with Door(toy_pool, file_root=str(tmp_path)) as other:
        service: BatchService = other.gateway.extras["batches"]
        assert "PRISM_FILE_ROOT" in service.problem
        with pytest.raises(openai.InternalServerError, match="file root"):
            other.openai().files.list()
        assert other.openai().models.list().data
    assert door.openai().files.list() is not None


def test_a_download_that_nobody_reads_is_cut(toy_pool: Pool) -> None:
    with Door(toy_pool, send_timeout_s=0.3, batch_runners=0) as door:
        client = door.openai()
        made = client.files.create(file=("f", b"x" * 30_000_000), purpose="batch")
        with socket.create_connection(("127.0.0.1", door.server.port)) as lazy:
            lazy.sendall(f"GET /v1/files/{made.id}/content HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            mine = lazy.getsockname()

            def connected() -> bool:
                return any(getattr(one, "client", None) == mine for one in list(door.server.server_state.connections))

            wait_for(connected, "the connection")
            wait_for(lambda: not connected(), "the cut")
        client.files.delete(made.id)

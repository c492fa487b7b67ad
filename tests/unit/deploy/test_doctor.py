"""Every finding of the doctor can be met, names what is wrong, and says what to do; nothing is good by default."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from broker.admin import Admin, Depths, Snapshot, WorkerInfo
from broker.store import Lease, WorkerStore
from ops.diagnosis import Check, broker, diagnose, machine, pool
from tests.brokers import PrivateBroker
from tests.submit import submit

GB = 1 << 30
SOUND = {"maxmemory_policy": "noeviction", "aof_enabled": 1, "used_memory": 1 << 20, "total_system_memory": GB}


def member(name: str, state: str = "idle", host: str = "here", **stats: Any) -> WorkerInfo:
    lease = None if state == "lapsed" else Lease(worker=name, model="m+1", host=host, pid=1, name="small")
    return WorkerInfo(name, state, lease, [], 0, {key: str(value) for key, value in stats.items()})


def a_pool(*workers: WorkerInfo, parked: dict[str, int] | None = None) -> Snapshot:
    return Snapshot("b", 0, list(workers), 0, 0, Depths(), 0, parked or {}, 0, {}, {"m+1": "small"})


FINDINGS: list[tuple[Check, str, str, str]] = [
    (machine.open_files(1024, 4096), "good", "1024", ""),
    (machine.open_files(256, 4096), "warning", "256", "ulimit -n 65536"),
    (machine.open_files(1 << 30, 1 << 30), "warning", "1073741824", "ulimit -n 65536"),
    (machine.open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY), "warning", "unlimited", "ulimit -n 65536"),
    (machine.environment({"PRISM_HOME": "/x", "HOME": "/"}), "good", "PRISM_HOME set", ""),
    (machine.environment({"RQ_KEY_PREFIX": "prism:rq"}), "good", "no PRISM_", ""),
    (machine.environment({"RQ_KEY_PREFIX": "rq"}), "bad", "'rq'", "unset RQ_KEY_PREFIX"),
    (machine.home(Path("/h"), 50 * GB), "good", "53.7 GB free", ""),
    (machine.home(Path("/h"), GB), "warning", "1.1 GB free", "2 GB at least"),
    (broker.reach("redis://b", 0.0004, {"redis_version": "7.0.15"}), "good", "Redis 7.0.15, round trip 0.40", ""),
    (broker.reach("redis://b", 0.02, {"valkey_version": "9.1"}), "warning", "Valkey 9.1", "nearer to the workers"),
    (broker.exposure(""), "good", "socket", ""),
    (broker.exposure("redis://localhost:6379"), "good", "loopback", ""),
    (broker.exposure("redis://b.example:6379"), "warning", "without a password", "guide.md"),
    (broker.exposure("redis://u:p@b.example:6379"), "warning", "without TLS", "rediss://"),
    (broker.exposure("rediss://u:p@b.example:6379"), "good", "TLS and a password", ""),
    (broker.clock(0.4, 0.001), "good", "0.40 s ahead", ""),
    (broker.clock(-90.0, 0.001), "warning", "90.00 s behind", "set-ntp"),
    (broker.clock(90.0, 0.001), "warning", "90.00 s ahead", "set-ntp"),
    (broker.eviction(SOUND), "good", "noeviction", ""),
    (broker.eviction({**SOUND, "maxmemory_policy": "volatile-ttl"}), "warning", "volatile-ttl", "noeviction"),
    (broker.eviction({**SOUND, "evicted_keys": 7}), "bad", "7 key(s)", "noeviction"),
    (broker.eviction({**SOUND, "maxmemory": 1 << 20}), "warning", "of 1 MB", "raise maxmemory"),
    (broker.eviction({**SOUND, "used_memory": GB}), "warning", "1074 MB", "more memory"),
    (broker.persistence(SOUND, "everysec"), "good", "fsync everysec", ""),
    (broker.persistence({**SOUND, "aof_enabled": 0}), "warning", "no append-only file", "appendonly yes"),
    (broker.persistence({**SOUND, "aof_last_write_status": "err"}), "bad", "write", "disk space"),
    (broker.persistence({**SOUND, "aof_last_bgrewrite_status": "err"}), "bad", "rewrite", "disk space"),
    (broker.persistence(SOUND, "no"), "warning", "when the system likes", "appendfsync everysec"),
    (broker.persistence({**SOUND, "loading": 1}), "warning", "loading", "wait"),
    (broker.clients({"connected_clients": 40, "maxclients": 10000}), "good", "40", ""),
    (broker.clients({"connected_clients": 95, "maxclients": 100}), "warning", "95 connection(s) of 100", "200"),
    (broker.disk(50 * GB, GB), "good", "1074 MB", ""),
    (broker.disk(3 * GB, 2 * GB), "warning", "3.2 GB free", "4.3 GB at least"),
    (broker.disk(GB, 0), "warning", "1.1 GB free", "2.1 GB at least"),
    (pool.members(a_pool(member("a"), member("b", "draining")), ""), "good", "1 live worker(s)", ""),
    (pool.members(a_pool(member("b", "draining")), " --redis-url R"), "warning", "1 draining", "MODEL --redis-url R"),
    (pool.leases([member("a")], ""), "good", "1 held", ""),
    (pool.leases([member("a"), member("gone", "lapsed")], ""), "warning", "lapsed: gone", "prism worker MODEL"),
    (pool.parked(a_pool(), ""), "good", "no turn waits", ""),
    (pool.parked(a_pool(parked={"m+1": 3}), " --redis-url R"), "warning", "3 for small", "prism worker small --redis"),
    (pool.parked(a_pool(parked={"": 2}), ""), "warning", "2 for any model", "prism worker MODEL"),
    (pool.cores([member("a", threads=2), member("b", host="far", threads=9)], "here", 2), "good", "1 worker(s)", ""),
    (pool.cores([member("a"), member("b"), member("c")], "here", 2), "warning", "3 thread(s) on 2", "at most 2"),
    (pool.cores([member("a", threads=4)], "here", 0.5), "warning", "on 0.5 usable", "at most 1"),
]


@pytest.mark.parametrize(("check", "state", "finds", "fix"), FINDINGS, ids=lambda v: getattr(v, "name", ""))
def test_each_check_tells_good_from_bad_and_names_the_fix(check: Check, state: str, finds: str, fix: str) -> None:
    assert check.state == state, check
    assert finds in check.finding
    assert fix in check.fix
    assert bool(check.fix) == (state != "good")


def test_a_container_may_use_no_more_cores_than_its_quota(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    unlimited = machine.usable_cores(tmp_path / "missing")
    quota.write_text("50000 100000\n")
    assert machine.usable_cores(quota) == 0.5
    quota.write_text("max 100000\n")
    assert machine.usable_cores(quota) == unlimited >= 1


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PrivateBroker]:
    made = PrivateBroker(tmp_path)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def client(server: PrivateBroker) -> Iterator[redis.Redis]:
    with server.client() as made:
        yield made


def findings(server: PrivateBroker) -> dict[str, Check]:
    checks = {check.name: check for check in diagnose(server.url, None, lambda *_: None)}
    assert all(bool(check.fix) == (check.state != "good") for check in checks.values())
    return checks


def test_a_sound_broker_with_a_worker_has_nothing_to_mend(server: PrivateBroker, client: redis.Redis) -> None:
    WorkerStore(client, Lease(worker="w", model="m+1", host=socket.gethostname(), pid=1)).join()
    submit(client, {}, prompt="hello")
    found = findings(server)
    of_pool = ("broker", "exposure", "clock", "memory", "persistence", "clients", "pool", "leases", "parked", "rq")
    assert {name: found[name].state for name in of_pool} == dict.fromkeys(of_pool, "good")
    assert f"rq info --url unix://{server.socket}" in found["rq"].finding


def test_what_is_wrong_with_a_real_broker_is_found(server: PrivateBroker, client: redis.Redis) -> None:
    client.config_set("appendonly", "no")
    client.config_set("maxmemory-policy", "volatile-lru")
    submit(client, {}, prompt="hello")
    WorkerStore(client, Lease(worker="dead", model="m+1", host="far", pid=1)).join()
    client.delete("prism:w:dead")
    found = findings(server)
    bad = ("memory", "persistence", "pool", "leases", "parked")
    assert {name: found[name].state for name in bad} == dict.fromkeys(bad, "warning")
    assert found["pool"].fix == f"prism worker MODEL --redis-url {server.url}"


def test_a_server_that_evicts_at_will_or_is_away_is_told_and_ends_the_look(
    server: PrivateBroker, client: redis.Redis
) -> None:
    client.config_set("maxmemory-policy", "allkeys-lru")
    refused = findings(server)
    assert refused["broker"].state == "bad"
    assert "noeviction" in refused["broker"].finding
    assert "pool" not in refused
    server.stop()
    assert findings(server)["broker"].state == "bad"


@pytest.mark.parametrize("harm", ["delete", "status", "data"])
def test_a_record_of_rq_that_is_not_true_is_found(server: PrivateBroker, client: redis.Redis, harm: str) -> None:
    request = submit(client, {}, prompt="hello")
    job = f"prism:rq:job:{request}"
    assert pool.records(client, "u").state == "good"
    if harm == "delete":
        client.delete(job)
    else:
        client.hset(job, harm, "started" if harm == "status" else b"\x80\x04pickled")
    check = pool.records(client, "u")
    assert check.state == "warning"
    assert request in check.finding
    assert Admin(client).snapshot().open_requests == 1

"""The broker: can it be reached, does it keep what it is given, and who can read along."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import redis

from broker.admin import Admin
from broker.connect import Connection, connect
from ops.diagnosis import pool
from ops.diagnosis.check import Check
from ops.diagnosis.machine import FREE_BYTES
from prism_core.errors import PrismError

SLOW_MS = 5.0
SKEW_S = 2.0
FULL = 0.8
"""Part of a limit from which on the doctor speaks of it."""
PINGS = 20
LOCAL = ("localhost", "127.0.0.1", "::1")


def checks(redis_url: str | None) -> list[Check]:
    """The broker and, if it answers, the pool on it."""
    url = redis_url or os.environ.get("PRISM_REDIS_URL") or ""
    try:
        connection = connect(url or None)
    except PrismError as error:
        return [Check("broker", "bad", str(error), "start the server, or correct --redis-url / PRISM_REDIS_URL")]
    try:
        return _connected(connection, url)
    except PrismError as error:
        return [Check("broker", "bad", str(error), "see the server's log")]
    finally:
        connection.close()


def _connected(connection: Connection, url: str) -> list[Check]:
    client: Any = connection.redis
    round_trip_s = _round_trip(client)
    sent = time.time()
    seconds, micros = client.time()
    facts: dict[str, Any] = client.info()
    found = [
        reach(connection.url, round_trip_s, facts),
        exposure(url),
        clock(seconds + micros / 1e6 - sent - round_trip_s / 2, round_trip_s),
        eviction(facts),
        persistence(facts, _setting(client, "appendfsync")),
        clients(facts),
    ]
    if connection.embedded is not None:
        folder = connection.embedded.home / "broker"
        found.append(disk(shutil.disk_usage(folder).free, int(facts.get("aof_current_size", 0))))
    where = f" --redis-url {connection.url}" if url else ""
    return found + pool.checks(Admin(client).snapshot(), client, connection.url, where)


def reach(url: str, round_trip_s: float, facts: Mapping[str, Any]) -> Check:
    """A token travels while the next one is computed; what waits for round trips are readers, cancels and takes."""
    name = "Valkey" if "valkey_version" in facts else "Redis"
    version = facts.get("valkey_version") or facts.get("redis_version")
    text = f"{url}, {name} {version}, round trip {round_trip_s * 1000:.2f} ms"
    if round_trip_s * 1000 > SLOW_MS:
        return Check("broker", "warning", text, "put the broker nearer to the workers, at best in their rack")
    return Check("broker", "good", text)


def exposure(url: str) -> Check:
    """Prompts and answers pass through the broker: over a network they need a password and TLS."""
    parts = urlsplit(url)
    if not url or parts.scheme == "unix":
        return Check("exposure", "good", "a Unix socket, for this machine alone")
    if parts.hostname in LOCAL:
        return Check("exposure", "good", "a loopback address")
    if not parts.password:
        return Check(
            "exposure", "warning", "reached over the network without a password", "AUTH and ACL: ops/deploy/guide.md"
        )
    if parts.scheme not in ("rediss", "valkeys"):
        return Check(
            "exposure", "warning", "reached over the network without TLS", "rediss://, see TLS in ops/deploy/guide.md"
        )
    return Check("exposure", "good", "TLS and a password")


def clock(skew_s: float, round_trip_s: float) -> Check:
    """Deadlines follow the broker's clock alone; logs, ids and RQ's records follow each machine's."""
    text = f"the broker's is {abs(skew_s):.2f} s {'ahead' if skew_s > 0 else 'behind'}"
    if abs(skew_s) > SKEW_S + round_trip_s:
        return Check(
            "clock",
            "warning",
            f"{text}: deadlines hold, but logs and RQ's records do not fit together",
            "synchronise both machines: timedatectl set-ntp true, or chrony",
        )
    return Check("clock", "good", text)


def eviction(facts: Mapping[str, Any]) -> Check:
    """A broker may refuse writes when it is full; it must never choose what to forget."""
    policy = str(facts.get("maxmemory_policy", "noeviction"))
    limit, used = int(facts.get("maxmemory", 0)), int(facts.get("used_memory", 0))
    text = f"{policy}, {used / 1e6:.0f} MB used" + (f" of {limit / 1e6:.0f} MB" if limit else "")
    if int(facts.get("evicted_keys", 0)):
        text = f"{text}, {facts['evicted_keys']} key(s) were evicted since the server started"
        return Check("memory", "bad", text, "CONFIG SET maxmemory-policy noeviction; turns may have been lost")
    if policy != "noeviction":
        return Check("memory", "warning", text, "CONFIG SET maxmemory-policy noeviction, and in the server's file")
    total = int(facts.get("total_system_memory", 0))
    if used > FULL * (limit or total or used + 1):
        return Check("memory", "warning", text, "raise maxmemory, or give the server a machine with more memory")
    return Check("memory", "good", text)


def persistence(facts: Mapping[str, Any], appendfsync: str = "") -> Check:
    """What a crash of the server costs: with AOF everysec, at most the last second or two, which resending heals."""
    if int(facts.get("loading", 0)):
        return Check("persistence", "warning", "the server is loading its data", "wait until it has")
    if not int(facts.get("aof_enabled", 0)):
        return Check(
            "persistence",
            "warning",
            "no append-only file: a restart loses what came since the last snapshot",
            "CONFIG SET appendonly yes, and in the server's file (appendfsync everysec)",
        )
    failed = [
        what
        for name, what in (("aof_last_write_status", "write"), ("aof_last_bgrewrite_status", "rewrite"))
        if facts.get(name, "ok") != "ok"
    ]
    if failed:
        text = f"the last {' and '.join(failed)} of the append-only file failed"
        return Check("persistence", "bad", text, "free disk space on the broker's machine and look at its log")
    if appendfsync == "no":
        text = "append-only file, written to disk when the system likes"
        return Check("persistence", "warning", text, "CONFIG SET appendfsync everysec, and in the server's file")
    return Check("persistence", "good", "append-only file" + (f", fsync {appendfsync}" if appendfsync else ""))


def clients(facts: Mapping[str, Any]) -> Check:
    """Each worker holds about six connections, a gateway up to its number of threads and streams."""
    now, limit = int(facts.get("connected_clients", 0)), int(facts.get("maxclients", 0))
    text = f"{now} connection(s)" + (f" of {limit}" if limit else "")
    if limit and now > FULL * limit:
        return Check("clients", "warning", text, f"CONFIG SET maxclients {2 * limit}, and in the server's file")
    return Check("clients", "good", text)


def disk(free_bytes: int, aof_bytes: int) -> Check:
    """A rewrite of the append-only file needs the room of the old one and the new one."""
    text = f"{free_bytes / 1e9:.1f} GB free beside an append-only file of {aof_bytes / 1e6:.0f} MB"
    if free_bytes < max(FREE_BYTES, 2 * aof_bytes):
        need = max(FREE_BYTES, 2 * aof_bytes) / 1e9
        return Check("disk", "warning", text, f"free some space where PRISM_HOME is: {need:.1f} GB at least")
    return Check("disk", "good", text)


def _round_trip(client: Any) -> float:
    began = time.perf_counter()
    for _ in range(PINGS):
        client.ping()
    return (time.perf_counter() - began) / PINGS


def _setting(client: Any, name: str) -> str:
    """A setting of the server; empty if we may not ask (managed servers, ACL)."""
    try:
        return str(client.config_get(name).get(name, ""))
    except redis.RedisError:
        return ""

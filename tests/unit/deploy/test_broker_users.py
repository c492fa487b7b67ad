"""The users of users.acl can do their work and nothing else; the same over TLS with the distribution's server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from broker import AsyncClient, Client
from broker.connect import connect
from broker.errors import BrokerUnavailable, BrokerUnsuitable
from tests.pool import FAST, Pool, wait_for
from tests.unit.deploy.commands import ROOT, environment, free_port, gateway, prism
from tests.unit.deploy.guarded import GuardedBroker, distribution_server

SLOW = "toy?step_s=0.004"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pd") as made:
        yield Path(made)


def use_everything(broker: GuardedBroker) -> None:
    """A pool under its users: all that workers, clients, a gateway and an operator do in a day."""
    with Pool(broker.folder, 2, model=SLOW, pool=FAST, broker=broker) as pool:
        as_client(broker.urls["client"])
        asyncio.run(as_async_client(broker.urls["client"]))
        as_gateway(broker)
        as_batch_runner(broker)
        with Client(broker.urls["client"]) as client:
            survive_a_kill(client, pool)
            make_room(client)
        as_operator(broker, pool)
        # The doctor asks for a setting, and does without it.
        assert broker.denied() == ["prism-operator: command config|get (toplevel)"]


def as_client(url: str) -> None:
    with Client(url) as client:
        told = client.submit(prompt="hello", max_tokens=8, conversation="c", idempotency_key="k")
        behind = client.submit(prompt="and", max_tokens=8, conversation="c")
        assert "".join(event.text for event in told.events()) == told.result().text
        assert behind.result(timeout=60).state == "done"
        assert len(client.transcript("c")) == 2
        assert client.submit(prompt="hello", max_tokens=8, conversation="c", idempotency_key="k").replayed
        running = client.submit(prompt="long", max_tokens=4000)
        waiting = client.submit(prompt="behind", max_tokens=4, conversation="d", deadline=0.001)
        next(running.events())
        running.cancel()
        assert running.result(timeout=60).state == "cancelled"
        assert waiting.result(timeout=60).state == "expired"
        assert len(client.workers()) == 2


async def as_async_client(url: str) -> None:
    async with AsyncClient(url) as client:
        request = await client.submit(prompt="hello", max_tokens=8)
        assert [event.kind async for event in request.events()][-1] == "end"


def as_gateway(broker: GuardedBroker) -> None:
    secret = broker.settings["PRISM_API_KEYS"]
    key = {"Authorization": f"Bearer {secret}"}
    with gateway(broker.urls["client"], PRISM_API_KEYS=secret, PRISM_HOME=str(broker.folder)) as url:
        body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
        said = httpx.post(f"{url}/v1/chat/completions", json=body, headers=key, timeout=60)
        assert said.status_code == 200, said.text
        again = {"input": "go on", "background": True, "max_output_tokens": 8, "model": "toy"}
        made = httpx.post(f"{url}/v1/responses", json=again, headers=key, timeout=60).json()
        stored = f"{url}/v1/responses/{made['id']}"
        wait_for(lambda: httpx.get(stored, headers=key).json()["status"] == "incomplete", "the background response")
        assert "prism_wanted_workers 0.0" in httpx.get(f"{url}/metrics").text
        assert httpx.get(f"{url}/health").status_code == 200
        settings = environment(OPENAI_BASE_URL=f"{url}/v1", OPENAI_API_KEY=secret)
        example = [sys.executable, str(ROOT / "ops/examples/openai_batch.py")]
        done = subprocess.run(example, capture_output=True, text=True, timeout=120, env=settings)
        assert done.stdout.startswith("completed"), done.stderr


def as_batch_runner(broker: GuardedBroker) -> None:
    requests, answers = broker.folder / "in.jsonl", broker.folder / "out.jsonl"
    line = {"method": "POST", "url": "/v1/completions", "body": {"model": "toy", "prompt": "hello", "max_tokens": 4}}
    requests.write_text("".join(json.dumps({"custom_id": str(n), **line}) + "\n" for n in range(6)))
    client = {"PRISM_REDIS_URL": broker.urls["client"], "PRISM_HOME": str(broker.folder)}
    done = prism("batch", "run", str(requests), "-o", str(answers), **client)
    assert done.returncode == 0, done.stderr
    assert len(answers.read_text().splitlines()) == 6
    (name, *_) = [batch["batch"] for batch in json.loads(prism("batch", "status", "--json", **client).stdout)]
    operator = client | {"PRISM_REDIS_URL": broker.urls["operator"]}
    cancelled = prism("batch", "cancel", name, **operator)
    assert "refuses" not in cancelled.stderr


def survive_a_kill(client: Client, pool: Pool) -> None:
    request = client.submit(prompt="moved", max_tokens=300, conversation="e")
    pool.follow(request.id, lambda story: len(story.ids) >= 5)
    pool.kill(pool.worker_of(request.id))
    assert request.result(timeout=60).state == "done"
    pool.wait_ready()


def make_room(client: Client) -> None:
    """Interactive turns preempt batch lines, whose groups are pinned."""
    lines = [client.submit(prompt=f"line {n}", max_tokens=150, priority="batch", group="g") for n in range(4)]
    next(lines[0].events())
    turns = [client.submit(prompt="turn", max_tokens=4) for _ in range(2)]
    assert {request.result(timeout=60).state for request in lines + turns} == {"done"}


def as_operator(broker: GuardedBroker, pool: Pool) -> None:
    settings = {"PRISM_REDIS_URL": broker.urls["operator"]}
    top = json.loads(prism("top", "--json", **settings).stdout)
    assert [worker["state"] for worker in top["workers"]] == ["idle", "idle"]
    checks = {check["name"]: check for check in json.loads(prism("doctor", "--json", **settings).stdout)}
    assert {checks[name]["state"] for name in ("broker", "persistence", "memory", "pool", "leases", "rq")} == {"good"}
    with Client(broker.urls["client"]) as client:
        running = client.submit(prompt="long", max_tokens=4000)
        next(running.events())
        assert prism("cancel", running.id, **settings).returncode == 0
        assert running.result(timeout=60).state == "cancelled"
    rq = [sys.executable, "-m", "rq.cli", "info", "--url", broker.urls["operator"]]
    shown = subprocess.run(
        rq, capture_output=True, text=True, timeout=60, env=environment(RQ_KEY_PREFIX="prism:rq"), check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert "2 workers" in shown.stdout
    drained = pool.workers()[0]
    assert prism("drain", drained, **settings).returncode == 0
    wait_for(lambda: drained not in pool.workers(), "the drained worker to leave")


def test_the_users_of_the_acl_file_suffice_for_a_whole_pool(folder: Path) -> None:
    use_everything(GuardedBroker(folder))


@pytest.mark.full
def test_a_pool_works_over_tls_with_users_on_the_distributions_server(folder: Path) -> None:
    broker = GuardedBroker(folder, distribution_server(), tls=True)
    use_everything(broker)


@pytest.mark.full
def test_tls_refuses_strangers_and_wrong_passwords(folder: Path) -> None:
    broker = GuardedBroker(folder, distribution_server(), tls=True)
    broker.start()
    try:
        url = broker.urls["client"]
        connect(url).close()
        password = url.split(":")[2].split("@")[0]
        with pytest.raises(BrokerUnavailable, match="certificate"):
            connect(url.split("?")[0], tries=1)
        with pytest.raises(BrokerUnsuitable, match="refuses"):
            connect(url.replace(password, "wrong"), tries=1)
        with pytest.raises(BrokerUnsuitable, match=r"refuses|NOAUTH|INFO"):
            connect(url.replace(f"prism-client:{password}@", ""), tries=1)
        with pytest.raises(BrokerUnavailable):
            connect(url.replace("rediss://", "redis://").split("?")[0], tries=1)
    finally:
        broker.stop()


FORBIDDEN: dict[str, list[tuple[Any, ...]]] = {
    "client": [
        ("SADD", "prism:ws", "me"),
        ("SET", "prism:w:me", "{}"),
        ("DEL", "prism:w:near"),
        ("SADD", "prism:draining", "near"),
        ("SREM", "prism:w:near:run", "r"),
        ("HSET", "prism:models", "m", "{}"),
        ("HSET", "prism:rq:worker:near", "state", "idle"),
    ],
    "worker": [("CONFIG", "GET", "*"), ("CLIENT", "KILL", "TYPE", "normal")],
    "operator": [
        ("SADD", "prism:ws", "me"),
        ("SREM", "prism:ws", "near"),
        ("HSET", "prism:models", "m", "{}"),
        ("CONFIG", "GET", "*"),
        ("CLIENT", "KILL", "TYPE", "normal"),
    ],
}
NOBODY: list[tuple[Any, ...]] = [
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("CONFIG", "SET", "appendonly", "no"),
    ("SHUTDOWN", "NOSAVE"),
    ("DEBUG", "SLEEP", "0"),
    ("ACL", "LIST"),
    ("ACL", "SETUSER", "me", "on"),
    ("MONITOR",),
    ("REPLICAOF", "NO", "ONE"),
    ("SCRIPT", "FLUSH"),
    ("FUNCTION", "FLUSH"),
    ("MODULE", "LIST"),
    ("GET", "other:key"),
    ("SET", "other:key", "1"),
    ("EVAL", "return redis.call('GET', 'other:key')", "0"),
    ("EVAL", "return redis.call('FLUSHALL')", "0"),
    ("PUBLISH", "other", "x"),
]


def test_no_user_can_do_more_than_its_work(folder: Path) -> None:
    broker = GuardedBroker(folder)
    broker.start()
    try:
        for role, forbidden in FORBIDDEN.items():
            with redis.Redis.from_url(broker.urls[role]) as client:
                for command in [*NOBODY, *forbidden]:
                    with pytest.raises(redis.ResponseError, match=r"(?i)permission|ACL failure|not allowed"):
                        client.execute_command(*command)
        anybody = f"redis://localhost:{broker.port}"
        with redis.Redis.from_url(anybody) as client, pytest.raises(redis.AuthenticationError):
            client.ping()
        with redis.Redis.from_url(anybody, username="prism-health", password="any") as client:
            assert client.ping()
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.get("prism:boot")
    finally:
        broker.stop()


def test_a_gateway_whose_user_may_too_little_says_so_and_ends(folder: Path) -> None:
    broker = GuardedBroker(folder)
    broker.start()
    try:
        with broker.client() as admin:
            admin.execute_command("ACL", "SETUSER", "prism-client", "resetkeys", "%R~prism:*", "~prism:boot")
        done = prism(
            "gateway", "--redis-url", broker.urls["client"], "--port", str(free_port()), PRISM_HOME=str(folder)
        )
        assert done.returncode == 1
        assert "the broker refuses this user" in done.stderr
        assert "cannot join thread" not in done.stderr
    finally:
        broker.stop()


def test_two_databases_of_one_server_are_two_pools(folder: Path) -> None:
    broker = GuardedBroker(folder)
    with Pool(broker.folder, 1, broker=broker) as pool, Client(broker.urls["client"].replace("/0", "/1")) as other:
        lonely = other.submit(prompt="hello", max_tokens=5)
        served = pool.follow(pool.submit(prompt="hello", max_tokens=5))
        assert served.state == "done"
        assert other.workers() == []
        assert lonely.record().state == "queued"


def test_credentials_are_made_once_and_are_readable_by_nobody_else(folder: Path) -> None:
    broker = GuardedBroker(folder)
    kept = (broker.secrets / "users.acl").read_text()
    again = [str(Path(__file__).parents[3] / "ops/deploy/broker/credentials.sh"), "--plain", str(broker.secrets), "h"]
    assert subprocess.run(again, capture_output=True, timeout=30).returncode == 1
    assert (broker.secrets / "users.acl").read_text() == kept
    assert os.stat(broker.secrets / "prism.env").st_mode & 0o077 == 0
    passwords = [url.split(":")[2].split("@")[0] for url in broker.urls.values()]
    assert len(set(passwords)) == 4
    assert not any(password in kept for password in passwords)
    assert "@" not in kept.replace("-@all", "").replace("+@all", ""), "a placeholder was left"

"""What a deployment runs and asks: the gateway alone, the backlog's number, whether this host's workers are alive."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from broker.store import Lease, WorkerStore
from tests.brokers import PrivateBroker
from tests.submit import submit
from tests.unit.deploy.commands import gateway, prism


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[PrivateBroker]:
    made = PrivateBroker(tmp_path)
    made.start()
    yield made
    made.stop()


def test_the_backlog_is_one_number_and_the_gateways_gauge_is_the_same(broker: PrivateBroker) -> None:
    assert prism("backlog", "--redis-url", broker.url).stdout == "0\n"
    with broker.client() as client:
        for _ in range(3):
            submit(client, {}, prompt="hello")
        submit(client, {}, prompt="first", conversation="c")
        submit(client, {}, prompt="behind it", conversation="c")
    said = json.loads(prism("backlog", "--json", "--redis-url", broker.url).stdout)
    assert said["wanted_workers"] == said["waiting"] == 4
    assert (said["boxed"], said["parked"], said["live_workers"]) == (1, 4, 0)
    with gateway(broker.url) as url:
        families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
        assert {s.name: s.value for family in families for s in family.samples}["prism_wanted_workers"] == 4


@pytest.mark.parametrize(
    ("options", "number"),
    [(["--waiting-per-worker", "2"], 2), (["--max", "1"], 1), (["--min", "7"], 7), (["--min", "3", "--max", "3"], 3)],
)
def test_a_backlog_can_be_bounded_and_shared(broker: PrivateBroker, options: list[str], number: int) -> None:
    with broker.client() as client:
        for _ in range(3):
            submit(client, {}, prompt="hello")
    assert int(prism("backlog", "--redis-url", broker.url, *options).stdout) == number


def test_workers_here_tells_by_its_exit_code_whether_this_host_serves(broker: PrivateBroker) -> None:
    assert prism("workers", "--here", "--redis-url", broker.url).returncode == 1
    with broker.client() as client:
        for name, host in (("far", "elsewhere"), ("near", socket.gethostname())):
            WorkerStore(client, Lease(worker=name, model="m+1", host=host, pid=1, name="m")).join()
        done = prism("workers", "--here", "--json", "--redis-url", broker.url)
        assert (done.returncode, [worker["name"] for worker in json.loads(done.stdout)]) == (0, ["near"])
        client.delete("prism:w:near")
    assert prism("workers", "--here", "--redis-url", broker.url).returncode == 1


def test_a_gateway_asks_for_the_keys_of_its_environment(broker: PrivateBroker) -> None:
    with gateway(broker.url, PRISM_API_KEYS="one, two") as url:
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer two"}).status_code == 200


@pytest.mark.parametrize("command", [["gateway"], ["serve", "{model}"]])
def test_a_door_that_cannot_open_is_one_line_and_nothing_is_left_running(
    broker: PrivateBroker, command: list[str], request: pytest.FixtureRequest
) -> None:
    model = str(request.getfixturevalue("smollm2_path")) if "{model}" in command else ""
    command = [word.format(model=model) for word in command]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        for more, says in (
            (["--port", port], f"cannot listen on 127.0.0.1 port {port}"),
            (["--host", "0.0.0.0"], "needs an API key: set PRISM_API_KEYS"),
        ):
            done = prism(*command, "--redis-url", broker.url, *more)
            assert done.returncode == 1
            assert says in done.stderr
            assert "Traceback" not in done.stderr
    with broker.client() as client:
        assert client.smembers("prism:ws") == set()


def test_no_command_prints_the_password_of_the_broker(smollm2_path: Path) -> None:
    url = "redis://prism:sesame@127.0.0.1:1/0"
    for command in (
        ["gateway"],
        ["serve", str(smollm2_path)],
        ["worker", str(smollm2_path)],
        ["backlog"],
        ["doctor"],
        ["top"],
    ):
        done = prism(*command, PRISM_REDIS_URL=url)
        assert done.returncode in (1, 75)
        assert "127.0.0.1:1" in done.stdout + done.stderr
        assert "sesame" not in done.stdout + done.stderr

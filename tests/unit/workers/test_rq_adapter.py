"""The contract with RQ 3.0: the private methods in use exist and do what is relied on, and the records are true."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import zlib
from typing import Any

import pytest

from tests.brokers import PrivateBroker
from tests.unit.workers.rig import Rig
from workers import rq_adapter
from workers.rq_adapter import RqWorker, TurnFailed, TurnJob

import rq  # isort: skip
from rq.job import JobStatus  # isort: skip
from rq.queue import Queue  # isort: skip
from rq.registry import CanceledJobRegistry, FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry  # isort: skip
from rq.results import Result  # isort: skip
from rq.serializers import JSONSerializer  # isort: skip
from rq.worker.base import BaseWorker  # isort: skip


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_pinned_version_has_the_private_methods_that_the_adapter_calls():
    assert rq.__version__.startswith("3.0.")
    assert parameters(BaseWorker.prepare_execution) == ["job"]
    assert parameters(BaseWorker._finalize_success) == ["job", "queue", "execution", "return_value"]
    assert parameters(BaseWorker._finalize_failure) == ["job", "queue", "execution", "exc_info"]
    assert parameters(BaseWorker.maintain_heartbeats) == ["job", "execution"]
    assert parameters(BaseWorker.heartbeat) == ["timeout", "pipeline"]
    assert parameters(BaseWorker.handle_exception) == ["job", "exc_info"]
    assert parameters(BaseWorker._set_connection) == ["connection"]
    for name in ("register_birth", "register_death", "set_state", "pubsub_channel_name"):
        assert hasattr(BaseWorker, name)
    assert parameters(TurnJob.restore) == ["raw_data"]


def test_every_key_of_rq_lies_below_ours():
    assert TurnJob.key_for("R") == "prism:rq:job:R"
    assert Queue("q", connection=object()).key == "prism:rq:queue:q"  # type: ignore[arg-type]
    assert RqWorker.redis_worker_namespace_prefix == "prism:rq:worker:"


def test_importing_rq_first_with_another_prefix_is_refused():
    code = "import rq, sys\ntry:\n    import workers.rq_adapter\nexcept ImportError as error:\n    print(error)"
    environment = {name: value for name, value in os.environ.items() if name != "RQ_KEY_PREFIX"}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "imported before" in said.stdout


@pytest.fixture
def rig(broker: PrivateBroker) -> Rig:
    return Rig(broker)


@pytest.fixture
def worker(rig: Rig) -> RqWorker:
    made = RqWorker(rig.broker.client(), rig.store.worker)
    made.born()
    return made


def job_of(rig: Rig, request: str) -> TurnJob:
    job: TurnJob = TurnJob.fetch(request, connection=rig.redis, serializer=JSONSerializer)
    return job


def registries(rig: Rig, job: TurnJob) -> dict[str, bool]:
    kinds = (StartedJobRegistry, FinishedJobRegistry, FailedJobRegistry, CanceledJobRegistry)
    return {
        kind.__name__.removesuffix("JobRegistry").lower(): job.id
        in kind(job.origin, connection=rig.redis, job_class=TurnJob, serializer=JSONSerializer).get_job_ids(
            cleanup=False
        )
        for kind in kinds
    }


def test_a_running_turn_shows_as_started_by_a_busy_worker(rig: Rig, worker: RqWorker):
    request = rig.submit(prompt="x", max_tokens=3)
    assert rig.store.take() is not None
    worker.begin(request)
    job = job_of(rig, request)
    assert job.get_status() == JobStatus.STARTED
    assert job.worker_name == worker.name
    assert registries(rig, job)["started"]
    (seen,) = BaseWorker.all(connection=rig.redis, job_class=TurnJob, serializer=JSONSerializer)
    assert seen.get_state() == "busy"
    assert seen.get_current_job_id() == request
    before = seen.last_heartbeat
    worker.beat()
    (seen,) = BaseWorker.all(connection=rig.redis, job_class=TurnJob, serializer=JSONSerializer)
    assert seen.last_heartbeat > before


@pytest.mark.parametrize(
    ("options", "status", "registry", "kind"),
    [
        ({"prompt": "x", "max_tokens": 3}, JobStatus.FINISHED, "finished", Result.Type.SUCCESSFUL),
        ({"prompt": "x" * 5000}, JobStatus.FAILED, "failed", Result.Type.FAILED),
    ],
)
def test_an_ended_turn_is_final_in_rq_and_its_result_holds_no_text(rig, worker, options, status, registry, kind):
    request = rig.submit(**options)
    claim = rig.store.take()
    assert claim is not None
    worker.begin(request)
    result = rig.turn(claim).run()
    worker.end(request, state=str(result.state), reason=result.reason, tokens=result.tokens)
    assert rig.store.settle(request).status == "ok"
    job = job_of(rig, request)
    assert job.get_status() == status
    assert [name for name, there in registries(rig, job).items() if there] == [registry]
    latest = job.latest_result()
    assert latest is not None
    assert latest.type == kind
    assert latest.worker_name == worker.name
    text = rig.log(request).text
    for key in rig.redis.scan_iter("prism:rq:*"):
        if text and rig.redis.type(key) == b"hash":
            assert text.encode() not in b" ".join(rig.redis.hvals(key))
    (seen,) = BaseWorker.all(connection=rig.redis, job_class=TurnJob, serializer=JSONSerializer)
    assert seen.get_state() == "idle"
    assert seen.get_current_job_id() is None
    assert 0 < rig.redis.ttl(job.key) <= 86_400


def test_a_record_that_the_worker_could_not_finish_is_finished_by_settle(rig: Rig, worker: RqWorker):
    request = rig.submit(prompt="x", max_tokens=3)
    claim = rig.store.take()
    assert claim is not None
    worker.begin(request)
    rig.turn(claim).run()
    rig.store.settle(request)
    assert [name for name, there in registries(rig, job_of(rig, request)).items() if there] == ["finished"]


def test_a_worker_that_leaves_is_in_no_list_of_rq(rig: Rig, worker: RqWorker):
    worker.died()
    assert BaseWorker.all(connection=rig.redis) == []


@pytest.mark.parametrize("name", ["os.system", "subprocess.check_output", "builtins.eval", "prism.turn.x", ""])
def test_a_job_written_by_somebody_else_can_name_no_code(rig: Rig, name: str):
    request = rig.submit(prompt="x")
    call = json.dumps([name, None, ["true"], {}]).encode()
    rig.redis.hset(f"prism:rq:job:{request}", mapping={"data": zlib.compress(call)})
    job = job_of(rig, request)
    with pytest.raises(TurnFailed, match="no prism worker runs"):
        job.perform()


def test_callbacks_and_webhooks_of_a_record_are_ignored(rig: Rig, worker: RqWorker):
    request = rig.submit(prompt="x", max_tokens=2)
    hook = [{"url": "http://127.0.0.1:9/", "job_status": "finished", "headers": {}, "timeout": 1}]
    rig.redis.hset(
        f"prism:rq:job:{request}",
        mapping={
            "success_callback_name": "os.abort",
            "failure_callback_name": "os.abort",
            "webhooks": json.dumps(hook),
            "retries_left": 3,
            "repeats_left": 3,
        },
    )
    claim = rig.store.take()
    assert claim is not None
    fetched = job_of(rig, request)
    assert (fetched.webhooks, fetched.retries_left, fetched.repeats_left) == ([], None, None)
    worker.begin(request)
    rig.turn(claim).run()
    worker.end(request, state="done", reason="length", tokens=2)
    plain = rq.job.Job.fetch(request, connection=rig.redis, serializer=JSONSerializer)
    assert plain.webhooks, "the record does ask for it"
    job = job_of(rig, request)
    assert job.webhooks == []
    assert (job.retries_left, job.repeats_left) == (None, None)
    assert (job.success_callback, job.failure_callback, job.stopped_callback) == (None, None, None)
    assert job.get_status() == JobStatus.FINISHED


def test_a_pickled_payload_is_never_unpickled(rig: Rig):
    import pickle

    request = rig.submit(prompt="x")
    rig.redis.hset(f"prism:rq:job:{request}", mapping={"data": pickle.dumps((print, None, ("boom",), {}))})
    with pytest.raises(rq.exceptions.DeserializationError):
        job_of(rig, request).func  # noqa: B018


def test_rq_info_shows_the_pool_as_it_is(rig: Rig, worker: RqWorker):
    running = rig.submit(prompt="x", max_tokens=3)
    assert rig.store.take() is not None
    worker.begin(running)
    rig.submit(prompt="waiting", max_tokens=3)
    program = [sys.executable, "-m", "rq.cli", "info", "--url", rig.broker.url, "--raw"]
    environment = {**os.environ, "RQ_KEY_PREFIX": "prism:rq"}
    said = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    lines = (said.stdout + said.stderr).splitlines()
    assert any(line.split()[:1] == ["worker"] and worker.name in line and "busy" in line for line in lines), lines
    assert any(line.startswith("queue open.") and " 1, 1 executing" in line for line in lines), lines


def test_a_broker_that_is_away_costs_only_a_log_line(rig: Rig, worker: RqWorker):
    rig.broker.kill()
    try:
        worker.beat()
        worker.begin("R")
        worker.end("R", state="done", reason="stop", tokens=1)
        worker.died()
    finally:
        rig.broker.start()


def test_a_worker_whose_record_ran_out_during_an_outage_is_registered_again(rig: Rig, worker: RqWorker):
    request = rig.submit(prompt="x", max_tokens=3)
    assert rig.store.take() is not None
    worker.begin(request)
    rig.redis.delete(worker.key)
    worker.beat()
    (seen,) = BaseWorker.all(connection=rig.redis, job_class=TurnJob, serializer=JSONSerializer)
    assert seen.get_state() == "busy"
    assert seen.birth_date is not None
    assert seen.queue_names() == [f"w.{worker.name}"]


def test_what_a_woken_zombie_showed_in_rq_is_taken_back_when_it_sees_that_it_is_fenced(rig: Rig, worker: RqWorker):
    request = rig.submit(prompt="x", max_tokens=3)
    claim = rig.store.take()
    assert claim is not None
    rig.scripts.run("rescue", [f"prism:r:{request}"], [request, "w1", "worker_lost"])
    worker.begin(request)
    assert rig.turn(claim).run().disposition == "lost"
    worker.dropped()
    job = job_of(rig, request)
    assert not registries(rig, job)["started"]
    assert not rig.redis.exists(f"prism:rq:executions:{request}")


def test_executions_of_workers_that_died_while_showing_them_are_dropped_in_time(rig: Rig, worker: RqWorker):
    request = rig.submit(prompt="x", max_tokens=3)
    assert rig.store.take() is not None
    worker.begin(request)
    registry = f"prism:rq:wip:{job_of(rig, request).origin}"
    rq_adapter.forget_expired(rig.redis)
    assert rig.redis.zcard(registry) == 1
    (member,) = rig.redis.zrange(registry, 0, -1)
    rig.redis.zadd(registry, {member: 1.0})
    rq_adapter.forget_expired(rig.redis)
    assert rig.redis.zcard(registry) == 0
    assert job_of(rig, request).get_status() == JobStatus.STARTED, "RQ's own maintenance would have failed it"


def test_commands_of_rq_are_read_and_everything_else_is_not():
    assert RqWorker.command(b'{"command": "shutdown"}') == ("shutdown", "")
    assert RqWorker.command(b'{"command": "stop-job", "job_id": "R"}') == ("stop", "R")
    assert RqWorker.command(b'{"command": "stop-execution", "job_id": "R", "execution_id": "E"}') == ("stop", "R")
    for noise in (b"", b"[]", b'{"command": "kill-horse"}', b"\xff", b'{"command": ["shutdown"]}'):
        assert RqWorker.command(noise) is None


def test_the_adapter_is_the_only_module_that_imports_rq():
    from pathlib import Path

    root = Path(rq_adapter.__file__).parent.parent
    for package in ("broker", "workers", "prism_core"):
        for path in (root / package).rglob("*.py"):
            imports = [line for line in path.read_text().splitlines() if line.startswith(("import rq", "from rq"))]
            assert not imports or path.name == "rq_adapter.py", path

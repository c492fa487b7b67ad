"""What RQ itself sees of the pool: its own classes and its own command read our records."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import zlib
from importlib.resources import files
from typing import Any

from broker import keys, rqrecord
from tests.brokers import PrivateBroker
from tests.conformance.rig import Rig, begin, emit, end, must_take, play

os.environ["RQ_KEY_PREFIX"] = keys.RQ

import rq.defaults
from rq import Queue, Worker
from rq.executions import Execution
from rq.job import Job, JobStatus
from rq.registry import CanceledJobRegistry, FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.results import Result
from rq.serializers import JSONSerializer

assert keys.RQ == rq.defaults.RQ_KEY_PREFIX, "rq was imported before its prefix was set"


def job_of(rig: Rig, request: str) -> Job:
    return Job.fetch(request, connection=rig.redis, serializer=JSONSerializer)


def registries(rig: Rig, job: Job) -> dict[str, list[str]]:
    kinds = (StartedJobRegistry, FinishedJobRegistry, FailedJobRegistry, CanceledJobRegistry)
    found = {}
    for kind in kinds:
        ids = kind(job.origin, connection=rig.redis, serializer=JSONSerializer).get_job_ids(cleanup=False)
        if ids:
            found[kind.__name__] = ids
    return found


def start_as_rq(rig: Rig, request: str, worker: str) -> Execution:
    """What RQ's own `prepare_execution` writes."""
    job = job_of(rig, request)
    with rig.redis.pipeline() as pipe:
        execution = Execution.create(job, 60, pipeline=pipe, worker_name=worker)
        pipe.execute()
    return execution


def test_a_queued_request_is_a_queued_job_without_any_text_of_the_user(rig: Rig) -> None:
    request = rig.submit(conversation="c").request
    job = job_of(rig, request)
    assert job.get_status() is JobStatus.QUEUED
    assert (job.func_name, list(job.args), job.kwargs) == (rqrecord.FUNCTION, [request], {})
    assert job.timeout == -1
    assert job.result_ttl == job.failure_ttl == rig.config.result_s
    now = datetime.datetime.now(datetime.UTC)
    for moment in (job.created_at, job.enqueued_at):
        assert abs((now - moment).total_seconds()) < 60
    assert job.started_at is None
    assert job.ended_at is None
    raw = rig.redis.hgetall(keys.rq_job(request))
    assert not any(b"hello" in value for value in raw.values())
    assert json.loads(zlib.decompress(raw[b"data"])) == [rqrecord.FUNCTION, None, [request], {}]
    queue = next(queue for queue in Queue.all(connection=rig.redis, serializer=JSONSerializer) if queue.count)
    assert queue.get_job_ids() == [request]
    assert job.origin == queue.name == "open.any.interactive"


def test_a_turn_in_a_home_queue_is_listed_there_and_its_job_can_be_fetched(rig: Rig) -> None:
    worker = rig.worker()
    rig.submit(conversation="c")
    play(worker, must_take(worker), [1])
    request = rig.submit(conversation="c").request
    home = Queue("w.w1", connection=rig.redis, serializer=JSONSerializer)
    assert "w.w1" in [queue.name for queue in Queue.all(connection=rig.redis)]
    assert [job.id for job in home.get_jobs()] == [request]
    rig.cancel(request)
    assert home.count == 0
    assert rig.redis.keys(keys.RQ + ":*:w.w1") == []


def test_a_running_request_is_a_started_job_at_its_worker(rig: Rig) -> None:
    worker = rig.worker()
    request = rig.submit().request
    must_take(worker)
    job = job_of(rig, request)
    assert job.get_status() is JobStatus.STARTED
    assert job.worker_name == "w1"
    assert job.started_at is not None
    start_as_rq(rig, request, "w1")
    assert registries(rig, job_of(rig, request)) == {"StartedJobRegistry": [request]}


def test_every_ended_request_is_in_the_one_right_registry_with_a_small_result(rig: Rig) -> None:
    worker = rig.worker()
    wanted: dict[str, tuple[Any, str, Any]] = {
        "done": (JobStatus.FINISHED, "FinishedJobRegistry", Result.Type.SUCCESSFUL),
        "failed": (JobStatus.FAILED, "FailedJobRegistry", Result.Type.FAILED),
        "cancelled": (JobStatus.CANCELED, "CanceledJobRegistry", Result.Type.FAILED),
        "expired": (JobStatus.FAILED, "FailedJobRegistry", Result.Type.FAILED),
    }
    for state, (status, registry, kind) in wanted.items():
        request = rig.submit().request
        claim = must_take(worker)
        start_as_rq(rig, request, "w1")
        begin(worker, claim)
        emit(worker, claim, [1])
        end(worker, claim, state=state, reason="why", ids=[1])
        job = job_of(rig, request)
        assert job.get_status() is status
        found = registries(rig, job)
        assert request in found.pop(registry)
        assert all(request not in ids for ids in found.values())
        assert job.ended_at >= job.started_at
        result = job.latest_result()
        assert result is not None
        assert result.type is kind
        assert result.return_value == {"state": state, "reason": "why", "n": 1}
        assert 0 < rig.redis.ttl(Result.get_key(request)) <= rig.config.result_s
    assert rig.redis.keys(keys.RQ + ":execution*") == []


def test_what_rq_itself_finalised_stays_as_it_is(rig: Rig) -> None:
    worker = rig.worker()
    request = rig.submit().request
    claim = must_take(worker)
    begin(worker, claim)
    end(worker, claim, settle=False)
    job = job_of(rig, request)
    job.set_status(JobStatus.FINISHED)
    with rig.redis.pipeline() as pipe:
        Result.create(job, Result.Type.SUCCESSFUL, ttl=60, return_value={"by": "rq"}, pipeline=pipe)
        pipe.execute()
    worker.settle(request)
    worker.settle(request)
    results = job_of(rig, request).results()
    assert [result.return_value for result in results] == [{"by": "rq"}]


def test_a_rescue_takes_the_lost_worker_s_execution_out_of_rq(rig: Rig) -> None:
    worker = rig.worker()
    request = rig.submit().request
    must_take(worker)
    start_as_rq(rig, request, "w1")
    assert rig.redis.keys(keys.RQ + ":execution*")
    rig.kill(worker)
    job = job_of(rig, request)
    assert job.get_status() is JobStatus.QUEUED
    assert job.worker_name is None
    assert registries(rig, job) == {}
    assert rig.redis.keys(keys.RQ + ":execution*") == []
    assert rig.redis.keys(keys.RQ + ":worker:*") == []


def test_a_reaped_worker_is_not_among_rq_s_workers_any_more(rig: Rig) -> None:
    worker = rig.worker()
    queues = [Queue("w.w1", connection=rig.redis), Queue("open.x.interactive", connection=rig.redis)]
    born = Worker(queues, name="w1", connection=rig.redis)
    born.register_birth()
    assert Worker.count(connection=rig.redis) == 1
    rig.kill(worker)
    assert Worker.count(connection=rig.redis) == 0
    assert Worker.count(queue=queues[0]) == 0
    assert rig.redis.keys(keys.RQ + ":worker*") == []
    assert "w.w1" not in [queue.name for queue in Queue.all(connection=rig.redis)]


def test_a_job_that_somebody_deleted_is_not_brought_back_in_half(rig: Rig) -> None:
    worker = rig.worker()
    request = rig.submit().request
    job_of(rig, request).delete()
    rig.redis.rpush(keys.RQ + ":queue:open.any.interactive", request)
    play(worker, must_take(worker), [1])
    assert rig.redis.exists(keys.rq_job(request)) == 0
    assert rig.state(request) == "done"


def test_the_rq_command_shows_true_counts(rig: Rig, server: PrivateBroker) -> None:
    worker = rig.worker()
    for _ in range(2):
        rig.submit()
        play(worker, must_take(worker), [1])
    rig.submit()
    claim = must_take(worker)
    start_as_rq(rig, claim.request, "w1")
    for _ in range(3):
        rig.submit()
    env = {**os.environ, "RQ_KEY_PREFIX": keys.RQ}
    command = [sys.executable, "-m", "rq.cli", "info", "--raw", "--only-queues", "--url", server.url]
    shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout
    lines = {line.split()[1]: line for line in shown.splitlines() if line.startswith("queue ")}
    assert "queue open.any.interactive 3," in lines["open.any.interactive"]
    mine = next(line for name, line in lines.items() if name.startswith("open.") and ".any." not in name)
    assert "1 executing, 2 finished, 0 failed" in mine


def test_the_registries_do_not_grow_for_ever(rig: Rig) -> None:
    worker = rig.worker()
    rig.submit()
    play(worker, must_take(worker), [1])
    registry = next(key for key in rig.redis.keys(keys.RQ + ":finished:*"))
    rig.redis.zadd(registry, {"ancient": 1})
    rig.submit()
    play(worker, must_take(worker), [1])
    assert rig.redis.zscore(registry, "ancient") is None
    assert rig.redis.zcard(registry) == 2


def test_times_are_spelled_as_rq_spells_them(rig: Rig) -> None:
    parts = [files("broker").joinpath("scripts", f"_{name}.lua").read_text() for name in ("base", "rq")]
    script = "local RESULT_S = 1\n" + "\n".join(parts) + "\nreturn rq_time(tonumber(ARGV[1]))"
    moments = [0, 1, 999, 951_782_400_000, 951_868_799_999, 4_107_542_400_000, 1_709_164_800_123, 1_735_689_599_999]
    moments += [86_400_000 * day + 43_200_500 for day in range(0, 40_000, 61)]
    for ms in moments:
        spelled = rig.redis.eval(script, 0, ms).decode()
        moment = datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(milliseconds=ms)
        assert spelled == moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")

"""Helper threads come and go with their decoder, and leave a process quietly."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.unit.engine.stepping import after, evaluate, random_ids, tiny

DEADLINE_S = 20.0


def helpers() -> int:
    """Helper threads of this process that live."""
    return sum(thread.name.startswith("prism-helper") for thread in threading.enumerate())


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for a condition, not longer than the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def test_closing_a_model_stops_its_helpers(data: Path) -> None:
    before = helpers()
    with tiny(data, "llama-q8_0", threads=3) as model:
        decoder = model.decoder()
        evaluate(decoder, 1)
        assert helpers() == before + 2
    eventually(lambda: helpers() == before)


def test_dropping_a_decoder_stops_its_helpers(data: Path) -> None:
    before = helpers()
    model = tiny(data, "llama-q8_0", threads=2)
    decoder = model.decoder()
    evaluate(decoder, 1)
    assert helpers() == before + 1
    del decoder
    gc.collect()
    eventually(lambda: helpers() == before)
    model.close()


def test_idle_helpers_use_no_processor_time(data: Path) -> None:
    with tiny(data, "llama-q8_0", threads=2) as model:
        decoder = model.decoder()
        evaluate(decoder, 1)
        (helper,) = [thread for thread in threading.enumerate() if thread.name.startswith("prism-helper")]

        def sleeping() -> bool:
            stat = Path(f"/proc/self/task/{helper.native_id}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] == "S"

        eventually(sleeping)


def test_helpers_wake_from_their_sleep(data: Path) -> None:
    ids = random_ids(1, 70)
    with tiny(data, "llama-q8_0", threads=2) as model, tiny(data, "llama-q8_0") as single:
        decoder = model.decoder()
        for pause in (0.0, 0.001, 0.05, 0.3):
            threading.Event().wait(pause)
            decoder.reset()
            assert np.array_equal(after(decoder, ids), after(single.decoder(), ids))


def test_many_more_threads_than_processors_give_the_same_bits(data: Path) -> None:
    ids = random_ids(2, 50)
    threads = 4 * (os.cpu_count() or 1)
    with tiny(data, "qwen35-q8_0", threads=threads) as model, tiny(data, "qwen35-q8_0") as single:
        many, alone = model.decoder(), single.decoder()
        for _ in range(3):
            many.reset()
            alone.reset()
            assert np.array_equal(after(many, ids, [16]), after(alone, ids, [16]))


ENDINGS = {
    "with a decoder alive": "",
    "in the middle of a step on another thread": """
import threading
def work():
    while True:
        decoder.reset()
        decoder.ingest_block(list(range(200)), lambda: None)
threading.Thread(target=work, daemon=True).start()
threading.Event().wait(0.2)
""",
    "by an exception": "raise SystemExit(0)",
    "after closing twice": "model.close(); model.close()",
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_process_with_helpers_ends_quietly(data: Path, name: str) -> None:
    script = f"""
import numpy as np
from prism_core import open_model
model = open_model({str(data / "tiny-llama-q8_0" / "tiny-llama-q8_0.gguf")!r}, threads=3)
decoder = model.decoder()
decoder.evaluate_into(1, np.zeros(model.vocab_size, dtype=np.float32))
{ENDINGS[name]}
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_forked_child_says_that_it_cannot_use_the_decoder(data: Path) -> None:
    script = f"""
import os, sys
import numpy as np
from prism_core import DecoderError, open_model
model = open_model({str(data / "tiny-llama-q8_0" / "tiny-llama-q8_0.gguf")!r}, threads=2)
decoder = model.decoder()
logits = np.zeros(model.vocab_size, dtype=np.float32)
child = os.fork()
if child == 0:
    try:
        decoder.evaluate_into(1, logits)
    except DecoderError as error:
        os._exit(0 if "forked child" in str(error) else 2)
    os._exit(3)
_, status = os.waitpid(child, 0)
decoder.evaluate_into(1, logits)
sys.exit(os.waitstatus_to_exitcode(status))
"""
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")

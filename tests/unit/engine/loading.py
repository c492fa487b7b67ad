"""Load a model, run a little, and say what it took: a script, run by test_loading.py.

One line of JSON: seconds of CPU time and the peak of resident memory in bytes, anonymous and of files, after loading
and after a prompt; the bytes that the model states; and whether the weights are shared.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

import prism_core.model


def peak() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def main(path: str) -> None:
    began = time.process_time()
    with prism_core.model.open_model(path) as model:
        decoder = model.decoder()
        loaded, seconds = peak(), time.process_time() - began
        decoder.ingest_block(range(512), lambda: None)
        decoder.evaluate_into(1, np.empty(model.vocab_size, dtype=np.float32))
        assert model._weights is not None
        shared = model._weights.shared
        print(json.dumps([seconds, loaded, peak(), model.memory(), shared]))


if __name__ == "__main__":
    main(sys.argv[1])

"""A process that opens a model under limits of address space, one forked child for each: a script of test_narrow.py.

Arguments: the file, then mebibytes beyond what the process has. A line of JSON for each: the error's type and text, or
"ran". A child that dies says nothing: an empty line.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

import prism_core.model
from prism_core import Generation, Limits, PrismError, Runtime


def child(path: str, room: int) -> tuple[str, str]:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (room << 20), used + (room << 20)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with prism_core.model.open_model(path) as model:
            runtime = Runtime(model.decoder(), Limits(model.context_tokens, 1, 1 << 30))
            runtime.generate([1, 2, 3], Generation(2))
    except PrismError as error:
        return type(error).__name__, str(error)
    except BaseException as error:
        return f"a bare {type(error).__name__}", str(error)
    return "ran", ""


def main(path: str, *rooms: str) -> None:
    for room in rooms:
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.write(writer, json.dumps(child(path, int(room))).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as said:
            print(said.read(), flush=True)
        os.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])

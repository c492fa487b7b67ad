"""Where a process may have little memory (`ulimit -v`), a model is refused in a sentence, wherever memory ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PLENTY = 2000


@pytest.mark.parametrize("name", ["tiny-llama-q8_0", pytest.param("tiny-gemma3-q8_0", marks=pytest.mark.full)])
def test_little_memory_is_one_sentence_wherever_it_ends(data: Path, name: str) -> None:
    path = data / name / f"{name}.gguf"
    rooms = [*range(0, 60, 6), *range(60, 240, 30), PLENTY]
    script = [sys.executable, "-m", "tests.unit.models.narrow", str(path), *map(str, rooms)]
    ended = subprocess.run(script, capture_output=True, text=True, cwd=ROOT, timeout=280, check=True)
    answers = dict(zip(rooms, ended.stdout.splitlines(), strict=True))
    assert json.loads(answers.pop(PLENTY)) == ["ran", ""]
    refusals = 0
    for room, said in answers.items():
        assert said, f"{room} MiB end the process"
        kind, text = json.loads(said)
        assert kind in ("ran", "ModelError", "DecoderError"), f"{room} MiB: {kind}: {text}"
        refusals += kind == "ModelError" and text.startswith(f"{path}: ")
    assert refusals > 8
    assert any(f"{path}: the system refuses the memory that it needs, " in said for said in answers.values())

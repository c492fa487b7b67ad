"""The shared file of packed weights: found, made once, replaced, never trusted half-written, held to its size."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ops.bench import synthetic
from prism_core import InvalidRequest, ModelError, open_model, weights
from prism_core.kv import HUGE
from prism_core.model import Model
from prism_core.packed import DATA_START, WRITING, Entry, shared
from tests.unit.engine.stepping import after, home_with_shared_caches, random_ids

IDS = random_ids(1, 12, 500)
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PRISM_HOME for each test."""
    home = home_with_shared_caches(tmp_path / "home")
    monkeypatch.setenv("PRISM_HOME", str(home))
    return home


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return synthetic.qwen3(tmp_path / "model.gguf", layers=1, vocab=512)


def logits_of(path: Path, **options: Any) -> Any:
    with open_model(path, **options) as model:
        return after(model.decoder(), IDS)


def packed(home: Path) -> list[Path]:
    """All that is in the folder, but for its lock."""
    return sorted(file for file in (home / "packed").iterdir() if file.name != ".lock")


def loaded(path: Path) -> Model:
    model = open_model(path)
    model.load()
    return model


def test_the_second_start_packs_nothing(path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = logits_of(path)
    (file,) = packed(home)
    assert file.name.startswith(open_model(path).identity.partition("+")[0])

    def fail(*_: Any) -> Any:
        raise AssertionError("packed again")

    monkeypatch.setattr(weights.Layout, "pack", fail)
    assert np.array_equal(logits_of(path), first)


def test_pieces_of_any_length_come_back_from_their_places(home: Path) -> None:
    rng = np.random.default_rng(5)
    lengths = [64, HUGE - 192, 64, 128, 3 * HUGE + 64, HUGE, 1, 5 * HUGE - 777]
    pieces, at = [], DATA_START
    for length in lengths:
        pieces.append((at, rng.integers(0, 256, length, dtype=np.uint8)))
        at += -(-length // 64) * 64 + 64
    wanted = np.zeros(at, np.uint8)
    for offset, piece in pieces:
        wanted[offset : offset + piece.size] = piece
    found = shared(Entry("pieces.bin", at, bytes(16)), lambda: pieces)
    assert found is not None
    assert (found[DATA_START:] == wanted[DATA_START:]).all()


def test_workers_map_one_copy_of_the_file(path: Path, home: Path) -> None:
    models = [loaded(path), loaded(path)]
    (file,) = packed(home)
    status = file.stat()
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert sum(line.endswith(str(file)) and f" {status.st_ino} " in line and "r--s" in line for line in maps) == 2
    for model in models:
        assert model._weights is not None
        assert model._weights.shared
        model.close()


@pytest.mark.parametrize("damage", ["short", "long", "empty", "header", "directory"])
def test_a_damaged_file_is_made_again(path: Path, home: Path, damage: str) -> None:
    first = logits_of(path)
    (file,) = packed(home)
    whole = file.read_bytes()
    file.unlink()
    if damage == "directory":
        file.mkdir()
        assert np.array_equal(logits_of(path), first)  # from private memory: a directory cannot be replaced
        return
    file.write_bytes({"short": whole[:-1], "long": whole + b"x", "empty": b"", "header": b"X" + whole[1:]}[damage])
    assert np.array_equal(logits_of(path), first)
    assert packed(home) == [file]
    assert file.read_bytes() == whole


def test_a_flipped_bit_anywhere_is_noticed_or_of_no_consequence(path: Path, home: Path) -> None:
    first = logits_of(path)
    (file,) = packed(home)
    whole = file.read_bytes()
    draw = np.random.default_rng(11)
    with open_model(path) as model:
        model.load()
        assert model._weights is not None
        layout = model._weights.layout
    inside = [draw.integers(place.offset, place.offset + place.nbytes) for place in layout.places.values()]
    for at in [*range(0, 64, 5), 63, *inside, len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(draw.integers(8))
        file.write_bytes(damaged)
        assert np.array_equal(logits_of(path), first), f"byte {at} of {len(whole)}"
        assert file.read_bytes() == whole, f"byte {at} of {len(whole)}"


@pytest.mark.parametrize("damage", ["zeroed page", "swapped pages", "another model's"])
def test_a_file_with_foreign_bytes_is_made_again(path: Path, home: Path, damage: str) -> None:
    first = logits_of(path)
    (file,) = packed(home)
    whole = bytearray(file.read_bytes())
    a, b = slice(64 + 4096, 64 + 8192), slice(64 + 8192, 64 + 12288)
    if damage == "zeroed page":
        file.write_bytes(whole[: a.start] + bytes(4096) + whole[a.stop :])
    elif damage == "swapped pages":
        file.write_bytes(whole[: a.start] + whole[b] + whole[a] + whole[b.stop :])
    else:
        loaded(synthetic.qwen3(path.with_name("other.gguf"), layers=1, vocab=512, seed=4)).close()
        (other,) = set(packed(home)) - {file}
        assert other.stat().st_size == len(whole)
        # a digest of all bytes cannot know whose they are: only the name does, and the layout where that differs
        file.write_bytes(whole[:48] + other.read_bytes()[48:])
    assert np.array_equal(logits_of(path), first)
    assert file.read_bytes() == whole


def test_a_file_of_another_layout_is_made_again(path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # as after an upgrade that reads the same tensors in another order: equal in name, size and number of tensors
    with monkeypatch.context() as patch:
        init = weights.Layout.__init__

        def reversed_(self: weights.Layout, file: Any, uses: Any, *, exact: bool) -> None:
            init(self, file, dict(reversed(uses.items())), exact=exact)

        patch.setattr(weights.Layout, "__init__", reversed_)
        loaded(path).close()
    (file,) = packed(home)
    other = file.read_bytes()
    first = logits_of(path)
    assert packed(home) == [file]
    assert len(file.read_bytes()) == len(other)
    assert file.read_bytes() != other
    file.unlink()
    assert np.array_equal(logits_of(path), first)


def test_what_a_killed_process_left_half_written_is_removed_by_the_next(path: Path, home: Path) -> None:
    script = (
        "import os, signal, sys; from prism_core import open_model, weights; whole = weights.Layout.pack\n"
        "def pack(self, name, tensor):\n"
        "    if name.startswith('output'): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return whole(self, name, tensor)\n"
        "weights.Layout.pack = pack; open_model(sys.argv[1]).load()"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(path)], cwd=ROOT, timeout=120)
    assert ended.returncode == -signal.SIGKILL
    (left,) = packed(home)
    assert left.name.startswith(WRITING)
    loaded(path).close()
    (file,) = packed(home)
    assert file.suffix == ".bin"


@pytest.mark.parametrize("text", ["32G", "-1", "1e9", "0x10", "9" * 30])
def test_a_cap_that_is_no_number_is_refused_by_name(path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PRISM_PACKED_BYTES", text)
    with pytest.raises(InvalidRequest, match="PRISM_PACKED_BYTES must be a number of bytes"):
        loaded(path)


def test_a_cap_below_the_models_size_keeps_nothing(path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = logits_of(path)
    (file,) = packed(home)
    monkeypatch.setenv("PRISM_PACKED_BYTES", str(file.stat().st_size - 1))
    file.unlink()
    assert np.array_equal(logits_of(path), first)
    assert packed(home) == []


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_file_cut_short_while_it_is_packed_is_an_error(path: Path, share: float) -> None:
    # `cp` over a model does this; read through a map, the process would end with SIGBUS
    script = (
        "import os, sys; from prism_core import ModelError, open_model, weights; whole = weights.Layout.pack\n"
        "path, share, seen = sys.argv[1], float(sys.argv[2]), []; size = os.path.getsize(path)\n"
        "def pack(self, name, tensor):\n"
        "    seen.append(name)\n"
        "    if len(seen) >= share * len(self.uses): os.truncate(path, int(share * size))\n"
        "    return whole(self, name, tensor)\n"
        "weights.Layout.pack = pack\n"
        "try: open_model(path).load()\n"
        "except ModelError as error: print(error)"
    )
    command = [sys.executable, "-c", script, str(path), str(share)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended
    assert ended.stdout.startswith(f"{path}: ")
    assert " is gone; " in ended.stdout or "changed since it was opened: its size was" in ended.stdout


def test_a_closed_model_says_so_in_one_sentence(path: Path) -> None:
    model = open_model(path)
    model.close()
    with pytest.raises(ModelError, match=r"model\.gguf: is closed"):
        model.decoder()


def test_a_folder_that_cannot_be_written_costs_memory_only(path: Path, home: Path) -> None:
    (home / "packed").write_text("in the way")
    with loaded(path) as model:
        assert model._weights is not None
        assert not model._weights.shared
        private = after(model.decoder(), IDS)
    (home / "packed").unlink()
    assert np.array_equal(logits_of(path), private)


def test_a_disk_without_room_costs_memory_only(path: Path, home: Path) -> None:
    # a limit on the size of files fails like a full disk, when room for the file is asked for
    script = (
        "import resource, sys; from prism_core import open_model; from tests.unit.engine.stepping import after\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        "model = open_model(sys.argv[1]); ids = [int(n) for n in sys.argv[2:]]\n"
        "logits = after(model.decoder(), ids); assert not model._weights.shared; print(logits.tobytes().hex())"
    )
    command = [sys.executable, "-c", script, str(path), *map(str, IDS)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert packed(home) == []
    assert np.array_equal(np.frombuffer(bytes.fromhex(ended.stdout), np.float32), logits_of(path))


def test_an_interrupted_pack_leaves_nothing_behind(path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = weights.Layout.pack

    def interrupted(self: weights.Layout, name: str, tensor: Any) -> Any:
        if name.startswith("output"):
            raise KeyboardInterrupt
        return whole(self, name, tensor)

    monkeypatch.setattr(weights.Layout, "pack", interrupted)
    with pytest.raises(KeyboardInterrupt):
        logits_of(path)
    assert packed(home) == []


def test_workers_that_start_together_pack_once(path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [open_model(path) for _ in range(3)]
    packing, go_on, count = threading.Event(), threading.Event(), []
    whole = weights.Layout.pack

    def slow(self: weights.Layout, name: str, tensor: Any) -> Any:
        count.append(name)
        packing.set()
        assert go_on.wait(60)
        return whole(self, name, tensor)

    monkeypatch.setattr(weights.Layout, "pack", slow)
    workers = [threading.Thread(target=model.load) for model in models]
    workers[0].start()
    assert packing.wait(60)
    for worker in workers[1:]:
        worker.start()
    go_on.set()
    for worker in workers:
        worker.join(60)
    assert len(count) == len(set(count))
    assert all(model._weights is not None and model._weights.shared for model in models)


def test_float32_weights_are_not_kept(path: Path, home: Path) -> None:
    logits_of(path, exact=True)
    assert not (home / "packed").exists()


def test_the_folder_may_vanish_while_a_model_runs(path: Path, home: Path) -> None:
    with loaded(path) as model:
        for file in packed(home):
            file.unlink()
        running = after(model.decoder(), IDS)
    assert np.array_equal(logits_of(path), running)


def test_the_least_recently_used_files_go_when_the_cap_is_reached(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [synthetic.qwen3(tmp_path / f"{n}.gguf", layers=1, vocab=512, seed=n) for n in range(4)]
    kept: dict[int, Path] = {}
    for number in range(3):
        loaded(paths[number]).close()
        (kept[number],) = set(packed(home)) - set(kept.values())
        os.utime(kept[number], (1000 + number, 1000 + number))
    loaded(paths[0]).close()  # used again: now the newest
    monkeypatch.setenv("PRISM_PACKED_BYTES", str(3 * kept[0].stat().st_size))
    loaded(paths[3]).close()
    left = set(packed(home))
    assert kept[1] not in left
    assert {kept[0], kept[2]} < left
    assert len(left) == 3


def test_a_model_file_that_changed_is_not_run_from_old_weights(path: Path, home: Path) -> None:
    first = logits_of(path)
    model = open_model(path)
    other = synthetic.qwen3(path.with_name("other.gguf"), layers=1, vocab=512, seed=9)
    path.write_bytes(other.read_bytes())
    with pytest.raises(ModelError, match="changed since it was opened"):
        model.decoder()
    assert not np.array_equal(logits_of(path), first)
    assert len(packed(home)) == 2


def test_a_first_start_says_what_it_is_doing(path: Path) -> None:
    said: list[tuple[str, float]] = []
    with open_model(path) as model:
        model.decoder(lambda what, share: said.append((what, share)))
    for stage in ("packing weights", "preparing kernels"):
        shares = [share for what, share in said if what == stage]
        assert shares == sorted(shares)
        assert shares[0] == 0.0
        assert shares[-1] < 1.0

"""Files on disk: what may be opened, what is noticed when it changes, and how its digest is remembered."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import stat
import subprocess
import sys
import time

import numpy as np
import pytest

from ops.bench import synthetic
from prism_core.errors import ModelError
from prism_core.gguf import container, gguf_from_buffers, open_gguf
from prism_core.gguf.identity import SETTLE_NS, sha256_of
from prism_core.gguf.source import Source


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PRISM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def model(tmp_path):
    return synthetic.qwen3(tmp_path / "model.gguf", layers=1)


def later() -> int:
    """A clock past the time in which a fresh file is not remembered."""
    return time.time_ns() + 2 * SETTLE_NS


class TestGroup17Files:
    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(ModelError, match=r"none\.gguf: cannot be opened: No such file"):
            open_gguf(tmp_path / "none.gguf")

    def test_a_folder_a_fifo_and_a_device_are_refused_at_once(self, tmp_path):
        os.mkfifo(tmp_path / "fifo")
        for path in (tmp_path, tmp_path / "fifo", "/dev/zero"):
            with pytest.raises(ModelError, match="not a regular file"):
                open_gguf(path)

    @pytest.mark.parametrize("size", [0, 1, 23])
    def test_a_file_too_short_to_map_is_refused(self, tmp_path, size):
        (tmp_path / "short").write_bytes(bytes(size))
        with pytest.raises(ModelError, match=f"{size} bytes are too short"):
            open_gguf(tmp_path / "short")

    def test_an_unreadable_name_is_refused(self, tmp_path):
        with pytest.raises(ModelError, match="cannot be opened"):
            open_gguf(tmp_path / ("x" * 300))

    def test_a_link_is_followed_once(self, model, tmp_path):
        link = tmp_path / "link.gguf"
        link.symlink_to(model)
        file = open_gguf(link)
        link.unlink()
        link.symlink_to("/dev/null")
        file.check_unchanged()
        assert file.sources[0].real == model.resolve()

    def test_a_dangling_or_circular_link_is_refused(self, tmp_path):
        (tmp_path / "dangling").symlink_to(tmp_path / "gone")
        (tmp_path / "circle").symlink_to(tmp_path / "circle")
        for name in ("dangling", "circle"):
            with pytest.raises(ModelError, match="cannot be opened"):
                open_gguf(tmp_path / name)

    def test_an_untouched_file_is_unchanged(self, model):
        open_gguf(model).check_unchanged()

    def test_a_grown_file_is_noticed(self, model):
        file = open_gguf(model)
        with model.open("ab") as handle:
            handle.write(b"x")
        with pytest.raises(ModelError, match=f"its size was {file.file_bytes}, is {file.file_bytes + 1}"):
            file.check_unchanged()

    def test_a_shrunken_file_is_noticed_without_touching_its_pages(self, model):
        file = open_gguf(model)
        os.truncate(model, 100)
        with pytest.raises(ModelError, match="its size was"):
            file.check_unchanged()

    def test_a_file_rewritten_in_place_is_noticed(self, model):
        file = open_gguf(model)
        os.utime(model, ns=(1, 1))
        with pytest.raises(ModelError, match="its modification time was"):
            file.check_unchanged()

    def test_a_file_replaced_under_its_name_is_noticed(self, model, tmp_path):
        file = open_gguf(model)
        copy = tmp_path / "copy"
        copy.write_bytes(model.read_bytes())
        os.utime(copy, ns=(model.stat().st_atime_ns, model.stat().st_mtime_ns))
        copy.replace(model)
        with pytest.raises(ModelError, match="its inode was"):
            file.check_unchanged()

    def test_a_file_that_is_removed_is_noticed(self, model):
        file = open_gguf(model)
        model.unlink()
        with pytest.raises(ModelError, match="is gone since it was opened"):
            file.check_unchanged()

    def test_tensor_data_cannot_be_written(self, model):
        tensor = open_gguf(model).tensors["token_embd.weight"]
        with pytest.raises(ValueError, match="read-only"):
            tensor.data[0] = 1
        with pytest.raises(ValueError, match="cannot set WRITEABLE"):
            tensor.data.flags.writeable = True

    def test_arrays_outlive_the_file_they_came_from(self, model):
        with open_gguf(model) as file:
            data = file.tensors["token_embd.weight"].data
            before = data.copy()
        gc.collect()
        np.testing.assert_array_equal(data, before)
        assert len(file.tensors) == 0

    @pytest.mark.parametrize("first", [24, 100, 4096])
    def test_a_header_is_read_however_far_it_goes(self, model, monkeypatch, first):
        whole = open_gguf(model)
        monkeypatch.setattr(container, "FIRST_READ", first)
        part = open_gguf(model)
        assert part.shards[0].records == whole.shards[0].records
        assert part.shards[0].data_start == whole.shards[0].data_start
        assert str(dict(part.metadata)) == str(dict(whole.metadata))

    def test_opening_never_touches_the_map(self, model, monkeypatch):
        # a map would be a SIGBUS away from ending the process, were the file cut short meanwhile
        monkeypatch.setattr("mmap.mmap", lambda fd, size, access: np.full(size, 0xAA, np.uint8))
        assert open_gguf(model).architecture == "qwen3"

    def test_a_name_that_no_file_can_have_is_refused(self):
        with pytest.raises(ModelError, match=r"'a\\x00b\.gguf' cannot be opened: embedded null byte"):
            open_gguf("a\0b.gguf")

    def test_a_read_copies_what_the_map_shows(self, model, tmp_path):
        for path in (model, synthetic.qwen3(tmp_path / "split.gguf", parts=3)):
            with open_gguf(path) as file:
                for name, tensor in file.tensors.items():
                    np.testing.assert_array_equal(file.read(name), tensor.data)
                with pytest.raises(ModelError, match="tensor 'none' is missing"):
                    file.read("none")

    def test_a_read_of_a_file_cut_short_is_an_error_and_no_signal(self, model):
        with open_gguf(model) as file:
            os.truncate(model, 20_000)
            with pytest.raises(ModelError, match=f"byte .* is gone; it had {file.file_bytes} bytes"):
                file.read("token_embd.weight")

    def test_a_file_too_large_to_map_is_refused(self, model):
        os.truncate(model, 1 << 43)
        code = """if True:
            import resource, sys
            from prism_core import ModelError
            from prism_core.gguf import open_gguf
            resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))
            try:
                open_gguf(sys.argv[1])
            except ModelError as error:
                print(error)
        """
        done = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=True)
        assert f"its {1 << 43} bytes cannot be mapped" in done.stdout

    def test_no_descriptor_is_left_behind(self, model):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            open_gguf(model).close()
        raw = model.read_bytes()
        model.write_bytes(raw[:-4000])
        for _ in range(20):
            with pytest.raises(ModelError):
                open_gguf(model)
        files = [Source(model) for _ in range(5)]
        del files
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= before + 1


class TestIdentity:
    def test_it_is_the_sha_256_of_the_bytes(self, model, home):
        assert open_gguf(model).sha256() == hashlib.sha256(model.read_bytes()).hexdigest()

    def test_files_in_memory_have_the_digest_of_files_on_disk(self, home, tmp_path):
        synthetic.qwen3(tmp_path / "m.gguf", layers=1, parts=2)
        paths = sorted(tmp_path.glob("m-*"))
        for chosen in (paths, [synthetic.qwen3(tmp_path / "whole.gguf", layers=1)]):
            in_memory = gguf_from_buffers([path.read_bytes() for path in chosen])
            assert in_memory.sha256() == open_gguf(chosen[0]).sha256()
            assert in_memory.read("output_norm.weight").nbytes == 1024

    def test_it_is_remembered_for_the_same_file_only(self, model, home):
        source = Source(model)
        digest = sha256_of([source], later)
        sidecar = next((home / "identity").iterdir())
        assert stat.S_IMODE(sidecar.parent.stat().st_mode) == 0o700
        entry = json.loads(sidecar.read_text())
        assert entry["sha256"] == digest
        entry["sha256"] = "ab" * 32
        sidecar.write_text(json.dumps(entry))
        assert sha256_of([source], later) == "ab" * 32, "the remembered digest is used"
        os.utime(model, ns=(5, 5))
        assert sha256_of([Source(model)], later) == digest, "another time: hashed again"

    def test_a_copy_under_another_name_is_hashed_on_its_own(self, model, home, tmp_path):
        sha256_of([Source(model)], later)
        copy = tmp_path / "copy.gguf"
        copy.write_bytes(model.read_bytes())
        sha256_of([Source(copy)], later)
        assert len(list((home / "identity").iterdir())) == 2

    def test_a_file_changed_a_moment_ago_is_not_remembered(self, model, home):
        sha256_of([Source(model)])
        assert not (home / "identity").exists()

    @pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"key": 1}', '{"sha256": 5, "key": []}', "\x00\xff"])
    def test_a_damaged_sidecar_is_replaced(self, model, home, text):
        digest = sha256_of([Source(model)], later)
        sidecar = next((home / "identity").iterdir())
        sidecar.write_text(text)
        assert sha256_of([Source(model)], later) == digest
        assert json.loads(sidecar.read_text())["sha256"] == digest

    def test_a_home_that_cannot_be_written_costs_nothing_but_time(self, model, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("PRISM_HOME", str(tmp_path / "file"))
        assert sha256_of([Source(model)], later) == hashlib.sha256(model.read_bytes()).hexdigest()

    def test_a_file_that_changes_while_it_is_hashed_is_refused(self, model, home, monkeypatch):
        source = Source(model)
        read = os.preadv

        def read_and_cut(fd, buffers, at):
            os.truncate(model, 1000)
            return read(fd, buffers, at)

        monkeypatch.setattr(os, "preadv", read_and_cut)
        with pytest.raises(ModelError, match="changed since it was opened"):
            sha256_of([source], later)
        assert not (home / "identity").exists()


def test_reading_files_imports_no_numba_and_no_redis():
    code = "import sys, prism_core.gguf; print({'numba', 'llvmlite', 'redis', 'gguf', 'rq'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_process_without_a_home_is_told_what_to_set():
    code = (
        "import os; os.environ.pop('HOME', None); os.environ.pop('PRISM_HOME', None)\n"
        "from prism_core.home import prism_home\n"
        "from prism_core.errors import InvalidRequest\n"
        "os.path.expanduser = lambda path: path\n"  # as for a user whom the system does not know
        "try: prism_home()\n"
        "except InvalidRequest as error: print(error)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "'~/.cache/prism' has no home directory to stand for ~: set PRISM_HOME to a folder\n"

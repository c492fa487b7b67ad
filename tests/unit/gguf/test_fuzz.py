"""Whatever a header is turned into, the reader answers with a file or with a ModelError: quickly, and within memory.

Seeds are whole small files of every container feature; mutations go to their headers and tables, half of them aimed at
the bytes where the parser reads a length, a count, a type or an offset. `--full` runs 100,000 of them, and
PRISM_FUZZ_ROUNDS and PRISM_FUZZ_SEED ask for other numbers.
"""

from __future__ import annotations

import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from ops.bench import synthetic
from prism_core.errors import ModelError
from prism_core.gguf import check_all_scales, dequantize, describe, gguf_from_buffers
from prism_core.gguf import container as container_module

QUICK_ROUNDS = 5_000
FULL_ROUNDS = 100_000
CPU_SECONDS_LIMIT = 1.0
EXTREMES = [0, 1, 2, 3, 31, 63, 64, 255, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**62, 2**63 - 1]
EXTREMES += [2**63, 2**64 - 1, 2**64 - 8, 2**64 - 32]


class Seed:
    """A valid file, the end of its header, and where the parser reads numbers in it."""

    def __init__(self, name: str, raw: bytes) -> None:
        self.name = name
        self.raw = raw
        self.numbers: list[tuple[int, int]] = []

        class Tracing(container_module._Parser):
            def need(parser, count: int, what: str) -> int:
                at = super().need(count, what)
                if count in (4, 8):
                    self.numbers.append((at, count))
                return at

        with memoryview(raw) as view:
            shard = Tracing(view, name).shard()
        self.header_end = shard.data_start


def small_files(folder) -> list[Seed]:
    keep = {"layers": 1, "embd": 64, "ffn": 128, "heads": 2, "kv_heads": 1, "head_dim": 32, "vocab": 400}
    wide = keep | {"embd": 256, "ffn": 256, "heads": 4, "head_dim": 64}
    seeds = []

    def add(name: str, path) -> None:
        seeds.append(Seed(name, path.read_bytes()))

    for kind in ("Q8_0", "Q2_0", "MXFP4"):
        add(f"qwen3 {kind}", synthetic.qwen3(folder / "a.gguf", type=kind, **keep))
    for kind in ("Q2_0_G128", "PTQ1_0", "Q4_K", "Q1_0_V1", "PQ2_0"):
        add(f"qwen3 {kind}", synthetic.qwen3(folder / "a.gguf", type=kind, **wide))
    add("qwen35", synthetic.qwen35(folder / "a.gguf", **keep | {"layers": 4, "state": 32}))
    add("gemma3", synthetic.gemma3(folder / "a.gguf", **keep))
    add("rotated", synthetic.qwen3(folder / "a.gguf", hadamard=synthetic.Rotation(block=32), **keep))
    add(
        "rotated, untied", synthetic.llama(folder / "a.gguf", hadamard=synthetic.Rotation(block=32), tied=False, **keep)
    )
    return seeds


def flip_bits(seed: Seed, draw: random.Random, raw: bytearray) -> None:
    for _ in range(draw.randint(1, 8)):
        raw[draw.randrange(seed.header_end)] ^= 1 << draw.randrange(8)


def overwrite_a_number(seed: Seed, draw: random.Random, raw: bytearray) -> None:
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        at, size = draw.choice(seed.numbers)
        remaining = len(raw) - at - size
        value = draw.choice([*EXTREMES, remaining, remaining + 1, remaining // 8, draw.getrandbits(64)])
        raw[at : at + size] = struct.pack("<Q", value)[:size]


def nudge_a_number(seed: Seed, draw: random.Random, raw: bytearray) -> None:
    at, size = draw.choice(seed.numbers)
    value = int.from_bytes(raw[at : at + size], "little") + draw.choice([-64, -32, -8, -1, 1, 8, 32, 64, 2**31])
    raw[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")


def cut(seed: Seed, draw: random.Random, raw: bytearray) -> None:
    del raw[draw.choice([draw.randrange(seed.header_end), draw.randrange(len(raw))]) :]


def swap_two_pieces(seed: Seed, draw: random.Random, raw: bytearray) -> None:
    size = draw.randint(1, 64)
    a, b = (draw.randrange(max(1, seed.header_end - size)) for _ in range(2))
    raw[a : a + size], raw[b : b + size] = raw[b : b + size], raw[a : a + size]


def swap_two_numbers(seed: Seed, draw: random.Random, raw: bytearray) -> None:
    (a, size), (b, other) = draw.choice(seed.numbers), draw.choice(seed.numbers)
    size = min(size, other)
    raw[a : a + size], raw[b : b + size] = raw[b : b + size], raw[a : a + size]


def insert_or_remove(seed: Seed, draw: random.Random, raw: bytearray) -> None:
    at, size = draw.randrange(seed.header_end), draw.randint(1, 40)
    if draw.random() < 0.5:
        del raw[at : at + size]
    else:
        raw[at:at] = draw.randbytes(size)


def scribble(seed: Seed, draw: random.Random, raw: bytearray) -> None:
    at = draw.randrange(seed.header_end)
    size = min(draw.randint(1, 200), len(raw) - at)
    raw[at : at + size] = draw.choice([draw.randbytes(size), bytes(size), b"\xff" * size])


MUTATIONS: list[Callable[[Seed, random.Random, bytearray], None]] = [
    flip_bits, overwrite_a_number, overwrite_a_number, overwrite_a_number, nudge_a_number, cut, swap_two_pieces,
    swap_two_numbers, insert_or_remove, scribble,
]  # fmt: skip


def examine(raw: bytearray) -> str:
    """Open a mutated file as a loader would; says how it ended."""
    try:
        file = gguf_from_buffers([raw], inspect=True)
        describe(file)
        for tensor in file.tensors.values():
            assert tensor.data.size == tensor.nbytes
            assert tensor.offset + tensor.nbytes <= len(raw)
        gguf_from_buffers([raw])
        check_all_scales(file.tensors.values())
        smallest = min(file.tensors.values(), key=lambda tensor: tensor.nbytes, default=None)
        if smallest is not None:
            dequantize(smallest.type, smallest.data, smallest.elements)
    except ModelError as error:
        return "refused" if "\n" not in str(error) and len(str(error)) < 1000 else f"refused at length: {error}"
    return "read"


def run(seeds: list[Seed], rounds: int, number: int) -> dict[str, int]:
    """Mutate and examine; the message of a failure says how to make the same bytes again."""
    outcomes = {"read": 0, "refused": 0}
    for turn in range(rounds):
        draw = random.Random(f"{number}/{turn}")
        seed = draw.choice(seeds)
        raw = bytearray(seed.raw)
        for mutation in draw.sample(MUTATIONS, draw.choice([1, 1, 1, 2])):
            if len(raw) > seed.header_end:
                mutation(seed, draw, raw)
        traced = turn % 50 == 0
        if traced:
            tracemalloc.start()
        started = time.thread_time()
        try:
            outcome = examine(raw)
        except Exception as error:
            pytest.fail(f"seed {number}, turn {turn}, {seed.name}: {type(error).__name__}: {error}")
        took = time.thread_time() - started
        if traced:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 16 * len(raw) + (4 << 20), f"seed {number}, turn {turn}, {seed.name}: {peak} bytes"
        assert traced or took < CPU_SECONDS_LIMIT, f"seed {number}, turn {turn}, {seed.name}: {took:.2f} s of CPU"
        outcomes[outcome] += 1
    return outcomes


@pytest.fixture(scope="module")
def seeds(tmp_path_factory) -> list[Seed]:
    return small_files(tmp_path_factory.mktemp("fuzz"))


def test_the_seeds_are_read_and_the_parser_is_traced_through_all_of_them(seeds):
    for seed in seeds:
        assert examine(bytearray(seed.raw)) == "read", seed.name
        assert len(seed.numbers) > 100
    table = [at for at, _ in seeds[0].numbers]
    assert min(table) == 4
    assert max(table) > seeds[0].header_end - 60


def test_five_thousand_mutations_end_in_a_file_or_a_model_error(seeds):
    number = int(os.environ.get("PRISM_FUZZ_SEED", "1"))
    rounds = int(os.environ.get("PRISM_FUZZ_ROUNDS", QUICK_ROUNDS))
    print(f"fuzz seed {number}, {rounds} rounds")
    outcomes = run(seeds, rounds, number)
    assert min(outcomes.values()) > rounds // 20, outcomes


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_mutations_end_in_a_file_or_a_model_error(seeds):
    number = int(os.environ.get("PRISM_FUZZ_SEED", "2"))
    print(f"fuzz seed {number}, {FULL_ROUNDS} rounds")
    outcomes = run(seeds, FULL_ROUNDS, number)
    assert min(outcomes.values()) > FULL_ROUNDS // 20, outcomes


def test_mutations_of_the_reference_files_end_in_a_file_or_a_model_error(data):
    seeds = [
        Seed(path.name, path.read_bytes()) for path in sorted(data.glob("tiny-*/*.gguf")) if path.stat().st_size < 3e6
    ]
    assert len(seeds) >= 8
    outcomes = run(seeds, 600, 3)
    assert min(outcomes.values()) > 10, outcomes


def test_random_bytes_after_a_magic_are_refused():
    draw = np.random.default_rng(5)
    for _ in range(300):
        raw = bytearray(b"GGUF\3\0\0\0" + draw.bytes(int(draw.integers(0, 400))))
        assert examine(raw) == "refused"

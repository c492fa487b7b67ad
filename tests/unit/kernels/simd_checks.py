"""Checks of simd and memory, run as a program so that it can be compiled for another processor."""

from __future__ import annotations

import numpy as np

from prism_core.kernels import memory, simd
from prism_core.kernels.jit import device, entry, kernel
from prism_core.kernels.target import target

SEED = 20261020
rng = np.random.default_rng(SEED)


def address(array: np.ndarray) -> int:
    return array.ctypes.data


@kernel("void(int64, int64, int64)")
def byte_operations(a, b, out):
    x, y = simd.load_i8x32(a), simd.load_i8x32(b)
    zero = simd.splat_i32x8(0)
    table = simd.load_i8x16(a)
    simd.store(out, simd.maddubs(x, y))
    simd.store(out + 32, simd.xor(x, simd.less(y, simd.splat_i8x32(0))))
    simd.store(out + 64, simd.lookup16(table, simd.and_(y, simd.splat_i8x32(15))))
    simd.store(out + 96, simd.dot_us(zero, x, y))
    simd.store(out + 128, simd.dot_ss(zero, x, y))
    simd.store(out + 160, simd.unpack_low(x, y))
    simd.store(out + 192, simd.unpack_high(x, y))
    simd.store(out + 224, simd.shr(x, 4))
    simd.store(out + 256, simd.zext_i32x8(simd.load_i8x8(a)))
    simd.store(out + 288, simd.sext_i32x8(simd.load_i8x8(a)))
    simd.store(out + 320, simd.absolute(x))
    simd.store(out + 352, simd.broadcast4_i8x32(b))
    simd.store(out + 384, simd.maximum(x, y))
    simd.store(out + 416, simd.less(x, y))
    simd.store(out + 448, simd.select(simd.less(x, y), x, y))
    simd.store(out + 480, simd.concat(simd.high_half(x), simd.low_half(x)))


@kernel("void(int64, int64, int64)")
def wide_operations(a, b, out):
    x, y = simd.load_i8x64(a), simd.load_i8x64(b)
    simd.store(out, simd.dot_us(simd.splat_i32x16(5), x, y))
    simd.store(out + 64, simd.dot_ss(simd.splat_i32x16(-5), x, y))
    simd.store(out + 128, simd.lookup16(simd.load_i8x16(a), simd.and_(y, simd.splat_i8x64(15))))
    simd.store(out + 192, simd.maddwd(simd.as_i16x32(x), simd.as_i16x32(y)))


def check_bytes() -> None:
    for round_ in range(20):
        a, b = (rng.integers(-128, 128, 32).astype(np.int8) for _ in range(2))
        if round_ == 0:
            a[:], b[:] = -128, 127
        u = a.view(np.uint8) if round_ % 2 else (a.view(np.uint8) >> 1)
        a = u.view(np.int8)
        out = np.zeros(512, np.uint8)
        byte_operations(address(a), address(b), address(out))
        part = [out[start : start + 32] for start in range(0, 512, 32)]
        us, ss = u.astype(np.int64) * b, a.astype(np.int64) * b
        pairs = np.clip(us.reshape(-1, 2).sum(1), -32768, 32767)
        if np.abs(us.reshape(-1, 2).sum(1)).max() < 32768:
            assert (part[0].view(np.int16) == pairs).all()
        assert (part[1].view(np.int8) == np.where(b < 0, ~a, a)).all()
        assert (part[2].view(np.int8) == a[:16][b & 15]).all()
        assert (part[3].view(np.int32) == us.reshape(-1, 4).sum(1)).all()
        assert (part[4].view(np.int32) == ss.reshape(-1, 4).sum(1)).all()
        lanes = np.arange(32).reshape(2, 2, 8)
        for index, half in ((5, 0), (6, 1)):
            expected = np.stack([a[lanes[:, half].ravel()], b[lanes[:, half].ravel()]], 1).ravel()
            assert (part[index].view(np.int8) == expected).all()
        assert (part[7] == u >> 4).all()
        assert (part[8].view(np.int32) == u[:8]).all()
        assert (part[9].view(np.int32) == a[:8]).all()
        assert (part[10].view(np.int8) == np.abs(a)).all()
        assert (part[11].view(np.int8) == np.tile(b[:4], 8)).all()
        assert (part[12].view(np.int8) == np.maximum(a, b)).all()
        assert (part[13].view(np.int8) == -(a < b).astype(np.int8)).all()
        assert (part[14].view(np.int8) == np.minimum(a, b)).all()
        assert (part[15].view(np.int8) == np.roll(a, 16)).all()


def check_wide() -> None:
    for _ in range(10):
        a, b = (rng.integers(-127, 128, 64).astype(np.int8) for _ in range(2))
        out = np.zeros(256, np.uint8)
        wide_operations(address(a), address(b), address(out))
        us, ss = a.view(np.uint8).astype(np.int64) * b, a.astype(np.int64) * b
        assert (out[:64].view(np.int32) == us.reshape(-1, 4).sum(1) + 5).all()
        assert (out[64:128].view(np.int32) == ss.reshape(-1, 4).sum(1) - 5).all()
        assert (out[128:192].view(np.int8) == a[:16][b & 15]).all()
        words = a.view(np.int16).astype(np.int64) * b.view(np.int16)
        assert (out[192:].view(np.int32) == words.reshape(-1, 2).sum(1)).all()


@kernel("void(int64, int64, int64, int64)")
def look_up_and_store_first(table, indices, out, count):
    found = simd.lookup64(simd.load_i8x64(table), simd.load_i8x64(indices))
    simd.store(out, found)
    simd.store_first(out + 64, simd.as_f32x16(found), count)


def check_lookup64() -> None:
    table, indices = (rng.integers(0, 256, 64).astype(np.uint8) for _ in range(2))
    for count in (-3, 0, 5, 16, 99):
        out = np.full(136, 7, np.uint8)
        look_up_and_store_first(address(table), address(indices), address(out), count)
        written = 4 * min(max(count, 0), 16)
        assert (out[:64] == table[indices & 63]).all()
        assert (out[64 : 64 + written] == out[:written]).all()
        assert (out[64 + written :] == 7).all()


@device
def halve(x):
    return simd.mul(x, simd.splat_f32x8(0.5))


@kernel("void(int64, int64, int64)")
def float_operations(x, count, out):
    for i in range(0, count, 8):
        v = simd.load_f32x8(x + 4 * i)
        simd.store(out + 4 * i, simd.fma(v, v, v))
        simd.store(out + 4 * (count + i), simd.to_f32(simd.round_i32(v)))
        simd.store(out + 4 * (2 * count + i), halve(v))
        memory.store_f32(out + 4 * (3 * count + i), simd.sum_lanes(v))
        memory.store_f32(out + 4 * (3 * count + i + 1), simd.max_lanes(v))
        memory.store_f32(out + 4 * (3 * count + i + 2), simd.extract(v, 5))
        memory.store_f32(out + 4 * (3 * count + i + 3), memory.load_f32(x + 4 * i))


@kernel("void(int64, int64, int64, int64)")
def columns_and_sums(x, rows, columns, sums):
    for row in range(rows):
        v = simd.load_f32x8(x + 32 * row)
        simd.store_apart(columns + 4 * row, v, 4 * rows)
        memory.store_f32(sums + 4 * row, np.float32(simd.sum_lanes(simd.to_f64(v))))


def check_columns_and_sums() -> None:
    x = (rng.standard_normal((19, 8)) * rng.choice([1.0, 1e4, 1e8], (19, 8))).astype(np.float32)
    columns, sums = np.zeros((8, 19), np.float32), np.zeros(19, np.float32)
    columns_and_sums(address(x), 19, address(columns), address(sums))
    assert (columns == x.T).all()
    fours = x[:, :4].astype(np.float64) + x[:, 4:]
    twos = fours[:, :2] + fours[:, 2:]
    assert (sums == (twos[:, 0] + twos[:, 1]).astype(np.float32)).all()


@kernel("void(int64, int64, int64)")
def halves_to_floats(x, count, out):
    for i in range(0, count, 8):
        simd.store(out + 4 * i, simd.to_f32(simd.load_f16x8(x + 2 * i)))
    for i in range(0, count, 1000):
        memory.store_f32(out + 4 * i, memory.load_f16(x + 2 * i))


@kernel("void(int64, int64, int64)")
def floats_to_halves(x, count, out):
    for i in range(0, count, 8):
        simd.store(out + 2 * i, simd.to_f16(simd.load_f32x8(x + 4 * i)))
    for i in range(0, count, 1000):
        memory.store_f16(out + 2 * i, memory.load_f32(x + 4 * i))


def check_floats() -> None:
    x = np.concatenate([np.linspace(-110, 95, 40001), [-np.inf, 0.0, 0.5, 1.5, 2.5, -0.5, -2.5]]).astype(np.float32)
    x = x[: x.size // 8 * 8]
    out = np.zeros((4, x.size), np.float32)
    float_operations(address(x), x.size, address(out))
    finite = np.isfinite(x)
    wide = x[finite].astype(np.float64)
    rounding = np.spacing(np.maximum(wide**2, np.abs(wide**2 + wide)).astype(np.float32)) * (
        0.5 if target().fma else 1.0
    )
    assert (np.abs(out[0][finite] - (wide**2 + wide)) <= rounding + 1e-12).all()
    assert (out[1] == np.rint(np.where(np.isfinite(x), x, 0)))[np.isfinite(x)].all()
    assert (out[2] == x * np.float32(0.5)).all()
    rows = x.reshape(-1, 8)
    fours = rows[:, :4] + rows[:, 4:]
    twos = fours[:, :2] + fours[:, 2:]
    sums = out[3].reshape(-1, 8)
    assert (sums[:, 0] == twos[:, 0] + twos[:, 1]).all()
    assert (sums[:, 1] == rows.max(1)).all()
    assert (sums[:, 2] == rows[:, 5]).all()
    assert (sums[:, 3] == rows[:, 0]).all()


def check_halves() -> None:
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    wide = np.zeros(65536, np.float32)
    halves_to_floats(address(every), 65536, address(wide))
    assert np.array_equal(wide, every.astype(np.float32), equal_nan=True)
    assert (np.signbit(wide) == np.signbit(every))[~np.isnan(every)].all()
    bits = rng.integers(0, 2**32, 80000, dtype=np.uint64).astype(np.uint32)
    edges = (np.arange(65536, dtype=np.uint32) << 13) + rng.integers(0x37FFF000, 0x38001001, 65536).astype(np.uint32)
    ties = every[np.isfinite(every)].astype(np.float32)
    ties = ((ties[:-1].astype(np.float64) + ties[1:]) / 2).astype(np.float32)
    x = np.concatenate([bits.view(np.float32), edges.view(np.float32), ties, np.float32([65519.99, 65520, 1e-9, -0.0])])
    x = x[: x.size // 8 * 8].copy()
    out = np.zeros(x.size, np.float16)
    floats_to_halves(address(x), x.size, address(out))
    with np.errstate(all="ignore"):
        expected = x.astype(np.float16)
    known = ~np.isnan(x)
    assert (out.view(np.uint16) == expected.view(np.uint16))[known].all()
    assert np.isnan(out[~known]).all()


@entry("void(int64, int64)")
def add_into(to, value):
    memory.store_i64(to, memory.load_i64(to) + value)


@kernel("void(int64, int64, int64)")
def memory_operations(function, cells, bytes_):
    memory.call_entry(function, (cells, 5))
    memory.store_i64(cells + 8, memory.atomic_add_i64(cells, 2))
    memory.store_i64(cells + 16, memory.compare_exchange_i64(cells, 12, 77))
    memory.store_i64(cells + 24, memory.atomic_load_i64(cells))
    memory.store_i64(cells + 32, memory.compare_exchange_i32(cells + 40, -1, -9))
    memory.store_i64(cells + 48, memory.atomic_load_i32(cells + 40))
    memory.store_i64(cells + 56, memory.exchange_i32(cells + 40, 3))
    memory.yield_thread()
    memory.spin_hint()
    memory.sleep_us(10)
    memory.futex_wait(cells + 40, 4, 1_000_000)
    memory.futex_wait(cells + 40, 3, 1_000)
    memory.futex_wake(cells + 40, 1)
    memory.fill(bytes_, 9, 5)
    memory.copy(bytes_ + 8, bytes_, 4)
    memory.prefetch_t0(bytes_)
    memory.store_i64(cells + 64, memory.load_u8(bytes_ + 16))
    memory.store_i64(cells + 72, memory.load_i8(bytes_ + 16))
    memory.store_i64(cells + 80, memory.f32_bits(memory.bits_f32(0xBF800000)))


def check_memory() -> None:
    cells, bytes_ = np.zeros(16, np.int64), np.zeros(24, np.uint8)
    cells[0], cells[5], bytes_[16] = 5, -1, 200
    memory_operations(add_into.address, address(cells), address(bytes_))
    assert cells[:11].tolist() == [77, 10, 12, 77, -1, (0xFFFFFFFF << 32) + 3 - (1 << 64), -9, -9, 200, -56, 0xBF800000]
    assert bytes_[:13].tolist() == [9, 9, 9, 9, 9, 0, 0, 0, 9, 9, 9, 9, 0]
    cells[0] = 1
    add_into(address(cells), 4)
    assert cells[0] == 5


if __name__ == "__main__":
    print("seed", SEED, target())
    check_bytes()
    check_wide()
    check_lookup64()
    check_floats()
    check_columns_and_sums()
    check_halves()
    check_memory()
    print("passed")

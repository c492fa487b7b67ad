"""Numba kernels: every number of a decoder step is computed here.

Kernels take raw addresses (int64) and explicit signatures; whoever calls one has checked the bounds before.

    jit.py       the decorators `device`, `kernel`, `entry`, and the cache of compiled code
    target.py    what the processor that Numba compiles for can do
    simd.py      vectors: types, loads, arithmetic, shuffles, byte dot products
    memory.py    scalars at an address, atomics, calls through an address, waiting and waking
    coding.py    how activations are encoded (A8, F32)
    families.py  which kernels serve which tensor type

Nothing is imported here: a module costs its import, and a kernel its compilation, only when it is used.
"""

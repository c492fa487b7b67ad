"""Numba kernels: every number of a decoder step is computed here.

Kernels take raw addresses (int64) and explicit signatures; whoever calls one has checked the bounds before.

    jit.py        the decorators `device`, `kernel`, `entry`, and the cache of compiled code
    target.py     what the processor that Numba compiles for can do
    vectors.py    vector types for Numba; forms.py: operations that depend on the processor
    simd.py       the vocabulary of vector operations (loads, arithmetic, shapes)
    memory.py     scalars at an address, atomics, calls through an address, waiting and waking
    coding.py     how activations are encoded; lut.py: the form for one-bit and ternary weights
    families.py   which kernels serve which tensor type, and what they promise
    tiles.py      matrix products over interleaved rows, for every layout of integer codes:
                  layout.py, staging.py (how layouts are written), dots.py (the arithmetic), packing.py,
                  blocks32.py and kquants.py (the layouts)
    floats.py     plain floats; q1.py, ternary.py: one-bit and ternary weights by table look-up
    selection.py  the highest logits; drawing.py: one draw of a sampler, by weights.py (the arithmetic), surveying.py,
                  sifting.py and dealing.py (where to look, what lies there, and in which order)

and for the rest of a step: program.py runs tables of operations, which are words.py, norms.py, rope.py, attention.py...

Nothing is imported here: a module costs its import, and a kernel its compilation, only when it is used.
"""

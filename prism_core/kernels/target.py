"""What the processor that Numba compiles for can do.

Decided by compiling small probes with Numba's own target settings and reading what LLVM made of them, so that
NUMBA_CPU_NAME and NUMBA_CPU_FEATURES are honoured and an intrinsic is never used where LLVM could not select it
(which would end the process). The byte dot product is taken from the feature string, since no generic code yields it.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import llvmlite.binding as llvm

from prism_core.kernels.jit import processor

_PROBES: dict[str, tuple[str, str]] = {
    "ssse3": (
        "define <16 x i8> @f(<16 x i8> %a) {\n"
        "%r = shufflevector <16 x i8> %a, <16 x i8> %a, <16 x i32> <i32 3, i32 11, i32 7, i32 0, i32 9, i32 9, i32 1, "
        "i32 15, i32 2, i32 14, i32 5, i32 5, i32 6, i32 12, i32 10, i32 8>\nret <16 x i8> %r\n}",
        "pshufb",
    ),
    # A whole vector may be passed in a ymm or zmm register and yet be added in parts: look at the addition.
    "avx2": ("define <32 x i8> @f(<32 x i8> %a) {\n%r = add <32 x i8> %a, %a\nret <32 x i8> %r\n}", r"vpaddb.*ymm"),
    "avx512": ("define <64 x i8> @f(<64 x i8> %a) {\n%r = add <64 x i8> %a, %a\nret <64 x i8> %r\n}", r"vpaddb.*zmm"),
    "fma": (
        "declare <4 x float> @llvm.fmuladd.v4f32(<4 x float>, <4 x float>, <4 x float>)\n"
        "define <4 x float> @f(<4 x float> %a, <4 x float> %b) {\n"
        "%r = call <4 x float> @llvm.fmuladd.v4f32(<4 x float> %a, <4 x float> %b, <4 x float> %b)\n"
        "ret <4 x float> %r\n}",
        "vfmadd|fmla|vfma",
    ),
    "half": (
        "define <8 x float> @f(<8 x half> %a) {\n%r = fpext <8 x half> %a to <8 x float>\nret <8 x float> %r\n}",
        "vcvtph2ps|fcvtl",
    ),
}


@dataclass(frozen=True)
class Target:
    """Features of the compilation target; all False means generic vector code."""

    arch: str
    """"x86_64", "aarch64" or another triple's first word."""
    ssse3: bool
    avx2: bool
    avx512: bool
    """AVX-512 with byte and word instructions."""
    fma: bool
    half: bool
    """float16 <-> float32 conversion instructions."""
    vnni: bool
    """vpdpbusd on 128 and 256 bits."""
    vnni512: bool
    vbmi: bool
    """AVX-512 with byte permutations over 64 bytes."""
    dotprod: bool
    """AArch64 sdot."""

    @property
    def x86(self) -> bool:
        return self.arch == "x86_64"


@functools.cache
def target() -> Target:
    """The target of this process; a few milliseconds once."""
    name, features = processor()
    triple = llvm.get_process_triple()
    return probe(triple, name, features)


def probe(triple: str, name: str, features: str) -> Target:
    """The `Target` for a triple, a processor name and a feature string, as LLVM understands them."""
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=name, features=features)
    arch = triple.partition("-")[0].replace("arm64", "aarch64").replace("amd64", "x86_64")
    found = {feature: _emits(machine, triple, *question) for feature, question in _PROBES.items()}
    words = _enabled(features)
    x86 = arch == "x86_64"
    avx2 = x86 and found["avx2"]
    avx512 = avx2 and found["avx512"]
    return Target(
        arch=arch,
        ssse3=x86 and found["ssse3"],
        avx2=avx2,
        avx512=avx512,
        fma=found["fma"],
        half=found["half"],
        vnni=avx2 and ("avxvnni" in words or {"avx512vnni", "avx512vl"} <= words),
        vnni512=avx512 and "avx512vnni" in words,
        vbmi=avx512 and "avx512vbmi" in words,
        dotprod=arch == "aarch64" and "dotprod" in words,
    )


def _emits(machine: llvm.TargetMachine, triple: str, source: str, pattern: str) -> bool:
    """Whether a line of the code that LLVM makes of `source` matches `pattern`."""
    module = llvm.parse_assembly(f'target triple = "{triple}"\n{source}')
    return re.search(pattern, machine.emit_assembly(module)) is not None


def _enabled(features: str) -> set[str]:
    """Names with a `+`, where the last mention counts."""
    last = {word[1:]: word[0] == "+" for word in features.split(",") if word}
    return {name for name, on in last.items() if on}

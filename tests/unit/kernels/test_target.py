"""What a processor can do is read from what LLVM makes of probes, so names and features are honoured."""

from __future__ import annotations

import llvmlite.binding as llvm
import pytest

from prism_core.kernels.target import Target, probe

LINUX = "x86_64-unknown-linux-gnu"
ARM = "aarch64-unknown-linux-gnu"


@pytest.fixture(autouse=True, scope="module")
def every_target() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def found(triple: str, name: str, features: str) -> set[str]:
    target = probe(triple, name, features)
    assert isinstance(target, Target)
    names = ("ssse3", "avx2", "avx512", "fma", "half", "vnni", "vnni512", "dotprod")
    return {feature for feature in names if getattr(target, feature)}


@pytest.mark.parametrize(
    ("name", "features", "expected"),
    [
        ("generic", "", set()),
        ("nehalem", "", {"ssse3"}),
        ("ivybridge", "", {"ssse3", "half"}),
        ("haswell", "", {"ssse3", "avx2", "fma", "half"}),
        ("haswell", "-avx2", {"ssse3", "fma", "half"}),
        ("generic", "+avx2", {"ssse3", "avx2"}),
        ("generic", "+avx2,+fma,+f16c", {"ssse3", "avx2", "fma", "half"}),
        ("alderlake", "+avxvnni", {"ssse3", "avx2", "fma", "half", "vnni"}),
        ("skylake-avx512", "", {"ssse3", "avx2", "avx512", "fma", "half"}),
        (
            "znver4",
            "+avx512vnni,+avx512vl,+avx512bw",
            {"ssse3", "avx2", "avx512", "fma", "half", "vnni", "vnni512"},
        ),
        ("skylake-avx512", "-avx512bw", {"ssse3", "avx2", "fma", "half"}),
        ("haswell", "+avxvnni,-avxvnni", {"ssse3", "avx2", "fma", "half"}),
    ],
)
def test_x86_features(name: str, features: str, expected: set[str]) -> None:
    assert found(LINUX, name, features) == expected


def test_aarch64_features() -> None:
    assert found(ARM, "generic", "") == {"fma", "half"}
    assert found(ARM, "generic", "+dotprod") == {"fma", "half", "dotprod"}
    assert probe("arm64-apple-darwin23.0.0", "apple-m1", "+dotprod").arch == "aarch64"

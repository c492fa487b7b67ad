"""Compile the generated parts of some families for AArch64 and print the assembly; needs no such processor.

    aarch64_object.py FEATURES FAMILY... [-o FILE]

The functions are `decode_<family>(tile, apart, blocks, act, out)`, `unpack_<family>(block, records, index, ahead)`
and `multiply_<family>(records, count, act, stride, left, sums)`, all of int64.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import llvmlite.binding as llvm
from llvmlite import ir

TRIPLE = "aarch64-unknown-linux-gnu"
CPU = "generic"


class Context:
    """What the generators want of Numba's target context."""

    @staticmethod
    def get_dummy_value() -> None:
        return None


def emit(module: ir.Module, name: str, intrinsic: object, arguments: list[object]) -> None:
    """A void function of int64 around an intrinsic."""
    signature, generate = intrinsic._defn(None, *arguments)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * len(arguments)), name)
    builder = ir.IRBuilder(function.append_basic_block())
    generate(Context(), builder, signature, list(function.args))
    builder.ret_void()


def main(features: str, names: list[str], output: str | None) -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    from prism_core.kernels import target as targets

    arm = targets.probe(TRIPLE, CPU, features)
    targets.target = lambda: arm
    from numba import types

    from prism_core.gguf.types import TensorType
    from prism_core.kernels import families, tiles

    module = ir.Module()
    module.triple = TRIPLE
    for name in names:
        layout = import_module(f"prism_core.kernels.{families._HOME_OF[name]}")._LAYOUTS[TensorType[name].name]()
        emit(module, f"decode_{name}", tiles.decoder(layout, layout.streams), [types.int64] * 5)
        emit(module, f"unpack_{name}", tiles.unpacker(layout), [types.int64] * 4)
        emit(module, f"multiply_{name}", tiles.multiplier(layout), [types.int64] * 6)
    machine = llvm.Target.from_triple(TRIPLE).create_target_machine(cpu=CPU, features=features, opt=3, reloc="static")
    compiled = llvm.parse_assembly(str(module))
    compiled.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(compiled, passes)
    if output is not None:
        Path(output).write_bytes(machine.emit_object(compiled))
    print(arm)
    print(machine.emit_assembly(compiled))


if __name__ == "__main__":
    words = sys.argv[1:]
    output = words[words.index("-o") + 1] if "-o" in words else None
    main(words[0], [word for word in words[1:] if word not in ("-o", output)], output)

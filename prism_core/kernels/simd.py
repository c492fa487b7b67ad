"""The vector vocabulary of the kernels: generic LLVM vector code, with a processor's own instruction where one counts.

Types are named as in `vectors` (`i8x32`, `f32x8`, ...). Operations take vectors of any width and check their types when
a kernel is compiled. Only lookup16, lookup64, maddubs, maddwd, dot_us, dot_ss, fma and the float16 conversions
depend on the processor; for arguments inside their stated range all forms of each give the same bits, but for `fma`,
which rounds once where there is hardware for it and twice elsewhere.

Loads and stores take int64 addresses and assume no alignment.
"""

from __future__ import annotations

from prism_core.kernels.arithmetic import *  # noqa: F403
from prism_core.kernels.loads import *  # noqa: F403
from prism_core.kernels.shapes import *  # noqa: F403

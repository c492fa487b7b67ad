"""Products of every family, run as a program so that they can be compiled for another processor.

Prints one line per family: its name, the largest error against float64, and a digest of all bits.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np
from weights import Matrix, encoded, random_blocks

from prism_core.gguf.types import TensorType

SEED = 20261023


def main(names: list[str]) -> None:
    for name in names:
        kind, rng, digest, error = TensorType[name], np.random.default_rng(SEED), hashlib.sha256(), 0.0
        for rows, cols in ((19, 256), (41, 1536)):
            w = Matrix(kind, random_blocks(kind, rows, cols, rng), rows, cols)
            x = (rng.standard_normal((9, cols)) * rng.choice([0.01, 1.0, 30.0], (9, 1))).astype(np.float32)
            act = encoded(w.family.coding, x)
            error = max(error, w.error(act))
            together = w.times(act)
            for token in range(9):
                assert (w.times(act[token : token + 1])[0] == together[token]).all()
            for row in (0, rows - 1):
                assert (w.row(row).view(np.uint32) == w.values[row].view(np.uint32)).all()
            digest.update(together.tobytes())
        print(name, error, digest.hexdigest())


if __name__ == "__main__":
    main(sys.argv[1:])

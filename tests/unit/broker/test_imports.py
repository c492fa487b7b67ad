"""What a client must not pay for."""

from __future__ import annotations

import subprocess
import sys

FORBIDDEN = ("numba", "llvmlite", "rq", "numpy", "workers", "ops", "prism_core.kernels", "prism_core.runtime", "jinja2")

CHECK = f"""
import sys
import broker
from broker import Client, AsyncClient, RequestSpec
import broker.store, broker.admin, broker.embedded, broker.guardian, broker.reap, broker.rqrecord
found = [name for name in {FORBIDDEN!r} if name in sys.modules]
assert not found, found
"""


def test_the_broker_package_imports_neither_numba_nor_rq_nor_the_engine() -> None:
    subprocess.run([sys.executable, "-c", CHECK], check=True, timeout=60)


def test_importing_the_package_alone_imports_not_even_redis() -> None:
    check = "import sys, broker; assert 'redis' not in sys.modules; assert 'Client' in dir(broker)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_the_guardian_needs_the_standard_library_only() -> None:
    check = (
        "import sys; sys.path.insert(0, 'broker'); import guardian; assert not any('broker' in m for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-E", "-S", "-c", check], check=True, timeout=60)

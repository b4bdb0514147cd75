"""`weft bench`: measure this machine.

The modules of this package are in the folder benchmarks/ at the top of the source tree; a wheel has them here. Those
that measure have a function `measure`, which returns plain numbers for JSON. What computes runs in a separate process
with the environment and the single thread of a worker; whole runs are real `weft run` processes.
"""

from pathlib import Path

_SOURCE_TREE = Path(__file__).resolve().parents[3] / "benchmarks"
if _SOURCE_TREE.is_dir():
    __path__.append(str(_SOURCE_TREE))

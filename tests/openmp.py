"""Importing this loads OpenMP, with torch and numpy, for one thread.

`torch.set_num_threads` sets it for the thread that calls it. In every other, such as ranks that are threads, OpenMP
would have as many threads as there are cores, and they spin while they wait for one that has no core at the moment.

The variable is as before afterwards: programs that tests start have as many threads as Tutti decides.
"""

import importlib
import os

_before = os.environ.get("OMP_NUM_THREADS")
os.environ["OMP_NUM_THREADS"] = "1"
for _name in ("numpy", "torch"):
    importlib.import_module(_name)
if _before is None:
    del os.environ["OMP_NUM_THREADS"]
else:
    os.environ["OMP_NUM_THREADS"] = _before

"""Imported by the command line before NumPy: products of NumPy and SciPy use one thread.

Their matrices have a few hundred rows. Threads would wait for one another on a busy machine, and results would depend
on their number in the last bits. A value in the environment has priority.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

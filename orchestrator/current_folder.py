"""Imported first by the command line: removes the current folder from Python's search path.

`python -m` and `python -c` search the current folder before everything else, so a `torch.py` in a downloaded results
folder would be executed. The folder stays if PYTHONPATH holds its absolute path or if it is the folder of this
program. An editable install may add a placeholder, a relative path that does not exist. It stays, unless the current
folder holds a file of that name: libraries would load entry points from that file.

This module imports only modules that are loaded already.
"""

import os
import sys

_program = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def remove_current_folder() -> None:
    sys.path[:] = [place for place in sys.path if not place or os.path.isabs(place) or not os.path.lexists(place)]
    try:
        current = os.path.realpath(os.getcwd())
    except OSError:  # the current folder was deleted
        current = ""
    if current == _program:
        return
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [place for place in sys.path if place and (place in named or os.path.realpath(place) != current)]


remove_current_folder()

"""The guard of a directory as a process: ``python -m ringfence_guard DIR``. A hook's client starts it."""

from __future__ import annotations

import sys

from ringfence_guard.daemon import serve

if __name__ == "__main__":
    sys.exit(serve(sys.argv[1]))

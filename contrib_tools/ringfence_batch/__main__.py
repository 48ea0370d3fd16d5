"""The process of a worker: ``python -m ringfence_batch OUT SCRATCH``."""

import os
import sys

from ringfence_batch.worker import main

if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        os._exit(130)

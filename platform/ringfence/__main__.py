"""``python -m ringfence``: the command line, which is a package above this one."""

import runpy

if __name__ == "__main__":
    runpy.run_module("ringfence_cli", run_name="__main__", alter_sys=True)

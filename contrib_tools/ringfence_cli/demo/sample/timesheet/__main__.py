"""``python -m timesheet FILE``."""

import sys
from pathlib import Path

from timesheet import EntryError, parse_entries, render


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m timesheet FILE\n")
        return 2
    try:
        entries = parse_entries(Path(sys.argv[1]).read_text(encoding="utf-8"))
    except (OSError, EntryError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(render(entries))
    return 0


if __name__ == "__main__":
    sys.exit(main())

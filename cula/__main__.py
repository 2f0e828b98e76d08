"""`python -m cula`, the same as the console command `cula`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line on `argv` (default: the process's arguments) and return its exit code.

    0: done. 1: a check failed. 2: a bad argument, or the packages of the extra `cli` are missing. 130: interrupted.
    """
    missing = [name for name in ("click", "rich") if find_spec(name) is None]
    if missing:
        print(
            f"cula: the command line needs {' and '.join(missing)}: pip install 'cula[cli]'",
            file=sys.stderr,
        )
        return 2
    from cula.cli.main import run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: MIT
"""How the commands of this directory speak and end."""

import sys
from typing import Callable


def say(text: str) -> None:
    """What is going on, in one line that the next one replaces; nothing where nobody looks on."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def run(name: str, main: Callable[[], int]) -> None:
    """Ends with what main returns; what a user can mend is said in one line."""
    try:
        sys.exit(main())
    except (RuntimeError, OSError, ValueError) as error:
        sys.exit(f"benchmarks/{name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)

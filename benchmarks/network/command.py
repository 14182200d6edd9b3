# SPDX-License-Identifier: MIT
"""How the programs of this directory end."""

import signal
import subprocess
import sys
from typing import Callable


def run(name: str, main: Callable[[], None]) -> None:
    """Runs main; what a user can mend is said in one line, and a termination tidies up as an error does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main()
    except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
        sys.exit(f"benchmarks/network/{name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)

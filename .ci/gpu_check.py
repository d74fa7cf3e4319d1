"""`make gpu-check`: the tests that need an accelerator, with the system's own torch and no Kedro.

Says so and ends well where there is no accelerator. Only files that hold a test marked `gpu` are
read, so that packages which a bare GPU node lacks are not asked for.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> int:
    """Return pytest's exit status, 0 where there is nothing to check with."""
    if importlib.util.find_spec("torch") is None:
        print("gpu-check: this Python has no torch: nothing was checked")
        return 0
    import torch

    if not torch.cuda.is_available():
        print("gpu-check: torch sees no accelerator: nothing was checked")
        return 0
    print(f"gpu-check: torch {torch.__version__} on {torch.cuda.get_device_name()}")
    marked = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if re.search(r"\bmark\.gpu\b", path.read_text(encoding="utf-8"))
    ]
    if not marked:
        print("gpu-check: no test is marked gpu: nothing was checked")
        return 0
    # The project's pytest settings ask for plugins that a bare node may not have.
    settings = ["-c", "/dev/null", f"--rootdir={ROOT}", "-p", "no:cacheprovider", "-m", "gpu"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *settings, *marked], cwd=ROOT
    ).returncode


if __name__ == "__main__":
    sys.exit(main())

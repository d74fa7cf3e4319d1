"""Environments of their own for peers whose pins clash with ours; made once, kept beside this file.

In: a peer's name. Out: the path of a Python that has it. Nothing of ours is installed there.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / ".peers"
_CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"

_PACKAGES = {
    # torch is ours, so that the build is the one at hand; their own pins decide the rest.
    "energon": ("megatron-energon==7.4.1", "simplejpeg"),
    "streaming": ("mosaicml-streaming==0.13.0", "simplejpeg"),
    "litdata": ("litdata==0.2.76", "simplejpeg"),
}


def peer_python(name: str) -> Path:
    """Return the Python of a peer's environment, making it on first use (minutes)."""
    folder = FOLDER / name
    python = folder / "bin" / "python"
    done = folder / ".installed"
    if done.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pinned = folder / "constraints.txt"
    pinned.write_text("".join(f"{line}\n" for line in _torch_pins()))
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "-c", str(pinned), *_PACKAGES[name]], check=True)
    done.touch()
    return python


def _torch_pins() -> list[str]:
    lines = _CONSTRAINTS.read_text().splitlines()
    return [line for line in lines if line.startswith(("torch==", "torchvision=="))]

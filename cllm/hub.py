"""Where the file of a named model lies. It knows names and paths, and reads no file."""

from __future__ import annotations

from importlib.resources import files

DEMO = "demo"


def model_path(name: str) -> str:
    """The path of the GGUF file that `name` stands for: "demo" is the model in the package, else a path."""
    return str(files("cllm") / "assets" / "demo.gguf") if name == DEMO else name

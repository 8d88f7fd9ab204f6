"""`python -m cllm.bench KIND`."""

from ..cli import run_command
from . import main

if __name__ == "__main__":
    run_command(main)

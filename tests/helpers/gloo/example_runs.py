"""Runs of examples as one of several ranks, under torchrun or in processes of `run_ranks`."""

from __future__ import annotations

import io
import os
import runpy
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent.parent.parent / "examples"


def run_all(commands: dict[str, list[str]]) -> dict[str, str]:
    """Run examples in turn, as one of several ranks, and return what each has printed."""
    sys.path.insert(0, str(EXAMPLES))
    os.environ.pop("FORCE_COLOR", None)
    os.environ["COLUMNS"] = "80"
    outputs = {}
    for name, argv in commands.items():
        sys.argv = argv
        with redirect_stdout(io.StringIO()) as out, warnings.catch_warnings():
            if name == "partition_llama":
                warnings.simplefilter("ignore")  # of packages that transformers imports
            try:
                runpy.run_path(argv[0], run_name="__main__")
            except SystemExit as end:
                assert not end.code, f"{name} ended with {end.code}"
        outputs[name] = out.getvalue()
    return outputs

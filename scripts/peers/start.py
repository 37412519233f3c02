"""Start a peer's program, `start.py PROGRAM ARGUMENT...`: torchvision is ready beside a CPU build
of torch.
"""

import contextlib
import runpy
import sys
from pathlib import Path

VISION = runpy.run_path(
    str(Path(__file__).parents[2] / "fedpfl" / "ground" / "vision.py")
)  # fedpfl is not installed

with contextlib.suppress(ModuleNotFoundError):
    VISION["load_torchvision"]()
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")

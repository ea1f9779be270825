"""Run `train_gpt2.py` in one process, then on four gloo ranks, and compare the losses.

Exit status 1 if a loss differs by more than 1e-5 of its value.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).with_name("train_gpt2.py")


def torchrun(ranks: int, *arguments: str) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(SCRIPT), *arguments]
    print(f"$ torchrun --nproc-per-node={ranks} {SCRIPT.name} {' '.join(arguments)}", flush=True)
    # one thread a rank: without this torchrun prints a warning that it sets the same
    return subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        losses = str(Path(folder) / "losses.json")
        failed = torchrun(1, "--reference", losses) or torchrun(4, "--compare", losses)
    print("demo FAILED" if failed else "demo passed: four ranks train as one process does")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

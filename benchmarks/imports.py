"""What importing costs, beside `import torch`.

    python benchmarks/imports.py

Every line is imported in processes of its own, in turn; of each the quickest of all rounds counts (processor
time), which other load on the machine changes least. `ratio` is to `import torch`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

LINES = (
    "import torch",
    "import paceline",
    "from paceline import DistributedDataParallel",
    "from paceline import Trainer, TrainingArguments",
    "from transformers import Trainer, TrainingArguments",
)
TIMED = "import time; began = time.process_time(); {}; print(time.process_time() - began)"


def seconds(line: str) -> float:
    """Processor time of one import in a fresh process."""
    command = [sys.executable, "-c", TIMED.format(line)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="What importing costs, beside `import torch`.")
    parser.add_argument("--rounds", type=int, default=7)
    rounds = [{line: seconds(line) for line in LINES} for _ in range(parser.parse_args().rounds)]
    best = {line: min(each[line] for each in rounds) for line in LINES}
    for line, took in best.items():
        print(f"{line:55} {1e3 * took:7.0f} ms   ratio {took / best['import torch']:.2f}")


if __name__ == "__main__":
    main()

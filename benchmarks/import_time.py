"""What `import hasten` costs beyond `import torch`.

    python benchmarks/import_time.py [--rounds 15]

Fresh processes take turns; printed are medians, and the median difference within a round.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

IMPORTS = {
    "torch": "import torch",
    "hasten": "import torch, hasten",
    "core": "import torch, hasten; hasten.Trainer, hasten.Run, hasten.Loader, hasten.move",
}


def seconds(statement: str) -> float:
    """Time of an import in a fresh process, without the interpreter's own start."""
    code = f"import time; a = time.perf_counter(); {statement}; print(time.perf_counter() - a)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    times = [{name: seconds(code) for name, code in IMPORTS.items()} for _ in range(rounds + 1)][1:]
    for name in IMPORTS:
        extra = statistics.median(t[name] - t["torch"] for t in times)
        took = statistics.median(t[name] for t in times)
        print(f"{took:.3f} s, {extra:+.3f} s beyond torch: {IMPORTS[name]}")


if __name__ == "__main__":
    main()

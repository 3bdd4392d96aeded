"""Does the mean reward rise? Runs the recall example for several seeds and prints one JSON line per seed.

    python benchmarks/recall_reward.py [--seeds 0 1 2] [--transactions 6] [--out runs/bench-recall]

Exits with 1 when for any seed the mean reward of the last two transactions is not above that of the first two.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SPEC = ROOT / "examples" / "recall" / "transaction.yaml"


def run_seed(seed: int, transactions: int, out: Path) -> dict[str, object]:
    """Run one seed with the product's own command and return the figures of its summary."""
    command = [
        sys.executable,
        "-m",
        "longstraw_core.cli",
        "run",
        str(SPEC),
        *("--set", f"seed={seed}"),
        *("--transactions", str(transactions)),
        *("--workdir", str(out / f"seed{seed}")),
        *("-o", "json"),
    ]
    completed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    events = [json.loads(line) for line in completed.stdout.splitlines()]
    summary = events[-1]
    rows = [event for event in events if event["event"] == "transaction"]
    rewards = summary["rewards"]
    return {
        "benchmark": "recall_reward",
        "seed": seed,
        "gradient": summary["gradient"],
        "rewards": [round(reward, 4) for reward in rewards],
        "first_two": round(sum(rewards[:2]) / 2, 4),
        "last_two": round(sum(rewards[-2:]) / 2, 4),
        "rises": sum(rewards[-2:]) > sum(rewards[:2]),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "peak_memory_bytes": max((row["peak_memory_bytes"] for row in rows), default=0),
    }


def main() -> int:
    """Run every seed; print one JSON line each."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--transactions", type=int, default=6)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench-recall")
    arguments = parser.parse_args()
    figures = []
    for seed in arguments.seeds:
        figures.append(run_seed(seed, arguments.transactions, arguments.out))
        print(json.dumps(figures[-1]), flush=True)
    return 0 if all(figure["rises"] for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())

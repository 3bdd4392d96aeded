"""How fast is `math_verify`? Scores 10,000 responses of about 2,000 tokens with the product's own command and prints
one JSON line per figure.

    python benchmarks/rewards.py [--responses 10000] [--tokens 2000] [--workers 2] [--seed 0]

The honest file mixes the forms in which answers are written; in the hostile one every hundredth response is replaced
by a power tower, a factorial, deep nesting, a megabyte answer, unclosed boxes or a sum that runs for minutes, no two
alike. Wall seconds are what a person waits; CPU seconds (workers included) do not depend on what else the machine
does. Exits with 1 when the honest file takes 60 s or more, or the hostile one more than twice the honest limit.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

LIMIT_SECONDS = 60.0
WORDS_PER_TOKEN = 0.75
WORDS = [
    "hence",
    "so",
    "we",
    "get",
    "the",
    "sum",
    "of",
    "both",
    "sides",
    "and",
    "then",
    "since",
    "x",
    "is",
    "positive",
    "it",
    "follows",
    "that",
    "$a_n",
    "=",
    "3n",
    "+",
    "1$",
    "for",
    "all",
    "n",
    "let",
    "me",
    "check",
    "this",
    "again",
    "with",
    "n",
    "=",
    "4",
    "\\frac{1}{2}",
    "which",
    "gives",
    "13",
    "as",
    "before",
    "therefore",
]
HOSTILE = (
    lambda n: f"Answer: $9^{{9^{{9^{{{n}}}}}}}$",
    lambda n: f"Answer: 9**9**{n}",
    lambda n: f"Answer: ${n}{n}{n}!$",
    lambda n: "Answer: " + "(" * (3_000 + n) + "1" + ")" * (3_000 + n),
    lambda n: "Answer: " + "9" * (1_000_000 + n),
    lambda n: "Answer: $" + "\\frac{1}{1+" * 300 + str(n) + "}" * 300 + "$",
    lambda n: "\\boxed{" * (3_000 + n),
    lambda n: f"answer {n} " * 20_000,
    lambda n: f"Answer: $\\sum_{{k=1}}^{{{10**9 + n}}} \\frac{{1}}{{k}}$",
    lambda n: f"Answer: $\\binom{{{10**9 + n}}}{{{5 * 10**8}}}$",
    lambda n: f"Answer: $\\sqrt{{{n}+\\sqrt{{{n + 1}+\\sqrt{{{n + 2}}}}}}}$",
    lambda n: f"<think>{n}" * 10_000,
)


def stated(truth: int, generator: random.Random) -> tuple[str, str]:
    """Return an answer line and the ground truth it belongs to, in one of the usual forms."""
    forms = (
        (f"Answer: {truth}", str(truth)),
        (f"Answer: ${truth}$", str(truth)),
        (f"**Answer:** \\boxed{{{truth}}}", str(truth)),
        (f"Answer: {truth + 1}", str(truth)),
        (f"Answer: \\frac{{{truth}}}{{7}}", f"\\dfrac{{{truth}}}{{7}}"),
        (f"Answer: {truth / 4}", f"\\frac{{{truth}}}{{4}}"),
        (f"Answer: ${truth}\\sqrt{{2}}$", f"\\sqrt{{{2 * truth * truth}}}"),
        (f"Answer: $({truth}, {truth + 1})$", f"({truth},{truth + 1})"),
        (f"Answer: {truth} apples", str(truth)),
        (f"Answer: ${truth}\\cos(\\pi/3)$", f"\\frac{{{truth}}}{{2}}"),
        ("and so on, without ever saying it", str(truth)),
        (f"Answer: $\\frac{{{truth}}}{{1+\\sqrt{{2}}}}$", f"{truth}\\sqrt{{2}}-{truth}"),
    )
    weights = (30, 15, 15, 20, 4, 3, 2, 2, 3, 1, 4, 1)
    return generator.choices(forms, weights)[0]


def write_rows(path: Path, responses: int, tokens: int, seed: int, *, hostile: bool) -> None:
    """Write the file that is scored."""
    generator = random.Random(seed)
    prose = [" ".join(generator.choices(WORDS, k=round(tokens * WORDS_PER_TOKEN))) for _ in range(50)]
    with path.open("w", encoding="utf-8") as stream:
        for number in range(responses):
            line, truth = stated(generator.randrange(1, 2_000), generator)
            if hostile and number % 100 == 50:
                line = HOSTILE[number // 100 % len(HOSTILE)](number // 100 + 2)
            row = {"id": number, "response": f"{generator.choice(prose)}\n\n{line}", "ground_truth": truth}
            stream.write(json.dumps(row) + "\n")


def measure(path: Path, workers: int, figure: str) -> dict[str, object]:
    """Score the file with the command and return its figures."""
    command = [sys.executable, "-m", "longstraw_core.cli", "rewards", "score", "--kind", "math_verify"]
    before = getrusage(RUSAGE_CHILDREN)
    started = time.monotonic()
    completed = subprocess.run(
        [*command, "--in", str(path), "--workers", str(workers), "-o", "json"], stdout=subprocess.PIPE, check=True
    )
    seconds = time.monotonic() - started
    after = getrusage(RUSAGE_CHILDREN)
    records = [json.loads(line) for line in completed.stdout.splitlines()]
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "benchmark": "rewards",
        "figure": figure,
        "responses": len(records),
        "bytes": path.stat().st_size,
        "workers": workers,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "load_average": round(os.getloadavg()[0], 1),
        "correct": sum(record["correct"] for record in records),
        "statuses": dict(sorted(Counter(record["status"] for record in records).items())),
        "rules": dict(sorted(Counter(record["rule"].split(":")[-1] for record in records).items())),
    }


def main() -> int:
    """Measure both files; print one JSON line each."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--responses", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=2_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="longstraw-bench-") as directory:
        for figure in ("honest", "hostile_1_percent"):
            path = Path(directory) / f"{figure}.jsonl"
            write_rows(path, arguments.responses, arguments.tokens, arguments.seed, hostile=figure != "honest")
            record = measure(path, arguments.workers, figure)
            seconds[figure] = float(str(record["seconds"]))
            print(json.dumps(record), flush=True)
    ratio = seconds["hostile_1_percent"] / seconds["honest"]
    print(json.dumps({"benchmark": "rewards", "figure": "hostile_over_honest", "ratio": round(ratio, 2)}), flush=True)
    return 0 if seconds["honest"] < LIMIT_SECONDS and seconds["hostile_1_percent"] < 2 * LIMIT_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())

"""CPU time and memory of one GRPO update: conventional training and ours, side by side, one JSON line per figure.

    python benchmarks/engine.py [--short] [--figures cpu_time ...] [--family qwen3_5_text]

Every measurement is one update (gradients of the whole group, clipping, AdamW step) of the same random model in its own
process with one thread. `cpu` figures are process CPU time, so a busy machine changes them little. Memory is the peak
resident set (VmHWM, reset when the model is warm). Slopes and growth are measured with a fixed malloc mmap threshold:
peaks then are what was alive, not how the heap was fragmented before; the comparison of peaks is made with both.
Exits with 1 when a target is missed; `--short` measures small sizes, for CI, and checks only that everything runs.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

CHUNK_TOKENS = 1024
MIB = 1 << 20
STEADY_HEAP = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "16384"}
TRACE_POINTS = 60


@dataclass(frozen=True)
class Measurement:
    """One update to run in a process of its own."""

    method: str
    """`conventional`, `conventional_checkpointed`, `stopgrad` or `exact`."""
    family: str
    prompt: int
    group: int
    response: int
    checkpoint_layers: bool = False
    trace: bool = False


def memory_bytes(field: str) -> int:
    """`VmRSS` or `VmHWM` of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field} in /proc/self/status")


class Trace:
    """Samples the resident set of this process and notes which phase it was in."""

    def __init__(self) -> None:
        self.phase = "start"
        self._points: list[tuple[float, int, str]] = []
        self._stop = threading.Event()
        self._begin = time.perf_counter()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        while not self._stop.wait(0.02):
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * page
            self._points.append((time.perf_counter() - self._begin, resident, self.phase))

    def points(self) -> list[list[Any]]:
        """The peak of each of at most `TRACE_POINTS` equal intervals: [seconds, bytes, phase]."""
        self._stop.set()
        self._thread.join()
        size = max(1, -(-len(self._points) // TRACE_POINTS))
        groups = [self._points[start : start + size] for start in range(0, len(self._points), size)]
        peaks = [max(group, key=lambda point: point[1]) for group in groups]
        return [[round(seconds, 3), resident, phase] for seconds, resident, phase in peaks]


def measure(what: Measurement) -> dict[str, Any]:
    """Run one update in this process and return what it took."""
    import torch

    torch.set_num_threads(1)
    from longstraw_core.engine.policy import Policy
    from longstraw_core.spec.transaction import LayoutSpec
    from longstraw_core.training.conventional import (
        ConventionalBatch,
        ModelSize,
        accumulate_conventional,
        checkpoint_activations,
        random_batch,
        random_policy_model,
    )

    size = ModelSize()
    model = random_policy_model(what.family, size)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    conventional = what.method.startswith("conventional")
    if what.method == "conventional_checkpointed":
        checkpoint_activations(model)
    state_bytes: dict[str, int] = {}

    def ours(batch: ConventionalBatch, enter: Callable[[str], None]) -> None:
        layout = LayoutSpec(prompt_chunk_tokens=CHUNK_TOKENS, checkpoint_layers=what.checkpoint_layers)
        policy = Policy(model, layout, gradient=what.method)  # type: ignore[arg-type]
        state_bytes.update(asdict(policy.state_bytes(len(batch.prompt))))
        enter("capture")
        state = policy.capture(batch.prompt, adapter=True)
        enter("replay")
        for response, advantage in zip(batch.responses, batch.advantages, strict=True):
            logprobs_R = policy.replay(state, response, temperature=1.0).logprobs_R
            ratio_R = torch.exp(logprobs_R - logprobs_R.detach())
            clipped_R = ratio_R.clamp(0.8, 1.2)
            (-torch.minimum(ratio_R * advantage, clipped_R * advantage).mean() / len(batch.responses)).backward()
            state.verify_witness()
            del logprobs_R, ratio_R, clipped_R  # or this response's graph would live beside the next one's
        if what.method == "exact":
            enter("reverse_sweep")
            policy.reverse_sweep(state)
        state.release()

    def update(batch: ConventionalBatch, enter: Callable[[str], None]) -> float:
        if conventional:
            enter("forward and backward")
            accumulate_conventional(model, batch)
        else:
            ours(batch, enter)
        enter("optimizer")
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def nothing(_: str) -> None:
        return

    update(random_batch(size.vocabulary, 96, [70], seed=1), nothing)  # first use of every kernel and buffer
    batch = random_batch(size.vocabulary, what.prompt, [what.response] * what.group, seed=3)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    baseline = memory_bytes("VmRSS")
    trace = Trace() if what.trace else None

    def enter(phase: str) -> None:
        if trace is not None:
            trace.phase = phase

    cpu, wall = time.process_time(), time.perf_counter()
    norm = update(batch, enter)
    result = {
        **asdict(what),
        "cpu_seconds": round(time.process_time() - cpu, 3),
        "wall_seconds": round(time.perf_counter() - wall, 3),
        "baseline_bytes": baseline,
        "peak_bytes": memory_bytes("VmHWM"),
        "gradient_norm": norm,
        "state_bytes": state_bytes,
    }
    if trace is not None:
        result["trace"] = trace.points()
    return result


def run_child(what: Measurement, *, steady_heap: bool) -> dict[str, Any]:
    """Measure in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
    if steady_heap:
        environment |= STEADY_HEAP
    command = [sys.executable, __file__, "--measure", json.dumps(asdict(what))]
    completed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(completed.stdout.splitlines()[-1])


def figure(name: str, value: float | None, target: str, met: bool, **details: Any) -> dict[str, Any]:
    """One line of output."""
    return {"benchmark": "engine", "figure": name, "value": value, "target": target, "met": met, **details}


def brief(result: dict[str, Any]) -> dict[str, Any]:
    """What a line shows of one measurement."""
    keys = ("method", "prompt", "group", "response", "cpu_seconds", "wall_seconds", "gradient_norm")
    shown = {key: result[key] for key in keys}
    shown["peak_mib"] = round(result["peak_bytes"] / MIB, 1)
    shown["peak_beyond_weights_mib"] = round((result["peak_bytes"] - result["baseline_bytes"]) / MIB, 1)
    return shown


@dataclass(frozen=True)
class Sizes:
    """Prompt lengths and group of the figures."""

    cpu_prompt: int
    long_prompt: int
    short_prompt: int
    response: int
    group: int
    slope_prompt: int
    """The longer prompt of the memory slope; conventional training does not run on it."""


FULL = {
    "qwen3_5_text": Sizes(4096, 16384, 2048, 128, 8, 16384),
    "glm_moe_dsa": Sizes(1024, 4096, 2048, 128, 8, 16384),
}
SHORT = Sizes(512, 768, 256, 16, 3, 768)
CPU_TARGETS = {"qwen3_5_text": {"stopgrad": 10.0, "exact": 5.0}, "glm_moe_dsa": {"stopgrad": 5.0, "exact": 3.3}}


def cpu_time(family: str, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """CPU time of one update at one prompt length."""
    at = Measurement("conventional", family, sizes.cpu_prompt, sizes.group, sizes.response)
    conventional = run_child(at, steady_heap=False)
    for method, target in CPU_TARGETS[family].items():
        ours = run_child(replace(at, method=method), steady_heap=False)
        ratio = conventional["cpu_seconds"] / ours["cpu_seconds"]
        yield figure(
            f"cpu_time/{method}",
            round(ratio, 2),
            f">= {target} times less CPU time than conventional",
            ratio >= target,
            family=family,
            conventional=brief(conventional),
            ours=brief(ours),
        )


def long_prompt_memory(family: str, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Peak memory beside checkpointed conventional training, with each malloc, and the matched trace of both.

    With malloc as it comes, the peak is what a user sees; with the fixed threshold it is what was alive. The second
    figure compares like with like: both recompute layer by layer.
    """
    at = Measurement("conventional_checkpointed", family, sizes.long_prompt, 2, sizes.response, trace=True)
    traces: dict[str, Any] = {}
    for steady_heap, checkpoint_layers in ((False, False), (True, True)):
        conventional = run_child(at, steady_heap=steady_heap)
        ours = run_child(
            replace(at, method="exact", checkpoint_layers=checkpoint_layers),
            steady_heap=steady_heap,
        )
        beyond = [result["peak_bytes"] - result["baseline_bytes"] for result in (ours, conventional)]
        yield figure(
            "peak_memory/exact" + ("/alive" if steady_heap else ""),
            round(beyond[0] / beyond[1], 3),
            "< 0.35 of checkpointed conventional, peak resident set beyond the loaded model",
            beyond[0] < 0.35 * beyond[1],
            family=family,
            fixed_mmap_threshold=steady_heap,
            checkpoint_layers=checkpoint_layers,
            whole_process_ratio=round(ours["peak_bytes"] / conventional["peak_bytes"], 3),
            conventional=brief(conventional),
            ours=brief(ours),
        )
        traces = {"conventional": conventional["trace"], "ours": ours["trace"]}
    yield figure(
        "memory_trace",
        None,
        "recorded: [seconds, resident bytes, phase], same batch and process layout",
        all(traces.values()),
        family=family,
        **traces,
    )


def slope(family: str, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Peak memory per added prompt token over the state's bytes per token."""
    for method, limit in (("stopgrad", 1.1), ("exact", 2.2)):
        at = Measurement(method, family, sizes.short_prompt, 2, sizes.response)
        short = run_child(at, steady_heap=True)
        long = run_child(replace(at, prompt=sizes.slope_prompt), steady_heap=True)
        tokens = sizes.slope_prompt - sizes.short_prompt
        per_token = (long["peak_bytes"] - short["peak_bytes"]) / tokens
        state = (long["state_bytes"]["pages"] - short["state_bytes"]["pages"]) / tokens
        yield figure(
            f"memory_slope/{method}",
            round(per_token / state, 3),
            f"<= {limit} of the state's bytes per prompt token",
            per_token <= limit * state,
            family=family,
            peak_bytes_per_token=round(per_token, 1),
            state_bytes_per_token=round(state, 1),
            ours=[brief(short), brief(long)],
        )


def group_growth(family: str, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Peak memory of a group of eight over a group of two."""
    for method in ("stopgrad", "exact"):
        at = Measurement(method, family, sizes.cpu_prompt, 2, sizes.response)
        small, large = (run_child(replace(at, group=group), steady_heap=True) for group in (2, 8))
        growth = large["peak_bytes"] / small["peak_bytes"] - 1.0
        yield figure(
            f"group_growth/{method}",
            round(100.0 * growth, 3),
            "<= 0.2 % more peak memory for group 8 than for group 2",
            growth <= 0.002,
            family=family,
            ours=[brief(small), brief(large)],
        )


def checkpointed_layers(family: str, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """What `layout.checkpoint_layers` saves and costs."""
    at = Measurement("exact", family, sizes.cpu_prompt, 2, sizes.response)
    plain = run_child(at, steady_heap=True)
    layered = run_child(replace(at, checkpoint_layers=True), steady_heap=True)
    beyond = [result["peak_bytes"] - result["baseline_bytes"] for result in (layered, plain)]
    yield figure(
        "checkpoint_layers/exact",
        round(beyond[0] / beyond[1], 3),
        "< 1 of the peak beyond weights without it",
        beyond[0] < beyond[1],
        family=family,
        ours=[brief(plain), brief(layered)],
    )


def bfloat16(family: str, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Distance of both bf16 gradients from the fp32 conventional gradient of the same weights."""
    command = [sys.executable, "-m", "longstraw_core.cli", "parity", "--family", family, "--gradient", "exact"]
    command += ["--prompt", str(min(sizes.cpu_prompt, 512)), "--responses", "32", "--group", "4", "--chunk", "100"]
    command += ["--dtype", "bfloat16", "-o", "json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    completed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    report = json.loads(completed.stdout.splitlines()[0])
    check = report["checks"][-1]
    yield figure(
        "bfloat16/exact",
        check["value"],
        f"<= {check['tolerance']:.4f}, conventional bf16's distance times 1.1",
        check["passed"],
        family=family,
        checks=report["checks"],
    )


FIGURES = {
    "cpu_time": cpu_time,
    "group_growth": group_growth,
    "memory_slope": slope,
    "checkpoint_layers": checkpointed_layers,
    "bfloat16": bfloat16,
    "long_prompt_memory": long_prompt_memory,
}


def main() -> int:
    """Run the figures; print one JSON line each."""
    from longstraw_core.spec.transaction import Family

    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--short", action="store_true", help="small sizes, for CI; targets are shown, not enforced")
    parser.add_argument("--figures", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--family", nargs="+", choices=get_args(Family), default=list(get_args(Family)))
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(Measurement(**json.loads(arguments.measure)))))
        return 0
    met = True
    for family in arguments.family:
        sizes = SHORT if arguments.short else FULL[family]
        for name in arguments.figures:
            for line in FIGURES[name](family, sizes):
                met &= line["met"]
                print(json.dumps(line), flush=True)
    return 0 if met or arguments.short else 1


if __name__ == "__main__":
    sys.exit(main())

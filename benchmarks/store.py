"""What integrity costs: the store beside plain tools, in one run; prints one JSON line per figure.

    python benchmarks/store.py [--only upload-download|hash-tree|verify-tree] [--megabytes 256] [--repeats 3]

* `upload-download`: 4 files through the `s3://` store against boto3's own transfer without any hashing, on SeaweedFS;
  limit 1.25 for each direction.
* `hash-tree`: hashing a tree against `hashlib.sha256` on one core times the cores; limit 0.8.
* `verify-tree`: verifying an unchanged local tree of 10,000 small files against `sha256sum` over the same list;
  limit 5.

Alternates the two sides and compares the medians. Exits with 1 when a limit is missed.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from longstraw_core.artifacts import build_tree, check_directory, materialize_tree, open_store, publish_tree  # noqa: E402

FILES = 4
SMALL_FILES = 10_000


def timed(work: Callable[[], object]) -> float:
    """Seconds that a piece of work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def timed_cpu(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the clock and seconds of processor time, all threads, that a piece of work takes."""
    processor = time.process_time()
    elapsed = timed(work)
    return elapsed, time.process_time() - processor


def report(benchmark: str, *, ratio: float, limit: float, ok: bool, **figures: Any) -> bool:
    """Print one figure."""
    line = {"benchmark": benchmark, "ratio": round(ratio, 3), "limit": limit, "ok": ok, **figures}
    print(json.dumps(line), flush=True)
    return ok


def upload_download(scratch: Path, megabytes: int, repeats: int) -> bool:
    """Both directions through the store and through boto3's transfer manager."""
    from boto3.s3.transfer import TransferConfig

    from tests.servers.seaweedfs import seaweedfs

    source = scratch / "source"
    source.mkdir()
    with seaweedfs(scratch / "weed") as server:
        os.environ.update(server.environment())
        # no hash anywhere on the plain side: no payload signature, no checksums
        client = server.client(s3={"payload_signing_enabled": False})
        client.create_bucket(Bucket="bench")
        transfer = TransferConfig(max_concurrency=4, multipart_chunksize=16 << 20, multipart_threshold=16 << 20)
        store = open_store("s3://bench/store", create=True)
        seconds: dict[str, list[float]] = {name: [] for name in ("plain_up", "store_up", "plain_down", "store_down")}
        for repeat in range(repeats + 1):
            for number in range(FILES):
                with (source / f"{number}.bin").open("wb") as file:
                    for _ in range((megabytes if repeat else megabytes // 8) // FILES):
                        file.write(os.urandom(1 << 20))
            names = [f"{number}.bin" for number in range(FILES)]
            descriptors: list[Any] = []

            def plain_up(names: list[str] = names) -> None:
                for name in names:
                    client.upload_file(str(source / name), "bench", f"plain/{name}", Config=transfer)

            def store_up(descriptors: list[Any] = descriptors) -> None:
                descriptors.append(publish_tree(store, source))

            def plain_down(names: list[str] = names) -> None:
                (scratch / "plain").mkdir()
                for name in names:
                    client.download_file("bench", f"plain/{name}", str(scratch / "plain" / name), Config=transfer)

            def store_down(descriptors: list[Any] = descriptors) -> None:
                materialize_tree(store, descriptors[0], scratch / "ours")

            order = [
                ("plain_up", plain_up),
                ("store_up", store_up),
                ("plain_down", plain_down),
                ("store_down", store_down),
            ]
            if repeat % 2:
                order = [order[1], order[0], order[3], order[2]]
            for name, work in order:
                elapsed = timed(work)
                if repeat:  # the first, smaller round warms up
                    seconds[name].append(elapsed)
            shutil.rmtree(scratch / "plain")
            shutil.rmtree(scratch / "ours")
            for item in client.list_objects_v2(Bucket="bench").get("Contents", []):
                client.delete_object(Bucket="bench", Key=item["Key"])
    ok = True
    for direction in ("up", "down"):
        plain, ours = (statistics.median(seconds[f"{side}_{direction}"]) for side in ("plain", "store"))
        ok &= report(
            {"up": "store_upload", "down": "store_download"}[direction],
            ratio=ours / plain,
            limit=1.25,
            ok=ours / plain <= 1.25,
            megabytes=megabytes,
            files=FILES,
            store_seconds=round(ours, 3),
            boto3_seconds=round(plain, 3),
            load_average=round(os.getloadavg()[0], 1),
            samples={
                side: [round(value, 2) for value in seconds[f"{side}_{direction}"]] for side in ("plain", "store")
            },
        )
    return ok


def hash_tree(scratch: Path, megabytes: int, repeats: int) -> bool:
    """A tree of large files against one core's speed times the cores."""
    tree = scratch / "large"
    tree.mkdir()
    block = os.urandom(1 << 20)
    for number in range(FILES):
        with (tree / f"{number}.bin").open("wb") as file:
            for _ in range(megabytes // FILES):
                file.write(block)
    cores = len(os.sched_getaffinity(0))
    share = megabytes // cores

    def hash_share() -> None:
        digest = hashlib.sha256()
        for _ in range(share):
            digest.update(block)

    def all_cores() -> None:
        # every core at once: what one core does alone, times the cores, is not what a shared machine gives
        threads = [threading.Thread(target=hash_share) for _ in range(cores)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    build_tree(tree)
    pairs = [(timed_cpu(all_cores), timed_cpu(lambda: build_tree(tree))) for _ in range(repeats)]
    plain, plain_busy = (share * cores / statistics.median(pair[0][kind] for pair in pairs) for kind in (0, 1))
    ours, ours_busy = (megabytes / statistics.median(pair[1][kind] for pair in pairs) for kind in (0, 1))
    ratio = ours / plain
    return report(
        "hash_tree",
        ratio=ratio,
        limit=0.8,
        ok=ratio >= 0.8,
        cores=cores,
        megabytes=megabytes,
        tree_megabytes_per_second=round(ours),
        hashlib_megabytes_per_second=round(plain),
        # the same ratio per second of processor time: what other processes on the machine cannot change
        ratio_of_processor_time=round(ours_busy / plain_busy, 3),
        load_average=round(os.getloadavg()[0], 1),
    )


def verify_tree(scratch: Path, repeats: int) -> bool:
    """10,000 small files against `sha256sum`."""
    tree = scratch / "small"
    for number in range(SMALL_FILES):
        path = tree / f"{number // 100:03d}" / f"{number:05d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(1000 + number % 1000))
    manifest = build_tree(tree)
    names = scratch / "names"
    names.write_bytes(b"\0".join(entry.path.encode() for entry in manifest.entries) + b"\0")

    xargs = shutil.which("xargs") or "xargs"

    def sha256sum() -> None:
        with names.open("rb") as listed:
            subprocess.run([xargs, "-0", "sha256sum"], stdin=listed, stdout=subprocess.DEVNULL, cwd=tree, check=True)

    def verify() -> None:
        assert check_directory(tree, manifest) == []

    sha256sum()
    pairs = [(timed(sha256sum), timed(verify)) for _ in range(repeats)]
    plain, ours = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    return report(
        "verify_tree",
        ratio=ours / plain,
        limit=5.0,
        ok=ours / plain <= 5.0,
        files=SMALL_FILES,
        verify_seconds=round(ours, 3),
        sha256sum_seconds=round(plain, 3),
        load_average=round(os.getloadavg()[0], 1),
    )


def main() -> int:
    """Run the benchmarks that were asked for."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--only", choices=["upload-download", "hash-tree", "verify-tree"])
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scratch", type=Path, help="Directory with room for about 8 times the bytes.")
    arguments = parser.parse_args()
    ok = True
    with tempfile.TemporaryDirectory(prefix="longstraw-bench-", dir=arguments.scratch) as scratch:
        for name, work in (
            ("verify-tree", lambda: verify_tree(Path(scratch), arguments.repeats + 4)),
            ("hash-tree", lambda: hash_tree(Path(scratch), arguments.megabytes, arguments.repeats + 2)),
            ("upload-download", lambda: upload_download(Path(scratch), arguments.megabytes, arguments.repeats)),
        ):
            if arguments.only in (None, name):
                ok &= work()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())

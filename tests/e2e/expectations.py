"""What must hold wherever the compiled pipeline really runs: on a container engine and on a cluster alike.

A driver says how a run is started, watched and hurt there; what is expected of it is said here once.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from botocore.exceptions import ClientError

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "longstraw_core.cli")
STAGES = 9
LONG, SHORT = 1800.0, 1200.0


class Run(Protocol):
    """A run that was started."""

    def wait(self, seconds: float) -> bool:
        """Wait for its end; return whether it succeeded."""
        ...

    def text(self) -> str:
        """What the run said: its log, and what the engine or the cluster said of its containers."""
        ...

    def kill_stage(self, stage: str) -> None:
        """Wait until a stage has begun to work, then kill its process; fail when the run ends before."""
        ...


class Driver(Protocol):
    """A place where pipelines run."""

    def images(self) -> dict[str, str]:
        """The lock: role → repository@sha256:…"""
        ...

    def start(self, name: str, *, transactions: int, images: Mapping[str, str]) -> Run:
        """Compile the small specification under this name and run it with these images."""
        ...

    def store(self) -> str:
        """URI of the artifact store."""
        ...

    def store_client(self) -> Any:
        """boto3 client that may read the store."""
        ...

    def store_environment(self) -> dict[str, str]:
        """Variables with which a command on this machine reaches the store."""
        ...


def small_specification(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` completed by what every driver's transaction has: two prompts, groups of four, tiny pages."""
    common: dict[str, Any] = {
        "lora": {"rank": 8, "alpha": 16.0},
        "data": {"prompts_per_transaction": 2},
        "sampling": {"group_size": 4, "max_response_tokens": 4},
        "objective": {"gradient": "exact", "mask_truncated": False},
        "layout": {"prompt_chunk_tokens": 16, "page_tokens": 16},
    }
    return common | {
        key: {**common.get(key, {}), **value} if isinstance(value, dict) else value for key, value in fields.items()
    }


def receipts(driver: Driver, name: str) -> dict[str, dict[str, Any]]:
    """Return transaction/stage → receipt of a run, as they lie in the store."""
    bucket, _, prefix = driver.store().removeprefix("s3://").partition("/")
    prefix = f"{prefix}/runs/{name}/"
    client = driver.store_client()
    found = {}
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for entry in page.get("Contents", []):
            if entry["Key"].endswith("receipt.json"):
                body = client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read()
                found[entry["Key"].removeprefix(prefix).removesuffix("/receipt.json")] = json.loads(body)
    return found


def completes_with_the_locked_images(driver: Driver, run: Run, name: str, transactions: int) -> None:
    """The run succeeds, has every receipt, each names an image of the lock, and all of it verifies."""
    assert run.wait(LONG * transactions), run.text()[-4000:]
    found = receipts(driver, name)
    assert len(found) == STAGES * transactions
    locked = {reference.partition("@")[2] for reference in driver.images().values()}
    assert {receipt["predicate"]["image_digest"] for receipt in found.values()} == locked
    verifies(driver, name)


def verifies(driver: Driver, name: str) -> None:
    """`longstraw verify --deep` finds nothing wrong with the run."""
    done = subprocess.run(
        [*COMMAND, "verify", driver.store(), "--run", name, "--deep", "-o", "json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=driver.store_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def refuses_the_image_of_another_role(driver: Driver, name: str) -> None:
    """A lock that gives the trainer another role's image fails by name before the trainer does anything."""
    images = driver.images()
    run = driver.start(name, transactions=1, images={**images, "trainer": images["control"]})
    assert not run.wait(SHORT)
    assert "needs the image of role trainer" in run.text()
    assert set(receipts(driver, name)) == {"0001/audit_data"}


def names_a_digest_that_the_registry_does_not_have(driver: Driver, name: str) -> None:
    """A lock entry that points at another digest is an error with that digest, and nothing runs."""
    images = driver.images()
    absent = "sha256:" + "0" * 64
    run = driver.start(
        name, transactions=1, images={**images, "control": images["control"].partition("@")[0] + f"@{absent}"}
    )
    assert not run.wait(SHORT)
    assert absent in run.text()
    assert receipts(driver, name) == {}


def survives_a_stage_that_is_killed(driver: Driver, name: str) -> None:
    """A stage whose process is killed in the middle is tried again, and the run completes as if nothing had been."""
    run = driver.start(name, transactions=1, images=driver.images())
    run.kill_stage("capture_prefix")
    completes_with_the_locked_images(driver, run, name, 1)


def _refused(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except ClientError as error:
        return error.response["ResponseMetadata"]["HTTPStatusCode"] in (400, 403)
    return False


def a_prefix_is_closed_to_others(own: Any, bucket: str, own_prefix: str, other_prefix: str, other_key: str) -> None:
    """Credentials of one team reach its prefix, and no object, listing, copy or deletion in another's.

    Args:
        own: boto3 client with one team's credentials.
        bucket: The bucket that both prefixes are in.
        own_prefix: Where these credentials may write.
        other_prefix: Another team's prefix.
        other_key: An object that exists below it.
    """
    own.put_object(Bucket=bucket, Key=f"{own_prefix}/expectation", Body=b"mine")
    assert own.list_objects_v2(Bucket=bucket, Prefix=f"{own_prefix}/")["KeyCount"] >= 1
    attempts = {
        "get": lambda: own.get_object(Bucket=bucket, Key=other_key),
        "put": lambda: own.put_object(Bucket=bucket, Key=f"{other_prefix}/expectation", Body=b"theirs"),
        "list": lambda: own.list_objects_v2(Bucket=bucket, Prefix=f"{other_prefix}/"),
        "list the bucket": lambda: own.list_objects_v2(Bucket=bucket),
        "delete": lambda: own.delete_object(Bucket=bucket, Key=other_key),
        "copy": lambda: own.copy_object(Bucket=bucket, Key=f"{own_prefix}/copy", CopySource=f"{bucket}/{other_key}"),
        "upload": lambda: own.create_multipart_upload(Bucket=bucket, Key=f"{other_prefix}/expectation"),
        "a prefix that begins alike": lambda: own.put_object(Bucket=bucket, Key=f"{own_prefix}x/key", Body=b""),
        "dots": lambda: own.get_object(Bucket=bucket, Key=f"{own_prefix}/../{other_key.removeprefix('teams/')}"),
    }
    for what, attempt in attempts.items():
        assert _refused(attempt), f"{what}: allowed in another team's prefix"
    # several at once are answered one by one, with 200 for the whole
    own.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": other_key}]})

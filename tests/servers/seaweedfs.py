"""A real S3 server, SeaweedFS, on loopback: data in one directory, one user, gone when the context ends."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.servers.ports import free_port, wait_until_listening

ACCESS_KEY = "longstraw-test"
SECRET_KEY = "loopback-only-not-a-secret"  # noqa: S105
GRPC_OFFSET = 10000
"""Every SeaweedFS port has a gRPC sibling this much higher."""


def administrator(access_key: str, secret_key: str) -> dict[str, object]:
    """An identity of SeaweedFS' S3 configuration that may do everything."""
    return {
        "name": access_key,
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }


def prefix_user(access_key: str, secret_key: str, *, bucket: str, prefix: str) -> dict[str, object]:
    """An identity that reads and writes below one prefix of one bucket, and nothing else."""
    return {
        "name": access_key,
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": [f"{action}:{bucket}/{prefix}/*" for action in ("Read", "Write", "List", "Tagging")],
    }


@dataclass(frozen=True)
class S3Server:
    """Where a server listens and how its one user signs in."""

    endpoint: str
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY
    region: str = "us-east-1"
    process: int | None = None

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """The variables with which `open_store` finds this server (or a proxy in front of it)."""
        return {
            "AWS_ENDPOINT_URL_S3": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def client(self, **config: object):
        """A plain boto3 client, for looking at the server behind the store's back."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
            config=Config(
                s3={"addressing_style": "path", **config.pop("s3", {})},  # type: ignore[dict-item]
                max_pool_connections=32,
                retries={"mode": "standard", "total_max_attempts": 3},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                **config,
            ),
        )


@contextmanager
def seaweedfs(directory: Path, identities: Sequence[dict[str, object]] = ()) -> Iterator[S3Server]:
    """Start SeaweedFS with its data below `directory` and stop it, ports released, at the end.

    `identities` are users besides the administrator that is yielded.
    """
    ports = {name: free_port(also_plus=GRPC_OFFSET) for name in ("master", "volume", "filer", "s3")}
    assert len(set(ports.values())) == len(ports)
    config = directory / "s3.json"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "data").mkdir()
    config.write_text(
        json.dumps({"identities": [administrator(ACCESS_KEY, SECRET_KEY), *identities]}), encoding="utf-8"
    )
    command = [
        str(Path(sys.executable).parent / "weed"),
        "-logtostderr=true",
        "server",
        f"-dir={directory / 'data'}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-master.port={ports['master']}",
        f"-volume.port={ports['volume']}",
        "-filer",
        f"-filer.port={ports['filer']}",
        "-s3",
        f"-s3.port={ports['s3']}",
        "-s3.port.iceberg=0",  # these two listen on fixed ports
        "-s3.port.lance=0",
        f"-s3.config={config}",
        "-master.volumeSizeLimitMB=256",
        "-volume.max=200",
        "-master.telemetry=false",
    ]
    with (directory / "weed.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory)
        try:
            wait_until_listening(ports["s3"])
            server = S3Server(f"http://127.0.0.1:{ports['s3']}", process=process.pid)
            _wait_until_writable(server, process)
            yield server
        finally:
            process.kill()  # asked politely it takes 25 seconds, and its data is thrown away anyway
            process.wait()


def _wait_until_writable(server: S3Server, process: subprocess.Popen[bytes], *, seconds: float = 60.0) -> None:
    client = server.client()
    deadline = time.monotonic() + seconds
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"SeaweedFS ended with status {process.returncode}; see its log")
        try:
            client.create_bucket(Bucket="ready")
            client.put_object(Bucket="ready", Key="probe", Body=b"x")
            return
        except ClientError as error:
            if error.response["Error"]["Code"] in ("BucketAlreadyExists", "BucketAlreadyOwnedByYou"):
                client.put_object(Bucket="ready", Key="probe", Body=b"x")
                return
            if time.monotonic() > deadline:
                raise
        except BotoCoreError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)

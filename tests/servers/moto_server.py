"""moto's S3, in this process, on loopback: quick, forgiving, and without checksums of finished multipart objects."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from tests.servers.seaweedfs import S3Server


@contextmanager
def moto_server() -> Iterator[S3Server]:
    """Start moto's threaded server and stop it at the end."""
    # moto computes with boto3 itself, which must not find a developer's credentials
    with mock.patch.dict(os.environ, {"AWS_ACCESS_KEY_ID": "moto", "AWS_SECRET_ACCESS_KEY": "moto"}):
        from moto.server import ThreadedMotoServer

        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
    try:
        host, port = server.get_host_and_port()
        yield S3Server(f"http://{host}:{port}")
    finally:
        server.stop()

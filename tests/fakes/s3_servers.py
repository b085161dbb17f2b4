"""S3 servers on loopback: moto (in this process, fast, not atomic under races) and SeaweedFS (a real process)."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

BUCKET = "coral-tests"
_START_S = 180.0
_RANDOM = random.SystemRandom()  # the other is seeded anew for every test: all would try the same ports


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    """A running server with the bucket `BUCKET`; `environment` is what a client needs to reach it."""

    endpoint: str
    access_key: str
    secret_key: str
    pid: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1,localhost",
        }

    def client(self):
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
            config=Config(connect_timeout=60, read_timeout=120, retries={"total_max_attempts": 1}, proxies={}),
        )


@contextlib.contextmanager
def moto_s3() -> Iterator[S3Server]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        s3 = S3Server(endpoint=f"http://127.0.0.1:{port}", access_key="testing", secret_key="testing")
        s3.client().create_bucket(Bucket=BUCKET)
        yield s3
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            server.stop()


@contextlib.contextmanager
def seaweedfs() -> Iterator[S3Server]:
    """One `weed server` with an own folder and free ports; ready means that a put worked; killed by its pid."""
    binary = Path(sys.executable).with_name("weed")
    master, volume, filer, port = _free_ports(4)
    with tempfile.TemporaryDirectory(prefix="weed-", ignore_cleanup_errors=True) as folder:
        actions = ["Admin", "Read", "List", "Tagging", "Write"]
        identity = {"name": "admin", "credentials": [{"accessKey": "test", "secretKey": "testtest12"}]}
        config = Path(folder, "s3.json")
        config.write_text(json.dumps({"identities": [{**identity, "actions": actions}]}))
        command = [str(binary), "-logtostderr=true", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        command += ["-s3", f"-s3.port={port}", f"-s3.config={config}", "-volume.max=50"]
        # Two more ports are fixed: a second server on this machine would find them taken.
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += [f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"]
        command += ["-master.volumeSizeLimitMB=64", "-master.telemetry=false"]
        with (
            Path(folder, "log").open("wb") as log,
            subprocess.Popen(command, stdout=log, stderr=log, cwd=folder) as process,
        ):
            try:
                s3 = S3Server(
                    endpoint=f"http://127.0.0.1:{port}", access_key="test", secret_key="testtest12", pid=process.pid
                )
                _wait_for_a_put(s3, process, Path(folder, "log"))
                yield s3
            finally:
                process.kill()


def _wait_for_a_put(s3: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    client = s3.client()
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"1")
        except (BotoCoreError, ClientError) as error:
            if process.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"SeaweedFS did not start: {error}\n{tail}") from error
            time.sleep(0.3)
        else:
            return


def _free_ports(count: int) -> list[int]:
    """Ports of which also the one 10,000 above is free: SeaweedFS takes that for gRPC."""
    ports: list[int] = []
    while len(ports) < count:
        port = _RANDOM.randrange(20_000, 32_000)
        if port not in ports and _is_free(port) and _is_free(port + 10_000):
            ports.append(port)
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True

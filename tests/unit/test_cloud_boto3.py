"""boto3 itself: one call is one request, and every failure has a code."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from coral_core.cloud.aws import Boto3Api
from coral_core.cloud.aws_codes import REFUSALS, AwsError
from coral_core.cloud.provisioner import Refusal


@contextmanager
def server(status: int, body: str) -> Iterator[tuple[str, list[str]]]:
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append(self.path)
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}", seen
        finally:
            http.shutdown()
            thread.join()


def code_of(api: Boto3Api, region: str = "us-east-1") -> str:
    with pytest.raises(AwsError) as caught:
        api.call("ec2", region, "describe_regions")
    return caught.value.code


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (500, "<Response><Errors><Error><Code>InsufficientInstanceCapacity</Code></Error></Errors></Response>", "InsufficientInstanceCapacity"),
        (503, "<Response><Errors><Error><Code>RequestLimitExceeded</Code></Error></Errors></Response>", "RequestLimitExceeded"),
        (200, "<html>not the API", "NoAnswer"),
    ],
)  # fmt: skip
def test_one_call_is_one_request_whatever_comes_back(monkeypatch, status, body, code):
    with server(status, body) as (url, seen):
        monkeypatch.setenv("AWS_ENDPOINT_URL_EC2", url)
        assert code_of(Boto3Api()) == code
        assert len(seen) == 1


@pytest.mark.parametrize(
    "answer",
    [
        *((status, body) for status in (500, 502, 503, 504) for body in ("<html><body>a proxy's page", "")),
        (500, "<Response><Errors><Error><Code>ServerInternal</Code></Error></Errors></Response>"),
        (503, "<Response><Errors><Error><Code>EC2ThrottledException</Code></Error></Errors></Response>"),
    ],
)
def test_passing_trouble_of_the_service_or_on_the_way_is_tried_again(monkeypatch, answer):
    with server(*answer) as (url, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL_EC2", url)
        assert REFUSALS[code_of(Boto3Api())].passing


def test_no_credentials_no_connection_no_answer_and_no_such_region(monkeypatch):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL_EC2", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert code_of(Boto3Api(connect_timeout_s=1.0, read_timeout_s=1.0)) == "NoConnection"
        silent.listen()
        assert code_of(Boto3Api(connect_timeout_s=1.0, read_timeout_s=0.3)) == "NoAnswer"
    assert code_of(Boto3Api(), "not a region!") == "InvalidRegion"
    assert code_of(Boto3Api(profile="absent")) == "NoCredentials"
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert code_of(Boto3Api()) == "NoCredentials"


def test_a_call_that_boto3_itself_refuses_keeps_its_name():
    with pytest.raises(AwsError) as caught:
        Boto3Api().call("ec2", "us-east-1", "run_instances", Nonsense=1)
    assert caught.value.code == "ParamValidationError"
    assert REFUSALS.get(caught.value.code) is not Refusal.UNKNOWN

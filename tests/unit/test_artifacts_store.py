"""How stores are opened and how what goes wrong is told; what they do is in tests/contract."""

from __future__ import annotations

import os

import pytest
from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

from artifacts.store import Store, open_store
from artifacts.store_errors import explained
from coral_core.errors import InputError, StoreError

CLOSED = "http://127.0.0.1:9"  # the discard port: nothing listens


def test_a_plain_path_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = open_store("some/store")
    store.put("a", b"1")
    assert (tmp_path / "some/store/a").read_bytes() == b"1"
    assert store.url == (tmp_path / "some/store").as_uri()
    assert open_store(store.url).get("a") == b"1"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "is empty"),
        ("ftp://x/y", "unknown kind of store 'ftp'"),
        ("file://folder/below", "needs an absolute path"),
        ("file:", "needs an absolute path"),
        ("s3:///prefix", "names no bucket"),
        ("s3://bucket/prefix?region=x", "no query"),
        ("s3://bucket/a/../b", "not a plain relative key"),
    ],
)
def test_urls_that_are_no_stores(url, message):
    with pytest.raises(InputError, match=message):
        open_store(url)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be opened"):
        open_store(str(tmp_path / "file" / "below"))


def test_memory_is_shared_by_name():
    open_store("memory://one").put("a", b"1")
    assert open_store("memory://one/").get("a") == b"1"
    assert not open_store("memory://two").exists("a")


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"])
def test_an_unreachable_endpoint_is_told_within_seconds(variable, monkeypatch):
    monkeypatch.setenv(variable, CLOSED)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    store = open_store("s3://bucket/prefix")
    with pytest.raises(
        StoreError, match=r"^s3://bucket/prefix/a: the store cannot be reached while reading: .*AWS_ENDPOINT_URL_S3"
    ):
        store.get("a")


def test_the_endpoint_of_s3_goes_before_the_general_one(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:8")
    monkeypatch.setenv("AWS_ENDPOINT_URL", CLOSED)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:8/"):
        open_store("s3://bucket").get("a")


def test_missing_credentials_are_told(monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", CLOSED)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", CLOSED)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(StoreError, match=r"no credentials were found: .*set AWS_ACCESS_KEY_ID"):
        open_store("s3://bucket").get("a")


def test_endpoints_that_are_refused(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "storage.example:9000")
    with pytest.raises(InputError, match="is not an http"):
        open_store("s3://bucket")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://storage.example:9000")
    with pytest.raises(InputError, match=r"in the clear \(use https"):
        open_store("s3://bucket")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert open_store("s3://bucket/a/").url == "s3://bucket/a"


def test_settings_that_the_library_refuses(monkeypatch):
    assert open_store("s3://bucket").url == "s3://bucket"
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "perhaps")
    with pytest.raises(InputError, match=r"settings are not usable: .*perhaps.* \(check the AWS_\* variables\)$"):
        open_store("s3://bucket")


def test_a_store_that_ignores_preconditions_is_unfit(monkeypatch):
    store = open_store("memory://careless")
    monkeypatch.setattr(Store, "put_if_absent", Store.put)
    with pytest.raises(StoreError, match="ignores If-None-Match"):
        store.check()
    assert store.list_keys("") == []


def test_a_store_that_cannot_be_written_is_unfit(tmp_path):
    (tmp_path / "probes").write_text("a file where the probe wants a folder")  # stops root too, unlike rights
    store = open_store(str(tmp_path))
    with pytest.raises(StoreError, match=rf"^{store.url}: the store cannot be written: "):
        store.check()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_only_be_read_is_unfit(tmp_path):
    store = open_store(str(tmp_path))
    tmp_path.chmod(0o500)
    with pytest.raises(
        StoreError, match=r"cannot be written: permission denied while writing .*right to read and write the folder"
    ):
        store.check()


def test_a_store_that_changes_bytes_is_unfit(monkeypatch):
    store = open_store("memory://mangling")
    monkeypatch.setattr(Store, "get", lambda self, key: b"5;chunk-signature")
    with pytest.raises(StoreError, match="other bytes than were written"):
        store.check()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_rights(tmp_path):
    store = open_store(str(tmp_path))
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="permission denied"):
        store.put("a", b"1")


@pytest.mark.parametrize(
    ("error", "url", "what", "fix"),
    [
        (PermissionDeniedError("no"), "s3://b", "permission denied while writing", "s3:PutObject"),
        (PermissionError("no"), "file:///b", "permission denied while writing", "right to read and write"),
        (UnauthenticatedError("no"), "s3://b", "the credentials are wrong", "AWS_ACCESS_KEY_ID"),
        (
            OSError(28, "No space left on device"),
            "file:///b",
            "failed while writing: [Errno 28] No space left on device",
            "",
        ),
        (OSError(), "file:///b", "failed while writing: OSError", ""),
    ],
)
def test_what_went_wrong_and_what_to_do(error, url, what, fix):
    told = explained(error, action="writing", where=f"{url}/a", store_url=url)
    assert (type(told), told.what, told.where) == (StoreError, what, f"{url}/a")
    assert fix in told.fix


def test_errors_of_the_library_name_the_object(tmp_path):
    store = open_store(str(tmp_path))
    (tmp_path / "a").write_text("a file where a group is wanted")
    with pytest.raises(StoreError, match=rf"^{store.url}/a/b: "):
        store.put("a/b", b"1")
    assert isinstance(store, Store)

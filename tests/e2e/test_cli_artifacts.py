"""`coral artifacts`: what lies in a store, listed, shown and fetched through the real command, on a folder and on S3."""

from __future__ import annotations

import io
import json
import uuid
import webbrowser

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from artifacts.browse import fetch, link_of
from artifacts.group_pages import group_page, index_group, size_text
from artifacts.index import index_libraries
from artifacts.library import commit
from artifacts.shards import failed_shard
from artifacts.store import Store, open_store
from coral_core.cli.entry import run
from coral_core.errors import InputError, StoreError
from tests.fakes.artifact_cases import capacity_table, draft_of, shard_key_of, shards_of
from tests.fakes.s3_servers import BUCKET, moto_s3

MANIFEST = "libraries/lib/manifests/00000000000000000001.json"
RUN = "evaluations/tiny/20300102T030405.000000Z"


@pytest.fixture(scope="module")
def moto():
    with moto_s3() as server:
        yield server


@pytest.fixture(params=["file", "s3"])
def store(request, tmp_path, monkeypatch) -> Store:
    url = (tmp_path / "store").as_uri()
    if request.param == "s3":
        for name, value in request.getfixturevalue("moto").environment.items():
            monkeypatch.setenv(name, value)
        url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    monkeypatch.setenv("CORAL_STORE", url)
    return filled(open_store(url))


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Store:
    monkeypatch.setenv("CORAL_STORE", str(tmp_path / "store"))
    return filled(open_store(str(tmp_path / "store")))


def filled(store: Store) -> Store:
    shards = shards_of(store, models=["m1"])
    lost = failed_shard(shard_key_of(capacity_table(model="m9")), error="worker died", attempts=3)
    commit(store, draft_of([*shards, lost], allow_partial=True))
    index_libraries(store, "lib")
    sink = io.BytesIO()
    pq.write_table(pa.table({"seed": [1, 2, 3], "goodput_frac": [0.5, float("nan"), None]}), sink)
    store.put(f"{RUN}/runs.parquet", sink.getvalue())
    store.put(f"{RUN}/report.md", b"# Report\n\nAll figures are simulated.\n")
    store.put(f"{RUN}/report.html", b"<html></html>")
    store.put(f"{RUN}/summary.json", b'{"b": [1, 2], "a": "[x]"}')
    store.put("evaluations/tiny/list.json", b"[1, 2]")
    store.put("evaluations/tiny/log.txt", b"line 1\nline 2\n")
    store.put("evaluations/tiny/blob", b"\x00\x01")
    return store


@pytest.fixture
def coral(capsys):
    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(["artifacts", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def document(coral, *arguments):
    code, out, err = coral(*arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_groups_and_objects_are_listed(store, coral):
    top = document(coral, "ls")
    assert top["groups"] == ["evaluations", "libraries"]
    assert [item["key"] for item in top["objects"]] == ["index.md"]
    inner = document(coral, "ls", f"{RUN}/")
    assert inner["groups"] == []
    sizes = {item["key"].rpartition("/")[2]: item["size_bytes"] for item in inner["objects"]}
    assert sizes["report.html"] == 13
    assert set(sizes) == {"report.html", "report.md", "runs.parquet", "summary.json"}
    everything = document(coral, "ls", "--recursive")
    assert [item["key"] for item in everything["objects"]] == store.list_keys("")
    one = document(coral, "ls", f"{RUN}/report.md")
    assert [item["key"] for item in one["objects"]] == [f"{RUN}/report.md"]
    code, out, _ = coral("ls", "evaluations/tiny")
    assert code == 0
    assert "1 groups, 3 objects" in out
    assert f"{RUN}/" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "evaluation"], "did you mean evaluations?"),
        (["ls", "evaluations/tinny/x"], "did you mean evaluations/tiny?"),
        (["show", "libraries/lib/manifests/00000000000000000002.json"], f"did you mean {MANIFEST}"),
        (["get", f"{RUN}/reprt.md"], f"did you mean {RUN}/report.md"),
        (["show", f"{RUN}/zzzzzz"], f"see `coral artifacts ls {RUN}`"),
        (["show", "zzzzzz"], "no such object or group (see `coral artifacts ls`)"),
        (["get", "evaluations/tiny"], "a group, not an object (list it with `coral artifacts ls evaluations/tiny`)"),
        (["show", RUN], "a group, not an object"),
        (["ls", "../up"], "not a plain relative key"),
    ],
)
def test_what_is_not_there_is_told_with_what_is_near(folder, coral, arguments, message):
    code, out, err = coral(*arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_an_empty_store_says_so(tmp_path, monkeypatch, coral):
    monkeypatch.setenv("CORAL_STORE", str(tmp_path))
    assert document(coral, "ls")["objects"] == []
    code, _, err = coral("show", "plans")
    assert code == 2
    assert "the store is empty (check --store" in err
    assert "the store is empty" in coral("show")[2]


def test_each_kind_of_object_is_shown(store, coral):
    shown = {
        name: document(coral, "show", key)
        for name, key in {
            "json": f"{RUN}/summary.json",
            "list": "evaluations/tiny/list.json",
            "table": f"{RUN}/runs.parquet",
            "markdown": f"{RUN}/report.md",
            "page": f"{RUN}/report.html",
            "log": "evaluations/tiny/log.txt",
            "blob": "evaluations/tiny/blob",
            "group": "libraries/lib",
        }.items()
    }
    kinds = ("json", "json", "parquet", "markdown", "html", "text", "binary", "markdown")
    assert tuple(item["kind"] for item in shown.values()) == kinds
    assert shown["json"]["content"] == {"a": "[x]", "b": [1, 2]}
    assert shown["list"]["content"] == [1, 2]
    table = shown["table"]["content"]
    assert table["rows"] == 3
    assert table["head"] == [
        {"seed": 1, "goodput_frac": 0.5},
        {"seed": 2, "goodput_frac": None},
        {"seed": 3, "goodput_frac": None},
    ]
    assert [column["type"] for column in table["columns"]] == ["int64", "double"]
    assert document(coral, "show", f"{RUN}/runs.parquet", "--rows", "0")["content"]["head"] == []
    assert "simulated" in shown["markdown"]["content"]
    assert shown["group"]["key"] == "libraries/lib/index.md"
    assert shown["page"]["url"] == store.url_of(f"{RUN}/report.html")


def test_each_kind_of_object_is_shown_to_people(folder, coral):
    for key, expected in {
        f"{RUN}/summary.json": '"a": "[x]"',
        f"{RUN}/runs.parquet": "3 rows",
        f"{RUN}/report.md": "# Report",
        f"{RUN}/report.html": f"open {folder.url}/{RUN}/report.html in a browser",
        "evaluations/tiny/log.txt": "line 2",
        "evaluations/tiny/blob": "2 bytes of no kind",
        "": "# Coral's store",
    }.items():
        code, out, err = coral("show", key)
        assert code == 0, err
        assert expected in out


def test_a_manifest_is_summed_up(store, coral):
    found = document(coral, "show", MANIFEST)
    assert found["kind"] == "manifest"
    content = found["content"]
    assert (content["shards_present"], content["shards_failed"], content["rows"]) == (4, 1, 40)
    by_group = {(g["model"], g["phase"]): (g["shards"], g["failed"], g["templates"]) for g in content["groups"]}
    assert by_group == {("m1", "decode"): (2, 0, 20), ("m1", "prefill"): (2, 0, 20), ("m9", "decode"): (1, 1, 0)}
    data = [e for e in store.list_entries("libraries/lib/data") if e.key.endswith(".parquet")]
    assert content["size_bytes"] == sum(entry.size_bytes for entry in data)
    code, out, _ = coral("show", MANIFEST)
    assert code == 0
    assert "m9" in out
    shard = data[0].key
    assert document(coral, "show", shard, "--rows", "2")["content"]["rows"] == 10


def test_damaged_objects_are_errors(folder, coral):
    folder.put("x/a.json", b"{")
    folder.put("x/b.json", b"[")
    folder.put("x/c.parquet", b"PAR1")
    folder.put("x/d.md", b"\xff\xfe")
    folder.put(MANIFEST.replace("1.json", "2.json"), b"{}")
    for key, message in {
        "x/a.json": "not valid JSON",
        "x/b.json": "not valid JSON",
        "x/c.parquet": "not a whole Parquet file",
        "x/d.md": "not UTF-8 text",
        MANIFEST.replace("1.json", "2.json"): "damaged or foreign",
    }.items():
        code, out, err = coral("show", key)
        assert (code, out) == (6, "")
        assert message in err
        assert key in err


def test_an_object_is_fetched_whole_or_not_at_all(store, coral, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    key = f"{RUN}/report.md"
    found = document(coral, "get", key)
    assert (tmp_path / "report.md").read_bytes() == store.get(key)
    assert found == {"key": key, "path": str(tmp_path / "report.md"), "size_bytes": len(store.get(key))}
    (tmp_path / "report.md").write_text("mine")
    code, _, err = coral("get", key)
    assert code == 2
    assert "a file of this name exists (choose another --to, or give --force)" in err
    assert (tmp_path / "report.md").read_text() == "mine"
    assert coral("get", key, "--force")[0] == 0
    assert (tmp_path / "report.md").read_bytes() == store.get(key)
    (tmp_path / "folder").mkdir()
    assert coral("get", key, "--to", "folder")[0] == 0
    assert coral("get", key, "--to", "folder/other.md")[0] == 0
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["other.md", "report.md"]
    code, _, err = coral("get", key, "--to", "absent/other.md")
    assert code == 2
    assert "no such folder" in err
    code, _, err = coral("get", f"{RUN}/none.md", "--to", "none.md")
    assert code == 2
    assert not (tmp_path / "none.md").exists()


def test_an_object_goes_to_standard_output(folder, capfdbinary):
    assert run(["artifacts", "get", "evaluations/tiny/blob", "--to", "-"]) == 0
    assert capfdbinary.readouterr().out == b"\x00\x01"
    assert run(["artifacts", "get", "evaluations/tiny/blob", "--to", "-", "--json"]) == 2


def test_a_file_that_comes_meanwhile_stays(folder, tmp_path, monkeypatch):
    target = tmp_path / "blob"
    find = Store.find

    def slow(self, key):
        target.write_text("of another")
        return find(self, key)

    monkeypatch.setattr(Store, "find", slow)
    with pytest.raises(InputError, match="a file of this name exists"):
        fetch(folder, "evaluations/tiny/blob", target)
    assert target.read_text() == "of another"
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


def test_a_target_that_cannot_be_written_is_named(folder, tmp_path):
    with pytest.raises(StoreError, match="cannot be written"):
        fetch(folder, "evaluations/tiny/blob", tmp_path / ("n" * 300))


def test_a_page_is_opened_in_the_browser(folder, coral, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda link: opened.append(link) or len(opened) == 1)
    assert coral("show", f"{RUN}/report.html", "--open")[0] == 0
    assert opened == [f"{folder.url}/{RUN}/report.html"]
    assert "no browser could be started" in coral("show", f"{RUN}/report.html", "--open")[2]


def test_links_lead_to_where_a_person_can_look(tmp_path, monkeypatch):
    folder = open_store(str(tmp_path / "a b"))
    assert link_of(folder, "plans/x/report.md") == f"{tmp_path.as_uri()}/a%20b/plans/x/report.md"
    assert link_of(open_store("memory://n"), "a/b") == "memory://n/a/b"
    bucket = open_store("s3://bucket/some/prefix")
    on_aws = {"AWS_REGION": "eu-west-1"}
    assert link_of(bucket, "libraries/lib/data/model=m/part.parquet", environment=on_aws) == (
        "https://eu-west-1.console.aws.amazon.com/s3/object/bucket?region=eu-west-1"
        "&prefix=some/prefix/libraries/lib/data/model%3Dm/part.parquet"
    )
    assert link_of(bucket, "libraries/lib", environment={}) == (
        "https://us-east-1.console.aws.amazon.com/s3/buckets/bucket?region=us-east-1&prefix=some/prefix/libraries/lib/"
    )
    elsewhere = {"AWS_ENDPOINT_URL": "http://127.0.0.1:8333/"}
    assert link_of(bucket, "a/b=c.md", environment=elsewhere) == "http://127.0.0.1:8333/bucket/some/prefix/a/b=c.md"


def test_every_link_of_a_page_leads_somewhere(store):
    assert index_group(store, "evaluations/tiny")
    keys = set(store.list_keys(""))
    for page in ("evaluations/index.md", "evaluations/tiny/index.md"):
        text = store.get(page).decode()
        base = page.rpartition("/")[0]
        links = [part.partition(")")[0] for part in text.split("](")[1:]]
        assert links
        assert {f"{base}/{link}" for link in links} <= keys
    assert "tiny/index.md" in store.get("evaluations/index.md").decode()
    inner = store.get("evaluations/tiny/index.md").decode()
    assert f"[report.md]({RUN.rpartition('/')[2]}/report.md)" in inner
    assert "[log.txt](log.txt) | 14 B |" in inner


def test_the_first_page_leads_to_every_group_that_is_there(store):
    store.put("leases/blue/00000000000000000001.json", b"{}")
    store.put("fleets/blue/identity.json", b"{}")
    index_group(store, "evaluations/tiny")
    assert index_libraries(store, "lib")
    root = store.get("index.md").decode()
    links = [part.partition(")")[0] for part in root.split("](")[1:]]
    assert links == [f"{group}/index.md" for group in ("libraries", "evaluations", "fleets", "leases")]
    assert set(links) <= set(store.list_keys(""))
    assert "| blue/ | one object for each epoch" in store.get("leases/index.md").decode()
    assert "[identity.json](blue/identity.json)" in store.get("fleets/index.md").decode()


def test_a_page_is_bounded_and_an_empty_group_has_one(folder):
    for epoch in range(30):
        folder.put(f"leases/blue/{epoch:020d}.json", b"{}")
    page = group_page(folder, "leases/blue")
    assert page.count("\n| [") == 20
    assert "The newest 20 of 0 groups and 30 objects." in page
    assert page.index(f"{29:020d}") < page.index(f"{28:020d}")
    assert group_page(folder, "profiles") == (
        "# Profiles: measured layer times, by model, node configuration and engine\n\nEmpty.\n"
    )


def test_pages_that_cannot_be_written_cost_nothing_but_a_warning(folder, monkeypatch, caplog):
    monkeypatch.setattr(Store, "put", lambda self, key, data: (_ for _ in ()).throw(StoreError("full", where=key)))
    assert not index_group(folder, "leases/blue")
    assert "index pages were not written: leases/blue/index.md: full" in caplog.text


def test_sizes_are_short():
    assert [size_text(n) for n in (0, 1023, 1024, 1536, 5 * 1024**2, 3 * 1024**4)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "5.0 MiB",
        "3,072.0 GiB",
    ]

"""What the KV transfer takes from people and peers: its terms, its key file, offers; and how it says what is wrong with them."""

from __future__ import annotations

import msgspec
import pytest
from zmq.utils import z85

from coral_core.engine.plugin.kv_keys import KEY_VARIABLE, KeyFileError, fleet_keys
from coral_core.engine.plugin.kv_plan import (
    VERSION,
    Chunk,
    Offer,
    Place,
    PlanError,
    Shape,
    Terms,
    check_held,
    offered,
    prompt_digest,
    terms,
)

SHAPE = Shape(layers=8, heads=2, content=64, dtype="torch.float32", element_bytes=4)
PLACE = Place(address="tcp://127.0.0.1:1", layers=(2, 6), heads=(0, 2))
OFFER = Offer(version=VERSION, lease="e/1", lease_s=30.0, tokens=300, prompt="ab", shape=SHAPE, places=(PLACE,))


def test_the_defaults_are_terms():
    assert terms({}) == Terms()


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"lease": 3.0}, "unknown field `lease`"),
        ({"lease_s": "soon"}, "lease_s"),
        ({"lease_s": 0.0}, "lease_s 0.0"),
        ({"stall_s": float("inf")}, "stall_s inf"),
        ({"lease_s": float("nan")}, "lease_s nan"),
        ({"chunk_bytes": 10}, "chunk_bytes 10"),
        ({"chunk_bytes": 1 << 30, "window_bytes": 1 << 40}, "chunk_bytes 1073741824"),
        ({"window_bytes": 1024}, "window_bytes 1024"),
        ({"first_port": 70000}, "first_port 70000"),
    ],
)
def test_terms_that_make_no_sense_are_refused_by_name(config, complaint):
    with pytest.raises(PlanError, match=complaint):
        terms(config)


def test_an_offer_comes_back_from_the_json_that_a_gateway_passes_on():
    params = msgspec.json.decode(msgspec.json.encode({"do_remote_prefill": True, "coral": OFFER, "more": 1}))
    assert offered(params) == OFFER


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        (None, "another KV connector"),
        ({}, "another KV connector"),
        ({"remote_block_ids": [[1]]}, "another KV connector"),
        ({"coral": 3}, "kv_transfer_params.coral"),
        ({"coral": {**msgspec.to_builtins(OFFER), "tokens": "many"}}, r"\$\.tokens"),
        ({"coral": {**msgspec.to_builtins(OFFER), "places": [{"address": 1}]}}, r"\$\.places"),
        ({"coral": {**msgspec.to_builtins(OFFER), "version": VERSION + 1}}, f"version {VERSION + 1}"),
        ({"coral": {**msgspec.to_builtins(OFFER), "lease_s": 0.0}}, "a lease of 0.0 s"),
        ({"coral": {**msgspec.to_builtins(OFFER), "lease_s": -1e300}}, "a lease of"),
        *(
            ({"coral": msgspec.to_builtins(msgspec.structs.replace(OFFER, places=(elsewhere,)))}, "is no address")
            for elsewhere in (
                msgspec.structs.replace(PLACE, address=address)
                for address in ("", "ipc:///run/x", "tcp://host:0", "tcp://host:70000", "tcp://host", "tcp://a b:1")
            )
        ),
    ],
)
def test_what_is_no_offer_is_refused(params, complaint):
    with pytest.raises(PlanError, match=complaint):
        offered(params)


def test_prompts_differ_in_tokens_adapters_and_images():
    digests = [
        prompt_digest([1, 2, 3]),
        prompt_digest([1, 2]),
        prompt_digest([1, 2, 4]),
        prompt_digest([1, 2, 3], "adapter"),
        prompt_digest([1, 2, 3], "adapter", "image"),
        prompt_digest([1, 2, 3], "adapterimage"),
        prompt_digest([], ""),
    ]
    assert len(set(digests)) == len(digests)
    assert prompt_digest([1, 2, 3], "adapter") == digests[3]


@pytest.mark.parametrize(
    "change",
    [
        {"layer": 1},
        {"layer": 6},
        {"heads": (0, 3)},
        {"heads": (1, 1)},
        {"heads": (-1, 1)},
        {"first": -1},
        {"last": 301},
    ],
)
def test_only_what_a_worker_holds_is_given(change):
    chunk = Chunk(layer=2, heads=(0, 2), first=0, last=300)
    check_held(chunk, PLACE, SHAPE, 300)
    with pytest.raises(PlanError, match="not within 300 tokens"):
        check_held(msgspec.structs.replace(chunk, **change), PLACE, SHAPE, 300)


def test_no_message_is_larger_than_the_limit():
    with pytest.raises(PlanError, match="at once"):
        check_held(Chunk(layer=2, heads=(0, 2), first=0, last=40_000), PLACE, SHAPE, 50_000)


def test_the_key_file_is_named_by_configuration_or_environment(tmp_path, monkeypatch):
    path = tmp_path / "kv.key"
    path.write_text("0123456789abcdef" * 4 + "\n")
    keys = fleet_keys(str(path))
    monkeypatch.setenv(KEY_VARIABLE, str(path))
    assert fleet_keys(None) == keys
    assert len({keys.server_public, keys.server_secret, keys.client_public, keys.client_secret}) == 4
    path.write_text("1123456789abcdef" * 4)
    assert fleet_keys(None) != keys


def test_a_key_file_that_cannot_be_used_is_named_but_never_quoted(tmp_path, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(KeyFileError, match=KEY_VARIABLE):
        fleet_keys(None)
    with pytest.raises(KeyFileError, match=r"nowhere\.key: No such file"):
        fleet_keys(str(tmp_path / "nowhere.key"))
    short = tmp_path / "short.key"
    short.write_text("swordfish")
    with pytest.raises(KeyFileError, match="holds 9 bytes") as caught:
        fleet_keys(str(short))
    assert "swordfish" not in str(caught.value)


def test_only_the_fleets_own_consumers_are_admitted(tmp_path):
    path = tmp_path / "kv.key"
    path.write_text("0123456789abcdef" * 4)
    keys = fleet_keys(str(path))
    client = z85.decode(keys.client_public)
    good = [b"1.0", b"7", b"coral-kv", b"127.0.0.1", b"", b"CURVE", client]
    assert keys.admitted(good)[:3] == [b"1.0", b"7", b"200"]
    for place, value in ((2, b"another"), (5, b"PLAIN"), (5, b"NULL"), (6, bytes(32)), (6, b"short")):
        asked = [*good[:place], value, *good[place + 1 :]]
        assert keys.admitted(asked)[2] == b"400", asked
    assert keys.admitted(good[:6])[2] == b"400"
    assert keys.admitted([])[2] == b"400"

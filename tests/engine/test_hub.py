"""engine/sources/hub.py against a fake hub on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import Cancelled, FetchError, UnsupportedModel
from engine.progress import Progress
from engine.sources import hub
from engine.sources.catalog import HubSource
from tests.fake_hub import COMMIT, FakeHub

REPO = "someone/Some-Model"
WEIGHTS = random.Random(0).randbytes(5 << 20)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A hub with one model, and huggingface_hub pointed at it (it reads its environment only once, at import)."""
    from huggingface_hub import constants

    server = FakeHub(
        {
            REPO: {
                "config.json": b'{"model_type": "llama"}',
                "tokenizer.json": b'{"model": {}}',
                "model.safetensors": WEIGHTS,
                "README.md": b"not needed",
                "pytorch_model.bin": b"a pickle: never downloaded",
            }
        }
    )
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_pause", lambda seconds, cancel: None)
    yield server
    server.close()


def fetch(**keywords: object) -> Path:
    return hub.download(hub.list_files(HubSource(REPO)), **keywords)  # type: ignore[arg-type]


def part_files(tmp_path: Path) -> list[Path]:
    return list(tmp_path.rglob("*.flint-part"))


def test_only_the_needed_files_come_and_their_sizes_are_known_before(fake: FakeHub) -> None:
    listing = hub.list_files(HubSource(REPO))
    assert [file.name for file in listing.files] == ["config.json", "tokenizer.json", "model.safetensors"]
    assert listing.size == hub.missing_bytes(listing) == len(WEIGHTS) + 23 + 13
    assert (listing.commit, listing.licence) == (COMMIT, "apache-2.0")
    assert not [request for request in fake.requests if "resolve" in request.path]

    snapshot = hub.download(listing)

    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS
    assert sorted(path.name for path in snapshot.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert hub.missing_bytes(listing) == 0


def test_a_second_download_transfers_nothing_and_other_tools_find_the_files(fake: FakeHub) -> None:
    from huggingface_hub import try_to_load_from_cache

    first = fetch()
    fake.requests.clear()
    assert fetch() == first
    assert not fake.downloads("model.safetensors")
    assert try_to_load_from_cache(REPO, "model.safetensors", revision=COMMIT) == str(first / "model.safetensors")


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_cut_connection_is_resumed_where_it_broke(fake: FakeHub, reset: bool) -> None:
    fake.cut_after, fake.reset = [len(b'{"model": {}}'), 3 << 20, 1 << 20], reset
    assert (fetch() / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [request.range for request in fake.downloads("model.safetensors")]
    assert ranges[0] is None
    assert len(ranges) == 3
    starts = [int(r.removeprefix("bytes=").removesuffix("-")) for r in ranges[1:] if r]
    assert 0 < starts[0] <= 3 << 20
    assert starts[0] < starts[1] < len(WEIGHTS)


def test_a_server_without_ranges_sends_the_whole_file_again(fake: FakeHub) -> None:
    fake.cut_after, fake.ranges = [13, 3 << 20], False
    assert (fetch() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_download_given_up_is_resumed_by_the_next_process(fake: FakeHub, tmp_path: Path) -> None:
    fake.cut_after = [13, 3 << 20, 0, 0, 0, 0, 0]
    with pytest.raises(FetchError, match="No connection") as failure:
        fetch()
    assert "kept" in failure.value.hint
    (part,) = part_files(tmp_path)
    kept = part.stat().st_size
    assert 2 << 20 <= kept <= 3 << 20
    assert hub.missing_bytes(hub.list_files(HubSource(REPO))) == len(WEIGHTS) - kept

    fake.requests.clear()
    assert (fetch() / "model.safetensors").read_bytes() == WEIGHTS
    assert [request.range for request in fake.downloads("model.safetensors")] == [f"bytes={kept}-"]
    assert not part_files(tmp_path)


def test_a_wrong_digest_is_refused_and_deleted(fake: FakeHub, tmp_path: Path) -> None:
    fake.served["model.safetensors"] = WEIGHTS[:-1] + bytes([WEIGHTS[-1] ^ 1])
    with pytest.raises(FetchError, match=r"model\.safetensors arrived with another digest"):
        fetch()
    assert not part_files(tmp_path)
    assert not list(tmp_path.rglob(hashlib.sha256(WEIGHTS).hexdigest()))
    del fake.served["model.safetensors"]
    assert (fetch() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_small_file_is_checked_too(fake: FakeHub) -> None:
    fake.served["config.json"] = b'{"model_type": "l1ama"}'
    with pytest.raises(FetchError, match=r"config\.json arrived with another digest"):
        fetch()


def test_more_bytes_than_announced_are_refused(fake: FakeHub) -> None:
    fake.served["model.safetensors"] = WEIGHTS + b"more"
    with pytest.raises(FetchError, match=rf"model\.safetensors is longer than the {len(WEIGHTS)} bytes"):
        fetch()


def test_a_corrupt_part_does_not_survive(fake: FakeHub) -> None:
    blobs = hub.hub_folder() / "models--someone--Some-Model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(WEIGHTS).hexdigest()}.flint-part").write_bytes(b"x" * 1000)
    with pytest.raises(FetchError, match="another digest"):
        fetch()
    assert (fetch() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_corrupt_file_in_the_cache_is_fetched_again(fake: FakeHub) -> None:
    weights = fetch() / "model.safetensors"
    weights.resolve().write_bytes(b"\0" * len(WEIGHTS))
    assert (fetch() / "model.safetensors").read_bytes() == WEIGHTS


def test_the_token_goes_to_the_hub_and_not_to_the_content_network(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.token = "hf_secret"
    with pytest.raises(FetchError, match=r"\(401\)") as failure:
        fetch()
    assert "HF_TOKEN" in failure.value.hint
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert (fetch() / "model.safetensors").read_bytes() == WEIGHTS
    seen = {request.authorization for request in fake.requests if request.content_network}
    assert seen == {None}


def test_refusals_are_one_line_and_say_what_to_do(fake: FakeHub) -> None:
    fake.gated = True
    with pytest.raises(FetchError, match="is gated: its licence must be accepted first") as failure:
        fetch()
    assert f"{fake.endpoint}/{REPO}" in failure.value.hint

    fake.gated, fake.status = False, 403
    with pytest.raises(FetchError, match="403"):
        fetch()
    fake.status = 500
    with pytest.raises(FetchError, match="The hub answered 500") as failure:
        fetch()
    assert "\n" not in str(failure.value) + failure.value.hint


def test_an_unknown_repository_offers_near_matches(fake: FakeHub) -> None:
    with pytest.raises(FetchError, match=r"ibm-granite/granite-4\.1-3bb does not exist \(404\)") as failure:
        hub.list_files(HubSource("ibm-granite/granite-4.1-3bb"))
    assert "granite-4.1-3b" in failure.value.hint


def test_an_unknown_revision(fake: FakeHub) -> None:
    with pytest.raises(FetchError, match="404"):
        hub.list_files(HubSource(REPO, "v9"))


def test_a_server_that_is_no_hub(fake: FakeHub) -> None:
    fake.status = 200
    with pytest.raises(FetchError, match="not the hub's") as failure:
        hub.list_files(HubSource(REPO))
    assert failure.value.hint


LYING = {"rfilename": "config.json", "size": 2, "blobId": "../" * 20 + "etc/x"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"5",
        b"<html>",
        b"[" * 100_000,
        json.dumps({"id": REPO, "sha": "../../x", "siblings": []}).encode(),
        json.dumps({"id": REPO, "sha": COMMIT, "siblings": [5]}).encode(),
    ],
)
def test_answers_that_no_hub_gives(fake: FakeHub, body: bytes) -> None:
    fake.status, fake.body = 200, body
    with pytest.raises(FetchError, match="not the hub's") as failure:
        hub.list_files(HubSource(REPO))
    assert failure.value.hint


@pytest.mark.parametrize("wrong", [{}, {"blobId": "0" * 40, "size": -1}, {"blobId": "0" * 40, "size": 1e30}])
def test_a_file_with_an_impossible_digest_or_size_is_none(fake: FakeHub, wrong: dict[str, object]) -> None:
    siblings = [LYING | wrong, {"rfilename": "model.safetensors", "size": 2, "blobId": "0" * 40}]
    fake.status, fake.body = 200, json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode()
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        hub.list_files(HubSource(REPO))


@pytest.mark.parametrize(
    "endpoint", ["", "nonsense", "ftp://x", "http://", "http://x:99999", "http://[::1", "file:///etc", "http://\x1b"]
)
def test_an_endpoint_that_is_no_address(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(FetchError, match=r"^HF_ENDPOINT is ") as failure:
        hub.list_files(HubSource(REPO))
    assert "unset it" in failure.value.hint


def test_no_network_is_one_line(fake: FakeHub) -> None:
    fake.close()
    with pytest.raises(FetchError, match=f"No connection to {fake.endpoint}"):
        hub.list_files(HubSource(REPO))


def test_a_model_already_in_the_cache_needs_no_network(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    snapshot = fetch()
    fake.close()
    assert fetch() == snapshot
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch() == snapshot
    with pytest.raises(FetchError, match="HF_HUB_OFFLINE is set"):
        hub.list_files(HubSource("someone/Other"))


def test_an_incomplete_model_in_the_cache_is_not_used_offline(fake: FakeHub) -> None:
    fake.repos[REPO] = {
        "config.json": b"{}",
        "model.safetensors.index.json": b"{}",
        **{f"model-0000{i}-of-00002.safetensors": b"x" * i for i in (1, 2)},
    }
    snapshot = fetch()
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    fake.close()
    with pytest.raises(FetchError, match="No connection"):
        fetch()


def test_all_shards_of_the_index_are_taken(fake: FakeHub) -> None:
    shards = {f"model-0000{i}-of-00002.safetensors": b"x" * i for i in (1, 2)}
    fake.repos[REPO] = {
        "config.json": b"{}",
        "model.safetensors.index.json": b"{}",
        "consolidated.safetensors": b"the same weights again",
        **shards,
    }
    names = [file.name for file in hub.list_files(HubSource(REPO)).files]
    assert names == ["config.json", "model.safetensors.index.json", *shards]


def test_a_repository_without_safetensors_is_refused(fake: FakeHub) -> None:
    fake.repos[REPO] = {"config.json": b"{}", "pytorch_model.bin": b"x", "model.gguf": b"x"}
    with pytest.raises(UnsupportedModel, match="safetensors") as failure:
        hub.list_files(HubSource(REPO))
    assert "GGUF" in failure.value.hint


def test_progress_adds_up_over_all_files(fake: FakeHub) -> None:
    reports: list[Progress] = []
    fake.cut_after = [13, 2 << 20]
    fetch(report=reports.append)
    done = [report.done for report in reports if report.stage == "download"]
    assert done == sorted(done)
    assert done[-1] == len(WEIGHTS) + 23 + 13 == reports[-1].total


def test_a_cancelled_download_keeps_its_part(fake: FakeHub, tmp_path: Path) -> None:
    cancel = threading.Event()

    def stop_halfway(progress: Progress) -> None:
        if progress.done > 2 << 20:
            cancel.set()

    with pytest.raises(Cancelled):
        fetch(report=stop_halfway, cancel=cancel)
    (part,) = part_files(tmp_path)
    assert WEIGHTS.startswith(part.read_bytes())
    assert part.stat().st_size >= 1 << 20
    assert (fetch() / "model.safetensors").read_bytes() == WEIGHTS


def test_two_downloads_at_once_share_the_work(fake: FakeHub) -> None:
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append((fetch() / "model.safetensors").read_bytes())) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [WEIGHTS] * 3
    assert len(fake.downloads("model.safetensors")) == 1


def test_a_full_disk_is_told_as_such(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hub.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        fetch()


def test_the_environment_is_honoured_by_a_real_process(fake: FakeHub, tmp_path: Path) -> None:
    fake.token = "hf_secret"
    code = (
        "from engine.sources import hub; from engine.sources.catalog import HubSource;"
        f"print(hub.download(hub.list_files(HubSource({REPO!r}))))"
    )
    environment = os.environ | {
        "HF_ENDPOINT": fake.endpoint,
        "HF_TOKEN": "hf_secret",
        "HF_HOME": str(tmp_path / "elsewhere"),
        "HF_HUB_OFFLINE": "0",
    }
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    snapshot = Path(run.stdout.strip())
    assert snapshot.is_relative_to(tmp_path / "elsewhere" / "hub")
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS

"""Archives for strangers: nothing personal gets in, and nothing malformed gets out but as one line."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from engine.bench import archive, privacy
from engine.bench.archive import MAX_ARCHIVE, MAX_BYTES, PARTS, read, write
from engine.bench.privacy import Scrubber
from engine.errors import ArchiveError

USER, PERSON, HOST, DOMAIN = "zebediah", "Zebediah Quartermain", "quagga-07", "quagga-07.lab.example"
HOME, SECRET = "/srv/people/zebediah", "hf_AbCdEfGh123"
PLANTED = {
    "the login name": USER,
    "the login name in capitals": USER.upper(),
    "the person's name": "Quartermain",
    "the host": HOST,
    "its domain": "lab.example",
    "the home folder": HOME,
    "a folder": "secret-project",
    "another person's folder": "mcfly",
    "a Windows folder": "Documents",
    "a token": SECRET,
    "a mail address": "zq@mail.example",
    "an address": "10.20.30.40",
    "an IPv6 address": "fe80::1ff:fe23:4567:890a",
    "a network card": "3c:52:82:aa:bb:cc",
    "a GPU's UUID": "GPU-8d4a1b2c-1111-2222-3333-444455556666",
    "a serial number": "1654922003412",
    "a board's serial number": "PGX-77",
    "a server": "proxy.corp.example",
}
SENTENCES = [
    f"ran as {USER} ({PERSON}) on {HOST}, {DOMAIN}; {USER.upper()}_models were there",
    f"cannot open {HOME}/secret-project/model.gguf: no such file",
    "~/secret-project and '/home/mcfly/secret-project/x.so', file:///home/mcfly/y",
    "C:\\Users\\mcfly\\Documents\\a.gguf",
    f"token {SECRET} refused by https://{USER}:pw@proxy.corp.example:8080/simple",
    "zq@mail.example from 10.20.30.40, fe80::1ff:fe23:4567:890a and 3c:52:82:aa:bb:cc",
    "GPU-8d4a1b2c-1111-2222-3333-444455556666 with 1654922003412 and serial number: PGX-77",
]


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Scrubber:
    """This machine, belonging to somebody."""
    for variable in (*privacy._USER_VARIABLES, *privacy._HOST_VARIABLES):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("USER", USER)
    monkeypatch.setenv("HOME", HOME)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr(privacy.platform, "node", lambda: DOMAIN)
    monkeypatch.setattr(privacy.socket, "gethostname", lambda: HOST)
    monkeypatch.setattr(privacy, "_account_names", lambda: {USER, PERSON, *PERSON.split()})
    return Scrubber.of_this_machine()


def everywhere(value: Any, index: list[int]) -> Any:
    """The document with a sentence in the place of every text and null, and one more in every list and object."""
    index[0] += 1
    sentence = SENTENCES[index[0] % len(SENTENCES)]
    match value:
        case dict():
            return {key: everywhere(item, index) for key, item in value.items()} | {"added": SENTENCES}
        case list():
            return [everywhere(item, index) for item in value] + [" ".join(SENTENCES)]
        case str() | None:
            return sentence
    return value


def documents() -> dict[str, dict[str, Any]]:
    """The shape of a real archive."""
    arm = {"arm": "cpu-single", "state": "measured", "problem": None, "versions": {"numpy": "2"}, "samples_ts": [1.0]}
    return {
        "manifest": {"format_version": 1, "command": "flint bench reproduce", "created": "2026-01-01T00:00:00Z"},
        "environment": {"processor": {"name": "cpu", "features": ["avx2"]}, "gpu": None, "backends": {"cpu": "runs"}},
        "quick": {"model": "m", "peak_source": "measured", "rows": [{"test": "single pass", "samples_ts": [1.5]}]},
        "compare": {"base": "cpu-single", "arms": [arm], "machine": [{"load": [0.5], "gpu": {"throttle": ["idle"]}}]},
    }


def test_planted_details_do_not_survive(planted: Scrubber, tmp_path: Path) -> None:
    parts = {name: everywhere(value, [i]) for i, (name, value) in enumerate(documents().items())}
    before = json.dumps(parts)
    missing = [what for what, text in PLANTED.items() if json.dumps(text)[1:-1] not in before]
    assert not missing, "the test plants every detail that it looks for"
    path = tmp_path / "bench.zip"
    write(path, parts, planted)
    with zipfile.ZipFile(path) as file:
        entries = {info.filename: file.read(info) for info in file.infolist()}
        assert {(info.date_time, info.comment, info.extra) for info in file.infolist()} == {(archive._NEVER, b"", b"")}
        assert file.comment == b""
    everything = path.read_bytes() + b"\n".join(entries.values()) + "".join(entries).encode()
    found = [what for what, text in PLANTED.items() if text.lower().encode() in everything.lower()]
    assert not found
    kept = entries["compare.json"].decode()
    assert "no such file" in kept  # what is no detail stays
    assert json.loads(kept)["arms"][0]["samples_ts"][0] == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "AMD EPYC 7B13 64-Core Processor, avx2, 2 threads",
        "NVIDIA H200, memory clock x bus width from the driver",
        "measured streaming read, 2 threads",
        "smollm2-135m-instruct int4-g32-asym-head8",
        "Linux 6.1.0-13-cloud-amd64 x86_64, driver 580.95.05, torch 2.13.0+cpu",
        "13.3.5.0.6",
        "36 tok/s at 97.6 MB/token; 9 of 24 tokens, then a near tie (0.05 logits)",
        "2026-11-29T19:10:38Z",
        "at 19:10:38 on 2026-11-29",
        "a1b2c3d4e5f6+",
        "llama.cpp, 2 threads: AVX = 1 | AVX2 = 1 | F16C = 1",
    ],
)
def test_figures_and_hardware_stay_as_they_are(planted: Scrubber, text: str) -> None:
    assert planted.text(text) == text


def test_the_account_this_test_runs_under_is_known() -> None:
    import getpass

    assert getpass.getuser() not in Scrubber.of_this_machine().text(f"run by {getpass.getuser()}, twice").split()


def test_only_field_names_can_be_keys(planted: Scrubber) -> None:
    with pytest.raises(ValueError, match="not a field name"):
        planted({"/home/mcfly": 1})
    with pytest.raises(TypeError, match="Path"):
        planted({"path": tmp} if (tmp := Path("x")) else {})


def test_what_was_written_is_read(planted: Scrubber, tmp_path: Path) -> None:
    write(tmp_path / "a.zip", documents(), planted)
    assert read(tmp_path / "a.zip") == documents()
    with pytest.raises(ArchiveError, match="exists already"):
        write(tmp_path / "a.zip", documents(), planted)
    with pytest.raises(ArchiveError, match="cannot be written"):
        write(tmp_path / "no folder" / "a.zip", documents(), planted)
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


def zip_of(entries: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in entries.items():
            file.writestr(name, data)
    return out.getvalue()


GOOD = {f"{name}.json": json.dumps(value).encode() for name, value in documents().items()}
BAD = {
    "nothing": b"",
    "no zip": b"\x7fELF" * 100,
    "an empty zip": zip_of({}),
    "a path out of the folder": zip_of({**GOOD, "../../etc/passwd": b"x"}),
    "an absolute path": zip_of({name if name != "quick.json" else "/quick.json": data for name, data in GOOD.items()}),
    "a part too few": zip_of({name: data for name, data in GOOD.items() if name != "quick.json"}),
    "a bomb": zip_of({**GOOD, "quick.json": b"[" + b" " * (MAX_BYTES + 1)}),
    "deep nesting": zip_of({**GOOD, "quick.json": b'{"a":' * 100_000}),
    "no JSON": zip_of({**GOOD, "quick.json": b"\xff\xfe"}),
    "NaN": zip_of({**GOOD, "quick.json": b'{"a": NaN}'}),
    "a list": zip_of({**GOOD, "quick.json": b"[]"}),
    "another version": zip_of({**GOOD, "manifest.json": b'{"format_version": 2}'}),
    "no version": zip_of({**GOOD, "manifest.json": b"{}"}),
}


@pytest.mark.parametrize("what", BAD)
def test_a_malformed_archive_is_one_line(what: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.zip"
    path.write_bytes(BAD[what])
    with pytest.raises(ArchiveError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert "bad.zip" in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["bad.zip"]  # nothing is unpacked


def test_only_a_file_of_an_archive_s_size_is_read(tmp_path: Path) -> None:
    """A zip's end is looked for from the start of what has no size: a device filled the memory, a pipe never ended."""
    os.mkfifo(tmp_path / "pipe.zip")
    with open(tmp_path / "huge.zip", "wb") as huge:
        huge.truncate(MAX_ARCHIVE + 1)
    for path in (Path("/dev/zero"), tmp_path / "pipe.zip", tmp_path, tmp_path / "huge.zip", tmp_path / "none.zip"):
        with pytest.raises(ArchiveError) as caught:
            read(path)
        assert path.name in str(caught.value)


def test_damage_anywhere_is_an_error_or_harmless(tmp_path: Path) -> None:
    good, path = zip_of(GOOD), tmp_path / "damaged.zip"
    for position in range(0, len(good), 7):
        path.write_bytes(good[:position] + bytes([good[position] ^ 0x41]) + good[position + 1 :])
        try:
            assert set(read(path)) == set(PARTS)
        except ArchiveError:
            continue
    for length in range(0, len(good), 41):
        path.write_bytes(good[:length])
        with pytest.raises(ArchiveError):
            read(path)

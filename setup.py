"""Builds the native CPU library where a C++ compiler is at hand; without one the installation still succeeds.

The library is plain C++ behind a C interface, not a Python extension: see kernels/cpu/compile.py, which the loader
also uses to build it on first use.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent


def load_compile() -> ModuleType:
    """kernels/cpu/compile.py by its path: the tree being built need not be importable."""
    spec = importlib.util.spec_from_file_location("flint_compile", ROOT / "kernels" / "cpu" / "compile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


COMPILE = load_compile()


class BuildNative(build_ext):
    """Compiles the library into kernels/cpu; a missing or failing compiler is a warning."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], COMPILE.library_name()))

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name))
        for stale in output.parent.glob("libflint_cpu-*.so"):
            stale.unlink()
        try:
            COMPILE.compile_library(output)
        except COMPILE.NoCompiler as problem:
            self.warn(f"the native CPU decoder was not built ({problem}); flint will decode with torch, more slowly")

    def copy_extensions_to_source(self) -> None:
        for stale in (ROOT / "kernels" / "cpu").glob("libflint_cpu-*.so"):
            stale.unlink()
        super().copy_extensions_to_source()


setup(
    # optional: setuptools then accepts that the file is not there.
    ext_modules=[Extension("kernels.cpu.libflint_cpu", sources=[], optional=True)],
    cmdclass={"build_ext": BuildNative},
)

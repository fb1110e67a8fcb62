"""Builds the shared-memory kernel as a plain shared library inside the package.

It sees neither Python's nor torch's headers, so one wheel serves every Python. A host without a
compiler installs the package without it; ranks then talk through Gloo.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/paceline/comm/csrc")


class BuildLibrary(build_ext):
    """Names the library for ctypes: no suffix that ties it to one Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return list(ext.export_symbols)


class AnyPythonWheel(bdist_wheel):
    """Tags the wheel for the platform alone."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


kernel = Extension(
    "paceline.comm.libpaceline_shm",
    sources=[str(path) for path in sorted(SOURCES.glob("*.c"))],
    depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
    # Without contraction every processor rounds alike; without traps loops with comparisons vectorise.
    extra_compile_args=[
        "-std=gnu11",
        "-O3",
        "-g0",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-pthread",
        "-Wall",
        "-Wextra",
    ],
    extra_link_args=["-pthread"],
    optional=True,
)

setup(ext_modules=[kernel], cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPythonWheel})

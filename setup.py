"""Packaging of kvedit: three import packages, one SGLang plugin entry point, one command."""

from __future__ import annotations

import platform

from setuptools import Extension, find_packages, setup

# Optional compiled parts of kvedit_kernels are appended here. Every entry sets `optional=True`
# (a host without a compiler still installs) and is named "kvedit_kernels.<module>".
EXT_MODULES: list[Extension] = []

# The CPU relocation kernel, one build per instruction set; the fastest that the processor has is
# chosen at load time. Plain shared libraries: nothing in them depends on Python or torch.
_CPU_BUILDS = {"_relocate_cpu": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    _CPU_BUILDS["_relocate_cpu_v3"] = ["-march=x86-64-v3"]
    _CPU_BUILDS["_relocate_cpu_v4"] = ["-march=x86-64-v4", "-mprefer-vector-width=512"]
_CPU_FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-strict-aliasing", "-pthread"]
EXT_MODULES += [
    Extension(
        f"kvedit_kernels.{name}",
        ["kernels/kvedit_kernels/relocate_cpu.cpp"],
        extra_compile_args=[*_CPU_FLAGS, *flags],
        extra_link_args=["-pthread"],
        optional=True,
    )
    for name, flags in _CPU_BUILDS.items()
]
CMDCLASS: dict[str, type] = {}

setup(
    name="kvedit",
    version="0.1.0",
    description="Text compiled once, spliced into any prompt of an SGLang server at any offset",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[
        *find_packages(include=["kvedit", "kvedit.*", "sglang_patches", "sglang_patches.*"]),
        *find_packages(where="kernels", include=["kvedit_kernels", "kvedit_kernels.*"]),
    ],
    # `kernels` itself is no package: SGLang imports the PyPI package of that name.
    package_dir={"kvedit_kernels": "kernels/kvedit_kernels"},
    package_data={"kvedit.workbench.demo": ["data/*.md"]},
    ext_modules=EXT_MODULES,
    cmdclass=CMDCLASS,
    install_requires=["sglang==0.5.23", "msgspec", "numpy", "orjson", "pyzmq"],
    extras_require={
        "dev": [
            "pytest",
            "hypothesis",
            "ruff",
            "mypy",
            "matplotlib",
            # clients that must see a plain server
            "openai",
            "anthropic",
            "langchain-openai",
            "litellm",
        ],
        "models": ["gguf", "accelerate"],
    },
    entry_points={
        "sglang.srt.plugins": [
            "kvedit = sglang_patches.plugin:register",
            # Apart from the above, so that a stock server gets the same CPU attention.
            "kvedit_cpu = sglang_patches.cpu.adaptations:register",
        ],
        "console_scripts": ["kvedit = kvedit.cli.main:main"],
    },
)

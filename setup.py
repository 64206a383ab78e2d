# SPDX-License-Identifier: Apache-2.0
"""All metadata lives in pyproject.toml.

The package is pure Python today, so there is nothing to compile. The native planner and the CUDA kernels
will be built from here once csrc/ exists.
"""

from setuptools import setup

setup()

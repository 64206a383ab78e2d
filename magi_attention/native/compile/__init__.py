# SPDX-License-Identifier: Apache-2.0
"""One library from its sources: ninja, the step that runs a compiler, and what the compiler said."""

# SPDX-License-Identifier: Apache-2.0
"""What is asked of a call before it runs: its tensors, its dtype, and whether all ranks mean the same."""

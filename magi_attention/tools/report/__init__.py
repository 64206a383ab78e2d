# SPDX-License-Identifier: Apache-2.0
"""Plans and runs as self-contained HTML pages. Pictures of a run need matplotlib (`[report]`)."""

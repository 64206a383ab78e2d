# SPDX-License-Identifier: Apache-2.0
"""Pictures of plans and runs, and one self-contained HTML page. Needs matplotlib (`[report]`)."""

# SPDX-License-Identifier: Apache-2.0
"""Exchange over memory that all ranks of one NVLink domain can address."""

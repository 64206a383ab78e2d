# SPDX-License-Identifier: Apache-2.0
"""What moves rows between GPUs: over NVLink (``symm``), and over NVSHMEM and GIN, which share ``calls``."""

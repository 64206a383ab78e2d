# SPDX-License-Identifier: Apache-2.0
"""What stands beside attention: ``launch``, ``doctor``, ``report``, ``profiling``, ``simulate``.

The command line is made of them, and attention imports none of them. Each can also be imported by its former path, such
as ``magi_attention.simulate``.
"""

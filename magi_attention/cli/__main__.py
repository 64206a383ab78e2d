# SPDX-License-Identifier: Apache-2.0
"""`python -m magi_attention.cli`, which is what `./magi` starts."""

import sys

from magi_attention.cli import main

sys.exit(main())

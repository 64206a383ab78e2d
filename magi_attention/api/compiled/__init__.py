# SPDX-License-Identifier: Apache-2.0
"""What ``torch.compile`` sees of keys and plans."""

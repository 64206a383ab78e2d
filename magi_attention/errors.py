# SPDX-License-Identifier: Apache-2.0
"""Every error that the package raises on purpose.

The published 1.1.x API raised ``AssertionError`` for many caller mistakes where ``ValueError`` is the
right type. The classes below are both, so that old ``except`` clauses and new ones work alike.
Messages are sentences that end with what to do.
"""

from __future__ import annotations


class MagiError(Exception):
    """Base class of all errors of this package."""


class RangeError(MagiError, ValueError):
    """A half-open range is malformed (``start > end`` or a negative bound)."""


class ContractError(MagiError, ValueError, AssertionError):
    """The caller broke a documented rule; where 1.1.x asserted, this is also an ``AssertionError``."""


class ArgumentTypeError(ContractError, TypeError):
    """An argument is of a type that the function has no use for."""


class UsedTwiceError(ContractError, RuntimeError):
    """An object that serves once was asked to serve again."""


class UnsupportedError(MagiError, NotImplementedError):
    """The request is meaningful but this build cannot do it."""


class NoBackendError(MagiError, AssertionError, RuntimeError):
    """No kernel backend can run the problem; the text lists each backend with its reason."""


class UnknownKeyError(MagiError, ValueError):
    """A runtime key was never made for this process group or was cleared."""


class PlanMismatchError(MagiError, RuntimeError):
    """Two ranks of one group hold different plans or call with different shapes."""


class PeerFailureError(MagiError, RuntimeError):
    """Another rank failed or did not arrive in time; the text names the rank and the reason."""


class DispatchError(MagiError, RuntimeError):
    """Dispatch left a rank without chunks."""


class BuildError(MagiError, RuntimeError):
    """Native code could not be compiled, or what was compiled breaks a rule of the build."""


class LaunchError(MagiError, ValueError):
    """A launch was asked for that cannot be started as it is; nothing was started."""

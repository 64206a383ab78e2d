# SPDX-License-Identifier: Apache-2.0
"""Launching on one machine or many: a typed spec -> exact argv or manifest -> an existing engine.

``spec`` what is wanted; ``engines`` turn it into a ``LaunchPlan``, a value that holds every command and file;
``supervise`` runs the commands; ``node`` is what they start on each machine, and it starts torchrun; ``session``
keeps what is known in files. Needs neither torch nor a daemon.
"""

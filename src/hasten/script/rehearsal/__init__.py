"""Rehearsal: run an unmodified script for a few steps on the simulated device, and watch it."""

from __future__ import annotations

from hasten.script.rehearsal.launch import rehearse
from hasten.script.rehearsal.request import Outcome, Request

__all__ = ["Outcome", "Request", "rehearse"]

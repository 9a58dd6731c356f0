"""Where batches are wanted: what a plan does for that, once they are made."""

from __future__ import annotations

from dataclasses import replace

import torch

from hasten.devices import runtime
from hasten.feed.options import Options
from hasten.feed.plan import Plan


def to_place(plan: Plan, options: Options, device: torch.device | None) -> Plan:
    """The plan, with how its batches come to this device (None: they stay on the host)."""
    transformed = options.device_transform is not None and device is not None
    if device is None or runtime.is_host(device):
        # Asked only where it matters: it begins to use the device, whose forks then cannot.
        there = runtime.accelerator() if options.pin_memory is True else None
        pin = there is not None and runtime.can_pin(there)
        said = "" if device is None else "the loop computes in host memory: nothing is copied"
        return replace(plan, pinned=pin, transformed=transformed, blocked=said)
    if plan.name == "resident":
        return replace(plan, transformed=transformed)
    can_pin = runtime.can_pin(device)
    pin = can_pin and options.pin_memory is not False
    beside = runtime.can_overlap(device)
    ahead = 2 if beside and runtime.stream(device) is not None else 0
    return replace(
        plan,
        pinned=pin,
        copied=True,
        ahead_batches=ahead,
        blocked=why_not_beside(device, pin=pin, can_pin=can_pin, ahead=ahead),
        transformed=transformed,
    )


def why_not_beside(device: torch.device, *, pin: bool, can_pin: bool, ahead: int) -> str:
    """Why copies to the device wait for, or hold up, its computation; "" where they do not."""
    if not ahead and device.type == "mps":
        return "on Apple's GPUs a non-blocking copy may read memory that has changed by then"
    if not ahead and runtime.can_overlap(device):
        return f"{device} gives no second queue for them"
    if not ahead:
        return f"{device.type} has no asynchronous copies"
    if runtime.copy_engines(device) == 0:
        return f"{device} has no copy engine of its own (a slice of a GPU?): it computes or copies"
    if pin:
        return ""
    if not can_pin:
        return f"memory cannot be page-locked for {device}, so each copy goes through a buffer"
    return "pin_memory=False: a copy from pageable memory holds up the host until it is done"

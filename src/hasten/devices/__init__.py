"""Devices: select, describe, measure, move, same-device checks."""
